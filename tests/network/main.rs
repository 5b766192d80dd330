//! What the network between two nodes sees of the traffic of pods. Two virtual machines with Debian's kernel on one network, each
//! with flannel as docs/addons/flannel.yaml configures it, and a pod that flannel's CNI plugin has connected. One pod asks the other
//! one by HTTP, and the test searches the frames that were on the network (docs/network.md).
//!
//! `make test-network` runs it: it needs a kube-apiserver, Helm and QEMU, but no root.

mod capture;

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use capture::Capture;
use common::addons;
use common::kube_apiserver::Cluster;
use kubernetes::client::{CONFIG_MAPS, Client, DAEMON_SETS, NODES, SERVICE_ACCOUNTS};
use machine::initramfs::{self, Overlay};
use machine::vm::{HOST, Machine, Vm};
use machine::{Context, Result, root, script};
use serde_json::{Value, json};

/// In the request, and in its answer.
const ASKED: &str = "a-secret-of-the-pod-that-asks";
const ANSWERED: &str = "a-secret-of-the-pod-that-answers";
const PATIENCE: Duration = Duration::from_secs(120);
/// The time in which a request gets its answer if packets arrive.
const ANSWER: Duration = Duration::from_secs(60);
/// The port of the API server, as a node sees it.
const API_SERVER: u16 = 6443;
/// The ports of flannel's back ends.
const WIREGUARD: u16 = 51820;
const VXLAN: u16 = 8472;
/// The kernel's modules that a node needs, as far as initramfs/modules does not have them.
const MODULES: [&str; 12] = [
    "wireguard",
    "vxlan",
    "br_netfilter",
    "veth",
    "nft_compat",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_MASQUERADE",
];

#[test]
#[ignore = "boots two machines, and needs a kube-apiserver and Helm: make test-network"]
fn traffic_of_pods_is_encrypted_between_nodes() -> Result<()> {
    let client = Cluster::shared().client(&Stop::new());
    let flannel = Flannel::installed(&client)?;
    let mut network = Network::start(&client, &flannel)?;

    network.start_flannel("wireguard")?;
    network.connect_pods()?;
    let (answered, seen) = network.ask("wireguard", ANSWER)?;
    assert!(answered && seen.udp(WIREGUARD) > 0);
    network.assert_sealed(&seen);

    // the rules of flannel-strict do not disturb
    network.each("nft -f /etc/rules.nft")?;
    let (answered, seen) = network.ask("wireguard-strict", ANSWER)?;
    assert!(answered && seen.udp(WIREGUARD) > 0);
    network.assert_sealed(&seen);

    // without WireGuard's interface nothing leaves
    network.each("/sbin/ip link delete flannel-wg")?;
    let (answered, seen) = network.ask("no-interface", Duration::from_secs(10))?;
    assert!(!answered);
    network.assert_sealed(&seen);
    // and what another machine sends unencrypted does not arrive
    network.nodes[0].run("nft flush chain inet flannel-strict leaving")?;
    let (answered, seen) = network.ask("unencrypted", Duration::from_secs(10))?;
    assert!(!answered && seen.of_address(network.nodes[1].pod) > 0);
    let dropped = network.nodes[1].run("nft list chain inet flannel-strict arriving")?;
    assert!(
        dropped.contains("counter packets") && !dropped.contains("packets 0 "),
        "{dropped}"
    );

    // flannel by itself is not strict: when it ends it removes its interface, and packets take the default route
    network.stop_flannel()?;
    network.each("nft delete table inet flannel-strict")?;
    let (answered, seen) = network.ask("without-strict", ANSWER)?;
    assert!(answered && seen.shows(ASKED) && seen.shows(ANSWERED));

    // a back end that does not encrypt: the check sees it
    network.start_flannel("vxlan")?;
    let (answered, seen) = network.ask("vxlan", ANSWER)?;
    assert!(answered && seen.udp(VXLAN) > 0);
    assert!(seen.shows(ASKED) && seen.shows(ANSWERED));
    Ok(())
}

