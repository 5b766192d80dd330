//! A machine that the provider of Cluster API makes: `bootstrapper` with a TPM, and a network that shows its address to the metadata
//! service. The test does the work of its kubelet.

use std::fs;
use std::io::copy;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::SystemTime;

use base::time;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use disk::luks::{self, Probe};
use kubernetes::client::{Client, LEASES, NODES};
use kubernetes::kubeadm::KUBELET_CLIENT_CERTIFICATE;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use crate::client_certificates::{self, openssl_text};
use crate::kube_apiserver::Cluster;
use crate::program::Program;
use crate::renewal::{Renewals, kubelet};
use crate::setting::Setting;
use crate::setup::{Setup, by_token, eventually};
use crate::swtpm::{self, Swtpm};

/// kubeadm of the machines: it keeps its files for the test.
pub const KUBEADM: &str = "#!/bin/sh\ncp -a /run/firstlight /var/lib/kubeadm\n";

/// A machine, switched on.
pub struct Machine {
    pub name: String,
    pub disk: String,
    setting: Setting,
    program: Program,
}

impl Machine {
    /// Makes a machine whose TPM is certified by `authority`.
    pub fn made_by(authority: &Path) -> Setting {
        let mut setting = Setting::new();
        let state = setting.path("tpm");
        fs::create_dir(&state).unwrap();
        swtpm::manufacture(&state, authority);
        setting.tpm = Swtpm::start_in(&state);
        setting
    }

    /// Switches a machine on. Its settings are those of its image: the metadata service, and the cluster's ID.
    pub fn start(name: &str, setting: Setting, metadata: SocketAddr, cluster_id: &str) -> Machine {
        let path = setting.new_disk();
        let Probe::Luks(header) = luks::probe(&mut fs::File::open(&path).unwrap()).unwrap() else {
            panic!("no state disk");
        };
        let metadata = forward(setting.host(2), metadata);
        let mut command = setting.joining(&path, "Worker");
        command.args(["--metadata", &format!("http://{metadata}")]);
        command.args(["--cluster-id", cluster_id, "--require", "strong"]);
        Machine {
            name: name.into(),
            disk: header.uuid().to_string(),
            program: Program::start(&mut command),
            setting,
        }
    }

    /// Waits until the machine has joined. Returns the token of its ticket.
    pub fn joined(&self) -> String {
        self.program.expect("complete:");
        let output = self.program.output();
        let join = self.join_configuration();
        let token = join["discovery"]["tlsBootstrapToken"].as_str().unwrap();
        assert!(
            !output.contains(token.split_once('.').unwrap().1),
            "{output}"
        );
        token.to_owned()
    }

    fn join_configuration(&self) -> Value {
        let file = "var/lib/kubeadm/kubeadm-join.yaml";
        let text = fs::read_to_string(self.setting.in_node(file)).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Registers the node as its kubelet does: with the certificate of its ticket, and with the arguments that kubeadm gives it. Who
    /// has only the ticket's token gets no certificate.
    pub fn register(&self, setup: &Setup, cluster: &Cluster, token: &str) {
        let node = &self.name;
        let link = self.setting.in_node(KUBELET_CLIENT_CERTIFICATE);
        let file = fs::read_link(&link).unwrap();
        let file = link.with_file_name(file.file_name().unwrap());
        let certificate = fs::read_to_string(file).unwrap();
        let subject = format!("CN = system:node:{node}");
        assert!(openssl_text(&certificate).contains(&subject));
        client_certificates::ask(&by_token(cluster, token), node, node);
        setup.eventually_decided(node, "Denied", "client-key");
        let join = self.join_configuration();
        assert_eq!(join["nodeRegistration"]["name"], **node);
        let arguments = join["nodeRegistration"]["kubeletExtraArgs"].as_array();
        let mut arguments = arguments.unwrap().iter();
        let provider_id = arguments.find(|argument| argument["name"] == "provider-id");
        let spec = json!({"providerID": provider_id.unwrap()["value"]});
        register(&kubelet(cluster, node), node, &spec);
    }

    /// Ends the program and switches the machine off and on. Returns its TPM.
    pub fn reboot(&mut self) -> &Swtpm {
        self.program.terminate();
        self.program.exit();
        self.setting.tpm.reboot();
        &self.setting.tpm
    }

    pub fn address(&self) -> IpAddr {
        self.setting.host(2)
    }
}

/// Creates a Node that is ready, and its Lease.
pub fn register(kubelet: &Client, node: &str, spec: &Value) {
    let object = json!({"metadata": {"name": node}, "spec": spec});
    let made = kubelet.create(&NODES.all(), &object).unwrap();
    let now = time::seconds(SystemTime::now());
    let conditions = json!([{
        "type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now, "lastHeartbeatTime": now,
    }]);
    let status = NODES.named(node).subresource("status");
    kubelet
        .merge(&status, &json!({"status": {"conditions": conditions}}))
        .unwrap();
    let owner =
        json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": made["metadata"]["uid"]});
    let lease = json!({
        "metadata": {"name": node, "ownerReferences": [owner]},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40},
    });
    let leases = LEASES.in_namespace("kube-node-lease");
    eventually("the namespace of leases exists", || {
        kubelet.create(&leases, &lease).is_ok()
    });
}

/// The component of the ticket that is [`KUBEADM`].
pub fn components() -> String {
    let script = BASE64_STANDARD.encode(KUBEADM);
    let url = format!("data:text/plain;base64,{script}");
    json!([{"url": url, "install_path": "/run/state/bin/kubeadm"}]).to_string()
}

/// Forwards connections to `server`, which sees them come from `source`. Returns the address; the threads end with the process.
pub fn forward(source: IpAddr, server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            far.bind(&SocketAddr::new(source, 0).into()).unwrap();
            if far.connect(&server.into()).is_err() {
                continue;
            }
            let far = TcpStream::from(far);
            let pair = (near.try_clone().unwrap(), far.try_clone().unwrap());
            for (mut from, mut to) in [(near, far), (pair.1, pair.0)] {
                thread::spawn(move || {
                    let _ = copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    address
}
