//! The sources of AMD's chip certificates and Intel's collateral: the same for all validators of a
//! command.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use clap::Args;
use collateral::{FetchSettings, Fetching, Kept};
use verifier::sources::{self, Sources};

use crate::shell::error::Error;

/// Where certificates and collateral come from.
#[derive(Debug, Clone, Default, Args)]
pub struct SourceOptions {
    /// A folder that keeps fetched certificates of chips and collateral of platforms, or a file of collateral (.json)
    #[arg(long, value_name = "FILE")]
    collateral: Option<PathBuf>,
    /// Fetch no certificates or collateral: the machine must send them, or --collateral has them; ask no cloud about a machine
    #[arg(long)]
    offline: bool,
}

/// The sources of this process.
static GIVEN: OnceLock<Arc<Fetching>> = OnceLock::new();

impl SourceOptions {
    /// Sets the sources. Without options and with default settings, AMD's and Intel's own servers are used.
    pub fn set(&self, mut settings: FetchSettings) -> Result<(), Error> {
        if let Some(path) = &self.collateral {
            settings.kept = Kept::at(path);
        }
        if self.offline {
            (settings.kds, settings.pcs, settings.issuers) = (None, None, None);
            (settings.ec2, settings.maa) = (None, None);
        }
        // a process runs one command, so nothing was set before
        let _ = GIVEN.set(Fetching::new(settings).map_err(Error::failed)?);
        Ok(())
    }
}

/// Returns the same sources, but without cloud APIs; those are only asked about machines that
/// passed all other checks.
pub fn without_verdicts() -> Arc<dyn Sources> {
    match GIVEN.get() {
        Some(given) => Arc::new(given.without_verdicts()),
        None => sources::offline(),
    }
}

/// Returns the sources; before [`SourceOptions::set`], sources without a network.
pub fn sources() -> Arc<dyn Sources> {
    match GIVEN.get() {
        Some(given) => given.clone(),
        None => sources::offline(),
    }
}
