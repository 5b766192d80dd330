//! A client certificate for a user of Kubernetes, signed by the cluster's authority (X.509 version 3, RFC 5280), and the kubeconfig with it.
//!
//! Kubernetes takes the common name for the user and each organization for a group.

use std::fmt;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::kubelet_certificate::{
    self, COMMON_NAME, ClusterCa, NewKey, ORGANIZATION, client_extensions,
};
use super::yaml;
use base::crypto::Secret;
use base::der;
use base::text::quoted;

/// Maximum length of a name in characters (ub-common-name, RFC 5280 appendix A.1).
const MAX_NAME: usize = 64;
/// Maximum number of groups.
const MAX_GROUPS: usize = 16;

/// A user and its groups.
pub struct Subject(Vec<u8>);

impl Subject {
    /// Checks the names. Those of nodes and of other parts of Kubernetes are refused, but not the groups that give a person rights.
    pub fn new(user: &str, groups: &[String]) -> Result<Subject, Error> {
        if groups.len() > MAX_GROUPS {
            return Err(Error::Groups(groups.len()));
        }
        let is_name = |name: &str| {
            !name.is_empty()
                && name.chars().count() <= MAX_NAME
                && name.chars().all(|c| c.is_ascii_graphic())
        };
        let names = std::iter::once(user).chain(groups.iter().map(String::as_str));
        if let Some(bad) = names.into_iter().find(|name| !is_name(name)) {
            return Err(Error::Name(bad.into()));
        }
        let is_of_machine =
            |group: &String| group.starts_with("system:") && group != "system:masters";
        if user.starts_with("system:") || groups.iter().any(is_of_machine) {
            return Err(Error::OfKubernetes);
        }
        let attribute = |kind: &[u8], value: &str| {
            let value = der::element(der::UTF8_STRING, &[value.as_bytes()]);
            der::element(der::SET, &[&der::element(der::SEQUENCE, &[kind, &value])])
        };
        let mut all: Vec<Vec<u8>> = groups
            .iter()
            .map(|it| attribute(ORGANIZATION, it))
            .collect();
        all.push(attribute(COMMON_NAME, user));
        Ok(Subject(der::element(der::SEQUENCE, &[&all.concat()])))
    }
}

/// Makes a key and a certificate, and returns the kubeconfig `template` with them in place of those of its current user. Certificate and
/// key of the authority are PEM as kubeadm writes them.
pub fn kubeconfig(
    ca_certificate: &[u8],
    ca_key: &[u8],
    template: &[u8],
    subject: &Subject,
    validity: Duration,
    now: SystemTime,
) -> Result<Secret, Error> {
    let authority = ClusterCa::new(ca_certificate, ca_key).map_err(Error::Authority)?;
    let key = NewKey::generate().map_err(Error::Authority)?;
    let certificate = authority
        .end_of(now, validity)
        .and_then(|end| {
            authority.certificate(&subject.0, &key.public, &client_extensions(), now, end)
        })
        .map_err(Error::Authority)?;
    with_user(template, &certificate, &key.pem)
}

/// Returns the kubeconfig with this client certificate and key for its current user.
fn with_user(template: &[u8], certificate: &str, key: &str) -> Result<Secret, Error> {
    let template =
        str::from_utf8(template).map_err(|_| Error::Template("it is not UTF-8".into()))?;
    let given = yaml::document(template).map_err(|error| Error::Template(error.to_string()))?;
    let cluster = given["clusters"].as_array().and_then(|all| match &all[..] {
        [cluster] => Some(&cluster["cluster"]),
        _ => None,
    });
    let cluster = cluster.ok_or_else(|| Error::Template("it does not name one cluster".into()))?;
    let text = |field: &str| cluster[field].as_str().unwrap_or_default().to_owned();
    let (server, authority) = (text("server"), text("certificate-authority-data"));
    let certificate = STANDARD.encode(certificate);
    let key = Zeroizing::new(STANDARD.encode(key));
    let made = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: cluster\n  cluster:\n    server: {server:?}\n    \
         certificate-authority-data: {authority:?}\nusers:\n- name: user\n  user:\n    client-certificate-data: {certificate}\n    \
         client-key-data: {}\ncontexts:\n- name: context\n  context: {{cluster: cluster, user: user}}\ncurrent-context: context\n",
        *key
    );
    Ok(Secret::new(made.into_bytes()))
}

/// Why no kubeconfig was made.
#[derive(Debug)]
pub enum Error {
    /// The name of a user or of a group cannot be used.
    Name(String),
    /// There are too many groups.
    Groups(usize),
    /// The name belongs to a part of Kubernetes.
    OfKubernetes,
    /// The cluster's authority cannot sign.
    Authority(kubelet_certificate::Error),
    /// The administrator's kubeconfig of the node cannot be used: a clause.
    Template(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Name(name) => write!(
                f,
                "{}: expected a name of 1 to {MAX_NAME} visible ASCII characters",
                quoted(name, 80)
            ),
            Error::Groups(count) => write!(f, "{count} groups, expected at most {MAX_GROUPS}"),
            Error::OfKubernetes => f.write_str(
                "names that begin with system: are those of Kubernetes; of these, only the group system:masters can be chosen",
            ),
            Error::Authority(error) => write!(f, "no client certificate is made: {error}"),
            Error::Template(why) => write!(f, "admin.conf of this node cannot be used: {why}"),
        }
    }
}

impl std::error::Error for Error {}