/// Flannel as the list of add-ons configures it.
struct Flannel {
    programs: PathBuf,
    network: String,
    cni: String,
    rules: String,
    arguments: Vec<String>,
    kubeconfig: String,
}

impl Flannel {
    /// Installs the add-ons, and reads what Helm has made of them.
    fn installed(client: &Client) -> Result<Flannel> {
        let folder = PathBuf::from(script("tools/flannel.sh", &[])?);
        let operator = addons::Operator::new();
        operator.write(
            "addons.yaml",
            &addons::list("flannel.yaml", &folder.join("chart")),
        );
        addons::succeeded(&operator.apply(&["--skip-wait"]));

        let map = |name: &str, key: &str| -> String {
            let map = CONFIG_MAPS.in_namespace("kube-flannel").named(name);
            client.get(&map).unwrap()["data"][key]
                .as_str()
                .unwrap()
                .into()
        };
        let set = DAEMON_SETS
            .in_namespace("kube-flannel")
            .named("kube-flannel-ds");
        let set = client.get(&set).unwrap();
        let command = set["spec"]["template"]["spec"]["containers"][0]["command"].as_array();
        let arguments = command.unwrap()[1..].iter();
        // the rights of flannel's own service account
        let token = SERVICE_ACCOUNTS
            .in_namespace("kube-flannel")
            .named("flannel");
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let token = client.create_subresource(&token.subresource("token"), &request);
        let (ca, _) = Cluster::shared().ca();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "flannel",
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{HOST}:{API_SERVER}"),
                // the certificate's name, because nodes reach the server at another address
                "tls-server-name": "localhost",
                "certificate-authority-data": BASE64_STANDARD.encode(ca),
            }}],
            "contexts": [{"name": "flannel", "context": {"cluster": "test", "user": "flannel"}}],
            "users": [{"name": "flannel", "user": {"token": token.unwrap()["status"]["token"]}}],
        });
        Ok(Flannel {
            programs: folder.join("bin"),
            network: map("kube-flannel-cfg", "net-conf.json"),
            cni: map("kube-flannel-cfg", "cni-conf.json"),
            rules: map("flannel-strict", "rules.nft"),
            arguments: arguments
                .map(|word| word.as_str().unwrap().into())
                .collect(),
            kubeconfig: kubeconfig.to_string(),
        })
    }

    /// Adds what a node has of flannel: the programs, and the configuration.
    fn install(&self, overlay: &mut Overlay) -> Result<()> {
        let mut program = |path: &str, from: &Path| -> Result<()> {
            let content = fs::read(from).context(&format!("read {}", from.display()))?;
            overlay.file(path, 0o755, content);
            Ok(())
        };
        program("/usr/bin/flanneld", &self.programs.join("flanneld"))?;
        program("/usr/bin/cnitool", &self.programs.join("cnitool"))?;
        program("/opt/cni/bin/flannel", &self.programs.join("flannel"))?;
        for plugin in ["bridge", "host-local", "portmap"] {
            let from = Path::new("/usr/lib/cni").join(plugin);
            program(&format!("/opt/cni/bin/{plugin}"), &from)?;
        }
        overlay
            .file("/etc/flannel.conf", 0o600, self.kubeconfig.as_bytes())
            .file("/etc/rules.nft", 0o644, self.rules.as_bytes())
            .file(
                "/etc/cni/net.d/10-flannel.conflist",
                0o644,
                self.cni.as_bytes(),
            );
        for backend in ["wireguard", "vxlan"] {
            let mut network: Value =
                serde_json::from_str(&self.network).context("read net-conf.json")?;
            assert_eq!(network["Backend"]["Type"], "wireguard");
            network["Backend"]["Type"] = json!(backend);
            overlay.file(
                &format!("/etc/kube-flannel/{backend}.json"),
                0o644,
                network.to_string(),
            );
        }
        Ok(())
    }
}

