//! Servers like those from which Kubernetes publishes its programs and images.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// The version of Kubernetes that they have.
pub const VERSION: &str = "v1.34.4";

/// The servers, each below a path of one server. The files that they publish are in a folder.
pub struct Published {
    server: Child,
    pub url: String,
    pub folder: TempDir,
}

impl Drop for Published {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Published {
    pub fn start() -> Published {
        let folder = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (certificate, key) = (folder.path().join("ca.pem"), folder.path().join("key.pem"));
        fs::write(&certificate, own.cert.pem()).unwrap();
        fs::write(&key, own.signing_key.serialize_pem()).unwrap();
        let mut server = support::foreign::python()
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/components/server.py"))
            .args([folder.path(), &certificate, &key])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut port = String::new();
        let mut output = BufReader::new(server.stdout.take().unwrap());
        output.read_line(&mut port).unwrap();
        let published = Published {
            server,
            url: format!("https://localhost:{}", port.trim()),
            folder,
        };
        for name in ["kubelet", "kubeadm", "kubectl"] {
            let hash = sha256(format!("the program {name}").as_bytes());
            published.write(
                &format!("dl/{VERSION}/bin/linux/amd64/{name}.sha256"),
                &hash,
            );
        }
        for name in [
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
        ] {
            let index = format!(r#"{{"schemaVersion":2,"manifests":[],"name":"{name}"}}"#);
            published.write(&format!("v2/{name}/manifests/{VERSION}"), &index);
        }
        published.write("v2/etcd/manifests/3.6.4-0", r#"{"manifests":[]}"#);
        published
    }

    /// Publishes a file.
    pub fn write(&self, path: &str, content: &str) {
        let path = self.folder.path().join("elsewhere").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Runs `firstlight components` of this program with the addresses of the servers.
    pub fn list(&self, firstlight: &Path, more: &[&str]) -> Output {
        let mut command = Command::new(firstlight);
        command.args(["components", "--registry", &self.url, "--timeout", "30s"]);
        command
            .arg("--downloads")
            .arg(format!("{}/dl", self.url))
            .arg("--ca")
            .arg(self.folder.path().join("ca.pem"));
        let command = command.args(more).current_dir(self.folder.path());
        command.output().unwrap()
    }
}

/// Returns the SHA-256 as hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    hash.as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
