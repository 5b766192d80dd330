//! Node and join service verify each other: the machine of the service proves itself too, by its host's evidence.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, cluster_id, derive_key};
use base64::Engine;
use proto::join::{ISSUE_REJOIN_TICKET, IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use rpc::grpc::{CallOptions, Channel, Code, Limits, Router, Server};
use services::join_service::evidence::RemoteIssuer;
use support::program::built;
use support::swtpm::{self, PCR_4, Swtpm};
use tpm::Tpm;
use verifier::{Issuer, Policy, qemu_vtpm};

use crate::joining;
use crate::program::Program;
use crate::setting::{
    INIT_SECRET, MASTER_KEY, MASTER_SALT, MEASUREMENT_SALT, Setting, end_of_member, set_private,
};
use crate::status::{expect, verify_by};

/// The ID of the cluster whose tickets the test's join services give.
pub fn joined_cluster() -> [u8; 32] {
    let secret = Secret::new(joining::MEASUREMENT_SECRET.to_vec());
    cluster_id(&secret, &joining::MEASUREMENT_SALT)
}

/// The ID of the cluster whose disks [`Setting`] makes.
pub fn own_cluster() -> [u8; 32] {
    let info = Dek::named(MEASUREMENT_SECRET_ID);
    let secret = derive_key(&MASTER_KEY, &MASTER_SALT, info.info(), KEY_LEN).unwrap();
    cluster_id(&secret, &MEASUREMENT_SALT)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The machine of a join service: its TPM, and the host's evidence of it.
pub struct Host {
    _evidence: Evidence,
    tpm: Swtpm,
    dir: tempfile::TempDir,
}

/// The program that gives a host's evidence, and its socket. As under systemd, the program is started again when it has ended,
/// because nobody asked for a while: a slow machine is no fault. Until then callers wait in the socket's queue.
struct Evidence {
    is_over: Arc<AtomicBool>,
    activation: Option<JoinHandle<()>>,
}

impl Evidence {
    fn start(socket: &Path, tpm: &str) -> Evidence {
        let listener = UnixListener::bind(socket).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let mut program = Command::new("sh");
        program
            .args([
                "-c",
                "LISTEN_FDS=1 LISTEN_PID=$$ exec \"$@\" 3<&0 </dev/null",
                "sh",
            ])
            .arg(built("bootstrapper"))
            .args(["--serve-evidence", "--csp=qemu", "--variant=qemu-vtpm"])
            .args(["--tpm", tpm])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let over = is_over.clone();
        let activation = thread::spawn(move || {
            while !over.load(Relaxed) {
                program.stdin(OwnedFd::from(listener.try_clone().unwrap()));
                let mut running = program.spawn().unwrap();
                while !over.load(Relaxed) && running.try_wait().unwrap().is_none() {
                    thread::sleep(Duration::from_millis(20));
                }
                let _ = running.kill();
                let _ = running.wait();
            }
        });
        Evidence {
            is_over,
            activation: Some(activation),
        }
    }
}

impl Drop for Evidence {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        let _ = self.activation.take().map(JoinHandle::join);
    }
}

impl Host {
    /// A member of `cluster` whose boot loader is that of the nodes, or another one; of no cluster if it is `None`.
    pub fn new(cluster: Option<[u8; 32]>, boot_loader: Option<&[u8]>) -> Host {
        let (tpm, dir) = (Swtpm::start(), tempfile::tempdir().unwrap());
        let mut open = Tpm::open(&tpm.location().parse().unwrap()).unwrap();
        if let Some(id) = cluster {
            open.measure_cluster_id(&id).unwrap();
        }
        if let Some(other) = boot_loader {
            open.pcr_event(4, other).unwrap();
        }
        drop(open);
        let evidence = Evidence::start(&socket_in(dir.path()), &tpm.location());
        Host {
            _evidence: evidence,
            tpm,
            dir,
        }
    }

    pub fn socket(&self) -> PathBuf {
        socket_in(self.dir.path())
    }

    /// Returns the issuer that a join service in a pod uses: it asks the host over the socket.
    pub fn evidence(&self) -> Arc<dyn Issuer> {
        Arc::new(RemoteIssuer::new(&qemu_vtpm::VARIANT, self.socket()))
    }

    pub fn location(&self) -> tpm::Location {
        self.tpm.location().parse().unwrap()
    }
}

fn socket_in(dir: &Path) -> PathBuf {
    dir.join("evidence.sock")
}

/// A fresh node refuses, with the reason, each service that it must refuse. Then it accepts one that proves itself.
#[test]
fn a_fresh_node_believes_only_a_service_that_proves_its_image_and_its_cluster() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let cluster = setting.cluster("");
    let ours = Some(joined_cluster());
    let (member, updated) = (Host::new(ours, None), Host::new(ours, Some(b"other")));
    let (fresh, foreign) = (Host::new(None, None), Host::new(Some([9; 32]), None));
    let tickets = {
        let cluster = cluster.clone();
        move |_: &_, request, _| Ok(cluster.ticket(&request))
    };
    // the host of a fresh machine makes no evidence, so in its place a program that can use the TPM tries
    let of_fresh = Arc::new(qemu_vtpm::issuer(fresh.location(), None));
    let _services = [
        setting.join_service_that(3, tickets.clone()),
        setting.join_service_of(4, updated.evidence(), tickets.clone()),
        setting.join_service_of(5, of_fresh, tickets.clone()),
        setting.join_service_of(6, foreign.evidence(), tickets.clone()),
    ];
    // a genuine service whose ticket is one of another cluster
    let mixed = cluster.clone();
    let _mixed = setting.join_service_of(7, member.evidence(), move |_, request, _| {
        let mut ticket = mixed.ticket(&request);
        ticket.measurement_secret = vec![99; 32];
        Ok(ticket)
    });
    setting.set_control_planes(&[3, 4, 5, 6, 7]);
    let mut command = setting.joining(&disk, "Worker");
    command.args([
        "--require",
        "strong",
        "--cluster-id",
        &hex(&joined_cluster()),
    ]);
    let mut node = Program::start(&mut command);
    let refused = |number: u8, why: &str| {
        let service = format!("refused: join service {}:30090: ", setting.host(number));
        node.expect(&service);
        node.expect(why);
    };
    refused(3, "the setting require=strong refuses such a service");
    refused(4, "PCR 4: expected 7a94ffe8");
    node.expect("name that image in the setting service-policy");
    refused(5, "PCR 15 is zero, so its machine belongs to no cluster");
    refused(6, "another cluster than the setting cluster-id names");
    refused(7, "but its machine belongs to another one: expected PCR 15");
    assert!(!node.output().contains("locked:"), "{}", node.output());
    let pcr = setting.tpm.tool("tpm2_pcrread", &["sha256:15"]);
    assert!(pcr.contains(&"0".repeat(64)), "{pcr}");

    let _good = setting.join_service_of(8, member.evidence(), tickets);
    setting.set_control_planes(&[3, 4, 5, 6, 7, 8]);
    let ticket = node.expect("ticket: from join service");
    // the settings name no key, but the cluster, and the ticket has its secrets
    let expected = format!("{}:30090, which claims (a program without", setting.host(8));
    assert!(ticket.contains(&expected), "{ticket}");
    assert!(end_of_member(&mut node).success(), "{}", node.output());
}

