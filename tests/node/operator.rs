//! What an operator asks of a member without a shell: with the master secret, and with a certificate for an SSH key of OpenSSH's own
//! programs. A person without either gets nothing.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use base::crypto::{Dek, KEY_LEN, SSH_USER_CA_SEED_ID, Secret};
use base::master_secret::MasterSecret;
use proto::operator::{
    Caller, LOGS, Log, LogsRequest, LogsResponse, REVOKE, RevokeRequest, RevokeResponse,
};
use rpc::grpc::{CallOptions, Channel, Code, Status};
use serde_json::Value;
use ssh::certificate::UserCertificate;
use ssh::signature::SigningKey;
use ssh::{Authority, OPERATOR, OPERATOR_NAMESPACE};

use crate::absence::{has_stand_in, told};
use crate::fleet::{Member, boots, workspace};
use crate::program::Program;
use crate::setting::{MASTER_KEY, MASTER_SALT, Setting};

const HOUR: Duration = Duration::from_secs(3600);

fn authority_of(key: [u8; 32]) -> Authority {
    let kms = MasterSecret::new(Secret::new(key.to_vec()), Secret::new(MASTER_SALT.to_vec()));
    let seed = kms.unwrap().dek(&Dek::named(SSH_USER_CA_SEED_ID), KEY_LEN);
    Authority::from_seed(&seed.unwrap()).unwrap()
}

/// A member `cp-0` whose state disk has the authority of the cluster, and an operator's folder.
pub struct Cluster {
    pub node: Setting,
    _member: Member,
}

impl Cluster {
    pub fn new() -> Cluster {
        let node = Setting::new();
        let authority = format!("{}\n", authority_of(MASTER_KEY).public_line());
        node.file("mount/ssh/ssh_ca.pub", authority);
        let audit = "files/var/log/kubernetes/audit/audit.log";
        node.file(audit, "{\"n\":1}\n{\"n\":2}\n{\"n\":3}\n");
        workspace(&node, &[("cp-0", "control-plane", &node)]);
        let _member = boots(&node);
        Cluster { node, _member }
    }

    /// Runs `firstlight` with the master secret.
    pub fn run(&self, args: &[&str]) -> (i32, String, String) {
        self.run_as(&["--master-secret", "master-secret.json"], args)
    }

    fn run_as(&self, who: &[&str], args: &[&str]) -> (i32, String, String) {
        let policy = ["--policy", "config/attestationConfig"];
        let output = self
            .node
            .firstlight(&[args, who, &policy].concat())
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap(),
            text(output.stdout),
            text(output.stderr),
        )
    }

    /// Connects as anybody can.
    fn channel(&self) -> Channel {
        let address = self.node.node(9000);
        let socket = std::net::TcpStream::connect(address).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let client = atls::Client::new(None, None).require_strong();
        let transport = client.to_any_server().connect(socket, deadline).unwrap();
        Channel::new(transport, "node").unwrap()
    }
}

/// Returns the proof of a new key that this authority certifies for an hour.
fn caller(authority: &Authority, principal: &str, channel: &Channel, now: SystemTime) -> Caller {
    let key = SigningKey::generate();
    let line = authority.operator_certificate(key.public(), &[principal], HOUR, now);
    Caller {
        certificate: UserCertificate::blob_of_line(&line).unwrap(),
        signature: key.sign(OPERATOR_NAMESPACE, channel.binding().unwrap()),
    }
}

fn logs(channel: &Channel, caller: Option<Caller>) -> Result<Vec<u8>, Status> {
    let request = LogsRequest {
        caller,
        log: Log::Audit.into(),
        ..LogsRequest::default()
    };
    let options = CallOptions::default();
    let parts = channel.server_streaming::<_, LogsResponse>(LOGS, &request, &options)?;
    let parts: Result<Vec<_>, _> = parts.map(|part| part.map(|it| it.content)).collect();
    Ok(parts?.concat())
}

