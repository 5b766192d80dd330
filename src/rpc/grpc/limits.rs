//! The limits of a server.

use std::time::Duration;

use crate::h2::{self, Allowance};

/// The maximum resources that a server spends on its peers. Beyond a limit it refuses connections
/// or calls, and says so in the log.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of connections. A further one takes the place of a half-open one, or is
    /// closed at once.
    pub connections: usize,
    /// Maximum number of connections of one peer (an IPv4 address, or an IPv6 network of 64 bits).
    /// A further one takes the place of a half-open one of this peer, or is closed at once.
    pub connections_per_peer: usize,
    /// Maximum number of connections whose handshake is not complete. A further one takes the place
    /// of the oldest one of the peer that has the most. At most half of all connections, so that
    /// established connections keep their places.
    pub half_open: usize,
    /// Maximum number of handshakes that run at once, each with a thread; at most half of them of
    /// one peer. The other connections wait, and peers take turns.
    pub handshakes: usize,
    /// A handshake that has waited for its peer for this long loses its thread when few threads are
    /// free.
    pub handshake_patience: Duration,
    /// Time from accept to the end of the peer's HTTP/2 preface, including TLS.
    pub handshake: Duration,
    /// Time without a call after which a connection is closed (GOAWAY).
    pub idle: Duration,
    /// Time after which a connection accepts no further calls (GOAWAY), as grpc-go's
    /// `MaxConnectionAge`. The client must then prove itself again in a new handshake.
    pub max_age: Option<Duration>,
    /// How long the running calls of a connection may continue after that GOAWAY (grpc-go's
    /// `MaxConnectionAgeGrace`).
    pub max_age_grace: Duration,
    /// Time without a byte from the peer after which a PING is sent (grpc-go's keepalive `Time`).
    pub keepalive: Duration,
    /// Time without an answer to that PING after which the connection is closed (grpc-go's
    /// keepalive `Timeout`).
    pub keepalive_timeout: Duration,
    /// Maximum time from a call's headers to the end of its request, for methods that take one
    /// message. Also the maximum time without progress while a peer does not read what we send.
    pub stall: Duration,
    /// Maximum number of calls at once on one connection (SETTINGS_MAX_CONCURRENT_STREAMS).
    pub streams: u32,
    /// Number of calls of one connection that may be reset, refused without a handler, or refused
    /// because the request cannot be decoded. Beyond it the connection ends (ENHANCE_YOUR_CALM).
    pub resets: Allowance,
    /// Maximum number of handlers that run at once in the whole server; a further call ends with
    /// RESOURCE_EXHAUSTED. One peer (an IPv4 address, or an IPv6 network of 64 bits) leaves the
    /// last quarter to others.
    pub handlers: usize,
    /// Maximum size in bytes of a request's headers (SETTINGS_MAX_HEADER_LIST_SIZE, RFC 9113
    /// §6.5.2).
    pub header_bytes: u32,
    /// Maximum size in bytes of a request message; a call with a larger one ends with
    /// RESOURCE_EXHAUSTED.
    pub message_bytes: usize,
    /// Maximum number of bytes in the whole server for requests until their handlers return,
    /// responses that a peer does not read, and buffers beyond what each connection has. One peer
    /// leaves the last quarter to others; each may have this number divided by `connections` even
    /// if all the rest is taken. Beyond the limit a call ends with RESOURCE_EXHAUSTED, and
    /// less is received from a peer that does not read.
    pub buffered_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            connections_per_peer: 256,
            half_open: 512,
            handshakes: 256,
            // A peer that attests itself waits for its TPM during the handshake.
            handshake_patience: Duration::from_secs(3),
            // grpc-go has 120 s; an attested handshake takes less than one second.
            handshake: Duration::from_secs(20),
            idle: Duration::from_secs(600),
            max_age: None,
            max_age_grace: Duration::from_secs(20),
            keepalive: Duration::from_secs(15),
            keepalive_timeout: Duration::from_secs(20),
            stall: Duration::from_secs(60),
            streams: 100,
            resets: h2::H2Limits::default().resets,
            handlers: 128,
            header_bytes: 16 << 10,
            // The usual default of gRPC.
            message_bytes: 4 << 20,
            buffered_bytes: 8 << 20,
        }
    }
}
