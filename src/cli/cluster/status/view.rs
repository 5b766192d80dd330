//! A cluster at one moment: what its API server has, what each node proves, and what the servers
//! of the nodes show. `firstlight status` prints it, and `firstlight doctor` judges it.

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;
use base::sync::lock;
use kubernetes::client::{self, ApiAccess, Client};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::inquiry::Inquiry;
use super::listed::{Listed, without_roles};
use super::objects::Objects;
use super::report::StatusReport;
use super::served::{Asker, Served, ServedError, Validity};
use crate::shell::error::Error;
use crate::workspace::{connect::Endpoint, kubeconfig};

/// The number of nodes that are asked at the same time.
pub const AT_ONCE: usize = 64;
/// Time limit of the first request, which everybody may send.
const TIME_OF_VERSION: Duration = Duration::from_secs(3);
/// Time limit of each list of objects.
const TIME_OF_LIST: Duration = Duration::from_secs(10);
/// Time limit of a look at what listens at the API server's address.
const PROBE: Duration = Duration::from_secs(2);
/// The ports of a control plane whose pods name none.
const API_SERVER_PORT: u16 = 6443;
const ETCD_PORT: u16 = 2379;
/// The port of etcd for its other members, which kubeadm does not change.
const ETCD_PEER_PORT: u16 = 2380;
/// The path that an API server answers to everybody: whether it is ready.
const READY: &str = "/readyz?verbose";
/// A path that a kubelet refuses to strangers, with its time.
const HEALTH: &str = "/healthz";

/// The names of a node's servers for people.
pub const KUBELET: &str = "kubelet";
pub const API_SERVER: &str = "API server";
pub const ETCD: &str = "etcd";
pub const ETCD_PEER: &str = "etcd for other members";

/// A cluster at one moment.
#[derive(Default)]
pub struct View {
    /// The API server of the kubeconfig, as `https://HOST:PORT`.
    pub server: String,
    /// The version of that API server.
    pub version: Option<String>,
    /// The certificate of the operator in the kubeconfig, if it has one.
    pub operator: Option<Validity>,
    /// The authorities of the cluster: what each certifies, and when it is valid.
    pub authorities: Vec<(&'static str, Validity)>,
    /// The nodes, sorted by name.
    pub nodes: Vec<NodeView>,
    /// What the API server has.
    pub objects: Objects,
}

impl View {
    /// Returns the last day on which clients without a token get keys of volumes, if the key service
    /// has such a day.
    pub fn old_clients_until(&self) -> Option<String> {
        self.objects.option_of("key-service", "--old-clients-until")
    }
}

/// A node of the cluster.
pub struct NodeView {
    /// What Kubernetes knows of it.
    pub listed: Listed,
    /// What it proves.
    pub report: StatusReport,
    /// What its servers show.
    pub servers: NodeServers,
}

/// The servers of Kubernetes on a node. `None` if the node should have no such server.
#[derive(Default)]
pub struct NodeServers {
    /// The kubelet.
    pub kubelet: Option<Result<Served, ServedError>>,
    /// The API server of a control plane.
    pub api_server: Option<Result<Served, ServedError>>,
    /// The server of etcd for clients.
    pub etcd: Option<Result<Served, ServedError>>,
    /// The server of etcd for its other members.
    pub etcd_peer: Option<Result<Served, ServedError>>,
}

impl NodeServers {
    /// Returns each server with its name for people.
    pub fn each(&self) -> [(&'static str, &Option<Result<Served, ServedError>>); 4] {
        [
            (KUBELET, &self.kubelet),
            (API_SERVER, &self.api_server),
            (ETCD, &self.etcd),
            (ETCD_PEER, &self.etcd_peer),
        ]
    }

    /// Returns the validity of each certificate that a server showed.
    pub fn certificates(&self) -> impl Iterator<Item = (&'static str, Validity)> {
        let validity =
            |served: &Option<Result<Served, ServedError>>| served.as_ref()?.as_ref().ok()?.validity;
        let each = self.each();
        each.into_iter()
            .filter_map(move |(name, served)| Some((name, validity(served)?)))
    }
}

/// Whether the command reads Secrets, of which it keeps nothing secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretAccess {
    /// It does.
    Read,
    /// It does not.
    Skip,
}

/// Returns what a kubeconfig says by itself: the operator's certificate, and the authorities.
fn of_config(config: &ApiAccess) -> View {
    View {
        server: config.server().to_owned(),
        operator: config.certificate().and_then(Validity::of),
        authorities: ends_of(config.authorities(), &Objects::default()),
        ..View::default()
    }
}

/// Returns whether something listens at the server's address that does not speak TLS.
fn speaks_no_tls(asker: &Asker, known: &View) -> bool {
    let address = known.server.strip_prefix("https://").unwrap_or_default();
    let Ok(endpoint) = Endpoint::parse(address, API_SERVER_PORT) else {
        return false;
    };
    // the deadline may be over: this takes some seconds at most
    let asked = asker.ask(&endpoint, None, Instant::now() + PROBE);
    matches!(asked, Err(ServedError::NoTls(_)))
}

/// Why the nodes of a cluster could not be listed.
pub struct Unlisted {
    /// What is at fault.
    pub cause: ListFailure,
    /// The error of the command.
    pub error: Error,
    /// What the kubeconfig says by itself.
    pub known: View,
}

/// What is at fault if the nodes cannot be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListFailure {
    /// The kubeconfig cannot be used.
    Kubeconfig,
    /// The API server does not accept the credentials (401).
    Credentials,
    /// The user may not list nodes (403).
    Rights,
    /// The server's certificate is not one of the cluster's API server.
    Certificate,
    /// What listens at the address does not speak TLS.
    NoTls,
    /// No connection, or no answer in time.
    NoConnection,
    /// The API server answers with another error.
    Refused,
}

