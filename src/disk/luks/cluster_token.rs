//! The token that binds a state disk to its cluster: the measurement salt of the cluster, and a MAC
//! under the measurement secret over the UUID of the disk and the salt.
//!
//! ```text
//! {"type": "firstlight-cluster", "keyslots": [], "mac": BASE64, "measurementSalt": BASE64}
//! ```
//!
//! Storage volumes of the cluster have keys of the same kind as state disks. Only the nodes of the
//! cluster, its join service and the holder of the master secret can compute this MAC, so a volume
//! cannot pass as a state disk. The salt in the header allows the node to compute the cluster ID
//! before it reads the file system.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::hmac;
use serde_json::{Value, json};

use super::error::{Error, HeaderFault};
use super::json::{bytes, only};
use super::token;
use base::crypto::{MEASUREMENT_SALT_LEN, Secret, disk_mac_key, with_clean_stack};

/// The `type` of the token.
pub(super) const TYPE: &str = "firstlight-cluster";
const MAC_LEN: usize = 32;
const SALT: &str = "measurementSalt";
/// The first number of the token.
const FIRST_ID: u32 = 1;

/// The content of the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterToken {
    measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    mac: [u8; MAC_LEN],
}

impl ClusterToken {
    /// Makes the token of the disk with this UUID (lower case) in the cluster with this measurement
    /// secret and salt.
    pub fn new(
        uuid: &str,
        measurement_secret: &Secret,
        measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    ) -> ClusterToken {
        let message = message(uuid, &measurement_salt);
        let tag = with_clean_stack(|| hmac::sign(&key(measurement_secret), &message));
        ClusterToken {
            measurement_salt,
            mac: tag.as_ref().try_into().expect("HMAC-SHA-256 has 32 bytes"),
        }
    }

    /// Returns the salt if the MAC is valid for the disk with this UUID (lower case) under this
    /// measurement secret.
    pub fn verified_salt(
        &self,
        uuid: &str,
        measurement_secret: &Secret,
    ) -> Option<[u8; MEASUREMENT_SALT_LEN]> {
        let message = message(uuid, &self.measurement_salt);
        with_clean_stack(|| hmac::verify(&key(measurement_secret), &message, &self.mac))
            .ok()
            .map(|()| self.measurement_salt)
    }
}

fn key(measurement_secret: &Secret) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, disk_mac_key(measurement_secret).expose())
}

/// Returns the input of the MAC. A UUID always has 36 bytes, so two different pairs never give the
/// same input.
fn message(uuid: &str, salt: &[u8; MEASUREMENT_SALT_LEN]) -> Vec<u8> {
    [uuid.as_bytes(), salt].concat()
}

/// Reads the token from the metadata. The error says what is wrong.
pub(super) fn read(tokens: &Value) -> Result<Option<ClusterToken>, HeaderFault> {
    let Some((id, token)) = token::find(tokens, TYPE)? else {
        return Ok(None);
    };
    let it = format!("token {id}");
    only(&it, token, &["type", "keyslots", "mac", SALT])?;
    Ok(Some(ClusterToken {
        measurement_salt: bytes(&it, token, SALT)?,
        mac: bytes(&it, token, "mac")?,
    }))
}

/// Writes the token: replaces an older one, or uses the first free number.
pub(super) fn set(metadata: &mut Value, token: &ClusterToken) -> Result<(), Error> {
    let (mac, salt) = (token.mac, token.measurement_salt);
    let json = json!({
        "type": TYPE,
        "keyslots": [],
        "mac": BASE64_STANDARD.encode(mac),
        SALT: BASE64_STANDARD.encode(salt),
    });
    token::set(metadata, FIRST_ID, json)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use support::mutation::mutations;

    const UUID: &str = "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11";
    const OTHER: &str = "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c12";

    fn secret(byte: u8) -> Secret {
        Secret::new(vec![byte; 32])
    }

    fn token() -> ClusterToken {
        ClusterToken::new(UUID, &secret(1), [2; 32])
    }

    #[test]
    fn the_salt_counts_only_for_this_disk_and_this_secret() {
        assert_eq!(token().verified_salt(UUID, &secret(1)), Some([2; 32]));
        assert_eq!(token().verified_salt(OTHER, &secret(1)), None);
        assert_eq!(token().verified_salt(UUID, &secret(3)), None);
        let other_salt = ClusterToken {
            measurement_salt: [4; 32],
            ..token()
        };
        assert_eq!(other_salt.verified_salt(UUID, &secret(1)), None);
    }

    #[test]
    fn it_takes_the_first_free_place_and_then_keeps_it() {
        let mut metadata = json!({"tokens": {"0": {"type": "a"}, "1": {"type": "b"}}});
        set(&mut metadata, &token()).unwrap();
        set(&mut metadata, &ClusterToken::new(UUID, &secret(1), [5; 32])).unwrap();
        let tokens = metadata["tokens"].as_object().unwrap();
        assert_eq!(tokens.keys().collect::<Vec<_>>(), ["0", "1", "2"]);
        assert_eq!(
            read(&metadata["tokens"])
                .unwrap()
                .unwrap()
                .verified_salt(UUID, &secret(1)),
            Some([5; 32])
        );
        let mut full = json!({"tokens": {}});
        for id in 0..token::MAX_TOKENS {
            full["tokens"][id.to_string()] = json!({"type": "a"});
        }
        assert!(matches!(set(&mut full, &token()), Err(Error::NoRoom(_))));
    }

    #[test]
    fn what_is_wrong_with_a_token_is_said() {
        let good = {
            let mut metadata = json!({"tokens": {}});
            set(&mut metadata, &token()).unwrap();
            metadata["tokens"]["1"].clone()
        };
        assert_eq!(read(&json!({"1": good})).unwrap(), Some(token()));
        assert_eq!(
            read(&json!({"0": {"type": "constellation-state-disk"}})).unwrap(),
            None
        );
        let with = |field: &str, value: Value| {
            let mut bad = good.clone();
            bad[field] = value;
            read(&json!({"1": bad})).unwrap_err().to_string()
        };
        assert!(with("mac", "AAAA".into()).contains("token 1: mac has 3 bytes, expected 32"));
        assert!(with("measurementSalt", "?".into()).contains("measurementSalt is not base64"));
        assert!(with("more", 1.into()).contains("unknown field"));
        assert!(
            read(&json!({"1": good, "2": good}))
                .unwrap_err()
                .to_string()
                .contains("more than one")
        );
    }

    #[test]
    fn a_mutated_token_gives_no_other_salt() {
        let mut metadata = json!({"tokens": {}});
        set(&mut metadata, &token()).unwrap();
        let text = metadata["tokens"].to_string();
        let mut whole = 0;
        for bytes in mutations(text.as_bytes(), 20_000) {
            let Ok(tokens) = serde_json::from_slice::<Value>(&bytes) else {
                continue;
            };
            if let Ok(Some(token)) = read(&tokens) {
                whole += 1;
                assert!(
                    token
                        .verified_salt(UUID, &secret(1))
                        .is_none_or(|salt| salt == [2; 32])
                );
            }
        }
        assert!((10..20_000).contains(&whole), "{whole}");
    }
}