#[test]
fn an_operator_reads_logs_and_each_call_is_written_down() {
    let cluster = Cluster::new();
    let (code, out, errors) = cluster.run(&["logs", "cp-0", "--audit", "--lines", "2"]);
    assert_eq!((code, &out[..]), (0, "{\"n\":2}\n{\"n\":3}\n"), "{errors}");
    // the journal of this machine may be empty, but journalctl accepts the options
    let journal = [
        "logs", "cp-0", "--unit", "kubelet", "--boot", "-1", "--since", "1h",
    ];
    let (_, _, errors) = cluster.run(&journal);
    assert!(!errors.contains("unrecognized option"), "{errors}");
    let (code, _, errors) = cluster.run(&["logs", "cp-0", "--unit=-x.service"]);
    assert!(
        code != 0 && errors.contains("the name of a unit"),
        "{errors}"
    );

    let (code, out, errors) = cluster.run(&["logs", "cp-0", "--calls"]);
    assert_eq!(code, 0, "{errors}");
    let calls: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let what: Vec<&str> = calls
        .iter()
        .map(|call| call["call"].as_str().unwrap())
        .collect();
    assert_eq!(
        what,
        ["logs audit", "logs journal kubelet.service", "logs calls"]
    );
    assert!(calls.iter().all(|call| {
        call["operator"] == "an operator"
            && call["from"].as_str().unwrap().starts_with("127.")
            && call["key"].as_str().unwrap().starts_with("SHA256:")
    }));
}

/// An event as the API server logs it.
fn event(number: u32, time: &str) -> String {
    format!("{{\"n\":{number},\"stageTimestamp\":\"{time}.000000Z\"}}\n")
}

/// Returns the numbers of the events in an output.
fn numbers(out: &str) -> Vec<u64> {
    let event = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    out.lines()
        .map(|line| event(line)["n"].as_u64().unwrap())
        .collect()
}

#[test]
fn rotated_audit_logs_are_read_back_to_the_time_or_the_number_of_lines() {
    let cluster = Cluster::new();
    let folder = "files/var/log/kubernetes/audit";
    let ago = |hours: u32| {
        base::time::seconds(SystemTime::now() - hours * HOUR)
            .trim_end_matches('Z')
            .to_owned()
    };
    let first = event(1, &ago(9)) + &event(2, &ago(7));
    let first = cluster.node.file(
        &format!("{folder}/audit-2026-11-28T10-00-00.000.log"),
        first,
    );
    let second = event(3, &ago(5)) + &event(4, &ago(3));
    cluster.node.file(
        &format!("{folder}/audit-2026-11-28T12-00-00.000.log"),
        second,
    );
    cluster.node.file(
        &format!("{folder}/audit.log"),
        event(5, &ago(1)) + &event(6, &ago(0)),
    );
    let written = fs::File::options().append(true).open(first).unwrap();
    written.set_modified(SystemTime::now() - 7 * HOUR).unwrap();
    for (arguments, expected) in [
        (&["--since", "4h"][..], &[4, 5, 6][..]),
        (&["--since", "8h"], &[2, 3, 4, 5, 6]),
        (&["--since", "1m"], &[6]),
        (&["--lines", "1"], &[6]),
        (&["--lines", "5"], &[2, 3, 4, 5, 6]),
        (&["--lines", "100"], &[1, 2, 3, 4, 5, 6]),
        (&["--lines", "5", "--since", "4h"], &[4, 5, 6]),
        (&[], &[5, 6]),
    ] {
        let (code, out, errors) = cluster.run(&[&["logs", "cp-0", "--audit"], arguments].concat());
        assert_eq!(code, 0, "{errors}");
        assert_eq!(numbers(&out), expected, "{arguments:?}");
    }
    let (code, out, _) = cluster.run(&["logs", "cp-0", "--calls", "--since", "1h"]);
    assert_eq!((code, out.lines().count()), (0, 9), "{out}");
}

