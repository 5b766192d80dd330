//! A key broker without Kubernetes, and a machine whose data volume it opens: the programs over real TLS, with TPMs of swtpm and with
//! cryptsetup.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::attested::{plain_channel, within};
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use proto::kms::{GET_DATA_KEY, GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{Channel, Code, Status};
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use support::program::{self, Program};
use support::swtpm::Swtpm;
use tempfile::TempDir;

/// The policy of any image, before its machine has joined a cluster.
const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
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
    program.expect("to the first machine that asks");
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
    program.expect("opens only disks with a record");
    assert_eq!(hex(&ask(&one, at, UUID).unwrap().state_disk_key), DISK_KEY);
    assert!(refused(ask(&clone, at, UUID)).contains("belongs to another machine"));
    assert!(refused(ask(&clone, at, OTHER_UUID)).contains("there is no record of this disk"));
    // what the operator does counts at once: a line, which is no JSON, has the command for this machine, and it can be pasted twice
    let line = program.expect("to give the disk ");
    let audited = program.expect("\"disk-unknown\"");
    assert!(!audited.contains("--accept"), "{audited}");
    let (_, command) = line.split_once("run: ").unwrap();
    for _ in 0..2 {
        let mut shell = Command::new("sh");
        let folder = program::built("join-service");
        let path = format!("{}:/usr/bin:/bin", folder.parent().unwrap().display());
        let shell = shell.args(["-c", command]).env("PATH", path);
        let output = shell.current_dir(broker.dir.path()).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
    }
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

const PASSPHRASE: &[u8] = b"the administrator's\npassphrase";
/// A volume of an administrator, with the cheapest key derivation.
const FORMAT: &[&str] = &[
    "luksFormat",
    "--type=luks2",
    "--pbkdf=pbkdf2",
    "--pbkdf-force-iterations=1000",
    "--key-file=-",
];

/// A machine with a TPM and a device, whose key broker is at an address of this test.
struct Machine {
    tpm: Swtpm,
    dir: TempDir,
    broker: IpAddr,
    id: String,
}

impl Machine {
    /// Makes a machine with a blank device.
    fn new(broker: &Broker, at: IpAddr) -> Machine {
        let machine = Machine {
            tpm: Swtpm::start(),
            dir: tempfile::tempdir().unwrap(),
            broker: at,
            id: broker.id(),
        };
        let device = fs::File::create(machine.device()).unwrap();
        device.set_len(32 << 20).unwrap();
        machine
    }

    fn device(&self) -> PathBuf {
        self.dir.path().join("device")
    }

    fn program(&self, command: &str) -> Command {
        let mut program = Command::new(program::built("firstlight-volume"));
        program.arg(command).current_dir(self.dir.path());
        program
    }

    /// Runs `enroll` with these further arguments and this standard input.
    fn enroll(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut program = self.program("enroll");
        program.args(["--name=data", "--device=device", "--folder=volumes"]);
        program.arg("--headers=headers");
        program.arg(format!("--broker={}", self.broker));
        program.arg(format!("--cluster-id={}", self.id));
        program.arg(format!("--tpm={}", self.tpm.location()));
        run_with(program.args(arguments), input)
    }

    /// Opens the volume as systemd-cryptsetup does, and returns the key and the log.
    fn open(&self, timeout: u64) -> (Vec<u8>, String) {
        self.open_named("data", timeout)
    }

    fn open_named(&self, name: &str, timeout: u64) -> (Vec<u8>, String) {
        let settings = self.dir.path().join("volumes/data");
        let mut text = fs::read_to_string(&settings).unwrap_or_default();
        text += &format!("timeout={timeout}\ntpm={}\n", self.tpm.location());
        fs::write(self.dir.path().join("volumes/data"), text).unwrap();
        let mut log = if name == "data" {
            self.copy_header()
        } else {
            String::new()
        };
        let (key, said) = self.serve(name);
        log += &said;
        (key, log)
    }

    /// Runs `copy-header` as the unit does before systemd-cryptsetup starts. Returns the log.
    fn copy_header(&self) -> String {
        let line = "data UUID=x /run/firstlight/volume luks,_netdev,nofail,header=headers/data\n";
        let table = self.dir.path().join("crypttab");
        if !table.exists() {
            fs::write(&table, line).unwrap();
        }
        let output = self.manage("copy-header", &["--crypttab=crypttab"]);
        text(&output.stderr)
    }

    /// Runs a command about the volume `data`.
    fn manage(&self, command: &str, arguments: &[&str]) -> Output {
        let mut program = self.program(command);
        program.args(["--name=data", "--folder=volumes", "--headers=headers"]);
        program.args(arguments).output().unwrap()
    }

    /// Asks for the key as systemd-cryptsetup does.
    fn serve(&self, name: &str) -> (Vec<u8>, String) {
        let path = self.dir.path().join("socket");
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let client = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        // crypttab(5): the name of the client's socket
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed) + (std::process::id() << 8);
        let own = format!("\0{number:x}/cryptsetup/{name}");
        client.bind(&SockAddr::unix(own).unwrap()).unwrap();
        client.connect(&SockAddr::unix(&path).unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let mut serve = self.program("serve");
        serve.args(["--folder=volumes", "--headers=headers"]);
        serve.stdin(OwnedFd::from(accepted));
        let output = serve.output().unwrap();
        // the command has a copy of the connection
        drop(serve);
        let mut key = Vec::new();
        (&client).read_to_end(&mut key).unwrap();
        (key, String::from_utf8(output.stderr).unwrap())
    }

    /// Runs cryptsetup on the device with this standard input.
    fn cryptsetup(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut cryptsetup = Command::new("cryptsetup");
        cryptsetup.arg("--batch-mode").args(arguments);
        run_with(cryptsetup.arg("device").current_dir(self.dir.path()), input)
    }

    fn opens(&self, key: &[u8]) -> bool {
        let arguments = ["open", "--test-passphrase", "--key-file=-"];
        self.cryptsetup(&arguments, key).status.success()
    }

    /// Returns the metadata of the header.
    fn header(&self) -> Value {
        let output = self.cryptsetup(&["luksDump", "--dump-json-metadata"], b"");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Broker {
    /// Returns the ID that machines know the broker by.
    fn id(&self) -> String {
        let mut command = Command::new(program::built("key-service"));
        command.args(["--print-cluster-id", "--master-secret=mastersecret"]);
        command.args(["--salt=salt", "--config=config"]);
        let output = command.current_dir(self.dir.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout).trim().to_owned()
    }

    /// Starts the join service at the port that machines ask, at an address of this test.
    fn serve(&self, arguments: &[&str]) -> (Program, IpAddr) {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed) as u8;
        let [.., high, low] = std::process::id().to_be_bytes();
        let at = IpAddr::from([127, high.max(1) | 0x80, low, number + 1]);
        let listen = format!("--listen={at}:30090");
        let (program, _) = self.join_service(&[&[&listen[..]], arguments].concat());
        (program, at)
    }
}

fn run_with(command: &mut Command, input: &[u8]) -> Output {
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(input).unwrap();
    drop(writer);
    command.stdin(reader).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_new_volume_opens_by_attestation_and_by_its_recovery_key() {
    let broker = Broker::start();
    let (service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    let output = machine.enroll(&["--format"], b"");
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    let find = |before: &str| {
        let mut lines = said.lines();
        lines.find_map(|line| line.strip_prefix(before)).unwrap()
    };
    let line = find("Line for /etc/crypttab: ");
    let uuid = line.split_once("UUID=").unwrap().1[..36].to_owned();
    let expected =
        format!("data UUID={uuid} /run/firstlight/volume luks,_netdev,nofail,header=headers/data");
    assert_eq!(line, expected);
    assert!(broker.record(&uuid).exists());

    let recovery = find("recovery key: ");
    assert!(machine.opens(recovery.as_bytes()));
    let check = |key: &str| {
        let mut program = machine.program("check-recovery-key");
        run_with(program.arg("--device=device"), key.as_bytes())
    };
    let output = check(&recovery.to_uppercase());
    assert_eq!(
        text(&output.stdout),
        "the recovery key opens keyslot 0 of device\n"
    );
    // the last character is one of the check
    let last = if recovery.ends_with('0') { "1" } else { "0" };
    let wrong = recovery[..recovery.len() - 1].to_owned() + last;
    let output = check(&wrong);
    assert!(
        text(&output.stderr).contains("this is no recovery key"),
        "{output:?}"
    );
    // what the programs have logged: no key may be there
    let mut messages = text(&output.stderr);

    let header = machine.header();
    assert_eq!(header["keyslots"].as_object().unwrap().len(), 2);
    let token = &header["tokens"]["0"];
    assert_eq!(token["type"], "firstlight-volume");
    assert_eq!(token["keyslots"], serde_json::json!(["1"]));

    let (key, log) = machine.open(0);
    assert_eq!(key.len(), 32, "{log}");
    assert!(machine.opens(&key));
    messages += &(log + &service.output() + &broker.keys.output());
    assert!(
        !messages.contains(&hex(&key)) && !messages.contains(recovery),
        "{messages}"
    );
    // a copy of the disk in another machine
    let clone = Machine::new(&broker, at);
    fs::copy(machine.device(), clone.device()).unwrap();
    fs::create_dir(clone.dir.path().join("volumes")).unwrap();
    let settings = fs::read_to_string(machine.dir.path().join("volumes/data")).unwrap();
    let settings: Vec<&str> = settings
        .lines()
        .filter(|line| !line.starts_with("tpm="))
        .collect();
    fs::write(
        clone.dir.path().join("volumes/data"),
        settings.join("\n") + "\n",
    )
    .unwrap();
    let (key, log) = clone.open(5);
    assert!(key.is_empty());
    assert!(
        log.contains("this disk belongs to another machine"),
        "{log}"
    );
    // the name of a file elsewhere
    let (key, log) = clone.open_named("../data", 5);
    assert!(
        key.is_empty() && log.contains("cannot be the name of a volume"),
        "{log}"
    );
}

#[test]
fn a_present_volume_keeps_its_keyslots_and_tokens() {
    let broker = Broker::start();
    let (_service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    let foreign = br#"{"type":"other","keyslots":["0"],"secret":"x"}"#;
    let import = ["token", "import", "--json-file=-"];
    assert!(machine.cryptsetup(&import, foreign).status.success());
    let before = machine.header();
    let bytes = fs::read(machine.device()).unwrap();

    for (arguments, input, expected) in [
        (&["--key-file=-"][..], &b"wrong"[..], "does not open device"),
        (&[], b"", "--key-file is missing"),
        (&["--format"], b"", "is already the LUKS2 volume"),
        (&["--key-file=nowhere"], b"", "nowhere: No such file"),
    ] {
        let output = machine.enroll(arguments, input);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(expected), "{output:?}");
    }
    assert!(
        fs::read(machine.device()).unwrap() == bytes,
        "it was written"
    );

    for _ in 0..2 {
        let output = machine.enroll(&["--key-file=-"], PASSPHRASE);
        assert!(output.status.success(), "{output:?}");
        assert!(!text(&output.stdout).contains("recovery key"));
    }
    let mut after = machine.header();
    let ours = after["keyslots"].as_object_mut().unwrap().remove("1");
    assert_eq!(ours.unwrap()["kdf"]["type"], "pbkdf2");
    let token = after["tokens"].as_object_mut().unwrap().remove("1");
    assert_eq!(token.unwrap()["keyslots"], serde_json::json!(["1"]));
    after["digests"]["0"]["keyslots"] = serde_json::json!(["0"]);
    assert_eq!(after, before);
    assert!(machine.opens(PASSPHRASE));
    let (key, log) = machine.open(0);
    assert!(machine.opens(&key), "{log}");
    // what the administrator does afterwards counts
    let mut kill = Command::new("cryptsetup");
    kill.args([
        "--batch-mode",
        "luksKillSlot",
        "--key-file=-",
        "device",
        "1",
    ]);
    let output = run_with(kill.current_dir(machine.dir.path()), PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let (key, log) = machine.open(5);
    assert!(
        key.is_empty() && log.contains("it opens no keyslot"),
        "{log}"
    );
    // enrolled again, the header has one token of ours, and another header of the machine gets no key
    let output = machine.enroll(&["--key-file=-"], PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let header = machine.header();
    let tokens = header["tokens"].as_object().unwrap().values();
    let ours = tokens.filter(|it| it["type"] == "firstlight-volume");
    assert_eq!(ours.count(), 1);
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    let (key, log) = machine.open(5);
    assert!(
        key.is_empty() && log.contains("has the LUKS2 UUID"),
        "{log}"
    );
}

#[test]
fn nothing_is_written_without_the_right_broker() {
    let broker = Broker::start();
    let (service, at) = broker.serve(&[]);
    let mut machine = Machine::new(&broker, at);
    let blank = fs::read(machine.device()).unwrap();
    let enroll = |machine: &Machine, expected: &str| {
        let output = machine.enroll(&["--format", "--timeout=5"], b"");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(expected), "{output:?}");
        assert!(fs::read(machine.device()).unwrap() == blank, "{expected}");
    };
    enroll(&machine, "there is no record of this disk");
    drop(service);
    let (_service, at) = broker.serve(&[ALWAYS]);
    machine.broker = at;
    machine.id = "00".repeat(32);
    enroll(
        &machine,
        "is another key broker: expected the cluster-id 0000",
    );
    machine.id = broker.id();
    fs::write(machine.device(), vec![0; 32 << 20]).unwrap();
    let mut mke2fs = Command::new("/sbin/mke2fs");
    let output = mke2fs.arg("-q").arg(machine.device()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let output = machine.enroll(&["--format", "--timeout=5"], b"");
    let said = text(&output.stderr);
    assert!(said.contains("is not blank: byte 10"), "{said}");
    // content of which nobody knows the form
    let mut content = blank.clone();
    *content.last_mut().unwrap() = 1;
    fs::write(machine.device(), &content).unwrap();
    let said = text(&machine.enroll(&["--format", "--timeout=5"], b"").stderr);
    assert!(said.contains("is not blank: byte 33554431 "), "{said}");
}

/// Replaces the volume's header by another one with the same UUID, as a host can.
fn swap_header(machine: &Machine, uuid: &str, cipher: &[&str], passphrase: &[u8]) {
    let uuid = format!("--uuid={uuid}");
    let arguments = [FORMAT, &[&uuid[..]], cipher].concat();
    let output = machine.cryptsetup(&arguments, passphrase);
    assert!(output.status.success(), "{output:?}");
}

fn uuid_of(machine: &Machine) -> String {
    let output = machine.cryptsetup(&["luksUUID"], b"");
    text(&output.stdout).trim().to_owned()
}

#[test]
fn a_header_that_the_host_swaps_after_the_check_is_not_used() {
    let broker = Broker::start();
    let (_service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    let output = machine.enroll(&["--format"], b"");
    assert!(output.status.success(), "{output:?}");
    let (key, log) = machine.open(5);
    assert!(machine.opens(&key), "{log}");
    let good = fs::read(machine.device()).unwrap();
    assert_eq!(machine.copy_header(), "");
    let unusual = ["--cipher=aes-cbc-plain", "--key-size=256"];
    swap_header(&machine, &uuid_of(&machine), &unusual, b"host's");
    assert!(machine.opens(b"host's"));
    // the key opens the copy, which systemd-cryptsetup reads
    assert_eq!(machine.serve("data").0, key);
    let copied = [
        "open",
        "--test-passphrase",
        "--key-file=-",
        "--header=headers/data",
    ];
    assert!(machine.cryptsetup(&copied, &key).status.success());
    assert!(!machine.cryptsetup(&copied, b"host's").status.success());
    // the next copy is refused, and the one before does not stay
    let (key, log) = machine.open(5);
    assert!(key.is_empty(), "{log}");
    for expected in [
        "keyslot 0 is encrypted with \"aes-cbc-plain\"",
        "there is no headers/data",
    ] {
        assert!(log.contains(expected), "{log}");
    }
    // a systemd-cryptsetup that does not read the copy
    fs::write(machine.device(), good).unwrap();
    let table = machine.dir.path().join("crypttab");
    fs::write(table, "data UUID=x /run/firstlight/volume luks\n").unwrap();
    let (key, log) = machine.open(5);
    assert!(key.is_empty(), "{log}");
    let expected = "crypttab: expected a line for data with the option header=headers/data";
    assert!(log.contains(expected), "{log}");
}

/// A host that knows the volume key of a header must not get a keyslot with the broker's key: it could show it at each later boot.
#[test]
fn no_keyslot_is_made_for_a_header_that_the_host_swaps_during_enrolment() {
    let broker = Broker::start();
    let (service, at) = broker.serve(&[]);
    let machine = Machine::new(&broker, at);
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    let uuid = uuid_of(&machine);
    let output = std::thread::scope(|scope| {
        let enroll = scope.spawn(|| machine.enroll(&["--key-file=-", "--timeout=300"], PASSPHRASE));
        service.expect("disk-unknown");
        // the passphrase opens it, as any passphrase opens a keyslot with a null cipher
        swap_header(&machine, &uuid, &[], PASSPHRASE);
        fs::write(broker.record(&uuid), r#"{"machine":""}"#).unwrap();
        enroll.join().unwrap()
    });
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("cryptsetup luksAddKey"), "{said}");
    let header = machine.header();
    assert_eq!(header["keyslots"].as_object().unwrap().len(), 1, "{header}");
    // neither the volume key nor the copy of the header is left
    let left = fs::read_dir(machine.dir.path().join("headers")).unwrap();
    assert_eq!(left.count(), 0);
}

#[test]
fn a_volume_can_be_taken_back_and_enrolled_with_another_key() {
    let broker = Broker::start();
    let (_service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    let none = machine.program("status").arg("--folder=volumes").output();
    assert!(none.unwrap().stdout.is_empty());
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    let output = machine.enroll(&["--key-file=-"], PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let (first, log) = machine.open(5);
    assert!(machine.opens(&first), "{log}");
    let status = |expected: &[&str], code: i32| {
        let output = machine.manage("status", &["--crypttab=crypttab"]);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        for expected in expected {
            assert!(said.contains(expected), "{said}");
        }
    };
    let broker_line = format!("  key broker {at}\n");
    let lines = [
        "data: closed\n",
        &broker_line,
        "  keyslot    1\n",
        "  crypttab   has its line\n",
    ];
    status(&lines, 0);

    // it does not remove the last key
    let kill = ["luksKillSlot", "--key-file=-"];
    let mut command = Command::new("cryptsetup");
    command
        .args(["--batch-mode"])
        .args(kill)
        .args(["device", "0"]);
    let output = run_with(command.current_dir(machine.dir.path()), &first);
    assert!(output.status.success(), "{output:?}");
    let output = machine.manage("remove", &[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("only the key of the key broker opens"));
    assert!(machine.opens(&first));
    let mut add = Command::new("cryptsetup");
    add.args([
        "--batch-mode",
        "luksAddKey",
        "--key-file=-",
        "--keyfile-size=32",
    ]);
    add.args(["--pbkdf=pbkdf2", "--pbkdf-force-iterations=1000"]);
    add.args(["device", "/proc/self/fd/0"]);
    let output = run_with(
        add.current_dir(machine.dir.path()),
        &[&first[..], PASSPHRASE].concat(),
    );
    assert!(output.status.success(), "{output:?}");

    let output = machine.manage("remove", &[]);
    assert!(output.status.success(), "{output:?}");
    let header = machine.header();
    assert_eq!(header["tokens"], serde_json::json!({}));
    assert_eq!(header["keyslots"].as_object().unwrap().len(), 1);
    assert!(!machine.opens(&first) && machine.opens(PASSPHRASE));
    assert!(!machine.dir.path().join("volumes/data").exists());
    // the key belongs to the UUID
    let change = ["luksUUID", "--uuid", OTHER_UUID];
    assert!(machine.cryptsetup(&change, b"").status.success());
    let output = machine.enroll(&["--key-file=-"], PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let (second, log) = machine.open(5);
    assert!(machine.opens(&second) && second != first, "{log}");
}

/// Returns how many disks the broker has recorded.
fn recorded(broker: &Broker) -> usize {
    let names = fs::read_dir(broker.path("disks")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".json")).count()
}

#[test]
fn a_refused_enrolment_leaves_no_record_no_keyslot_and_no_other_settings() {
    let broker = Broker::start();
    let (_service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    let refused = |arguments: &[&str], input: &[u8], expected: &str| {
        let output = machine.enroll(arguments, input);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(expected), "{output:?}");
    };
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    refused(&[], b"", "--key-file is missing");
    fs::create_dir_all(machine.dir.path().join("volumes/data")).unwrap();
    refused(
        &["--key-file=-"],
        PASSPHRASE,
        "volumes/data: Is a directory",
    );
    fs::remove_dir(machine.dir.path().join("volumes/data")).unwrap();
    assert_eq!(recorded(&broker), 0);

    // no token fits into the header any more, so the keyslot goes again
    for number in 0..32 {
        let import = ["token", "import", "--json-file=-"];
        let foreign = format!(r#"{{"type":"other{number}","keyslots":[]}}"#);
        let output = machine.cryptsetup(&import, foreign.as_bytes());
        assert!(output.status.success(), "{output:?}");
    }
    let before = machine.header();
    refused(&["--key-file=-"], PASSPHRASE, "cryptsetup token");
    assert_eq!(machine.header(), before);
    assert!(!machine.dir.path().join("volumes/data").exists());
    let remove = ["token", "remove", "--token-id=3"];
    assert!(machine.cryptsetup(&remove, b"").status.success());
    let arguments = ["--key-file=-", "--timeout=90"];
    let output = machine.enroll(&arguments, PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(recorded(&broker), 1);
    let settings = fs::read_to_string(machine.dir.path().join("volumes/data")).unwrap();
    assert!(
        settings.contains("keyslot=1\n") && !settings.contains("timeout"),
        "{settings}"
    );

    // the name is that of the first volume, whatever the second device holds
    for content in [&[0; 64][..], b"LUKS\xba\xbe\x00\x02"] {
        let mut other = fs::File::create(machine.dir.path().join("other")).unwrap();
        other.write_all(content).unwrap();
        other.set_len(32 << 20).unwrap();
        refused(
            &["--device=other", "--format"],
            b"",
            "the name data is already used by the volume",
        );
    }
    let mut format = Command::new("cryptsetup");
    format.arg("--batch-mode").args(FORMAT).arg("other");
    let output = run_with(format.current_dir(machine.dir.path()), PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let arguments = ["--device=other", "--key-file=-"];
    refused(
        &arguments,
        PASSPHRASE,
        "other is another volume: choose another --name",
    );
    let path = machine.dir.path().join("volumes/data");
    assert_eq!(fs::read_to_string(path).unwrap(), settings);
    assert_eq!(recorded(&broker), 1);
}

#[test]
fn a_new_volume_that_was_not_made_yet_is_asked_for_by_the_same_uuid() {
    let broker = Broker::start();
    let (service, at) = broker.serve(&[]);
    let machine = Machine::new(&broker, at);
    let asked = |output: &Output| {
        let said = text(&output.stderr);
        let (_, uuid) = said
            .split_once("asking the key broker for the key of ")
            .expect(&said);
        uuid[..36].to_owned()
    };
    let first = asked(&machine.enroll(&["--format", "--timeout=1"], b""));
    assert_eq!(
        asked(&machine.enroll(&["--format", "--timeout=1"], b"")),
        first
    );
    drop(service);
    let (service, _) = broker.join_service(&[&format!("--listen={at}:30090"), ALWAYS]);
    // it ends between the record and the format: nobody reads the recovery key
    let mut program = machine.program("enroll");
    program.args([
        "--name=data",
        "--device=device",
        "--folder=volumes",
        "--headers=headers",
        "--format",
    ]);
    program
        .arg(format!("--broker={at}"))
        .arg(format!("--cluster-id={}", machine.id));
    program.arg(format!("--tpm={}", machine.tpm.location()));
    program.stdout(fs::File::options().write(true).open("/dev/full").unwrap());
    let output = program.output().unwrap();
    assert!(
        text(&output.stderr).contains("the recovery key cannot be written"),
        "{output:?}"
    );
    assert_eq!((asked(&output), recorded(&broker)), (first.clone(), 1));
    let output = machine.enroll(&["--format"], b"");
    assert!(output.status.success(), "{output:?}");
    assert_eq!((uuid_of(&machine), recorded(&broker)), (first, 1));
    let left = fs::read_dir(machine.dir.path().join("volumes")).unwrap();
    assert_eq!(left.count(), 1);
    drop(service);
}

/// A host can write any token, also one that names the keyslot of the recovery key.
#[test]
fn remove_kills_no_keyslot_but_the_one_that_was_enrolled() {
    let broker = Broker::start();
    let (_service, at) = broker.serve(&[ALWAYS]);
    let machine = Machine::new(&broker, at);
    assert!(machine.cryptsetup(FORMAT, PASSPHRASE).status.success());
    let output = machine.enroll(&["--key-file=-"], PASSPHRASE);
    assert!(output.status.success(), "{output:?}");
    let (key, log) = machine.open(5);
    assert!(machine.opens(&key), "{log}");
    let settings = machine.dir.path().join("volumes/data");
    let recorded = fs::read_to_string(&settings).unwrap();
    let token = |keyslots: &str| {
        let remove = ["token", "remove", "--token-id=0"];
        assert!(machine.cryptsetup(&remove, b"").status.success());
        let ours = format!(r#"{{"type":"firstlight-volume","keyslots":{keyslots}}}"#);
        let import = ["token", "import", "--token-id=0", "--json-file=-"];
        let output = machine.cryptsetup(&import, ours.as_bytes());
        assert!(output.status.success(), "{output:?}");
    };
    let unrecorded = recorded.replace("keyslot=1\n", "");
    for (keyslots, settings_now) in [
        (r#"["0","1"]"#, &recorded),
        (r#"["0"]"#, &recorded),
        (r#"["1","0"]"#, &unrecorded),
    ] {
        token(keyslots);
        fs::write(&settings, settings_now).unwrap();
        let output = machine.manage("remove", &[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains("Nothing was removed"), "{said}");
        assert!(
            machine.opens(PASSPHRASE) && machine.opens(&key),
            "{keyslots}"
        );
        assert!(settings.exists());
    }
    token(r#"["1"]"#);
    let output = machine.manage("remove", &[]);
    assert!(output.status.success(), "{output:?}");
    assert!(machine.opens(PASSPHRASE) && !machine.opens(&key));
}

/// A standby of the key broker on another host: it has the same secrets and a copy of the records, and accepts no new disk.
#[test]
fn a_standby_with_a_copy_of_the_records_opens_the_known_disks_only() {
    let broker = Broker::start();
    let (service, at) = broker.serve(&[ALWAYS]);
    let mut machine = Machine::new(&broker, at);
    let standby = Broker::start();
    let (_standby_service, second) = standby.serve(&[]);
    assert_eq!(standby.id(), broker.id());
    let both = format!("--broker={at},{second}");
    let output = machine.enroll(&["--format", &both], b"");
    assert!(output.status.success(), "{output:?}");
    let uuid = uuid_of(&machine);
    let (key, log) = machine.open(0);
    assert!(machine.opens(&key), "{log}");
    drop(service);
    // not before the record is there
    let (none, log) = machine.open(5);
    assert!(none.is_empty(), "{log}");
    for expected in ["cannot connect", "there is no record of this disk"] {
        assert!(log.contains(expected), "{log}");
    }
    fs::copy(broker.record(&uuid), standby.record(&uuid)).unwrap();
    let (same, log) = machine.open(0);
    assert_eq!(same, key, "{log}");
    // a clone of the disk stays closed there, too
    machine.tpm = Swtpm::start();
    let (none, log) = machine.open(5);
    assert!(none.is_empty(), "{log}");
    assert!(log.contains("belongs to another machine"), "{log}");
}
