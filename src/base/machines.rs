//! Types that describe a cluster's machines: a machine, its role, its cloud.

use std::fmt;
use std::net::IpAddr;

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
    /// Parses a role in upper or lower case, also `control-plane`; any other text is
    /// [`Role::Unknown`].
    pub fn parse(text: &str) -> Role {
        match text.to_ascii_lowercase().as_str() {
            "controlplane" | "control-plane" => Role::ControlPlane,
            "worker" => Role::Worker,
            _ => Role::Unknown,
        }
    }
}

/// Writes the role as in the wire protocol and the node state file: `ControlPlane`, `Worker`,
/// `Unknown`.
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

/// A cloud. To add one:
///
/// 1. add it here, to [`ALL`], and its name to [`NAMES`]; the compiler asks for the rest, such as
///    what marks its state disk;
/// 2. `own` in the crate `cloud`: what a machine's own metadata says of the cluster;
/// 3. `metadata` in the crate `cloud_api`: if only an API of the cloud knows the machine's peers,
///    its client is a file there;
/// 4. add its name to `charts/firstlight/values.schema.json` (`tests/tables.rs` compares), and the
///    cloud to the tables of options in `docs/images/settings.md` and `docs/services.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    /// The machines that QEMU runs on a host of the operator.
    Qemu,
    /// Machines outside of clouds: bare metal, libvirt, Proxmox, QEMU.
    Static,
    /// Amazon Web Services.
    Aws,
    /// Google Cloud.
    Gcp,
    /// Microsoft Azure.
    Azure,
    /// OpenStack.
    OpenStack,
    /// STACKIT: the same services as OpenStack's, under another name.
    Stackit,
}

/// All clouds.
pub const ALL: [Cloud; 7] = {
    use Cloud::*;
    [Qemu, Static, Aws, Gcp, Azure, OpenStack, Stackit]
};

/// The names of [`ALL`], in the same order, which is also that of [`Cloud`].
pub const NAMES: [&str; ALL.len()] = [
    "qemu",
    "static",
    "aws",
    "gcp",
    "azure",
    "openstack",
    "stackit",
];

/// The cloud that a program uses if its command line names none.
pub const DEFAULT: Cloud = Cloud::Qemu;

impl Cloud {
    /// Returns the cloud with this name in upper or lower case.
    pub fn named(name: &str) -> Result<Cloud, Error> {
        ALL.into_iter()
            .find(|cloud| cloud.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| Error::UnknownCloud(name.to_owned()))
    }

    /// Returns the name on the kernel command line, on the command lines of the programs, and in
    /// the Helm chart; lower case.
    pub const fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// Returns whether `text` is an IP address or a DNS name (RFC 1123 §2.1: letters, digits, hyphens,
/// dots).
pub fn is_host(host: &str) -> bool {
    let is_of_label = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    let label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(is_of_label);
    host.parse::<IpAddr>().is_ok() || (host.len() <= 253 && host.split('.').all(label))
}

/// Why the metadata service gave no valid answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// [`ALL`] has no cloud with this name.
    UnknownCloud(String),
    /// The location of the service, in the form of `--metadata`, is invalid.
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
    /// No complete answer: the service is unreachable or too slow, or the answer is truncated or
    /// too long.
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
    /// The service or the API does not provide the requested data.
    Denied {
        /// The request: method and URL.
        request: String,
        /// What it answers.
        why: String,
        /// What the operator can do, as a clause.
        next: String,
    },
    /// The answers contradict each other, or known facts.
    Refused(String),
}

/// With `{:#}`, it does not begin with `metadata: `, for services that do not describe this machine.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() && !matches!(self, Error::UnknownCloud(_)) {
            f.write_str("metadata: ")?;
        }
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
                    "{url:?} is not a valid address of a metadata service: {problem}"
                )
            }
            Error::List { place, problem } => write!(f, "{place}: {problem}"),
            Error::Unreachable { request, error } => write!(f, "{request}: {error}"),
            Error::Status {
                request,
                status,
                body,
            } => {
                write!(f, "{request}: expected status 200, got {status}: {body:?}")
            }
            Error::Nonsense {
                request,
                expected,
                got,
            } => {
                write!(f, "{request}: expected {expected}, got {got}")
            }
            Error::Denied { request, why, next } => write!(f, "{request}: {why}: {next}"),
            Error::Refused(why) => write!(f, "refused: {why}"),
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
            assert_eq!(format!("{cloud:?}").to_lowercase(), name);
            assert_eq!(Cloud::named(name).as_ref(), Ok(cloud));
            assert_eq!(Cloud::named(&name.to_uppercase()).as_ref(), Ok(cloud));
        }
        for name in ["", "home"] {
            let error = Cloud::named(name).unwrap_err();
            assert_eq!(error, Error::UnknownCloud(name.into()));
            assert!(error.to_string().ends_with(&NAMES.join(", ")), "{error}");
        }
    }
}