/// An operator has no TPM: the service proves itself, and then refuses this caller.
#[test]
fn an_operator_verifies_a_join_service_that_refuses_him() {
    let setting = Setting::new();
    let (member, foreign) = (
        Host::new(Some(joined_cluster()), None),
        Host::new(Some([9; 32]), None),
    );
    let none = |_: &_, _, _| unreachable!("a caller without a proof gets no ticket");
    let _services = [
        setting.join_service_of(3, member.evidence(), none),
        setting.join_service_of(4, foreign.evidence(), none),
        setting.join_service_that(5, none),
    ];
    let id = hex(&joined_cluster());
    // the error names no key, because the setting does not list the keys of the services' machines
    let text = r#"{"exceptions":["any-image"],"measurements":{"8":"00","15":"00"}}"#
        .replace("00", &"00".repeat(32));
    let policy = setting.file("any-key.json", text);
    let ask = |number: u8| {
        let service = format!("{}:30090", setting.host(number));
        verify_by(&setting, &policy, &service, &["--cluster-id", &id])
    };
    let facts = [
        "proven",
        "strong",
        "role:      join service",
        &id,
        "any key",
    ];
    expect(&ask(3), 0, &facts);
    expect(&ask(4), 3, &["attestation refused", "PCR 15"]);
    expect(&ask(3), 0, &["ACPI:      the host's tables are trusted"]);
    let marked = fs::read_to_string(&policy).unwrap();
    let mark = r#"{"acpiTables":"confined","requireConfinedAcpi":true,"#;
    fs::write(&policy, marked.replacen('{', mark, 1)).unwrap();
    expect(&ask(3), 0, &["ACPI:      the host's tables are confined"]);
    // it proves nothing in either form
    let nothing = ask(5);
    assert!(matches!(nothing.0, 3 | 4), "{nothing:?}");
    assert!(!nothing.1.contains("proven"), "{nothing:?}");
}

