//! Attested TLS: TLS whose certificates carry proof of what software the peer runs.
//!
//! TLS 1.3 (RFC 8446), or 1.2 (RFC 5246) for old peers, in which self-signed certificates replace the public-key
//! infrastructure. Each side may *issue* (its certificate's one extension holds an attestation document that binds the
//! certificate's key and a nonce of the peer) and *validate* (it sends a nonce and judges the peer's document). The nonces
//! travel where Edgeless Systems' Constellation put them, so that its programs are peers of ours:
//!
//! ```text
//! client                                                            server
//!   |  ClientHello, server_name = base64(nonce C)                     |   HelloFilter, nonce::from_server_name
//!   | --------------------------------------------------------------> |   issue(SHA-256(server key), C)
//!   |  CertificateRequest, certificate_authorities = [CN=base64(nonce S)]
//!   |  Certificate { extension OID of the variant: document }         |
//!   | <-------------------------------------------------------------- |
//!   |  validate(document, C) == SHA-256(key of the certificate)       |
//!   |  issue(SHA-256(client key), S)                                  |
//!   |  Certificate { extension OID of the variant: document }         |
//!   | --------------------------------------------------------------> |   validate(document, S) == SHA-256(key)
//! ```
//!
//! The certificate request and the client's certificate exist only if the server validates. All keys and nonces are of one
//! connection, and nothing is ever resumed, so every connection is attested afresh.
//!
//! | file | work |
//! |---|---|
//! | `client.rs`, `server.rs` | the two roles: a rustls configuration for one connection, hooks that issue and validate |
//! | `handshake.rs` | the blocking handshake under one total deadline; alert and drain when it fails |
//! | [`hello`] | hides from rustls that the server name is no host name (a state machine over bytes, no I/O) |
//! | `provider.rs` | the hashes that undo `hello` in the transcript |
//! | `nonce.rs`, `certificate.rs`, `der.rs` | nonces, certificates, the DER that both are made of |
//! | `stream.rs` | [`split`]: two independent halves of an established TLS connection, attested or not |
//!
//! # What a peer can and cannot do
//!
//! - A peer learns from us only an alert; why its document was refused stays in our [`Error`] and log.
//! - A server issues before the client has proven anything, because that is where TLS puts the server's certificate: an
//!   unauthenticated client can cost it one document (a TPM quote) a connection. [`server::MAX_ISSUING`] bounds how many
//!   are made at once.
//! - Documents bind the certificate's key, not the transcript: whoever holds the private key can relay. Keys are fresh for
//!   every connection and never leave the process.
//! - TLS 1.2 stays allowed by default, since the old programs accept it from each other; it shows the certificates (and so the
//!   documents) to anyone on the wire. [`Client::require_tls13`] and [`Server::require_tls13`] end that.
//! - Certificates are valid for two hours before and after now, and are checked against the clock, as the old peers do. The
//!   freshness of a document comes from the nonce, so this only means that machines whose clocks are further apart cannot
//!   attest each other; the error says by how much. A client without validators does not look at the certificate at all.

pub(crate) mod certificate;
mod client;
mod error;
mod handshake;
pub mod hello;
mod nonce;
mod provider;
pub mod server;
mod stream;

#[cfg(test)]
mod dummy;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use certificate::MAX_DOCUMENT;
pub use client::Client;
pub use error::{ATTESTATION_REFUSED, Error};
pub use server::Server;
pub use stream::split;

/// ALPN's name of HTTP/2 (RFC 9113 §3.1), all that a client of ours offers.
const ALPN_H2: &[u8] = b"h2";
/// What the old peers also offer, though they speak HTTP/2 then as well; an offer of this alone is accepted.
const ALPN_HTTP11: &[u8] = b"http/1.1";
