//! How the join service and the key service authenticate each other without Kubernetes: both know a
//! secret from a file.
//!
//! ```text
//! secret ─► HKDF ─► seed of the key service's certificate, which the join service computes and pins
//!       └─► HKDF ─► token, by which the join service identifies itself inside TLS
//! ```
//!
//! The secret is random, so its derived keys cannot be guessed. Neither end sends it.

use std::io;
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Instant;

use ring::hmac;
use zeroize::Zeroizing;

use super::certificate::{self, Tls};
use super::master_secret;
use base::crypto::{KEY_LEN, Secret, derive_key};
use base::text::hex;
use rpc::grpc::Metadata;
use transport::Transport;

/// The length of the secret in bytes.
const LENGTHS: RangeInclusive<usize> = 32..=4096;
/// The infos of HKDF.
const CERTIFICATE: &str = "firstlight key service: certificate";
const TOKEN: &str = "firstlight key service: token";
/// The metadata entry of the token.
const ENTRY: &str = "authorization";

/// The certificate seed and the token that both services derive from their secret.
pub struct SharedSecret {
    seed: Secret,
    header: Zeroizing<String>,
}

impl SharedSecret {
    /// Reads the secret from a file, byte by byte.
    pub fn read(file: &Path) -> Result<SharedSecret, master_secret::Error> {
        let secret = master_secret::read(file, "secret of both services", LENGTHS)?;
        let derive = |info| {
            let key = derive_key(&secret, &[], info, KEY_LEN);
            key.expect("the length is a constant within HKDF's bounds")
        };
        let token = Zeroizing::new(hex(derive(TOKEN).expose()));
        Ok(SharedSecret {
            seed: derive(CERTIFICATE),
            header: Zeroizing::new(format!("Bearer {}", *token)),
        })
    }

    /// Returns the acceptor of the key service.
    pub fn acceptor(&self) -> Tls {
        Tls::of_seed(&self.seed).0
    }

    /// Connects to the key service, which must have the certificate of this secret.
    pub fn connect(&self, socket: TcpStream, deadline: Instant) -> io::Result<Transport> {
        certificate::connect(&self.seed, socket, deadline)
    }

    /// Adds the token to the metadata of a call.
    pub fn add_token(&self, metadata: &mut Metadata) {
        let added = metadata.insert(ENTRY, &self.header);
        added.expect("hexadecimal digits are a valid header value");
    }

    /// Returns whether a caller shows the token. The time that it takes does not depend on the token.
    pub fn is_shown(&self, metadata: &Metadata) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.seed.expose());
        let tag = hmac::sign(&key, self.header.as_bytes());
        let shown = metadata.get(ENTRY).unwrap_or_default();
        hmac::verify(&key, shown.as_bytes(), tag.as_ref()).is_ok()
    }
}
