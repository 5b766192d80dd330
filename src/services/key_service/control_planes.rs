//! Which nodes are control planes, by the join service's records ([`MachineRecord`]).
//!
//! The join service may have the key of each state disk, so its token is accepted only from a node
//! whose record says that it is a control plane; so is that of the member controller. The token names the node. The label
//! `node-role.kubernetes.io/control-plane`, which decides where the pods of the join service run,
//! proves nothing: each account that may patch the status of Nodes can write it.
//!
//! A list of the records is used for [`LIFETIME`]. For a node that it does not contain, the records
//! are listed again, because a control plane may just have joined.
//!
//! While the API server does not answer, a node in the last list stays a control plane for
//! [`OFFLINE_LIFETIME`], like an accepted token ([`super::tokens`]): a cluster that restarts needs
//! keys before the API server answers.
//!
//! A record that is `refused` does not change the answer. A control plane has the master secret for
//! its own key service, so nothing would stay secret from it. But if the records of all control
//! planes were refused by mistake, no member controller could get the measurement secret, with which it
//! asks nodes for the evidence that ends a refusal.
//!
//! [`MachineRecord`]: kubernetes::machine_record::MachineRecord

use base::sync::{lock, wait_timeout};
use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::tokens::{LIFETIME, OFFLINE_LIFETIME, RETRY_INTERVAL};
use kubernetes::client::Client;
use kubernetes::machine_record;
use rpc::grpc::{Code, Status};

/// The timeout of one page of a list with its retries, and of waiting for another request's list.
/// Clients wait for 5 s, of which the review of the token may take 3 s.
const TIME: Duration = Duration::from_secs(1);
/// How often the records are listed for nodes that the last list does not contain.
const MISS_INTERVAL: Duration = Duration::from_secs(1);

/// Lists the control planes by their records.
pub struct ControlPlaneList {
    client: Client,
    state: Mutex<State>,
    /// Notified when a list ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    last: Option<List>,
    /// Whether a request is reading the next list.
    is_pending: bool,
    /// Whether the API server did not answer the last request.
    has_failed: bool,
    /// When the next list may begin, for a node that the last one does not contain.
    next: Option<Instant>,
}

/// A list that was read.
struct List {
    nodes: HashSet<String>,
    read: Instant,
}

impl ControlPlaneList {
    /// Creates a client of the API server. It needs permission to list the ConfigMaps of
    /// kube-system.
    pub fn new(client: &Client) -> ControlPlaneList {
        ControlPlaneList {
            client: client.within(TIME),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Refuses a node unless a record says that it is a control plane.
    pub fn refuse_other(&self, node: &str) -> Result<(), Status> {
        let deadline = Instant::now() + TIME;
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let is_current = |list: &List| now.duration_since(list.read) < LIFETIME;
            if state.last.as_ref().is_some_and(is_current) && state.contains(node) {
                return Ok(());
            }
            if !state.is_pending {
                break;
            }
            let left = deadline.saturating_duration_since(now);
            if left.is_zero() {
                return state.verdict(node, now);
            }
            state = wait_timeout(&self.changed, state, left);
        }
        let now = Instant::now();
        if state.next.is_some_and(|next| now < next) {
            return state.verdict(node, now);
        }
        state.is_pending = true;
        drop(state);
        // The destructor also runs after a panic, so that no request waits for this list for ever.
        let mut pending = Pending {
            planes: self,
            list: None,
        };
        match machine_record::of_nodes(&self.client) {
            Ok(records) => {
                let planes = records.into_iter().filter(|record| record.control_plane);
                pending.list = Some(List {
                    nodes: planes.map(|record| record.node).collect(),
                    read: now,
                });
            }
            Err(error) => log::error!("cannot list the records of control planes: {error}"),
        }
        drop(pending);
        self.lock().verdict(node, Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// A running list. Its end notifies the waiting requests.
struct Pending<'a> {
    planes: &'a ControlPlaneList,
    list: Option<List>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let list = self.list.take();
        self.planes.lock().end(list, Instant::now());
        self.planes.changed.notify_all();
    }
}

impl State {
    /// Stores a list; `None` if the API server did not answer.
    fn end(&mut self, list: Option<List>, now: Instant) {
        self.is_pending = false;
        self.has_failed = list.is_none();
        let pause = match list {
            Some(_) => MISS_INTERVAL,
            None => RETRY_INTERVAL,
        };
        self.next = Some(now + pause);
        if let Some(list) = list {
            self.last = Some(list);
        }
    }

    fn contains(&self, node: &str) -> bool {
        let last = self.last.as_ref();
        last.is_some_and(|list| list.nodes.contains(node))
    }

    /// Returns what the last list says.
    fn verdict(&self, node: &str, now: Instant) -> Result<(), Status> {
        let last = self.last.as_ref();
        let is_known = last.is_some_and(|list| now.duration_since(list.read) < OFFLINE_LIFETIME);
        match is_known && self.contains(node) {
            true => Ok(()),
            false if self.has_failed || !is_known => Err(Status::new(
                Code::Unavailable,
                format!("cannot check at the moment whether {node} is a control plane: try again"),
            )),
            false => Err(Status::new(
                Code::PermissionDenied,
                format!(
                    "no record says that {node} is a control plane: firstlight apply writes the records of control planes"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_list_stays_valid_for_a_day_while_the_api_server_is_down() {
        let (mut state, start) = (State::default(), Instant::now());
        let code = |state: &State, node: &str, now| {
            let verdict = state.verdict(node, now);
            verdict.map_err(|status| status.code()).err()
        };
        assert_eq!(code(&state, "plane", start), Some(Code::Unavailable));
        let list = List {
            nodes: ["plane".to_owned()].into(),
            read: start,
        };
        state.end(Some(list), start);
        assert_eq!(code(&state, "plane", start), None);
        assert_eq!(code(&state, "worker", start), Some(Code::PermissionDenied));
        let later = start + LIFETIME;
        state.end(None, later);
        assert_eq!(code(&state, "plane", later), None);
        // it may have joined since
        assert_eq!(code(&state, "worker", later), Some(Code::Unavailable));
        let end = start + OFFLINE_LIFETIME;
        assert_eq!(code(&state, "plane", end), Some(Code::Unavailable));
    }

    #[test]
    fn a_list_that_was_read_replaces_the_one_before() {
        let (mut state, now) = (State::default(), Instant::now());
        for nodes in [["a".to_owned()], ["b".to_owned()]] {
            let (nodes, read) = (nodes.into(), now);
            state.end(Some(List { nodes, read }), now);
        }
        let refused = state.verdict("a", now).unwrap_err();
        assert_eq!(
            refused.message(),
            "no record says that a is a control plane: firstlight apply writes the records of control planes"
        );
        assert!(state.verdict("b", now).is_ok());
    }
}
