//! The check of a join ticket. The whole ticket is checked before anything is written or locked,
//! because the join service is not attested and may send anything.
//!
//! | field | requirement |
//! |---|---|
//! | `state_disk_key`, `measurement_secret`, `measurement_salt` | 32 bytes each |
//! | `kubelet_cert` | one certificate, of the key that was sent, for this node |
//! | `kubelet_client_cert` | the same, or nothing |
//! | `api_server_endpoint` | host and port |
//! | `token` | of the form of a bootstrap token |
//! | `discovery_token_ca_cert_hash`, `cluster_ca` | a SHA-256; if both are present, the hash of one of the CAs |
//! | `control_plane_files` | the eight files that a control plane needs, each once; none for a worker |
//! | `wrapping_key` | 32 bytes, or none; none for a worker |
//! | `policy_operators` | a list of operators, or none; none for a worker |
//! | `node_files` | at most 64 files and 256 KiB, each once by a name without a path |
//! | `kubernetes_components` | as for an init |
//! | `kubernetes_version` | supported; if it is missing, as in Constellation's tickets, the version in kubeadm's URL |
//! | `authorized_ca_public_key`, `host_certificate` | one line each; a certificate of this node's host key. Tickets of Constellation have no certificate before v2.24.0, and neither of them before v2.21.0 |

use std::fmt;

use zeroize::Zeroizing;

use base::crypto::MEASUREMENT_SALT_LEN;
use base::crypto::{CLUSTER_ID_LEN, KEY_LEN, Secret, cluster_id};
use kubernetes::certificate_request::kubelet_request::{KubeletRequest, authority_hashes};
use kubernetes::components::{self, KubernetesComponent};
use kubernetes::kubeadm::Trust;
use kubernetes::kubelet_certificate::KubeletCertificate;
use kubernetes::node_files;
use kubernetes::parameters::{KubernetesVersion, is_endpoint};
use proto::join::{ControlPlaneCertOrKey, IssueJoinTicketResponse};
use ssh::operators::{Newest, OperatorList};

/// Maximum bytes of a certificate or key of the control plane; an RSA-4096 key has 3 KiB.
const MAX_FILE: usize = 64 << 10;
/// Maximum number of components; Constellation's lists have nine.
const MAX_COMPONENTS: usize = 64;
/// Maximum characters of a wrong value that an error shows.
const SHOWN: usize = 80;

/// The files that control planes share, below kubeadm's `pki`: the name of each, and whether it is
/// secret.
pub const CONTROL_PLANE_FILES: [(&str, bool); 8] = [
    ("ca.crt", false),
    ("ca.key", true),
    ("sa.pub", false),
    ("sa.key", true),
    ("front-proxy-ca.crt", false),
    ("front-proxy-ca.key", true),
    ("etcd/ca.crt", false),
    ("etcd/ca.key", true),
];

/// The node's request, which a ticket must match.
pub struct Expected<'a> {
    /// Whether the node becomes a control plane.
    pub control_plane: bool,
    /// The request for the kubelet's certificate.
    pub kubelet: &'a KubeletRequest,
    /// The SSH host key in the request.
    pub host_key: &'a ssh::PublicKey,
    /// Limits what components may do.
    pub policy: &'a components::ComponentPolicy,
}

