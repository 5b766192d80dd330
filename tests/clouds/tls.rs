//! An API whose certificate leads to none of the image's authorities gets no request.

use std::io::Read;
use std::net::TcpListener;
use std::thread;

use rustls::{ServerConnection, StreamOwned};

use super::{client, error};
use common::{aws, cloud_server};

#[test]
fn an_api_with_a_certificate_of_its_own_gets_no_credentials() {
    let (config, _) = cloud_server::own_certificate();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let api = format!("https://{}", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let connection = ServerConnection::new(config).unwrap();
        let mut got = vec![];
        let _ = StreamOwned::new(connection, socket).read_to_end(&mut got);
        got
    });
    let (_, imds) = aws::lone_instance();
    let metadata = client("aws", &format!("{imds},ec2={api}"));
    let error = error(metadata.peers());
    assert!(
        error.contains(&api) && error.contains("certificate"),
        "{error}"
    );
    assert_eq!(server.join().unwrap(), b"");
}
