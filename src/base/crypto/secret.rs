//! Bytes that are wiped after their use.

use std::fmt;

use ring::rand::{SecureRandom, SystemRandom};
use zeroize::{Zeroize, Zeroizing};

/// Bytes of the stack that [`with_clean_stack`] overwrites: more than our key derivations use.
const STACK: usize = 32 << 10;

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

/// Runs `work`, and then overwrites the [`STACK`] bytes of the stack below this call, because the
/// functions of libraries leave copies of secrets there.
pub fn with_clean_stack<T>(work: impl FnOnce() -> T) -> T {
    #[inline(never)]
    fn run<T>(work: impl FnOnce() -> T) -> T {
        work()
    }
    #[inline(never)]
    fn overwrite() {
        [0_u64; STACK / 8].zeroize();
    }
    let result = run(work);
    overwrite();
    result
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
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use support::secrets::Secrets;

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

    /// Leaves a copy of a secret in the middle of the stack that [`with_clean_stack`] overwrites.
    #[inline(never)]
    fn leave(secret: &[u8]) {
        let mut below = [0; STACK / 2 + 1024];
        below[..secret.len()].copy_from_slice(secret);
        zeroize::optimization_barrier(&below);
    }

    #[test]
    fn nothing_is_left_on_a_clean_stack() {
        let secret = Secret::random(32);
        let mut secrets = Secrets::default();
        secrets.add("secret", secret.expose());
        let here = 0_u8;
        let on_the_stack = || {
            let mut stack = vec![0; 2 * STACK];
            let memory = File::open("/proc/self/mem").unwrap();
            let from = (&raw const here).addr() - stack.len();
            memory.read_exact_at(&mut stack, from as u64).unwrap();
            secrets.find(&stack, 0, "stack").len()
        };
        leave(secret.expose());
        assert_eq!(on_the_stack(), 2, "the search must find the copy");
        with_clean_stack(|| leave(secret.expose()));
        assert_eq!(on_the_stack(), 0);
    }

    #[test]
    fn random_secrets_differ() {
        assert_ne!(Secret::random(32), Secret::random(32));
    }
}
