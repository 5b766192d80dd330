//! A key broker without Kubernetes: the programs over real TLS, with TPMs of swtpm.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use booted_proto::join::ISSUE_REJOIN_TICKET;
use booted_proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use booted_proto::kms::{GET_DATA_KEY, GetDataKeyRequest, GetDataKeyResponse};
use common::attested::{plain_channel, within};
use rpc::grpc::{Channel, Code, Status};
use support::program::{self, Program};
use support::swtpm::Swtpm;
use tempfile::TempDir;

/// The policy of any image, before its machine has joined a cluster.
const POLICY: &str = r#"{"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
const UUID: &str = "00000000-0000-0000-0000-000000000000";
const OTHER_UUID: &str = "00000000-0000-0000-0000-000000000001";
/// The key of [`UUID`] with a master secret and a salt of 32 zeros each.
const DISK_KEY: &str = "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665";
const ALWAYS: &str = "--enroll-until=9000-01-01";

/// The files of a key broker.
struct Broker {
    dir: TempDir,
    keys: Program,
    keys_at: SocketAddr,
}

impl Broker {
    /// Starts the key service.
    fn start() -> Broker {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| fs::write(dir.path().join(name), content).unwrap();
        for folder in ["config", "disks"] {
            fs::create_dir(dir.path().join(folder)).unwrap();
        }
        file("mastersecret", &[0; 32]);
        file("salt", &[0; 32]);
        file("secret", &[7; 32]);
        file("config/attestationConfig", POLICY.as_bytes());
        file("config/measurementSalt", &[3; 32]);
        let mut command = Command::new(program::built("key-service"));
        command.args([
            "--clients=secret",
            "--clients-secret=secret",
            "--listen=127.0.0.1:0",
            "--master-secret=mastersecret",
            "--salt=salt",
        ]);
        let keys = Program::start(command.current_dir(dir.path()));
        let keys_at = address(&keys.expect("serving data keys"));
        Broker { dir, keys, keys_at }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the join service with these further arguments.
    fn join_service(&self, arguments: &[&str]) -> (Program, SocketAddr) {
        let program = Program::start(&mut self.join_command(arguments));
        let address = address(&program.expect("serving join requests"));
        (program, address)
    }

    fn join_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program::built("join-service"));
        command.arg(format!("--key-service={}", self.keys_at));
        command.args([
            "--key-service-auth=secret",
            "--key-service-secret=secret",
            "--listen=127.0.0.1:0",
            "--config=config",
            "--records=disks",
            "--require=strong",
        ]);
        command.args(arguments).current_dir(self.dir.path());
        command
    }

    fn record(&self, uuid: &str) -> PathBuf {
        self.path(&format!("disks/{uuid}.json"))
    }
}

/// Returns the first address in a line.
fn address(line: &str) -> SocketAddr {
    let words = line.split(|c: char| c.is_whitespace() || c == ',');
    words.filter_map(|word| word.parse().ok()).next().unwrap()
}

/// Asks for the key of a disk as the machine with this TPM.
fn ask(
    machine: &Swtpm,
    broker: SocketAddr,
    uuid: &str,
) -> Result<IssueRejoinTicketResponse, Status> {
    let issuer = verifier::qemu_vtpm::issuer(machine.location().parse().unwrap(), None);
    let client = atls::Client::new(Some(Arc::new(issuer)), None);
    let socket = TcpStream::connect(broker).unwrap();
    let soon = Instant::now() + Duration::from_secs(20);
    let transport = client.connect(socket, soon).unwrap();
    let request = IssueRejoinTicketRequest {
        disk_uuid: uuid.into(),
    };
    Channel::new(transport, "x")?.unary(ISSUE_REJOIN_TICKET, &request, &within(20))
}

fn refused(answer: Result<IssueRejoinTicketResponse, Status>) -> String {
    let status = answer.err().expect("a refusal");
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    status.message().to_owned()
}

fn hex(bytes: &[u8]) -> String {
    base::text::hex(bytes)
}

#[test]
fn a_disk_opens_only_in_the_machine_that_its_record_names() {
    let broker = Broker::start();
    let (one, clone) = (Swtpm::start(), Swtpm::start());
    let (mut program, at) = broker.join_service(&[ALWAYS]);
    program.expect("are recorded for the machine that asks first");
    let ticket = ask(&one, at, UUID).unwrap();
    assert_eq!(hex(&ticket.state_disk_key), DISK_KEY);
    assert_eq!(ticket.measurement_salt, [3; 32]);
    program.expect("the machine is now recorded as the owner of this disk");
    assert!(refused(ask(&clone, at, UUID)).contains("belongs to another machine"));
    let line = program.expect("\"disk-of-other\"");
    let record = format!("disks/{UUID}.json names another machine");
    assert!(line.contains(&record), "{line}");
    // only one service writes the records
    let second = broker.join_command(&[]).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(
        said.contains("another join service uses this folder"),
        "{said}"
    );
    program.terminate();
    assert!(program.exit().success());

    // the owner is still known, and no further disk is accepted
    let (program, at) = broker.join_service(&[]);
    program.expect("only disks with a record");
    assert_eq!(hex(&ask(&one, at, UUID).unwrap().state_disk_key), DISK_KEY);
    assert!(refused(ask(&clone, at, UUID)).contains("belongs to another machine"));
    assert!(refused(ask(&clone, at, OTHER_UUID)).contains("there is no record of this disk"));
    let line = program.expect("\"disk-unknown\"");

    // what the operator writes counts at once: the line has the command for this machine
    let (_, command) = line.split_once("to give it to this machine: ").unwrap();
    let command = command.split_once(".json").unwrap().0.replace("\\\"", "\"") + ".json";
    let mut shell = Command::new("sh");
    let shell = shell.args(["-c", &command]).current_dir(broker.dir.path());
    assert!(shell.status().unwrap().success(), "{command}");
    assert!(refused(ask(&one, at, OTHER_UUID)).contains("belongs to another machine"));
    ask(&clone, at, OTHER_UUID).unwrap();
    fs::write(broker.record(UUID), "").unwrap();
    let status = ask(&one, at, UUID).err().unwrap();
    assert_eq!(status.code(), Code::Internal, "{status}");
}

