//! The key exchange X25519MLKEM768 (draft-ietf-tls-ecdhe-mlkem) for rustls: ML-KEM-768 (FIPS 203)
//! and X25519 (RFC 7748). Each has its own shares, which are concatenated:
//!
//! ```text
//! client's share   encapsulation key (1184 bytes) | X25519 public key (32)
//! server's share   ciphertext (1088)              | X25519 public key (32)
//! shared secret    of ML-KEM (32)                 | of X25519 (32)
//! ```

use ml_kem::{Ciphertext, Decapsulate, Kem, KeyExport, MlKem768};
use rustls::crypto::ring::kx_group::X25519;
use rustls::crypto::{ActiveKeyExchange, CompletedKeyExchange, SharedSecret, SupportedKxGroup};
use rustls::ffdhe_groups::FfdheGroup;
use rustls::{Error, NamedGroup, PeerMisbehaved, ProtocolVersion};
use zeroize::Zeroizing;

use base::crypto::Secret;

type DecapsulationKey = <MlKem768 as Kem>::DecapsulationKey;
type EncapsulationKey = <MlKem768 as Kem>::EncapsulationKey;

/// Length in bytes of an encapsulation key (FIPS 203, table 3).
const ENCAPSULATION_KEY: usize = 1184;
/// Length in bytes of a ciphertext (FIPS 203, table 3).
const CIPHERTEXT: usize = 1088;
/// Length in bytes of an X25519 public key (RFC 7748 §5).
const X25519_KEY: usize = 32;

const INVALID: Error = Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare);

/// The key exchange group X25519MLKEM768.
pub static X25519_MLKEM768: &dyn SupportedKxGroup = &Hybrid;

#[derive(Debug)]
struct Hybrid;

impl SupportedKxGroup for Hybrid {
    /// Makes a client's share.
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let seed = Secret::random(64);
        let ml_kem = DecapsulationKey::from_seed(seed.expose().try_into().expect("64 bytes"));
        let x25519 = X25519.start()?;
        let mut share = Vec::with_capacity(ENCAPSULATION_KEY + X25519_KEY);
        share.extend_from_slice(&ml_kem.encapsulation_key().to_bytes());
        share.extend_from_slice(x25519.pub_key());
        Ok(Box::new(Started {
            ml_kem,
            x25519,
            share,
        }))
    }

    /// Answers a client's share.
    fn start_and_complete(&self, share: &[u8]) -> Result<CompletedKeyExchange, Error> {
        let (key, x25519_share) = split(share, ENCAPSULATION_KEY)?;
        let key = key.try_into().map_err(|_| INVALID)?;
        // This is the check of the key that FIPS 203 §7.2 demands.
        let key = EncapsulationKey::new(key).map_err(|_| INVALID)?;
        let message = Secret::random(32);
        let message = message.expose().try_into().expect("32 bytes");
        let (ciphertext, ml_kem) = key.encapsulate_deterministic(message);
        let ml_kem = Zeroizing::new(<[u8; 32]>::from(ml_kem));
        let x25519 = X25519.start_and_complete(x25519_share)?;
        Ok(CompletedKeyExchange {
            group: self.name(),
            pub_key: [&ciphertext[..], &x25519.pub_key].concat(),
            secret: join(&ml_kem, &x25519.secret),
        })
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn usable_for_version(&self, version: ProtocolVersion) -> bool {
        version == ProtocolVersion::TLSv1_3
    }
}

/// A client's part before the server's share is known.
struct Started {
    ml_kem: DecapsulationKey,
    x25519: Box<dyn ActiveKeyExchange>,
    share: Vec<u8>,
}

impl ActiveKeyExchange for Started {
    fn complete(self: Box<Self>, share: &[u8]) -> Result<SharedSecret, Error> {
        let (ciphertext, x25519_share) = split(share, CIPHERTEXT)?;
        let ciphertext: &Ciphertext<MlKem768> = ciphertext.try_into().map_err(|_| INVALID)?;
        // A wrong ciphertext gives a secret that the server does not have (FIPS 203 §6.3), so the
        // handshake fails later.
        let ml_kem = Zeroizing::new(<[u8; 32]>::from(self.ml_kem.decapsulate(ciphertext)));
        let x25519 = self.x25519.complete(x25519_share)?;
        Ok(join(&ml_kem, &x25519))
    }

