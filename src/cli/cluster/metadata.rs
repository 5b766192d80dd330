//! `firstlight metadata serve`: serves a list of machines to all of them over HTTP, in the form of
//! [`cloud::qemu`]. The list is a file, or the Machines of Cluster API.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::machines::Instance;
use base::sync::lock;
use cloud::{Machines, Problem};
use cloud_api::listed;
use http::server::{HttpServer, ServedResponse, ServerLimits, TIME};
use serde_json::{Value, json};
use sys::signal::StopSignals;

use crate::cluster::cluster_api::ClusterApi;
use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use crate::workspace::kubeconfig;
use clap::Args;

/// How long the answer of a management cluster is used.
const FRESH: Duration = Duration::from_secs(2);
/// Enough for a rack of machines that all boot at once; each sends a few requests.
const LIMITS: ServerLimits = ServerLimits {
    connections: 128,
    of_peer: 4,
    time: TIME,
};

/// Serve a list of machines as their metadata service
///
/// For machines without a cloud, as in a rack or on a host with QEMU: each machine asks this server for its name and
/// role, and the server recognizes it by its address. The nodes' settings are `cloud-provider=qemu` and
/// `metadata=http://ADDRESS:PORT`. docs/metadata.md describes the list and the requests. Without a server, the same
/// list can be a part of the image (`cloud-provider=static`).
///
/// The list is read again for each request. If it is not valid, the last valid one stays in use.
///
/// With --cluster the machines are those of a Cluster of Cluster API (v1.11 or later) that have an address and a
/// provider ID. The kubeconfig must permit to get this Cluster and to list Machines. docs/day-two/cluster-api.md
/// describes the use.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight metadata serve --machines machines.json --listen 10.42.0.1:8080
  firstlight metadata serve --cluster example --kubeconfig management.conf --listen 10.42.0.1:8080")]
pub(crate) struct CommandLine {
    /// The only action
    #[arg(value_parser = ["serve"])]
    action: String,
    /// The list of machines (JSON)
    #[arg(long, value_name = "FILE")]
    machines: Option<PathBuf>,
    /// Instead of --machines: the Cluster of Cluster API whose Machines are the list
    #[arg(
        long,
        value_name = "NAME",
        conflicts_with = "machines",
        required_unless_present = "machines"
    )]
    cluster: Option<String>,
    /// With --cluster: its namespace
    #[arg(
        long,
        value_name = "NAME",
        default_value = "default",
        requires = "cluster"
    )]
    namespace: String,
    /// With --cluster: the kubeconfig of the management cluster; without it $KUBECONFIG, as for kubectl
    #[arg(long, value_name = "FILE", requires = "cluster")]
    kubeconfig: Option<PathBuf>,
    /// With --cluster: the hash that the machine needs which `firstlight init` will initialize
    #[arg(long, value_name = "HASH", requires = "cluster")]
    init_secret_hash: Option<String>,
    /// The address of the server, in the network of the machines; *:PORT: all of this machine, of IPv6 and IPv4
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "*:8080", value_parser = http::server::parse_listen)]
    listen: SocketAddr,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let source = match (self.machines, self.cluster) {
            (Some(file), _) => Source::File(file),
            (None, cluster) => {
                let file = self.kubeconfig.map(|it| vec![it]);
                let files = file.unwrap_or_else(kubeconfig::of_environment);
                if files.is_empty() {
                    return Err(Error::Usage(
                        "--cluster needs --kubeconfig: a kubeconfig of the management cluster"
                            .into(),
                    ));
                }
                Source::Cluster(ClusterApi::new(
                    kubeconfig::read_config(&files)?,
                    self.namespace,
                    cluster.unwrap_or_default(),
                    self.init_secret_hash,
                ))
            }
        };
        Ok(Options {
            source,
            listen: self.listen,
        })
    }
}

/// The options of the command line.
pub struct Options {
    source: Source,
    /// The address of the server.
    listen: SocketAddr,
}

/// Where the list is.
enum Source {
    File(PathBuf),
    Cluster(ClusterApi),
}

