//! gRPC over HTTP/2 without an asynchronous runtime: [`h2`] is a state machine over bytes, [`grpc`] has the sockets and threads.
//! [`half_open`] bounds connections before their handshake is over, [`share`] what each peer may take of a server.

pub mod grpc;
pub mod h2;
pub mod half_open;
pub mod share;
