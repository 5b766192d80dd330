//! What the console hears of attestation: the name of this machine's key, and each document.

use std::sync::Arc;

use attest::attestation::{IssueError, Issuer, KeyName, Oid};
use base::timeline::Timeline;
use sys::clock;

/// The name of this machine's attestation key, by which an operator accepts it.
pub fn announce_key(timeline: &Timeline, issuer: &dyn Issuer) {
    match issuer.machine() {
        Ok(Some(machine)) => match machine.parse::<KeyName>() {
            Ok(name) => timeline.event("attestation key", name),
            Err(_) => timeline.event("machine", machine),
        },
        Ok(None) => {}
        Err(error) => log::warn!("the name of the attestation key: {error}"),
    }
}

/// An issuer that notes the `quote` event each time it made a document.
pub fn noted(timeline: Timeline, inner: Arc<dyn Issuer>) -> Arc<dyn Issuer> {
    Arc::new(Noted { inner, timeline })
}

struct Noted {
    inner: Arc<dyn Issuer>,
    timeline: Timeline,
}

impl Noted {
    fn note(
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

impl Issuer for Noted {
    fn oid(&self) -> Oid {
        self.inner.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.note(|| self.inner.issue(user_data, nonce))
    }

    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.note(|| self.inner.issue_for_stranger(user_data, nonce))
    }

    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        self.inner.machine()
    }
}
