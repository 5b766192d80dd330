//! Bytes that are wiped after their use.

use std::fmt;

use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

/// Secret bytes: wiped on drop, never printed, compared in constant time.
#[derive(Clone)]
pub struct Secret(Zeroizing<Box<[u8]>>);

impl Secret {
    /// Takes ownership of `bytes` and wipes the vector's spare capacity.
    pub fn new(bytes: Vec<u8>) -> Self {
        let bytes = Zeroizing::new(bytes);
        // `into_boxed_slice` is not used, because shrinking may leave an unwiped copy behind.
        Secret(Zeroizing::new(Box::from(bytes.as_slice())))
    }

    /// Returns `len` bytes from the kernel's random number generator.
    pub fn random(len: usize) -> Self {
        let mut bytes = vec![0; len];
        fill_random(&mut bytes);
        Secret::new(bytes)
    }

    /// Returns the bytes. A caller that copies them must wipe the copy.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes)", self.len())
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len()
            && self
                .0
                .iter()
                .zip(other.0.iter())
                .fold(0, |diff, (a, b)| diff | (a ^ b))
                == 0
    }
}

impl Eq for Secret {}

/// Returns `N` bytes from the kernel's random number generator, for nonces and salts, which are not
/// secret.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    fill_random(&mut bytes);
    bytes
}

fn fill_random(bytes: &mut [u8]) {
    // `ring` calls getrandom(2), which fails only on kernels before 3.17.
    SystemRandom::new()
        .fill(bytes)
        .expect("getrandom(2) works on every supported kernel");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_only_the_length() {
        assert_eq!(
            format!("{:?}", Secret::new(b"hunter2".to_vec())),
            "Secret(7 bytes)"
        );
    }

    #[test]
    fn equality_is_by_content_and_length() {
        assert_eq!(Secret::new(vec![1, 2]), Secret::new(vec![1, 2]));
        assert_ne!(Secret::new(vec![1, 2]), Secret::new(vec![1, 3]));
        assert_ne!(Secret::new(vec![1, 2]), Secret::new(vec![1]));
    }

    #[test]
    fn random_secrets_differ() {
        assert_ne!(Secret::random(32), Secret::random(32));
    }
}
