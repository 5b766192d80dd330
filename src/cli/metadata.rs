//! `firstlight metadata serve`: serves a list of machines to all of them over HTTP, in the form of
//! [`cloud::qemu`].

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use base::sync::lock;
use cloud::{Machines, Problem};
use cloud_api::listed;
use machines::Instance;
use serde_json::{Value, json};
use sys::signal::StopSignals;
use web::{Answer, Limits, Server, TIME};

use super::error::Error;
use super::files::{self, FileError};
use super::usage::{Command, Given, Operand};
use base::options::Opt;

/// Enough for a rack of machines that all boot at once; each sends a few requests.
const LIMITS: Limits = Limits {
    connections: 128,
    of_peer: 4,
    time: TIME,
};

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "metadata",
    summary: "serve a list of machines as their metadata service",
    about: &[
        "For machines without a cloud, as in a rack or on a host with QEMU: each machine asks this server for its name and role, and \
         the server recognizes it by its address. The nodes' settings are `cloud-provider=qemu` and `metadata=http://ADDRESS:PORT`. \
         docs/metadata.md describes the list and the requests. Without a server, the same list can be a part of the image \
         (`cloud-provider=static`).",
        "The list is read again for each request. If it is not valid, the last valid one stays in use.",
    ],
    operand: Some(Operand {
        value: "serve",
        words: &["serve"],
        is_needed: true,
        help: "the only action",
    }),
    options: &[
        Opt::needed("machines", "FILE", "the list of machines (JSON)"),
        Opt::value(
            "listen",
            "ADDRESS:PORT",
            "the address of the server, in the network of the machines; *:PORT: all of this machine, of IPv6 and IPv4",
        )
        .or("*:8080"),
    ],
    examples: &["firstlight metadata serve --machines machines.json --listen 10.42.0.1:8080"],
    run: |given| run(&options(given)?),
};

fn options(given: &Given) -> Result<Options, Error> {
    match given.operand()?.as_str() {
        "serve" => Ok(Options {
            machines: given.path("machines"),
            listen: given.parsed("listen", web::parse_listen)?,
        }),
        other => Err(Error::Usage(format!("{other:?}: expected serve"))),
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The file with the list.
    pub machines: PathBuf,
    /// The address of the server.
    pub listen: SocketAddr,
}

/// Runs the command until SIGTERM or SIGINT.
pub fn run(options: &Options) -> Result<(), Error> {
    let signals = StopSignals::block().map_err(Error::failed)?;
    let server = serve(options)?;
    super::output::say(format_args!(
        "the metadata of {} is on http://{}",
        options.machines.display(),
        server.local_addr()
    ))?;
    signals.wait().map_err(Error::failed)?;
    Ok(())
}

/// Starts the server. It reads the list again for each request, and keeps the last valid one.
fn serve(options: &Options) -> Result<Server, Error> {
    let path = options.machines.clone();
    let valid = Mutex::new(read(&path)?);
    let pages = move |page: &str, peer: IpAddr| {
        let list = {
            let mut list = lock(&valid);
            match read(&path) {
                Ok(changed) => *list = changed,
                Err(error) => log::error!("the last valid list stays in use: {error}"),
            }
            list.clone()
        };
        answer(&list, page, peer).unwrap_or_else(|| Answer::status("404 Not Found"))
    };
    Server::start("metadata", options.listen, LIMITS, pages)
        .map_err(|error| Error::failed(format!("cannot listen on {}: {error}", options.listen)))
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
fn answer(list: &Machines, target: &str, peer: IpAddr) -> Option<Answer> {
    let json = |value: Value| Answer::ok("application/json", value.to_string());
    match target.split('?').next()? {
        "/self" => {
            let own = listed::at(list, &[peer.to_canonical()]);
            own.inspect_err(|error| log::warn!("{peer}: {error}"))
                .ok()
                .map(|own| json(wire(&own)))
        }
        "/peers" => Some(json(listed::instances(list).iter().map(wire).collect())),
        "/endpoint" => Some(json(list.endpoint().into())),
        "/initsecrethash" => list
            .init_secret_hash
            .as_ref()
            .map(|hash| Answer::ok("text/plain; charset=utf-8", hash.as_str().into())),
        _ => None,
    }
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
    use machines::Cloud;

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
            machines: machines.clone(),
            listen: "127.0.0.1:0".parse().unwrap(),
        };
        let server = serve(&options).unwrap_or_else(|error| panic!("{error:?}"));
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
            machines: "/nonexistent".into(),
            listen: "127.0.0.1:0".parse().unwrap(),
        };
        assert!(serve(&options).is_err());
    }
}
