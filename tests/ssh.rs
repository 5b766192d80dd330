//! Emergency SSH with the real OpenSSH: ssh-keygen reads our certificates, sshd admits the operator, ssh recognizes the node.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use base::crypto::{Dek, SSH_HOST_CA_SEED_ID, Secret, derive_key};
use ssh::{Authority, HOST_VALIDITY, PublicKey, host, key};
use tempfile::TempDir;

/// The master secret of Constellation's test vector: key 01.., salt 02...
const MASTER_SECRET: &str = "{\n\t\"key\": \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\",\n\t\"salt\": \"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\"\n}";
const AUTHORITY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILR0FseonmwTcSWFE0usA7Jhv/450JfmwMdC3i5wcbSI";
/// The public key of the authority for hosts, from the data key `ca_emergency_ssh_host`.
const HOSTS: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGWg8ZeEkTWR6aOij8rdtHTMf2a0o0s65oM1upQbUjqF";
/// The data key of the authority for users, from that master secret.
const SEED: &str = "9a28ff723b2ec10e3a6e8e9d00141a5f0382187f6fa46e4607b407b86fa6a0e5";

fn authority() -> Authority {
    let seed = (0..64)
        .step_by(2)
        .map(|at| u8::from_str_radix(&SEED[at..at + 2], 16).unwrap())
        .collect();
    Authority::from_seed(&Secret::new(seed)).unwrap()
}

/// Returns the authority for hosts.
fn hosts() -> Authority {
    let seed = derive_key(
        &[1; 32],
        &[2; 32],
        Dek::named(SSH_HOST_CA_SEED_ID).info(),
        32,
    )
    .unwrap();
    Authority::from_seed(&seed).unwrap()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).into()).collect()
}

fn run(command: &mut Command) -> String {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}",
        output.status
    );
    text
}

/// Returns how ssh-keygen prints a certificate. It also verifies the signature.
fn show(dir: &Path, certificate: &str) -> Vec<String> {
    let file = dir.join("shown-cert.pub");
    fs::write(&file, format!("{certificate}\n")).unwrap();
    // ssh-keygen prints times in the time zone of the machine
    let text = run(Command::new("ssh-keygen")
        .arg("-Lf")
        .arg(&file)
        .env("TZ", "UTC"));
    text.lines().map(|line| line.trim().to_owned()).collect()
}

fn keygen(dir: &Path, name: &str, options: &[&str]) -> PathBuf {
    let file = dir.join(name);
    run(Command::new("ssh-keygen")
        .args(["-q", "-N", "", "-C", "an operator"])
        .args(options)
        .arg("-f")
        .arg(&file));
    file
}

/// Runs the operator's command in a directory with the master secret.
fn firstlight_ssh(dir: &Path, args: &[&str]) -> Output {
    let secret = dir.join("firstlight-mastersecret.json");
    fs::write(&secret, MASTER_SECRET).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let mut command = Command::new(support::program::built("firstlight"));
    command
        .arg("ssh")
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn ssh_keygen_reads_a_host_certificate_of_every_field() {
    let dir = tempfile::tempdir().unwrap();
    let key = keygen(dir.path(), "host", &["-t", "ed25519"]);
    let key =
        PublicKey::from_line(&fs::read_to_string(key.with_extension("pub")).unwrap()).unwrap();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000); // 2027-01-15T08:00:00
    let certificate = authority()
        .host_certificate(&key, &names(&["10.0.0.1", "fd00::1", "node.example"]), now)
        .unwrap();
    let lines = show(dir.path(), &certificate);
    let has = |line: &str| assert!(lines.iter().any(|it| it == line), "{line:?} in {lines:#?}");
    has("Type: ssh-ed25519-cert-v01@openssh.com host certificate");
    has("Key ID: \"10.0.0.1\"");
    has("Serial: 0");
    has("Valid: before 2027-04-15T08:00:00");
    has("Critical Options: (none)");
    has("Extensions: (none)");
    let at = lines.iter().position(|line| line == "Principals:").unwrap();
    assert_eq!(
        lines[at + 1..at + 4],
        ["10.0.0.1", "fd00::1", "node.example"]
    );
    let fingerprint =
        run(Command::new("ssh-keygen")
            .arg("-lf")
            .arg(write(dir.path(), "ca.pub", AUTHORITY)));
    let fingerprint = fingerprint.split(' ').nth(1).unwrap();
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("Signing CA: ED25519 ") && line.contains(fingerprint))
    );
}

