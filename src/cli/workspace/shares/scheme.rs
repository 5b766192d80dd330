//! Shamir's scheme: splits the master secret into shares. Any `threshold` shares restore it, and
//! fewer reveal nothing about it.
//!
//! The scheme is that of HashiCorp Vault (its package `shamir`): each byte of the secret is the
//! value at 0 of a random polynomial in GF(256) with the polynomial 0x11b, and a share has the
//! values at its number. The shared bytes are: the length of the key in one byte, the key, and the
//! salt.

use std::convert::Infallible;
use std::fmt;

use rand_core::{TryCryptoRng, TryRng};
use vsss_rs::Gf256;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::{Dek, Secret, random};
use base::master_secret::MasterSecret;

/// The name of the key whose first bytes are the fingerprint of a master secret.
const FINGERPRINT_ID: &str = "share-fingerprint";
/// Maximum bytes of the key and of the salt of a master secret that can be shared.
const MAX_LEN: usize = 255;

/// A share of a master secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of shares that restore the secret.
    pub threshold: u8,
    /// The share's number, from 1.
    pub number: u8,
    /// The fingerprint of the master secret; it reveals nothing about the secret.
    pub fingerprint: [u8; 4],
    /// A random ID of the run of `share` that made it.
    pub set: [u8; 4],
    /// The values of the polynomials at the share's number.
    points: Secret,
}

/// A share and its source: a file, or the terminal.
pub struct Named {
    /// The file, or the number of the typed share.
    pub name: String,
    /// The share.
    pub share: Share,
}

/// Why a secret cannot be divided into shares, or shares do not restore it.
#[derive(Debug, PartialEq, Eq)]
pub enum Error {
    /// There are fewer shares than the threshold: their number, and the threshold.
    TooFew(usize, u8),
    /// The second share is the same as the first one.
    Twice(String, String),
    /// The second share has the first one's number, but another content.
    Contradict(String, String),
    /// The second share is of another secret than the first one.
    OtherSecret(String, String),
    /// The second share comes from another run than the first one.
    OtherSet(String, String),
    /// The shares belong together, but the restored secret does not have their fingerprint. The
    /// shares that were used.
    Wrong(Vec<String>),
    /// A text is not that of a whole share, or the share is forged: why.
    NotAShare(String),
    /// The master secret cannot be divided so: why.
    NotShareable(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::TooFew(have, needed) => write!(
                f,
                "too few shares: {have} of {needed} that restore the master secret; {} more needed",
                usize::from(*needed).saturating_sub(*have)
            ),
            Error::Twice(first, second) => write!(f, "{second} is the same share as {first}"),
            Error::Contradict(first, second) => write!(
                f,
                "{second} has the number of {first} and another content: one of them is forged"
            ),
            Error::OtherSecret(first, second) => {
                write!(
                    f,
                    "{second} is a share of another master secret than {first}"
                )
            }
            Error::OtherSet(first, second) => write!(
                f,
                "{second} comes from another run of `firstlight share` than {first}: only shares of one run fit together"
            ),
            Error::NotAShare(why) | Error::NotShareable(why) => f.write_str(why),
            Error::Wrong(names) => write!(
                f,
                "{} do not give the master secret of their fingerprint: one of them is forged; try other shares",
                names.join(", ")
            ),
        }
    }
}

impl std::error::Error for Error {}

impl Share {
    /// Makes a share from Vault's form: the points, then the share's number.
    pub fn from_vault(
        bytes: &[u8],
        threshold: u8,
        fingerprint: [u8; 4],
        set: [u8; 4],
    ) -> Result<Share, Error> {
        let not = |why: String| Err(Error::NotAShare(why));
        let Some((&number, points)) = bytes.split_last() else {
            return not("it is empty".into());
        };
        if threshold < 2 {
            return not(format!(
                "its threshold is {threshold}, expected at least 2: it is forged"
            ));
        }
        if number == 0 {
            return not("its number is 0: it is forged".into());
        }
        Ok(Share {
            threshold,
            number,
            fingerprint,
            set,
            points: Secret::new(points.to_vec()),
        })
    }

    /// Returns the share in Vault's form: the points, then the share's number.
    pub fn vault(&self) -> Secret {
        let mut bytes = Zeroizing::new(self.numbered());
        bytes.rotate_left(1);
        Secret::new(std::mem::take(&mut *bytes))
    }

