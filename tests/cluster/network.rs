//! The nodes' network: a bridge, the metadata service at its usual address, and the load balancer of the control planes.

use std::io::copy;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::INIT_SECRET;
use crate::metadata::MetadataServer;

/// The address of this machine and of the load balancer.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 89, 0, 1);
pub const BRIDGE: &str = "cluster";
/// The address at which a node, or a pod, expects the metadata service for QEMU.
const METADATA: Ipv4Addr = Ipv4Addr::new(10, 42, 0, 1);
/// The ports of API server and join service.
const BALANCED: [u16; 2] = [6443, 30090];

/// The network, for one test at a time: its addresses are fixed, in the network namespace of `make test-cluster`.
pub struct Network {
    metadata: MetadataServer,
    machines: Mutex<Vec<Value>>,
    /// The number of machines that this test has had.
    count: Mutex<u8>,
    control_planes: Arc<Mutex<Vec<Ipv4Addr>>>,
    /// The names of the attestation keys of the machines.
    pub keys: Mutex<Vec<String>>,
}

impl Network {
    /// Makes a network without machines.
    pub fn empty() -> &'static Network {
        static NETWORK: OnceLock<Network> = OnceLock::new();
        let network = NETWORK.get_or_init(Network::new);
        network.machines.lock().unwrap().clear();
        *network.count.lock().unwrap() = 0;
        let hash = bcrypt::hash(INIT_SECRET, 4).unwrap();
        network.metadata.set_init_secret_hash(&hash);
        network.control_planes.lock().unwrap().clear();
        network.keys.lock().unwrap().clear();
        network
    }

    fn new() -> Network {
        ip(&["link", "set", "lo", "up"]);
        ip(&["link", "add", BRIDGE, "type", "bridge"]);
        ip(&["address", "add", &format!("{HOST}/24"), "dev", BRIDGE]);
        ip(&["address", "add", &format!("{METADATA}/32"), "dev", BRIDGE]);
        ip(&["link", "set", BRIDGE, "up"]);
        let metadata = MetadataServer::start(SocketAddr::from((METADATA, 8080)));
        metadata.set_endpoint(&HOST.to_string());
        let control_planes = Arc::new(Mutex::default());
        for port in BALANCED {
            balance(port, &control_planes);
        }
        Network {
            metadata,
            machines: Mutex::default(),
            count: Mutex::default(),
            control_planes,
            keys: Mutex::default(),
        }
    }

    /// Adds a machine; returns the last octet of its address.
    pub fn add(&self, name: &str, role: &str) -> u8 {
        let mut machines = self.machines.lock().unwrap();
        let mut count = self.count.lock().unwrap();
        *count += 1;
        let number = 1 + *count;
        let address = Ipv4Addr::from(u32::from(HOST) - 1 + u32::from(number));
        let machine = json!({"Name": name, "ProviderID": "", "Role": role, "VPCIP": address});
        self.metadata
            .set_self_at(IpAddr::V4(address), &machine.to_string());
        machines.push(machine);
        self.metadata.set_peers(&json!(*machines).to_string());
        if role == "ControlPlane" {
            self.control_planes.lock().unwrap().push(address);
        }
        number
    }

    #[allow(dead_code)] // not used by every test
    /// Takes the hash of the init secret away: machines of a launch template have none.
    pub fn forget_init_secret(&self) {
        self.metadata.set_init_secret_hash("");
    }

    #[allow(dead_code)] // not used by every test
    /// Removes a machine from the list.
    pub fn remove(&self, address: Ipv4Addr) {
        let mut machines = self.machines.lock().unwrap();
        machines.retain(|machine| machine["VPCIP"] != json!(address));
        self.metadata.set_peers(&json!(*machines).to_string());
        let mut control_planes = self.control_planes.lock().unwrap();
        control_planes.retain(|other| *other != address);
    }

    #[allow(dead_code)] // not used by every test
    /// Sets the machine as which a program of this machine asks the metadata service, instead of a node.
    pub fn set_host(&self, name: &str, role: &str, address: Ipv4Addr) {
        let machine = json!({"Name": name, "ProviderID": "", "Role": role, "VPCIP": address});
        self.metadata.set_self(&machine.to_string());
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "ip {arguments:?}: {error} (is this `make test-cluster`?)"
    );
}

/// Forwards each connection to the first control plane that accepts it; the order rotates.
fn balance(port: u16, control_planes: &Arc<Mutex<Vec<Ipv4Addr>>>) {
    let address = SocketAddr::from((HOST, port));
    let listener = TcpListener::bind(address)
        .unwrap_or_else(|error| panic!("load balancer on {address}: {error}"));
    let control_planes = control_planes.clone();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let mut order = control_planes.lock().unwrap();
            if !order.is_empty() {
                order.rotate_left(1);
            }
            let order = order.clone();
            thread::spawn(move || {
                let connect = |address: &Ipv4Addr| {
                    TcpStream::connect_timeout(
                        &SocketAddr::from((*address, port)),
                        Duration::from_secs(1),
                    )
                    .ok()
                };
                let Some(server) = order.iter().find_map(connect) else {
                    return;
                };
                let (mut from_client, mut to_server) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = copy(&mut from_client, &mut to_server);
                    let _ = to_server.shutdown(Shutdown::Write);
                });
                let _ = copy(&mut &server, &mut &client);
                let _ = client.shutdown(Shutdown::Both);
                let _ = server.shutdown(Shutdown::Both);
            });
        }
    });
}
