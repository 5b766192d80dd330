//! Rejoin: the node proves to a join service of its cluster what it runs, and gets the key of its disk back.
//!
//! All join services are asked at once ([`tickets`](node::tickets)). None of them is attested to the node (the old protocol):
//! a key counts only when it opened the disk.

use std::sync::Arc;
use std::time::Duration;

use super::waiting::{Candidate, Refused, Waiting};
use attest::attestation::Issuer;
use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::{KEY_LEN, Secret};
use base::stop::Stop;
use base::timeline::Timeline;
use node::tickets::{Asker, Failure, JoinService};
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};

/// Asks for the key of one disk.
pub struct Rejoin {
    /// Where a key is tried.
    pub waiting: Arc<Waiting>,
    /// Proves what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// Tells the console.
    pub timeline: Timeline,
}

impl Asker for Rejoin {
    const LONGEST_PAUSE: Duration = Duration::from_secs(15);

    fn over(&self) -> &Stop {
        self.waiting.over()
    }

    fn issuer(&self) -> &Arc<dyn Issuer> {
        &self.issuer
    }

    fn ask(&self, service: &JoinService) -> Result<(), Failure> {
        let request = IssueRejoinTicketRequest {
            disk_uuid: self.waiting.uuid(),
        };
        let ticket = service.connect(self)?.call(ISSUE_REJOIN_TICKET, &request)?;
        let candidate = candidate(ticket, &service.to_string())?;
        self.timeline
            .event("ticket", format_args!("from {service}"));
        match self.waiting.offer(candidate) {
            Ok(()) | Err(Refused::TooLate) => Ok(()),
            Err(refused) => Err(format!("sent a key, but {refused}").into()),
        }
    }

    fn note(&self, source: &str, failure: &Failure) {
        self.waiting.note(source, failure.text.as_str());
    }
}

/// The keys of a ticket. Their lengths count: the disk does not tell whether the measurement secret is right, and the cluster
/// ID would come out of a missing one as well.
fn candidate(mut ticket: IssueRejoinTicketResponse, name: &str) -> Result<Candidate, String> {
    let candidate = Candidate {
        disk_key: Secret::new(std::mem::take(&mut ticket.state_disk_key)),
        measurement_secret: Secret::new(std::mem::take(&mut ticket.measurement_secret)),
        host_certificate: std::mem::take(&mut ticket.host_certificate),
        migration_salt: migration_salt(&ticket.measurement_salt)
            .map_err(|why| format!("sent {why}"))?,
        from: name.into(),
    };
    match (candidate.disk_key.len(), candidate.measurement_secret.len()) {
        (KEY_LEN, KEY_LEN) => Ok(candidate),
        (key, secret) => Err(format!(
            "sent a disk key of {key} bytes and a measurement secret of {secret}, expected {KEY_LEN} each"
        )),
    }
}

/// Absent unless the cluster is migrating. The error says what is wrong.
pub(super) fn migration_salt(bytes: &[u8]) -> Result<Option<[u8; MEASUREMENT_SALT_LEN]>, String> {
    match bytes.len() {
        0 => Ok(None),
        length => match bytes.try_into() {
            Ok(salt) => Ok(Some(salt)),
            Err(_) => Err(format!(
                "a measurement salt of {length} bytes, expected {MEASUREMENT_SALT_LEN}"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_counts_only_with_both_keys_in_full() {
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
                    .contains("expected 32 each")
            );
        }
    }

    #[test]
    fn a_salt_is_there_in_full_or_not_at_all() {
        assert_eq!(migration_salt(&[]), Ok(None));
        assert_eq!(migration_salt(&[3; 32]), Ok(Some([3; 32])));
        assert!(
            migration_salt(&[3; 31])
                .unwrap_err()
                .contains("31 bytes, expected 32")
        );
    }
}
