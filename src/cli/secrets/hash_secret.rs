//! `firstlight hash-secret`: the hash of an init secret, for the metadata of machines.

use std::path::PathBuf;

use base::crypto::{self, Secret};
use clap::Args;

use crate::cluster::init;
use crate::shell::{error::Error, output::Output};
use serde_json::json;

/// Maximum bytes of a secret: bcrypt ignores the rest (its specification).
const MAX_SECRET: usize = 72;
/// The cost of a hash, the same as Constellation's: a check takes about 0.05 s.
const COST: u32 = 10;

/// Print the hash of an init secret, for the metadata of machines
///
/// The metadata has the hash, and the operator keeps the secret: `firstlight init` sends it to the node. The hash is
/// bcrypt's and differs each time.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  openssl rand -base64 24 > init-secret.txt && chmod 600 init-secret.txt && firstlight hash-secret init-secret.txt
  pass show cluster/init | firstlight hash-secret -")]
pub struct Options {
    /// The file with the secret, which only you may read; - is standard input
    file: PathBuf,
    #[command(flatten)]
    output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let (output, hash) = (
        options.output,
        hash(&init::read_init_secret(&options.file)?)?,
    );
    output.json(&json!({"initSecretHash": hash}))?;
    output.say(hash)
}

/// Returns the bcrypt hash of a secret with a random salt (`$2a$10$..`, 60 characters).
fn hash(secret: &Secret) -> Result<String, Error> {
    let secret = secret.expose();
    if secret.len() > MAX_SECRET {
        return Err(Error::content(format!(
            "the init secret has {} bytes, expected at most {MAX_SECRET}: bcrypt would ignore the rest",
            secret.len()
        )));
    }
    let hash = bcrypt::hash_with_salt(secret, COST, crypto::random()).map_err(Error::failed)?;
    Ok(hash.format_for_version(bcrypt::Version::TwoA))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_secret_matches_its_hash() {
        let made = hash(&Secret::new(b"correct horse".to_vec())).unwrap();
        assert!(made.starts_with("$2a$10$") && made.len() == 60, "{made}");
        assert!(bcrypt::verify("correct horse", &made).unwrap());
        assert!(!bcrypt::verify("correct horsf", &made).unwrap());
        let again = hash(&Secret::new(b"correct horse".to_vec())).unwrap();
        assert_ne!(made, again);
    }

    #[test]
    fn a_secret_that_bcrypt_would_cut_off_is_refused() {
        assert!(hash(&Secret::new(vec![b'a'; MAX_SECRET])).is_ok());
        assert!(hash(&Secret::new(vec![b'a'; MAX_SECRET + 1])).is_err());
    }
}
