//! Tests of the key service with machines that prove by their TPM (swtpm) that they belong to the cluster, and with others.
//! `tests/services.rs` tests clients of Constellation, and `tests/kubernetes_keys.rs` tests clients with tokens.

use support::program;
use support::swtpm;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, cluster_id, derive_key};
use program::Program;
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use proto::kms::GET_DATA_KEY;
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{CallOptions, Channel, Code, Status};
use services::cluster::keys::{Auth, Error, KeyClient};
use services::key_service::master_secret::MasterSecretFiles;
use services::key_service::{Clients, KeyService, KeyServiceConfig};
use swtpm::Swtpm;
use tempfile::TempDir;
use tpm::Tpm;
use transport::Transport;
use verifier::{Exception, Measurement, Policy, Stage, qemu_vtpm, vtpm};

const UUID: &str = "00000000-0000-0000-0000-000000000000";
/// The key of [`UUID`] with a master secret and a salt of 32 zeros each.
const DISK_KEY: &str = "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665";
const SALT: [u8; 32] = [3; 32];
/// The largest grant that an operator can give to other machines of the cluster.
const MEMBERS: &str = "local=disk,ssh,measurement;member=disk";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The shared files of two hosts in the cluster: the master secret, which is `secret` repeated, its
/// salt of zeros, and the policy.
fn config(secret: u8, policy: &Policy) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mastersecret"), [secret; 32]).unwrap();
    fs::write(dir.path().join("salt"), [0; 32]).unwrap();
    fs::write(dir.path().join("measurementSalt"), SALT).unwrap();
    fs::write(
        dir.path().join("attestationConfig"),
        cli::trust::policy::text(policy),
    )
    .unwrap();
    dir
}

/// A cluster's policy that any machine meets which has joined no cluster.
fn policy() -> Policy {
    Policy::new(
        [(
            15,
            Measurement {
                expected: vec![0; 32],
                warn_only: false,
            },
        )]
        .into(),
    )
    .unwrap()
    .permitting(Exception::AnyImage)
}

/// Starts a machine of the cluster with this master secret. The image measures this value into PCR
/// 4.
fn member(secret: u8, image: &[u8]) -> Swtpm {
    let tpm = Swtpm::start();
    let measurement_secret = derive_key(
        &[secret; 32],
        &[0; 32],
        Dek::named(MEASUREMENT_SECRET_ID).info(),
        KEY_LEN,
    );
    let mut open = Tpm::open(&tpm.location().parse().unwrap()).unwrap();
    open.pcr_event(4, image).unwrap();
    open.pcr_event(15, &cluster_id(&measurement_secret.unwrap(), &SALT))
        .unwrap();
    drop(open);
    tpm
}

fn command(program: &str, dir: &Path, tpm: &Swtpm) -> Command {
    let mut command = Command::new(support::program::built(program));
    command
        .args([
            "--listen",
            "127.0.0.1:0",
            "--config",
            ".",
            "--tpm",
            &tpm.location(),
        ])
        .current_dir(dir);
    command
}

fn key_service_command(dir: &Path, tpm: &Swtpm) -> Command {
    let mut command = command("key-service", dir, tpm);
    command.args(["--master-secret", "mastersecret", "--salt", "salt"]);
    command
}

/// Starts the key service on a machine. Returns it and its address.
fn key_service(dir: &Path, tpm: &Swtpm) -> (Program, SocketAddr) {
    start(&mut key_service_command(dir, tpm))
}

/// Starts the key service with a grant for other machines.
fn key_service_for_members(dir: &Path, tpm: &Swtpm) -> (Program, SocketAddr) {
    start(key_service_command(dir, tpm).args(["--grant", MEMBERS]))
}

fn start(command: &mut Command) -> (Program, SocketAddr) {
    let program = Program::start(command);
    let address = address(&program.expect("serving data keys"));
    (program, address)
}

fn address(line: &str) -> SocketAddr {
    line.split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.parse().ok())
        .unwrap()
}

/// Returns the client of a key service that the join service on a machine uses.
fn key_client(address: SocketAddr, dir: &Path, tpm: &Swtpm) -> KeyClient {
    let auth = Auth::Attested {
        variant: &qemu_vtpm::VARIANT,
        tpm: tpm.location().parse().unwrap(),
        config_dir: dir.into(),
        collateral: None,
    };
    KeyClient::new(&address.to_string(), auth)
}