#[test]
fn who_follows_an_audit_log_gets_each_line_before_and_after_a_rotation() {
    let cluster = Cluster::new();
    let path = cluster
        .node
        .path("files/var/log/kubernetes/audit/audit.log");
    fs::write(&path, event(1, "2026-11-29T02:00:00")).unwrap();
    let follow = [
        "logs",
        "cp-0",
        "--audit",
        "--follow",
        "--policy",
        "config/attestationConfig",
    ];
    let mut command = cluster.node.firstlight(&follow);
    let run = Program::start(command.args(["--master-secret", "master-secret.json"]));
    run.expect("\"n\":1,");
    let append = |path: &Path, text: &str| {
        use std::io::Write;
        let mut file = fs::File::options()
            .append(true)
            .create(true)
            .open(path)
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    };
    let mut expected = vec![1];
    for rotation in 0..3 {
        let number = 10 * rotation + 2;
        // the node sees part of a line, and the rest only in a file that has another name
        let line = event(number, "2026-11-29T02:00:00");
        let (start, end) = line.split_at(9);
        append(&path, start);
        std::thread::sleep(Duration::from_millis(700));
        append(&path, end);
        append(&path, &event(number + 1, "2026-11-29T02:00:00"));
        fs::rename(&path, path.with_file_name(format!("audit-{rotation}.log"))).unwrap();
        append(&path, &event(number + 2, "2026-11-29T02:00:00"));
        run.expect(&format!("\"n\":{},", number + 2));
        expected.extend([number, number + 1, number + 2].map(u64::from));
    }
    assert_eq!(numbers(&run.stdout()), expected);
}

#[test]
fn a_person_without_a_certificate_of_the_cluster_for_this_connection_gets_nothing() {
    let cluster = Cluster::new();
    let (channel, other) = (cluster.channel(), cluster.channel());
    let now = SystemTime::now();
    let own = authority_of(MASTER_KEY);
    let refused = |caller| logs(&channel, caller).unwrap_err().code();
    assert_eq!(refused(None), Code::Unauthenticated);
    let foreign = caller(&authority_of([9; 32]), OPERATOR, &channel, now);
    assert_eq!(refused(Some(foreign)), Code::Unauthenticated);
    let of_other_connection = caller(&own, OPERATOR, &other, now);
    assert_eq!(refused(Some(of_other_connection)), Code::Unauthenticated);
    let (mut one, two) = (
        caller(&own, OPERATOR, &channel, now),
        caller(&own, OPERATOR, &channel, now),
    );
    one.signature = two.signature;
    assert_eq!(refused(Some(one)), Code::Unauthenticated);
    for principal in ["root", ""] {
        let caller = caller(&own, principal, &channel, now);
        assert_eq!(refused(Some(caller)), Code::PermissionDenied, "{principal}");
    }
    let expired = caller(&own, OPERATOR, &channel, now - 2 * HOUR);
    let status = logs(&channel, Some(expired)).unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert!(status.message().contains("it is valid from"), "{status}");
    let good = caller(&own, OPERATOR, &channel, now);
    assert!(logs(&channel, Some(good)).is_ok());
    let record = cluster.node.path("mount/firstlight/operator-calls");
    assert_eq!(fs::read_to_string(record).unwrap().lines().count(), 1);
}

#[test]
fn a_certificate_for_longer_than_a_month_is_refused() {
    let cluster = Cluster::new();
    let channel = cluster.channel();
    let key = SigningKey::generate();
    let line = authority_of(MASTER_KEY).operator_certificate(
        key.public(),
        &[OPERATOR],
        32 * 24 * HOUR,
        SystemTime::now(),
    );
    let caller = Caller {
        certificate: UserCertificate::blob_of_line(&line).unwrap(),
        signature: key.sign(OPERATOR_NAMESPACE, channel.binding().unwrap()),
    };
    let status = logs(&channel, Some(caller)).unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
}

