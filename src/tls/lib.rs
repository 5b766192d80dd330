//! The cryptography of every TLS connection: that of ring, and the key exchange X25519MLKEM768
//! before all others.
//!
//! What a connection carries today, such as a master secret, must stay secret for decades. Somebody
//! who records the connection may have a quantum computer one day, which breaks X25519. It does not
//! break ML-KEM. Both together are at least as strong as the stronger one.

mod x25519_mlkem768;

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, ring};

pub use x25519_mlkem768::X25519_MLKEM768;

/// Returns the provider of every TLS client and server but those of attested TLS, which need only a
/// part of it.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = ring::default_provider();
        // A client sends the shares of the first group and of X25519, so no peer needs another
        // round trip.
        provider.kx_groups.insert(0, X25519_MLKEM768);
        Arc::new(provider)
    });
    PROVIDER.clone()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::crypto::ring::default_provider;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::{
        ClientConfig, ClientConnection, HandshakeKind, NamedGroup, RootCertStore, ServerConfig,
        ServerConnection,
    };

    use super::*;

    /// Connects two sides in memory. Returns the group of their key exchange, and whether the
    /// server asked for another share.
    fn meet(client: Arc<CryptoProvider>, server: Arc<CryptoProvider>) -> (NamedGroup, bool) {
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
        let mut roots = RootCertStore::empty();
        roots.add(own.cert.der().clone()).unwrap();
        let server = ServerConfig::builder_with_provider(server)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        let client = ClientConfig::builder_with_provider(client)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        let name = "localhost".try_into().unwrap();
        let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut &bytes[..]).unwrap();
            server.process_new_packets().unwrap();
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut &bytes[..]).unwrap();
            client.process_new_packets().unwrap();
        }
        (
            client.negotiated_key_exchange_group().unwrap().name(),
            server.handshake_kind() == Some(HandshakeKind::FullWithHelloRetryRequest),
        )
    }

    #[test]
    fn our_programs_use_the_hybrid_and_others_need_no_second_round_trip() {
        let ring = || Arc::new(default_provider());
        assert_eq!(
            meet(provider(), provider()),
            (NamedGroup::X25519MLKEM768, false)
        );
        assert_eq!(meet(ring(), provider()), (NamedGroup::X25519, false));
        assert_eq!(meet(provider(), ring()), (NamedGroup::X25519, false));
    }

    #[test]
    fn a_peer_that_sends_only_a_share_of_x25519_is_served_at_once() {
        let mut other = default_provider();
        other.kx_groups.push(X25519_MLKEM768);
        assert_eq!(
            meet(Arc::new(other), provider()),
            (NamedGroup::X25519, false)
        );
    }
}