/// A ticket that passed every check that is possible before the lock.
pub struct Ticket {
    /// The permanent key of the state disk.
    pub disk_key: Secret,
    /// The cluster's ID is derived from this secret and the salt.
    pub measurement_secret: Secret,
    /// The measurement salt, which is written to the disk.
    pub measurement_salt: [u8; MEASUREMENT_SALT_LEN],
    /// The kubelet's serving certificate, with its key.
    pub kubelet: KubeletCertificate,
    /// The kubelet's first client certificate, with its key; `None` from a join service of an earlier version.
    pub kubelet_client: Option<KubeletCertificate>,
    /// The API server's `host:port`.
    pub api_server: String,
    /// The bootstrap token.
    pub token: Zeroizing<String>,
    /// How kubeadm authenticates the API server.
    pub trust: Trust,
    /// The files of [`CONTROL_PLANE_FILES`] with their contents; none for a worker.
    pub control_plane_files: Vec<(&'static str, bool, Secret)>,
    /// The key that decrypts the master secret in the Kubernetes API; `None` for a worker, and in a
    /// cluster of an earlier version.
    pub wrapping_key: Option<Secret>,
    /// The list of the operators who sign policies, and their newest policy; `None` for a worker, and in a cluster
    /// without operators.
    pub operators: Option<(String, Newest)>,
    /// The operator's files for this node: the name and content of each.
    pub node_files: Vec<(String, Secret)>,
    /// The components to install.
    pub components: Vec<KubernetesComponent>,
    /// The line of the SSH authority; empty from a join service of Constellation before v2.21.0.
    pub ssh_authority: Vec<u8>,
    /// The line of the SSH host certificate; empty from a join service of Constellation before v2.24.0.
    pub ssh_certificate: Vec<u8>,
}

/// The field that is wrong, and the reason; `Display` is a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketMismatch {
    field: &'static str,
    why: String,
}

impl fmt::Display for TicketMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

impl std::error::Error for TicketMismatch {}

fn refuse<T>(field: &'static str, why: impl fmt::Display) -> Result<T, TicketMismatch> {
    Err(TicketMismatch {
        field,
        why: why.to_string(),
    })
}

impl Ticket {
    /// Checks a join service's answer.
    pub fn check(
        mut ticket: IssueJoinTicketResponse,
        expected: &Expected<'_>,
    ) -> Result<Ticket, TicketMismatch> {
        let disk_key = key("state_disk_key", std::mem::take(&mut ticket.state_disk_key))?;
        let measurement_secret = key(
            "measurement_secret",
            std::mem::take(&mut ticket.measurement_secret),
        )?;
        let salt = &ticket.measurement_salt[..];
        let Ok(measurement_salt) = salt.try_into() else {
            return refuse(
                "measurement_salt",
                format_args!("{} bytes, expected {MEASUREMENT_SALT_LEN}", salt.len()),
            );
        };
        if !is_endpoint(&ticket.api_server_endpoint) {
            let got = shown(&ticket.api_server_endpoint);
            return refuse(
                "api_server_endpoint",
                format_args!("{got}, expected a host and a port as 10.0.0.1:6443"),
            );
        }
        let token = Zeroizing::new(std::mem::take(&mut ticket.token));
        if !is_token(&token) {
            return refuse("token", "it does not have the form of a bootstrap token");
        }
        let trust = trust(&ticket)?;
        let control_plane_files =
            control_plane_files(&mut ticket.control_plane_files, expected.control_plane)?;
        let wrapping_key = wrapping_key(
            std::mem::take(&mut ticket.wrapping_key),
            expected.control_plane,
        )?;
        let operators = operators(&ticket, expected.control_plane)?;
        let node_files = node_files(&mut ticket.node_files)?;
        let components = components(&ticket, expected.policy)?;
        check_version(&ticket)?;
        ssh::host::check(
            &ticket.authorized_ca_public_key,
            &ticket.host_certificate,
            expected.host_key,
        )
        .or_else(|why| refuse("authorized_ca_public_key, host_certificate", why))?;
        let kubelet = expected
            .kubelet
            .complete(&ticket.kubelet_cert)
            .or_else(|why| refuse("kubelet_cert", why))?;
        let kubelet_client = match &ticket.kubelet_client_cert[..] {
            [] => None,
            certificate => {
                let complete = expected.kubelet.complete(certificate);
                Some(complete.or_else(|why| refuse("kubelet_client_cert", why))?)
            }
        };
        Ok(Ticket {
            disk_key,
            measurement_secret,
            measurement_salt,
            kubelet,
            kubelet_client,
            api_server: std::mem::take(&mut ticket.api_server_endpoint),
            token,
            trust,
            control_plane_files,
            wrapping_key,
            operators,
            node_files,
            components,
            ssh_authority: std::mem::take(&mut ticket.authorized_ca_public_key),
            ssh_certificate: std::mem::take(&mut ticket.host_certificate),
        })
    }

