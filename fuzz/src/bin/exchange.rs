//! The messages of the strong form of attested TLS, which a peer of either role sends after the handshake. Only a proof that was
//! made for this connection may be accepted.
#![no_main]

use libfuzzer_sys::fuzz_target;

// the included files use these paths

#[allow(dead_code, unused_imports)] // this fuzzer does not use everything in the files
#[path = "../../../src/atls"]
mod atls {
    mod certificate;
    mod client;
    mod error;
    mod exchange;
    mod forms;
    mod handshake;
    mod hello;
    mod nonce;
    mod provider;
    mod stream;
    mod verdict;

    use std::io::Write;
    use std::net::{Shutdown, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, LazyLock};
    use std::time::{Duration, Instant};

    pub use client::Client;
    pub use error::Error;
    use rustls::sign::{CertifiedKey, SingleCertAndKey};
    use rustls::{Connection, ServerConfig, ServerConnection};
    pub use stream::split;
    use transport::half_open::PeersTurn;

    use self::exchange::End;
    use self::handshake::Timed;
    use tpm::{Credential, EndorsementKind};
    use verifier::{
        CredentialChallenge, DocumentRequest, Evidence, Identified, IssueError, Issuer,
        MachineIdentity, Oid, PeerRole, Properties, Refusal, Validator,
    };

    /// The items of `src/atls/lib.rs` that the files use.
    const ALPN_H2: &[u8] = b"h2";

    const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x01];
    const SECRET: [u8; 32] = [3; 32];

    /// A variant whose document is the user data. It challenges peers that have an endorsement key.
    struct Dummy;

    impl Issuer for Dummy {
        fn oid(&self) -> Oid {
            OID
        }

        fn issue(&self, user_data: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
            Ok(user_data.to_vec())
        }

        fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
            let secret: &[u8] = if request.challenge.is_some() {
                &SECRET
            } else {
                &[]
            };
            Ok(request.user_data(secret).to_vec())
        }
    }

    impl Validator for Dummy {
        fn properties(&self) -> Properties {
            Properties {
                oid: OID,
                challenges: true,
                takes_collateral: true,
                requires_strong: false,
                believes_any_tpm: true,
            }
        }

        fn challenge(
            &self,
            peer: &MachineIdentity,
        ) -> Result<Option<CredentialChallenge>, Refusal> {
            let kind = peer
                .endorsements
                .first()
                .map(|endorsement| endorsement.kind);
            Ok(kind.map(|kind| CredentialChallenge {
                kind,
                credential: Credential {
                    blob: vec![1; 66],
                    secret: vec![2; 256],
                },
                secret: SECRET.into(),
                certified_by: String::new(),
                tpm: None,
            }))
        }

        fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
            Ok(Identified {
                user_data: evidence.document.to_vec(),
                ..Identified::default()
            })
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }
    }

    static KEY: LazyLock<Arc<CertifiedKey>> =
        LazyLock::new(|| certificate::issue(None, &[], false).expect("a certificate"));

    /// Returns a client and a server that have completed a handshake with each other.
    fn connected() -> [Connection; 2] {
        static SERVER: LazyLock<Arc<ServerConfig>> = LazyLock::new(|| {
            let resolver = Arc::new(SingleCertAndKey::from(CertifiedKey::clone(&KEY)));
            let config = ServerConfig::builder_with_provider(Arc::new(
                // without ML-KEM, which takes most of the time
                rustls::crypto::ring::default_provider(),
            ));
            let config = config
                .with_protocol_versions(&[&rustls::version::TLS13])
                .expect("it has ciphers of this version");
            Arc::new(config.with_no_client_auth().with_cert_resolver(resolver))
        });
        let client = Client::new(None, None).begin().expect("a client");
        let server = ServerConnection::new(SERVER.clone()).expect("a server");
        let mut ends = [Connection::from(client), server.into()];
        while ends.iter().any(|end| end.is_handshaking()) {
            for (from, to) in [(0, 1), (1, 0)] {
                let sent = handshake::take_output(&mut ends[from]).expect("no I/O");
                handshake::feed(&mut ends[to], &sent).expect("a genuine handshake");
            }
        }
        ends
    }

    /// Returns both ends of a connection without an address.
    fn sockets() -> [TcpStream; 2] {
        let (near, far) = UnixStream::pair().expect("sockets");
        [near, far].map(|socket| TcpStream::from(OwnedFd::from(socket)))
    }

    /// `input` is a byte of choices, followed by the peer's messages.
    pub fn check(input: &[u8]) {
        let Some((choice, sent)) = input.split_first() else {
            return;
        };
        let (role, validates, proves) = (choice & 1 == 0, choice & 2 == 0, choice & 4 == 0);
        let [client, server] = connected();
        let (mut connection, mut peer, role) = if role {
            (client, server, PeerRole::Client)
        } else {
            (server, client, PeerRole::Server)
        };
        let [near, mut far] = sockets();
        peer.writer().write_all(sent).expect("it fits the buffer");
        far.write_all(&handshake::take_output(&mut peer).expect("no I/O"))
            .expect("it fits the buffer");
        far.shutdown(Shutdown::Write).expect("it is connected");

        let validators: Vec<Arc<dyn Validator>> = if validates {
            vec![Arc::new(Dummy)]
        } else {
            vec![]
        };
        let issuer: Option<&dyn Issuer> = if proves { Some(&Dummy) } else { None };
        let end = End {
            role,
            issuer,
            judge: verifier::judge_of_any(validators).map(|judge| {
                judge.connection(&[PeerRole::Client, PeerRole::Server, PeerRole::JoinService])
            }),
            certificate: &KEY.cert[0],
        };
        let mut timed = Timed {
            socket: &near,
            deadline: Instant::now() + Duration::from_secs(5),
            turn: &PeersTurn::default(),
        };
        // the session's nonce is random, so no input contains it
        let proved = end.run(&mut connection, &mut timed, &|| Ok(None));
        assert!(!validates || proved.is_err());
    }
}

fuzz_target!(|input: &[u8]| atls::check(input));
