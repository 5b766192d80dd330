//! Which machines there are in the cluster's network, with which addresses and for what: what the cloud says of who asks.
//!
//! The list is asked for anew when it is some seconds old, and once more when a name is missing in it, since a machine may be
//! faster than the cloud's list. What cannot be had is no list of before: a machine that is gone must not linger in it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::refusal::Refusal;
use super::request::Asked;
use crate::kubernetes::parameters::NodeName;
use crate::metadata::{Instance, Metadata, Role};

/// How long a list counts.
const AGE: Duration = Duration::from_secs(5);
/// A list that was asked for a moment ago is not asked for again, whoever is missing in it.
const LEAST_AGE: Duration = Duration::from_secs(1);

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
    /// Of this service. Without one there are only workers, of any name.
    pub fn new(metadata: Option<Metadata>) -> Instances {
        Instances { metadata, list: Mutex::default() }
    }

    /// Whether the machine that asks may have this name, these addresses, and this role.
    pub fn check(&self, asked: &Asked) -> Result<(), Refusal> {
        let name = asked.node();
        let Some(metadata) = &self.metadata else {
            return match asked.control_plane {
                false => Ok(()),
                true => Err(Refusal::lacking(
                    "role",
                    "this join service lets in no control planes, since it has no metadata service that says which they \
                     are: start it with --cloud-provider",
                )),
            };
        };
        let mut list = self.list(metadata, AGE)?;
        if !list.contains_key(name) {
            list = self.list(metadata, LEAST_AGE)?;
        }
        let instance = list.get(name).ok_or_else(|| {
            let message = format!("the cloud's metadata service knows no machine of this cluster named {name}");
            Refusal::denied("unknown-machine", message)
        })?;
        check_instance(asked, instance)?;
        // so that nobody can pose as another node's sshd
        let others =
            |principal: &&String| list.iter().any(|(other, one)| other != name && is_of(principal, other, one));
        match asked.principals.iter().find(others) {
            None => Ok(()),
            Some(other) => {
                let message = format!("host_certificate_principals: {other} is another machine of this cluster");
                Err(Refusal::denied("principal-of-other", message))
            }
        }
    }

    /// The address of the machine that is the node of this name: `None` without a metadata service, which knows nothing;
    /// `Some(Ok(None))` where the cloud lists no such machine, or no address of it.
    pub fn address(&self, name: &str) -> Option<Result<Option<IpAddr>, Refusal>> {
        let metadata = self.metadata.as_ref()?;
        Some(self.list(metadata, AGE).map(|list| list.get(name).and_then(|instance| instance.vpc_ip)))
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
                Err(Refusal::passing("metadata", message, Duration::from_secs(5)).because(error.to_string()))
            }
        };
        *kept = Some((Instant::now(), list.clone()));
        list
    }
}

fn check_instance(asked: &Asked, instance: &Instance) -> Result<(), Refusal> {
    let name = asked.node();
    if let Some(address) = asked.addresses().iter().find(|address| instance.vpc_ip != Some(**address)) {
        let message = format!("certificate_request: {address} is not the address of {name} in the cluster's network");
        return Err(Refusal::denied("address", message));
    }
    if asked.control_plane && instance.role != Role::ControlPlane {
        let message = format!("{name} is no control plane: its role in the cloud is {}", instance.role);
        return Err(Refusal::denied("role", message));
    }
    Ok(())
}

fn is_of(principal: &str, node: &str, instance: &Instance) -> bool {
    principal.eq_ignore_ascii_case(node)
        || principal.eq_ignore_ascii_case(&instance.name)
        || principal.parse::<IpAddr>().is_ok_and(|address| instance.vpc_ip == Some(address))
}
