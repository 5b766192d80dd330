//! Reports attestation on the console: the name of this machine's attestation key, and each attestation document.

use std::sync::Arc;

use attest::attestation::{IssueError, Issuer, KeyName, Oid};
use base::timeline::Timeline;
use sys::clock;

/// Reports the name of this machine's attestation key. An operator accepts the machine by this name.
pub fn announce_key(timeline: &Timeline, issuer: &dyn Issuer) {
    match issuer.machine() {
        Ok(Some(machine)) => match machine.parse::<KeyName>() {
            Ok(name) => timeline.event("attestation key", name),
            Err(_) => timeline.event("machine", machine),
        },
        Ok(None) => {}
        Err(error) => log::warn!("cannot read the name of the attestation key: {error}"),
    }
}

/// Wraps an issuer so that it reports a `quote` event for each document, with its size and the time that it took.
pub fn reported(timeline: Timeline, inner: Arc<dyn Issuer>) -> Arc<dyn Issuer> {
    Arc::new(Reported { inner, timeline })
}

struct Reported {
    inner: Arc<dyn Issuer>,
    timeline: Timeline,
}

impl Reported {
    fn report(
        &self,
        issue: impl FnOnce() -> Result<Vec<u8>, IssueError>,
    ) -> Result<Vec<u8>, IssueError> {
        let from = clock::since_boot();
        let document = issue()?;
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

    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        self.inner.machine()
    }
}