    /// Returns the share as vsss-rs takes it: the number, then the points. The caller wipes it.
    fn numbered(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.points.len() + 1);
        bytes.push(self.number);
        bytes.extend(self.points.expose());
        bytes
    }
}

/// Splits the master secret into `count` shares, of which any `threshold` restore it: 2 <=
/// `threshold` <= `count` <= 255.
pub fn split(kms: &MasterSecret, threshold: u8, count: u8) -> Result<Vec<Share>, Error> {
    if threshold < 2 || threshold > count {
        return Err(Error::NotShareable(format!(
            "{threshold} of {count} shares: expected at least 2, and at most as many as there are"
        )));
    }
    let secret = joined(kms)?;
    let shares = Gf256::split_bytes(threshold.into(), count.into(), secret.as_slice(), Kernel);
    let shares = Zeroizing::new(shares.map_err(|error| Error::NotShareable(error.to_string()))?);
    let (fingerprint, set) = (fingerprint(kms)?, random());
    let share = |bytes: &Vec<u8>| Share {
        threshold,
        number: bytes[0],
        fingerprint,
        set,
        points: Secret::new(bytes[1..].to_vec()),
    };
    Ok(shares.iter().map(share).collect())
}

/// Restores the master secret.
pub fn join(shares: &[Named]) -> Result<MasterSecret, Error> {
    check(shares)?;
    let Some(first) = shares.first() else {
        return Err(Error::TooFew(0, 2));
    };
    let threshold = first.share.threshold;
    if shares.len() < threshold.into() {
        return Err(Error::TooFew(shares.len(), threshold));
    }
    let used = &shares[..threshold.into()];
    let points: Zeroizing<Vec<Vec<u8>>> =
        Zeroizing::new(used.iter().map(|named| named.share.numbered()).collect());
    let wrong = || Error::Wrong(used.iter().map(|named| named.name.clone()).collect());
    let secret = Zeroizing::new(Gf256::combine_bytes(&*points).map_err(|_| wrong())?);
    let kms = parted(&secret).ok_or_else(wrong)?;
    if fingerprint(&kms) == Ok(first.share.fingerprint) {
        Ok(kms)
    } else {
        Err(wrong())
    }
}

/// Checks that the shares belong together and that none occurs twice.
pub fn check(shares: &[Named]) -> Result<(), Error> {
    for (index, Named { name, share }) in shares.iter().enumerate() {
        for earlier in &shares[..index] {
            let names = || (earlier.name.clone(), name.clone());
            let fault = match &earlier.share {
                other if other.fingerprint != share.fingerprint => Error::OtherSecret,
                other if other.set != share.set => Error::OtherSet,
                other if other == share => Error::Twice,
                // all shares of one run have the same threshold and length
                other
                    if other.number == share.number
                        || other.threshold != share.threshold
                        || other.points.len() != share.points.len() =>
                {
                    Error::Contradict
                }
                _ => continue,
            };
            let (first, second) = names();
            return Err(fault(first, second));
        }
    }
    Ok(())
}

/// Returns the bytes to share: the length of the key, the key, the salt.
fn joined(kms: &MasterSecret) -> Result<Zeroizing<Vec<u8>>, Error> {
    let (key, salt) = (kms.key().expose(), kms.salt().expose());
    for part in [key, salt] {
        if part.len() > MAX_LEN {
            return Err(Error::NotShareable(format!(
                "the master secret has a part of {} bytes, and at most {MAX_LEN} can be shared",
                part.len()
            )));
        }
    }
    let mut secret = Zeroizing::new(Vec::with_capacity(1 + key.len() + salt.len()));
    secret.push(key.len() as u8);
    secret.extend(key);
    secret.extend(salt);
    Ok(secret)
}

fn parted(secret: &[u8]) -> Option<MasterSecret> {
    let (&len, rest) = secret.split_first()?;
    let (key, salt) = rest.split_at_checked(len.into())?;
    MasterSecret::new(Secret::new(key.to_vec()), Secret::new(salt.to_vec())).ok()
}

/// Returns the fingerprint of the master secret: the first bytes of a key that is derived from it
/// and used for nothing else.
fn fingerprint(kms: &MasterSecret) -> Result<[u8; 4], Error> {
    let mut fingerprint = [0; 4];
    let key = kms
        .dek(&Dek::named(FINGERPRINT_ID), fingerprint.len())
        .map_err(|error| Error::NotShareable(error.to_string()))?;
    fingerprint.copy_from_slice(key.expose());
    Ok(fingerprint)
}