/// Makes keys with ssh-keygen.
fn keygen(folder: &Path, name: &str, kind: &[&str]) {
    let output = Command::new("ssh-keygen")
        .args(["-q", "-N", "", "-C", "anna@example", "-f", name, "-t"])
        .args(kind)
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_colleague_uses_a_certificate_for_an_ssh_key_of_each_kind() {
    let cluster = Cluster::new();
    let folder = cluster.node.path(".");
    for (name, kind) in [
        ("ed25519", &["ed25519"][..]),
        ("p256", &["ecdsa", "-b", "256"]),
        ("p384", &["ecdsa", "-b", "384"]),
        ("rsa", &["rsa", "-b", "2048"]),
    ] {
        keygen(&folder, name, kind);
        let (public, certificate) = (format!("{name}.pub"), format!("{name}-operator.pub"));
        let certify = [
            "operator",
            "certify",
            &public,
            "--file",
            &certificate,
            "--read-only",
        ];
        let (code, _, errors) = cluster.run(&certify);
        assert_eq!(code, 0, "{errors}");
        let who = ["--certificate", &certificate, "--key", name];
        let (code, out, errors) = cluster.run_as(&who, &["logs", "cp-0", "--audit"]);
        assert_eq!((code, out.lines().count()), (0, 3), "{name}: {errors}");
        let restart = ["node", "restart", "cp-0", "--unit", "containerd"];
        let (code, _, errors) = cluster.run_as(&who, &restart);
        assert!(
            code == 1 && errors.contains("is not for the principal firstlight-operator"),
            "{name}: {errors}"
        );
    }
    keygen(&folder, "p521", &["ecdsa", "-b", "521"]);
    let certify = [
        "operator",
        "certify",
        "p521.pub",
        "--file",
        "p521-operator.pub",
    ];
    let (code, _, errors) = cluster.run(&certify);
    assert!(
        code == 1 && errors.contains("nistp521 cannot be verified"),
        "{errors}"
    );
    let (_, out, _) = cluster.run(&["logs", "cp-0", "--calls"]);
    assert_eq!(out.matches("anna@example").count(), 4, "{out}");
}

#[test]
fn a_key_in_an_agent_is_enough() {
    let cluster = Cluster::new();
    let folder = cluster.node.path(".");
    keygen(&folder, "id", &["ed25519"]);
    let socket = folder.join("agent");
    let mut agent = Command::new("ssh-agent")
        .args(["-D", "-a"])
        .arg(&socket)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let started = std::time::Instant::now();
    while !socket.exists() && started.elapsed() < crate::program::PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    let added = Command::new("ssh-add")
        .args(["-q", "id"])
        .env("SSH_AUTH_SOCK", &socket)
        .current_dir(&folder)
        .status()
        .unwrap();
    assert!(added.success());
    fs::remove_file(folder.join("id")).unwrap();
    let certify = ["operator", "certify", "id.pub"];
    assert_eq!(cluster.run(&certify).0, 0);
    let output = cluster
        .node
        .firstlight(&[
            "logs",
            "cp-0",
            "--audit",
            "--policy",
            "config/attestationConfig",
        ])
        .args([
            "--certificate",
            "firstlight-operator-cert.pub",
            "--key",
            "id.pub",
        ])
        .env("SSH_AUTH_SOCK", &socket)
        .output()
        .unwrap();
    let _ = agent.kill();
    let _ = agent.wait();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_revoked_key_is_refused_until_it_is_accepted_again() {
    let cluster = Cluster::new();
    let folder = cluster.node.path(".");
    keygen(&folder, "id", &["ed25519"]);
    assert_eq!(cluster.run(&["operator", "certify", "id.pub"]).0, 0);
    let who = [
        "--certificate",
        "firstlight-operator-cert.pub",
        "--key",
        "id",
    ];
    let asks = || cluster.run_as(&who, &["logs", "cp-0", "--audit"]);
    assert_eq!(asks().0, 0);
    let (code, out, errors) = cluster.run(&["operator", "revoke", "id.pub"]);
    assert!(
        code == 0 && out.contains("cp-0: refuses the key SHA256:"),
        "{errors}"
    );
    let (code, _, errors) = asks();
    assert!(
        code == 1 && errors.contains("is revoked on this node"),
        "{errors}"
    );
    assert_eq!(cluster.run(&["operator", "accept", "id.pub", "cp-0"]).0, 0);
    assert_eq!(asks().0, 0);

    let channel = cluster.channel();
    let own = authority_of(MASTER_KEY);
    let request = RevokeRequest {
        caller: Some(caller(&own, OPERATOR, &channel, SystemTime::now())),
        fingerprint: "SHA256:no\nSHA256:more".into(),
        undo: false,
    };
    let options = CallOptions::default();
    let answer = channel.unary::<_, RevokeResponse>(REVOKE, &request, &options);
    assert_eq!(answer.err().unwrap().code(), Code::InvalidArgument);
}

#[test]
fn a_machine_acts_only_under_its_own_name() {
    let cluster = Cluster::new();
    let restart =
        |node: &str| cluster.run(&["node", "restart", node, "--unit", "firstlight-no-such-unit"]);
    let (code, _, errors) = restart("cp-0");
    assert!(
        code == 1 && errors.contains("does not know its name"),
        "{errors}"
    );
    let certificate = kubelets_certificate("cp-0");
    let path = "files/var/lib/kubelet/pki/kubelet-server.crt";
    cluster.node.file(path, certificate);
    let at = format!("worker-0={}", cluster.node.host(2));
    let (code, _, errors) = restart(&at);
    assert!(
        code == 1 && errors.contains("this is the node cp-0, the call is for \"worker-0\""),
        "{errors}"
    );
    let (code, _, errors) = restart("cp-0");
    assert!(
        code == 1 && errors.contains("systemctl restart"),
        "{errors}"
    );
    let record = cluster.node.path("mount/firstlight/operator-calls");
    let record = fs::read_to_string(record).unwrap();
    assert_eq!(
        record
            .matches("restart firstlight-no-such-unit.service")
            .count(),
        1
    );
}

#[test]
fn a_worker_is_reset_and_a_control_plane_keeps_its_member_of_etcd() {
    let name = "operator::a_worker_is_reset_and_a_control_plane_keeps_its_member_of_etcd";
    if !has_stand_in(name) {
        return;
    }
    let cluster = Cluster::new();
    let disk = cluster.node.initialized_disk();
    let path = "files/var/lib/kubelet/pki/kubelet-server.crt";
    cluster.node.file(path, kubelets_certificate("cp-0"));
    let header = || fs::read(&disk).unwrap();
    let before = header();
    let manifest = cluster
        .node
        .file("files/etc/kubernetes/manifests/etcd.yaml", "");
    let reset = || cluster.run(&["node", "reset", "cp-0", "--yes"]);
    let (code, _, errors) = reset();
    let why = "cp-0 is a control plane, which cannot be reset: run `firstlight node remove cp-0 --may-return`";
    assert!(code == 1 && errors.contains(why), "{errors}");
    assert!(told().is_empty() && header() == before);

    fs::remove_file(manifest).unwrap();
    let (code, said, errors) = reset();
    assert_eq!(code, 0, "{errors}");
    assert!(said.contains("cp-0: restarts, and formats its state disk"));
    assert_eq!(told(), "reboot --no-block\n");
    assert_ne!(header(), before);
}

#[test]
fn a_node_whose_disk_is_full_deletes_old_logs_and_says_what_takes_the_rest() {
    let cluster = Cluster::new();
    let (own, other) = ("1".repeat(32), "2".repeat(32));
    let file = |path: &str, content: &[u8]| cluster.node.file(&format!("files/{path}"), content);
    file(
        "var/lib/kubelet/pki/kubelet-server.crt",
        kubelets_certificate("cp-0").as_bytes(),
    );
    file("etc/machine-id", format!("{own}\n").as_bytes());
    let [journal, pod] = ["var/log/journal", "var/log/pods/web_shop-1_uid/web"];
    let old = vec![7; 3 << 20];
    let gone = [
        file(&format!("{journal}/{other}/system.journal"), &old),
        file(&format!("{journal}/{own}/system@0001-0002.journal"), &old),
        file(&format!("{journal}/{own}/user-0@0001.journal~"), &old),
        file(&format!("{pod}/0.log.20261129-023000.gz"), &old),
        file(&format!("{pod}/0.log.20261129-024000"), &old),
    ];
    let kept = [
        file(&format!("{journal}/{own}/system.journal"), b"now"),
        file(&format!("{pod}/0.log"), b"now"),
        file("elsewhere/x.log.1", b"not followed"),
        file(
            "var/log/kubernetes/audit/audit-2026-11-29T02-30-00.000.log",
            b"{}",
        ),
    ];
    let link = cluster.node.path("files/var/log/pods/web_shop-1_uid/link");
    std::os::unix::fs::symlink(cluster.node.path("files/elsewhere"), link).unwrap();
    // what an operator must find: the volume of a pod
    let volume = "mount/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/cache";
    cluster
        .node
        .file(&format!("{volume}/data"), vec![7; 17 << 20]);
    let etcd = "mount/var/lib/etcd/member/snap";
    cluster.node.file(&format!("{etcd}/db"), vec![7; 40 << 20]);

    let (code, out, errors) = cluster.run(&["node", "clean", "cp-0"]);
    assert_eq!(code, 0, "{errors}");
    for line in [
        "deleted journals: 3 files, 9 MiB",
        "deleted rotated logs of containers: 2 files, 6 MiB",
        "this node has no crictl",
        "Avail",
    ] {
        assert!(out.contains(line), "{line}: {out}");
    }
    let (_, folders) = out.split_once("the largest folders, in MiB:\n").unwrap();
    let shown = |path: &str| cluster.node.path(path).display().to_string();
    let expected = [
        shown("mount/var/lib"),
        shown(etcd),
        format!("{} (pod web/shop-1)", shown(volume)),
    ];
    // without the sizes, which depend on the file system
    let path = |line: &str| line.split_once(' ').unwrap().1.to_owned();
    let folders: Vec<_> = folders.lines().take(3).map(path).collect();
    assert_eq!(folders, expected);
    assert!(gone.iter().all(|path| !path.exists()));
    assert!(kept.iter().all(|path| path.exists()));
    let record = cluster.node.path("mount/firstlight/operator-calls");
    assert!(fs::read_to_string(record).unwrap().contains("\"clean\""));
}

pub fn kubelets_certificate(node: &str) -> String {
    let mut parameters = rcgen::CertificateParams::new(vec![node.to_owned()]).unwrap();
    let name = format!("system:node:{node}");
    parameters
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    let key = rcgen::KeyPair::generate().unwrap();
    parameters.self_signed(&key).unwrap().pem()
}

/// Writes an authority and an administrator's kubeconfig as kubeadm does.
fn write_kubeadms_files(cluster: &Cluster) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(vec![]).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&key).unwrap().pem();
    let folder = "files/etc/kubernetes";
    cluster
        .node
        .file(&format!("{folder}/pki/ca.crt"), &authority);
    cluster
        .node
        .file(&format!("{folder}/pki/ca.key"), key.serialize_pem());
    use base64::Engine;
    let data = base64::prelude::BASE64_STANDARD.encode(authority);
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- cluster:\n    certificate-authority-data: {data}\n    server: \
         https://10.0.0.1:6443\n  name: kubernetes\n"
    );
    cluster.node.file(&format!("{folder}/admin.conf"), text);
}

