//! Which machines there are in the cluster's network, with which addresses and for what: what the cloud says of who asks.
//!
//! Attestation says what a machine runs, not which of the cloud's machines it is: that is told by the address from which it
//! comes, which in a cloud's network nobody else can have. A load balancer may hide it; then a machine can become a worker,
//! which gets nothing that is not any worker's, and a control plane comes directly.
//!
//! The list is asked for anew when it is some seconds old, and once more when a name is missing in it, since a machine may be
//! faster than the cloud's list. What cannot be had is no list of before: a machine that is gone must not linger in it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::refusal::Refusal;
use super::request::Asked;
use cloud::{Instance, Metadata, Role};
use kubernetes::parameters::NodeName;

/// How long a list counts.
const AGE: Duration = Duration::from_secs(5);
/// A list that was asked for a moment ago is not asked for again, whoever is missing in it.
const LEAST_AGE: Duration = Duration::from_secs(1);
/// When a control plane may come by a load balancer again: when that has become one that does not hide who calls.
const NOT_DIRECT: Duration = Duration::from_secs(60);

/// The cloud's list of machines.
pub struct Instances {
    metadata: Option<Metadata>,
    /// Held while the service is asked: who comes meanwhile wants the same answer.
    list: Mutex<Option<Kept>>,
}

/// By the names of their nodes.
type List = HashMap<String, Instance>;
/// What came of the last question, and when.
type Kept = (Instant, Result<Arc<List>, Refusal>);

impl Instances {
    /// Of this service. Without one there are only workers, of any name, but of the address from which they come.
    pub fn new(metadata: Option<Metadata>) -> Instances {
        Instances {
            metadata,
            list: Mutex::default(),
        }
    }

    /// Whether the machine that asks, from address `peer`, may have this name, these addresses, and this role; whether the cloud
    /// says that it is that machine, and not only that there is one.
    pub fn check(&self, asked: &Asked, peer: Option<IpAddr>) -> Result<bool, Refusal> {
        let name = asked.node();
        // an IPv4 caller of a socket for both families
        let peer = peer.map(|peer| peer.to_canonical());
        let Some(metadata) = &self.metadata else {
            return check_unlisted(asked, peer).map(|()| false);
        };
        let mut list = self.list(metadata, AGE)?;
        if !list.contains_key(name) {
            list = self.list(metadata, LEAST_AGE)?;
        }
        let instance = list.get(name).ok_or_else(|| {
            let message = format!(
                "the cloud's metadata service knows no machine of this cluster named {name}"
            );
            Refusal::denied("unknown-machine", message)
        })?;
        check_instance(asked, instance)?;
        let is_it = is_direct(asked, instance, peer, &list)?;
        // so that nobody can pose as another node's sshd
        let others = |principal: &&String| {
            list.iter()
                .any(|(other, one)| other != name && is_of(principal, other, one))
        };
        match asked.principals.iter().find(others) {
            None => Ok(is_it),
            Some(other) => {
                let message = format!(
                    "host_certificate_principals: {other} is another machine of this cluster"
                );
                Err(Refusal::denied("principal-of-other", message))
            }
        }
    }

    /// The address of the machine that is the node of this name: `None` without a metadata service, which knows nothing;
    /// `Some(Ok(None))` where the cloud lists no such machine, or no address of it.
    pub fn address(&self, name: &str) -> Option<Result<Option<IpAddr>, Refusal>> {
        let metadata = self.metadata.as_ref()?;
        Some(
            self.list(metadata, AGE)
                .map(|list| list.get(name).and_then(|instance| instance.vpc_ip)),
        )
    }

    fn list(&self, metadata: &Metadata, age: Duration) -> Result<Arc<List>, Refusal> {
        let mut kept = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        // a failure is kept too: those that wait here would each wait as long for another one
        if let Some((at, list)) = &*kept
            && at.elapsed() < if list.is_ok() { age } else { LEAST_AGE }
        {
            return list.clone();
        }
        let list = match metadata.peers() {
            Ok(instances) => {
                let named = instances.into_iter().filter_map(|instance| {
                    let name = NodeName::from_machine(&instance.name).ok()?;
                    Some((name.as_str().to_owned(), instance))
                });
                Ok(Arc::new(named.collect::<List>()))
            }
            Err(error) => {
                let message = "the cloud's metadata service does not answer: try again";
                Err(
                    Refusal::passing("metadata", message, Duration::from_secs(5))
                        .because(error.to_string()),
                )
            }
        };
        *kept = Some((Instant::now(), list.clone()));
        list
    }
}

/// Where no list says who there is.
fn check_unlisted(asked: &Asked, peer: Option<IpAddr>) -> Result<(), Refusal> {
    if asked.control_plane {
        return Err(Refusal::lacking(
            "role",
            "this join service lets in no control planes, since it has no metadata service that says which they are: start \
             it with --cloud-provider",
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
            Err(Refusal::denied("address", message))
        }
    }
}

/// Whether who calls is the machine of that name; not, where that cannot be told and need not.
fn is_direct(
    asked: &Asked,
    instance: &Instance,
    peer: Option<IpAddr>,
    list: &List,
) -> Result<bool, Refusal> {
    if peer.is_some() && peer == instance.vpc_ip {
        return Ok(true);
    }
    let name = asked.node();
    let other = list
        .iter()
        .find(|(_, one)| peer.is_some() && one.vpc_ip == peer);
    if let Some((other, _)) = other {
        let message = format!("the machine that calls has the address of {other}, not of {name}");
        return Err(Refusal::denied("machine-of-other", message));
    }
    // also what is less than its files: a certificate for the address of an API server
    if !asked.control_plane && instance.role != Role::ControlPlane {
        return Ok(false);
    }
    let address = instance
        .vpc_ip
        .map_or("an address that the cloud does not tell".into(), |ip| {
            ip.to_string()
        });
    let message = format!(
        "a control plane asks the join services themselves, from its own address ({address}), and not by way of a load balancer"
    );
    Err(Refusal::passing("not-direct", message, NOT_DIRECT))
}

fn check_instance(asked: &Asked, instance: &Instance) -> Result<(), Refusal> {
    let name = asked.node();
    if let Some(address) = asked
        .addresses()
        .iter()
        .find(|address| instance.vpc_ip != Some(**address))
    {
        let message = format!(
            "certificate_request: {address} is not the address of {name} in the cluster's network"
        );
        return Err(Refusal::denied("address", message));
    }
    if asked.control_plane && instance.role != Role::ControlPlane {
        let message = format!(
            "{name} is no control plane: its role in the cloud is {}",
            instance.role
        );
        return Err(Refusal::denied("role", message));
    }
    Ok(())
}

fn is_of(principal: &str, node: &str, instance: &Instance) -> bool {
    principal.eq_ignore_ascii_case(node)
        || principal.eq_ignore_ascii_case(&instance.name)
        || principal
            .parse::<IpAddr>()
            .is_ok_and(|address| instance.vpc_ip == Some(address))
}