/// The kernel's random number generator.
struct Kernel;

impl TryRng for Kernel {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        let mut bytes = [0; 4];
        self.try_fill_bytes(&mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        let mut bytes = [0; 8];
        self.try_fill_bytes(&mut bytes)?;
        let number = u64::from_ne_bytes(bytes);
        bytes.zeroize();
        Ok(number)
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        bytes.copy_from_slice(Secret::random(bytes.len()).expose());
        Ok(())
    }
}

impl TryCryptoRng for Kernel {}

#[cfg(test)]
mod tests {
    use super::*;

    fn master_secret(byte: u8) -> MasterSecret {
        MasterSecret::new(Secret::new(vec![byte; 32]), Secret::new(vec![2; 32])).unwrap()
    }

    fn named(shares: &[Share], which: &[usize]) -> Vec<Named> {
        let named = |index: &usize| Named {
            name: format!("share-{}.txt", index + 1),
            share: shares[*index].clone(),
        };
        which.iter().map(named).collect()
    }

    #[test]
    fn any_threshold_of_shares_restores_the_secret_and_fewer_do_not() {
        let secret = master_secret(1);
        let shares = split(&secret, 3, 5).unwrap();
        for which in [[0, 1, 2], [4, 2, 0], [1, 3, 4]] {
            assert_eq!(join(&named(&shares, &which)).unwrap(), secret);
        }
        assert_eq!(join(&named(&shares, &[0, 1, 2, 3, 4])).unwrap(), secret);
        assert_eq!(join(&named(&shares, &[0, 4])), Err(Error::TooFew(2, 3)));
        assert_eq!(join(&[]), Err(Error::TooFew(0, 2)));
    }

    #[test]
    fn a_secret_of_another_length_and_the_most_shares_hold_too() {
        let secret = MasterSecret::new(Secret::random(16), Secret::random(255)).unwrap();
        let shares = split(&secret, 255, 255).unwrap();
        let which: Vec<usize> = (0..255).rev().collect();
        assert_eq!(join(&named(&shares, &which)).unwrap(), secret);
    }

    #[test]
    fn shares_that_do_not_belong_together_are_named() {
        let shares = split(&master_secret(1), 2, 3).unwrap();
        let pair = |first: &Share, second: &Share| {
            let error = join(&named(&[first.clone(), second.clone()], &[0, 1])).unwrap_err();
            assert!(error.to_string().contains("share-2.txt"), "{error}");
            error
        };
        let names = || ("share-1.txt".to_owned(), "share-2.txt".to_owned());
        let expected = |error: fn(String, String) -> Error| error(names().0, names().1);
        assert_eq!(pair(&shares[0], &shares[0]), expected(Error::Twice));
        let others = split(&master_secret(9), 2, 3).unwrap();
        assert_eq!(pair(&shares[0], &others[1]), expected(Error::OtherSecret));
        let again = split(&master_secret(1), 2, 3).unwrap();
        assert_eq!(pair(&shares[0], &again[1]), expected(Error::OtherSet));
        let renumbered = Share {
            number: shares[0].number,
            ..shares[1].clone()
        };
        assert_eq!(pair(&shares[0], &renumbered), expected(Error::Contradict));
        let forged = Share {
            points: Secret::random(65),
            ..shares[1].clone()
        };
        assert_eq!(
            pair(&shares[0], &forged),
            Error::Wrong(vec![names().0, names().1])
        );
    }

    #[test]
    fn a_threshold_that_protects_nothing_or_cannot_be_met_is_refused() {
        for (threshold, count) in [(0, 3), (1, 3), (4, 3), (2, 1)] {
            assert!(split(&master_secret(1), threshold, count).is_err());
        }
        let long = MasterSecret::new(Secret::random(256), Secret::random(32)).unwrap();
        assert!(
            matches!(split(&long, 2, 3), Err(Error::NotShareable(why)) if why.contains("256 bytes"))
        );
    }

    #[test]
    fn every_value_of_a_coefficient_occurs() {
        // RUSTSEC-2024-0398: a coefficient that can never be 0 reveals information about the
        // secret. The first share's point is the secret plus the coefficient, so without the
        // coefficient 0 it would never be the secret.
        let secret = master_secret(1);
        let met = (0..250).any(|_| {
            let share = &split(&secret, 2, 2).unwrap()[0];
            let points = share.points.expose();
            points[1..33].contains(&1)
        });
        assert!(met, "of 8000 coefficients none is 0");
    }
}
