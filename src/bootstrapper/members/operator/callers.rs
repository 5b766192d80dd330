//! Authenticates operators who call a member.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base::file;
use proto::operator::Caller;
use rpc::grpc::{Call, Code, Status};
use ssh::certificate::{self, UserCertificate};
use ssh::{OPERATOR, OPERATOR_NAMESPACE, READER, host, signature};

use base::sync::lock;

/// Below the mount point of the state disk: the fingerprints of keys that are refused, one a line.
const REVOKED: &str = "firstlight/revoked-operator-keys";
/// Maximum number of such keys.
const MAX_REVOKED: usize = 1000;
/// A certificate must not be valid for longer, because only the nodes that an operator asked know a revoked key.
const MAX_VALIDITY: Duration = Duration::from_secs(31 * 24 * 3600);

/// The right that a call requires.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Right {
    /// Reading logs and facts.
    Read,
    /// All else.
    Change,
}

/// A caller who has proven to be an operator.
pub struct OperatorCaller {
    /// The name in the certificate.
    pub name: String,
    /// The fingerprint of the key.
    pub key: String,
}

/// Knows the cluster's authority for operators, and the keys that are refused.
pub struct OperatorCallers {
    root: PathBuf,
    /// Taken while the file of revoked keys is changed.
    revoking: Mutex<()>,
}

impl OperatorCallers {
    /// Reads from the state disk that is mounted at `root`, at each call: a rejoin may bring another authority.
    pub fn of(root: &Path) -> OperatorCallers {
        OperatorCallers {
            root: root.into(),
            revoking: Mutex::new(()),
        }
    }

    /// Returns the operator who calls, if the certificate gives this right. A caller without a certificate of this cluster learns only
    /// that it is refused; the log says why.
    pub fn of_call(
        &self,
        call: &Call,
        caller: Option<&Caller>,
        right: Right,
    ) -> Result<OperatorCaller, Status> {
        let binding = call.binding().ok_or_else(|| {
            Status::new(Code::FailedPrecondition, "the connection is not TLS 1.3")
        })?;
        let no_caller = Caller::default();
        self.of_proof(
            binding,
            caller.unwrap_or(&no_caller),
            right,
            SystemTime::now(),
        )
        .map_err(|refused| refused.status(call))
    }

    fn of_proof(
        &self,
        binding: &[u8],
        caller: &Caller,
        right: Right,
        now: SystemTime,
    ) -> Result<OperatorCaller, Refused> {
        let authority =
            host::authority(&self.root).map_err(|error| Refused::NoAuthority(error.to_string()))?;
        let verified = UserCertificate::verify(&caller.certificate, &authority, now);
        let certificate = verified.map_err(|error| match error {
            // only an owner of a certificate of this cluster learns this
            certificate::Error::Time { .. } => Refused::Time(error.to_string(), now),
            error => Refused::Unproven(format!("certificate: {error}")),
        })?;
        signature::verify(
            &caller.signature,
            &certificate.key,
            OPERATOR_NAMESPACE,
            binding,
        )
        .map_err(|error| Refused::Unproven(format!("signature: {error}")))?;
        if certificate.validity > MAX_VALIDITY {
            let days = MAX_VALIDITY.as_secs() / (24 * 3600);
            return Err(Refused::Right(format!(
                "the certificate is valid for longer than {days} days"
            )));
        }
        let key = certificate.key.fingerprint();
        if self.revoked().map_err(Refused::Broken)?.contains(&key) {
            return Err(Refused::Right(format!(
                "the key {key} is revoked on this node"
            )));
        }
        let is_enough =
            certificate.is_for(OPERATOR) || right == Right::Read && certificate.is_for(READER);
        if !is_enough {
            return Err(Refused::Right(format!(
                "the certificate is not for the principal {OPERATOR}"
            )));
        }
        Ok(OperatorCaller {
            name: certificate.id,
            key,
        })
    }

    /// Revokes a key, or with `undo` accepts it again.
    pub fn revoke(&self, fingerprint: &str, undo: bool) -> Result<(), Status> {
        let _alone = lock(&self.revoking);
        let broken = |error: io::Error| Refused::Broken(error).to_status();
        let mut all = self.revoked().map_err(broken)?;
        if undo {
            all.remove(fingerprint)
        } else {
            all.insert(fingerprint.to_owned())
        };
        if all.len() > MAX_REVOKED {
            return Err(Status::new(
                Code::ResourceExhausted,
                format!("this node already has {MAX_REVOKED} revoked keys, the maximum"),
            ));
        }
        let lines: String = all.iter().map(|key| format!("{key}\n")).collect();
        file::replace(&self.root.join(REVOKED), lines.as_bytes(), 0o600).map_err(broken)
    }

    fn revoked(&self) -> io::Result<BTreeSet<String>> {
        match fs::read_to_string(self.root.join(REVOKED)) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(error) => Err(error),
        }
    }
}

/// Checks that the text is a fingerprint, as ssh-keygen prints it.
pub fn check_fingerprint(text: &str) -> Result<(), Status> {
    let is_base64 = |it: u8| it.is_ascii_alphanumeric() || it == b'+' || it == b'/';
    let digest = text.strip_prefix("SHA256:").unwrap_or_default();
    if digest.len() == 43 && digest.bytes().all(is_base64) {
        Ok(())
    } else {
        Err(Status::new(
            Code::InvalidArgument,
            "expected the fingerprint of a key: SHA256: and 43 characters",
        ))
    }
}

/// Why a caller is refused.
#[derive(Debug)]
enum Refused {
    /// It has not proven to be an operator of this cluster.
    Unproven(String),
    /// The certificate is not valid at this time of this node.
    Time(String, SystemTime),
    /// An operator of this cluster, who may not make this call.
    Right(String),
    /// The state disk has no authority for operators.
    NoAuthority(String),
    /// The state disk cannot be read or written.
    Broken(io::Error),
}

impl Refused {
    fn status(self, call: &Call) -> Status {
        let peer = call
            .peer()
            .map_or("an unknown address".into(), |peer| peer.ip().to_string());
        match &self {
            Refused::Unproven(why)
            | Refused::Time(why, _)
            | Refused::Right(why)
            | Refused::NoAuthority(why) => {
                log::warn!("refused an operator's call from {peer}: {why}");
            }
            Refused::Broken(error) => log::warn!("cannot use {REVOKED} on the state disk: {error}"),
        }
        self.to_status()
    }

    fn to_status(&self) -> Status {
        match self {
            Refused::Unproven(_) => Status::new(
                Code::Unauthenticated,
                "the caller has not proven to be an operator of this cluster",
            ),
            Refused::Time(why, now) => {
                let clock = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                Status::new(Code::Unauthenticated, format!("the certificate: {why}"))
                    .with_details(clock.to_be_bytes().to_vec())
            }
            Refused::Right(why) => Status::new(Code::PermissionDenied, why.clone()),
            Refused::NoAuthority(why) => Status::new(
                Code::FailedPrecondition,
                format!(
                    "this node has no authority for operators, because it joined with an old version: {why}"
                ),
            ),
            Refused::Broken(error) => Status::new(
                Code::Internal,
                format!("the node cannot use {REVOKED} on its state disk: {error}"),
            ),
        }
    }
}
