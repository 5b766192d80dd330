//! Reports attestation on the console: the name of this machine's attestation key, and each
//! attestation document.

use std::sync::{Arc, Mutex};

use attest::{DocumentRequest, IssueError, Issuer, KeyName, MachineIdentity, Oid};
use base::boot::timeline::Timeline;
use sys::clock;

/// Reports the name of this machine's attestation key. An operator accepts the machine by this
/// name.
pub fn announce_key(timeline: &Timeline, issuer: &dyn Issuer, tpm: &tpm::Location) {
    let what = format!("{tpm:#} to give its attestation key");
    match timeline.waiting_for(what, || issuer.machine()) {
        Ok(Some(machine)) => match machine.parse::<KeyName>() {
            Ok(name) => timeline.event("attestation-key", name),
            Err(_) => timeline.event("machine", machine),
        },
        Ok(None) => {}
        Err(error) => log::warn!("cannot read the name of the attestation key: {error}"),
    }
}

/// Wraps an issuer so that it reports a `quote` event for each document, with its size and the time
/// that it took, and says when it waits for the TPM.
pub fn reported(timeline: Timeline, inner: Arc<dyn Issuer>, tpm: tpm::Location) -> Arc<dyn Issuer> {
    Arc::new(Reported {
        inner,
        timeline,
        tpm,
        waiting: Mutex::new(()),
    })
}

struct Reported {
    inner: Arc<dyn Issuer>,
    timeline: Timeline,
    tpm: tpm::Location,
    /// Held by the thread that reports that it waits for the TPM. The TPM makes one quote at a
    /// time, so one report is enough.
    waiting: Mutex<()>,
}

impl Reported {
    fn report(
        &self,
        issue: impl FnOnce() -> Result<Vec<u8>, IssueError>,
    ) -> Result<Vec<u8>, IssueError> {
        let from = clock::since_boot();
        let document = match self.waiting.try_lock() {
            Ok(_reporting) => {
                let what = format!("{:#} to sign a quote", self.tpm);
                self.timeline.waiting_for(what, issue)?
            }
            Err(_) => issue()?,
        };
        let took = clock::since_boot() - from;
        self.timeline.event(
            "quote",
            format_args!("{} bytes in {} ms", document.len(), took.as_millis()),
        );
        Ok(document)
    }
}

impl Issuer for Reported {
    fn oid(&self) -> Oid {
        self.inner.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.report(|| self.inner.issue(user_data, nonce))
    }

    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.report(|| self.inner.issue_for_stranger(user_data, nonce))
    }

    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        self.inner.identity()
    }

    fn known_identity(&self) -> Option<MachineIdentity> {
        self.inner.known_identity()
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        self.report(|| self.inner.prove(request))
    }

    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        self.inner.machine()
    }
}
