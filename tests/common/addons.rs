//! An operator who installs add-ons with `firstlight apply` and a real Helm.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ring::digest::{SHA256, digest};
use tempfile::TempDir;

use crate::kube_apiserver::Cluster;

const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;

/// A folder with Helm, a policy, and the kubeconfig of [`Cluster::shared`].
pub struct Operator(TempDir);

impl Operator {
    pub fn new() -> Operator {
        let operator = Operator(tempfile::tempdir().unwrap());
        fs::create_dir(operator.at("bin")).unwrap();
        symlink(tool("helm.sh"), operator.at("bin/helm")).unwrap();
        operator.write("policy.json", POLICY);
        operator.write("admin.conf", &Cluster::shared().kubeconfig());
        operator
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: &str) {
        fs::write(self.at(name), content).unwrap();
    }

    /// Installs the add-ons of addons.yaml.
    pub fn apply(&self, more: &[&str]) -> Output {
        Command::new(support::program::built("firstlight"))
            .args([
                "apply",
                "--policy",
                "policy.json",
                "--skip-phases",
                "policy,services",
            ])
            .args(["--kubeconfig", "admin.conf", "--addons", "addons.yaml"])
            .args(more)
            .current_dir(self.0.path())
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", self.at("bin").display()),
            )
            .env("HOME", self.0.path())
            .output()
            .unwrap()
    }
}

/// Returns a list of the folder docs/addons/ with this chart, of which it names no digest.
pub fn list(name: &str, chart: &Path) -> String {
    let folder = Path::new(support::ROOT).join("docs/addons");
    let list = fs::read_to_string(folder.join(name)).unwrap();
    let mut lines: Vec<String> = Vec::new();
    for line in list.lines() {
        lines.push(match line.split_once(": ") {
            Some((field, _)) if field.trim() == "chart" => {
                format!(
                    "{field}: {}\n  sha256: {}",
                    chart.display(),
                    folder_sha256(chart)
                )
            }
            Some((field, file)) if field.trim() == "manifests" => {
                format!("{field}: {}", folder.join(file).display())
            }
            _ => line.into(),
        });
    }
    lines.join("\n")
}

pub fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

pub fn sha256(bytes: &[u8]) -> String {
    base::text::hex(digest(&SHA256, bytes).as_ref())
}

/// Returns the digest of a folder as `sha256sum` of coreutils makes it.
pub fn folder_sha256(folder: &Path) -> String {
    let lines = Command::new("sh")
        .args([
            "-c",
            "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1",
        ])
        .current_dir(folder)
        .output()
        .unwrap();
    text(&lines.stdout).trim().into()
}

/// Returns the path that a script prints after it has fetched or built what is missing.
pub fn tool(script: &str) -> PathBuf {
    let tool = Path::new(support::ROOT).join("tools").join(script);
    let output = Command::new(tool).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).trim().into()
}

pub fn failed(output: &Output, why: &str) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(why), "expected {why} in:\n{said}");
}

pub fn succeeded(output: &Output) -> (&str, &str) {
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}
