//! The crypto provider of an attested TLS server: ring's, with hashes that see the ClientHello as the client sent it.
//!
//! [`super::hello`] renames an extension before rustls reads the ClientHello; the transcript hash must cover the original. Each
//! `Context::update` of rustls is one whole handshake message (`rustls::hash_hs`), so the hash can tell a ClientHello and
//! rename the extension back. If a future rustls did otherwise, the Finished messages would not match and every handshake
//! would fail: no error here can weaken one. rustls 0.24 will read such names (`InvalidSniPolicy::IgnoreAll`); this file can go then.

use std::sync::{Arc, LazyLock};

use rustls::crypto::hash::{Context, Hash, HashAlgorithm, Output};
use rustls::crypto::{CryptoProvider, ring};
use rustls::{CipherSuiteCommon, SupportedCipherSuite, Tls12CipherSuite, Tls13CipherSuite};

use super::hello;

/// ring's algorithms as they are, for clients.
pub fn client() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(ring::default_provider()));
    PROVIDER.clone()
}

/// ring's algorithms, with transcripts over the ClientHello that was sent.
pub fn server() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = ring::default_provider();
        for suite in &mut provider.cipher_suites {
            *suite = with_true_hash(*suite);
        }
        Arc::new(provider)
    });
    PROVIDER.clone()
}

/// rustls holds suites by `&'static`: each is leaked, once a process.
fn with_true_hash(suite: SupportedCipherSuite) -> SupportedCipherSuite {
    let common = |common: &CipherSuiteCommon| CipherSuiteCommon {
        suite: common.suite,
        hash_provider: Box::leak(Box::new(TrueHash(common.hash_provider))),
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

/// A hash that reveals the server name in what it is fed.
struct TrueHash(&'static dyn Hash);

impl Hash for TrueHash {
    fn start(&self) -> Box<dyn Context> {
        Box::new(TrueContext(self.0.start()))
    }

    /// Of whole inputs that are no handshake messages: the key schedule's empty hash.
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

struct TrueContext(Box<dyn Context>);

impl Context for TrueContext {
    fn fork_finish(&self) -> Output {
        self.0.fork_finish()
    }

    fn fork(&self) -> Box<dyn Context> {
        Box::new(TrueContext(self.0.fork()))
    }

    fn finish(self: Box<Self>) -> Output {
        self.0.finish()
    }

    fn update(&mut self, data: &[u8]) {
        match hello::reveal_server_name(data) {
            Some(original) => self.0.update(&original),
            None => self.0.update(data),
        }
    }
}