impl Unlisted {
    fn of(error: &client::Error, known: View) -> Box<Unlisted> {
        let cause = match error {
            client::Error::Refused(refused) => match refused.code {
                401 => ListFailure::Credentials,
                403 => ListFailure::Rights,
                _ => ListFailure::Refused,
            },
            client::Error::Unreachable {
                untrusted: Some(_), ..
            } => ListFailure::Certificate,
            client::Error::Unreachable { .. } | client::Error::NoAddress { .. } => {
                ListFailure::NoConnection
            }
            _ => ListFailure::Refused,
        };
        Box::new(Unlisted {
            cause,
            error: unlisted(error),
            known,
        })
    }
}

/// Asks the API server of the kubeconfigs and then all nodes.
pub fn gather(
    inquiry: &Inquiry,
    kubeconfigs: &[PathBuf],
    secrets: SecretAccess,
) -> Result<View, Box<Unlisted>> {
    let config = kubeconfig::read_config(kubeconfigs).map_err(|error| Unlisted {
        cause: ListFailure::Kubeconfig,
        error: error.into(),
        known: View::default(),
    })?;
    let known = of_config(&config);
    let authorities = config.authorities().to_vec();
    let asker = Asker::new(&authorities);
    let client = Client::new(config, &Stop::new());
    let client = || within(&client, inquiry.deadline);
    let (version, mut nodes) = match version_and_nodes(&client) {
        Ok(found) => found,
        Err(error) => {
            let mut unlisted = Unlisted::of(&error, known);
            if unlisted.cause == ListFailure::NoConnection && speaks_no_tls(&asker, &unlisted.known)
            {
                unlisted.cause = ListFailure::NoTls;
            }
            return Err(unlisted);
        }
    };
    // one list that hangs must not use up the time of all others
    let brief = || client().within(TIME_OF_LIST.min(left(inquiry.deadline)));
    let objects = Objects::read(&brief, &mut nodes, secrets == SecretAccess::Read);
    let mut nodes = ask_all(nodes, |node| {
        let servers = || ask_servers(&asker, &node, &objects, inquiry.deadline);
        let (report, servers) = thread::scope(|scope| {
            let servers = scope.spawn(servers);
            let report = match Endpoint::parse(&node.address, API_SERVER_PORT) {
                Ok(_) => inquiry.ask(&node.address),
                // one Node with such an address must not hide all others
                Err(_) => Ok(StatusReport::silent(&node.address, inquiry.cluster)),
            };
            (report, servers.join().unwrap_or_default())
        });
        Ok(NodeView {
            listed: node,
            report: report?,
            servers,
        })
    })
    .map_err(|error| Unlisted {
        cause: ListFailure::Refused,
        error,
        known: View::default(),
    })?;
    nodes.sort_by(|one, other| one.listed.name.cmp(&other.listed.name));
    Ok(View {
        version,
        authorities: ends_of(&authorities, &objects),
        nodes,
        objects,
        ..known
    })
}

