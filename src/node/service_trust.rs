//! A node's settings about join services.
//!
//! A fresh node judges the evidence of the service (`src/bootstrapper/trust/service_trust.rs`). A
//! rejoining node does not. It only proves itself, and accepts a key because the key opens its disk
//! (`src/unlock`).

use attest::{ClusterRegister, Registers, unhex};
use base::crypto::CLUSTER_ID_LEN;

/// The ID of a cluster in the form of the setting `cluster-id`: 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterId(pub [u8; CLUSTER_ID_LEN]);

/// The settings about join services.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrustSettings {
    /// The only cluster whose services are accepted.
    pub cluster: Option<ClusterId>,
    /// Whether this machine refuses the old form of attested TLS. A fresh node then also refuses
    /// each service that sends no evidence.
    pub require_strong: bool,
}

impl std::str::FromStr for ClusterId {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ClusterId, Self::Err> {
        let id = unhex(text).map(ClusterId);
        id.ok_or("expected 64 hexadecimal digits")
    }
}

impl TrustSettings {
    /// Returns the register of the cluster ID on members of the cluster that `cluster-id` names;
    /// `None` without the setting.
    pub fn cluster_register(&self) -> Option<ClusterRegister> {
        self.cluster.map(|id| Registers::Pcrs.after(&id.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_id_has_64_hexadecimal_digits() {
        let id: ClusterId = "0aFF".repeat(16).parse().unwrap();
        assert_eq!(id.0[..2], [0x0a, 0xff]);
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
}
