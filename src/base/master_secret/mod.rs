//! The master secret of a cluster, from which every key is derived, and the URIs that bring it.
//!
//! `InitRequest` and `RecoverMessage` name a back end of keys by a key URI. The back end `cluster-kms` derives its keys and needs no
//! storage; its URI contains the master secret, so the URI is a secret too. Back ends that wrap random keys with a cloud's key service
//! are recognized by name and refused.

mod error;
mod uri;

use zeroize::Zeroizing;

pub use error::{Error, NO_STORE};

use crate::crypto::{Dek, Secret, derive_key};

/// The master secret and its salt. A key is their HKDF-SHA-256, with the name of the key as info.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterSecret {
    key: Secret,
    salt: Secret,
}

impl MasterSecret {
    /// Makes it of the secret and its salt; neither may be empty.
    pub fn new(key: Secret, salt: Secret) -> Result<Self, Error> {
        if key.is_empty() {
            return Err(Error::Empty("key"));
        }
        if salt.is_empty() {
            return Err(Error::Empty("salt"));
        }
        Ok(MasterSecret { key, salt })
    }

    /// Returns the secret.
    pub fn key(&self) -> &Secret {
        &self.key
    }

    /// Returns the salt.
    pub fn salt(&self) -> &Secret {
        &self.salt
    }

    /// Reads it from the key URI and the storage URI of `InitRequest` or `RecoverMessage`. An empty
    /// storage URI means no storage.
    pub fn from_uris(kms_uri: &str, storage_uri: &str) -> Result<Self, Error> {
        uri::check_storage(storage_uri)?;
        let (key, salt) = uri::parse_kms(kms_uri)?;
        MasterSecret::new(key, salt)
    }

    /// Returns the URI `kms://cluster-kms?key=..&salt=..`, which contains the master secret.
    pub fn uri(&self) -> Zeroizing<String> {
        uri::write_cluster_kms(self.key.expose(), self.salt.expose())
    }

    /// Derives the data key of the given name with `len` bytes (1 to [`crate::crypto::MAX_DERIVED_LEN`]).
    pub fn dek(&self, id: &Dek, len: usize) -> Result<Secret, Error> {
        derive_key(self.key.expose(), self.salt.expose(), id.info(), len).ok_or(Error::Length(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_the_end_to_end_vector_of_the_old_system() {
        let kms = MasterSecret::from_uris(
            "kms://cluster-kms?key=AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\
             &salt=AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=",
            NO_STORE,
        )
        .unwrap();
        let hex = |key: Secret| {
            key.expose()
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect::<String>()
        };
        assert_eq!(
            hex(kms.dek(&Dek::named("measurementSecret"), 32).unwrap()),
            "cc3b094286bbd764022331d2c1b5a93b8c67bf28aa9a8f8b2c6c104fac4fd6c5"
        );
        assert_eq!(
            hex(kms
                .dek(&Dek::disk("00000000-0000-0000-0000-000000000000"), 32)
                .unwrap()),
            "69acae9b0e35c688c09d832e4d699bb5141866c690bc07c34a11cff88f54aa9b"
        );
    }

    #[test]
    fn empty_keys_and_salts_are_refused() {
        let some = || Secret::new(vec![1]);
        let none = || Secret::new(vec![]);
        assert_eq!(MasterSecret::new(none(), some()), Err(Error::Empty("key")));
        assert_eq!(MasterSecret::new(some(), none()), Err(Error::Empty("salt")));
    }

    #[test]
    fn lengths_that_cannot_be_derived_are_refused() {
        let kms = MasterSecret::new(Secret::new(vec![1]), Secret::new(vec![2])).unwrap();
        for len in [0, crate::crypto::MAX_DERIVED_LEN + 1, u32::MAX as usize] {
            assert_eq!(kms.dek(&Dek::named("x"), len), Err(Error::Length(len)));
        }
    }

    #[test]
    fn debug_output_shows_no_key() {
        let kms = MasterSecret::new(
            Secret::new(b"hunter2".to_vec()),
            Secret::new(b"pepper".to_vec()),
        )
        .unwrap();
        let shown = format!("{kms:?}");
        assert!(
            !shown.contains("hunter") && !shown.contains("104"),
            "{shown}"
        );
    }
}