#[test]
fn a_control_plane_makes_kubeconfigs_while_no_api_server_runs() {
    let cluster = Cluster::new();
    let (code, _, errors) = cluster.run(&["kubeconfig"]);
    assert!(
        code == 1 && errors.contains("only a control plane makes"),
        "{errors}"
    );
    write_kubeadms_files(&cluster);
    let anna = [
        "kubeconfig",
        "cp-0",
        "--for",
        "anna",
        "--group",
        "developers",
        "--hours",
        "24",
    ];
    let (code, out, errors) = cluster.run(&[&anna[..], &["--file", "anna.conf"]].concat());
    assert_eq!(code, 0, "{errors}");
    assert!(
        out.contains("A kubeconfig of anna in developers, valid for 24 hours"),
        "{out}"
    );
    let shown = cluster.node.path("anna.conf");
    let config = kubernetes::client::ApiAccess::from_kubeconfig_file(&shown).unwrap();
    assert_eq!(config.server(), "https://10.0.0.1:6443");
    let text = fs::read_to_string(&shown).unwrap();
    let data = text.split("client-certificate-data: ").nth(1).unwrap();
    use base64::Engine;
    let pem = base64::prelude::BASE64_STANDARD.decode(data.lines().next().unwrap());
    let pem = cluster.node.file("anna.crt", pem.unwrap());
    let read = Command::new("openssl")
        .args(["verify", "-purpose", "sslclient", "-CAfile"])
        .arg(cluster.node.path("files/etc/kubernetes/pki/ca.crt"))
        .arg(&pem)
        .output()
        .unwrap();
    assert!(read.status.success(), "{read:?}");
    let read = Command::new("openssl")
        .args(["x509", "-noout", "-subject", "-in"])
        .arg(&pem)
        .output()
        .unwrap();
    let subject = String::from_utf8(read.stdout).unwrap();
    assert_eq!(subject.trim(), "subject=O = developers, CN = anna");

    for (bad, why) in [
        (
            &["--for", "system:node:cp-0"][..],
            "names that begin with system:",
        ),
        (
            &["--group", "system:nodes"],
            "names that begin with system:",
        ),
        (&["--hours", "9000"], "a second to 366 days"),
    ] {
        let bad = [&["kubeconfig", "--file", "bad.conf"], bad].concat();
        let (code, _, errors) = cluster.run(&bad);
        assert!(code != 0 && errors.contains(why), "{errors}");
    }
    assert!(!cluster.node.path("bad.conf").exists());
    let (code, _, errors) = cluster.run(&["kubeconfig", "--file", "anna.conf"]);
    assert!(
        code == 1 && errors.contains("exists: --overwrite"),
        "{errors}"
    );
}