    /// Returns the ID of the cluster that issued the ticket.
    pub fn cluster(&self) -> [u8; CLUSTER_ID_LEN] {
        cluster_id(&self.measurement_secret, &self.measurement_salt)
    }
}

fn key(field: &'static str, bytes: Vec<u8>) -> Result<Secret, TicketMismatch> {
    let key = Secret::new(bytes);
    match key.len() {
        KEY_LEN => Ok(key),
        len => refuse(field, format_args!("{len} bytes, expected {KEY_LEN}")),
    }
}

/// Returns whether `text` has the form of a bootstrap token (k8s.io/cluster-bootstrap,
/// BootstrapTokenPattern).
fn is_token(text: &str) -> bool {
    let is_word = |word: &str, len| {
        word.len() == len
            && word
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    text.split_once('.')
        .is_some_and(|(id, secret)| is_word(id, 6) && is_word(secret, 16))
}

fn trust(ticket: &IssueJoinTicketResponse) -> Result<Trust, TicketMismatch> {
    const HASH: &str = "discovery_token_ca_cert_hash";
    let hash = &ticket.discovery_token_ca_cert_hash;
    let is_hash = |hash: &str| {
        let digits = hash.strip_prefix("sha256:").unwrap_or_default();
        digits.len() == 64
            && digits
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    if !is_hash(hash) {
        return refuse(
            HASH,
            format_args!(
                "{}, expected sha256: and 64 hexadecimal digits",
                shown(hash)
            ),
        );
    }
    if ticket.cluster_ca.is_empty() {
        return Ok(Trust::Hash(hash.clone()));
    }
    if ticket.cluster_ca.len() > MAX_FILE {
        return refuse(
            "cluster_ca",
            format_args!(
                "{} bytes, expected at most {MAX_FILE}",
                ticket.cluster_ca.len()
            ),
        );
    }
    let hashes = authority_hashes(&ticket.cluster_ca).or_else(|why| refuse("cluster_ca", why))?;
    if !hashes.contains(hash) {
        return refuse(
            "cluster_ca",
            format_args!("none of its certificates has the hash {hash}"),
        );
    }
    match std::str::from_utf8(&ticket.cluster_ca) {
        Ok(text) => Ok(Trust::Authority(text.to_owned())),
        Err(_) => refuse("cluster_ca", "it is not PEM"),
    }
}

fn control_plane_files(
    files: &mut Vec<ControlPlaneCertOrKey>,
    control_plane: bool,
) -> Result<Vec<(&'static str, bool, Secret)>, TicketMismatch> {
    const FIELD: &str = "control_plane_files";
    let mut files: Vec<_> = std::mem::take(files);
    if !control_plane {
        return match files.len() {
            0 => Ok(Vec::new()),
            count => refuse(
                FIELD,
                format_args!(
                    "a ticket for a worker has {count} keys and certificates of a control plane"
                ),
            ),
        };
    }
    let mut checked: Vec<(&str, bool, Secret)> = Vec::with_capacity(CONTROL_PLANE_FILES.len());
    for file in &mut files {
        let known = CONTROL_PLANE_FILES
            .iter()
            .find(|(name, _)| *name == file.name);
        let Some(&(name, is_secret)) = known else {
            return refuse(
                FIELD,
                format_args!(
                    "{} is not a file that a control plane needs",
                    shown(&file.name)
                ),
            );
        };
        if checked.iter().any(|(other, ..)| *other == name) {
            return refuse(FIELD, format_args!("{name} occurs twice"));
        }
        let content = Secret::new(std::mem::take(&mut file.data));
        if content.len() > MAX_FILE || !content.expose().starts_with(b"-----BEGIN ") {
            let len = content.len();
            return refuse(
                FIELD,
                format_args!("{name} ({len} bytes) is not PEM of at most {MAX_FILE} bytes"),
            );
        }
        checked.push((name, is_secret, content));
    }
    match CONTROL_PLANE_FILES
        .iter()
        .find(|(name, _)| checked.iter().all(|(there, ..)| there != name))
    {
        None => Ok(checked),
        Some((missing, _)) => refuse(FIELD, format_args!("{missing} is missing")),
    }
}

fn wrapping_key(bytes: Vec<u8>, control_plane: bool) -> Result<Option<Secret>, TicketMismatch> {
    const FIELD: &str = "wrapping_key";
    match bytes.is_empty() {
        true => Ok(None),
        false if control_plane => key(FIELD, bytes).map(Some),
        false => refuse(FIELD, "a ticket for a worker has a key of control planes"),
    }
}

fn operators(
    ticket: &IssueJoinTicketResponse,
    control_plane: bool,
) -> Result<Option<(String, Newest)>, TicketMismatch> {
    const FIELD: &str = "policy_operators";
    if ticket.policy_operators.is_empty() {
        return Ok(None);
    }
    if !control_plane {
        return refuse(FIELD, "a ticket for a worker has a list for control planes");
    }
    let list = ticket.policy_operators.clone();
    OperatorList::parse(&list).or_else(|why| refuse(FIELD, why))?;
    let newest = Newest {
        number: ticket.policy_number,
        statement: ticket.policy_statement.clone(),
        ..Newest::default()
    };
    Ok(Some((list, newest)))
}

fn node_files(
    files: &mut Vec<ControlPlaneCertOrKey>,
) -> Result<Vec<(String, Secret)>, TicketMismatch> {
    node_files::check(files.iter().map(|file| (&*file.name, file.data.len())))
        .or_else(|why| refuse("node_files", why))?;
    let take = |file: &mut ControlPlaneCertOrKey| {
        let data = std::mem::take(&mut file.data);
        (file.name.clone(), Secret::new(data))
    };
    Ok(std::mem::take(files).iter_mut().map(take).collect())
}

fn components(
    ticket: &IssueJoinTicketResponse,
    policy: &components::ComponentPolicy,
) -> Result<Vec<KubernetesComponent>, TicketMismatch> {
    const FIELD: &str = "kubernetes_components";
    let wire = &ticket.kubernetes_components;
    if wire.len() > MAX_COMPONENTS {
        return refuse(
            FIELD,
            format_args!(
                "{} components, expected at most {MAX_COMPONENTS}",
                wire.len()
            ),
        );
    }
    let parsed = wire
        .iter()
        .map(|wire| KubernetesComponent::parse(wire, policy))
        .collect::<Result<_, _>>();
    parsed.or_else(|why| refuse(FIELD, why))
}

/// Refuses an unsupported version: its kubeadm could not read our configuration and would fail, but
/// only after the lock.
fn check_version(ticket: &IssueJoinTicketResponse) -> Result<(), TicketMismatch> {
    let (field, version) = match ticket.kubernetes_version.as_str() {
        "" => (
            "kubernetes_components",
            components::version_in(&ticket.kubernetes_components),
        ),
        version => ("kubernetes_version", Some(version)),
    };
    match version.map(str::parse::<KubernetesVersion>) {
        Some(Err(why)) => refuse(field, why),
        // the version is unknown: a mirror may use any file names
        Some(Ok(_)) | None => Ok(()),
    }
}

fn shown(text: &str) -> String {
    let mut beginning: String = text.chars().take(SHOWN).collect();
    if beginning.len() < text.len() {
        beginning.push('…');
    }
    format!("{beginning:?}")
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use prost::Message;

    use super::*;
    use kubernetes::parameters::NodeName;
    use proto::components::Component as Wire;
    use ssh::key;
    use support::mutation::mutations;
    use support::openssl::{authority, sign};

    fn request() -> KubeletRequest {
        let node = NodeName::from_machine("Worker_1").unwrap();
        KubeletRequest::new(&node, "10.42.1.7".parse().unwrap()).unwrap()
    }

    /// A node's request, and a valid answer.
    struct Case {
        kubelet: KubeletRequest,
        host_key: ssh::PublicKey,
        policy: components::ComponentPolicy,
        ticket: IssueJoinTicketResponse,
    }

    static CASE: LazyLock<Case> = LazyLock::new(|| {
        let (authority, kubelet, host_key) = (authority(), request(), key::generate().1);
        let ssh = ssh::Authority::from_seed(&Secret::new(vec![7; 32])).unwrap();
        let cluster_ca = std::fs::read(authority.path().join("ca.crt")).unwrap();
        let ticket = IssueJoinTicketResponse {
            state_disk_key: vec![1; 32],
            measurement_salt: vec![2; 32],
            measurement_secret: vec![3; 32],
            kubelet_cert: sign(authority.path(), kubelet.der()),
            api_server_endpoint: "10.42.1.100:6443".into(),
            token: "abcdef.0123456789abcdef".into(),
            discovery_token_ca_cert_hash: authority_hashes(&cluster_ca).unwrap().remove(0),
            control_plane_files: vec![],
            wrapping_key: vec![],
            policy_operators: String::new(),
            policy_number: 0,
            policy_statement: String::new(),
            kubelet_client_cert: vec![],
            node_files: vec![ControlPlaneCertOrKey {
                name: "token".into(),
                data: b"a token".to_vec(),
            }],
            kubernetes_version: "v1.34.4".into(),
            kubernetes_components: vec![Wire {
                url: "https://dl.k8s.io/v1.34.4/bin/linux/amd64/kubelet".into(),
                hash: format!("sha256:{}", "0a".repeat(32)),
                install_path: "/run/state/bin/kubelet".into(),
                extract: false,
            }],
            authorized_ca_public_key: format!("{}\n", ssh.public_line()).into_bytes(),
            host_certificate: ssh
                .host_certificate(&host_key, &["node".into()], std::time::SystemTime::now())
                .unwrap()
                .into_bytes(),
            cluster_ca,
        };
        Case {
            kubelet,
            host_key,
            policy: components::ComponentPolicy::default(),
            ticket,
        }
    });

    fn check(
        ticket: IssueJoinTicketResponse,
        control_plane: bool,
    ) -> Result<Ticket, TicketMismatch> {
        let Case {
            kubelet,
            host_key,
            policy,
            ..
        } = &*CASE;
        Ticket::check(
            ticket,
            &Expected {
                control_plane,
                kubelet,
                host_key,
                policy,
            },
        )
    }

    fn with(change: impl FnOnce(&mut IssueJoinTicketResponse)) -> IssueJoinTicketResponse {
        let mut ticket = CASE.ticket.clone();
        change(&mut ticket);
        ticket
    }

    fn files() -> Vec<ControlPlaneCertOrKey> {
        let file = |name: &str| ControlPlaneCertOrKey {
            name: name.into(),
            data: b"-----BEGIN X-----\n".to_vec(),
        };
        CONTROL_PLANE_FILES.map(|(name, _)| file(name)).to_vec()
    }

    #[test]
    fn good_tickets_of_both_roles_and_of_both_systems_are_taken() {
        let worker = check(CASE.ticket.clone(), false).unwrap();
        assert!(matches!(worker.trust, Trust::Authority(_)) && worker.components.len() == 1);
        assert_eq!(
            worker.cluster(),
            cluster_id(&Secret::new(vec![3; 32]), &[2; 32])
        );
        let plane = check(with(|ticket| ticket.control_plane_files = files()), true).unwrap();
        let secret: Vec<_> = plane
            .control_plane_files
            .iter()
            .filter(|file| file.1)
            .map(|file| file.0)
            .collect();
        assert_eq!(
            secret,
            ["ca.key", "sa.key", "front-proxy-ca.key", "etcd/ca.key"]
        );
        let old = check(
            with(|ticket| {
                ticket.cluster_ca.clear();
                ticket.kubernetes_version.clear();
            }),
            false,
        );
        assert_eq!(
            old.unwrap().trust,
            Trust::Hash(CASE.ticket.discovery_token_ca_cert_hash.clone())
        );
        for endpoint in ["lb.example:6443", "[fd00::1]:443", "10.0.0.1:1"] {
            check(
                with(|ticket| ticket.api_server_endpoint = endpoint.into()),
                false,
            )
            .unwrap();
        }
    }

    #[test]
    fn each_field_that_is_wrong_is_refused_by_its_name() {
        type Change = fn(&mut IssueJoinTicketResponse);
        let component = |change: fn(&mut Wire)| {
            move |ticket: &mut IssueJoinTicketResponse| change(&mut ticket.kubernetes_components[0])
        };
        let cases: Vec<(&str, Change)> = vec![
            ("state_disk_key: 31 bytes", |ticket| {
                ticket.state_disk_key.truncate(31)
            }),
            ("state_disk_key: 0 bytes", |ticket| {
                ticket.state_disk_key.clear()
            }),
            ("measurement_secret: 33 bytes", |ticket| {
                ticket.measurement_secret.push(0)
            }),
            ("measurement_salt: 0 bytes", |ticket| {
                ticket.measurement_salt.clear()
            }),
            ("kubelet_cert: expected exactly one certificate", |ticket| {
                ticket.kubelet_cert.clear()
            }),
            ("kubelet_cert: it is for another key", |ticket| {
                ticket.kubelet_cert = ticket.cluster_ca.clone()
            }),
            ("kubelet_client_cert: it is for another key", |ticket| {
                ticket.kubelet_client_cert = ticket.cluster_ca.clone()
            }),
            ("api_server_endpoint: \"\"", |ticket| {
                ticket.api_server_endpoint.clear()
            }),
            ("api_server_endpoint: \"10.0.0.1\"", |ticket| {
                ticket.api_server_endpoint = "10.0.0.1".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "10.0.0.1:0".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "10.0.0.1:65536".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "10.0.0.1:+1".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "fd00::1:6443".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "a@b/c:6443".into()
            }),
            ("api_server_endpoint", |ticket| {
                ticket.api_server_endpoint = "x".repeat(1 << 16)
            }),
            ("token", |ticket| ticket.token.clear()),
            ("token", |ticket| {
                ticket.token = "abcdef.0123456789abcdeF".into()
            }),
            ("token", |ticket| ticket.token.push('0')),
            ("discovery_token_ca_cert_hash: \"\"", |ticket| {
                ticket.discovery_token_ca_cert_hash.clear()
            }),
            ("discovery_token_ca_cert_hash", |ticket| {
                ticket.discovery_token_ca_cert_hash.push('0')
            }),
            (
                "cluster_ca: none of its certificates has the hash",
                |ticket| {
                    ticket.discovery_token_ca_cert_hash = format!("sha256:{}", "0a".repeat(32));
                },
            ),
            ("cluster_ca: it contains no certificate", |ticket| {
                ticket.cluster_ca = b"none".to_vec()
            }),
            ("cluster_ca: 65537 bytes", |ticket| {
                ticket.cluster_ca = vec![b'\n'; MAX_FILE + 1]
            }),
            (
                "control_plane_files: a ticket for a worker has 8 keys",
                |ticket| ticket.control_plane_files = files(),
            ),
            ("node_files: token occurs twice", |ticket| {
                let file = ticket.node_files[0].clone();
                ticket.node_files.push(file)
            }),
            ("node_files: \"../token\" is no name", |ticket| {
                ticket.node_files[0].name = "../token".into()
            }),
            ("node_files: 262149 bytes", |ticket| {
                ticket.node_files[0].data = vec![0; 256 << 10]
            }),
            ("kubernetes_version: Kubernetes v1.12.0", |ticket| {
                ticket.kubernetes_version = "v1.12.0".into()
            }),
            ("kubernetes_components: 65 components", |ticket| {
                ticket.kubernetes_components = vec![Wire::default(); MAX_COMPONENTS + 1];
            }),
            (
                "the ticket's SSH authority is not a single line",
                |ticket| ticket.authorized_ca_public_key.clear(),
            ),
            (
                "the ticket's SSH host certificate is not a single line",
                |ticket| ticket.host_certificate = b"\n".to_vec(),
            ),
            ("authorized_ca_public_key", |ticket| {
                ticket.authorized_ca_public_key.extend(b"second\n")
            }),
            (
                "host_certificate: the ticket's SSH host certificate does not certify this node's host key",
                |ticket| {
                    ticket.host_certificate = key::generate().1.line().into_bytes();
                },
            ),
        ];
        for (why, change) in cases {
            let error = check(with(change), false)
                .err()
                .unwrap_or_else(|| panic!("{why}"))
                .to_string();
            assert!(error.contains(why), "{why} is not in {error}");
            assert!(!error.contains("abcdef.") && error.len() < 1000, "{error}");
        }
        for (why, change) in [
            ("has no hash", component(|wire| wire.hash.clear())),
            (
                "is not in an allowed directory",
                component(|wire| wire.install_path = "/etc/passwd".into()),
            ),
            (
                "is not an absolute path without `..`",
                component(|wire| wire.install_path = "/run/state/bin/../x".into()),
            ),
            ("no scheme", component(|wire| wire.url = "kubelet".into())),
        ] {
            let error = check(with(change), false)
                .err()
                .unwrap_or_else(|| panic!("{why}"))
                .to_string();
            assert!(
                error.starts_with("kubernetes_components: ") && error.contains(why),
                "{why} is not in {error}"
            );
        }
    }

    #[test]
    fn tickets_of_earlier_releases_have_no_ssh_certificate_or_nothing_of_ssh() {
        type Change = fn(&mut IssueJoinTicketResponse);
        let releases: [(&str, Change, usize); 2] = [
            ("v2.21.0 to v2.23.1", |_| {}, 1),
            (
                "v2.16.0 to v2.20.1",
                |ticket| ticket.authorized_ca_public_key.clear(),
                0,
            ),
        ];
        for (releases, change, lines) in releases {
            let ticket = with(|ticket| {
                ticket.host_certificate.clear();
                change(ticket);
            });
            let ticket = check(ticket, false).unwrap_or_else(|why| panic!("{releases}: {why}"));
            assert!(ticket.ssh_certificate.is_empty(), "{releases}");
            let authority = str::from_utf8(&ticket.ssh_authority).unwrap();
            assert_eq!(authority.lines().count(), lines, "{releases}");
        }
    }

    #[test]
    fn a_ticket_without_a_version_has_that_of_its_kubeadm() {
        let of_kubeadm = |url: &str| {
            with(|ticket| {
                ticket.kubernetes_version.clear();
                let component = Wire {
                    url: url.into(),
                    install_path: "/run/state/bin/kubeadm".into(),
                    ..ticket.kubernetes_components[0].clone()
                };
                ticket.kubernetes_components.push(component);
            })
        };
        for url in [
            "https://dl.k8s.io/v1.31.13/bin/linux/amd64/kubeadm",
            "https://storage.example/kubernetes-release/release/v1.36.0/bin/linux/amd64/kubeadm",
            "https://mirror.example/kubeadm",
        ] {
            check(of_kubeadm(url), false).unwrap();
        }
        let old = check(
            of_kubeadm("https://dl.k8s.io/v1.30.14/bin/linux/amd64/kubeadm"),
            false,
        )
        .err()
        .unwrap();
        assert_eq!(
            old.to_string(),
            "kubernetes_components: Kubernetes v1.30.14 is not supported; expected v1.31 to v1.37"
        );
        // the version in the ticket overrides the others
        let both = with(|ticket| {
            *ticket = of_kubeadm("https://dl.k8s.io/v1.31.13/bin/linux/amd64/kubeadm");
            ticket.kubernetes_version = "v1.30.14".into();
        });
        assert!(
            check(both, false)
                .err()
                .unwrap()
                .to_string()
                .starts_with("kubernetes_version: Kubernetes v1.30.14")
        );
    }

    #[test]
    fn a_control_plane_needs_its_eight_files_and_takes_no_other() {
        type Change = fn(&mut Vec<ControlPlaneCertOrKey>);
        let cases: [(&str, Change); 8] = [
            ("ca.crt is missing", |files| files.clear()),
            ("etcd/ca.key is missing", |files| drop(files.pop())),
            ("\"../ca.key\" is not a file", |files| {
                files[1].name = "../ca.key".into()
            }),
            ("\"/etc/passwd\" is not a file", |files| {
                files[1].name = "/etc/passwd".into()
            }),
            ("\"etcd/../ca.key\" is not a file", |files| {
                files[1].name = "etcd/../ca.key".into()
            }),
            ("\"apiserver.key\" is not a file", |files| {
                files.push(ControlPlaneCertOrKey {
                    name: "apiserver.key".into(),
                    data: vec![],
                });
            }),
            ("ca.crt occurs twice", |files| {
                files[1].name = "ca.crt".into()
            }),
            ("ca.key (65537 bytes) is not PEM", |files| {
                files[1].data.resize(MAX_FILE + 1, b'x')
            }),
        ];
        for (why, change) in cases {
            let mut files = files();
            change(&mut files);
            let error = check(with(|ticket| ticket.control_plane_files = files), true)
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(why), "{why} is not in {error}");
        }
        let empty = with(|ticket| {
            ticket.control_plane_files = files();
            ticket.control_plane_files[7].data.clear();
        });
        assert!(
            check(empty, true)
                .err()
                .unwrap()
                .to_string()
                .contains("etcd/ca.key (0 bytes) is not PEM")
        );
    }

    #[test]
    fn the_list_of_operators_is_for_a_control_plane() {
        let key = key::generate().1.line();
        let list = format!(r#"{{"required":1,"operators":[{{"name":"anna","key":"{key}"}}]}}"#);
        let two = list.replace("\"required\":1", "\"required\":2");
        let check = |list: &str, control_plane| {
            let mut ticket = IssueJoinTicketResponse::default();
            (ticket.policy_operators, ticket.policy_number) = (list.into(), 7);
            let taken = operators(&ticket, control_plane)?;
            Ok::<_, TicketMismatch>(taken.map(|(list, newest)| (list, newest.number)))
        };
        assert_eq!(check("", true), Ok(None));
        assert_eq!(check(&list, true), Ok(Some((list.clone(), 7))));
        for (list, control_plane, expected) in [
            (
                &list,
                false,
                "policy_operators: a ticket for a worker has a list for control planes",
            ),
            (
                &two,
                true,
                "policy_operators: the list requires 2 signatures of 1 operators, expected 1 to 1",
            ),
        ] {
            assert_eq!(
                check(list, control_plane).unwrap_err().to_string(),
                expected
            );
        }
    }

    #[test]
    fn the_wrapping_key_is_for_a_control_plane_and_has_32_bytes() {
        let with_key = |len, control_plane: bool| {
            let ticket = with(|ticket| {
                ticket.wrapping_key = vec![4; len];
                if control_plane {
                    ticket.control_plane_files = files();
                }
            });
            let checked = check(ticket, control_plane);
            checked.map(|ticket| ticket.wrapping_key.map(|key| key.len()))
        };
        assert_eq!(with_key(32, true), Ok(Some(32)));
        // of a service of an earlier version
        assert_eq!(with_key(0, true), Ok(None));
        for (len, control_plane, why) in [
            (31, true, "wrapping_key: 31 bytes, expected 32"),
            (
                32,
                false,
                "wrapping_key: a ticket for a worker has a key of control planes",
            ),
        ] {
            assert_eq!(with_key(len, control_plane).unwrap_err().to_string(), why);
        }
    }

    #[test]
    fn mutated_tickets_are_refused_or_sound() {
        let ticket = with(|ticket| ticket.control_plane_files = files());
        let mut good = 0;
        for mutant in mutations(&ticket.encode_to_vec(), 20_000) {
            let Ok(ticket) = IssueJoinTicketResponse::decode(&mutant[..]) else {
                continue;
            };
            if let Ok(ticket) = check(ticket, true) {
                good += 1;
                assert_eq!(
                    (ticket.disk_key.len(), ticket.measurement_secret.len()),
                    (KEY_LEN, KEY_LEN)
                );
                assert!(is_token(&ticket.token) && is_endpoint(&ticket.api_server));
                let names: Vec<_> = ticket
                    .control_plane_files
                    .iter()
                    .map(|file| file.0)
                    .collect();
                assert_eq!(names.len(), 8);
                assert!(
                    CONTROL_PLANE_FILES
                        .iter()
                        .all(|(name, _)| names.contains(name))
                );
            }
        }
        assert!(good > 50, "{good}");
    }
}
