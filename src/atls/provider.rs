//! The cryptography of attested TLS, a part of what web servers need: Firstlight and Constellation
//! use TLS 1.3 and certificates with a P-256 key, and every TLS 1.3 implementation supports AES-GCM
//! (RFC 8446 §9.1). Nothing else can be negotiated, and `unlock` links nothing else.
//!
//! On a server, transcript hashes are over the ClientHello as the client sent it: [`super::hello`]
//! renames an extension before rustls parses the ClientHello, but the transcript hash must cover
//! the original. Each `Context::update` of rustls is one complete handshake message
//! (`rustls::hash_hs`), so the hash recognizes a ClientHello and renames the extension back. If a
//! future rustls behaves differently, the Finished messages do not match and every handshake fails:
//! an error here cannot weaken a connection. rustls 0.24 will accept such names
//! (`InvalidSniPolicy::IgnoreAll`); then this part can be deleted.

use std::sync::{Arc, LazyLock};

use rustls::crypto::hash::{Context, Hash, HashAlgorithm, Output};
use rustls::crypto::ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};
use rustls::crypto::ring::kx_group::{SECP256R1, SECP384R1, X25519};
use rustls::crypto::{
    CryptoProvider, GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::SigningKey;
use rustls::{
    CipherSuiteCommon, SignatureScheme, SupportedCipherSuite, SupportedProtocolVersion,
    Tls13CipherSuite,
};

use super::hello;

/// The version of TLS. An older one has no exporter that covers the handshake without a further
/// extension.
pub const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];
/// The signatures of certificates and handshakes.
pub static SIGNATURES: WebPkiSupportedAlgorithms = WebPkiSupportedAlgorithms {
    all: &[webpki::ring::ECDSA_P256_SHA256],
    mapping: &[(
        SignatureScheme::ECDSA_NISTP256_SHA256,
        &[webpki::ring::ECDSA_P256_SHA256],
    )],
};

/// The methods about signatures, which rustls' verifiers of servers and of clients have in common.
macro_rules! verify_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _leaf: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            // rustls asks only about the versions of the configuration
            Err(rustls::PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            leaf: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            verify_tls13_signature(message, leaf, signature, &SIGNATURES)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            SIGNATURES.supported_schemes()
        }
    };
}
pub(super) use verify_signatures;

/// Returns the provider of a client.
pub fn client() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(with_sent(None)));
    PROVIDER.clone()
}

/// Returns the provider with transcript hashes over the ClientHello as sent.
pub fn server() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(with_sent(Some(&hello::reveal_server_name))));
    PROVIDER.clone()
}

/// Returns the handshake messages as they are sent, if rustls knows them in another form.
pub type Sent = &'static (dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync);

/// Returns the provider with transcript hashes over what `sent` returns.
pub fn with_sent(sent: Option<Sent>) -> CryptoProvider {
    let suites = [TLS13_AES_256_GCM_SHA384, TLS13_AES_128_GCM_SHA256];
    let suites = suites.iter().filter_map(SupportedCipherSuite::tls13);
    CryptoProvider {
        cipher_suites: suites.map(|suite| with_hash(suite, sent)).collect(),
        // as in `tls::provider`
        kx_groups: vec![tls::X25519_MLKEM768, X25519, SECP256R1, SECP384R1],
        signature_verification_algorithms: SIGNATURES,
        secure_random: &System,
        key_provider: &System,
    }
}

/// rustls requires cipher suites as `&'static`, so each suite is leaked once per provider.
fn with_hash(suite: &'static Tls13CipherSuite, sent: Option<Sent>) -> SupportedCipherSuite {
    let hash_provider: &'static dyn Hash = match sent {
        Some(sent) => Box::leak(Box::new(TrueHash(suite.common.hash_provider, sent))),
        None => suite.common.hash_provider,
    };
    SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
        common: CipherSuiteCommon {
            hash_provider,
            ..suite.common
        },
        quic: None,
        ..*suite
    })))
}

/// Random numbers of the kernel. Keys are never loaded: `certificate` makes them.
#[derive(Debug)]
struct System;

impl SecureRandom for System {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), bytes)
            .map_err(|_| GetRandomFailed)
    }
}

impl KeyProvider for System {
    fn load_private_key(
        &self,
        _key: PrivateKeyDer<'static>,
    ) -> Result<Arc<dyn SigningKey>, rustls::Error> {
        Err(rustls::Error::General("keys are not loaded".into()))
    }
}

/// A hash over messages as they are sent.
struct TrueHash(&'static dyn Hash, Sent);

impl Hash for TrueHash {
    fn start(&self) -> Box<dyn Context> {
        Box::new(TrueContext(self.0.start(), self.1))
    }

    /// Returns the hash of an input that is not a handshake message: the empty hash of the key
    /// schedule.
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
