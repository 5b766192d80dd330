//! The components that a node installs before kubeadm runs: the operator's list.
//!
//! A list is JSON, in the form that is published in the cluster:
//! `[{"url": .., "hash": "sha256:..", "install_path": .., "extract": ..}]`.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use proto::components::Component;

/// A component in the file of a list.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ListedComponent {
    url: String,
    #[serde(default)]
    hash: String,
    install_path: String,
    #[serde(default)]
    extract: bool,
}

impl From<Component> for ListedComponent {
    fn from(component: Component) -> ListedComponent {
        ListedComponent {
            url: component.url,
            hash: component.hash,
            install_path: component.install_path,
            extract: component.extract,
        }
    }
}

/// Returns the list in a file.
pub fn read(path: &Path) -> Result<Vec<Component>, Error> {
    let content = files::read(path)?;
    let entries: Vec<ListedComponent> = serde_json::from_slice(&content).map_err(|error| {
        FileError::Content(path.into(), format!("not a list of components: {error}"))
    })?;
    Ok(entries
        .into_iter()
        .map(|it| component(&it.url, &it.hash, &it.install_path, it.extract))
        .collect())
}

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

    #[test]
    fn a_list_of_the_operators_is_taken_and_a_wrong_one_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("components.json");
        std::fs::write(
            &path,
            r#"[{"url":"file:///a","hash":"sha256:00","install_path":"/run/state/bin/a"}]"#,
        )
        .unwrap();
        let list = read(&path).unwrap();
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
            let error = read(&path).err().unwrap().to_string();
            assert!(
                error.contains("components.json: not a list of components"),
                "{error}"
            );
        }
    }
}
