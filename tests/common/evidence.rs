//! A host that gives evidence, and a client that connects to a server whose proof is this evidence.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bootstrapper::trust::evidence::{self, Attester};
use proto::attested::Collateral;
use verifier::{DocumentRequest, IssueError, Issuer, MachineIdentity, Oid};

/// Starts a host that gives this evidence at a socket until the process ends. It replaces an earlier host at the socket.
pub fn give(evidence: Attester, socket: &Path) {
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    let host = Arc::new(evidence);
    thread::spawn(move || evidence::accept(&listener, &host, Duration::from_secs(600)));
}

/// Connects a client to a server that issues its proof with this issuer and requires none from the client. Returns the reason why
/// the client refuses the server.
pub fn meet(client: &atls::Client, issuer: Arc<dyn Issuer>) -> Result<(), String> {
    let server = atls::Server::new(None, None).attest_strong(issuer);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let deadline = Instant::now() + Duration::from_secs(60);
    let served = thread::spawn(move || server.handshake(far, deadline).map(drop));
    let met = client.connect(socket, deadline).map(drop);
    let _ = served.join().unwrap();
    met.map_err(|error| error.to_string())
}

/// An issuer with the proofs of another issuer, but with other collateral.
pub struct Bringing {
    pub issuer: Arc<dyn Issuer>,
    pub collateral: Collateral,
}

impl Issuer for Bringing {
    fn oid(&self) -> Oid {
        self.issuer.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.issuer.issue(user_data, nonce)
    }

    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        self.issuer.identity()
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        self.issuer.prove(request)
    }

    fn collateral(&self, _: &[u8]) -> Option<Collateral> {
        Some(self.collateral.clone())
    }
}
