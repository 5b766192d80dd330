//! Both roles against each other, over loopback sockets.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::dummy::{Dummy, OID, OTHER_OID};
use super::*;
use crate::attestation::{IssueError, Issuer, Oid, ValidateError, Validator};
use crate::grpc::Transport;

type Issuers = Option<Arc<dyn Issuer>>;
type Validators = Vec<Arc<dyn Validator>>;

const TIME: Duration = Duration::from_secs(20);

fn soon() -> Instant {
    Instant::now() + TIME
}

fn issuer() -> Issuers {
    Some(Arc::new(Dummy(OID)))
}

fn validators() -> Validators {
    vec![Arc::new(Dummy(OID))]
}

/// Two connected sockets, the second one accepted.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// What each side got.
fn meet(client: Client, server: Server) -> (Result<Transport, Error>, Result<Transport, Error>) {
    let (near, far) = sockets();
    let server = thread::spawn(move || server.handshake(far, soon()));
    let client = client.connect(near, soon());
    (client, server.join().unwrap())
}

/// A line each way.
fn greet(client: &mut Transport, server: &mut Transport) -> io::Result<()> {
    for (from, to) in [(&mut client.writer, &mut server.reader), (&mut server.writer, &mut client.reader)] {
        from.write_all(b"hello\n")?;
        from.flush()?;
        let mut line = [0; 6];
        to.read_exact(&mut line)?;
        assert_eq!(&line, b"hello\n");
    }
    Ok(())
}

#[test]
fn every_mode_carries_data_both_ways() {
    for (server_attests, client_attests) in [(true, true), (true, false), (false, true), (false, false)] {
        let client = Client::new(
            if client_attests { issuer() } else { None },
            if server_attests { validators() } else { vec![] },
        );
        let server = Server::new(
            if server_attests { issuer() } else { None },
            if client_attests { validators() } else { vec![] },
        );
        let (client, server) = meet(client, server);
        greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
    }
}