/// An attacker with the evidence socket of a machine relays its proofs: the operator's commands refuse them, so the attacker gets no secret.
#[test]
fn whoever_has_the_evidence_socket_cannot_pose_as_a_server_that_gets_secrets() {
    let setting = Setting::new();
    let host = Host::new(Some(own_cluster()), None);
    let relay = |port| {
        let address = SocketAddr::new(setting.host(3), port);
        let tls = atls::Server::new(None, None).attest_strong(host.evidence());
        let listener = TcpListener::bind(address).unwrap();
        let server = Server::start(
            "relay",
            listener,
            Arc::new(tls),
            Router::new(),
            Limits::default(),
        );
        (address.to_string(), server.unwrap())
    };
    let ((init, _init), (recovery, _recovery)) = (relay(9000), relay(9999));
    let policy = setting.policy_of(&[(4, PCR_4), (15, [0; 32])]);
    let policy = policy.display().to_string();
    let master = setting.master_secret(MASTER_KEY).display().to_string();
    // an init for this cluster has begun, so the operator accepts a member of it
    let salt = base64::engine::general_purpose::STANDARD.encode(MEASUREMENT_SALT);
    let state = format!(r#"{{"version":1,"measurementSalt":"{salt}"}}"#);
    setting.file("firstlight-state.json", state);
    let secret = setting.file("init-secret", INIT_SECRET);
    set_private(&secret);
    let secret = secret.display().to_string();
    let refused = "its attestation document is that of a join service, expected that of a server";
    let ask = |args: &[&str]| {
        let more = ["--policy", &policy, "--timeout=60s"];
        let output = setting
            .firstlight(&[args, &more].concat())
            .output()
            .unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), text)
    };
    let key = ["--trust-any-tpm", "--master-secret", &master];
    let asked = ask(&[
        &[
            "init",
            "--endpoint",
            &init,
            "--init-secret",
            &secret,
            "--require=any",
        ],
        &key[..],
    ]
    .concat());
    expect(&asked, 3, &[refused]);
    // a recovery is for a fresh machine, whose host gives no evidence
    let asked = ask(&[&["recover", "--endpoint", &recovery], &key[..]].concat());
    expect(&asked, 3, &["attestation refused", "PCR 15"]);
    let asked = ask(&["status", &init]);
    assert!(asked.1.contains(refused), "{asked:?}");
    // a client of a join service accepts the same proof
    let proven = ask(&["verify", &init, "--cluster-id", &hex(&own_cluster())]);
    expect(&proven, 0, &["proven", "role:      join service"]);
}

