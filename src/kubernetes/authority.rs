//! New certificates for the authorities of a cluster, with the names and keys that they have.
//!
//! A certificate is found by the name and the key of its authority (RFC 5280 §6.1). So a new
//! certificate of an authority vouches for everything that the authority has signed before, and the
//! old one for everything that it signs from now on: each program may trust either, as long as both
//! are valid.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::kubelet_certificate::{ClusterCa, Error};
use super::yaml;
use base::der;
use base::x509;

/// The validity of a new certificate: ten years, as in kubeadm.
const VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Returns a new certificate of an authority, with another serial number and ten years from now;
/// the rest stays. Certificate and key are PEM in kubeadm's format.
pub fn renew(certificate: &[u8], key: &[u8], now: SystemTime) -> Result<String, Error> {
    let authority = ClusterCa::new(certificate, key)?;
    let refuse = || Error::Authority("its certificate is not an X.509 certificate".into());
    let old = CertificateDer::from_pem_slice(certificate).map_err(|_| refuse())?;
    let old = x509::Certificate::parse(&old).map_err(|_| refuse())?;
    let all = der::element(der::SEQUENCE, &[old.extensions()]);
    let extensions = der::element(der::context(3), &[&all]);
    authority.certificate(
        authority.name(),
        old.key(),
        &extensions,
        now,
        now + VALIDITY,
    )
}

/// Returns whether `new` is a later certificate of the same authority, by name and key. Both are
/// PEM with one certificate, as kubeadm writes them: a bundle of two authorities is of somebody who
/// replaces the key.
pub fn is_renewed(old: &[u8], new: &[u8]) -> bool {
    let (Some(old), Some(new)) = (only(old), only(new)) else {
        return false;
    };
    let read = |der| x509::Certificate::parse(der).ok();
    let (Some(old), Some(new)) = (read(&old), read(&new)) else {
        return false;
    };
    let end = |one: &x509::Certificate<'_>| one.validity().map(|(_, end)| end).ok();
    old.subject() == new.subject() && old.key() == new.key() && end(&old) < end(&new)
}

/// Returns the end of a certificate (PEM).
pub fn end(certificate: &[u8]) -> Option<SystemTime> {
    let certificate = only(certificate)?;
    let (_, end) = x509::Certificate::parse(&certificate)
        .ok()?
        .validity()
        .ok()?;
    Some(UNIX_EPOCH + Duration::from_secs(end))
}

/// Returns the only certificate of a PEM text.
fn only(pem: &[u8]) -> Option<CertificateDer<'static>> {
    let mut all = CertificateDer::pem_slice_iter(pem);
    let one = all.next()?.ok()?;
    all.next().is_none().then_some(one)
}

