//! The metadata service: who am I, who are my peers, where is the cluster. One file a cloud.
//!
//! What it says is a hint from the host, which is not trusted: a node acts on it only together with attestation.

pub mod qemu;

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;
use ureq::http::uri::Authority;

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The service did not say, or said something else.
    #[default]
    Unknown,
    /// Runs the Kubernetes API server and etcd.
    ControlPlane,
    /// Runs workloads.
    Worker,
}

impl Role {
    /// In any case, `control-plane` as well; anything else is [`Role::Unknown`].
    pub fn parse(text: &str) -> Role {
        match text.to_ascii_lowercase().as_str() {
            "controlplane" | "control-plane" => Role::ControlPlane,
            "worker" => Role::Worker,
            _ => Role::Unknown,
        }
    }
}

/// As the wire and the node's state file have it: `ControlPlane`, `Worker`, `Unknown`.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Unknown => "Unknown",
            Role::ControlPlane => "ControlPlane",
            Role::Worker => "Worker",
        })
    }
}

/// One machine of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its name there, e.g. `control-plane-0`; not empty.
    pub name: String,
    /// As Kubernetes calls it, e.g. `qemu:///hostname/control-plane-0`.
    pub provider_id: String,
    /// What it is for.
    pub role: Role,
    /// Its address in the cluster's network, if it has one yet.
    pub vpc_ip: Option<IpAddr>,
}

/// The metadata service of the cloud that this machine runs in.
pub enum Metadata {
    /// The one beside QEMU.
    Qemu(qemu::Client),
}

impl Metadata {
    /// Of the cloud named as on the kernel command line and the command lines of the services (`qemu`, `aws`, ..), in any
    /// case; at `url`, as `http://10.42.0.1:8080`, when the service is not at its usual place. Nobody is asked.
    pub fn of(cloud: &str, url: Option<&str>) -> Result<Metadata, Error> {
        if let Some(url) = url {
            check_url(url).map_err(|problem| Error::Url {
                url: url.to_owned(),
                problem,
            })?;
        }
        match cloud.to_ascii_lowercase().as_str() {
            "qemu" => Ok(Metadata::Qemu(qemu::Client::new(
                url.unwrap_or(qemu::BASE_URL),
            ))),
            "aws" | "azure" | "gcp" | "openstack" | "stackit" => {
                Err(Error::NotSupported(cloud.to_owned()))
            }
            _ => Err(Error::UnknownCloud(cloud.to_owned())),
        }
    }

    /// This machine.
    pub fn self_(&self) -> Result<Instance, Error> {
        match self {
            Metadata::Qemu(client) => client.self_(),
        }
    }

    /// All machines of the cluster, this one too.
    pub fn peers(&self) -> Result<Vec<Instance>, Error> {
        match self {
            Metadata::Qemu(client) => client.peers(),
        }
    }

    /// The host, an address or a name, under which all control planes are reached.
    pub fn load_balancer_endpoint(&self) -> Result<String, Error> {
        match self {
            Metadata::Qemu(client) => client.load_balancer_endpoint(),
        }
    }

    /// The bcrypt hash (`$2a$10$..`, 60 characters) of the secret that `init` must bring.
    pub fn init_secret_hash(&self) -> Result<String, Error> {
        match self {
            Metadata::Qemu(client) => client.init_secret_hash(),
        }
    }
}

/// What is wrong with the URL of a service, to which paths are added.
fn check_url(url: &str) -> Result<(), String> {
    // these services prove nothing, and have no certificates
    if !url.starts_with("http://") {
        return Err("it does not begin with http://".into());
    }
    let uri: Uri = url.parse().map_err(|error| format!("{error}"))?;
    let authority = uri.authority().map(Authority::as_str).unwrap_or_default();
    if authority.contains('@') {
        return Err("it has a user's name in it".into());
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err("it has no host".into());
    }
    // http::Uri takes any digits for a port
    let port = authority
        .strip_prefix(uri.host().unwrap_or_default())
        .unwrap_or_default();
    if !port.is_empty() && uri.port_u16().is_none_or(|port| port == 0) {
        return Err("its port is none".into());
    }
    if uri.query().is_some() || url.contains('#') {
        return Err("it has more than a path after its host".into());
    }
    Ok(())
}