fn failure(result: Result<Secret, Error>) -> String {
    match result.unwrap_err() {
        Error::Temporary(text) => format!("passing: {text}"),
        Error::Permanent(text) => format!("lasting: {text}"),
        Error::Waiting(text) => format!("waiting: {text}"),
    }
}

#[test]
fn programs_of_the_same_machine_get_the_keys_of_tickets_and_each_decision_is_logged() {
    let (dir, tpm) = (config(0, &policy()), member(0, b"image"));
    let (program, address) = key_service(dir.path(), &tpm);
    let client = key_client(address, dir.path(), &tpm);
    assert_eq!(
        hex(client.data_key(UUID, 32, None).unwrap().expose()),
        DISK_KEY
    );
    for (id, len) in [
        ("measurementSecret", 32),
        ("ca_emergency_ssh_host", 32),
        ("ca_emergency_ssh.pub", 51),
    ] {
        assert_eq!(client.data_key(id, len, None).unwrap().len(), len);
    }
    let denied = failure(client.data_key("s3proxy-kek", 32, None));
    assert!(
        denied.starts_with("lasting: ")
            && denied.contains("local has no grant for keys of the class other"),
        "{denied}"
    );
    let given = program.expect("audit result=given");
    assert!(
        given.contains(&format!("caller=local class=disk id=\"{UUID}\" length=32")),
        "{given}"
    );
    let refused = program.expect("audit result=refused");
    assert!(
        refused.contains("caller=local class=other id=\"s3proxy-kek\""),
        "{refused}"
    );
    // This seed permits a login to every node.
    let denied = failure(client.data_key("ca_emergency_ssh", 32, None));
    assert!(
        denied.contains("local has no grant for keys of the class ssh-users"),
        "{denied}"
    );
    assert!(!program.output().contains(&DISK_KEY[..8]));
}

/// A worker proves the same as any member.
#[test]
fn a_member_gets_granted_keys_only_and_never_those_that_make_nodes_and_clusters() {
    let dir = config(0, &policy());
    let (service_tpm, worker_tpm) = (member(0, b"image"), member(0, b"image"));
    let get = |address: SocketAddr, id: &str| {
        key_client(address, dir.path(), &worker_tpm).data_key(id, 32, None)
    };
    let (program, address) = key_service(dir.path(), &service_tpm);
    for id in [UUID, "measurementSecret", "ca_emergency_ssh", "s3proxy-kek"] {
        let denied = failure(get(address, id));
        assert!(
            denied.starts_with("lasting: ") && denied.contains("member has no grant for keys"),
            "{id}: {denied}"
        );
    }
    drop(program);
    let grant = |text: &str| {
        let mut command = key_service_command(dir.path(), &service_tpm);
        command.args(["--grant", text]);
        command
    };
    let (_program, address) = start(&mut grant(MEMBERS));
    assert_eq!(hex(get(address, UUID).unwrap().expose()), DISK_KEY);
    assert!(
        failure(get(address, "ca_emergency_ssh_host"))
            .contains("member has no grant for keys of the class ssh")
    );
    for text in [
        "member=disk,ssh",
        "member=measurement",
        "member=id:ca_emergency_ssh",
    ] {
        let output = grant(text).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(2) && said.contains("a worker is a member as well"),
            "{text}: {said}"
        );
    }
}

#[test]
fn a_machine_of_no_or_another_cluster_gets_no_key_even_without_own_checks() {
    let dir = config(0, &policy());
    let service_tpm = member(0, b"image");
    let (program, address) = key_service_for_members(dir.path(), &service_tpm);
    let (fresh, foreign) = (Swtpm::start(), member(7, b"image"));
    let text = failure(key_client(address, dir.path(), &fresh).data_key(UUID, 32, None));
    assert!(
        text.contains("has joined no cluster since it started"),
        "{text}"
    );
    let text = failure(key_client(address, dir.path(), &foreign).data_key(UUID, 32, None));
    assert!(
        text.starts_with("passing: ") && text.contains("PCR 15: expected"),
        "{text}"
    );
    // Clients that do not authenticate the service.
    for tpm in [Some(&fresh), Some(&foreign), None] {
        let issuer = tpm.map(|tpm| qemu_vtpm::issuer(tpm.location().parse().unwrap(), None));
        let client = atls::Client::new(issuer.map(|issuer| Arc::new(issuer) as _), None);
        let socket = TcpStream::connect(address).unwrap();
        let answer = client
            .connect(socket, Instant::now() + Duration::from_secs(20))
            .map_err(|error| error.to_string())
            .and_then(|transport| ask(transport).map_err(|status| status.to_string()));
        assert!(answer.is_err(), "{:?} got a key", tpm.map(Swtpm::location));
    }
    let plain = transport::plain::transport(TcpStream::connect(address).unwrap()).unwrap();
    assert!(ask(plain).is_err());
    assert!(
        !program.output().contains("result=given"),
        "{}",
        program.output()
    );
    // Checks the check itself.
    let member = member(0, b"image");
    assert!(
        key_client(address, dir.path(), &member)
            .data_key(UUID, 32, None)
            .is_ok()
    );
}

