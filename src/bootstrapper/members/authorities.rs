//! The authorities of Kubernetes, etcd and the front proxy, whose certificates end after ten years.
//!
//! Each control plane gives its own copy of an authority a new certificate with the same key, a year
//! before the old one ends ([`kubernetes::authority`]). Nothing has to change at once: for a year
//! both certificates are good for everything, so the control planes need not agree, nodes may be
//! off, and each program trusts the new one from its next start on.
//!
//! ```text
//! control plane   pki/ca.crt ─► controller manager ─► ConfigMap kube-root-ca.crt of each namespace ─► pods
//! each node                                                        └─► pki/ca.crt ─► kubelet.conf ─► kubelet
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::steps::{error::Error as Step, job::Job, kubelet};
use base::crypto::Secret;
use base::file;
use base::stop::Stop;
use kubernetes::client::{self, ApiAccess, CONFIG_MAPS, Client};
use kubernetes::objects::ConfigMap;
use kubernetes::{NAMESPACE, authority, kubelet_certificate};

/// A node asks for a new certificate of its cluster's authority if it has less than this left.
const ASK_WITHIN: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Time limit for an answer of the API server.
const ANSWER: Duration = Duration::from_secs(60);
/// The ConfigMap in each namespace with the certificate of the cluster's authority.
const ROOT: &str = "kube-root-ca.crt";
/// The namespace and the name of the ConfigMap with a kubeconfig for machines that join.
const DISCOVERY: (&str, &str) = ("kube-public", "cluster-info");

/// A new certificate of an authority of this control plane.
pub struct NewAuthority {
    path: PathBuf,
    certificate: String,
}

impl NewAuthority {
    /// Makes a new certificate with the same key. `path` is the name of the authority's files in
    /// the folder `kubernetes`, such as `pki/ca`.
    pub fn of(kubernetes: &Path, path: &str) -> Result<NewAuthority, Error> {
        let key = Secret::new(read(&kubernetes.join(format!("{path}.key")))?);
        let path = kubernetes.join(format!("{path}.crt"));
        let certificate = authority::renew(&read(&path)?, key.expose(), SystemTime::now());
        Ok(NewAuthority {
            certificate: certificate.map_err(Error::Certificate)?,
            path,
        })
    }

    /// Returns whether it is the authority of etcd's certificates.
    pub fn is_of_etcd(&self) -> bool {
        self.path.ends_with("etcd/ca.crt")
    }

    /// Replaces the old certificate.
    pub fn write(&self, job: &Job<()>) -> Result<(), Error> {
        write(&self.path, 0o644, self.certificate.as_bytes())?;
        let path = self.path.display();
        job.line(&format!("{path} is a new certificate with the same key"));
        Ok(())
    }
}

/// Makes this node use a new certificate of its cluster's authority, if there is one. A kubelet that
/// does not restart although its kubeconfig has changed trusts the old one until the next boot.
pub fn follow(kubernetes: &Path, stop: &Stop, job: &Job<()>) -> Result<(), Error> {
    let (ca, kubeconfig) = (
        kubernetes.join("pki/ca.crt"),
        kubernetes.join("kubelet.conf"),
    );
    let mut certificate = read(&ca)?;
    if authority::end(&certificate).is_some_and(|end| end < SystemTime::now() + ASK_WITHIN) {
        let map = client(&kubeconfig, stop)?;
        let map = map.get_as(&CONFIG_MAPS.in_namespace(NAMESPACE).named(ROOT));
        let map: ConfigMap = map.map_err(Error::Api)?;
        let new = map.text("ca.crt").as_bytes();
        if authority::is_renewed(&certificate, new) {
            write(&ca, 0o644, new)?;
            certificate = new.to_vec();
        }
    }
    let present = String::from_utf8_lossy(&read(&kubeconfig)?).into_owned();
    let Some(new) = authority::update_kubeconfig(&present, &certificate) else {
        return Ok(());
    };
    let admin = kubernetes.join("admin.conf");
    if admin.exists() {
        tell_machines_that_join(&client(&admin, stop)?, &certificate)?;
    }
    write(&kubeconfig, 0o600, new.as_bytes())?;
    job.line("the kubelet restarts with the new certificate of the cluster's authority");
    Ok(kubelet::restart(stop, job)?)
}

/// Writes the certificate into the kubeconfig for machines that join.
fn tell_machines_that_join(client: &Client, certificate: &[u8]) -> Result<(), Error> {
    let (namespace, name) = DISCOVERY;
    let map = CONFIG_MAPS.in_namespace(namespace).named(name);
    let update = |map: ConfigMap, _: &Value| {
        let new = authority::update_kubeconfig(map.text("kubeconfig"), certificate)?;
        Some(json!({"data": {"kubeconfig": new}}))
    };
    client.modify_as(&map, update).map_err(Error::Api)
}

fn client(kubeconfig: &Path, stop: &Stop) -> Result<Client, Error> {
    let config = ApiAccess::from_kubeconfig_file(kubeconfig).map_err(Error::Api)?;
    Ok(Client::new(config, stop).within(ANSWER))
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|error| Error::Io(path.into(), error))
}

fn write(path: &Path, mode: u32, content: &[u8]) -> Result<(), Error> {
    file::replace(path, content, mode).map_err(|error| Error::Io(path.into(), error))
}

/// Why an authority has no new certificate, or this node does not use it. `Display` is a sentence.
#[derive(Debug)]
pub enum Error {
    /// A file cannot be read or written.
    Io(PathBuf, io::Error),
    /// The authority cannot sign.
    Certificate(kubelet_certificate::Error),
    /// The API did not answer.
    Api(client::Error),
    /// The kubelet did not restart.
    Kubelet(Step),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(path, error) => write!(f, "cannot access {}: {error}", path.display()),
            Error::Certificate(kubelet_certificate::Error::Authority(why)) => f.write_str(why),
            Error::Certificate(error) => error.fmt(f),
            Error::Api(error) => write!(
                f,
                "the new certificate of the cluster's authority: {error}; the next run tries it again"
            ),
            Error::Kubelet(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<Step> for Error {
    fn from(error: Step) -> Error {
        Error::Kubelet(error)
    }
}