/// Returns the version of the API server, if it says one, and the nodes.
fn version_and_nodes(
    client: &dyn Fn() -> Client,
) -> Result<(Option<String>, Vec<Listed>), client::Error> {
    client().resolve()?;
    let version = match client().within(TIME_OF_VERSION).version() {
        // the list would be tried until the deadline, with the same result
        Err(
            error @ client::Error::Unreachable {
                untrusted: Some(_), ..
            },
        ) => return Err(error),
        version => version.ok(),
    };
    Ok((version, without_roles(&client())?))
}

/// Returns the same client for a call that ends at the deadline.
fn within(client: &Client, deadline: Instant) -> Client {
    client.within(left(deadline))
}

fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(Duration::from_millis(1))
}

fn unlisted(error: &client::Error) -> Error {
    let text = format!(
        "cannot list the nodes of the cluster: {error}; to ask a node without the API server, name it: \
         firstlight status HOST"
    );
    // a server that cannot answer now is no better than one that cannot be reached
    if error.code().is_some() && !error.is_temporary() {
        Error::Refused(text)
    } else {
        Error::Unreachable(text)
    }
}

/// Returns the validity of the cluster's authorities: that of the API server, and those that the
/// API server trusts.
fn ends_of(of_server: &[CertificateDer<'_>], objects: &Objects) -> Vec<(&'static str, Validity)> {
    let own = of_server
        .iter()
        .map(|der| ("authority of the cluster", der.to_vec()));
    let others = objects.authorities.iter().flat_map(|(what, pem)| {
        let each = CertificateDer::pem_slice_iter(pem.as_bytes()).flatten();
        each.map(|der| (*what, der.to_vec()))
    });
    let mut known: Vec<Vec<u8>> = vec![];
    let mut ends = vec![];
    for (what, der) in own.chain(others) {
        // kubeadm has one authority for the servers and their clients
        if !known.contains(&der) {
            ends.extend(Validity::of(&der).map(|validity| (what, validity)));
            known.push(der);
        }
    }
    ends
}

/// Runs `ask` for each node, for many at the same time. The answers have no order.
pub fn ask_all<T: Send>(
    nodes: Vec<Listed>,
    ask: impl Fn(Listed) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let workers = nodes.len().min(AT_ONCE);
    let left = Mutex::new(nodes);
    let asked = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(node) = lock(&left).pop() else {
                        return;
                    };
                    let answer = ask(node);
                    lock(&asked).push(answer);
                }
            });
        }
    });
    std::mem::take(&mut *lock(&asked)).into_iter().collect()
}

