//! What a machine finds in its network beside the metadata service and the load balancer: a DHCP server, a time server, a registry of
//! container images, a web server with the components that are not in the image, and one with updates of the image.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{net, thread};

use machine::{root, script};
use support::program::Program;
use tempfile::TempDir;

use crate::network::{BRIDGE, HOST};
use crate::node::output;
use crate::release::{Release, keys};

/// mkosi/mkosi.profiles/kubernetes names it.
const REGISTRY: &str = "10.89.0.1:5000";
pub const WEB: &str = "10.89.0.1:8000";
/// mkosi/mkosi.profiles/kubernetes names it.
const UPDATES: &str = "10.89.0.1:8443";
/// The version of Kubernetes with which the cluster begins; that of the image is newer. tests/whole/prepare.sh has its container images.
pub const OLDER: &str = "v1.35.4";
/// The image of the workload.
pub const WORKLOAD: &str = "firstlight.local/web:1";

/// By how many days the clock of the time server is ahead.
static DAYS_AHEAD: AtomicU32 = AtomicU32::new(0);
/// From 1900 to 1970.
const NTP_TO_UNIX: Duration = Duration::from_secs(2_208_988_800);

pub struct Servers {
    folder: TempDir,
    _programs: [Program; 4],
}

impl Servers {
    pub fn start() -> Servers {
        // the layers of all images are here
        let folder = TempDir::new_in(root().join("target")).unwrap();
        let dhcp = dhcp(folder.path());
        let components = folder.path().join("components");
        fs::create_dir(&components).unwrap();
        for file in older_programs().chain([cni_plugins()]) {
            symlink(&file, components.join(file.file_name().unwrap())).unwrap();
        }
        let web = Program::start(
            Command::new("busybox")
                .args(["httpd", "-f", "-p", WEB, "-h"])
                .arg(components),
        );
        static TIME: Once = Once::new();
        TIME.call_once(serve_time);
        let registry = Program::start(
            Command::new(root().join("tools/registry.sh"))
                .arg(REGISTRY)
                .args(archives(folder.path()))
                .env("TMPDIR", folder.path()),
        );
        println!("{}", registry.expect(" images on "));
        let updates = updates(folder.path());
        Servers {
            folder,
            _programs: [dhcp, web, registry, updates],
        }
    }

    /// Makes this the newest release.
    pub fn offer(&self, release: &Release) {
        let newest = self.folder.path().join("newest");
        let _ = fs::remove_file(&newest);
        symlink(&release.folder, newest).unwrap();
    }

    /// Sets the clock of the time server so many days ahead.
    pub fn set_clock(&self, days: u32) {
        DAYS_AHEAD.store(days, Ordering::Relaxed);
    }
}

/// An HTTPS server with releases of the image.
fn updates(folder: &Path) -> Program {
    let keys = keys();
    let server = ["s_server", "-quiet", "-WWW", "-accept", UPDATES];
    let mut openssl = Command::new("openssl");
    openssl.args(server).current_dir(folder);
    openssl.arg("-cert").arg(keys.join("server.pem"));
    Program::start(openssl.arg("-key").arg(keys.join("server.key")))
}

/// A time server (RFC 5905, section 7.3).
fn serve_time() {
    let socket = net::UdpSocket::bind((HOST, 123)).unwrap();
    thread::spawn(move || {
        let mut request = [0; 48];
        loop {
            let Ok((48, client)) = socket.recv_from(&mut request) else {
                continue;
            };
            let ahead = Duration::from_secs(86400) * DAYS_AHEAD.load(Ordering::Relaxed);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let now = now + NTP_TO_UNIX + ahead;
            let fraction = (u64::from(now.subsec_nanos()) << 32) / 1_000_000_000;
            let stamp = ((now.as_secs() << 32) | fraction).to_be_bytes();
            // version 4, a server of stratum 1
            let head = [
                0x24, 1, 6, 0xe9, 0, 0, 0, 0, 0, 0, 0, 0, b'T', b'E', b'S', b'T',
            ];
            let answer = [&head, &stamp[..], &request[40..48], &stamp, &stamp].concat();
            let _ = socket.send_to(&answer, client);
        }
    });
}

/// The programs of the version of Kubernetes with which the cluster begins.
pub fn older_programs() -> impl Iterator<Item = PathBuf> {
    let mut older = Command::new(root().join("tools/kubernetes.sh"));
    let folder = output(older.env("KUBERNETES_VERSION", OLDER)).unwrap();
    let folder = Path::new(folder.trim()).join("bin");
    ["kubelet", "kubeadm", "kubectl"]
        .into_iter()
        .map(move |name| folder.join(name))
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
