//! A gRPC server without attestation, for tools that test HTTP/2: plaintext, and ordinary TLS with
//! ALPN `h2`. It prints the port of each and serves until its standard input ends.

#[path = "../interop/tls.rs"]
#[allow(dead_code)]
mod tls;

use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc::grpc::{Limits, Router, Server};
use transport::Accept;

fn main() -> io::Result<()> {
    let identity = tls::Identity::new();
    let plain = serve(Arc::new(|socket: TcpStream, _: Instant| {
        transport::plain::transport(socket)
    }))?;
    let encrypted = serve(identity.accept())?;
    println!(
        "{} {}",
        plain.local_addr().port(),
        encrypted.local_addr().port()
    );
    io::stdin().read_to_end(&mut Vec::new())?;
    plain.stop(Duration::ZERO);
    encrypted.stop(Duration::ZERO);
    Ok(())
}

fn serve(accept: Arc<dyn Accept>) -> io::Result<Server> {
    Server::start(
        "h2",
        TcpListener::bind("127.0.0.1:0")?,
        accept,
        Router::new(),
        Limits::default(),
    )
}