#[test]
fn an_archive_has_the_facts_and_none_of_the_nodes_secrets() {
    let cluster = Cluster::new();
    write_kubeadms_files(&cluster);
    cluster
        .node
        .file("files/etc/firstlight/node.conf", "cloud-provider=qemu\n");
    let (code, _, errors) = cluster.run(&["support", "cp-0"]);
    assert_eq!(code, 0, "{errors}");
    let output = Command::new("tar")
        .args(["-xzf", "firstlight-support.tar.gz", "--one-top-level=facts"])
        .current_dir(cluster.node.path("."))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let folder = cluster.node.path("facts/cp-0");
    let fact = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(fact("settings"), "cloud-provider=qemu\n");
    let disks = fact("disks");
    assert!(disks.contains("Filesystem"), "{disks}");
    assert!(fact("versions").contains(env!("CARGO_PKG_VERSION")));
    let key = fs::read(cluster.node.path("files/etc/kubernetes/pki/ca.key")).unwrap();
    for entry in fs::read_dir(&folder).unwrap() {
        let content = fs::read(entry.unwrap().path()).unwrap();
        for secret in [&key[..], &MASTER_KEY, &MASTER_SALT] {
            assert!(!content.windows(secret.len()).any(|it| it == secret));
        }
    }
}

#[test]
fn a_snapshot_is_sent_and_what_the_node_says_against_it_comes_back() {
    let cluster = Cluster::new();
    let certificate = kubelets_certificate("cp-0");
    let path = "files/var/lib/kubelet/pki/kubelet-server.crt";
    cluster.node.file(path, certificate);
    // several parts
    cluster.node.file("snapshot.db", vec![7; 100_000]);
    let restore = |node: &str, more: &[&str]| {
        let at = format!("{node}={}", cluster.node.host(2));
        cluster.run(&[&["etcd", "restore", "--node", &at, "--yes"], more].concat())
    };
    let (code, _, errors) = restore("worker-0", &["snapshot.db"]);
    assert!(
        code == 1 && errors.contains("this is the node cp-0"),
        "{errors}"
    );
    let (code, _, errors) = restore("cp-0", &["snapshot.db"]);
    assert!(
        code == 1
            && errors.contains("this image has no etcdutl")
            && errors.contains("nothing was changed"),
        "{errors}"
    );
    let (code, _, errors) = restore("cp-0", &["no-such.db"]);
    assert!(
        code == 1 && errors.contains("no-such.db: No such file"),
        "{errors}"
    );
    assert!(
        !cluster
            .node
            .path("mount/firstlight/restore-upload")
            .exists()
    );
}
