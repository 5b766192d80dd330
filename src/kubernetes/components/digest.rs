//! SHA-256 digests of files.

use ring::digest;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// Returns the digest of these bytes.
pub fn digest_of(bytes: &[u8]) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    digest
}
