//! LUKS2, the header format of an encrypted disk: binary header, JSON metadata, keyslots, digest,
//! tokens.
//!
//! Implements the part of the "LUKS2 On-Disk Format Specification" (version 1.1) that a state disk
//! uses, in the exact form that Constellation v2 writes and accepts: one `crypt` segment of AES-XTS
//! with 4096-byte sectors over HMAC-SHA-256 of dm-integrity, keyslots with argon2id and the `luks1`
//! anti-forensic splitter, a PBKDF2 digest, and token 0, which records whether the disk holds the
//! state of a node. This module works on `Read + Write + Seek`, without device-mapper.
//!
//! ```text
//! 0        16 KiB     32 KiB                                        16 MiB
//! ├─────────┼──────────┼────────────┬────────────┬───── … ──┬────────┼──────────────────────────
//! │ primary │ secondary│ keyslot    │ keyslot    │  unused  │ marker │ integrity superblock, data
//! │ header  │ header   │ area       │ area       │          │        │
//! └─────────┴──────────┴────────────┴────────────┴───── … ──┴────────┴──────────────────────────
//!   4096 bytes binary      96-byte key × 4000 stripes,        "a format
//!   + 12 KiB JSON, each    encrypted by the passphrase's       is under way"
//!   with a checksum        argon2id key
//! ```
//!
//! - [`probe`]: determines what is on a device; returns the [`Header`], a copy in memory that is
//!   never read again
//! - `layout`: where each part is, and how long
//! - `header`: the 4096 binary bytes and their checksum
//! - `json`: the JSON area; decides whether it is valid LUKS2 (an invalid header copy is ignored)
//! - `metadata`: decides which valid metadata belongs to a state disk; limits for hostile headers;
//!   edits
//! - `cluster_token`: the token that names the cluster of the disk, with a MAC; `peers`: the token
//!   with the addresses of join services; `token` finds and places both
//! - `keyslot`: argon2id, area encryption, splitter, digest
//! - `write`: the operations that change the disk ([`format()`],
//!   [`Header::replace_passphrase_and_mark`], [`Header::set_peers_token`], [`Header::mark_for_reset`]),
//!   with a table of the states after a power failure at each step

mod cluster_token;
mod device;
mod error;
mod header;
mod json;
mod keyslot;
mod layout;
mod metadata;
mod peers;
mod probe;
#[cfg(test)]
mod tests;
mod token;
mod write;

pub use cluster_token::ClusterToken;
pub use device::Device;
pub use error::{Error, HeaderFault};
pub use header::Header;
pub use layout::{DATA_OFFSET, MIN_DEVICE_SIZE, VOLUME_KEY_LEN, VOLUME_KEY_LEN_PLAIN};
pub use metadata::{DiskState, Geometry, Integrity, SECTOR_SIZE};
pub use peers::{MAX_CONTROL_PLANES, PEERS_TYPE, Peers};
pub use probe::{Probe, probe};
pub use write::format;
