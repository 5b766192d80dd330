//! The options of the services, and of the operator's command, that say where certificates and collateral come from.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use base::program::{self, Failure};
use kubernetes::client::Client;

use crate::{Kept, Settings};

/// The lines of the services' help texts.
pub const HELP: &str = "  --collateral WHERE             where fetched certificates of chips and collateral of platforms are kept: a directory, a file of
                                 collateral (.json), or configmap:NAMESPACE/NAME [only in memory]
  --kds URL                      AMD's key distribution service or a mirror of it; none to fetch nothing
                                 [https://kdsintf.amd.com]
  --pcs URL                      Intel's provisioning certification service or a caching service (PCCS); none to fetch nothing
                                 [https://api.trustedservices.intel.com]
  --tcb-update EVALUATION        which of Intel's evaluations counts: early or standard [early]
  --collateral-ca FILE           the authorities of these servers' certificates, PEM [this machine's]
";

/// The prefix of a ConfigMap.
const CONFIG_MAP: &str = "configmap:";

/// The options as the user gave them.
#[derive(Default)]
pub struct Flags {
    settings: Settings,
    config_map: Option<(String, String)>,
}

impl Flags {
    /// Returns whether an option is one of these.
    pub fn has(name: &str) -> bool {
        ["collateral", "kds", "pcs", "tcb-update", "collateral-ca"].contains(&name)
    }

    /// Sets an option. The chart passes each of them, and an empty value means that it is not set.
    pub fn set(&mut self, name: &str, value: OsString) -> Result<(), Failure> {
        if value.is_empty() {
            return Ok(());
        }
        let settings = &mut self.settings;
        match name {
            "collateral" => match value
                .to_str()
                .and_then(|text| text.strip_prefix(CONFIG_MAP))
            {
                Some(name) => {
                    let parts = name.split_once('/').ok_or_else(|| {
                        let text =
                            format!("--collateral {CONFIG_MAP}{name}: expected NAMESPACE/NAME");
                        Failure::Usage(text)
                    })?;
                    self.config_map = Some((parts.0.into(), parts.1.into()));
                }
                None => settings.kept = Kept::at(value.as_ref()),
            },
            "kds" => settings.kds = url(program::text(value)?),
            "pcs" => settings.pcs = url(program::text(value)?),
            "tcb-update" => settings.update = program::parsed(name, value)?,
            _ => settings.ca = Some(PathBuf::from(value)),
        }
        Ok(())
    }

    /// Returns the settings. `client` makes the client of Kubernetes that a ConfigMap needs.
    pub fn finish(self, client: impl FnOnce() -> Option<Client>) -> Result<Settings, Failure> {
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

fn url(text: String) -> Option<String> {
    (text != "none").then_some(text)
}

impl Kept {
    /// Returns the store at this path: a file if its name ends with `.json`, else a directory.
    pub fn at(path: &Path) -> Kept {
        match path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            true => Kept::File(path.into()),
            false => Kept::Directory(path.into()),
        }
    }
}
