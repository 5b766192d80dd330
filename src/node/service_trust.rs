//! A node's settings about join services, and the result of verifying one.
//!
//! A fresh node has a [`ServiceVerifier`] (`src/bootstrapper/service_trust.rs`), which judges the
//! evidence of the service. A rejoining node has none. It only proves itself, and accepts a key
//! because the key opens its disk (`src/unlock`).

use std::fmt;

use attest::{ClusterRegister, Registers, Validator, unhex};
use base::crypto::CLUSTER_ID_LEN;

/// The ID of a cluster in the form of the setting `cluster-id`: 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterId(pub [u8; CLUSTER_ID_LEN]);

/// The settings about join services.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// The only cluster whose services are accepted.
    pub cluster: Option<ClusterId>,
    /// Whether this machine refuses the old form of attested TLS. A fresh node then also refuses
    /// each service that sends no evidence.
    pub require_strong: bool,
}

/// Judges the evidence of one join service in one connection.
pub trait ServiceVerifier: Validator {
    /// Returns what the service proved; `None` if it sent no evidence.
    fn proof(&self) -> Option<Proof>;
}

/// The result of verifying a join service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The cluster ID's register on the service's machine; it is not zero.
    pub cluster: ClusterRegister,
    /// Whether any key could have signed the evidence: a program without a TPM can claim the same.
    pub by_any_key: bool,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.by_any_key {
            false => "proves",
            true => "claims, as a program without a TPM could,",
        };
        let (name, cluster) = (self.cluster.name(), &self.cluster);
        write!(
            f,
            "{verb} an accepted image, and the cluster with {name} {cluster}"
        )
    }
}

impl std::str::FromStr for ClusterId {
    type Err = String;

    fn from_str(text: &str) -> Result<ClusterId, String> {
        let id = unhex(text).map(ClusterId);
        id.ok_or_else(|| format!("expected {} hexadecimal digits", 2 * CLUSTER_ID_LEN))
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Settings {
    /// Returns the register value that members of the ticket's cluster must have; `None` if nobody
    /// knows.
    pub fn cluster_of_ticket(&self, proof: Option<&Proof>) -> Option<ClusterRegister> {
        let pinned = || self.cluster.map(|id| Registers::Pcrs.after(&id.0));
        proof.map(|proof| proof.cluster.clone()).or_else(pinned)
    }

    /// Checks that the ticket's cluster is the sender's, or the one that `cluster-id` names.
    pub fn check_cluster(
        &self,
        proof: Option<&Proof>,
        cluster_id: &[u8; CLUSTER_ID_LEN],
    ) -> Result<(), String> {
        match self.cluster_of_ticket(proof) {
            Some(expected) if !expected.is_of(cluster_id) => Err(format!(
                "sent a ticket of the cluster {}, but {}: expected {} {expected}, got {}",
                ClusterId(*cluster_id),
                match proof {
                    Some(_) => "its machine belongs to another one",
                    None => "the setting cluster-id names another one",
                },
                expected.name(),
                expected.kind().after(cluster_id)
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_id_has_64_hexadecimal_digits() {
        let id: ClusterId = "0aFF".repeat(16).parse().unwrap();
        assert_eq!(id.0[..2], [0x0a, 0xff]);
        assert_eq!(id.to_string(), "0aff".repeat(16));
        for text in [
            "",
            "0a",
            &"0g".repeat(32),
            &"+1".repeat(32),
            &"é".repeat(32),
        ] {
            let error = text.parse::<ClusterId>().unwrap_err();
            assert_eq!(error, "expected 64 hexadecimal digits", "{text}");
        }
    }

    #[test]
    fn a_ticket_is_one_of_the_cluster_of_its_service_or_of_the_settings() {
        let trust = |cluster| Settings {
            cluster,
            ..Settings::default()
        };
        let proof = |id: &[u8; 32]| Proof {
            cluster: Registers::Pcrs.after(id),
            by_any_key: false,
        };
        let (ours, other) = ([1; 32], [2; 32]);
        let open = trust(None);
        assert!(open.check_cluster(None, &ours).is_ok());
        assert!(open.check_cluster(Some(&proof(&ours)), &ours).is_ok());
        let refused = open.check_cluster(Some(&proof(&other)), &ours).unwrap_err();
        assert!(refused.contains("belongs to another"), "{refused}");
        // the setting also applies to a service that sends no evidence
        let pinned = trust(Some(ClusterId(ours)));
        assert!(pinned.check_cluster(None, &ours).is_ok());
        let refused = pinned.check_cluster(None, &other).unwrap_err();
        assert!(
            refused.contains("the setting cluster-id names another"),
            "{refused}"
        );
    }
}
