//! Tickets and records: a machine joins and comes back through a join service of the other release, with a real kube-apiserver.

use std::fs;
use std::net::SocketAddr;

use common::join_setup::{PKI, Setup, alone, service_program_at};
use common::kube_apiserver::Cluster;
use common::previous::Release::{self, Previous, Today};
use common::setting::Setting;
use kubernetes::client::CONFIG_MAPS;
use serde_json::{Value, json};
use support::program::Program;

use crate::cluster::install_accounts;

const NAMESPACE: &str = "kube-system";

/// A machine of release `node` joins through services of release `before`. Those of release `after` replace them, and it reboots.
fn a_node_joins_and_comes_back(role: &str, node: Release, before: Release, after: Release) {
    let _alone = alone();
    let mut setting = Setting::new();
    setting.set_control_planes(&[3]);
    let disk = setting.new_disk();
    let cluster = Cluster::shared();
    let listen = SocketAddr::new(setting.host(3), 30090).to_string();

    let mut setup = before.run(|| Setup::new(cluster));
    // the program serves in its place
    drop(setup.service.take());
    install_accounts(before, &setup.admin);
    let own = match role {
        // it must call from its own address, and its calls on loopback come from this one
        "ControlPlane" => "127.0.0.1".to_owned(),
        _ => setting.host(2).to_string(),
    };
    let machine = setting.instance("Node_2", 2).replace("ControlPlane", role);
    let machine = machine.replace(&setting.host(2).to_string(), &own);
    setup.metadata.set_peers(&format!("[{machine}]"));
    for file in PKI.iter().filter(|file| !file.starts_with("ca.")) {
        let path = setup.dir.path().join("pki").join(file);
        fs::write(path, format!("-----BEGIN {file}-----\n")).unwrap();
    }
    let kubeadm = setting.cluster("").kubeadm();
    let components =
        json!([{"url": kubeadm.url, "hash": kubeadm.hash, "install_path": kubeadm.install_path}]);
    let list = CONFIG_MAPS.in_namespace(NAMESPACE);
    let list = list.named("k8s-components-sha256-1");
    let list_of_setting = json!({"data": {"components": components.to_string()}});
    setup.admin.merge(&list, &list_of_setting).unwrap();
    let config = setup.dir.path().to_owned();
    let (serving, _) = before.run(|| service_program_at(&listen, &setup, cluster, &config));

    let mut joining = node.run(|| setting.joining(&disk, role));
    setting.metadata.set_self(&machine);
    let mut joining = Program::start(&mut joining);
    joining.expect("ticket: from join service");
    joining.expect("complete:");
    joining.expect("member: `firstlight status` is answered");
    joining.terminate();
    joining.exit();
    assert!(setting.kubeadm_calls().starts_with("join --config"));
    let record = CONFIG_MAPS
        .in_namespace(NAMESPACE)
        .named("join-node-node-2");
    let uuid = |record: &Value| record["data"]["disk"].clone();
    let recorded = uuid(&setup.admin.get(&record).unwrap());
    assert!(recorded.is_string());

    drop(serving);
    install_accounts(after, &setup.admin);
    let (keys, _) = after.run(|| common::join_setup::key_service(setup.dir.path(), "127.0.0.1:0"));
    setup.keys = keys;
    let (_serving, _) = after.run(|| service_program_at(&listen, &setup, cluster, &config));
    setting.tpm.reboot();
    let mut booting = Program::start(&mut node.run(|| setting.unlock(&disk)));
    booting.expect("ticket:");
    booting.expect("key-slot:");
    booting.exit();
    assert_eq!(uuid(&setup.admin.get(&record).unwrap()), recorded);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_node_joins_before_the_services_are_upgraded_and_comes_back_after_it() {
    a_node_joins_and_comes_back("Worker", Previous, Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_node_joins_todays_services_and_comes_back_after_they_went_back() {
    a_node_joins_and_comes_back("Worker", Previous, Today, Previous);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_node_of_today_joins_previous_services_and_comes_back_after_their_upgrade() {
    a_node_joins_and_comes_back("Worker", Today, Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_node_of_today_joins_todays_services_and_comes_back_after_they_went_back() {
    a_node_joins_and_comes_back("Worker", Today, Today, Previous);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_control_plane_joins_todays_services_and_comes_back_after_they_went_back() {
    a_node_joins_and_comes_back("ControlPlane", Previous, Today, Previous);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_control_plane_of_today_joins_previous_services_and_comes_back_after_their_upgrade() {
    a_node_joins_and_comes_back("ControlPlane", Today, Previous, Today);
}