fn write(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).unwrap();
    path
}

#[test]
fn ssh_keygen_reads_a_user_certificate_for_every_kind_of_key() {
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000); // 2027-01-15T08:00:00
    for (name, options) in [
        ("ed25519", &["-t", "ed25519"][..]),
        ("rsa", &["-t", "rsa", "-b", "2048"]),
        ("256", &["-t", "ecdsa", "-b", "256"]),
        ("384", &["-t", "ecdsa", "-b", "384"]),
        ("521", &["-t", "ecdsa", "-b", "521"]),
    ] {
        let key = keygen(dir.path(), name, options).with_extension("pub");
        let key = PublicKey::from_line(&fs::read_to_string(key).unwrap()).unwrap();
        let lines = show(dir.path(), &authority().user_certificate(&key, now));
        let has = |line: &str| {
            assert!(
                lines.iter().any(|it| it == line),
                "{name}: {line:?} in {lines:#?}"
            )
        };
        assert!(lines[1].ends_with("user certificate"), "{lines:?}");
        has("Key ID: \"an operator\"");
        has("Valid: from 2027-01-15T07:55:00 to 2027-01-16T08:00:00");
        has("root");
        has("Critical Options: (none)");
        has("permit-port-forwarding");
        has("permit-pty");
        assert_eq!(lines.len(), 13, "{lines:#?}");
    }
}

#[test]
fn ssh_keygen_reads_the_host_key_that_we_make_and_we_read_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (file, public) = key::generate();
    let ours = write(
        dir.path(),
        "ours",
        std::str::from_utf8(file.expose()).unwrap(),
    );
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o600)).unwrap();
    let read = run(Command::new("ssh-keygen").arg("-yf").arg(&ours));
    assert_eq!(PublicKey::from_line(&read).unwrap(), public);

    for (name, options) in [
        ("plain", &["-t", "ed25519"][..]),
        ("ecdsa", &["-t", "ecdsa"]),
        ("encrypted", &["-t", "ed25519", "-N", "secret"]),
    ] {
        let theirs = keygen(dir.path(), name, options);
        let private =
            PublicKey::from_private_key_file(&fs::read_to_string(&theirs).unwrap()).unwrap();
        let public =
            PublicKey::from_line(&fs::read_to_string(theirs.with_extension("pub")).unwrap())
                .unwrap();
        assert_eq!(private, public, "{name}");
    }
}

/// A real sshd with the files of a node's state disk and the options of Constellation's image. It ends when dropped.
struct Sshd {
    child: Child,
    port: u16,
}

impl Sshd {
    fn start(root: &Path) -> Sshd {
        // sshd's chroot directory, which the service's start makes on Debian
        fs::create_dir_all("/run/sshd").unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let ssh = root.join("ssh");
        let ssh = ssh.display();
        let config = write(
            root,
            "sshd_config",
            &format!(
                "ListenAddress 127.0.0.1:{port}\nHostKey \"{ssh}/ssh_host_ed25519_key\"\n\
                 HostCertificate \"{ssh}/ssh_host_cert.pub\"\nTrustedUserCAKeys \"{ssh}/ssh_ca.pub\"\n\
                 PasswordAuthentication no\nKbdInteractiveAuthentication no\nAuthorizedKeysFile none\n\
                 PermitRootLogin prohibit-password\nUsePAM no\nPidFile none\n"
            ),
        );
        // sshd must be called by its full path
        let mut command = Command::new("/usr/sbin/sshd");
        command
            .args(["-D", "-e", "-f"])
            .arg(&config)
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let sshd = Sshd {
            child: command.spawn().unwrap(),
            port,
        };
        sshd.wait();
        sshd
    }

    fn wait(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < end, "sshd does not listen");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Reloads the configuration as `systemctl reload` does. OpenSSH before 9.8 does not need this: it reads the certificate for each
    /// connection.
    fn reload(&self) {
        run(Command::new("kill").args(["-HUP", &self.child.id().to_string()]));
        thread::sleep(Duration::from_millis(200));
        self.wait();
    }

