//! Attested TLS with a dummy attestation that any peer can issue, for tests of the layers above.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rpc::grpc::{CallOptions, Channel};
use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, Evidence, Identified, IssueError, Issuer, MachineIdentity, Oid,
    Properties, Refusal, Validator,
};

/// A dummy attestation that any peer can issue. A peer that has it is accepted; a peer without it is refused.
pub struct Anybody;

/// OID 1.3.9900.1.1, Constellation's variant for tests.
const DUMMY_OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x01];

/// Connects two ends. Returns why the client and the server end the connection.
pub fn meet(client: atls::Client, server: atls::Server) -> [Option<String>; 2] {
    let soon = Instant::now() + Duration::from_secs(60);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let server = thread::spawn(move || server.handshake(far, soon).err());
    let client = client.connect(near, soon).err();
    [client, server.join().unwrap()].map(|error| error.map(|error| error.to_string()))
}

impl Issuer for Anybody {
    fn oid(&self) -> Oid {
        DUMMY_OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Ok([user_data, nonce].concat())
    }
}

impl Validator for Anybody {
    fn properties(&self) -> Properties {
        Properties::of_any_tpm(DUMMY_OID)
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let user_data = evidence.document.strip_suffix(evidence.nonce);
        let user_data = user_data.ok_or_else(|| Kind::Unproven.because("another nonce"))?;
        Ok(Identified {
            user_data: user_data.to_vec(),
            ..Identified::default()
        })
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

pub fn attested() -> atls::Client {
    atls::Client::new(Some(Arc::new(Anybody)), None)
}

pub fn attested_channel(address: SocketAddr) -> Channel {
    let socket = TcpStream::connect(address).unwrap();
    let transport = attested()
        .connect(socket, Instant::now() + Duration::from_secs(10))
        .unwrap();
    Channel::new(transport, &address.to_string()).unwrap()
}

pub fn plain_channel(address: SocketAddr) -> Channel {
    let transport = transport::plain::transport(TcpStream::connect(address).unwrap()).unwrap();
    Channel::new(transport, &address.to_string()).unwrap()
}

pub fn within(seconds: u64) -> CallOptions {
    CallOptions {
        timeout: Some(Duration::from_secs(seconds)),
        ..CallOptions::default()
    }
}
