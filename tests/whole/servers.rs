//! What a machine finds in its network beside the metadata service and the load balancer: a DHCP server, a registry of container
//! images, and a web server with the one component that is not in the image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use machine::{root, script};
use support::program::Program;
use tempfile::TempDir;

use crate::network::{BRIDGE, HOST};
use crate::node::output;

/// mkosi/mkosi.profiles/kubernetes names it.
const REGISTRY: &str = "10.89.0.1:5000";
pub const WEB: &str = "10.89.0.1:8000";
/// The image of the workload.
pub const WORKLOAD: &str = "firstlight.local/web:1";

pub struct Servers {
    _folder: TempDir,
    _programs: [Program; 3],
}

impl Servers {
    pub fn start() -> Servers {
        // the layers of all images are here
        let folder = TempDir::new_in(root().join("target")).unwrap();
        let dhcp = dhcp(folder.path());
        let web = Program::start(
            Command::new("busybox")
                .args(["httpd", "-f", "-p", WEB, "-h"])
                .arg(cni_plugins().parent().unwrap()),
        );
        let registry = Program::start(
            Command::new(root().join("tools/registry.sh"))
                .arg(REGISTRY)
                .args(archives(folder.path()))
                .env("TMPDIR", folder.path()),
        );
        println!("{}", registry.expect(" images on "));
        Servers {
            _folder: folder,
            _programs: [dhcp, web, registry],
        }
    }
}

/// The archive with the CNI plugins.
pub fn cni_plugins() -> PathBuf {
    script("tools/cni-plugins.sh", &[]).unwrap().into()
}

/// The archives of all container images of the test.
fn archives(folder: &Path) -> Vec<PathBuf> {
    let made = output(&mut Command::new(root().join("tests/whole/prepare.sh"))).unwrap();
    let mut all: Vec<_> = made.lines().map(PathBuf::from).collect();
    all.push(workload(folder));
    all
}

/// The image of a web server, which is also a client: busybox, which Debian has as a static program.
fn workload(folder: &Path) -> PathBuf {
    let (tree, archive) = (folder.join("workload"), folder.join("workload.tar"));
    fs::create_dir_all(tree.join("tmp")).unwrap();
    fs::copy("/bin/busybox", tree.join("busybox")).unwrap();
    let mut image = Command::new(root().join("tools/image.sh"));
    let image = image.arg(&archive).args([WORKLOAD, "/busybox"]).arg(tree);
    output(image).unwrap();
    archive
}

/// A DHCP server that gives each machine the address by which the metadata service knows it.
fn dhcp(folder: &Path) -> Program {
    let [leases, pid, file] = ["leases", "dhcp.pid", "dhcp.conf"].map(|name| folder.join(name));
    let [a, b, c, _] = HOST.octets();
    let mut settings = format!(
        "start {a}.{b}.{c}.100\nend {a}.{b}.{c}.120\ninterface {BRIDGE}\nlease_file {}\npidfile {}\n\
         option subnet 255.255.255.0\noption router {HOST}\noption dns {HOST}\noption lease 864000\n",
        leases.display(),
        pid.display()
    );
    for number in 2..10 {
        settings += &format!("static_lease {} {a}.{b}.{c}.{number}\n", mac(number));
    }
    fs::write(&leases, "").unwrap();
    fs::write(&file, settings).unwrap();
    Program::start(Command::new("busybox").args(["udhcpd", "-f"]).arg(file))
}

/// The address of the network card of the machine with this number.
pub fn mac(number: u8) -> String {
    format!("52:54:00:89:00:{number:02x}")
}

pub fn ip(arguments: &[&str]) {
    output(Command::new("ip").args(arguments)).unwrap();
}
