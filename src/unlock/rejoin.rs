//! Rejoin: the node attests itself to a join service of its cluster and receives the key of its
//! state disk.
//!
//! The node asks all join services at once ([`ticket_client`](node::ticket_client)). The node
//! proves itself, and verifies no service. It accepts a key only if the key opens the disk, if the
//! MAC in the disk's header matches the measurement secret that came with the key, and if the
//! cluster is the one in the setting `cluster-id`.

use std::sync::Arc;
use std::time::Duration;

use super::peers::MOVED;
use super::waiting::{Candidate, KeyRefused, Waiting};
use attest::Issuer;
use base::boot::timeline::Timeline;
use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::{KEY_LEN, Secret};
use base::stop::Stop;
use node::service_trust::TrustSettings;
use node::ticket_client::{JoinServicePeer, TicketFailure, TicketRequester};
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};

/// Requests the key of one disk.
pub struct Rejoin {
    /// The disk on which each key is tried.
    pub waiting: Arc<Waiting>,
    /// Attests this machine.
    pub issuer: Arc<dyn Issuer>,
    /// The settings about join services.
    pub demands: TrustSettings,
    /// Receives the events for the console.
    pub timeline: Timeline,
}

impl TicketRequester for Rejoin {
    const MAX_PAUSE: Duration = Duration::from_secs(15);
    const MAX_SERVER_PAUSE: Duration = Duration::from_secs(60);

    fn finished(&self) -> &Stop {
        self.waiting.finished()
    }

    fn issuer(&self) -> &Arc<dyn Issuer> {
        &self.issuer
    }

    fn demands(&self) -> &TrustSettings {
        &self.demands
    }

    fn request(&self, service: &JoinServicePeer) -> Result<(), TicketFailure> {
        let request = IssueRejoinTicketRequest {
            disk_uuid: self.waiting.uuid(),
        };
        let connection = service.connect(self, None)?;
        let ticket = connection.call(ISSUE_REJOIN_TICKET, &request)?;
        let mut candidate = candidate(ticket, &service.to_string())?;
        candidate.cluster = self.demands.cluster_register();
        self.timeline
            .event("ticket", format_args!("from {service}"));
        match self.waiting.offer(candidate) {
            Ok(()) | Err(KeyRefused::TooLate) => Ok(()),
            Err(refused) => Err(format!("sent a key that was not accepted: {refused}").into()),
        }
    }

    fn unanswered(&self) {
        self.waiting.hint("no key yet", MOVED);
    }

    fn asked(&self, source: &str) {
        self.waiting.hint(source, "asked, no answer yet");
    }

    fn answered(&self, source: &str) {
        self.waiting.forget(source);
    }

    fn note(&self, source: &str, failure: &TicketFailure) {
        self.waiting.note(source, failure.text.as_str());
    }

    fn forget(&self, source: &str) {
        self.waiting.forget(source);
    }
}

/// Returns the keys of a ticket, or an error that says which length is wrong. The length of the
/// measurement secret is checked because the disk cannot show that the secret is right, and a
/// cluster ID can be derived even from an empty one.
fn candidate(
    mut ticket: IssueRejoinTicketResponse,
    name: &str,
) -> Result<Candidate, TicketFailure> {
    let candidate = Candidate {
        disk_key: Secret::new(std::mem::take(&mut ticket.state_disk_key)),
        measurement_secret: Secret::new(std::mem::take(&mut ticket.measurement_secret)),
        host_certificate: std::mem::take(&mut ticket.host_certificate),
        migration_salt: migration_salt(&ticket.measurement_salt)
            .map_err(|got| format!("sent {}", wrong_salt(got)))?,
        from: name.into(),
        cluster: None,
    };
    match (candidate.disk_key.len(), candidate.measurement_secret.len()) {
        (KEY_LEN, KEY_LEN) => Ok(candidate),
        (key, secret) => Err(TicketFailure::from(format!(
            "sent a disk key of {key} bytes and a measurement secret of {secret} bytes, expected {KEY_LEN} each"
        ))),
    }
}

/// Parses the measurement salt of a ticket; `None` unless the cluster is migrating. Errors with the
/// length if it is wrong.
pub(super) fn migration_salt(bytes: &[u8]) -> Result<Option<[u8; MEASUREMENT_SALT_LEN]>, usize> {
    match bytes {
        [] => Ok(None),
        _ => bytes.try_into().map(Some).map_err(|_| bytes.len()),
    }
}

/// Describes a salt of a wrong length, as a noun phrase.
pub(super) fn wrong_salt(length: usize) -> String {
    format!("a measurement salt of {length} bytes, expected {MEASUREMENT_SALT_LEN}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_accepted_only_with_both_keys_of_full_length() {
        let ticket = |key, secret| {
            let mut ticket = IssueRejoinTicketResponse::default();
            (ticket.state_disk_key, ticket.measurement_secret) = (vec![1; key], vec![2; secret]);
            candidate(ticket, "join service")
        };
        assert!(ticket(32, 32).is_ok());
        for (key, secret) in [(0, 0), (32, 0), (32, 31), (0, 32), (33, 32)] {
            assert!(
                ticket(key, secret)
                    .err()
                    .unwrap()
                    .text
                    .contains("expected 32 each")
            );
        }
    }

    #[test]
    fn a_salt_has_full_length_or_is_absent() {
        assert_eq!(migration_salt(&[]), Ok(None));
        assert_eq!(migration_salt(&[3; 32]), Ok(Some([3; 32])));
        assert_eq!(migration_salt(&[3; 31]), Err(31));
    }
}
