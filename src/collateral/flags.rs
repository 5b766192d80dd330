//! The options of the services, and of the operator's command, that say where certificates and collateral come from.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use base::options::{Opt, Table, put};
use base::program::{Failure, parsed, text};
use kubernetes::client::Client;

use crate::{AMD, FetchSettings, INTEL, Kept};

/// The options. The chart passes each of them, and an empty value means that it is not set.
pub const OPTIONS: &Table<Flags> = &[
    (Opt::value("collateral", "WHERE", "the store for fetched certificates and collateral: a directory, a file of collateral (.json), or configmap:NAMESPACE/NAME [only in memory]"),
     |it, _, value| unless_empty(value, |value| it.keep(&value))),
    (Opt::value("kds", "URL", "AMD's key distribution service or a mirror of it; none to fetch nothing").or(AMD),
     |it, _, value| unless_empty(value, |value| put(&mut it.settings.kds, url(value)))),
    (Opt::value("pcs", "URL", "Intel's provisioning certification service or a caching service (PCCS); none to fetch nothing").or(INTEL),
     |it, _, value| unless_empty(value, |value| put(&mut it.settings.pcs, url(value)))),
    (Opt::value("tcb-update", "EVALUATION", "Intel's TCB evaluation to use").one_of(&["early", "standard"]).or("early"),
     |it, name, value| unless_empty(value, |value| put(&mut it.settings.update, parsed(name, value)))),
    (Opt::value("collateral-ca", "FILE", "the authorities of these servers' certificates, PEM [this machine's]"),
     |it, _, value| unless_empty(value, |value| put(&mut it.settings.ca, Ok(Some(value.into()))))),
];

/// The prefix of a ConfigMap.
const CONFIG_MAP: &str = "configmap:";

/// The options as the user gave them.
#[derive(Default)]
pub struct Flags {
    settings: FetchSettings,
    config_map: Option<(String, String)>,
}

impl Flags {
    fn keep(&mut self, place: &OsStr) -> Result<(), Failure> {
        let name = place.to_str().and_then(|it| it.strip_prefix(CONFIG_MAP));
        let Some(name) = name else {
            self.settings.kept = Kept::at(place.as_ref());
            return Ok(());
        };
        let parts = name.split_once('/').ok_or_else(|| {
            let text = format!("--collateral {CONFIG_MAP}{name}: expected NAMESPACE/NAME");
            Failure::Usage(text)
        })?;
        self.config_map = Some((parts.0.into(), parts.1.into()));
        Ok(())
    }

    /// Returns the settings. `client` makes the client of Kubernetes that a ConfigMap needs.
    pub fn finish(self, client: impl FnOnce() -> Option<Client>) -> Result<FetchSettings, Failure> {
        let mut settings = self.settings;
        // if both URLs are empty, the program has no network, so it does not ask Google either
        if settings.kds.is_none() && settings.pcs.is_none() {
            settings.issuers = None;
        }
        if let Some((namespace, name)) = self.config_map {
            let client = client().ok_or_else(|| {
                Failure::Usage(
                    "--collateral: a ConfigMap needs access to the Kubernetes API".into(),
                )
            })?;
            settings.kept = Kept::ConfigMap(client, namespace, name);
        }
        Ok(settings)
    }
}

fn unless_empty(
    value: OsString,
    set: impl FnOnce(OsString) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if value.is_empty() { Ok(()) } else { set(value) }
}

fn url(value: OsString) -> Result<Option<String>, Failure> {
    Ok(Some(text(value)?).filter(|url| url != "none"))
}

impl Kept {
    /// Returns the store at this path: a file if its name ends with `.json`, else a directory.
    pub fn at(path: &Path) -> Kept {
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            Kept::File(path.into())
        } else {
            Kept::Directory(path.into())
        }
    }
}