/// The same two requests at the same time, for several disks: one machine gets each disk.
#[test]
fn of_two_machines_that_ask_at_once_one_gets_the_disk() {
    let broker = Broker::start();
    let machines = [Swtpm::start(), Swtpm::start()];
    let (_program, at) = broker.join_service(&[ALWAYS]);
    for number in 0..8 {
        let uuid = format!("00000000-0000-0000-0000-00000000001{number}");
        let given = std::thread::scope(|scope| {
            let asked = machines
                .each_ref()
                .map(|machine| scope.spawn(|| ask(machine, at, &uuid)));
            asked.map(|asked| asked.join().unwrap().is_ok())
        });
        assert!(given[0] != given[1], "{given:?}");
        let owner = machines.iter().zip(given).find(|(_, given)| *given);
        ask(owner.unwrap().0, at, &uuid).unwrap();
    }
}

#[test]
fn the_services_need_the_same_secret_and_send_no_key_in_plaintext() {
    let broker = Broker::start();
    let machine = Swtpm::start();
    fs::write(broker.path("other"), [8; 32]).unwrap();
    let (program, at) = broker.join_service(&[ALWAYS, "--key-service-secret=other"]);
    let status = ask(&machine, at, UUID).err().unwrap();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    program.expect("invalid peer certificate");
    // nothing was given, so nothing was recorded
    assert!(!broker.record(UUID).exists());
    drop(program);

    fs::write(broker.path("other"), [8; 31]).unwrap();
    let (program, at) = broker.join_service(&[ALWAYS, "--key-service-secret=other"]);
    assert!(ask(&machine, at, UUID).is_err());
    program.expect("expected 32 to 4096 bytes, got 31");

    let answer: Result<GetDataKeyResponse, Status> =
        plain_channel(broker.keys_at).unary(GET_DATA_KEY, &key_request(), &within(5));
    assert!(answer.is_err());
    assert!(!broker.keys.output().contains("result=given"));
}

/// An attacker who can reach the key service, and lacks only the token.
#[test]
fn a_caller_without_the_token_gets_no_key() {
    let broker = Broker::start();
    let fetch = format!(
        "openssl s_client -connect {} -alpn h2 </dev/null 2>/dev/null | openssl x509 -outform DER",
        broker.keys_at
    );
    let output = Command::new("sh").args(["-c", &fetch]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(output.stdout.into()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let call = |token: Option<&str>| {
        let socket = TcpStream::connect(broker.keys_at).unwrap();
        let name = "key-service".try_into().unwrap();
        let client = rustls::ClientConnection::new(Arc::new(config.clone()), name).unwrap();
        let mut connection = rustls::Connection::from(client);
        while connection.is_handshaking() {
            connection.complete_io(&mut &socket).unwrap();
        }
        let channel = Channel::new(atls::split(connection, socket).unwrap(), "x").unwrap();
        let mut options = within(5);
        if let Some(token) = token {
            options.metadata.insert("authorization", token).unwrap();
        }
        let answer: Result<GetDataKeyResponse, Status> =
            channel.unary(GET_DATA_KEY, &key_request(), &options);
        answer.map_err(|status| status.code())
    };
    let zeros = format!("Bearer {}", "00".repeat(32));
    for token in [None, Some("Bearer"), Some(&zeros[..])] {
        assert_eq!(call(token).err(), Some(Code::Unauthenticated), "{token:?}");
    }
}

#[test]
fn contradictory_options_are_refused() {
    let broker = Broker::start();
    let said = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = said(&mut broker.join_command(&["--enroll-until=tomorrow"]));
    assert!(text.contains("expected a date"), "{text}");
    let mut command = Command::new(program::built("join-service"));
    command.args([
        "--key-service=127.0.0.1:1",
        "--key-service-auth=none",
        ALWAYS,
    ]);
    let text = said(&mut command);
    assert!(
        text.contains("--enroll-until: it needs --records"),
        "{text}"
    );
    let text = said(&mut broker.join_command(&["--migrate-until=9000-01-01"]));
    assert!(
        text.contains("--migrate-until is for disks of Constellation"),
        "{text}"
    );
    let config = broker.path("kubeconfig");
    fs::write(&config, KUBECONFIG).unwrap();
    let text = said(&mut broker.join_command(&["--kubeconfig=kubeconfig"]));
    assert!(text.contains("remove --records, or --kubeconfig"), "{text}");
}

const KUBECONFIG: &str = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
"clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1"}}],
"users": [{"name": "u", "user": {"token": "t"}}]}"#;

fn key_request() -> GetDataKeyRequest {
    GetDataKeyRequest {
        data_key_id: UUID.into(),
        length: 32,
        ..Default::default()
    }
}
