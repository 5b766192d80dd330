//! Derives the volume key from the passphrase of a keyslot: argon2id, the cipher of the area, the
//! anti-forensic splitter, the digest.

use std::io::{Read, Seek};
use std::num::NonZeroU32;

use aes::Aes256;
use aes::cipher::KeyInit;
use argon2::{Algorithm, Argon2, Block, Params, Version};
use ring::rand::{SecureRandom, SystemRandom};
use ring::{digest, pbkdf2};
use xts_mode::{Xts128, get_tweak_default};
use zeroize::Zeroizing;

use super::device::read_at;
use super::error::{Error, io_error};
use super::header::Header;
use super::layout::STRIPES;
use super::metadata::{AREA_KEY_LEN, Digest, Integrity, Kdf, Keyslot, SALT_LEN};
use base::crypto::{Secret, with_clean_stack};

/// Sector size in bytes of the cipher within a keyslot area. IVs count from the start of the area
/// (specification §2.2).
const AREA_SECTOR: usize = 512;
const SHA256_LEN: usize = 32;

impl Header {
    /// Returns the volume key from the first keyslot that `passphrase` opens.
    ///
    /// Checks the header first ([`Header::check_ours`], integrity optional). The key is verified
    /// with the digest in this header, so a modified keyslot area can only cause an error. Errors:
    /// [`Error::WrongPassphrase`], [`Error::NotOurs`], [`Error::Refused`], [`Error::Io`].
    pub fn unlock(
        &self,
        dev: &mut (impl Read + Seek),
        passphrase: &Secret,
    ) -> Result<Secret, Error> {
        let metadata = self.checked(Integrity::Optional)?;
        for keyslot in metadata.keyslots.values() {
            let mut area = Zeroizing::new(vec![0; keyslot.key_size * STRIPES]);
            read_at(dev, keyslot.area.0, &mut area).map_err(io_error("read a keyslot area"))?;
            let key = open(keyslot, &mut area, passphrase)?;
            if matches(&metadata.digest, &key) {
                return Ok(key);
            }
        }
        Err(Error::WrongPassphrase {
            keyslots: metadata.keyslots.len(),
        })
    }
}

/// Decrypts `area` with `passphrase`. Only the digest shows whether the result is the volume key.
fn open(keyslot: &Keyslot, area: &mut [u8], passphrase: &Secret) -> Result<Secret, Error> {
    with_clean_stack(|| {
        let cipher = cipher(&keyslot.kdf, passphrase)?;
        cipher.decrypt_area(area, AREA_SECTOR, 0, get_tweak_default);
        Ok(merge(area, keyslot.key_size))
    })
}

/// Returns the bytes of a keyslot area that holds `volume_key` encrypted with `passphrase`.
pub(super) fn seal(
    kdf: &Kdf,
    volume_key: &Secret,
    passphrase: &Secret,
) -> Result<Zeroizing<Vec<u8>>, Error> {
    with_clean_stack(|| {
        let mut area = split(volume_key);
        let cipher = cipher(kdf, passphrase)?;
        cipher.encrypt_area(&mut area, AREA_SECTOR, 0, get_tweak_default);
        Ok(area)
    })
}

/// Returns the digest of `volume_key`.
pub(super) fn digest_of(
    volume_key: &Secret,
    salt: &[u8; SALT_LEN],
    iterations: u32,
) -> [u8; SHA256_LEN] {
    let mut out = [0; SHA256_LEN];
    let iterations = NonZeroU32::new(iterations).unwrap_or(NonZeroU32::MIN);
    pbkdf2::derive(
        pbkdf2::PBKDF2_HMAC_SHA256,
        iterations,
        salt,
        volume_key.expose(),
        &mut out,
    );
    out
}

/// Returns whether `digest` is that of `volume_key`, in constant time.
pub(super) fn matches(digest: &Digest, volume_key: &Secret) -> bool {
    let Some(iterations) = NonZeroU32::new(digest.iterations) else {
        return false;
    };
    #[cfg(test)]
    work::add(digest.iterations.into());
    pbkdf2::verify(
        pbkdf2::PBKDF2_HMAC_SHA256,
        iterations,
        &digest.salt,
        volume_key.expose(),
        &digest.digest,
    )
    .is_ok()
}

