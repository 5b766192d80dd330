//! The client certificate of a control plane's kubelet. A kubelet renews it by itself, by a request in the API. Once it has ended, the
//! kubelet cannot ask any more. A control plane has the cluster's authority, so it makes another one; a worker has to join again.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::SystemTime;

use kubernetes::authority;
use kubernetes::kubelet_certificate::{issue_client, node_of, place_client};
use kubernetes::parameters::NodeName;

use crate::steps::error::Error;

/// Replaces the certificate behind this link if it has expired at `now`. Returns whether it did. `kubernetes` is the folder of the cluster's
/// files.
pub fn renew_ended(link: &Path, kubernetes: &Path, now: SystemTime) -> Result<bool, Error> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| Error::Io(path, error)
    };
    let present = match fs::read(link) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        present => present.map_err(io(link))?,
    };
    let has_ended = authority::end(certificate_in(&present)).is_some_and(|end| end <= now);
    let node = node_of(&present).and_then(|node| NodeName::from_machine(&node).ok());
    let (true, Some(node)) = (has_ended, node) else {
        return Ok(false);
    };
    let read = |name: &str| {
        let path = kubernetes.join(name);
        fs::read(&path)
            .map(zeroize::Zeroizing::new)
            .map_err(io(&path))
    };
    let made = issue_client(&read("pki/ca.crt")?, &read("pki/ca.key")?, &node, now)
        .map_err(Error::Certificate)?;
    place_client(link, &made).map_err(Error::Certificate)?;
    Ok(true)
}

/// Returns the first certificate of a PEM text: a kubelet's file also has the key.
fn certificate_in(pem: &[u8]) -> &[u8] {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let end = pem.windows(END.len()).position(|it| it == END);
    &pem[..end.map_or(0, |at| at + END.len())]
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::time::Duration;

    use tempfile::TempDir;

    use super::*;

    fn openssl(folder: &Path, arguments: &str) -> String {
        let output = Command::new("openssl")
            .args(arguments.split(' '))
            .current_dir(folder)
            .output()
            .expect("openssl: is it installed?");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    }

    /// An authority of kubeadm, and a kubelet's certificate by it, with the key in one file.
    fn node() -> TempDir {
        let folder = TempDir::new().unwrap();
        let at = folder.path();
        fs::create_dir(at.join("pki")).unwrap();
        openssl(at, "genrsa -traditional -out pki/ca.key 2048");
        openssl(
            at,
            "req -x509 -key pki/ca.key -subj /CN=kubernetes -days 3650 -out pki/ca.crt",
        );
        let read = |name: &str| fs::read(at.join(name)).unwrap();
        let node = NodeName::from_machine("cp-0").unwrap();
        let made = issue_client(
            &read("pki/ca.crt"),
            &read("pki/ca.key"),
            &node,
            SystemTime::now(),
        );
        fs::write(at.join("kubelet-client-2025.pem"), made.unwrap().as_bytes()).unwrap();
        symlink("kubelet-client-2025.pem", at.join("current.pem")).unwrap();
        folder
    }

    #[test]
    fn an_ended_certificate_is_replaced_by_one_of_the_same_node() {
        let node = node();
        let (at, link) = (node.path(), node.path().join("current.pem"));
        let now = SystemTime::now();
        assert!(!renew_ended(&link, at, now).unwrap());
        let later = now + Duration::from_secs(366 * 24 * 3600);
        assert!(renew_ended(&link, at, later).unwrap());
        assert!(!renew_ended(&link, at, later).unwrap());
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let subject = openssl(at, "x509 -noout -subject -in current.pem");
        assert_eq!(
            subject.trim(),
            "subject=O = system:nodes, CN = system:node:cp-0"
        );
        let then = later
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let verify =
            format!("verify -purpose sslclient -attime {then} -CAfile pki/ca.crt current.pem");
        openssl(at, &verify);
        openssl(at, "pkey -in current.pem -noout");
    }

    #[test]
    fn a_kubelet_without_a_certificate_and_foreign_files_stay_as_they_are() {
        let node = node();
        let later = SystemTime::now() + Duration::from_secs(366 * 24 * 3600);
        assert!(!renew_ended(&node.path().join("none.pem"), node.path(), later).unwrap());
        let other = node.path().join("other.pem");
        for content in [
            &b""[..],
            b"no certificate",
            &fs::read(node.path().join("pki/ca.crt")).unwrap(),
        ] {
            fs::write(&other, content).unwrap();
            let much_later = later + Duration::from_secs(20 * 365 * 24 * 3600);
            assert!(!renew_ended(&other, node.path(), much_later).unwrap());
            assert_eq!(fs::read(&other).unwrap(), content);
        }
    }
}
