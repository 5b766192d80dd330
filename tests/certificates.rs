//! The certificates of a control plane through three years: a virtual machine runs the real etcd, Kubernetes and kubelet, the join
//! service, and `bootstrapper renew` each time that its timer would matter. It moves its clock from one such day to the next
//! (tests/boot/cases/certificates.sh).
//!
//! The test needs `make build`'s programs, Debian's containerd, and Kubernetes, which it builds from the Go module proxy; `make
//! test-certificates` runs it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use base::uuid::Uuid;
use kubernetes::kubeadm::{self, AUDIT_POLICY, AUDIT_POLICY_PATH, ClusterSettings, NodeSettings};
use kubernetes::machine_record::MachineRecord;
use kubernetes::parameters::{Networks, NodeName};
use machine::case::Case;
use machine::vm::GUEST;
use machine::{Context, Result};

const NODE: &str = "control-plane-0";
/// A policy for `firstlight doctor`, which admits no machine in this test.
const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

#[test]
#[ignore = "boots a machine with Kubernetes: make test-certificates"]
fn a_control_plane_renews_its_certificates_through_three_years() -> Result<()> {
    let programs = [
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubeadm",
        "kubectl",
        "kubelet",
    ];
    let names = programs.map(Path::new);
    let folder = machine::script("tools/kubernetes.sh", &names)?;
    let mut files = vec![
        ("/etc/kubeadm.yaml".to_owned(), configuration().into_bytes()),
        (AUDIT_POLICY_PATH.to_owned(), AUDIT_POLICY.into()),
        ("/etc/record.json".to_owned(), record().into_bytes()),
        (
            "/etc/join-service/attestationConfig".to_owned(),
            POLICY.into(),
        ),
        ("/etc/join-service/measurementSalt".to_owned(), vec![7; 32]),
    ];
    for name in programs {
        let program = Path::new(&folder).join("bin").join(name);
        let content = fs::read(&program).context(&format!("read {}", program.display()))?;
        files.push((format!("/usr/bin/{name}"), content));
    }
    let case = Case {
        script: "certificates.sh",
        host_programs: &["openssl", "containerd"],
        files,
        programs: &["bootstrapper", "member-controller", "firstlight"],
        memory: 6144,
        limit: Duration::from_secs(2 * 3600),
        ..Case::default()
    };
    println!("passed:\n  {}", case.run()?.join("\n  "));
    Ok(())
}

/// Returns kubeadm's configuration as the first control plane writes it.
fn configuration() -> String {
    let cluster = ClusterSettings {
        version: "v1.34.4".parse().unwrap(),
        name: "certificates".into(),
        endpoint: GUEST.into(),
        alternative_names: vec![],
        networks: Networks::default(),
    };
    let node = NodeSettings {
        name: NodeName::from_machine(NODE).unwrap(),
        ip: GUEST.parse().unwrap(),
        provider_id: String::new(),
        external_cloud_provider: false,
        kubeadm_timeout: None,
    };
    kubeadm::init(&cluster, &node)
}

/// Returns the record of the machine, by which the member controller approves the kubelet's certificates.
fn record() -> String {
    let disk = Uuid::parse("0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22").unwrap();
    let record = MachineRecord {
        addresses: vec![GUEST.parse().unwrap()],
        control_plane: true,
        ..MachineRecord::of_node(NODE, &disk, None, "", "")
    };
    let mut object = record.to_object();
    object["apiVersion"] = "v1".into();
    object["kind"] = "ConfigMap".into();
    object["metadata"]["namespace"] = kubernetes::NAMESPACE.into();
    object.to_string()
}
