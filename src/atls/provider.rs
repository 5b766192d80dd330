//! The crypto provider of an attested TLS server: that of every TLS connection, with hashes over the ClientHello as the client
//! sent it.
//!
//! [`super::hello`] renames an extension before rustls parses the ClientHello, but the transcript hash must cover the original.
//! Each `Context::update` of rustls is one complete handshake message (`rustls::hash_hs`), so the hash recognizes a ClientHello
//! and renames the extension back. If a future rustls behaves differently, the Finished messages do not match and every handshake
//! fails: an error here cannot weaken a connection. rustls 0.24 will accept such names (`InvalidSniPolicy::IgnoreAll`); then this
//! file can be deleted.

use std::sync::{Arc, LazyLock};

use rustls::crypto::CryptoProvider;
use rustls::crypto::hash::{Context, Hash, HashAlgorithm, Output};
use rustls::{CipherSuiteCommon, SupportedCipherSuite, Tls12CipherSuite, Tls13CipherSuite};

use super::hello;

/// Returns the provider with transcript hashes over the ClientHello as sent.
pub fn server() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(with_sent(&hello::reveal_server_name)));
    PROVIDER.clone()
}

/// Returns handshake messages as they are sent, if that is not as rustls knows them.
pub type Sent = &'static (dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync);

/// Returns the provider of every TLS connection with transcript hashes over what `sent` returns.
pub fn with_sent(sent: Sent) -> CryptoProvider {
    let mut provider = CryptoProvider::clone(&tls::provider());
    for suite in &mut provider.cipher_suites {
        *suite = with_true_hash(*suite, sent);
    }
    provider
}

/// rustls requires cipher suites as `&'static`, so each suite is leaked once per provider.
fn with_true_hash(suite: SupportedCipherSuite, sent: Sent) -> SupportedCipherSuite {
    let common = |common: &CipherSuiteCommon| CipherSuiteCommon {
        suite: common.suite,
        hash_provider: Box::leak(Box::new(TrueHash(common.hash_provider, sent))),
        confidentiality_limit: common.confidentiality_limit,
    };
    match suite {
        SupportedCipherSuite::Tls13(suite) => {
            SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
                common: common(&suite.common),
                quic: None,
                ..*suite
            })))
        }
        SupportedCipherSuite::Tls12(suite) => {
            SupportedCipherSuite::Tls12(Box::leak(Box::new(Tls12CipherSuite {
                common: common(&suite.common),
                ..*suite
            })))
        }
    }
}

/// A hash over messages as they are sent.
struct TrueHash(&'static dyn Hash, Sent);

impl Hash for TrueHash {
    fn start(&self) -> Box<dyn Context> {
        Box::new(TrueContext(self.0.start(), self.1))
    }

    /// Returns the hash of an input that is not a handshake message: the empty hash of the key schedule.
    fn hash(&self, data: &[u8]) -> Output {
        self.0.hash(data)
    }

    fn output_len(&self) -> usize {
        self.0.output_len()
    }

    fn algorithm(&self) -> HashAlgorithm {
        self.0.algorithm()
    }

    fn fips(&self) -> bool {
        self.0.fips()
    }
}

struct TrueContext(Box<dyn Context>, Sent);

impl Context for TrueContext {
    fn fork_finish(&self) -> Output {
        self.0.fork_finish()
    }

    fn fork(&self) -> Box<dyn Context> {
        Box::new(TrueContext(self.0.fork(), self.1))
    }

    fn finish(self: Box<Self>) -> Output {
        self.0.finish()
    }

    fn update(&mut self, data: &[u8]) {
        match (self.1)(data) {
            Some(sent) => self.0.update(&sent),
            None => self.0.update(data),
        }
    }
}
