//! The claims of an attestation result: an EAT Attestation Result (draft-ietf-rats-ear-04, JSON
//! serialization) with the claims of an OpenID Connect ID token, so that verifiers of both read it.
//!
//! There is a result only for a node whose evidence is accepted. So a verifier that checks no more than
//! signature, issuer, audience and expiry never takes a refused node for a good one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// The profile of the claims (draft-ietf-rats-ear-04 §3).
pub const PROFILE: &str = "tag:ietf.org,2026:rats/ear#04";
/// The audience of each result. It is that of no other service, so none takes a result for a credential.
pub const AUDIENCE: &str = "firstlight-attestation-result";
/// The name of the only attester in the results.
const ATTESTER: &str = "node";
/// The tier of a result (AR4SI §3.2), as a text.
const AFFIRMING: &str = "affirming";
/// Claims of the trustworthiness vector (AR4SI §3.1).
const RECOGNIZED_INSTANCE: i8 = 2;
/// Only approved executables were loaded during the boot. The registers show no later ones.
const APPROVED_BOOT: i8 = 3;
const GENUINE_HARDWARE: i8 = 2;

/// An accepted node.
pub struct AcceptedNode<'a> {
    /// The issuer's URL.
    pub issuer: &'a str,
    /// The node's name.
    pub node: &'a str,
    /// The UID of its Node object.
    pub uid: &'a str,
    /// The name of the attestation variant.
    pub variant: &'a str,
    /// The machine that proved itself: the one in the node's record.
    pub machine: &'a str,
    /// The ID of the policy's image that it runs, if known.
    pub image: Option<&'a str>,
    /// Whether a platform signed the evidence or endorsed its key.
    pub has_platform: bool,
    /// The SHA-256 digest of the policy by which it was judged.
    pub policy: &'a str,
    /// When its evidence was asked for.
    pub at: SystemTime,
    /// How long the result is valid from then on.
    pub life: Duration,
}

impl AcceptedNode<'_> {
    /// Returns when the result expires, in seconds since 1970.
    pub fn expires(&self) -> u64 {
        seconds(self.at) + self.life.as_secs()
    }

    /// Returns the identifier of the policy in the claims.
    pub fn policy_id(&self) -> String {
        format!("sha256:{}", self.policy)
    }

    /// Returns the claims.
    pub fn claims(&self) -> Value {
        let mut vector =
            json!({"executables": APPROVED_BOOT, "instance-identity": RECOGNIZED_INSTANCE});
        let mut verifier =
            json!({"variant": self.variant, "node-uid": self.uid, "machine": self.machine});
        if let Some(image) = self.image {
            verifier["image"] = image.into();
        }
        if self.has_platform {
            vector["hardware"] = GENUINE_HARDWARE.into();
        }
        json!({
            "eat_profile": PROFILE,
            "iss": self.issuer,
            "sub": self.node,
            "aud": AUDIENCE,
            "iat": seconds(self.at),
            "exp": self.expires(),
            "ear_verifier_id": {
                "developer": "Firstlight", "build": concat!("member-controller ", env!("CARGO_PKG_VERSION")),
            },
            "ear_status": AFFIRMING,
            "submods": {ATTESTER: {
                "ear_status": AFFIRMING,
                "ear_trustworthiness_vector": vector,
                "ear_appraisal_policy_ids": [self.policy_id()],
                "ear_verifier_claims": verifier,
            }},
        })
    }
}

/// Returns the seconds since 1970.
pub fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted<'a>() -> AcceptedNode<'a> {
        AcceptedNode {
            issuer: "https://results.example",
            node: "worker-0",
            uid: "u",
            variant: "qemu-vtpm",
            machine: "a1b2",
            image: None,
            has_platform: false,
            policy: "00ff",
            at: UNIX_EPOCH + Duration::from_millis(1_800_000_000_900),
            life: Duration::from_secs(810),
        }
    }

    #[test]
    fn a_result_is_an_ear_and_an_id_token() {
        let expected = json!({
            "eat_profile": "tag:ietf.org,2026:rats/ear#04",
            "iss": "https://results.example", "sub": "worker-0", "aud": "firstlight-attestation-result",
            "iat": 1_800_000_000, "exp": 1_800_000_810,
            "ear_verifier_id": {"developer": "Firstlight", "build": concat!("member-controller ", env!("CARGO_PKG_VERSION"))},
            "ear_status": "affirming",
            "submods": {"node": {
                "ear_status": "affirming",
                "ear_trustworthiness_vector": {"executables": 3, "instance-identity": 2},
                "ear_appraisal_policy_ids": ["sha256:00ff"],
                "ear_verifier_claims": {"variant": "qemu-vtpm", "node-uid": "u", "machine": "a1b2"},
            }},
        });
        assert_eq!(accepted().claims(), expected);
    }

    #[test]
    fn only_what_was_proved_is_claimed() {
        let of = |it: AcceptedNode<'_>| it.claims()["submods"]["node"].clone();
        assert!(
            of(accepted())["ear_trustworthiness_vector"]
                .get("hardware")
                .is_none()
        );
        let platform = of(AcceptedNode {
            has_platform: true,
            image: Some("7c0e"),
            ..accepted()
        });
        assert_eq!(platform["ear_trustworthiness_vector"]["hardware"], 2);
        assert_eq!(platform["ear_verifier_claims"]["image"], "7c0e");
    }
}