fn ask(transport: Transport) -> Result<GetDataKeyResponse, rpc::grpc::Status> {
    let request = GetDataKeyRequest {
        data_key_id: UUID.into(),
        length: 32,
        ..GetDataKeyRequest::default()
    };
    let options = CallOptions {
        timeout: Some(Duration::from_secs(10)),
        ..CallOptions::default()
    };
    Channel::new(transport, "x")?.unary(GET_DATA_KEY, &request, &options)
}

#[test]
fn a_key_service_with_another_master_secret_feeds_no_keys() {
    // It runs on a machine of its own cluster, and meets every other condition.
    let (rogue, ours) = (config(9, &policy()), config(0, &policy()));
    let rogue_tpm = member(9, b"image");
    let (_program, address) = key_service(rogue.path(), &rogue_tpm);
    let client_tpm = member(0, b"image");
    let client = key_client(address, ours.path(), &client_tpm);
    let text = failure(client.data_key("ca_emergency_ssh", 32, None));
    assert!(text.contains("PCR 15: expected"), "{text}");
}

#[test]
fn it_does_not_start_where_callers_would_not_take_it_for_one_of_theirs() {
    let dir = config(0, &policy());
    let stderr = |tpm: &Swtpm| {
        let output = key_service_command(dir.path(), tpm).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = stderr(&Swtpm::start());
    assert!(
        said.contains("has joined no cluster since it started"),
        "{said}"
    );
    let said = stderr(&member(1, b"image"));
    assert!(
        said.contains("one of them belongs to another cluster"),
        "{said}"
    );
    fs::write(dir.path().join("measurementSalt"), [0; 31]).unwrap();
    let said = stderr(&member(0, b"image"));
    assert!(said.contains("measurementSalt: expected 32"), "{said}");
}

/// The accepted values of a PCR in an upgrade: the old image only, then both, then the new one
/// only.
#[test]
fn in_an_upgrade_both_images_are_let_in_and_no_mixture_and_the_policy_is_followed() {
    let measured = |image: &[u8]| {
        let swtpm = member(0, image);
        let tpm = swtpm.location().parse().unwrap();
        let registers = vtpm::measure(&tpm, Stage::Booted).unwrap().booted;
        [4, 9]
            .map(|pcr| (pcr, registers[&pcr].clone()))
            .into_iter()
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let (old, mut new) = (measured(b"old"), measured(b"new"));
    new.get_mut(&9).unwrap().expected = vec![9; 32];
    let dir = config(0, &Policy::new(old.clone()).unwrap());
    let (service_tpm, old_machine, new_machine) =
        (member(0, b"old"), member(0, b"old"), member(0, b"new"));
    let (program, address) = key_service_for_members(dir.path(), &service_tpm);
    let get = |tpm: &Swtpm| key_client(address, dir.path(), tpm).data_key(UUID, 32, None);
    assert!(get(&old_machine).is_ok());
    assert!(get(&new_machine).is_err());
    // Its PCR 4 is the new image's, and its PCR 9 the old one's.
    let both = Policy::new(old)
        .unwrap()
        .and_also("image 2", new.clone())
        .unwrap();
    fs::write(
        dir.path().join("attestationConfig"),
        cli::trust::policy::text(&both),
    )
    .unwrap();
    assert!(get(&new_machine).is_err());
    program.expect("the machine runs none of the 2 accepted images");
    assert!(get(&old_machine).is_ok());
    let mut whole = new;
    whole.get_mut(&9).unwrap().expected = vec![0; 32];
    let both = Policy::new(measured(b"old"))
        .unwrap()
        .and_also("image 2", whole)
        .unwrap();
    fs::write(
        dir.path().join("attestationConfig"),
        cli::trust::policy::text(&both),
    )
    .unwrap();
    assert!(get(&new_machine).is_ok());
    program.expect("a new policy is in force");
    // An invalid policy changes nothing, and one with an unknown field is invalid.
    let valid = config(0, &policy());
    let served = || {
        let client = key_client(address, valid.path(), &new_machine);
        client.data_key(UUID, 32, None).is_ok()
    };
    let unknown =
        cli::trust::policy::text(&both).replacen('{', r#"{"atestationKeys":["000b"],"#, 1);
    fs::write(dir.path().join("attestationConfig"), unknown).unwrap();
    assert!(served());
    program.expect(r#"attestation policy ./attestationConfig cannot be used, so the old policy stays in force: measurement policy: unknown field "atestationKeys""#);
    fs::write(dir.path().join("attestationConfig"), "{").unwrap();
    assert!(served());
    program.expect("EOF while parsing");
}

#[test]
fn a_node_that_returns_is_served_by_programs_that_know_each_other_by_their_tpms() {
    let dir = config(0, &policy());
    let (tpm, node_tpm) = (member(0, b"image"), Swtpm::start());
    let (keys, key_address) = key_service(dir.path(), &tpm);
    let mut command = command("join-service", dir.path(), &tpm);
    let join = Program::start(command.args(["--key-service", &key_address.to_string()]));
    let join_address = address(&join.expect("serving join requests"));
    let ticket = rejoin(join_address, &node_tpm).unwrap();
    assert_eq!(hex(&ticket.state_disk_key), DISK_KEY);
    keys.expect("class=measurement");
}

/// Asks a join service for the key of a disk.
fn rejoin(join_address: SocketAddr, node_tpm: &Swtpm) -> Result<IssueRejoinTicketResponse, Status> {
    let issuer = qemu_vtpm::issuer(node_tpm.location().parse().unwrap(), None);
    let client = atls::Client::new(Some(Arc::new(issuer)), None);
    let socket = TcpStream::connect(join_address).unwrap();
    let transport = client
        .connect(socket, Instant::now() + Duration::from_secs(20))
        .unwrap();
    let request = IssueRejoinTicketRequest {
        disk_uuid: UUID.into(),
    };
    let options = CallOptions {
        timeout: Some(Duration::from_secs(30)),
        ..CallOptions::default()
    };
    Channel::new(transport, "x")
        .unwrap()
        .unary(ISSUE_REJOIN_TICKET, &request, &options)
}

#[test]
fn a_node_that_returns_while_the_external_kms_is_away_learns_why_it_waits() {
    let dir = config(0, &policy());
    let (tpm, node_tpm) = (member(0, b"image"), Swtpm::start());
    let authority = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    fs::write(dir.path().join("ca.pem"), authority.cert.pem()).unwrap();
    // no server listens at port 1
    let wrapped = serde_json::json!({
        "version": 1,
        "kms": format!("kms://vault?address=https://127.0.0.1:1&keyName=a&caFile={}/ca.pem", dir.path().display()),
        "wrappedKey": "AAAA",
        "nonce": "AAAAAAAAAAAAAAAA",
        "ciphertext": "AAAA",
    });
    fs::write(dir.path().join("mastersecret"), wrapped.to_string()).unwrap();
    let mut command = key_service_command(dir.path(), &tpm);
    command.args(["--health", "127.0.0.1:0"]);
    command.env("VAULT_TOKEN", "token");
    let keys = Program::start(command.env("VAULT_ADDR", "https://127.0.0.1:1"));
    let key_address = address(&keys.expect("listening on"));
    let health = address(&keys.expect("health checks on"));
    keys.expect("trying again in");
    let sick = services::probe::check_health(health, Duration::from_secs(10));
    assert!(
        sick.unwrap_err().message().contains("2, not 1"),
        "NOT_SERVING"
    );

    let mut command = self::command("join-service", dir.path(), &tpm);
    let endpoints = format!("127.0.0.1:1,{key_address}");
    let join = Program::start(command.args(["--key-service", &endpoints]));
    let join_address = address(&join.expect("serving join requests"));
    let answer = rejoin(join_address, &node_tpm);
    let refusal = answer.err().unwrap();
    assert_eq!(refusal.code(), Code::Unavailable);
    let expected = "the key service cannot give keys yet: the master secret in ";
    assert!(
        refusal.message().starts_with(expected) && refusal.message().contains("127.0.0.1:1"),
        "{refusal}"
    );
    join.expect("\"reason\":\"keys-waiting\"");
}

/// `firstlight apply --old-clients-until never` keeps the grants, and so this service must start.
#[test]
fn a_grant_for_clients_without_a_token_may_stay_when_they_are_served_no_longer() {
    let dir = config(0, &policy());
    let ca = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
    let ca = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, ca.cert.pem());
    // it starts while the API server does not answer
    let kubeconfig = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters:\n- name: a\n  cluster: {{server: 'https://127.0.0.1:1', \
         certificate-authority-data: {ca}}}\nusers:\n- name: a\n  user: {{token: a}}\ncontexts:\n- name: a\n  \
         context: {{cluster: a, user: a}}\n"
    );
    fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
    let mut command = Command::new(support::program::built("key-service"));
    command
        .args(["--clients=token", "--listen=127.0.0.1:0"])
        .args(["--kubeconfig=kubeconfig", "--master-secret=mastersecret"])
        .args(["--salt=salt", "--grant"])
        .arg("kube-system/join-service=disk,ssh,measurement;anyone=id:s3proxy-kek")
        .current_dir(dir.path());
    let (program, _) = start(&mut command);
    program.expect("--grant for anyone has no effect");
}

/// grpc.health.v1; 1 is SERVING. An empty request asks for the health of the server as a whole.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

#[test]
fn health_and_metrics_are_had_without_a_proof_and_keys_are_not() {
    let dir = config(0, &policy());
    let tpm = member(0, b"image");
    let any_port: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let secret = MasterSecretFiles {
        key: dir.path().join("mastersecret"),
        salt: dir.path().join("salt"),
        wrapping_key: dir.path().into(),
        places_wrapping_key: false,
    };
    let config = KeyServiceConfig {
        listen: any_port,
        clients: Clients::Attested {
            variant: &qemu_vtpm::VARIANT,
            tpm: tpm.location().parse().unwrap(),
            config_dir: dir.path().into(),
            collateral: None,
        },
        api: None,
        grants: Some("local=id:measurementSecret".parse().unwrap()),
        allow_plaintext: false,
        node: None,
        listen_tls: None,
        old_clients: None,
        health: Some(any_port),
        metrics: Some(any_port),
    };
    let service = KeyService::start(config).unwrap();
    service.provide(secret.read().unwrap()).unwrap();
    let plain =
        transport::plain::transport(TcpStream::connect(service.health_addr().unwrap()).unwrap())
            .unwrap();
    let options = CallOptions {
        timeout: Some(Duration::from_secs(10)),
        ..CallOptions::default()
    };
    let channel = Channel::new(plain, "x").unwrap();
    let request = GetDataKeyRequest::default();
    let health: HealthCheckResponse = channel
        .unary("/grpc.health.v1.Health/Check", &request, &options)
        .unwrap();
    assert_eq!(health.status, 1);
    let key: Result<GetDataKeyResponse, _> = channel.unary(GET_DATA_KEY, &request, &options);
    assert_eq!(key.err().unwrap().code(), Code::Unimplemented);

    let client = key_client(service.local_addr(), dir.path(), &tpm);
    assert!(client.data_key("measurementSecret", 32, None).is_ok());
    assert!(
        client.data_key(UUID, 32, None).is_err(),
        "what was granted replaces what is granted by default"
    );
    let url = format!("http://{}/metrics", service.metrics_addr().unwrap());
    let text = ureq::get(url)
        .call()
        .unwrap()
        .body_mut()
        .read_to_string()
        .unwrap();
    for line in [
        "firstlight_key_requests_total{class=\"measurement\",result=\"given\"} 1",
        "firstlight_key_requests_total{class=\"disk\",result=\"denied\"} 1",
        "firstlight_key_request_seconds_count 2",
        "firstlight_grpc_connections{server=\"key-service\"} 1",
        "firstlight_grpc_calls_in_flight{server=\"key-service\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
    }
    service.stop(Duration::from_secs(1));
    assert!(TcpStream::connect(service.local_addr()).is_err());
    assert!(TcpStream::connect(service.health_addr().unwrap()).is_err());
}
