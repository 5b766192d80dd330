//! A cluster at one moment: what its API server has, what each node proves, and what the servers
//! of the nodes show. `firstlight status` prints it, and `firstlight doctor` judges it.

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use base::sync::lock;
use kubernetes::client::{self, Client, Config};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::inquiry::Inquiry;
use super::listed::{Listed, listed};
use super::objects::Objects;
use super::report::Report;
use super::served::{Asker, Served, ServedError, Validity};
use crate::connect::Endpoint;
use crate::error::Error;
use crate::kubeconfig;

/// The number of nodes that are asked at the same time.
pub const AT_ONCE: usize = 64;
/// Time limit of each list of objects.
const TIME_OF_LIST: Duration = Duration::from_secs(10);
/// The ports of a control plane whose pods name none.
const API_SERVER_PORT: u16 = 6443;
const ETCD_PORT: u16 = 2379;
/// The path that an API server answers to everybody: whether it is ready.
const READY: &str = "/readyz?verbose";
/// A path that a kubelet refuses to strangers, with its time.
const HEALTH: &str = "/healthz";

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
    pub report: Report,
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
}

impl NodeServers {
    /// Returns each server with its name for people.
    pub fn each(&self) -> [(&'static str, &Option<Result<Served, ServedError>>); 3] {
        [
            ("kubelet", &self.kubelet),
            ("API server", &self.api_server),
            ("etcd", &self.etcd),
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
pub enum Secrets {
    /// It does.
    Read,
    /// It does not.
    Skip,
}

/// Returns what the kubeconfigs say by themselves: the operator's certificate, and the authorities.
pub fn of_kubeconfigs(kubeconfigs: &[PathBuf]) -> Result<View, Error> {
    let config = Config::from_kubeconfig_files(kubeconfigs)?;
    Ok(View {
        server: config.server().to_owned(),
        operator: config.certificate().and_then(Validity::of),
        authorities: ends_of(config.authorities(), &Objects::default()),
        ..View::default()
    })
}

/// Asks the API server of the kubeconfigs and then all nodes.
pub fn gather(inquiry: &Inquiry, kubeconfigs: &[PathBuf], secrets: Secrets) -> Result<View, Error> {
    let known = of_kubeconfigs(kubeconfigs)?;
    let authorities = Config::from_kubeconfig_files(kubeconfigs)?;
    let authorities = authorities.authorities().to_vec();
    let client = kubeconfig::client(kubeconfigs)?;
    let client = || within(&client, inquiry.deadline);
    let nodes = listed(&client()).map_err(|error| unlisted(&error))?;
    let version = client().version().ok();
    // one list that hangs must not use up the time of all others
    let brief = || client().within(TIME_OF_LIST.min(left(inquiry.deadline)));
    let objects = Objects::read(&brief, secrets == Secrets::Read);
    let asker = Asker::new(&authorities);
    let mut nodes = ask_all(nodes, |node| {
        let servers = || ask_servers(&asker, &node, &objects, inquiry.deadline);
        let (report, servers) = thread::scope(|scope| {
            let servers = scope.spawn(servers);
            let report = match Endpoint::parse(&node.address, API_SERVER_PORT) {
                Ok(_) => inquiry.ask(&node.address),
                // one Node with such an address must not hide all others
                Err(_) => Ok(Report::silent(&node.address, inquiry.cluster)),
            };
            (report, servers.join().unwrap_or_default())
        });
        Ok(NodeView {
            listed: node,
            report: report?,
            servers,
        })
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
    match error.code().is_some() {
        true => Error::Refused(text),
        false => Error::Unreachable(text),
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
        NodeServers {
            kubelet: Some(ask(kubelet, Some(HEALTH))),
            api_server: api_server.join().unwrap_or_default(),
            etcd: etcd.join().unwrap_or_default(),
        }
    })
}
