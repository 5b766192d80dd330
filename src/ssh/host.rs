//! The files of a node for its sshd: in `ssh/` on the state disk, as configured in the image's sshd_config(5):
//!
//! | file | option | made by |
//! |---|---|---|
//! | `ssh_host_ed25519_key`, `.pub` | `HostKey` | the image's sshd-keygen unit before this program starts; else this module |
//! | `ssh_host_cert.pub` | `HostCertificate` | this module |
//! | `ssh_ca.pub` | `TrustedUserCAKeys` | this module |
//!
//! This module creates a missing host key: the set-up of a cluster must not fail without it, and the operator expects that
//! emergency SSH works. sshd reads `ssh_ca.pub` at each login. Since OpenSSH 9.8 it reads the certificate only at its start, so
//! sshd is reloaded.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use zeroize::Zeroizing;

use super::key::{self, PublicKey};
use super::{Authority, Error as Refused};
use base::child_process::{self, ChildFailure};
use base::file;
use base::stop::Stop;
use sys::interfaces;

/// The directory below the mount point of the state disk.
const DIRECTORY: &str = "ssh";
const HOST_KEY: &str = "ssh_host_ed25519_key";
const HOST_PUBLIC_KEY: &str = "ssh_host_ed25519_key.pub";
const HOST_CERTIFICATE: &str = "ssh_host_cert.pub";
const AUTHORITY: &str = "ssh_ca.pub";
/// Mode of the private key: sshd refuses a host key that other users can read.
const PRIVATE: u32 = 0o600;
/// Mode of public keys and certificates, as ssh-keygen uses.
const PUBLIC: u32 = 0o644;
/// Maximum number of bytes that are read from a key file.
const MAX_FILE: u64 = 64 << 10;
/// The systemd units of sshd: in Fedora and most distributions, and in Debian.
const UNITS: [&str; 2] = ["sshd.service", "ssh.service"];
/// Time limit for one answer of systemd, which does not wait for sshd.
const ANSWER: Duration = Duration::from_secs(10);

