//! The machines in the cluster's network with their addresses and roles, from the cloud's metadata
//! service. The list shows whether a caller is the machine that it claims to be.
//!
//! Attestation proves what a machine runs, but not which machine of the cloud it is. The source
//! address tells that: in a cloud's network, no other machine can have it. A load balancer may hide
//! the address. A machine behind a load balancer can join only as a worker, which gets nothing but
//! what any worker gets. A control plane has to call directly.
//!
//! The list is fetched again when it is some seconds old, and once more when a name is missing in
//! it, because the machine may be newer than the list. If the list cannot be fetched, an old list
//! is not used: it could still contain a deleted machine.

use base::sync::lock;
use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::known_machines::KnownMachines;
use super::refusal::TicketRefusal;
use super::request::JoinRequest;
use base::machines::{Instance, Role};
use cloud_api::Service;
use kubernetes::parameters::NodeName;

/// The maximum age of a list.
const MAX_AGE: Duration = Duration::from_secs(5);
/// The minimum age of a list before it is fetched again because a name is missing in it.
const MIN_AGE: Duration = Duration::from_secs(1);
/// When a control plane that called through a load balancer may try again. By then the load
/// balancer may have been reconfigured to keep source addresses.
const NOT_DIRECT: Duration = Duration::from_secs(60);

/// The cloud's list of machines.
pub struct Instances {
    metadata: Option<Arc<dyn Service>>,
    /// Locked during a request to the metadata service: concurrent callers wait and use the same
    /// answer.
    list: Mutex<Cached>,
    /// The same with all further names and addresses.
    aliases: Mutex<Cached>,
}

/// The last answer of the metadata service, and when it arrived.
type Cached = Option<(Instant, Result<Arc<KnownMachines>, TicketRefusal>)>;

impl Instances {
    /// Creates the list from this metadata service. Without one, only workers are accepted: with
    /// any name, but only with their own source address.
    pub fn new(metadata: Option<Arc<dyn Service>>) -> Instances {
        Instances {
            metadata,
            list: Mutex::default(),
            aliases: Mutex::default(),
        }
    }

    /// Checks that the machine at address `peer` may have the name, addresses and role that it asks
    /// for. Returns whether the source address proves that it is that machine.
    pub fn check(&self, asked: &JoinRequest, peer: Option<IpAddr>) -> Result<bool, TicketRefusal> {
        let name = asked.node();
        // A dual-stack socket reports an IPv4 caller as an IPv4-mapped IPv6 address.
        let peer = peer.map(|peer| peer.to_canonical());
        let Some(metadata) = self.metadata.as_deref() else {
            return check_unlisted(asked, peer).map(|()| false);
        };
        let mut list = self.list(metadata, MAX_AGE)?;
        if list.get(name).is_none() {
            list = self.list(metadata, MIN_AGE)?;
        }
        let instance = list.get(name).ok_or_else(|| {
            let message = format!(
                "the cloud's metadata service knows no machine of this cluster named {name}"
            );
            TicketRefusal::denied("unknown-machine", message)
        })?;
        let instance = &instance.instance;
        check_instance(asked, instance)?;
        let is_it = is_direct(asked, instance, peer, &list)?;
        // No machine may get an SSH host certificate for another node.
        let others = |principal: &&String| list.other_with(principal, name).is_some();
        match asked.principals.iter().find(others) {
            None => Ok(is_it),
            Some(other) => {
                let message = format!(
                    "host_certificate_principals: {other} is another machine of this cluster"
                );
                Err(TicketRefusal::denied("principal-of-other", message))
            }
        }
    }

    /// Returns the cluster's machines with all names and addresses: `None` without a metadata service.
    pub fn aliases(&self) -> Option<Result<Arc<KnownMachines>, TicketRefusal>> {
        let metadata = self.metadata.as_deref()?;
        // the list of machines says which of them belong to the cluster
        let fetch = || Ok(KnownMachines::new(metadata.peers()?, metadata.aliases()?));
        Some(cached(&self.aliases, MAX_AGE, &fetch))
    }

