//! The key exchange X25519MLKEM768 with OpenSSL 3.5, in both directions. `tools/openssl.sh` fetches it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    ClientConfig, ClientConnection, NamedGroup, RootCertStore, ServerConfig, ServerConnection,
};
use support::foreign::fetched;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const BOTH: NamedGroup = NamedGroup::X25519MLKEM768;

/// A certificate of `localhost` and its key, as files.
struct Identity {
    folder: TempDir,
}

impl Identity {
    fn new() -> Identity {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("crt"), made.cert.pem()).unwrap();
        std::fs::write(folder.path().join("key"), made.signing_key.serialize_pem()).unwrap();
        Identity { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn certificate(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.file("crt")).unwrap()
    }

    fn server_config(&self) -> ServerConfig {
        let key = PrivateKeyDer::from_pem_file(self.file("key")).unwrap();
        ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate()], key)
            .unwrap()
    }
}

/// Returns the end of a connection over TCP that does not wait for ever.
fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A running openssl(1); it ends when dropped.
struct Openssl {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Openssl {
    fn start(command: &mut Command) -> Openssl {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Openssl { process, output }
    }

    /// Reads its output up to a line that begins so, and returns that line.
    fn line(&mut self, start: &str) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "{all}");
            if line.starts_with(start) {
                return line;
            }
            all.push_str(&line);
        }
    }
}

impl Drop for Openssl {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn openssl() -> Command {
    Command::new(fetched("openssl.sh"))
}

#[test]
fn a_client_of_openssl_agrees_on_x25519mlkem768_with_our_server() {
    let config = Arc::new(Identity::new().server_config());
    // the server chooses the first group whose share the client has sent (`*`, else the first group)
    for (groups, expected) in [
        ("X25519MLKEM768", BOTH),
        ("X25519MLKEM768:X25519", BOTH),
        ("*X25519:*X25519MLKEM768", NamedGroup::X25519),
        ("X25519", NamedGroup::X25519),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Openssl::start(
            openssl()
                .args([
                    "s_client",
                    "-quiet",
                    "-verify_quiet",
                    "-servername",
                    "localhost",
                ])
                .args(["-groups", groups, "-connect"])
                .arg(listener.local_addr().unwrap().to_string()),
        );
        let mut socket = patient(listener.accept().unwrap().0);
        let mut server = ServerConnection::new(config.clone()).unwrap();
        let mut stream = rustls::Stream::new(&mut server, &mut socket);
        let mut process_input = client.process.stdin.take().unwrap();
        process_input.write_all(b"question\n").unwrap();
        let mut question = [0; 9];
        stream.read_exact(&mut question).unwrap();
        assert_eq!(&question, b"question\n");
        stream.write_all(b"answer\n").unwrap();
        assert_eq!(client.line("answer"), "answer\n");
        let group = server.negotiated_key_exchange_group().unwrap();
        assert_eq!(group.name(), expected, "{groups}");
    }
}

/// Returns the configuration of a client that trusts only this server.
fn client_that_trusts(server: &Identity) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(server.certificate()).unwrap();
    let config = ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

#[test]
fn our_client_agrees_on_x25519mlkem768_with_a_server_of_openssl() {
    let identity = Identity::new();
    let config = client_that_trusts(&identity);
    for (groups, expected) in [
        ("X25519MLKEM768", BOTH),
        ("X25519:X25519MLKEM768", BOTH),
        ("X25519", NamedGroup::X25519),
    ] {
        let mut server = Openssl::start(
            openssl()
                .args(["s_server", "-accept", "127.0.0.1:0", "-tls1_3", "-rev"])
                .args(["-groups", groups, "-cert"])
                .arg(identity.file("crt"))
                .arg("-key")
                .arg(identity.file("key")),
        );
        let line = server.line("ACCEPT ");
        let address = line.trim().strip_prefix("ACCEPT ").unwrap();
        let mut socket = patient(TcpStream::connect(address).unwrap());
        let name = "localhost".try_into().unwrap();
        let mut client = ClientConnection::new(config.clone(), name).unwrap();
        let mut stream = rustls::Stream::new(&mut client, &mut socket);
        stream.write_all(b"abc\n").unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"cba\n", "{groups}");
        let group = client.negotiated_key_exchange_group().unwrap();
        assert_eq!(group.name(), expected, "{groups}");
    }
}

/// Returns bytes that depend on their position.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect()
}

/// Splits our end of a connection with openssl(1).
fn split(mut connection: rustls::Connection, mut socket: TcpStream) -> transport::Transport {
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).unwrap();
    }
    atls::split(connection, socket).unwrap()
}

#[test]
fn streams_of_openssl_with_records_of_any_size_arrive_whole() {
    let identity = Identity::new();
    let config = client_that_trusts(&identity);
    let content = pattern(3 << 20);
    std::fs::write(identity.file("content"), &content).unwrap();
    for records in [
        &[][..],
        &["-max_send_frag", "512"],
        // padded to the maximum size (RFC 8446 §5.4)
        &["-max_send_frag", "1000", "-record_padding", "16384"],
        &["-max_send_frag", "16384", "-split_send_frag", "10007"],
    ] {
        let mut server = Openssl::start(
            openssl()
                .current_dir(identity.folder.path())
                .args(["s_server", "-accept", "127.0.0.1:0", "-tls1_3", "-HTTP"])
                .args(["-cert", "crt", "-key", "key"])
                .args(records),
        );
        let line = server.line("ACCEPT ");
        let address = line.trim().strip_prefix("ACCEPT ").unwrap();
        let socket = patient(TcpStream::connect(address).unwrap());
        let name = "localhost".try_into().unwrap();
        let client = ClientConnection::new(config.clone(), name).unwrap();
        let mut transport = split(client.into(), socket);
        let request = b"GET /content HTTP/1.0\r\n\r\n";
        transport.writer.write_all(request).unwrap();
        // -HTTP sends the file as it is
        let mut received = vec![0; content.len()];
        transport.reader.read_exact(&mut received).unwrap();
        assert!(received == content, "{records:?}");
    }
}

#[test]
fn what_our_stream_sends_in_writes_of_any_size_arrives_at_openssl() {
    let config = Identity::new().server_config();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Openssl::start(
        openssl()
            .args(["s_client", "-quiet", "-verify_quiet", "-connect"])
            .arg(listener.local_addr().unwrap().to_string()),
    );
    let socket = patient(listener.accept().unwrap().0);
    let server = ServerConnection::new(Arc::new(config)).unwrap();
    let transport = split(server.into(), socket);
    let content = pattern(1 << 20);
    let sent = content.clone();
    let writing = std::thread::spawn(move || {
        let (mut writer, mut rest) = (transport.writer, &sent[..]);
        for size in [1, 16_383, 16_384, 16_385, 65_536, 65_537, 200_000]
            .into_iter()
            .cycle()
        {
            if rest.is_empty() {
                return;
            }
            let (now, later) = rest.split_at(size.min(rest.len()));
            writer.write_all(now).unwrap();
            rest = later;
        }
    });
    // the end of the stream ends openssl(1)
    let mut received = Vec::new();
    client.output.read_to_end(&mut received).unwrap();
    assert!(received == content);
    writing.join().unwrap();
}
