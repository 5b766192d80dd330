//! Attested TLS: TLS in which an end proves which software its machine runs. `docs/protocol.md` specifies both forms.
//!
//! In the **strong form** (`exchange.rs`) both ends exchange documents inside a TLS 1.3 connection.
//! The documents cover the exporter of the connection. Our own programs use it with each other.
//!
//! The **old form** is for programs of Edgeless Systems' Constellation: TLS 1.3 (RFC 8446) with
//! self-signed certificates. The certificate of an end that *issues* has one extension with an
//! attestation document that binds the key of the certificate and a nonce of the peer. The nonces
//! are in the same fields as in Constellation:
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
//! The certificate request and the client's certificate exist only if the server validates. In the
//! old form, keys are used for one connection only. Sessions are never resumed, so every connection
//! has a new attestation in either form. ALPN selects the form: the client offers both, and the
//! transcript of the handshake protects the offer.
//!
//! | file | work |
//! |---|---|
//! | `client.rs`, `server.rs` | the two roles: a rustls configuration for one connection or for all of the strong form, hooks that issue and ask the judge |
//! | `exchange.rs` | the strong form: offers and proofs after the handshake |
//! | `forms.rs` | which forms an end accepts, as protocols of TLS |
//! | `handshake.rs` | the blocking handshake under one total deadline; alert and drain when it fails |
//! | [`hello`] | hides from rustls a server name that is not a host name (a state machine over bytes, no I/O) |
//! | `provider.rs` | the cryptography: algorithms, and the transcript hashes, which revert the change of `hello` |
//! | `nonce.rs`, `certificate.rs` | nonces and certificates of the old form |
//! | `verdict.rs` | what issuer and judge said in a handshake of the old form |
//! | `stream.rs` | [`split`]: two independent halves of an established TLS connection, attested or not |
//!
//! # What a peer can and cannot do
//!
//! - A peer receives only an alert; the reason why its document was refused stays in our [`Error`]
//!   and log.
//! - The server proves itself before the client has proven anything. So an unauthenticated client
//!   can make the server issue one document (a TPM quote) per connection. [`server::MAX_ISSUING`]
//!   limits how many are made at the same time.
//! - In the old form a document binds the key of the certificate, not the transcript: a party with
//!   the private key can relay. The strong form stops this. [`Client::require_strong`] and
//!   [`Server::require_strong`] refuse the old form.
//! - TLS 1.2 is refused. Constellation's programs would accept it, but both ends support 1.3 and
//!   choose that. TLS 1.2 shows the certificates, and so the documents, to anyone on the network.
//! - No clock is compared with the validity of a certificate, and ours are always valid: the nonce
//!   guarantees the freshness of a document ([`certificate`] says why this is sufficient). A client
//!   without a judge does not check the certificate.

pub(crate) mod certificate;
mod client;
mod error;
mod exchange;
mod forms;
mod handshake;
pub mod hello;
mod nonce;
mod provider;
pub mod server;
mod stream;
mod verdict;

#[cfg(test)]
#[path = "tests/dummy.rs"]
mod dummy;
#[cfg(test)]
mod tests;

pub use certificate::MAX_DOCUMENT;
pub use client::Client;
pub use error::{Error, FIRST_PAUSE_ALERT, pause_of};
// also for TLS without attestation
pub use handshake::{Timed, complete};
pub use server::Server;
pub use stream::split;

/// The ALPN protocol name of HTTP/2 (RFC 9113 §3.1). Our clients offer only this.
const ALPN_H2: &[u8] = b"h2";
/// The second ALPN protocol name that old peers offer. They always use HTTP/2; an offer of this
/// name alone is accepted.
const ALPN_HTTP11: &[u8] = b"http/1.1";
