//! The machines in the cluster's network with their addresses and roles, from the cloud's metadata
//! service.
//!
//! The list is fetched again when it is some seconds old, and once more when a name is missing in
//! it, because the machine may be newer than the list. If the list cannot be fetched, an old list
//! is not used: it could still contain a deleted machine.

use base::sync::lock;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::known_machines::KnownMachines;
use super::refusal::TicketRefusal;
use cloud_api::Service;
use kubernetes::parameters::NodeName;

/// The maximum age of a list.
const MAX_AGE: Duration = Duration::from_secs(5);
/// The minimum age of a list before it is fetched again because a name is missing in it.
const MIN_AGE: Duration = Duration::from_secs(1);

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
    /// Creates the list from this metadata service.
    pub fn new(metadata: Option<Arc<dyn Service>>) -> Instances {
        Instances {
            metadata,
            list: Mutex::default(),
            aliases: Mutex::default(),
        }
    }

    /// Returns the cluster's machines, `None` without a metadata service. The list is recent, and new if it
    /// lacks this node.
    pub fn listed(&self, node: &str) -> Option<Result<Arc<KnownMachines>, TicketRefusal>> {
        let metadata = self.metadata.as_deref()?;
        let list = self.list(metadata, MAX_AGE);
        let lacks_it = list.as_ref().is_ok_and(|list| list.get(node).is_none());
        Some(if lacks_it {
            self.list(metadata, MIN_AGE)
        } else {
            list
        })
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
