//! The clouds: how each marks the state disk, and what a machine's own metadata says about the machine and its peers. Each cloud has
//! a line in [`ALL`]. The crate `cloud_api` has the clients of the clouds' APIs, where only an API knows the peers.
//!
//! Its answers come from the host, which is not trusted: a node uses them only together with attestation.

pub mod http;
pub mod peers;
pub mod plain;
pub mod qemu;
mod range;
mod state_disk;
pub mod r#static;
pub mod transport;

pub use range::Range;
pub use state_disk::StateDisk;
pub use r#static::Machines;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use state_disk::{DATA_DISK, EBS, PERSISTENT_DISK, SECOND_VIRTIO};

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

/// Names and addresses of a machine beside those of its [`Instance`], with which the cloud's controller describes its Node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Alias {
    /// The name of its [`Instance`].
    pub machine: String,
    /// DNS names, internal and external.
    pub names: Vec<String>,
    /// Addresses, internal and external.
    pub addresses: Vec<IpAddr>,
}

/// A cloud: the values in which clouds differ for a node and for the services. The file of the cloud defines it.
pub struct Cloud {
    /// The name on the kernel command line, on the command lines of the programs, and in the Helm chart; lower case.
    pub name: &'static str,
    /// What marks the state disk.
    pub state_disk: StateDisk,
    /// Whether kubelet and controller manager leave the cloud's objects to a cloud controller manager
    /// (`--cloud-provider=external`).
    pub external_cloud_provider: bool,
    /// What the machine's own metadata says of the cluster.
    pub own: Own,
}

/// What a machine's own metadata says about its cluster, without an API of the cloud.
#[derive(Clone, Copy)]
pub enum Own {
    /// All: a list of machines, for which no network is needed. Makes the client of the list at a place, as `--metadata` names it; `None`
    /// is the default. Sends no request.
    List(fn(place: Option<&str>) -> Made),
    /// All: a metadata service that describes all machines.
    Service(fn(place: Option<&str>) -> Made),
    /// The tag [`peers::TAG`] of the machine.
    Tag(peers::Ask),
}

/// The client of a metadata service, if its place is valid.
pub type Made = Result<Arc<dyn Metadata>, Error>;

/// Amazon Web Services.
pub const AWS: Cloud = Cloud {
    name: "aws",
    state_disk: EBS,
    external_cloud_provider: true,
    own: Own::Tag(peers::aws),
};

/// Google Cloud.
pub const GCP: Cloud = Cloud {
    name: "gcp",
    state_disk: PERSISTENT_DISK,
    external_cloud_provider: true,
    own: Own::Tag(peers::gcp),
};

/// Microsoft Azure.
pub const AZURE: Cloud = Cloud {
    name: "azure",
    state_disk: DATA_DISK,
    external_cloud_provider: true,
    own: Own::Tag(peers::azure),
};

/// OpenStack.
pub const OPENSTACK: Cloud = Cloud {
    name: "openstack",
    state_disk: SECOND_VIRTIO,
    external_cloud_provider: false,
    own: Own::Tag(peers::openstack),
};

/// STACKIT: the same services as OpenStack's, under another name.
pub const STACKIT: Cloud = Cloud {
    name: "stackit",
    ..OPENSTACK
};

/// All clouds. To add one:
///
/// 1. add its constant above, and name it here;
/// 2. if only an API of the cloud knows the machine's peers: write its file in the crate `cloud_api`, and add it to the table there;
/// 3. add its name to `charts/firstlight/values.schema.json` (`tests/tables.rs` compares);
/// 4. add it to the tables of options in `docs/images.md` and `docs/services.md`.
pub const ALL: &[Cloud] = &[
    qemu::CLOUD,
    r#static::CLOUD,
    AWS,
    GCP,
    AZURE,
    OPENSTACK,
    STACKIT,
];

/// The names of [`ALL`].
pub const NAMES: [&str; ALL.len()] = base::names!(ALL);

/// The name of the cloud that a program uses if its command line names none.
pub const DEFAULT: &str = qemu::CLOUD.name;

impl Cloud {
    /// Returns the cloud with this name in upper or lower case.
    pub fn named(name: &str) -> Result<&'static Cloud, Error> {
        ALL.iter()
            .find(|cloud| cloud.name.eq_ignore_ascii_case(name))
            .ok_or_else(|| Error::UnknownCloud(name.to_owned()))
    }

    /// Creates the client of a metadata service that answers everything without an API of the cloud; `None` if the cloud has none.
    /// `place`, e.g. `http://10.42.0.1:8080`, replaces the default. Sends no request.
    pub fn metadata(&self, place: Option<&str>) -> Option<Made> {
        match self.own {
            Own::List(client) | Own::Service(client) => Some(client(place)),
            Own::Tag(_) => None,
        }
    }
}

/// The metadata service of the cloud in which this machine runs. Each call makes its requests without retries; the caller
/// decides about retries.
pub trait Metadata: Send + Sync {
    /// Returns this machine.
    fn own_instance(&self) -> Result<Instance, Error>;
    /// Returns all machines of the cluster with a valid description, including this one.
    fn peers(&self) -> Result<Vec<Instance>, Error>;
    /// Returns the host name or address under which all control planes are reached.
    fn load_balancer_endpoint(&self) -> Result<String, Error>;
    /// Returns the bcrypt hash (`$2a$10$..`, 60 characters) of the init secret.
    fn init_secret_hash(&self) -> Result<String, Error>;
    /// Returns further names and addresses of all machines of the cluster, as far as the service knows them.
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        Ok(vec![])
    }
    /// Returns the addresses that machines of the cluster's network can have; none if the service does not say.
    fn ranges(&self) -> Result<Vec<Range>, Error> {
        Ok(vec![])
    }
}