/// Returns a kubeconfig with this certificate (PEM) of its first cluster's authority, if it is a
/// later one of the same authority. All else stays as it is.
pub fn update_kubeconfig(kubeconfig: &str, certificate: &[u8]) -> Option<String> {
    let file = yaml::document(kubeconfig).ok()?;
    let old = file.pointer("/clusters/0/cluster/certificate-authority-data")?;
    let old = old.as_str()?;
    let is_renewed = is_renewed(&yaml::base64(old).ok()?, certificate);
    is_renewed.then(|| kubeconfig.replace(old, &STANDARD.encode(certificate)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use support::mutation::mutations;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn path(&self, name: &str) -> String {
            self.0.path().join(name).to_str().unwrap().to_owned()
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.path(name)).unwrap()
        }

        fn openssl(&self, arguments: &str) -> String {
            let mut command = Command::new("openssl");
            command
                .args(arguments.split_whitespace())
                .current_dir(self.0.path());
            let output = command.output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "openssl {arguments}: {errors}");
            String::from_utf8(output.stdout).unwrap()
        }

        /// Makes an authority that ends in ten days, with kubeadm's extensions, and a certificate of it.
        fn new() -> Folder {
            let it = Folder(tempfile::tempdir().unwrap());
            let usage = "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign";
            let name = "subjectAltName=DNS:kubernetes";
            it.openssl("genrsa -traditional -out ca.key 2048");
            it.openssl(&format!("req -x509 -key ca.key -subj /CN=kubernetes -addext {usage} -addext {name} -days 10 -out old"));
            it.openssl("req -newkey rsa:2048 -nodes -keyout leaf.key -subj /CN=leaf -out leaf.csr");
            it.openssl(
                "x509 -req -in leaf.csr -CA old -CAkey ca.key -set_serial 1 -out leaf-of-old",
            );
            it
        }
    }

    #[test]
    fn old_and_new_certificate_vouch_for_the_same() {
        let it = Folder::new();
        let now = SystemTime::now();
        let new = renew(&it.read("old"), &it.read("ca.key"), now).unwrap();
        fs::write(it.path("new"), &new).unwrap();
        it.openssl("x509 -req -in leaf.csr -CA new -CAkey ca.key -set_serial 2 -out leaf-of-new");
        for authority in ["old", "new"] {
            for leaf in ["leaf-of-old", "leaf-of-new", authority] {
                it.openssl(&format!("verify -check_ss_sig -CAfile {authority} {leaf}"));
            }
        }
        let fields = |name: &str| {
            let all = it.openssl(&format!(
                "x509 -in {name} -noout -subject -issuer -pubkey -ext basicConstraints,keyUsage,subjectKeyIdentifier,subjectAltName"
            ));
            assert!(
                all.contains("DNS:kubernetes") && all.contains("CA:TRUE"),
                "{all}"
            );
            all
        };
        assert_eq!(fields("old"), fields("new"));
        it.openssl(&format!(
            "x509 -in new -noout -checkend {}",
            3649 * 24 * 60 * 60
        ));
        assert_ne!(
            it.openssl("x509 -in old -noout -serial"),
            it.openssl("x509 -in new -noout -serial")
        );
        // and again, as the next ten years end
        renew(new.as_bytes(), &it.read("ca.key"), now).unwrap();
        assert!(renew(&it.read("old"), &it.read("leaf.key"), now).is_err());
    }

    #[test]
    fn only_a_later_certificate_of_the_same_authority_is_taken() {
        let it = Folder::new();
        let old = it.read("old");
        let new = renew(&old, &it.read("ca.key"), SystemTime::now())
            .unwrap()
            .into_bytes();
        assert!(is_renewed(&old, &new));
        assert!(!is_renewed(&new, &old));
        assert!(!is_renewed(&new, &new));
        let other = Folder::new();
        let foreign = renew(&other.read("old"), &other.read("ca.key"), SystemTime::now()).unwrap();
        assert!(!is_renewed(&old, foreign.as_bytes()), "another key");
        assert!(!is_renewed(&old, &[&new[..], &old].concat()));
        assert!(!is_renewed(&[&old[..], &new].concat(), &new));
        assert!(!is_renewed(&old, b""));
        let days = |certificate: &[u8]| end(certificate).unwrap().duration_since(SystemTime::now());
        assert_eq!(days(&old).unwrap().as_secs() / (24 * 60 * 60), 9);
        assert_eq!(days(&new).unwrap().as_secs() / (24 * 60 * 60), 3649);
        for mutated in mutations(&new, 2000) {
            // without a panic
            is_renewed(&old, &mutated);
        }
        let kubeconfig = |certificate: &[u8]| {
            format!(
                "kind: Config\nclusters:\n- cluster:\n    certificate-authority-data: {}\n    server: https://a:6443\n  name: a\nusers: []\n",
                STANDARD.encode(certificate)
            )
        };
        assert_eq!(
            update_kubeconfig(&kubeconfig(&old), &new),
            Some(kubeconfig(&new))
        );
        assert_eq!(update_kubeconfig(&kubeconfig(&new), &new), None);
        assert_eq!(update_kubeconfig(&kubeconfig(&new), &old), None);
        assert_eq!(update_kubeconfig("kind: Config\n", &new), None);
        assert_eq!(update_kubeconfig("{", &new), None);
    }
}
