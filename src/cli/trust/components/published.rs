//! The components of a version of Kubernetes, from the files that its project publishes: the
//! SHA-256 of each program, and the digest of each image.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ring::digest::{SHA256, digest};

use super::list::{DOWNLOADS, of_every_version, patch, program};
use crate::shell::{error::Error, progress::Progress};
use base::network::request::Request;
use base::text::hex;
use http::{ClientPolicy, ErrorKind, Proxy, Roots};
use kubernetes::parameters::KubernetesVersion;
use proto::components::Component;

/// The registry of Kubernetes' images.
pub const REGISTRY: &str = "https://registry.k8s.io";
/// The programs that a node needs.
const PROGRAMS: [&str; 3] = ["kubelet", "kubeadm", "kubectl"];
/// The images of a control plane that have the version as their tag.
const IMAGES: [&str; 3] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// The media types of a list of images, one for each architecture.
const INDEX: &str = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json";
/// Maximum bytes of an answer; an index has about 2 KB.
const MAX_ANSWER: u64 = 1 << 20;
/// Maximum number of redirects; both servers redirect a client once or twice.
const REDIRECTS: u32 = 5;

/// Where the components are published.
#[derive(Debug)]
pub struct Servers {
    /// The server of the programs: `https://HOST[:PORT][/PATH]`.
    pub downloads: String,
    /// The server of the images.
    pub registry: String,
    /// The tag of etcd's image, such as `3.6.4-0`. Without it, kubeadm chooses the image, and no
    /// digest pins it.
    pub etcd: Option<String>,
    /// The CAs of the servers' certificates (PEM); without a file, this machine's CAs.
    pub authorities: Option<PathBuf>,
}

impl Default for Servers {
    /// Returns the servers of Kubernetes.
    fn default() -> Servers {
        Servers {
            downloads: DOWNLOADS.into(),
            registry: REGISTRY.into(),
            etcd: None,
            authorities: None,
        }
    }
}

/// Returns the newest patch of a minor version such as `v1.36`, and the file that says so.
pub fn newest(
    minor: &str,
    servers: &Servers,
    timeout: Duration,
) -> Result<(String, String), Error> {
    let client = Client::new(servers, Instant::now() + timeout)?;
    let minor = minor.trim_start_matches('v');
    let url = format!("{}/release/stable-{minor}.txt", servers.downloads);
    let body = client.get(&url, "text/plain, application/octet-stream")?;
    Ok((String::from_utf8_lossy(&body).trim().to_owned(), url))
}

/// Returns the list for a version.
pub fn list(
    version: &KubernetesVersion,
    servers: &Servers,
    timeout: Duration,
) -> Result<Vec<Component>, Error> {
    let (version, progress) = (version.to_string(), Progress::on_stderr());
    let client = Client::new(servers, Instant::now() + timeout)?;
    let mut list = of_every_version();
    for name in PROGRAMS {
        let url = format!(
            "{}/{version}/bin/linux/amd64/{name}.sha256",
            servers.downloads
        );
        progress.phase(format!("asking for {url}"));
        let sha256 = client.sha256_at(&url)?;
        list.push(program(&servers.downloads, &version, name, &sha256));
    }
    let images = IMAGES.map(|name| (name, version.as_str()));
    let etcd = servers.etcd.as_deref().map(|tag| ("etcd", tag));
    for (name, tag) in images.into_iter().chain(etcd) {
        let url = format!("{}/v2/{name}/manifests/{tag}", servers.registry);
        progress.phase(format!("asking for {url}"));
        let digest = client.digest_of(&url)?;
        list.push(patch(name, &format!("{tag}@sha256:{digest}")));
    }
    if servers.etcd.is_none() {
        progress.line(
            "etcd: kubeadm chooses the image, and no digest pins it; --etcd TAG does (`kubeadm config images list` names the tag)",
        );
    }
    Ok(list)
}

struct Client {
    client: http::Client,
    deadline: Instant,
}

impl Client {
    fn new(servers: &Servers, deadline: Instant) -> Result<Client, Error> {
        for url in [&servers.downloads, &servers.registry] {
            if http::check(url).is_err() || url.ends_with('/') {
                return Err(Error::Usage(format!(
                    "{url:?}: expected https://HOST[:PORT][/PATH]"
                )));
            }
        }
        let file = servers.authorities.as_deref();
        let roots = Roots::load(file).map_err(Error::content)?;
        let policy = ClientPolicy {
            redirects: REDIRECTS,
            proxy: Proxy::OfEnvironment,
            ..ClientPolicy::new(roots)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        Ok(Client {
            client: http::Client::new(policy, left),
            deadline,
        })
    }

    /// Returns the SHA-256 in the file at `url`, as 64 hexadecimal digits.
    fn sha256_at(&self, url: &str) -> Result<String, Error> {
        let body = self.get(url, "text/plain, application/octet-stream")?;
        let text = String::from_utf8_lossy(&body);
        // some files have a name after the hash, as in the output of sha256sum
        let hash = text.split_whitespace().next().unwrap_or_default();
        if hash.len() == 64 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            Ok(hash.to_owned())
        } else {
            Err(Error::refused(format!(
                "{url}: expected a SHA-256 of 64 hexadecimal digits, got {:?}",
                text.chars().take(80).collect::<String>()
            )))
        }
    }

    /// Returns the digest of the image index at `url`: the SHA-256 of its bytes (OCI Image Format
    /// Specification, "Digests").
    fn digest_of(&self, url: &str) -> Result<String, Error> {
        let body = self.get(url, INDEX)?;
        let index: serde_json::Value = serde_json::from_slice(&body)
            .map_err(|error| Error::refused(format!("{url}: not an image index: {error}")))?;
        if !index["manifests"].is_array() {
            return Err(Error::refused(format!(
                "{url}: not an image index: it has no manifests"
            )));
        }
        Ok(hex(digest(&SHA256, &body).as_ref()))
    }

    fn get(&self, url: &str, types: &str) -> Result<Vec<u8>, Error> {
        let unreachable =
            |error: &dyn std::fmt::Display| Error::Unreachable(format!("{url}: {error}"));
        let request = Request {
            method: "GET",
            url,
            fields: &[("Accept", types)],
            body: None,
            limit: MAX_ANSWER,
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        let answer = self.client.open(&request, left);
        let answer = answer.map_err(|error| unreachable(&error))?;
        match answer.status() {
            200 => {}
            404 => {
                return Err(Error::refused(format!(
                    "{url}: not published (status 404): is it a released version?"
                )));
            }
            status => return Err(unreachable(&format_args!("status {status}"))),
        }
        match answer.read() {
            Ok(body) => Ok(body.to_vec()),
            Err(error) if error.kind == ErrorKind::TooLong => {
                Err(Error::refused(format!("{url}: {error}")))
            }
            Err(error) => Err(unreachable(&error)),
        }
    }
}
