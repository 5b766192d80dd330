//! Secrets that wipe themselves, and the key derivations that all programs use.

pub mod buffer;
mod derive;
mod secret;

pub use derive::{
    CLUSTER_ID_LEN, Dek, KEY_LEN, MAX_DERIVED_LEN, MEASUREMENT_SALT_LEN, MEASUREMENT_SECRET_ID,
    SSH_HOST_CA_SEED_ID, SSH_USER_CA_PUBLIC_ID, SSH_USER_CA_SEED_ID, cluster_id, derive_key,
    disk_mac_key,
};
pub use secret::{Secret, random, with_clean_stack};
