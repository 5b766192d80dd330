//! The metadata service of a cloud: describes this machine, its peers and the address of the cluster. Each cloud has one file.
//!
//! Its answers come from the host, which is not trusted: a node uses them only together with attestation.

pub mod qemu;

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;
use ureq::http::uri::Authority;

/// The role of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The service gave no role or an unknown role.
    #[default]
    Unknown,
    /// Runs the Kubernetes API server and etcd.
    ControlPlane,
    /// Runs workloads.
    Worker,
}

impl Role {
    /// Parses a role in upper or lower case, also `control-plane`; any other text is [`Role::Unknown`].
    pub fn parse(text: &str) -> Role {
        match text.to_ascii_lowercase().as_str() {
            "controlplane" | "control-plane" => Role::ControlPlane,
            "worker" => Role::Worker,
            _ => Role::Unknown,
        }
    }
}

/// Writes the role as in the wire protocol and the node state file: `ControlPlane`, `Worker`, `Unknown`.
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
    /// The name in the cloud, e.g. `control-plane-0`; not empty.
    pub name: String,
    /// The provider ID for Kubernetes, e.g. `qemu:///hostname/control-plane-0`.
    pub provider_id: String,
    /// The role.
    pub role: Role,
    /// The address in the network of the cluster; `None` if it has none yet.
    pub vpc_ip: Option<IpAddr>,
}

/// The metadata service of the cloud in which this machine runs.
pub enum Metadata {
    /// The metadata service for QEMU.
    Qemu(qemu::Client),
}

impl Metadata {
    /// Makes the client for a cloud, whose name is that on the kernel command line and the command lines of the services (`qemu`,
    /// `aws`, ..) in upper or lower case. `url`, e.g. `http://10.42.0.1:8080`, replaces the default address. Sends no request.
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

    /// Returns this machine.
    pub fn own_instance(&self) -> Result<Instance, Error> {
        match self {
            Metadata::Qemu(client) => client.own_instance(),
        }
    }

    /// Returns all machines of the cluster, including this one.
    pub fn peers(&self) -> Result<Vec<Instance>, Error> {
        match self {
            Metadata::Qemu(client) => client.peers(),
        }
    }

    /// Returns the host name or address under which all control planes are reached.
    pub fn load_balancer_endpoint(&self) -> Result<String, Error> {
        match self {
            Metadata::Qemu(client) => client.load_balancer_endpoint(),
        }
    }

    /// Returns the bcrypt hash (`$2a$10$..`, 60 characters) of the init secret.
    pub fn init_secret_hash(&self) -> Result<String, Error> {
        match self {
            Metadata::Qemu(client) => client.init_secret_hash(),
        }
    }
}

/// Checks the base URL of a service. The error is a clause.
fn check_url(url: &str) -> Result<(), String> {
    // metadata services have no certificates
    if !url.starts_with("http://") {
        return Err("it does not begin with http://".into());
    }
    let uri: Uri = url.parse().map_err(|error| format!("{error}"))?;
    let authority = uri.authority().map(Authority::as_str).unwrap_or_default();
    if authority.contains('@') {
        return Err("it contains a user name".into());
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err("it has no host".into());
    }
    // http::Uri accepts any digits as port
    let port = authority
        .strip_prefix(uri.host().unwrap_or_default())
        .unwrap_or_default();
    if !port.is_empty() && uri.port_u16().is_none_or(|port| port == 0) {
        return Err("its port is invalid".into());
    }
    if uri.query().is_some() || url.contains('#') {
        return Err("it has more than a path after its host".into());
    }
    Ok(())
}

/// Why the metadata service gave no valid answer. The URL names the service and the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A cloud that this version does not support.
    NotSupported(String),
    /// No cloud has this name.
    UnknownCloud(String),
    /// The URL of the service is invalid.
    Url {
        /// The given URL.
        url: String,
        /// What is wrong, as a clause.
        problem: String,
    },
    /// No complete answer: the service is unreachable or too slow, or the answer is truncated or too long.
    Unreachable {
        /// The requested URL.
        url: String,
        /// The error of the request.
        error: String,
    },
    /// An answer other than 200 OK.
    Status {
        /// The requested URL.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// The content of the answer is invalid.
    Nonsense {
        /// The requested URL.
        url: String,
        /// The expected content.
        expected: &'static str,
        /// What is wrong, with the beginning of the body.
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
                write!(f, "metadata: unknown cloud {cloud:?}; expected qemu")
            }
            Error::Url { url, problem } => {
                write!(
                    f,
                    "metadata: {url:?} is not a valid URL of a metadata service: {problem}; expected http://HOST[:PORT]"
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
            ("http://me:secret@10.42.0.1", "user name"),
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