    /// Logs in as the operator with the options that `firstlight ssh` prints, and runs `id -un`.
    fn login(&self, dir: &Path, known_as: &str, options: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["20", "ssh", "-F", "none", "-p", &self.port.to_string()]);
        command.args([
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "IdentitiesOnly=yes",
        ]);
        command.args([
            "-o",
            "GlobalKnownHostsFile=none",
            "-o",
            &format!("HostKeyAlias={known_as}"),
        ]);
        command.args(options).args(["root@127.0.0.1", "id -un"]);
        command
            .current_dir(dir)
            .env_remove("SSH_AUTH_SOCK")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const OPTIONS: [&str; 6] = [
    "-i",
    "id",
    "-o",
    "CertificateFile=firstlight-ssh-cert.pub",
    "-o",
    "UserKnownHostsFile=firstlight-known_hosts",
];

fn operator(kind: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    keygen(dir.path(), "id", kind);
    let output = firstlight_ssh(dir.path(), &["--key", "id.pub"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        text.contains(&format!("ssh {} root@NODE", OPTIONS.join(" "))),
        "{text}"
    );
    dir
}

#[test]
fn the_operator_logs_in_to_a_node_and_recognizes_it() {
    let root = tempfile::tempdir().unwrap();
    // the unit of the image makes it before an authority exists
    fs::create_dir(root.path().join("ssh")).unwrap();
    keygen(
        &root.path().join("ssh"),
        "ssh_host_ed25519_key",
        &["-t", "ed25519", "-C", ""],
    );
    let sshd = Sshd::start(root.path());
    let operator = operator(&["-t", "ed25519"]);
    let before = sshd.login(operator.path(), "node.example", &OPTIONS);
    assert_ne!(
        before.status.code(),
        Some(0),
        "no node is known without its certificate"
    );

    host::install_host_certificate(
        root.path(),
        &hosts(),
        authority().public(),
        &names(&["10.0.0.1", "node.example"]),
    )
    .unwrap();
    sshd.reload();
    let there = |login: Output| {
        (
            String::from_utf8_lossy(&login.stdout).trim().to_owned(),
            login.status.code(),
        )
    };
    for name in ["node.example", "10.0.0.1"] {
        let login = sshd.login(operator.path(), name, &OPTIONS);
        assert_eq!(there(login), ("root".to_owned(), Some(0)), "{name}");
    }
    // the certificate is not valid for this name
    let other = sshd.login(operator.path(), "other.example", &OPTIONS);
    let text = String::from_utf8_lossy(&other.stderr).into_owned();
    assert_eq!(other.status.code(), Some(255));
    assert!(text.contains("not a listed principal"), "{text}");
    // a key without a certificate
    let bare = sshd.login(
        operator.path(),
        "node.example",
        &["-i", "id", "-o", OPTIONS[5]],
    );
    let text = String::from_utf8_lossy(&bare.stderr).into_owned();
    assert_eq!(bare.status.code(), Some(255));
    assert!(text.contains("Permission denied"), "{text}");

    let stranger = Authority::from_seed(&Secret::new(vec![9; 32])).unwrap();
    let key =
        PublicKey::from_line(&fs::read_to_string(operator.path().join("id.pub")).unwrap()).unwrap();
    for certificate in [
        stranger.user_certificate(&key, SystemTime::now()),
        // the keys of a join service permit no login
        hosts().user_certificate(&key, SystemTime::now()),
        authority().user_certificate(&key, SystemTime::now() - Duration::from_secs(25 * 3600)),
    ] {
        write(operator.path(), "firstlight-ssh-cert.pub", &certificate);
        let refused = sshd.login(operator.path(), "node.example", &OPTIONS);
        assert_eq!(refused.status.code(), Some(255));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("Permission denied"));
    }
}

/// Returns the root of a host that this authority has certified.
fn certified_by(authority_of_hosts: &Authority) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let (users, names) = (authority(), names(&["node.example"]));
    host::install_host_certificate(root.path(), authority_of_hosts, users.public(), &names)
        .unwrap();
    root
}