/// A node, and the pod on it.
struct Node {
    name: String,
    pod: Ipv4Addr,
    vm: Vm,
    // its folder ends after the machine
    _machine: Machine,
}

impl Node {
    fn run(&mut self, command: &str) -> Result<String> {
        self.vm.command(command, PATIENCE)
    }
}

/// Two nodes on one network.
struct Network {
    nodes: [Node; 2],
    folder: tempfile::TempDir,
    arguments: String,
}

impl Network {
    fn start(client: &Client, flannel: &Flannel) -> Result<Network> {
        let folder = tempfile::tempdir().context("make a folder")?;
        let cable = folder.path().join("cable.socket").display().to_string();
        let mut overlay = Overlay::default();
        add_system(&mut overlay)?;
        flannel.install(&mut overlay)?;
        let mut start = |number: u8| -> Result<Node> {
            let name = format!("node-{number}");
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "annotations": {"node.alpha.kubernetes.io/ttl": "0"}},
                "spec": {"podCIDR": format!("10.244.{number}.0/24"), "podCIDRs": [format!("10.244.{number}.0/24")]}});
            client.create_if_absent(&NODES.all(), &node).unwrap();
            let settings = format!("NUMBER={number} OTHER={}\n", 3 - number);
            overlay.file("/etc/node", 0o644, settings);
            let mut machine = Machine::new(&format!("network-{number}"))?;
            machine.tpm = false;
            machine.memory = 1024;
            machine
                .host_ports
                .insert(API_SERVER, Cluster::shared().port());
            let server = if number == 1 { "on" } else { "off" };
            machine.extra = vec![
                "-netdev".into(),
                format!("stream,id=cable,server={server},addr.type=unix,addr.path={cable}"),
                "-device".into(),
                format!("virtio-net-pci,netdev=cable,romfile=,mac=52:54:00:77:00:0{number}"),
            ];
            initramfs::build(&machine.initramfs(), &[], &overlay)?;
            let mut vm = machine.boot()?;
            vm.console.wait_for("s os", PATIENCE)?;
            Ok(Node {
                name,
                pod: Ipv4Addr::UNSPECIFIED,
                vm,
                _machine: machine,
            })
        };
        let nodes = [start(1)?, start(2)?];
        Ok(Network {
            nodes,
            folder,
            arguments: flannel.arguments.join(" "),
        })
    }

    /// Runs a command on both nodes.
    fn each(&mut self, command: &str) -> Result<()> {
        self.nodes
            .iter_mut()
            .try_for_each(|node| node.run(command).map(|_| ()))
    }

    fn start_flannel(&mut self, backend: &str) -> Result<()> {
        for node in &mut self.nodes {
            node.run(&format!(
                "NODE_NAME={} flanneld {} --kubeconfig-file=/etc/flannel.conf --iface=eth1 \
                 --net-config-path=/etc/kube-flannel/{backend}.json >/tmp/flanneld.log 2>&1 &",
                node.name, self.arguments
            ))?;
        }
        self.each(
            "n=0; until wget -q -O /dev/null http://127.0.0.1:8081/readyz 2>/dev/null; do n=$((n+1)); \
             [ $n -lt 100 ] || { cat /tmp/flanneld.log; exit 1; }; sleep 1; done",
        )
    }

    fn stop_flannel(&mut self) -> Result<()> {
        self.each("killall flanneld; while pidof flanneld >/dev/null; do sleep 0.2; done")
    }

    /// Gives each pod its network as a container runtime does, and starts the second pod's server.
    fn connect_pods(&mut self) -> Result<()> {
        self.each("CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d cnitool add cbr0 /run/netns/pod && echo")?;
        for node in &mut self.nodes {
            let shown = node.run("/sbin/ip -n pod -4 -oneline address show dev eth0")?;
            let address = shown
                .split_whitespace()
                .find_map(|word| word.split_once("/24"));
            let (address, _) = address.unwrap_or_else(|| panic!("{shown}"));
            node.pod = address.parse().unwrap();
        }
        self.nodes[1].run(&format!(
            "mkdir /www && echo {ANSWERED} >/www/{ASKED} && /sbin/ip netns exec pod busybox httpd -p 80 -h /www"
        ))?;
        Ok(())
    }

    /// Lets the first pod ask the second one until it answers, for this time; returns whether it did, and what the network saw.
    fn ask(&mut self, name: &str, limit: Duration) -> Result<(bool, Capture)> {
        let path = self.folder.path().join(format!("{name}.pcap"));
        let capture = format!(
            "object_add filter-dump,id=capture,netdev=cable,file={}",
            path.display()
        );
        self.nodes[0].vm.monitor(&capture)?;
        let request = format!(
            "/sbin/ip netns exec pod busybox timeout 5 busybox wget -q -O - http://{}/{ASKED} || true",
            self.nodes[1].pod
        );
        let deadline = Instant::now() + limit;
        let mut answered = false;
        while !answered && Instant::now() < deadline {
            answered = self.nodes[0].run(&request)?.contains(ANSWERED);
        }
        self.nodes[0].vm.monitor("object_del capture")?;
        println!(
            "{name}: {}",
            if answered { "answered" } else { "no answer" }
        );
        Ok((answered, Capture::read(&path)))
    }

    /// Checks that the network saw nothing of the pods: no text, and no packet with an address of theirs.
    fn assert_sealed(&self, seen: &Capture) {
        assert!(!seen.shows(ASKED) && !seen.shows(ANSWERED));
        for node in &self.nodes {
            assert_eq!(seen.of_address(node.pod), 0, "{}", node.pod);
        }
    }
}

