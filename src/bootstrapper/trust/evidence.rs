//! Evidence for the join service of this machine, whose pod has no TPM: `bootstrapper
//! --serve-evidence`, a service of the host that systemd starts when the pod connects to the unix
//! socket.
//!
//! The pod gets no device of the TPM, because only a privileged container may use one. The host's
//! service makes documents only for the strong form of attested TLS, and only in the role of the
//! join service. The service sets the role itself: the caller cannot choose it. So a program that
//! can use the socket can pose as the join service of this machine, but not as its init server,
//! recovery server or key service, and not as this machine when it joins or rejoins.

use std::fmt;
use std::io::{self, Read, Write};
use std::ops::RangeInclusive;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;

use attest::{DocumentRequest, IssueError, Issuer, PeerRole, wire};
use proto::evidence::{EvidenceRequest, EvidenceResponse};
use proto::verify::USER_DATA;
use sys::poll::Poller;
use tpm::Bank;
use verifier::NamedRegister;

/// How long the program waits for another caller before it exits; systemd starts it again.
const IDLE: Duration = Duration::from_secs(60);
/// Maximum number of callers that are served at once. The TPM serves one after the other.
const CALLERS: usize = 8;
/// Time limit to read a caller's request, and time limit to send the response.
const LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of a request in bytes.
const MAX_REQUEST: u64 = 4096;
/// Length of a nonce in bytes, as in attested TLS.
const NONCE: RangeInclusive<usize> = 16..=64;
/// Length of a nonce for the verification service in bytes. Together with the user data's prefix of
/// 13 bytes it is shorter than the input that any form of attested TLS hashes: 32 bytes and a nonce
/// of at least 16. So a verification document is not valid in attested TLS, and a document of
/// attested TLS is not valid for the verification service.
const VERIFICATION_NONCE: RangeInclusive<usize> = 16..=32;
/// Maximum number of PCR banks: the number that this program knows.
const BANKS: usize = 4;
/// Interval between two checks of the running calls.
const TICK: Duration = Duration::from_millis(50);

/// The evidence of this machine.
pub struct Attester {
    /// Signs with the TPM.
    pub issuer: Arc<dyn Issuer>,
    /// The TPM.
    pub tpm: tpm::Location,
}

/// Returns whether the machine has measured a cluster ID in this boot.
pub fn is_marked(tpm: &tpm::Location) -> Result<bool, tpm::Error> {
    Ok(!attest::cluster_register(tpm)?.is_fresh())
}

/// Serves the socket that systemd passed to this program. Returns when nobody has called for a
/// minute.
pub fn serve(evidence: Attester) -> Result<(), Error> {
    let listener = sys::activation::listener().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NoSocket,
        _ => Error::Socket(error),
    })?;
    accept(&listener, &Arc::new(evidence), IDLE).map_err(Error::Accept)
}

/// Why the socket is not served.
#[derive(Debug)]
pub enum Error {
    /// systemd passed no socket.
    NoSocket,
    /// The socket that systemd passed cannot be used.
    Socket(io::Error),
    /// Callers cannot be accepted.
    Accept(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoSocket => f.write_str(
                "systemd passed no socket: firstlight-evidence.socket starts this program",
            ),
            Error::Socket(error) => write!(f, "the socket that systemd passed: {error}"),
            Error::Accept(error) => write!(f, "evidence: {error}"),
        }
    }
}

/// Why a caller gets no evidence; `Display` is a sentence for the log of the join service.
#[derive(Debug, PartialEq, Eq)]
enum Refused {
    /// This machine belongs to no cluster.
    NoMember,
    /// The request is malformed: why.
    Malformed(String),
    /// The request is for both a session and a verification.
    Both,
    /// The nonce has this length, expected one of this range.
    Nonce(usize, RangeInclusive<usize>),
    /// The digest of the connection has this length.
    Session(usize),
    /// The request names an unknown bank, or too many.
    Bank,
    /// The TPM made no evidence: why.
    Failed(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::NoMember => f.write_str(
                "this machine belongs to no cluster (PCR 15 is zero), so it makes no evidence for a join service",
            ),
            Refused::Malformed(why) | Refused::Failed(why) => f.write_str(why),
            Refused::Both => f.write_str("the request is for both a session and a verification"),
            Refused::Nonce(len, range) => write!(
                f,
                "the nonce has {len} bytes, expected {} to {}",
                range.start(),
                range.end()
            ),
            Refused::Session(len) => write!(
                f,
                "the digest of the connection has {len} bytes, expected 32"
            ),
            Refused::Bank => f.write_str("the request names a bank that does not exist"),
        }
    }
}

impl From<tpm::Error> for Refused {
    fn from(error: tpm::Error) -> Refused {
        Refused::Failed(error.to_string())
    }
}