/// Why emergency SSH could not be set up.
#[derive(Debug)]
pub enum Error {
    /// A file cannot be read or written.
    Io(PathBuf, io::Error),
    /// The host key cannot be used.
    Key(PathBuf, key::Error),
    /// The host certificate cannot be made.
    Certificate(Refused),
    /// The ticket of a join service contains a line that sshd cannot use.
    Ticket(&'static str),
    /// The authority in the ticket is not a key.
    Authority(key::Error),
    /// The host certificate in the ticket does not certify this node's host key.
    Foreign,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
            Error::Key(path, error) => write!(f, "the SSH host key {}: {error}", path.display()),
            Error::Certificate(error) => error.fmt(f),
            Error::Ticket(what) => write!(
                f,
                "the ticket's {what} is not a single line of an SSH public key file"
            ),
            Error::Authority(error) => write!(f, "the ticket's SSH authority: {error}"),
            Error::Foreign => f.write_str(
                "the ticket's SSH host certificate does not certify this node's host key",
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Certifies this node's host key with the host authority, and writes the certificate and the public key of the user authority to
/// the state disk mounted at `root`. May be repeated. sshd uses the certificate after [`reload_sshd`].
pub fn install_host_certificate(
    root: &Path,
    hosts: &Authority,
    users: &PublicKey,
    principals: &[String],
) -> Result<(), Error> {
    let key = host_key(root)?;
    let certificate = hosts
        .host_certificate(&key, principals, SystemTime::now())
        .map_err(Error::Certificate)?;
    install(root, users.line().as_bytes(), certificate.as_bytes())
}

/// Writes the public key of the user authority and the host certificate that a join service sent. An empty one is removed.
pub fn install(root: &Path, authority: &[u8], certificate: &[u8]) -> Result<(), Error> {
    let authority = optional_line(authority, "SSH authority")?;
    let certificate = optional_line(certificate, "SSH host certificate")?;
    let directory = directory(root)?;
    // the certificate first: the authority permits logins
    for (name, line) in [(HOST_CERTIFICATE, certificate), (AUTHORITY, authority)] {
        let path = directory.join(name);
        let written = match line {
            Some(line) => file::replace(&path, format!("{line}\n").as_bytes(), PUBLIC),
            None => file::remove_if_present(&path),
        };
        written.map_err(|error| Error::Io(path, error))?;
    }
    Ok(())
}

/// Replaces the host certificate with that of a rejoin ticket. A certificate for another key is refused, and nothing changes.
pub fn renew(root: &Path, certificate: &[u8]) -> Result<(), Error> {
    let certificate = one_line(certificate).ok_or(Error::Ticket("SSH host certificate"))?;
    if !host_key(root)?.is_certified_in(certificate) {
        return Err(Error::Foreign);
    }
    let path = directory(root)?.join(HOST_CERTIFICATE);
    file::replace(&path, format!("{certificate}\n").as_bytes(), PUBLIC)
        .map_err(|error| Error::Io(path, error))
}

/// Checks that [`install`] and sshd accept these lines: one authority, and a certificate for this node's host key. Join services of
/// Constellation before v2.24.0 send no certificate, and before v2.21.0 no authority.
pub fn check(authority: &[u8], certificate: &[u8], key: &PublicKey) -> Result<(), Error> {
    let certificate = optional_line(certificate, "SSH host certificate")?;
    match optional_line(authority, "SSH authority")? {
        Some(authority) => drop(PublicKey::from_line(authority).map_err(Error::Authority)?),
        None if certificate.is_some() => return Err(Error::Ticket("SSH authority")),
        None => {}
    }
    if certificate.is_none_or(|line| key.is_certified_in(line)) {
        Ok(())
    } else {
        Err(Error::Foreign)
    }
}

/// Returns the authority for users, which has been installed on the state disk mounted at `root`.
pub fn authority(root: &Path) -> Result<PublicKey, Error> {
    let path = root.join(DIRECTORY).join(AUTHORITY);
    let text = fs::read(&path).map_err(|error| Error::Io(path, error))?;
    let line = one_line(&text).ok_or(Error::Ticket("SSH authority"))?;
    PublicKey::from_line(line).map_err(Error::Authority)
}

/// Returns the only line; `None` if there are more, because each further line would be a further authority.
fn one_line(line: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(line).ok()?;
    let line = line.strip_suffix('\n').unwrap_or(line);
    (!line.is_empty() && !line.contains(char::is_control)).then_some(line)
}

/// Returns the only line of a field of a ticket that may be empty.
fn optional_line<'a>(line: &'a [u8], what: &'static str) -> Result<Option<&'a str>, Error> {
    match line {
        [] => Ok(None),
        line => one_line(line).map(Some).ok_or(Error::Ticket(what)),
    }
}

/// Returns the public part of this node's host key; creates the key if it does not exist.
pub fn host_key(root: &Path) -> Result<PublicKey, Error> {
    let directory = directory(root)?;
    let (private, public) = (directory.join(HOST_KEY), directory.join(HOST_PUBLIC_KEY));
    // a power failure may have left the files empty; sshd uses the private key
    match fs::metadata(&private) {
        Ok(metadata) if metadata.len() > 0 => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::Io(private, error));
        }
        _ => return make_host_key(&private, &public),
    }
    // the private key is read only if the public key does not exist
    match read(&public).map(|text| PublicKey::from_line(&text)) {
        Ok(Ok(key)) => Ok(key),
        _ => {
            let text = read(&private).map_err(|error| Error::Io(private.clone(), error))?;
            PublicKey::from_private_key_file(&text).map_err(|error| Error::Key(private, error))
        }
    }
}

fn make_host_key(private: &Path, public: &Path) -> Result<PublicKey, Error> {
    log::info!("this node has no SSH host key: creating one");
    let (file, key) = key::generate();
    let line = format!("{}\n", key.line());
    file::replace(public, line.as_bytes(), PUBLIC)
        .map_err(|error| Error::Io(public.into(), error))?;
    file::replace(private, file.expose(), PRIVATE)
        .map_err(|error| Error::Io(private.into(), error))?;
    Ok(key)
}

fn directory(root: &Path) -> Result<PathBuf, Error> {
    let path = root.join(DIRECTORY);
    fs::create_dir_all(&path).map_err(|error| Error::Io(path.clone(), error))?;
    Ok(path)
}

fn read(path: &Path) -> io::Result<Zeroizing<String>> {
    // opening a pipe would block
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    // allocates the full capacity first: a string that grows leaves copies of the key in freed memory
    let mut text = Zeroizing::new(String::with_capacity(MAX_FILE as usize + 1));
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

/// The names by which this node is reached: its addresses, as far as others can use them, its host
/// name, and `more`; each once, in this order.
pub fn principals(more: &[String]) -> io::Result<Vec<String>> {
    let is_link_local = |address: &std::net::IpAddr| match address {
        std::net::IpAddr::V4(v4) => v4.is_link_local(),
        std::net::IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let addresses = interfaces::addresses()?.into_iter();
    let addresses = addresses.filter(|address| !address.is_loopback() && !is_link_local(address));
    // proc(5)
    let host_name = fs::read_to_string("/proc/sys/kernel/hostname")?;
    let mut names: Vec<String> = addresses.map(|address| address.to_string()).collect();
    names.push(host_name.trim().to_owned());
    names.extend(more.iter().cloned());
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| !name.is_empty() && seen.insert(name.clone()));
    Ok(names)
}

/// Reloads a running sshd without waiting for it; sshd also reads the certificate when it starts. If the reload fails, for example
/// without systemd, sshd does not offer the new certificate until its next start; this is logged.
pub fn reload_sshd(stop: &Stop) {
    for unit in UNITS {
        let mut systemctl = Command::new("systemctl");
        systemctl.args(["try-reload-or-restart", unit, "--quiet", "--no-block"]);
        let result = child_process::run(&mut systemctl, Stdio::null(), ANSWER, stop, &mut |line| {
            log::debug!("{unit}: {line}")
        });
        match result {
            Ok(()) => log::info!("systemd reloads {unit} if it is running"),
            // a distribution has only one of the units
            Err(error) if matches!(error.cause, ChildFailure::Failed(_)) => log::debug!("{error}"),
            Err(error) => {
                log::warn!("cannot reload sshd, which keeps its old host certificate: {error}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use base::crypto::Secret;

    fn authority() -> Authority {
        Authority::from_seed(&Secret::new(vec![7; 32])).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_node_without_a_host_key_gets_one_and_keeps_it() {
        let disk = tempfile::tempdir().unwrap();
        let names = ["node".to_owned()];
        install_host_certificate(disk.path(), &authority(), authority().public(), &names).unwrap();
        let ssh = disk.path().join("ssh");
        let modes = [HOST_KEY, HOST_PUBLIC_KEY, HOST_CERTIFICATE, AUTHORITY]
            .map(|name| mode(&ssh.join(name)));
        assert_eq!(modes, [0o600, 0o644, 0o644, 0o644]);
        assert_eq!(fs::read_dir(&ssh).unwrap().count(), 4);
        let key = host_key(disk.path()).unwrap();
        install_host_certificate(disk.path(), &authority(), authority().public(), &names).unwrap();
        assert_eq!(host_key(disk.path()).unwrap(), key);
    }

    #[test]
    fn the_private_key_file_serves_where_the_public_one_is_missing_or_broken() {
        let disk = tempfile::tempdir().unwrap();
        let key = host_key(disk.path()).unwrap();
        let public = disk.path().join("ssh").join(HOST_PUBLIC_KEY);
        fs::write(&public, "").unwrap();
        assert_eq!(host_key(disk.path()).unwrap(), key);
        fs::remove_file(&public).unwrap();
        assert_eq!(host_key(disk.path()).unwrap(), key);
    }

    #[test]
    fn an_empty_host_key_is_made_anew_and_a_broken_one_is_an_error() {
        let disk = tempfile::tempdir().unwrap();
        let old = host_key(disk.path()).unwrap();
        let ssh = disk.path().join("ssh");
        fs::write(ssh.join(HOST_KEY), "").unwrap();
        let new = host_key(disk.path()).unwrap();
        assert_ne!(new, old);
        assert_eq!(host_key(disk.path()).unwrap(), new);
        fs::write(ssh.join(HOST_KEY), "no key").unwrap();
        fs::remove_file(ssh.join(HOST_PUBLIC_KEY)).unwrap();
        let error = host_key(disk.path()).unwrap_err().to_string();
        assert!(
            error.contains(HOST_KEY) && error.contains("not an SSH key"),
            "{error}"
        );
    }

    #[test]
    fn a_ticket_brings_one_authority_and_not_more() {
        let disk = tempfile::tempdir().unwrap();
        for bad in [&b"\n"[..], b"a\nb\n", b"a\r\nb", b"\xff"] {
            assert!(
                matches!(install(disk.path(), bad, b"ok"), Err(Error::Ticket(_))),
                "{bad:?}"
            );
            assert!(
                matches!(install(disk.path(), b"ok", bad), Err(Error::Ticket(_))),
                "{bad:?}"
            );
        }
        assert!(!disk.path().join("ssh").exists());
        install(disk.path(), b"one\n", b"two").unwrap();
        assert_eq!(
            fs::read_to_string(disk.path().join("ssh").join(AUTHORITY)).unwrap(),
            "one\n"
        );
        assert_eq!(
            fs::read_to_string(disk.path().join("ssh").join(HOST_CERTIFICATE)).unwrap(),
            "two\n"
        );
    }

    #[test]
    fn a_tickets_certificate_must_be_of_this_nodes_key() {
        let (own, other) = (key::generate().1, key::generate().1);
        let (authority, names) = (authority(), ["node".to_owned()]);
        let line = format!("{}\n", authority.public_line());
        let certificate = |key: &PublicKey| {
            authority
                .host_certificate(key, &names, SystemTime::now())
                .unwrap()
        };
        check(
            line.as_bytes(),
            format!("{}\n", certificate(&own)).as_bytes(),
            &own,
        )
        .unwrap();
        let refused = |authority: &str, certificate: &str| {
            check(authority.as_bytes(), certificate.as_bytes(), &own)
                .unwrap_err()
                .to_string()
        };
        assert!(
            refused(&line, &certificate(&other)).contains("does not certify this node's host key")
        );
        assert!(refused(&line, &own.line()).contains("does not certify this node's host key"));
        assert!(refused(&line.repeat(2), &certificate(&own)).contains("not a single line"));
        assert!(refused("ssh-ed25519 nonsense", &certificate(&own)).contains("SSH authority"));
        for mutant in support::mutation::mutations(certificate(&own).as_bytes(), 10_000) {
            let _ = check(line.as_bytes(), &mutant, &own);
        }
    }

    #[test]
    fn what_a_ticket_of_an_earlier_release_lacks_is_not_on_the_disk_either() {
        let (disk, key) = (tempfile::tempdir().unwrap(), key::generate().1);
        let line = format!("{}\n", authority().public_line());
        for (before, certificate) in [(&line[..], &b""[..]), ("", b"")] {
            check(before.as_bytes(), certificate, &key).unwrap();
            // of an attempt to join another cluster
            install(disk.path(), b"one", b"two").unwrap();
            install(disk.path(), before.as_bytes(), certificate).unwrap();
            let there = |name: &str| disk.path().join("ssh").join(name).exists();
            assert_eq!(
                (there(AUTHORITY), there(HOST_CERTIFICATE)),
                (!before.is_empty(), false)
            );
        }
        // a certificate without an authority is of no release
        assert!(matches!(
            check(b"", b"ssh-ed25519", &key),
            Err(Error::Ticket("SSH authority"))
        ));
    }

    #[test]
    fn a_renewed_certificate_takes_the_place_of_the_one_before_and_no_other_key_s_does() {
        let disk = tempfile::tempdir().unwrap();
        let (authority, names) = (authority(), ["node".to_owned()]);
        install_host_certificate(disk.path(), &authority, authority.public(), &names).unwrap();
        let kept = || fs::read_to_string(disk.path().join("ssh").join(HOST_CERTIFICATE)).unwrap();
        let first = kept();
        let later = SystemTime::now() + crate::HOST_VALIDITY;
        let of = |key: &PublicKey| authority.host_certificate(key, &names, later).unwrap() + "\n";
        let foreign = renew(disk.path(), of(&key::generate().1).as_bytes());
        assert!(matches!(foreign, Err(Error::Foreign)) && kept() == first);
        for bad in [&b""[..], b"a\nb", b"nonsense"] {
            assert!(renew(disk.path(), bad).is_err() && kept() == first);
        }
        let renewed = of(&host_key(disk.path()).unwrap());
        renew(disk.path(), renewed.as_bytes()).unwrap();
        assert!(kept() == renewed && renewed != first);
    }

    #[test]
    fn principals_are_what_others_can_use_each_once() {
        let names = principals(&["10.9.8.7".into(), "10.9.8.7".into(), String::new()]).unwrap();
        assert_eq!(names.iter().filter(|name| *name == "10.9.8.7").count(), 1);
        assert!(
            !names
                .iter()
                .any(|name| name.is_empty() || name == "127.0.0.1" || name.starts_with("fe80"))
        );
        let host_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(names.contains(&host_name.trim().to_owned()));
    }
}