/// Adds what a node has beside flannel: the script that sets it up, the kernel's modules, iproute2, nft and iptables.
fn add_system(overlay: &mut Overlay) -> Result<()> {
    let script_of_node = fs::read(root().join("tests/network/node.sh")).context("read node.sh")?;
    overlay.file("/case", 0o755, script_of_node);
    for program in ["ip", "nft", "xtables-nft-multi"] {
        overlay.host_program(program)?;
    }
    for tool in [
        "iptables",
        "iptables-save",
        "iptables-restore",
        "ip6tables",
        "ip6tables-save",
        "ip6tables-restore",
    ] {
        let call = format!("#!/bin/sh\nexec xtables-nft-multi {tool} \"$@\"\n");
        overlay.file(&format!("/usr/sbin/{tool}"), 0o755, call);
    }
    let extensions = fs::read_dir("/usr/lib/x86_64-linux-gnu/xtables")
        .context("find the extensions of iptables")?;
    for extension in extensions {
        let path = extension.context("find the extensions of iptables")?.path();
        let content = fs::read(&path).context(&format!("read {}", path.display()))?;
        overlay.file(&path.to_string_lossy(), 0o644, content);
    }

    let kernel = PathBuf::from(script("tools/kernel.sh", &[])?);
    let version = machine::vm::kernel()?;
    let version = version.file_name().unwrap_or_default().to_string_lossy();
    let mut packed = BTreeSet::new();
    for module in MODULES {
        let output = Command::new("/sbin/modprobe")
            .args([
                "--show-depends",
                "-S",
                version.trim_start_matches("vmlinuz-"),
                "-d",
            ])
            .args([&kernel, Path::new(module)])
            .output()
            .context("run modprobe")?;
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        for path in lines
            .lines()
            .filter_map(|line| line.strip_prefix("insmod "))
        {
            let path = Path::new(path.trim());
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if packed.insert(name.clone()) {
                let content = fs::read(path).context(&format!("read {}", path.display()))?;
                overlay.file(
                    &format!("/lib/network/{:02}-{name}", packed.len()),
                    0o644,
                    content,
                );
            }
        }
    }
    Ok(())
}