/// Asks the servers of Kubernetes on a node, all at once.
fn ask_servers(asker: &Asker, node: &Listed, objects: &Objects, deadline: Instant) -> NodeServers {
    let at = |component: &str, port: u16| {
        let named = objects.address_of(component, &node.name);
        let endpoint = Endpoint::parse(named.unwrap_or(&node.address), port);
        endpoint.map_err(|error| ServedError::Address(error.to_string()))
    };
    let ask = |endpoint: Result<Endpoint, ServedError>, path| {
        let endpoint = endpoint?;
        asker.ask(&endpoint, path, deadline)
    };
    let kubelet = Endpoint::parse(&node.address, node.kubelet_port);
    let kubelet = kubelet.map_err(|error| ServedError::Address(error.to_string()));
    thread::scope(|scope| {
        let api_server = scope.spawn(|| {
            let endpoint = at("kube-apiserver", API_SERVER_PORT);
            node.is_control_plane.then(|| ask(endpoint, Some(READY)))
        });
        let etcd = scope.spawn(|| {
            let endpoint = at("etcd", ETCD_PORT);
            node.is_control_plane.then(|| ask(endpoint, None))
        });
        let etcd_peer = scope.spawn(|| {
            let endpoint = at("etcd", ETCD_PORT).map(|it| it.at(ETCD_PEER_PORT));
            node.is_control_plane.then(|| ask(endpoint, None))
        });
        NodeServers {
            kubelet: Some(ask(kubelet, Some(HEALTH))),
            api_server: api_server.join().unwrap_or_default(),
            etcd: etcd.join().unwrap_or_default(),
            etcd_peer: etcd_peer.join().unwrap_or_default(),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use verifier::{Policy, Variant};

    use super::super::testing::{Act, DRIPS, Server};
    use super::*;

    /// Asks the API server of this kubeconfig for at most so long.
    fn gathered(kubeconfig: &str, time: Duration) -> Box<Unlisted> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        fs::write(&path, kubeconfig).unwrap();
        let policy = format!(
            r#"{{"measurements": {{"4": {{"expected": "{}"}}}}}}"#,
            "11".repeat(32)
        );
        let inquiry = Inquiry {
            variant: Variant::named("qemu-vtpm").unwrap(),
            policy: &Policy::from_json(&policy).unwrap(),
            cluster: None,
            deadline: Instant::now() + time,
        };
        match gather(&inquiry, &[path], SecretAccess::Skip) {
            Ok(_) => panic!("nobody has listed the nodes"),
            Err(unlisted) => unlisted,
        }
    }

    fn kubeconfig(address: &str, ca: &str) -> String {
        let ca = BASE64_STANDARD.encode(ca);
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\n\
             clusters: [{{name: a, cluster: {{server: 'https://{address}', certificate-authority-data: {ca}}}}}]\n\
             users: [{{name: a, user: {{token: t}}}}]\n"
        )
    }

    #[test]
    fn an_api_server_that_sends_byte_by_byte_is_given_up() {
        for act in DRIPS {
            let server = Server::start(|_| {}, false, act);
            let config = kubeconfig(&server.endpoint.to_string(), &server.pem);
            let end = Instant::now() + Duration::from_secs(1);
            let unlisted = gathered(&config, Duration::from_secs(1));
            assert_eq!(unlisted.cause, ListFailure::NoConnection, "{act:?}");
            // otherwise it would take a quarter of an hour or more
            support::promptly::assert_no_wait(end, Duration::from_secs(3));
        }
    }

    #[test]
    fn each_reason_why_nodes_cannot_be_listed_is_told_from_the_others() {
        let other = Server::start(|_| {}, false, Act::Answer(b""));
        for (answer, expected) in [
            (
                "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
                ListFailure::Credentials,
            ),
            (
                "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
                ListFailure::Rights,
            ),
            (
                "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
                ListFailure::Refused,
            ),
        ] {
            let server = Server::start(|_| {}, false, Act::Answer(answer.as_bytes()));
            let address = server.endpoint.to_string();
            let time = Duration::from_secs(20);
            let unlisted = gathered(&kubeconfig(&address, &server.pem), time);
            assert_eq!(unlisted.cause, expected, "{}", unlisted.error);
            assert_eq!(unlisted.known.authorities.len(), 1);
        }
        let started = Instant::now();
        let server = Server::start(|_| {}, false, Act::Answer(b""));
        let config = kubeconfig(&server.endpoint.to_string(), &other.pem);
        let unlisted = gathered(&config, Duration::from_secs(300));
        assert_eq!(
            unlisted.cause,
            ListFailure::Certificate,
            "{}",
            unlisted.error
        );
        // it is not tried until the deadline
        support::promptly::assert_no_wait(started, Duration::from_secs(10));
        let unlisted = gathered("a: b: c", Duration::from_secs(1));
        assert_eq!(
            unlisted.cause,
            ListFailure::Kubeconfig,
            "{}",
            unlisted.error
        );
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let _ = std::io::Write::write_all(&mut socket, b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
        let unlisted = gathered(&kubeconfig(&address, &other.pem), Duration::from_secs(2));
        assert_eq!(unlisted.cause, ListFailure::NoTls, "{}", unlisted.error);
        let unlisted = gathered(
            &kubeconfig("127.0.0.1:9", &other.pem),
            Duration::from_secs(1),
        );
        assert_eq!(
            unlisted.cause,
            ListFailure::NoConnection,
            "{}",
            unlisted.error
        );
    }
}
