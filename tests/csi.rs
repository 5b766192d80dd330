//! A CSI driver in virtual machines: it opens an encrypted volume with dm-crypt and a key of the key service, which gives it only to the
//! node to which the volume is attached. A real kube-apiserver says which node that is. The driver is `tests/csi_driver`, in Go, with the
//! real cryptsetup; the controllers of Kubernetes are this test.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ::services::key_service::{Clients, KeyService, KeyServiceConfig};
use base::crypto::Secret;
use base::master_secret::MasterSecret;
use common::kube_apiserver::Cluster;
use common::volumes::{self, ATTACHMENTS, DRIVER};
use kubernetes::client::{CONFIG_MAPS, Client};
use machine::case;
use machine::initramfs::{self, Overlay};
use machine::vm::{Machine, Vm};
use serde_json::json;
use support::foreign::go_program;

/// The time limit of a step: emulation is slow on a loaded machine.
const LIMIT: Duration = Duration::from_secs(300);
const ACCOUNT: (&str, &str) = ("storage", "csi-node");

#[test]
#[ignore = "needs a kube-apiserver and boots machines: make kubernetes-api"]
fn a_volume_opens_on_the_node_to_which_it_is_attached_and_brings_its_data() {
    let (cluster, client) = Cluster::started();
    let map = json!({"metadata": {"name": "key-service-ca"}});
    client
        .create(&CONFIG_MAPS.in_namespace("kube-system"), &map)
        .unwrap();
    let service = key_service(&cluster);
    volumes::add_volume(&client, "one");
    volumes::attach(&client, "one", "node-a", true);

    let mut machine = Machine::new("csi").unwrap();
    machine
        .host_ports
        .insert(9443, service.more_addrs()[0].port());
    machine.add_disk("volume", 64 << 20).unwrap();
    let mut vm = boot(&client, &mut machine, "node-a");
    println!("{:#?}", case::judge(&mut vm, LIMIT).unwrap());
    vm.wait_off(LIMIT).unwrap();

    // What the host sees.
    let disk = fs::read(machine.disk("volume")).unwrap();
    assert!(disk.starts_with(b"LUKS"));
    let written = b"written on node-a";
    assert!(!disk.windows(written.len()).any(|bytes| bytes == written));

    let mut vm = boot(&client, &mut machine, "node-b");
    vm.console.wait_for("WAITING", LIMIT).unwrap();
    let before = ATTACHMENTS.named(&volumes::attachment("one", "node-a"));
    client.delete(&before).unwrap();
    volumes::attach(&client, "one", "node-b", true);
    println!("{:#?}", case::judge(&mut vm, LIMIT).unwrap());
    vm.wait_off(LIMIT).unwrap();
}

fn key_service(cluster: &Cluster) -> KeyService {
    let kubeconfig = cluster.kubeconfig();
    let api = kubernetes::client::ApiAccess::from_kubeconfig(&kubeconfig, "test", Path::new("/"));
    let any = ([127, 0, 0, 1], 0).into();
    let service = KeyService::start(KeyServiceConfig {
        listen: any,
        clients: Clients::Token,
        api: Some(Box::new(api.unwrap())),
        grants: Some(
            format!("{}/{}=volume", ACCOUNT.0, ACCOUNT.1)
                .parse()
                .unwrap(),
        ),
        allow_plaintext: false,
        node: None,
        listen_tls: Some(any),
        old_clients: None,
        health: None,
        metrics: None,
    })
    .unwrap();
    let kms = MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap();
    service.provide(kms).unwrap();
    service
}

/// Boots the machine as this node, whose pod of the driver has its token and the key service's certificate.
fn boot(client: &Client, machine: &mut Machine, node: &str) -> Vm {
    volumes::add_node(client, node, "192.0.2.1");
    let pod = format!("csi-{node}");
    let uid = volumes::add_pod(client, ACCOUNT, &pod, node, json!([]));
    let token = volumes::token_of_pod(client, ACCOUNT, &pod, &uid, "key-service");
    let mut overlay = Overlay::default();
    case::add_script(&mut overlay, "csi.sh").unwrap();
    overlay.host_program("cryptsetup").unwrap();
    let driver = go_program("csi_driver", env!("CARGO_TARGET_TMPDIR"));
    overlay
        .file("/usr/bin/csi_driver", 0o755, fs::read(driver).unwrap())
        .file("/etc/csi/token", 0o600, token)
        .file("/etc/csi/ca.crt", 0o644, certificate(client))
        .file("/etc/csi/node", 0o644, node);
    initramfs::build(&machine.initramfs(), &[], &overlay).unwrap();
    println!("booting {node}, with the driver {DRIVER}");
    machine.boot().unwrap()
}

/// Returns the certificate that the key service has published.
fn certificate(client: &Client) -> String {
    let at = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("key-service-ca");
    let until = Instant::now() + LIMIT;
    while Instant::now() < until {
        if let Some(certificate) = client.get(&at).unwrap()["data"]["ca.crt"].as_str() {
            return certificate.to_owned();
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    panic!("the key service publishes no certificate")
}