#[test]
fn a_host_certified_by_the_authority_for_users_is_accepted_only_with_the_option_for_old_hosts() {
    let root = certified_by(&authority());
    let sshd = Sshd::start(root.path());
    let operator = operator(&["-t", "ed25519"]);
    let unknown = sshd.login(operator.path(), "node.example", &OPTIONS);
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert_eq!(unknown.status.code(), Some(255));
    assert!(text.contains("Host key verification failed"), "{text}");
    let output = firstlight_ssh(
        operator.path(),
        &["--key", "id.pub", "--overwrite", "--old-hosts"],
    );
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let known = fs::read_to_string(operator.path().join("firstlight-known_hosts")).unwrap();
    assert_eq!(
        known,
        format!("@cert-authority * {HOSTS}\n@cert-authority * {AUTHORITY}\n")
    );
    let login = sshd.login(operator.path(), "node.example", &OPTIONS);
    assert_eq!(login.status.code(), Some(0));
}

#[test]
fn a_node_with_an_expired_certificate_is_refused_until_it_is_renewed() {
    let root = certified_by(&hosts());
    let node = names(&["node.example"]);
    let key = host::host_key(root.path()).unwrap();
    let ended = SystemTime::now() - HOST_VALIDITY - Duration::from_secs(60);
    host::renew(
        root.path(),
        hosts()
            .host_certificate(&key, &node, ended)
            .unwrap()
            .as_bytes(),
    )
    .unwrap();
    let (sshd, operator) = (Sshd::start(root.path()), operator(&["-t", "ed25519"]));
    let login = sshd.login(operator.path(), "node.example", &OPTIONS);
    let text = String::from_utf8_lossy(&login.stderr).into_owned();
    assert!(
        login.status.code() == Some(255) && text.contains("expired"),
        "{text}"
    );
    host::renew(
        root.path(),
        hosts()
            .host_certificate(&key, &node, SystemTime::now())
            .unwrap()
            .as_bytes(),
    )
    .unwrap();
    sshd.reload();
    let login = sshd.login(operator.path(), "node.example", &OPTIONS);
    assert_eq!(login.status.code(), Some(0));
}

#[test]
fn a_node_without_a_host_key_also_admits_its_operator() {
    let root = certified_by(&hosts());
    let sshd = Sshd::start(root.path());
    for kind in [&["-t", "ecdsa"][..], &["-t", "rsa", "-b", "3072"]] {
        let login = sshd.login(operator(kind).path(), "node.example", &OPTIONS);
        assert_eq!(
            String::from_utf8_lossy(&login.stdout),
            "root\n",
            "{}",
            String::from_utf8_lossy(&login.stderr)
        );
    }
}

#[test]
fn no_file_of_the_operator_is_lost() {
    let dir = operator(&["-t", "ed25519"]);
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let known = format!("@cert-authority * {HOSTS}\n");
    assert_eq!(hosts().public_line(), HOSTS);
    assert_eq!(read("firstlight-known_hosts"), known);
    let first = read("firstlight-ssh-cert.pub");

    let again = firstlight_ssh(dir.path(), &["--key", "id.pub"]);
    let text = String::from_utf8(again.stderr).unwrap();
    assert_eq!(again.status.code(), Some(1));
    assert!(
        text.contains("firstlight-ssh-cert.pub exists") && text.contains("--overwrite"),
        "{text}"
    );
    assert_eq!(read("firstlight-ssh-cert.pub"), first);

    let replaced = firstlight_ssh(dir.path(), &["--key", "id.pub", "--overwrite"]);
    assert_eq!(replaced.status.code(), Some(0));
    assert_ne!(read("firstlight-ssh-cert.pub"), first);
    assert_eq!(read("firstlight-known_hosts"), known);

    write(dir.path(), "hosts", "other ssh-ed25519 AAAA");
    let added = firstlight_ssh(
        dir.path(),
        &["--key", "id.pub", "--overwrite", "--known-hosts", "hosts"],
    );
    assert_eq!(added.status.code(), Some(0));
    assert_eq!(read("hosts"), format!("other ssh-ed25519 AAAA\n{known}"));
}

#[test]
fn a_file_that_is_not_a_public_key_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    keygen(dir.path(), "id", &["-t", "ed25519"]);
    write(dir.path(), "nothing", "");
    for (key, expected) in [
        ("id", "it is a private key"),
        ("nothing", "it contains no key"),
        ("absent", "cannot open absent"),
    ] {
        let output = firstlight_ssh(dir.path(), &["--key", key]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && text.contains(expected),
            "{text}"
        );
    }
    assert!(
        !dir.path().join("firstlight-ssh-cert.pub").exists()
            && !dir.path().join("firstlight-known_hosts").exists()
    );
}