    /// Returns the names of the nodes of all machines that the cloud has, running or not: `None`
    /// without a metadata service. Asks the service each time.
    pub fn existing(&self) -> Option<Result<HashSet<String>, base::machines::Error>> {
        let metadata = self.metadata.as_deref()?;
        let fetch = || {
            let running = metadata.peers()?.into_iter().map(|peer| peer.name);
            // this list also has the machines that do not run
            let all = metadata.aliases()?.into_iter().map(|alias| alias.machine);
            let names = running.chain(all).filter_map(|name| {
                let node = NodeName::from_machine(&name).ok()?;
                Some(node.as_str().to_owned())
            });
            Ok(names.collect())
        };
        Some(fetch())
    }

    fn list(
        &self,
        metadata: &dyn Service,
        age: Duration,
    ) -> Result<Arc<KnownMachines>, TicketRefusal> {
        let fetch = || Ok(KnownMachines::new(metadata.peers()?, vec![]));
        cached(&self.list, age, &fetch)
    }
}

/// Returns the last answer, or a new one if it is older than `age`.
fn cached(
    last: &Mutex<Cached>,
    age: Duration,
    fetch: &dyn Fn() -> Result<KnownMachines, base::machines::Error>,
) -> Result<Arc<KnownMachines>, TicketRefusal> {
    let mut last = lock(last);
    // A failure is cached too. Otherwise each waiting caller would wait for one more timeout.
    if let Some((at, answer)) = &*last
        && at.elapsed() < if answer.is_ok() { age } else { MIN_AGE }
    {
        return answer.clone();
    }
    let answer = fetch().map(Arc::new).map_err(|error| {
        let message = "the cloud's metadata service does not answer: try again";
        TicketRefusal::temporary("metadata", message, Duration::from_secs(5))
            .with_details(error.to_string())
    });
    *last = Some((Instant::now(), answer.clone()));
    answer
}

/// Checks a request if there is no list of machines.
fn check_unlisted(asked: &JoinRequest, peer: Option<IpAddr>) -> Result<(), TicketRefusal> {
    if asked.control_plane {
        return Err(TicketRefusal::missing(
            "role",
            "control planes cannot join: this join service has no metadata service that lists them; start it with \
             --cloud-provider",
        ));
    }
    match asked
        .addresses()
        .iter()
        .find(|address| Some(**address) != peer)
    {
        None => Ok(()),
        Some(address) => {
            let message = format!(
                "certificate_request: {address} is not the address from which this machine calls"
            );
            Err(TicketRefusal::denied("address", message))
        }
    }
}

/// Returns whether the caller has the address of the machine that it claims to be. Returns `false`
/// if the address is hidden by a load balancer and the request is for a worker.
fn is_direct(
    asked: &JoinRequest,
    instance: &Instance,
    peer: Option<IpAddr>,
    list: &KnownMachines,
) -> Result<bool, TicketRefusal> {
    if peer.is_some() && peer == instance.vpc_ip {
        return Ok(true);
    }
    let name = asked.node();
    if let Some(other) = peer.and_then(|peer| list.other_with_address(peer, name)) {
        let message = format!("the machine that calls has the address of {other}, not of {name}");
        return Err(TicketRefusal::denied("machine-of-other", message));
    }
    // The role of the cloud counts as well: a worker request of a control plane machine yields a
    // certificate for the address of an API server.
    if !asked.control_plane && instance.role != Role::ControlPlane {
        return Ok(false);
    }
    let address = instance.vpc_ip.map_or(
        "an address that the metadata service does not list".into(),
        |ip| ip.to_string(),
    );
    let message = format!(
        "a control plane has to call a join service directly from its own address ({address}), not through a load balancer"
    );
    Err(TicketRefusal::temporary("not-direct", message, NOT_DIRECT))
}

fn check_instance(asked: &JoinRequest, instance: &Instance) -> Result<(), TicketRefusal> {
    let name = asked.node();
    if let Some(address) = asked
        .addresses()
        .iter()
        .find(|address| instance.vpc_ip != Some(**address))
    {
        let message = format!(
            "certificate_request: {address} is not the address of {name} in the cluster's network"
        );
        return Err(TicketRefusal::denied("address", message));
    }
    if asked.control_plane && instance.role != Role::ControlPlane {
        let message = format!(
            "{name} is not a control plane: its role in the cloud is {}",
            instance.role
        );
        return Err(TicketRefusal::denied("role", message));
    }
    Ok(())
}
