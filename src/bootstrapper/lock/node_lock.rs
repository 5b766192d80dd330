//! The node lock: the point of no return between a fresh VM and a member of a cluster.
//!
//! ```text
//!   unlocked ── lock(cluster ID): PCR 15 is extended and read back ──► locked        (there is no way back but a reboot)
//! ```
//!
//! InitServer and JoinClient compete for the lock. The one that takes it owns the node's set-up;
//! the other learns that the lock is taken. The TPM keeps the lock after this process has ended: a
//! node whose PCR 15 is not zero never passes attestation as a fresh one.

use std::fmt;

use base::crypto::CLUSTER_ID_LEN;
use base::sync::{Mutex, lock};

/// The node lock; a process has only one.
pub struct NodeLock {
    tpm: tpm::Location,
    state: Mutex<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unlocked,
    Locked([u8; CLUSTER_ID_LEN]),
    /// The TPM failed during the extend operation: the value of the PCR is unknown.
    Broken,
}

/// How a [`NodeLock::lock`] ended.
#[derive(Debug)]
pub enum Locking {
    /// The caller has the lock now.
    Taken,
    /// The lock was taken before, for the cluster with this ID.
    Already([u8; CLUSTER_ID_LEN]),
    /// The TPM failed; the node cannot be used until it reboots.
    Failed(Error),
}

/// Why the lock was not taken.
#[derive(Debug)]
pub enum Error {
    /// An earlier attempt failed.
    Broken,
    /// Another program has measured into PCR 15: which one, and what to do.
    ForeignWriter(String),
    /// The TPM failed.
    Tpm(tpm::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Broken => {
                f.write_str("an earlier attempt to take the node lock failed; reboot the node")
            }
            Error::ForeignWriter(writer) => f.write_str(writer),
            Error::Tpm(error) => error.fmt(f),
        }
    }
}

impl NodeLock {
    /// Creates the lock of a node that no cluster has locked, with the TPM at `tpm`.
    pub fn new(tpm: tpm::Location) -> NodeLock {
        NodeLock {
            tpm,
            state: Mutex::new(State::Unlocked),
        }
    }

    /// Returns the ID of the cluster for which the lock was taken; `None` before that.
    pub fn cluster(&self) -> Option<[u8; CLUSTER_ID_LEN]> {
        match *lock(&self.state) {
            State::Locked(id) => Some(id),
            State::Unlocked | State::Broken => None,
        }
    }

    /// Takes the lock for a cluster: measures its ID into PCR 15 and reads the register back. A
    /// machine without a TPM has another register in its place.
    pub fn lock(&self, cluster_id: [u8; CLUSTER_ID_LEN]) -> Locking {
        let mut state = lock(&self.state);
        match *state {
            State::Locked(id) => Locking::Already(id),
            State::Broken => Locking::Failed(Error::Broken),
            State::Unlocked => match attest::mark(&self.tpm, &cluster_id) {
                Ok(()) => {
                    *state = State::Locked(cluster_id);
                    Locking::Taken
                }
                Err(error) => {
                    *state = State::Broken;
                    let writer = attest::foreign_writer(&self.tpm);
                    Locking::Failed(writer.map_or(Error::Tpm(error), Error::ForeignWriter))
                }
            },
        }
    }
}
