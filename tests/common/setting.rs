//! The environment of the node under test.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, derive_key};
use disk::luks::{self, ClusterToken};
use disk::state_disk::handover;
use tempfile::TempDir;
use verifier::{KeyName, qemu_vtpm};

use support::metadata::MetadataServer;
use support::program::{PATIENCE, Program};
use support::swtpm::{PCR_4, Swtpm};

pub const INIT_SECRET: &str = "correct_horse%battery@staple";
pub const MASTER_KEY: [u8; 32] = [1; 32];
pub const MASTER_SALT: [u8; 32] = [2; 32];
pub const MEASUREMENT_SALT: [u8; 32] = [3; 32];

/// One test's network, TPM and files.
pub struct Setting {
    network: u16,
    pub dir: TempDir,
    pub tpm: Swtpm,
    pub metadata: MetadataServer,
}

impl Setting {
    pub fn new() -> Setting {
        // the process ID keeps two concurrent runs of this test apart
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let network = (std::process::id() as u16)
            .wrapping_mul(31)
            .wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = TempDir::new().unwrap();
        let metadata = MetadataServer::start(SocketAddr::new(address(network, 1), 8080));
        let setting = Setting {
            network,
            tpm: Swtpm::start(),
            metadata,
            dir,
        };
        setting
            .metadata
            .set_self(&setting.instance("control-plane-0", 2));
        setting
            .metadata
            .set_peers(&format!("[{}]", setting.instance("control-plane-0", 2)));
        setting.metadata.set_endpoint(&setting.host(2).to_string());
        setting
            .metadata
            .set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 4).unwrap());
        setting
    }

    /// Returns the address of a machine in this test's network.
    pub fn host(&self, number: u8) -> IpAddr {
        address(self.network, number)
    }

    pub fn node(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.host(2), port)
    }

    /// Returns a machine as the metadata service describes it.
    pub fn instance(&self, name: &str, number: u8) -> String {
        let address = self.host(number);
        format!(
            r#"{{"Name":"{name}","ProviderID":"qemu:///{name}","Role":"ControlPlane","VPCIP":"{address}"}}"#
        )
    }

    /// Makes the metadata service list these machines as control planes, besides the node itself.
    pub fn set_control_planes(&self, numbers: &[u8]) {
        let mut peers = vec![self.instance("control-plane-0", 2)];
        peers.extend(
            numbers
                .iter()
                .map(|n| self.instance(&format!("control-plane-{n}"), *n)),
        );
        self.metadata.set_peers(&format!("[{}]", peers.join(",")));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file of this test and returns its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// A blank disk.
    pub fn blank_disk(&self) -> PathBuf {
        let path = self.path("disk");
        fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
        path
    }

    /// A disk after a first boot, which left the passphrase for the booted system.
    pub fn new_disk(&self) -> PathBuf {
        let disk = self.blank_disk();
        let passphrase = Secret::random(KEY_LEN);
        let mut device = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&disk)
            .unwrap();
        let header = luks::format(
            &mut device,
            &Secret::random(luks::VOLUME_KEY_LEN),
            &passphrase,
        )
        .unwrap();
        handover::leave(&self.path("state.key"), &passphrase, &header).unwrap();
        disk
    }

    /// A disk of a node that belongs to the cluster of [`MASTER_KEY`].
    pub fn initialized_disk(&self) -> PathBuf {
        self.initialized_disk_of(&MASTER_KEY)
    }

    /// A member's disk whose header names these hosts of the setting as control planes.
    pub fn disk_that_knows(&self, control_planes: &[u8]) -> PathBuf {
        let disk = self.initialized_disk();
        let hosts = control_planes.iter().map(|number| self.host(*number));
        let peers = luks::Peers {
            load_balancer: None,
            control_planes: hosts.collect(),
        };
        assert!(bootstrapper::state::state_disk::set_peers(&disk, &peers).unwrap());
        disk
    }

    /// A member's disk from Constellation: its header does not name its cluster.
    pub fn disk_of_before(&self) -> PathBuf {
        let disk = self.initialized_disk();
        let mut command = Command::new("/sbin/cryptsetup");
        let removed = command
            .args(["token", "remove", "--token-id", "1"])
            .arg(&disk)
            .output()
            .unwrap();
        assert!(
            removed.status.success(),
            "{}",
            String::from_utf8_lossy(&removed.stderr)
        );
        disk
    }

    /// A disk with a key of [`MASTER_KEY`]'s cluster, whose header names the cluster of another master secret.
    pub fn initialized_disk_of(&self, master_key: &[u8]) -> PathBuf {
        let disk = self.blank_disk();
        let mut device = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&disk)
            .unwrap();
        let volume_key = Secret::random(luks::VOLUME_KEY_LEN);
        let mut header = luks::format(&mut device, &volume_key, &Secret::random(KEY_LEN)).unwrap();
        let key = derive_key(
            &MASTER_KEY,
            &MASTER_SALT,
            Dek::disk(&header.uuid()).info(),
            KEY_LEN,
        )
        .unwrap();
        let secret = derive_key(
            master_key,
            &MASTER_SALT,
            Dek::named(MEASUREMENT_SECRET_ID).info(),
            KEY_LEN,
        )
        .unwrap();
        let cluster = ClusterToken::new(&header.uuid(), &secret, MEASUREMENT_SALT);
        header
            .replace_passphrase_and_mark(&mut device, &volume_key, &key, &cluster)
            .unwrap();
        disk
    }

    /// A policy that this test's TPM meets, by its attestation key and by PCR 15 in a boot of a machine that belongs to no cluster.
    pub fn policy(&self) -> PathBuf {
        self.write_policy(
            &[(15, [0; 32])],
            &format!(r#","attestationKeys":["{}"]"#, self.key_name()),
        )
    }

    /// A policy of these registers that accepts any TPM.
    pub fn policy_of(&self, registers: &[(u32, [u8; 32])]) -> PathBuf {
        self.write_policy(registers, "")
    }

    /// Returns the name of the attestation key of this test's TPM.
    pub fn key_name(&self) -> KeyName {
        qemu_vtpm::VARIANT
            .key_name(&self.tpm.location().parse().unwrap())
            .unwrap()
            .unwrap()
    }

    fn write_policy(&self, registers: &[(u32, [u8; 32])], keys: &str) -> PathBuf {
        // the image of these tests, if the test names no other one: a policy must say what boots
        let image = (4, PCR_4);
        let names_image = registers.iter().any(|(index, _)| *index == image.0);
        let image = (!names_image).then_some(&image);
        let entries: Vec<String> = image
            .into_iter()
            .chain(registers)
            .map(|(index, value)| {
                let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
                format!(r#""{index}":{{"expected":"{hex}","warnOnly":false}}"#)
            })
            .collect();
        self.file(
            "config/attestationConfig",
            format!(r#"{{"measurements":{{{}}}{keys}}}"#, entries.join(",")),
        )
    }

    /// Returns the operator's file with the master secret.
    pub fn master_secret(&self, key: [u8; 32]) -> PathBuf {
        use base64::Engine;
        let base64 = |bytes| base64::engine::general_purpose::STANDARD.encode(bytes);
        let text = format!(
            "{{\n\t\"key\": \"{}\",\n\t\"salt\": \"{}\"\n}}",
            base64(key),
            base64(MASTER_SALT)
        );
        let path = self.file("master-secret.json", text);
        set_private(&path);
        path
    }

    /// `unlock`, as the initramfs of this machine runs it.
    pub fn unlock(&self, disk: &Path) -> Command {
        self.node_program("unlock", disk)
    }

    /// `bootstrapper`, as the booted system runs it.
    pub fn bootstrapper(&self, disk: &Path) -> Command {
        self.node_program("bootstrapper", disk)
    }

    fn node_program(&self, name: &str, disk: &Path) -> Command {
        let mut command = Command::new(support::program::built(name));
        command
            .args(["--csp", "qemu", "--variant", "qemu-vtpm", "--metadata"])
            .arg(format!("http://{}:8080", self.host(1)))
            .args(["--tpm", &self.tpm.location()])
            .args(["--listen", &self.host(2).to_string()])
            .arg("--disk")
            .arg(disk)
            .arg("--mount")
            .arg(self.path("mount"))
            .arg("--record")
            .arg(self.path("timeline"))
            .arg("--key-file")
            .arg(self.path("state.key"));
        fs::create_dir_all(self.path("mount")).unwrap();
        command
    }

    /// A key service for `key` on machine `number`, and its address.
    pub fn key_service(&self, number: u8, key: [u8; 32]) -> (Program, SocketAddr) {
        let address = SocketAddr::new(self.host(number), 9000);
        let mut command = Command::new(support::program::built("key-service"));
        command.args(["--listen", &address.to_string(), "--clients", "any"]);
        command
            .arg("--master-secret")
            .arg(self.file(&format!("kms-{number}/mastersecret"), key));
        command
            .arg("--salt")
            .arg(self.file(&format!("kms-{number}/salt"), MASTER_SALT));
        let program = Program::start(&mut command);
        wait_for_port(address);
        (program, address)
    }

    /// A join service on machine `number` that asks `key_service`.
    pub fn join_service(&self, number: u8, key_service: SocketAddr, policy: &Path) -> Program {
        self.join_service_with(number, key_service, policy, &[])
    }

    pub fn join_service_with(
        &self,
        number: u8,
        key_service: SocketAddr,
        policy: &Path,
        arguments: &[&str],
    ) -> Program {
        let address = SocketAddr::new(self.host(number), 30090);
        self.file("config/measurementSalt", MEASUREMENT_SALT);
        let mut command = Command::new(support::program::built("join-service"));
        command.args([
            "--listen",
            &address.to_string(),
            "--key-service",
            &key_service.to_string(),
        ]);
        command.args(["--key-service-auth", "none"]);
        command
            .args(["--attestation-variant", "qemu-vtpm", "--config"])
            .arg(policy.parent().unwrap());
        let program = Program::start(command.args(arguments));
        wait_for_port(address);
        program
    }

    /// `firstlight` in this test's folder.
    pub fn firstlight(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(support::program::built("firstlight"));
        command.current_dir(self.dir.path()).args(arguments);
        command
    }

    /// `firstlight recover` for this test's node, without a secret.
    pub fn recovery(&self, policy: &Path) -> Command {
        let endpoint = self.node(9999).to_string();
        let mut command = self.firstlight(&["recover", "--endpoint", &endpoint, "--policy"]);
        command.arg(policy);
        command
    }

    /// `firstlight recover` for this test's node, with a master secret of this key.
    pub fn recover(&self, key: [u8; 32]) -> Command {
        let mut command = self.recovery(&self.policy());
        command.arg("--master-secret").arg(self.master_secret(key));
        command
    }
}

fn address(network: u16, number: u8) -> IpAddr {
    let [high, low] = network.to_be_bytes();
    // other programs of the machine use 127.0.0.0/16
    IpAddr::V4(Ipv4Addr::new(127, high.max(1), low, number))
}

pub fn set_private(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Waits until the node answers as a member, and ends it.
pub fn end_of_member(node: &mut Program) -> std::process::ExitStatus {
    node.expect("member: `firstlight status` is answered");
    node.terminate();
    node.exit()
}

pub fn wait_for_port(address: SocketAddr) {
    let end = Instant::now() + PATIENCE;
    while TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err() {
        assert!(Instant::now() < end, "nobody listens on {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
