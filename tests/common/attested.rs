//! Attested TLS with a dummy attestation that any peer can issue, for tests of the layers above.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc::grpc::{CallOptions, Channel};
use transport::Transport;
use verifier::{IssueError, Issuer, Oid, ValidateError, Validator};

/// A dummy attestation that any peer can issue. A peer that has it is accepted; a peer without it is refused.
pub struct Anybody;

/// OID 1.3.9900.1.1, Constellation's variant for tests.
const DUMMY_OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x01];

impl Issuer for Anybody {
    fn oid(&self) -> Oid {
        DUMMY_OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Ok([user_data, nonce].concat())
    }
}

impl Validator for Anybody {
    fn oid(&self) -> Oid {
        DUMMY_OID
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        document
            .strip_suffix(nonce)
            .map(<[u8]>::to_vec)
            .ok_or_else(|| ValidateError("another nonce".into()))
    }
}

pub fn attested() -> atls::Client {
    atls::Client::new(Some(Arc::new(Anybody)), vec![])
}

pub fn attested_channel(address: SocketAddr) -> Channel {
    let socket = TcpStream::connect(address).unwrap();
    let transport = attested()
        .connect(socket, Instant::now() + Duration::from_secs(10))
        .unwrap();
    Channel::new(transport, &address.to_string()).unwrap()
}

pub fn plain_channel(address: SocketAddr) -> Channel {
    let transport = Transport::plain(TcpStream::connect(address).unwrap()).unwrap();
    Channel::new(transport, &address.to_string()).unwrap()
}

pub fn within(seconds: u64) -> CallOptions {
    CallOptions {
        timeout: Some(Duration::from_secs(seconds)),
        ..CallOptions::default()
    }
}