#[test]
fn an_upgrade_names_the_image_of_the_services_in_the_nodes_settings() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let cluster = setting.cluster("");
    let host = Host::new(Some(joined_cluster()), Some(b"older"));
    let _service = setting.join_service_of(3, host.evidence(), move |_, request, _| {
        Ok(cluster.ticket(&request))
    });
    setting.set_control_planes(&[3]);
    let pcr4 = host.tpm.tool("tpm2_pcrread", &["sha256:4"]).to_lowercase();
    let pcr4 = pcr4.split("0x").nth(1).unwrap().trim();
    let key = qemu_vtpm::VARIANT
        .key_name(&host.location())
        .unwrap()
        .unwrap();
    let text = format!(
        r#"{{"exceptions":["zero-registers"],"measurements":{{"4":"{pcr4}"}},"name":"image 1.2","attestationKeys":["{key}"]}}"#
    );
    let policy = setting.file("services.json", text);
    let mut command = setting.joining(&disk, "Worker");
    command.arg("--require=strong").arg("--service-policy");
    let mut node = Program::start(command.arg(&policy));
    node.expect("which proves an accepted image");
    assert!(end_of_member(&mut node).success(), "{}", node.output());

    // a policy that would accept any image is refused
    let open = setting.file(
        "open.json",
        r#"{"measurements":{"15":"00"}}"#.replace("00", &"00".repeat(32)),
    );
    let mut command = setting.joining(&disk, "Worker");
    let mut node = Program::start(command.arg("--service-policy").arg(open));
    assert_eq!(node.exit().code(), Some(2), "{}", node.output());
    node.expect("no register is enforced");
}

#[test]
fn a_node_that_rejoins_proves_itself_to_a_service_that_requires_it() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let host = Host::new(Some(own_cluster()), None);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let socket = host.socket();
    let strong = [
        "--evidence",
        socket.to_str().unwrap(),
        "--require",
        "strong",
    ];
    let service = setting.join_service_with(3, keys, &setting.policy(), &strong);
    service.expect("this service sends the host's evidence to nodes");
    let mut command = setting.unlock(&disk);
    let id = hex(&own_cluster());
    command.args(["--require=strong", "--cluster-id", &id]);
    let mut node = Program::start(&mut command);
    // the node asks for no proof, so the TPM of the service's host makes no quote
    node.expect("ticket: from join service");
    expect_opened(&mut node);

    // a node of the old form gets nothing, and the service says why
    let address = SocketAddr::new(setting.host(3), 30090);
    let issuer = qemu_vtpm::issuer(setting.tpm.location().parse().unwrap(), None);
    let old = atls::Client::new(Some(Arc::new(issuer)), None).only_old();
    let deadline = Instant::now() + Duration::from_secs(30);
    let refused = old.connect(TcpStream::connect(address).unwrap(), deadline);
    assert!(refused.is_err(), "{}", service.output());
}

