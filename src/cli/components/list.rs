//! The components that a node installs before kubeadm runs: the operator's list, or Firstlight's
//! own list for the version.
//!
//! A list is JSON, in the form that is published in the cluster:
//! `[{"url": .., "hash": "sha256:..", "install_path": .., "extract": ..}]`.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::files;
use proto::components::Component;

/// A component in the file of a list.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    url: String,
    #[serde(default)]
    hash: String,
    install_path: String,
    #[serde(default)]
    extract: bool,
}

impl From<Component> for Entry {
    fn from(component: Component) -> Entry {
        Entry {
            url: component.url,
            hash: component.hash,
            install_path: component.install_path,
            extract: component.extract,
        }
    }
}

/// Returns the list in a file. An error is a sentence.
pub fn read(path: &Path) -> Result<Vec<Component>, String> {
    let content = files::read(path).map_err(|error| error.to_string())?;
    let entries: Vec<Entry> = serde_json::from_slice(&content)
        .map_err(|error| format!("{}: not a list of components: {error}", path.display()))?;
    Ok(entries
        .into_iter()
        .map(|it| component(&it.url, &it.hash, &it.install_path, it.extract))
        .collect())
}

/// Returns the list in `file`, or without a file the known list for the version. An error is a
/// sentence.
pub fn of(version: &str, file: Option<&Path>) -> Result<Vec<Component>, String> {
    let Some(path) = file else {
        return known(version).ok_or_else(|| {
            let known: Vec<_> = RELEASES.iter().map(|release| release.version).collect();
            format!(
                "the components of Kubernetes {version} are not built in, only those of {}: make a list by `firstlight components \
                 {version} > components.json`, and give it with --components",
                known.join(" and ")
            )
        });
    };
    read(path)
}

/// A release with the SHA-256 hashes that Constellation pins (amd64).
struct Release {
    version: &'static str,
    kubelet: &'static str,
    kubeadm: &'static str,
    kubectl: &'static str,
    /// Digest of the image registry.k8s.io/kube-apiserver; the fields below are digests too.
    api_server: &'static str,
    controller_manager: &'static str,
    scheduler: &'static str,
}

const RELEASES: [Release; 2] = [
    Release {
        version: "v1.31.13",
        kubelet: "b7733cb0e36031ab8f69cf3f73cc364730141b107d24ecb75bee5b3122dc6b6e",
        kubeadm: "e0c91c606e1402e943666f6fda8452140851a1b2bb4f69918dd7176e8d86845c",
        kubectl: "ce427a4df97b044bf6beaf38be6b3aaafb1b5c782c406958b3c71ebb25a48fe3",
        api_server: "9abeb8a2d3e53e356d1f2e5d5dc2081cf28f23242651b0552c9e38f4a7ae960e",
        controller_manager: "facc91288697a288a691520949fe4eec40059ef065c89da8e10481d14e131b09",
        scheduler: "c5ce150dcce2419fdef9f9875fef43014355ccebf937846ed3a2971953f9b241",
    },
    Release {
        version: "v1.32.9",
        kubelet: "fd7711d1f0c1e263e9332004858fc4a6c39462e3e2ee485706eea5297966ed9c",
        kubeadm: "183b3b12e39b3ed2dc2db25cbc17769610cdd5f02e9d1325ba747d54978d8f5f",
        kubectl: "509ae171bac7ad3b98cc49f5594d6bc84900cf6860f155968d1059fde3be5286",
        api_server: "6df11cc2ad9679b1117be34d3a0230add88bc0a08fd7a3ebc26b680575e8de97",
        controller_manager: "243c4b8e3bce271fcb1b78008ab996ab6976b1a20096deac08338fcd17979922",
        scheduler: "50c49520dbd0e8b4076b6a5c77d8014df09ea3d59a73e8bafd2678d51ebb92d5",
    },
];
/// The server of Kubernetes' programs (kubernetes.io, "Download Kubernetes").
pub const DOWNLOADS: &str = "https://dl.k8s.io";
const CNI_PLUGINS: (&str, &str) = (
    "https://github.com/containernetworking/plugins/releases/download/v1.8.0/cni-plugins-linux-amd64-v1.8.0.tgz",
    "ab3bda535f9d90766cccc90d3dddb5482003dd744d7f22bcf98186bf8eea8be6",
);
const CRICTL: (&str, &str) = (
    "https://github.com/kubernetes-sigs/cri-tools/releases/download/v1.33.0/crictl-v1.33.0-linux-amd64.tar.gz",
    "8307399e714626e69d1213a4cd18c8dec3d0201ecdac009b1802115df8973f0f",
);
const ETCD: &str =
    "3.5.21-0@sha256:d58c035df557080a27387d687092e3fc2b64c6d0e3162dc51453a115f847d121";

