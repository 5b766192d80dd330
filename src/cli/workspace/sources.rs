//! The sources of AMD's chip certificates and Intel's collateral: the same for all validators of a
//! command.

use std::sync::{Arc, OnceLock};

use collateral::{Fetching, Flags, Kept};
use verifier::sources::{self, Sources};

use crate::shell::{error::Error, usage::Given};
use base::options::Opt;

/// Where fetched items are kept.
pub const KEPT: Opt = Opt::value(
    "collateral",
    "FILE",
    "a folder that keeps fetched certificates of chips and collateral of platforms, or a file of collateral (.json)",
);

/// Whether nothing is fetched.
pub const OFFLINE: Opt = Opt::flag(
    "offline",
    "fetch no certificates or collateral: the machine must send them, or --collateral has them; ask no cloud about a machine",
);

/// The options of the command line.
static GIVEN: OnceLock<Arc<Fetching>> = OnceLock::new();

/// Sets the sources by the options of the command. Without options, AMD's and Intel's own servers
/// are used.
pub fn set(given: &Given) -> Result<(), Error> {
    let mut flags = Flags::default();
    for (option, set) in collateral::OPTIONS {
        if given.has(option.name) && option.name != KEPT.name {
            set(
                &mut flags,
                option.name,
                given.value(option.name).unwrap_or_default(),
            )?;
        }
    }
    let mut settings = flags.finish(|| None)?;
    if given.has("collateral") {
        settings.kept = Kept::at(given.value("collateral").unwrap_or_default().as_ref());
    }
    if given.has("offline") {
        (settings.kds, settings.pcs, settings.issuers) = (None, None, None);
        (settings.ec2, settings.maa) = (None, None);
    }
    let fetching = Fetching::new(settings).map_err(Error::failed)?;
    // a process runs one command, so nothing was set before
    let _ = GIVEN.set(fetching);
    Ok(())
}

/// Returns the same sources, but without cloud APIs; those are only asked about machines that
/// passed all other checks.
pub fn without_words() -> Arc<dyn Sources> {
    match GIVEN.get() {
        Some(given) => Arc::new(given.without_words()),
        None => sources::offline(),
    }
}

/// Returns the sources; before [`set`], sources without a network.
pub fn sources() -> Arc<dyn Sources> {
    match GIVEN.get() {
        Some(given) => given.clone(),
        None => sources::offline(),
    }
}