impl From<IssueError> for Refused {
    fn from(error: IssueError) -> Refused {
        Refused::Failed(error.to_string())
    }
}

/// Serves callers. Returns when no caller comes for `idle`.
pub fn accept(listener: &UnixListener, evidence: &Arc<Attester>, idle: Duration) -> io::Result<()> {
    let (poller, mut ready) = (Poller::new()?, vec![]);
    listener.set_nonblocking(true)?;
    loop {
        while Arc::strong_count(evidence) > CALLERS {
            thread::sleep(TICK);
        }
        poller.watch_once(listener, 0)?;
        poller.wait(&mut ready, idle)?;
        match listener.accept() {
            Ok((stream, _)) => {
                let evidence = evidence.clone();
                thread::Builder::new()
                    .name("evidence".into())
                    .spawn(move || evidence.talk(stream))?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let is_idle = ready.is_empty() && Arc::strong_count(evidence) == 1;
                if is_idle {
                    return Ok(());
                }
            }
            // the caller has gone
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
    }
}

impl Attester {
    fn talk(&self, mut stream: UnixStream) {
        let answered = receive(&mut stream).and_then(|request| {
            let response = self.answer(&request).unwrap_or_else(|error| {
                log::warn!("cannot give evidence to the join service: {error}");
                EvidenceResponse {
                    error: error.to_string(),
                    ..EvidenceResponse::default()
                }
            });
            stream.set_write_timeout(Some(LIMIT))?;
            stream.write_all(&response.encode_to_vec())
        });
        if let Err(error) = answered {
            log::debug!("cannot answer a caller of the evidence socket: {error}");
        }
    }

    /// Returns the evidence for this request of a caller.
    fn answer(&self, request: &[u8]) -> Result<EvidenceResponse, Refused> {
        let request = rpc::grpc::decode::<EvidenceRequest>(request, "request")
            .map_err(|status| Refused::Malformed(status.message().to_owned()))?;
        if !is_marked(&self.tpm)? {
            return Err(Refused::NoMember);
        }
        let identity = self.issuer.identity()?;
        let document = match (request.verification, request.session.is_empty()) {
            (true, true) => self.verification(&request.nonce)?,
            (true, false) => return Err(Refused::Both),
            (false, true) => vec![],
            (false, false) => self.document(request)?,
        };
        Ok(EvidenceResponse {
            identity: Some(wire::identity(self.issuer.oid(), identity)),
            document,
            error: String::new(),
        })
    }

    /// Returns a document for any caller, as Constellation's verification service does.
    fn verification(&self, nonce: &[u8]) -> Result<Vec<u8>, Refused> {
        check_nonce(nonce, VERIFICATION_NONCE)?;
        Ok(self.issuer.issue_for_stranger(USER_DATA, nonce)?)
    }

    fn document(&self, request: EvidenceRequest) -> Result<Vec<u8>, Refused> {
        let session = request.session.as_slice().try_into();
        let session = session.map_err(|_| Refused::Session(request.session.len()))?;
        check_nonce(&request.nonce, NONCE)?;
        let banks = request.banks.iter().map(|id| Bank::with_id(*id));
        let banks: Option<Vec<Bank>> = banks.collect();
        let banks = banks
            .filter(|banks| banks.len() <= BANKS)
            .ok_or(Refused::Bank)?;
        let challenge = request.challenge.map(wire::read_credential).transpose();
        let challenge = challenge.map_err(|why| Refused::Malformed(why.to_string()))?;
        let request = DocumentRequest {
            role: PeerRole::JoinService,
            session,
            nonce: &request.nonce,
            banks: &banks,
            challenge: challenge
                .as_ref()
                .map(|(kind, credential)| (*kind, credential)),
            for_stranger: true,
        };
        Ok(self.issuer.prove(&request)?)
    }
}

fn check_nonce(nonce: &[u8], length: RangeInclusive<usize>) -> Result<(), Refused> {
    if length.contains(&nonce.len()) {
        Ok(())
    } else {
        Err(Refused::Nonce(nonce.len(), length))
    }
}

/// Reads a request until the caller closes its sending side.
fn receive(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    stream.set_nonblocking(false)?;
    let end = Instant::now() + LIMIT;
    let (mut request, mut part) = (vec![], [0; 512]);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return Ok(request),
            Ok(len) if (request.len() + len) as u64 <= MAX_REQUEST => {
                request.extend_from_slice(&part[..len]);
            }
            Ok(_) => return Err(io::Error::other("its request is too long")),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::path::Path;

    use attest::session::user_data;
    use attest::{IssueError, Oid, qemu_vtpm};
    use support::mutation::mutations;
    use support::swtpm::Swtpm;
    use tpm::Tpm;

    use super::*;

    /// A test issuer: the document is the data that it binds.
    struct Echo;

    impl Issuer for Echo {
        fn oid(&self) -> Oid {
            qemu_vtpm::OID
        }

        fn issue(&self, user_data: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
            Ok(user_data.to_vec())
        }
    }

    /// Returns the evidence of a machine with this TPM, and the TPM of a member.
    fn member() -> (Swtpm, Arc<Attester>) {
        let swtpm = Swtpm::start();
        let tpm: tpm::Location = swtpm.location().parse().unwrap();
        Tpm::open(&tpm)
            .unwrap()
            .measure_cluster_id(&[1; 32])
            .unwrap();
        let issuer = Arc::new(Echo);
        (swtpm, Arc::new(Attester { issuer, tpm }))
    }

    fn request() -> EvidenceRequest {
        EvidenceRequest {
            session: vec![2; 32],
            nonce: vec![3; 32],
            banks: vec![Bank::Sha256 as u32],
            challenge: None,
            verification: false,
        }
    }

    fn call(socket: &Path, request: &[u8]) -> EvidenceResponse {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(request).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut response = vec![];
        stream.read_to_end(&mut response).unwrap();
        EvidenceResponse::decode(&response[..]).unwrap()
    }

    #[test]
    fn a_member_proves_itself_only_as_a_join_service_of_the_strong_form() {
        let (_swtpm, evidence) = member();
        let response = evidence.answer(&request().encode_to_vec()).unwrap();
        assert_eq!(
            response.document,
            user_data(PeerRole::JoinService, &[2; 32], &[]),
            "the role does not come from the caller"
        );
        let verification = EvidenceRequest {
            nonce: vec![3; 32],
            verification: true,
            ..EvidenceRequest::default()
        };
        let response = evidence.answer(&verification.encode_to_vec()).unwrap();
        assert_eq!(response.document, USER_DATA);
        let identity = evidence.answer(&[]).unwrap();
        assert_eq!(
            (identity.identity.unwrap().variant, identity.document),
            (qemu_vtpm::OID.to_vec(), vec![])
        );
    }

    #[test]
    fn a_machine_of_no_cluster_gives_no_evidence() {
        let swtpm = Swtpm::start();
        let tpm = swtpm.location().parse().unwrap();
        let issuer = Arc::new(Echo);
        let refused = Attester { issuer, tpm }.answer(&[]).err();
        assert_eq!(refused, Some(Refused::NoMember));
    }

    #[test]
    fn what_is_wrong_with_a_request_is_named() {
        let (_swtpm, evidence) = member();
        type Change = fn(&mut EvidenceRequest);
        let changes: [(Refused, Change); 6] = [
            (Refused::Nonce(33, VERIFICATION_NONCE), |it| {
                it.session.clear();
                it.verification = true;
                it.nonce.push(3);
                it.nonce.truncate(33);
            }),
            (Refused::Both, |it| {
                it.verification = true;
            }),
            (Refused::Session(31), |it| {
                it.session.pop();
            }),
            (Refused::Nonce(0, NONCE), |it| it.nonce.clear()),
            (Refused::Bank, |it| it.banks.push(7)),
            (Refused::Bank, |it| it.banks = vec![Bank::Sha256 as u32; 5]),
        ];
        for (expected, change) in changes {
            let mut request = request();
            change(&mut request);
            let refused = evidence.answer(&request.encode_to_vec()).err();
            assert_eq!(refused, Some(expected));
        }
        let refused = evidence.answer(&[0xff; 7]).err();
        assert!(matches!(refused, Some(Refused::Malformed(_))));
    }

    #[test]
    fn hostile_requests_are_answered_without_a_panic() {
        let (_swtpm, evidence) = member();
        for bytes in mutations(&request().encode_to_vec(), 300) {
            if let Ok(response) = evidence.answer(&bytes) {
                assert!(matches!(response.document.len(), 0 | 13 | 32));
            }
        }
    }

    #[test]
    fn several_callers_are_served_and_silent_or_endless_ones_delay_nobody_then_it_ends() {
        let (_swtpm, evidence) = member();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("evidence.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let serving = evidence.clone();
        drop(evidence);
        let server = thread::spawn(move || accept(&listener, &serving, Duration::from_millis(300)));
        let silent = UnixStream::connect(&path).unwrap();
        let mut endless = UnixStream::connect(&path).unwrap();
        let sent = endless.write_all(&[0; 1 << 20]);
        assert!(sent.is_err(), "more than a request was read");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let response = call(&path, &request().encode_to_vec());
                    assert_eq!((response.document.len(), response.error), (32, "".into()));
                });
            }
        });
        assert!(!server.is_finished(), "a caller is still there");
        drop((silent, endless));
        server.join().unwrap().unwrap();
    }
}
