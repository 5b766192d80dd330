//! Machines whose cloud keeps the attestation key at a persistent handle of the TPM, and whose instance info stays the same until they
//! reboot.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::hcl::KEY_HANDLE;
use super::vtpm::{self, Machine};
use super::{IssueError, KeyName, Oid};
use crate::tpm::{self, KeySource, Tpm};

/// Pause before what is missing is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Where the instance info of a variant comes from.
pub trait Source: Send + Sync {
    /// The instance info.
    type Info: Clone + Serialize + Send;
    /// The OID of the variant.
    const OID: Oid;
    /// Returns the instance info, and whether it is complete: if not, it is asked for again.
    fn info(&self, location: &tpm::Location) -> Result<(Self::Info, bool), IssueError>;
    /// Adds what changes while the machine runs.
    fn add_present(&self, _info: &mut Self::Info) {}
}

/// A machine that keeps its instance info.
pub struct Prepared<S: Source> {
    source: S,
    known: Mutex<Option<Known<S::Info>>>,
}

struct Known<T> {
    info: T,
    /// When it is asked for again, if it is not complete.
    ask_again: Option<Instant>,
}

impl<S: Source> Prepared<S> {
    /// Makes a machine with this source.
    pub fn new(source: S) -> Prepared<S> {
        Prepared {
            source,
            known: Mutex::default(),
        }
    }
}

impl<S: Source> Machine for Prepared<S> {
    fn oid(&self) -> Oid {
        S::OID
    }

    fn key_source(&self) -> KeySource {
        KeySource::Persistent(KEY_HANDLE)
    }

    fn prepare(&self, location: &tpm::Location) -> Result<(), IssueError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = |known: &Known<_>| known.ask_again.is_some_and(|at| at <= Instant::now());
        if known.as_ref().is_none_or(is_due) {
            let (info, is_complete) = self.source.info(location)?;
            let ask_again = (!is_complete).then(|| Instant::now() + ASK_AGAIN);
            *known = Some(Known { info, ask_again });
        }
        Ok(())
    }

    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut info) = known.as_ref().map(|known| known.info.clone()) else {
            return Ok(None);
        };
        self.source.add_present(&mut info);
        serde_json::to_vec(&info)
            .map(Some)
            .map_err(|error| IssueError(error.to_string()))
    }
}

/// Returns the Name of the attestation key of this machine.
pub fn key_name(location: &tpm::Location) -> Result<KeyName, tpm::Error> {
    vtpm::key_name(location, KeySource::Persistent(KEY_HANDLE))
}