impl Source {
    /// Reads the list.
    fn read(&self) -> Result<Machines, Error> {
        match self {
            Source::File(path) => read(path),
            Source::Cluster(cluster) => cluster.machines(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::File(path) => path.display().fmt(f),
            Source::Cluster(cluster) => cluster.fmt(f),
        }
    }
}

/// The last valid list.
struct Known {
    source: Source,
    /// `None` until a management cluster has answered with a valid list.
    valid: Option<Machines>,
    /// When the management cluster was asked.
    asked: Option<Instant>,
}

impl Known {
    /// Returns the list after a look at its source.
    fn current(&mut self) -> Option<Machines> {
        let is_fresh = self.asked.is_some_and(|asked| asked.elapsed() < FRESH);
        if !is_fresh {
            match (self.source.read(), &self.valid) {
                (Ok(list), _) => self.valid = Some(list),
                (Err(error), Some(_)) => {
                    log::error!(
                        "cannot use the new list of machines, so the last valid one is served: {error}"
                    )
                }
                (Err(error), None) => log::error!("no list of machines yet: {error}"),
            }
            let asks = matches!(self.source, Source::Cluster(_));
            self.asked = asks.then(Instant::now);
        }
        self.valid.clone()
    }
}

/// Runs the command until SIGTERM or SIGINT.
pub fn run(options: Options) -> Result<(), Error> {
    let signals = StopSignals::block().map_err(Error::failed)?;
    let name = options.source.to_string();
    let server = serve(options)?;
    crate::shell::output::say(format_args!(
        "the metadata of {name} is on http://{}",
        server.local_addr()
    ))?;
    signals.wait().map_err(Error::failed)?;
    Ok(())
}

/// Starts the server. A file must be valid at the start. A Cluster has no machines before its provider has made some of them.
fn serve(options: Options) -> Result<HttpServer, Error> {
    let Options { source, listen } = options;
    let valid = match &source {
        Source::File(_) => Some(source.read()?),
        Source::Cluster(_) => None,
    };
    let known = Mutex::new(Known {
        source,
        valid,
        asked: None,
    });
    let pages = move |page: &str, peer: IpAddr| {
        let list = lock(&known).current();
        let Some(list) = list else {
            return ServedResponse::status("503 Service Unavailable");
        };
        answer(&list, page, peer).unwrap_or_else(|| ServedResponse::status("404 Not Found"))
    };
    HttpServer::start("metadata", listen, LIMITS, pages)
        .map_err(|error| Error::failed(format!("cannot listen on {listen}: {error}")))
}

fn read(path: &Path) -> Result<Machines, Error> {
    let json = files::read(path)?;
    let wrong = |error: Problem| FileError::Content(path.into(), error.to_string());
    let machines = Machines::parse(&json).map_err(wrong)?;
    listed::init_secret_hash(&machines).map_err(wrong)?;
    Ok(machines)
}

/// Returns the answer to a request; `None` if there is none, such as `/self` for a machine that is
/// not on the list.
fn answer(list: &Machines, target: &str, peer: IpAddr) -> Option<ServedResponse> {
    let json = |value: Value| ServedResponse::ok("application/json", value.to_string());
    match target.split('?').next()? {
        "/self" => {
            let own = listed::at(list, &[peer.to_canonical()]);
            own.inspect_err(|error| log::warn!("cannot answer {peer}: {error}"))
                .ok()
                .map(|own| json(wire(&own)))
        }
        "/peers" => Some(json(listed::instances(list).iter().map(wire).collect())),
        "/endpoint" => Some(json(list.endpoint().into())),
        "/initsecrethash" => text(&list.init_secret_hash),
        "/timeservers" => text(&list.time_servers),
        _ => None,
    }
}

fn text(text: &Option<String>) -> Option<ServedResponse> {
    let text = text.as_ref()?.as_str();
    Some(ServedResponse::ok("text/plain; charset=utf-8", text.into()))
}

fn wire(instance: &Instance) -> Value {
    json!({
        "Name": instance.name,
        "ProviderID": instance.provider_id,
        "Role": instance.role.to_string(),
        "VPCIP": instance.vpc_ip.map(|address| address.to_string()).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::machines::Cloud;

    const LIST: &str = r#"{"endpoint":"cluster.example","initSecretHash":"$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy",
        "machines":[{"name":"control-plane-0","role":"control-plane","address":"127.0.0.1"},
                    {"name":"worker-0","role":"worker","address":"127.0.0.2"}]}"#;

    /// The client of a node reads what this server writes.
    #[test]
    fn a_node_learns_from_the_server_what_it_would_learn_from_the_list() {
        let folder = tempfile::tempdir().unwrap();
        let machines = folder.path().join("machines.json");
        std::fs::write(&machines, LIST).unwrap();
        let options = Options {
            source: Source::File(machines.clone()),
            listen: "127.0.0.1:0".parse().unwrap(),
        };
        let server = serve(options).unwrap_or_else(|error| panic!("{error:?}"));
        let url = format!("http://{}", server.local_addr());
        let node = cloud_api::metadata(Cloud::named("qemu").unwrap(), Some(&url)).unwrap();
        let expected = Machines::parse(LIST.as_bytes()).unwrap();
        let own = node.own_instance().unwrap();
        assert_eq!(own.name, "control-plane-0");
        assert_eq!(node.peers().unwrap(), listed::instances(&expected));
        assert_eq!(node.load_balancer_endpoint().unwrap(), "cluster.example");
        assert_eq!(
            Some(node.init_secret_hash().unwrap()),
            expected.init_secret_hash
        );
        assert_eq!(node.time_servers().unwrap(), None);
        let named = LIST.replacen('{', r#"{"timeServers":"nts:time.example","#, 1);
        std::fs::write(&machines, named).unwrap();
        let servers = node.time_servers().unwrap();
        assert_eq!(servers.as_deref(), Some("nts:time.example"));
        // a change is served at once; an invalid list changes nothing
        std::fs::write(&machines, LIST.replace("cluster.example", "other.example")).unwrap();
        assert_eq!(node.load_balancer_endpoint().unwrap(), "other.example");
        std::fs::write(&machines, "{").unwrap();
        assert_eq!(node.load_balancer_endpoint().unwrap(), "other.example");
        // the server tells a machine that it is not on the list
        let stranger = LIST.replace("127.0.0.1", "127.0.0.3");
        std::fs::write(&machines, stranger).unwrap();
        let refused = node.own_instance().unwrap_err().to_string();
        assert!(refused.contains("404"), "{refused}");
    }

    #[test]
    fn a_list_that_is_wrong_at_the_start_is_an_error() {
        let options = Options {
            source: Source::File("/nonexistent".into()),
            listen: "127.0.0.1:0".parse().unwrap(),
        };
        assert!(serve(options).is_err());
    }
}