fn known(version: &str) -> Option<Vec<Component>> {
    let release = RELEASES.iter().find(|release| release.version == version)?;
    let program = |name: &str, sha256: &str| program(DOWNLOADS, version, name, sha256);
    let image = |name: &str, digest: &str| patch(name, &format!("{version}@sha256:{digest}"));
    let mut list = of_every_version();
    list.extend([
        program("kubelet", release.kubelet),
        program("kubeadm", release.kubeadm),
        program("kubectl", release.kubectl),
        image("kube-apiserver", release.api_server),
        image("kube-controller-manager", release.controller_manager),
        image("kube-scheduler", release.scheduler),
        patch("etcd", ETCD),
    ]);
    Some(list)
}

/// Returns the components that do not depend on the version of Kubernetes.
pub fn of_every_version() -> Vec<Component> {
    vec![
        component(CNI_PLUGINS.0, &hash(CNI_PLUGINS.1), "/opt/cni/bin", true),
        component(CRICTL.0, &hash(CRICTL.1), "/run/state/bin", true),
    ]
}

/// Returns a program of Kubernetes.
pub fn program(downloads: &str, version: &str, name: &str, sha256: &str) -> Component {
    let url = format!("{downloads}/{version}/bin/linux/amd64/{name}");
    let place = format!("/run/state/bin/{name}");
    component(&url, &hash(sha256), &place, false)
}

fn hash(sha256: &str) -> String {
    format!("sha256:{sha256}")
}

/// Returns a patch (RFC 6902) of kubeadm's manifest, which pins the image by its digest.
pub fn patch(name: &str, tag: &str) -> Component {
    let image = format!("registry.k8s.io/{name}:{tag}");
    let patch =
        json!([{"op": "replace", "path": "/spec/containers/0/image", "value": image}]).to_string();
    let url = format!("data:application/json;base64,{}", STANDARD.encode(patch));
    component(
        &url,
        "",
        &format!("/opt/kubernetes/patches/{name}+json.json"),
        false,
    )
}

fn component(url: &str, hash: &str, install_path: &str, extract: bool) -> Component {
    Component {
        url: url.into(),
        hash: hash.into(),
        install_path: install_path.into(),
        extract,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubernetes::components::{self, Policy};

    #[test]
    fn a_node_takes_what_is_known_for_a_version() {
        for release in RELEASES {
            let list = of(release.version, None).unwrap();
            assert_eq!(list.len(), 9);
            for wire in &list {
                components::Component::parse(wire, &Policy::default()).unwrap();
            }
        }
        let error = of("v1.33.1", None).err().unwrap();
        assert!(
            error.contains("v1.31.13 and v1.32.9")
                && error.contains("`firstlight components v1.33.1 > components.json`"),
            "{error}"
        );
    }

    #[test]
    fn a_list_of_the_operators_is_taken_and_a_wrong_one_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("components.json");
        std::fs::write(
            &path,
            r#"[{"url":"file:///a","hash":"sha256:00","install_path":"/run/state/bin/a"}]"#,
        )
        .unwrap();
        let list = of("v1.34.4", Some(&path)).unwrap();
        assert!(
            list == [component(
                "file:///a",
                "sha256:00",
                "/run/state/bin/a",
                false
            )]
        );
        for content in [
            "",
            "{}",
            r#"[{"url":"x"}]"#,
            r#"[{"url":"x","install_path":"/a","hsh":"y"}]"#,
        ] {
            std::fs::write(&path, content).unwrap();
            let error = of("v1.34.4", Some(&path)).err().unwrap();
            assert!(
                error.contains("components.json: not a list of components"),
                "{error}"
            );
        }
    }
}
