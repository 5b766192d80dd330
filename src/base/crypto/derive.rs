//! Key derivation by HKDF (RFC 5869) with SHA-256, and the names of the derived keys.

use ring::hkdf;

use super::{Secret, with_clean_stack};

/// Length in bytes of a state disk's key, of the measurement secret, and of the seeds of SSH
/// certificate authorities.
pub const KEY_LEN: usize = 32;
/// Length in bytes of a measurement salt, from which the cluster ID is derived.
pub const MEASUREMENT_SALT_LEN: usize = 32;
/// Length in bytes of a cluster ID.
pub const CLUSTER_ID_LEN: usize = 32;
/// Maximum number of bytes from HKDF-SHA-256: 255 blocks (RFC 5869 §2.3).
pub const MAX_DERIVED_LEN: usize = 255 * 32;
/// ID of the key from which the cluster ID is derived.
pub const MEASUREMENT_SECRET_ID: &str = "measurementSecret";
/// ID of the seed of the SSH certificate authority for users. Its owner can log in to every node.
pub const SSH_USER_CA_SEED_ID: &str = "ca_emergency_ssh";
/// ID under which the key service returns the public key of that authority, in SSH's wire format,
/// instead of its seed.
pub const SSH_USER_CA_PUBLIC_ID: &str = "ca_emergency_ssh.pub";
/// ID of the seed of the SSH certificate authority for hosts. Its owner can impersonate any node to
/// an operator.
pub const SSH_HOST_CA_SEED_ID: &str = "ca_emergency_ssh_host";

/// Prefix of all IDs of the key service in the HKDF info.
const DEK_PREFIX: &str = "key-";
const CLUSTER_ID_INFO: &str = "clusterID";
const DISK_MAC_INFO: &str = "firstlight-state-disk";

/// The name of a data encryption key: the HKDF info `key-` + ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dek(String);

impl Dek {
    /// Names the key with this ID, e.g. [`MEASUREMENT_SECRET_ID`].
    pub fn named(id: &str) -> Self {
        Dek(format!("{DEK_PREFIX}{id}"))
    }

    /// Names the key of the disk with this LUKS UUID. The UUID becomes lower case, because HKDF
    /// compares infos byte by byte.
    pub fn disk(uuid: &str) -> Self {
        Self::named(&uuid.to_lowercase())
    }

    /// Returns the HKDF info.
    pub fn info(&self) -> &str {
        &self.0
    }
}

/// Derives `len` bytes from `secret` and `salt` under `info` by HKDF-SHA-256. Returns `None` if
/// `len` is 0 or above [`MAX_DERIVED_LEN`].
pub fn derive_key(secret: &[u8], salt: &[u8], info: &str, len: usize) -> Option<Secret> {
    struct Len(usize);
    impl hkdf::KeyType for Len {
        fn len(&self) -> usize {
            self.0
        }
    }
    if len == 0 || len > MAX_DERIVED_LEN {
        return None;
    }
    let mut out = vec![0; len];
    let derived = with_clean_stack(|| {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(secret);
        prk.expand(&[info.as_bytes()], Len(len))?.fill(&mut out)
    });
    derived.ok().map(|()| Secret::new(out))
}

/// Derives the key of the MAC that binds a state disk to its cluster: HKDF(measurement secret, no
/// salt, `firstlight-state-disk`, 32). The cluster ID has another info, so neither reveals anything
/// about the other.
pub fn disk_mac_key(measurement_secret: &Secret) -> Secret {
    let key = derive_key(measurement_secret.expose(), &[], DISK_MAC_INFO, KEY_LEN);
    key.expect("the length is a constant within HKDF's bounds")
}

/// Derives the cluster ID, which is measured into PCR 15: HKDF(measurement secret, measurement
/// salt, `key-clusterID`, 32).
pub fn cluster_id(measurement_secret: &Secret, measurement_salt: &[u8]) -> [u8; CLUSTER_ID_LEN] {
    let (secret, info) = (measurement_secret.expose(), Dek::named(CLUSTER_ID_INFO));
    let id = derive_key(secret, measurement_salt, info.info(), CLUSTER_ID_LEN);
    // The length is a constant within HKDF's bounds.
    id.and_then(|id| id.expose().try_into().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::hex;

    fn range(from: u8, len: u8) -> Vec<u8> {
        (from..from + len).collect()
    }

    fn derived(secret: &[u8], salt: &[u8], info: &str) -> String {
        hex(derive_key(secret, salt, info, KEY_LEN).unwrap().expose())
    }

    #[test]
    fn disk_keys_match_the_vectors_of_the_old_system() {
        let zero = Dek::disk("00000000-0000-0000-0000-000000000000");
        assert_eq!(
            derived(&[0; 32], &[0; 32], zero.info()),
            "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665"
        );
        let ones = Dek::disk("FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF");
        assert_eq!(
            derived(&[0xff; 32], &[0xff; 32], ones.info()),
            "1484aa39d3415e906e07940ff215d8b1eee705d3027dba93306af4abff4f70be"
        );
    }

    #[test]
    fn named_keys_match_the_vectors_of_the_old_system() {
        assert_eq!(
            derived(
                &range(0x40, 32),
                &range(0x60, 32),
                Dek::named(MEASUREMENT_SECRET_ID).info()
            ),
            "4790578891f3fe6cc22cb661ecdc1b7e33121b1287546a52ba33a9136719c213"
        );
        assert_eq!(
            derived(&[0; 32], &[0; 32], Dek::named(SSH_USER_CA_SEED_ID).info()),
            "9e713c43390b642211dac2251376b4ac901635b197ccd2288393cc61bb73e127"
        );
    }

    #[test]
    fn cluster_id_matches_the_vectors_of_the_old_system() {
        let id = cluster_id(&Secret::new(range(0, 32)), &range(0x20, 32));
        assert_eq!(
            hex(&id),
            "128c164378fe8767f998fbdfe4b4d6463ec5ae1b664ea5999bc27417607ae9b6"
        );
    }

    #[test]
    fn rfc_5869_test_case_3() {
        // This is the only case of RFC 5869 appendix A whose info is UTF-8, as ours always is.
        let okm = derive_key(&[0x0b; 22], &[], "", 42).unwrap();
        assert_eq!(
            hex(okm.expose()),
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
        );
    }

    #[test]
    fn lengths_beyond_the_bounds_of_hkdf_are_refused() {
        assert!(derive_key(&[1], &[2], "x", 0).is_none());
        assert!(derive_key(&[1], &[2], "x", MAX_DERIVED_LEN + 1).is_none());
        assert!(derive_key(&[1], &[2], "x", MAX_DERIVED_LEN).is_some());
    }
}