/// Returns the cipher of an area. The caller cleans the stack, which has its key afterwards.
fn cipher(kdf: &Kdf, passphrase: &Secret) -> Result<Xts128<Aes256>, Error> {
    #[cfg(test)]
    work::add(kdf.work());
    let out_of_bounds = |e: argon2::Error| {
        Error::NotOurs(format!("invalid parameters of the key derivation: {e}").into())
    };
    let params =
        Params::new(kdf.memory, kdf.time, kdf.cpus, Some(AREA_KEY_LEN)).map_err(out_of_bounds)?;
    let mut memory: Zeroizing<Vec<Block>> = Zeroizing::new(Vec::new());
    // a failed allocation must not abort the program
    memory
        .try_reserve_exact(params.block_count())
        .map_err(|_| {
            Error::Refused(format!(
                "the key derivation of the keyslot needs {} KiB of memory, which is not available",
                kdf.memory
            ))
        })?;
    memory.resize(params.block_count(), Block::new());
    let mut key = Zeroizing::new([0; AREA_KEY_LEN]);
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into_with_memory(
            passphrase.expose(),
            &kdf.salt,
            &mut key[..],
            &mut memory[..],
        )
        .map_err(out_of_bounds)?;
    let (data, tweak) = key.split_at(AREA_KEY_LEN / 2);
    let half =
        |key: &[u8]| Aes256::new_from_slice(key).expect("half of 64 bytes is an AES-256 key");
    Ok(Xts128::new(half(data), half(tweak)))
}

/// Splits a key into stripes (anti-forensic splitter, specification §2.4, as in LUKS1). All stripes
/// are needed to restore it.
fn split(key: &Secret) -> Zeroizing<Vec<u8>> {
    let len = key.len();
    let mut stripes = Zeroizing::new(vec![0; len * STRIPES]);
    let last = len * (STRIPES - 1);
    SystemRandom::new()
        .fill(&mut stripes[..last])
        .expect("getrandom(2) works on every supported kernel");
    let mut diffused = Zeroizing::new(vec![0; len]);
    for stripe in stripes[..last].chunks_exact(len) {
        xor(&mut diffused, stripe);
        diffuse(&mut diffused);
    }
    xor(&mut diffused, key.expose());
    stripes[last..].copy_from_slice(&diffused);
    stripes
}

/// Restores a key from its stripes; the inverse of [`split`]. `stripes` has `len` × 4000 bytes.
fn merge(stripes: &[u8], len: usize) -> Secret {
    let mut key = Zeroizing::new(vec![0; len]);
    let (all_but_last, last) = stripes.split_at(len * (STRIPES - 1));
    for stripe in all_but_last.chunks_exact(len) {
        xor(&mut key, stripe);
        diffuse(&mut key);
    }
    xor(&mut key, last);
    Secret::new(std::mem::take(&mut *key))
}

/// Replaces each block of 32 bytes with the hash of its number and its content.
fn diffuse(bytes: &mut [u8]) {
    for (number, block) in (0u32..).zip(bytes.chunks_mut(SHA256_LEN)) {
        let mut hash = digest::Context::new(&digest::SHA256);
        hash.update(&number.to_be_bytes());
        hash.update(block);
        block.copy_from_slice(&hash.finish().as_ref()[..block.len()]);
    }
}

fn xor(bytes: &mut [u8], other: &[u8]) {
    bytes
        .iter_mut()
        .zip(other)
        .for_each(|(byte, other)| *byte ^= other);
}

/// Counts the work that this thread has done, in the units of
/// [`MAX_WORK`](super::metadata::MAX_WORK).
#[cfg(test)]
pub(super) mod work {
    use std::cell::Cell;

    thread_local!(static DONE: Cell<u64> = const { Cell::new(0) });

    pub(super) fn add(units: u64) {
        DONE.set(DONE.get() + units);
    }

    /// Returns the work since the last call.
    pub fn take() -> u64 {
        DONE.take()
    }
}