/// The policy of the cluster requires the strong form from now on: the join service reads it again.
#[test]
fn a_policy_that_requires_the_strong_form_is_in_force_without_a_restart() {
    let setting = Setting::new();
    let host = Host::new(Some(own_cluster()), None);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let (policy, socket) = (setting.policy(), host.socket());
    let evidence = ["--evidence", socket.to_str().unwrap()];
    let service = setting.join_service_with(3, keys, &policy, &evidence);
    let issuer = Arc::new(qemu_vtpm::issuer(
        setting.tpm.location().parse().unwrap(),
        None,
    ));
    let ask = |form: fn(atls::Client) -> atls::Client| {
        let socket = TcpStream::connect(SocketAddr::new(setting.host(3), 30090)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let client = form(atls::Client::new(Some(issuer.clone()), None));
        let transport = client.connect(socket, deadline).unwrap();
        let options = CallOptions {
            timeout: Some(Duration::from_secs(60)),
            ..CallOptions::default()
        };
        let request = IssueRejoinTicketRequest {
            disk_uuid: "no disk".into(),
        };
        let answer: Result<IssueRejoinTicketResponse, _> = Channel::new(transport, "x")
            .unwrap()
            .unary(ISSUE_REJOIN_TICKET, &request, &options);
        answer.map(drop).unwrap_err().code()
    };
    let strong = || ask(atls::Client::require_strong);
    let old = || ask(atls::Client::only_old);
    assert_eq!(
        (old(), strong()),
        (Code::InvalidArgument, Code::InvalidArgument)
    );
    service.expect(r#""form":"old""#);
    service.expect(r#""form":"strong""#);

    let text = std::fs::read_to_string(&policy).unwrap();
    let text = text.strip_suffix('}').unwrap();
    let next = setting.file("next.json", format!(r#"{text},"require":"strong"}}"#));
    std::fs::rename(next, &policy).unwrap();
    service.expect("a new policy is in force");
    assert_eq!(
        (old(), strong()),
        (Code::Unavailable, Code::InvalidArgument)
    );
    service.expect("the policy requires the strong form of attested TLS");
}

/// A node that would accept the service gets the old form. Each other node gets the strong form, in which the service can send the reason.
#[test]
fn a_service_without_evidence_tells_the_nodes_that_demand_a_proof() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let policy = setting.policy();
    let service = setting.join_service_with(3, keys, &policy, &[]);
    service.expect("this service sends no evidence to nodes (--evidence is not set)");
    let issuer = qemu_vtpm::issuer(setting.tpm.location().parse().unwrap(), None);
    let issuer: Arc<dyn Issuer> = Arc::new(issuer);
    let text = std::fs::read_to_string(&policy).unwrap();
    let judge = Arc::new(qemu_vtpm::validator(Arc::new(
        Policy::from_json(&text).unwrap(),
    )));
    let node = || {
        atls::Client::new(Some(issuer.clone()), None)
            .verify_strong(Some(verifier::judge(judge.clone())))
            .to_join_service()
    };
    let connect = |client: atls::Client| {
        let socket = TcpStream::connect(SocketAddr::new(setting.host(3), 30090)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        client.connect(socket, deadline)
    };
    let refused = |client: atls::Client| {
        let error = connect(client).err().unwrap().to_string();
        let why = "it sent no evidence: if it is a join service, its host may give it none";
        assert!(error.contains(why), "{error}");
    };
    // in the old form, in which nothing is judged
    assert!(connect(node()).unwrap().claims.is_none());
    refused(node().require_strong());
    service.expect("the node has the setting require=strong");

    // under this policy no node gets a ticket, and no node gets the message that its own proof is wrong
    let text = text.strip_suffix('}').unwrap();
    let next = setting.file("next.json", format!(r#"{text},"require":"strong"}}"#));
    std::fs::rename(next, &policy).unwrap();
    service.expect("a new policy is in force");
    refused(node());
    service.expect("the policy or --require requires the strong form of attested TLS");
}

/// Only the strong form can prove a certificate of a TPM. A node that rejoins requires no proof of the service in that form.
#[test]
fn a_service_without_evidence_accepts_tpms_by_their_roots() {
    let setting = Setting::new();
    let folder = tempfile::tempdir().unwrap();
    let [state, authority] = ["state", "authority"].map(|name| folder.path().join(name));
    fs::create_dir(&state).unwrap();
    swtpm::manufacture(&state, &authority);
    let tpm = Swtpm::start_in(&state);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let policy = setting.policy();
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&policy).unwrap()).unwrap();
    // the policy names another machine's key
    json["endorsementRoots"] = serde_json::json!([swtpm::issuer_of(&authority)]);
    fs::write(&policy, json.to_string()).unwrap();
    let service = setting.join_service_with(3, keys, &policy, &[]);
    let issuer: Arc<dyn Issuer> =
        Arc::new(qemu_vtpm::issuer(tpm.location().parse().unwrap(), None));
    let node = || atls::Client::new(Some(issuer.clone()), None).to_join_service();
    let connect = |client: atls::Client| {
        let socket = TcpStream::connect(SocketAddr::new(setting.host(3), 30090)).unwrap();
        client.connect(socket, Instant::now() + Duration::from_secs(60))
    };
    let channel = Channel::new(connect(node()).unwrap(), "x").unwrap();
    let request = IssueRejoinTicketRequest {
        disk_uuid: "no disk".into(),
    };
    let answer: Result<IssueRejoinTicketResponse, _> =
        channel.unary(ISSUE_REJOIN_TICKET, &request, &CallOptions::default());
    let code = answer.map(drop).unwrap_err().code();
    assert_eq!(code, Code::InvalidArgument, "the node was accepted");

    // a fresh node says the same as with require=strong
    let judge = Arc::new(qemu_vtpm::validator(Arc::new(
        Policy::from_json(&json.to_string()).unwrap(),
    )));
    let fresh = node().verify_strong(Some(verifier::judge(judge)));
    let error = connect(fresh).err().unwrap().to_string();
    let why = "it sent no evidence: if it is a join service, its host may give it none";
    assert!(error.contains(why), "{error}");
    service.expect("the policy's endorsementRoots require the strong form of attested TLS");
}

/// The key of the disk, the MAC in its header, and the setting cluster-id decide.
#[test]
fn a_node_that_rejoins_judges_no_service_and_takes_only_the_key_of_its_disk() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let policy = setting.policy();
    // a program that has a TPM, and no key of the cluster
    let (_others, others) = setting.key_service(3, [9; KEY_LEN]);
    let _liar = setting.join_service_with(3, others, &policy, &[]);
    setting.set_control_planes(&[3]);
    let mut command = setting.unlock(&disk);
    let mut node = Program::start(command.arg("--require=strong"));
    node.expect("the key does not open this disk");

    // without the host's evidence a service proves nothing
    let fresh = Host::new(None, None);
    let evidence = fresh.socket().display().to_string();
    let (_keys, keys) = setting.key_service(4, MASTER_KEY);
    let service = setting.join_service_with(4, keys, &policy, &["--evidence", &evidence]);
    service.expect("this machine belongs to no cluster (PCR 15 is zero)");
    setting.set_control_planes(&[3, 4]);
    expect_opened(&mut node);

    setting.set_control_planes(&[4]);
    let mut command = setting.unlock(&disk);
    let other = hex(&[9; 32]);
    let mut node = Program::start(command.args(["--cluster-id", &other]));
    let refusal = "the disk belongs to another cluster than the setting cluster-id names";
    node.expect(refusal);

    // every program in the network may call the recovery server, so a key from an operator must be of that cluster, too
    let mut command = setting.recovery(&policy);
    command.arg("--master-secret");
    let mut operator = Program::start(command.arg(setting.master_secret(MASTER_KEY)));
    operator.expect(refusal);
    assert!(!operator.exit().success());
    node.terminate();
    node.exit();
}

/// Here the boot ends after the key, because the disk is a file.
fn expect_opened(node: &mut Program) {
    node.expect("key-slot:");
    assert!(!node.exit().success());
    let said = node.output();
    assert!(
        said.contains("/dev/mapper/control") || said.contains("not a block device"),
        "{said}"
    );
}

#[test]
fn the_evidence_socket_serves_only_what_systemd_passes() {
    let mut program = Program::start(
        Command::new(built("bootstrapper"))
            .args(["--serve-evidence", "--csp=qemu", "--variant=qemu-vtpm"])
            .args(["--tpm", "swtpm:host=127.0.0.1,port=1"]),
    );
    assert_eq!(program.exit().code(), Some(1));
    program.expect("systemd passed no socket");
    let host = Host::new(Some([1; 32]), None);
    let issuer = host.evidence();
    assert!(issuer.issue(b"data", b"nonce").is_err(), "the old form");
    assert!(!issuer.identity().unwrap().key.is_empty());
}
