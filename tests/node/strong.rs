//! `require=strong` against a program without a TPM: it has signed the registers of a member with a key of its own.

use std::sync::Arc;

use ring::digest::{SHA256, digest};
use tpm::Tpm;
use verifier::session::{PeerRole, user_data};
use verifier::{DocumentRequest, IssueError, Issuer, Oid, qemu_vtpm};

use crate::forger::Forger;
use crate::joining::{Cluster, JoinService, MEASUREMENT_SECRET};
use crate::mutual::{Host, hex, joined_cluster};
use crate::program::Program;
use crate::setting::{Setting, end_of_member};

/// The error of a node whose settings would accept such a program.
const PINS_NOTHING: &str = "error: the setting require=strong cannot pin the join services: with the variant qemu-vtpm, a program without a TPM can claim the \
    registers of this machine; set cluster-id, or name in service-policy the attestation keys";

/// A program without a TPM, which copies the registers of a member of this cluster.
struct Liar(Forger, [u8; 32]);

impl Issuer for Liar {
    fn oid(&self) -> Oid {
        qemu_vtpm::OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let mut parts = self.0.parts(user_data, nonce);
        let event = digest(&SHA256, &self.1);
        let extended = digest(&SHA256, &[&[0; 32], event.as_ref()].concat());
        parts.values.insert(15, extended.as_ref().to_vec());
        Ok(parts.document())
    }

    /// Claims the role of a join service, like the evidence of a real one.
    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        let user_data = user_data(PeerRole::JoinService, request.session, &[]);
        self.issue(&user_data, request.nonce)
    }
}

fn liar(cluster: [u8; 32]) -> Arc<dyn Issuer> {
    Arc::new(Liar(Forger::new(), cluster))
}

/// A join service on this machine that proves itself by this issuer, and has the cluster's tickets.
fn serve(
    setting: &Setting,
    number: u8,
    cluster: &Arc<Cluster>,
    issuer: Arc<dyn Issuer>,
) -> JoinService {
    let cluster = cluster.clone();
    setting.set_control_planes(&[number]);
    setting.join_service_of(number, issuer, move |_, request, _| {
        Ok(cluster.ticket(&request))
    })
}

#[test]
fn a_fresh_node_with_require_strong_is_not_started_where_nothing_pins_the_service() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let _service = serve(&setting, 3, &setting.cluster(""), liar(joined_cluster()));
    // the TPM serves one program at a time
    let key = setting.key_name();
    let mut node = Program::start(setting.joining(&disk, "Worker").arg("--require=strong"));
    node.expect(&format!("attestation-key: {key}"));
    node.expect(PINS_NOTHING);
    assert_eq!(node.exit().code(), Some(1), "{}", node.output());
    assert_eq!(setting.kubeadm_calls(), "", "its kubeadm has run as root");

    // a policy with only registers does not identify a machine either; it may require the strong form itself
    let zeros = "00".repeat(32);
    let policy = format!(
        r#"{{"exceptions":["zero-registers"],"measurements":{{"4":"{zeros}"}},"require":"strong"}}"#
    );
    let policy = setting.file("services.json", policy);
    let mut command = setting.joining(&disk, "Worker");
    let mut node = Program::start(command.arg("--service-policy").arg(policy));
    node.expect(PINS_NOTHING);
    assert_eq!(node.exit().code(), Some(1), "{}", node.output());
}

/// As before: services of Constellation must be able to take such a node, too.
#[test]
fn without_require_strong_the_console_says_that_a_program_could_claim_the_same() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let _service = serve(&setting, 3, &setting.cluster(""), liar(joined_cluster()));
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    node.expect(
        "which claims (a program without a TPM could, too) an accepted image and the cluster",
    );
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    assert!(!node.output().contains("proves"), "{}", node.output());
}

/// The ID of a cluster is not secret, but the values from which it is derived are secret.
#[test]
fn cluster_id_pins_the_service_by_the_secrets_in_its_ticket() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let cluster = setting.cluster("");
    let id = [9; 32];
    let service = serve(&setting, 3, &cluster, liar(id));
    let strong = |id: &[u8]| {
        let mut command = setting.joining(&disk, "Worker");
        command.args(["--require=strong", "--cluster-id", &hex(id)]);
        Program::start(&mut command)
    };
    let mut node = strong(&id);
    node.expect("sent a ticket of the cluster");
    node.expect("its machine belongs to another one");
    node.terminate();
    node.exit();
    assert_eq!(setting.kubeadm_calls(), "");
    drop(service);

    // one that knows the secrets has been in the cluster
    let _service = serve(&setting, 4, &cluster, liar(joined_cluster()));
    let mut node = strong(&joined_cluster());
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    assert!(!node.output().contains(&hex(&MEASUREMENT_SECRET)));
}

#[test]
fn named_keys_pin_the_service() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let cluster = setting.cluster("");
    let member = Host::new(Some(joined_cluster()), None);
    let key = qemu_vtpm::VARIANT
        .key_name(&member.location())
        .unwrap()
        .unwrap();
    let (zeros, keys) = ("00".repeat(32), format!(r#""attestationKeys":["{key}"]"#));
    let policy = format!(
        r#"{{"exceptions":["zero-registers"],"measurements":{{"4":"{zeros}"}},"name":"services",{keys}}}"#
    );
    let policy = setting.file("services.json", policy);
    let mut command = setting.joining(&disk, "Worker");
    command
        .arg("--require=strong")
        .arg("--service-policy")
        .arg(policy);

    let _liar = serve(&setting, 3, &cluster, liar(joined_cluster()));
    let mut node = Program::start(&mut command);
    node.expect("its attestation key is");
    node.expect("not the one that the policy names");
    assert_eq!(setting.kubeadm_calls(), "");
    let _service = serve(&setting, 4, &cluster, member.evidence());
    node.expect("which proves an accepted image");
    assert!(end_of_member(&mut node).success(), "{}", node.output());
}

/// A member needs no join service: its kubelet starts whatever its settings are.
#[test]
fn a_machine_that_has_its_disk_is_not_kept_from_its_cluster_by_the_setting() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut tpm = Tpm::open(&setting.tpm.location().parse().unwrap()).unwrap();
    tpm.measure_cluster_id(&[1; 32]).unwrap();
    drop(tpm);
    let mut node = Program::start(setting.bootstrapper(&disk).arg("--require=strong"));
    node.expect("an earlier set-up was interrupted");
    assert_eq!(node.exit().code(), Some(3), "{}", node.output());
}