/// Returns whether `text` is an IP address or a DNS name (RFC 1123 §2.1: letters, digits, hyphens, dots).
pub fn is_host(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    host.parse::<IpAddr>().is_ok() || (host.len() <= 253 && host.split('.').all(label))
}

/// Returns whether `text` is a bcrypt hash: `$2a$10$` and 53 characters; 2b and 2y are later names of the same format.
fn is_bcrypt(text: &str) -> bool {
    let of_hash = |b: u8| b.is_ascii_alphanumeric() || b"./$".contains(&b);
    text.len() == 60 && text.starts_with("$2") && text.bytes().all(of_hash)
}

/// Returns the bcrypt hash in an answer, without a line break at its end.
pub fn bcrypt_hash(request: &str, body: &[u8]) -> Result<String, Error> {
    match std::str::from_utf8(body).map(str::trim_ascii_end) {
        Ok(hash) if is_bcrypt(hash) => Ok(hash.to_owned()),
        // the error does not repeat the answer, which may be the init secret itself
        _ => Err(Error::Nonsense {
            request: request.to_owned(),
            expected: "a bcrypt hash of 60 characters",
            got: format!("{} bytes that are not a bcrypt hash", body.len()),
        }),
    }
}

/// Checks the base URL of a service.
fn check_url(url: &str) -> Result<(), Error> {
    plain::Url::check_base(url).map_err(|problem| Error::Url {
        url: url.to_owned(),
        problem: format!("{problem}; expected http://HOST[:PORT]"),
    })
}

/// Why the metadata service gave no valid answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// [`ALL`] has no cloud with this name.
    UnknownCloud(String),
    /// The place of the service, as `--metadata` names it, is invalid.
    Url {
        /// The given place.
        url: String,
        /// What is wrong and what is expected, as a clause.
        problem: String,
    },
    /// The list of machines is missing or wrong.
    List {
        /// Where it is.
        place: String,
        /// What is wrong, as a clause.
        problem: String,
    },
    /// No complete answer: the service is unreachable or too slow, or the answer is truncated or too long.
    Unreachable {
        /// The request: method and URL.
        request: String,
        /// The error of the request.
        error: String,
    },
    /// An answer other than 200 OK.
    Status {
        /// The request: method and URL.
        request: String,
        /// The HTTP status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// The content of the answer is invalid.
    Nonsense {
        /// The request: method and URL.
        request: String,
        /// The expected content.
        expected: &'static str,
        /// What is wrong, with the beginning of the body.
        got: String,
    },
    /// The service or the API does not give what is asked for.
    Denied {
        /// The request: method and URL.
        request: String,
        /// What it answers.
        why: String,
        /// What the operator can do, as a clause.
        next: String,
    },
    /// The answers contradict each other, or what is known.
    Refused(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::UnknownCloud(cloud) => {
                let supported = NAMES.join(", ");
                write!(
                    f,
                    "the cloud {cloud:?} is not supported; supported: {supported}"
                )
            }
            Error::Url { url, problem } => {
                write!(
                    f,
                    "metadata: {url:?} is not a valid place of a metadata service: {problem}"
                )
            }
            Error::List { place, problem } => write!(f, "metadata: {place}: {problem}"),
            Error::Unreachable { request, error } => write!(f, "metadata: {request}: {error}"),
            Error::Status {
                request,
                status,
                body,
            } => {
                write!(
                    f,
                    "metadata: {request}: expected status 200, got {status}: {body:?}"
                )
            }
            Error::Nonsense {
                request,
                expected,
                got,
            } => {
                write!(f, "metadata: {request}: expected {expected}, got {got}")
            }
            Error::Denied { request, why, next } => {
                write!(f, "metadata: {request}: {why}: {next}")
            }
            Error::Refused(why) => write!(f, "metadata: refused: {why}"),
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
    fn a_cloud_is_found_by_its_name_and_others_are_refused() {
        for (cloud, name) in ALL.iter().zip(NAMES) {
            assert_eq!(Cloud::named(name).unwrap().name, cloud.name);
            let upper = name.to_uppercase();
            assert_eq!(Cloud::named(&upper).unwrap().name, cloud.name);
        }
        for name in ["", "home"] {
            let error = Cloud::named(name).err().unwrap();
            assert_eq!(error, Error::UnknownCloud(name.into()));
            assert!(error.to_string().ends_with(&NAMES.join(", ")), "{error}");
        }
    }

    #[test]
    fn a_url_that_nobody_could_be_asked_at_is_refused_at_once() {
        for url in [
            "http://10.42.0.1:8080",
            "http://10.42.0.1",
            "http://[fd00::1]:80/",
            "http://metadata.internal/v1",
        ] {
            assert!(qemu::CLOUD.metadata(Some(url)).unwrap().is_ok(), "{url}");
        }
        for (url, problem) in [
            ("", "does not begin"),
            ("10.42.0.1", "does not begin"),
            ("/self", "does not begin"),
            ("10.42.0.1:8080", "does not begin"),
            ("https://10.42.0.1", "does not begin"),
            ("ftp://10.42.0.1", "does not begin"),
            ("http://", "no host"),
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
            let error = qemu::CLOUD
                .metadata(Some(url))
                .unwrap()
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