/// Why the metadata service gave no answer. A URL tells what was asked, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A cloud that is known, but not to this version.
    NotSupported(String),
    /// No cloud has this name.
    UnknownCloud(String),
    /// What was given for the URL of the service is none.
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it, a clause.
        problem: String,
    },
    /// No complete answer: not reached, too slow, cut off, too long.
    Unreachable {
        /// What was asked, and where.
        url: String,
        /// What happened.
        error: String,
    },
    /// An answer other than 200 OK.
    Status {
        /// What was asked, and where.
        url: String,
        /// The HTTP status.
        status: u16,
        /// How its body begins.
        body: String,
    },
    /// An answer that is not what was asked for.
    Nonsense {
        /// What was asked, and where.
        url: String,
        /// What should have come.
        expected: &'static str,
        /// What is wrong, with the beginning of what came.
        got: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotSupported(cloud) => {
                write!(
                    f,
                    "metadata: the cloud {cloud} is not supported by this version; expected qemu"
                )
            }
            Error::UnknownCloud(cloud) => {
                write!(f, "metadata: there is no cloud {cloud:?}; expected qemu")
            }
            Error::Url { url, problem } => {
                write!(
                    f,
                    "metadata: {url:?} is no URL of a metadata service: {problem}; expected http://HOST[:PORT]"
                )
            }
            Error::Unreachable { url, error } => write!(f, "metadata: GET {url}: {error}"),
            Error::Status { url, status, body } => {
                write!(
                    f,
                    "metadata: GET {url}: expected status 200, got {status}: {body:?}"
                )
            }
            Error::Nonsense { url, expected, got } => {
                write!(f, "metadata: GET {url}: expected {expected}, got {got}")
            }
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_in_every_form_of_the_old_system() {
        for text in [
            "ControlPlane",
            "controlplane",
            "control-plane",
            "Control-Plane",
        ] {
            assert_eq!(Role::parse(text), Role::ControlPlane, "{text}");
        }
        assert_eq!(Role::parse("worker"), Role::Worker);
        for text in ["", "Unknown", "master", "control plane"] {
            assert_eq!(Role::parse(text), Role::Unknown, "{text}");
        }
    }

    #[test]
    fn a_written_role_reads_as_itself() {
        for role in [Role::Unknown, Role::ControlPlane, Role::Worker] {
            assert_eq!(Role::parse(&role.to_string()), role);
        }
    }

    #[test]
    fn other_clouds_are_refused_by_name() {
        assert_eq!(
            Metadata::of("AWS", None).err(),
            Some(Error::NotSupported("AWS".into()))
        );
        assert_eq!(
            Metadata::of("home", None).err(),
            Some(Error::UnknownCloud("home".into()))
        );
        assert!(Metadata::of("QEMU", None).is_ok());
    }

    #[test]
    fn a_url_that_nobody_could_be_asked_at_is_refused_at_once() {
        for url in [
            "http://10.42.0.1:8080",
            "http://10.42.0.1",
            "http://[fd00::1]:80/",
            "http://metadata.internal/v1",
        ] {
            assert!(Metadata::of("qemu", Some(url)).is_ok(), "{url}");
        }
        for (url, problem) in [
            ("", "does not begin"),
            ("10.42.0.1", "does not begin"),
            ("/self", "does not begin"),
            ("10.42.0.1:8080", "does not begin"),
            ("https://10.42.0.1", "does not begin"),
            ("ftp://10.42.0.1", "does not begin"),
            ("http://", "empty"),
            ("http://:8080", "no host"),
            ("http://10.42.0.1:", "port"),
            ("http://10.42.0.1:0", "port"),
            ("http://10.42.0.1:99999", "port"),
            ("http://10.42.0.1:x", "port"),
            ("http://me:secret@10.42.0.1", "user's name"),
            ("http://10.42.0.1/?a=b", "more than a path"),
            ("http://10.42.0.1/#a", "more than a path"),
            ("http://10.42 0.1", "invalid"),
        ] {
            let error = Metadata::of("qemu", Some(url))
                .err()
                .unwrap_or_else(|| panic!("{url:?}"))
                .to_string();
            assert!(
                error.contains(problem) && error.contains("expected http://HOST[:PORT]"),
                "{url}: {error}"
            );
        }
    }
}