    fn pub_key(&self) -> &[u8] {
        &self.share
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }

    fn hybrid_component(&self) -> Option<(NamedGroup, &[u8])> {
        Some((self.x25519.group(), self.x25519.pub_key()))
    }

    /// Continues with only X25519, for a server that does not know the hybrid.
    fn complete_hybrid_component(self: Box<Self>, share: &[u8]) -> Result<SharedSecret, Error> {
        self.x25519.complete(share)
    }
}

/// Splits a share into that of ML-KEM, of `length` bytes, and that of X25519.
fn split(share: &[u8], length: usize) -> Result<(&[u8], &[u8]), Error> {
    if share.len() != length + X25519_KEY {
        return Err(INVALID);
    }
    Ok(share.split_at(length))
}

fn join(ml_kem: &[u8; 32], x25519: &SharedSecret) -> SharedSecret {
    let both = Zeroizing::new([ml_kem, x25519.secret_bytes()].concat());
    SharedSecret::from(&both[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Box<dyn ActiveKeyExchange> {
        X25519_MLKEM768.start().unwrap()
    }

    #[test]
    fn both_sides_get_the_same_new_secret_each_time() {
        let mut secrets = Vec::new();
        for _ in 0..3 {
            let client = start();
            assert_eq!(client.pub_key().len(), 1216);
            let server = X25519_MLKEM768
                .start_and_complete(client.pub_key())
                .unwrap();
            assert_eq!(server.pub_key.len(), 1120);
            let secret = client.complete(&server.pub_key).unwrap();
            assert_eq!(secret.secret_bytes(), server.secret.secret_bytes());
            assert_eq!(secret.secret_bytes().len(), 64);
            secrets.push(secret.secret_bytes().to_vec());
        }
        assert!(secrets[0] != secrets[1] && secrets[1] != secrets[2]);
    }

    #[test]
    fn the_share_of_x25519_alone_is_enough_for_a_server_that_does_not_know_the_hybrid() {
        let client = start();
        let (group, share) = client.hybrid_component().unwrap();
        assert_eq!(
            (group, share),
            (NamedGroup::X25519, &client.pub_key()[1184..])
        );
        let server = X25519.start_and_complete(share).unwrap();
        let secret = client.complete_hybrid_component(&server.pub_key).unwrap();
        assert_eq!(secret.secret_bytes(), server.secret.secret_bytes());
    }

    #[test]
    fn a_share_of_another_length_is_refused() {
        let client = start();
        let share = client.pub_key().to_vec();
        for length in [0, 31, 32, 1183, 1184, 1215, 1217] {
            let mut share = share.clone();
            share.resize(length, 0);
            assert!(X25519_MLKEM768.start_and_complete(&share).is_err());
        }
        let answer = X25519_MLKEM768.start_and_complete(&share).unwrap().pub_key;
        for length in [0, 32, 1088, 1119, 1121] {
            let mut answer = answer.clone();
            answer.resize(length, 0);
            assert!(start().complete(&answer).is_err());
        }
    }

    #[test]
    fn an_encapsulation_key_that_is_not_reduced_is_refused() {
        let mut share = start().pub_key().to_vec();
        // The first coefficient, of 12 bits: 4095 is not below 3329.
        share[0] = 0xff;
        share[1] |= 0x0f;
        assert!(X25519_MLKEM768.start_and_complete(&share).is_err());
    }

    #[test]
    fn an_x25519_key_of_small_order_is_refused() {
        let client = start();
        let mut share = client.pub_key().to_vec();
        share[1184..].fill(0);
        assert!(X25519_MLKEM768.start_and_complete(&share).is_err());
        let server = X25519_MLKEM768
            .start_and_complete(client.pub_key())
            .unwrap();
        let mut answer = server.pub_key;
        answer[1088..].fill(0);
        assert!(client.complete(&answer).is_err());
    }

    #[test]
    fn a_changed_share_gives_another_secret() {
        let client = start();
        let server = X25519_MLKEM768
            .start_and_complete(client.pub_key())
            .unwrap();
        let mut answer = server.pub_key.clone();
        answer[500] ^= 1;
        let secret = client.complete(&answer).unwrap();
        assert_ne!(
            secret.secret_bytes()[..32],
            server.secret.secret_bytes()[..32]
        );
        assert_eq!(
            secret.secret_bytes()[32..],
            server.secret.secret_bytes()[32..]
        );
    }
}
