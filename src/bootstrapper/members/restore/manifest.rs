//! This member of etcd, as the manifests of the static pods describe it. kubeadm writes them.

use std::net::SocketAddr;
use std::path::PathBuf;

use base::text::printable;
use kubernetes::yaml;
use serde_json::Value;

use super::failed_check::{FailedCheck, failed_check};

/// The maximum number of characters of a name in a text.
const SHOWN: usize = 200;

/// The member of etcd on this node, as its static pod manifest describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdManifest {
    /// Its name, which is that of the node.
    pub name: String,
    /// The URL at which other members reach it.
    pub url: String,
    /// The folder of its data, on this node and in its pod.
    pub data: PathBuf,
    /// The URL of its metrics, without TLS.
    pub metrics: String,
    /// The URLs of the members when it joined.
    pub initial: Vec<String>,
    /// The tag of its image, such as `3.6.5-0`.
    pub tag: String,
}

impl EtcdManifest {
    /// Parses the manifest of etcd. The error is a clause.
    pub fn parse(manifest: &str) -> Result<EtcdManifest, FailedCheck> {
        let (pod, command) = command(manifest)?;
        let needed = |name: &str| flag(&command, name);
        let data = needed("data-dir")?;
        // the same folder on the node
        let volumes = pod.pointer("/spec/volumes").and_then(Value::as_array);
        let is_data =
            |volume: &Value| volume.pointer("/hostPath/path") == Some(&data.clone().into());
        if !data.starts_with('/') || !volumes.is_some_and(|all| all.iter().any(is_data)) {
            return Err(failed_check!("{data} is not a folder of the node"));
        }
        let metrics = needed("listen-metrics-urls")?;
        let metrics = metrics.split(',').find(|url| url.starts_with("http://"));
        let url = needed("initial-advertise-peer-urls")?;
        address(&url)?;
        let initial = needed("initial-cluster")?;
        let image = pod.pointer("/spec/containers/0/image");
        let image = image.and_then(Value::as_str).unwrap_or_default();
        Ok(EtcdManifest {
            name: needed("name")?,
            url,
            data: data.into(),
            metrics: metrics
                .ok_or("--listen-metrics-urls has no URL of http")?
                .to_owned(),
            initial: initial
                .split(',')
                .filter_map(|one| Some(one.split_once('=')?.1.to_owned()))
                .collect(),
            tag: image
                .split('@')
                .next()
                .unwrap_or_default()
                .rsplit_once(':')
                .unwrap_or_default()
                .1
                .to_owned(),
        })
    }
}

/// Returns the address of the API server in its manifest.
pub fn api_server(manifest: &str) -> Result<String, FailedCheck> {
    flag(&command(manifest)?.1, "advertise-address")
}

/// Returns the address in a URL of a member, which kubeadm writes with an IP address.
pub fn address(url: &str) -> Result<SocketAddr, FailedCheck> {
    let rest = url.strip_prefix("https://");
    let rest = rest.or_else(|| url.strip_prefix("http://"));
    rest.and_then(|rest| rest.trim_end_matches('/').parse().ok())
        .ok_or_else(|| failed_check!("{url:?} is no URL with an IP address and a port"))
}

/// Returns a name for people.
pub fn shown(text: &str) -> String {
    if text.is_empty() {
        "(without a name)".into()
    } else {
        printable(text, SHOWN)
    }
}

/// Returns the pod, and the command of its container.
fn command(manifest: &str) -> Result<(Value, Vec<String>), FailedCheck> {
    let pod = yaml::document(manifest).map_err(|error| error.to_string())?;
    let words = pod.pointer("/spec/containers/0/command");
    let words = words.and_then(Value::as_array).into_iter().flatten();
    let words = words.map(|word| word.as_str().map(str::to_owned));
    let words: Option<Vec<_>> = words.collect();
    let words = words.filter(|words| !words.is_empty());
    Ok((pod, words.ok_or("it has no command of a container")?))
}

fn flag(command: &[String], name: &str) -> Result<String, FailedCheck> {
    let mut values = command.iter().filter_map(|word| {
        word.strip_prefix("--")?
            .strip_prefix(name)?
            .strip_prefix('=')
    });
    match (values.next(), values.next()) {
        (Some(value), None) if !value.is_empty() => Ok(value.to_owned()),
        _ => Err(failed_check!(
            "expected exactly one --{name}, as kubeadm writes it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As kubeadm v1.34 writes it.
    const MANIFEST: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: etcd\nspec:\n  containers:\n  - command:\n    - etcd\n    \
        - --advertise-client-urls=https://10.0.0.1:2379\n    - --data-dir=/var/lib/etcd\n    \
        - --initial-advertise-peer-urls=https://10.0.0.1:2380\n    \
        - --initial-cluster=b=https://10.0.0.2:2380,a=https://10.0.0.1:2380\n    - --initial-cluster-state=existing\n    \
        - --listen-metrics-urls=http://127.0.0.1:2381\n    - --name=a\n    image: registry.k8s.io/etcd:3.6.5-0\n    \
        name: etcd\n  volumes:\n  - hostPath:\n      path: /etc/kubernetes/pki/etcd\n      type: DirectoryOrCreate\n    \
        name: etcd-certs\n  - hostPath:\n      path: /var/lib/etcd\n      type: DirectoryOrCreate\n    name: etcd-data\n";

    #[test]
    fn the_member_is_that_of_the_manifest() {
        let expected = EtcdManifest {
            name: "a".into(),
            url: "https://10.0.0.1:2380".into(),
            data: "/var/lib/etcd".into(),
            metrics: "http://127.0.0.1:2381".into(),
            initial: ["https://10.0.0.2:2380", "https://10.0.0.1:2380"]
                .map(String::from)
                .to_vec(),
            tag: "3.6.5-0".into(),
        };
        assert_eq!(EtcdManifest::parse(MANIFEST), Ok(expected));
    }

    #[test]
    fn another_form_is_refused() {
        for (from, to, says) in [
            ("--name=a", "--name=a\n    - --name=b", "exactly one --name"),
            ("--name=a", "--names=a", "exactly one --name"),
            (
                "https://10.0.0.1:2380\n",
                "https://etcd:2380\n",
                "no URL with an IP address",
            ),
            (
                "path: /var/lib/etcd",
                "path: /srv/etcd",
                "/var/lib/etcd is not a folder of the node",
            ),
            ("=http://127", "=https://127", "no URL of http"),
            ("- command:", "- args:", "no command"),
            ("kind: Pod", "kind: [", "line"),
        ] {
            let manifest = MANIFEST.replace(from, to);
            assert_ne!(manifest, MANIFEST);
            let error = EtcdManifest::parse(&manifest).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn only_an_ip_address_is_an_address() {
        assert!(address("https://[fd00::1]:2380").unwrap().is_ipv6());
        assert!(address("http://127.0.0.1:2380/").is_ok());
        for wrong in [
            "https://10.0.0.1",
            "10.0.0.1:2380",
            "unix://x:1",
            "https://a:2380",
        ] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
