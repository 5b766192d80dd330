//! What the variants with TDX have in common: the judgement of a quote, Intel's collateral; and the registers of a TDX machine without a TPM,
//! which the kernel reads and extends.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base::crypto::CLUSTER_ID_LEN;
use hardware::tdx::quote::Register;
use hardware::tdx::{Collateral, Quote, Verifier, guest};

use super::sources::Sources;
use super::{ClusterRegister, PlatformClaims, Policy, PolicyError, Registers};
use proto::attested::Collateral as Brought;
use tpm::{Error, Location};

/// The RTMR that a machine extends with the ID of its cluster: the only one that firmware, boot loaders and kernels leave alone (UEFI 2.11
/// chapter 38). The old system named RTMR 2, into which boot loaders measure; its variant could not be selected, so no cluster has it.
const OF_CLUSTER_ID: u32 = 3;

/// The file with Intel's collateral of this machine's platform, which the operator or the host provides. It is public, and signed.
pub(super) const COLLATERAL: &str = "/etc/firstlight/tdx-collateral.json";

/// Returns the collateral in a file. A validator that fetches it needs none, so an error is only logged.
pub(super) fn collateral(path: &Path) -> Option<Collateral> {
    let text = std::fs::read(path).ok()?;
    let collateral = serde_json::from_slice(&text);
    collateral
        .map_err(|error| log::warn!("{}: {error}", path.display()))
        .ok()
}

/// Judges quotes of the hardware.
pub struct Hardware {
    verifier: Verifier,
    policy: Arc<Policy>,
    sources: Arc<dyn Sources>,
    /// Returns the time in seconds since 1970.
    clock: fn() -> u64,
}

impl Hardware {
    /// Makes a judge by a policy. Intel's root counts; with `intelRootKey` only that one, which may be another root.
    pub fn new(policy: &Arc<Policy>, sources: &Arc<dyn Sources>) -> Result<Hardware, PolicyError> {
        let verifier = match policy.old_tdx().root().map_err(PolicyError)? {
            Some(root) => root,
            None => Verifier::of_intel().map_err(PolicyError)?,
        };
        Ok(Hardware {
            verifier,
            policy: policy.clone(),
            sources: sources.clone(),
            clock: now,
        })
    }

    /// Judges under another root.
    pub fn with_root(self, verifier: Verifier) -> Hardware {
        Hardware { verifier, ..self }
    }

    /// Judges by another clock.
    pub fn with_clock(self, clock: fn() -> u64) -> Hardware {
        Hardware { clock, ..self }
    }

    /// Returns what a quote proves. `sent` is the collateral that the machine sent; what the sources have comes first.
    pub fn judge(
        &self,
        quote: Quote<'_>,
        sent: Option<&Collateral>,
    ) -> Result<PlatformClaims, String> {
        let (now, policy) = ((self.clock)(), &self.policy);
        policy.old_tdx().check(&quote)?;
        let fetched = match self.sources.tdx_collateral_at_hand(&quote) {
            Some(collateral) => Ok(collateral),
            None => self.fetch(&quote, now),
        };
        let collateral = match (&fetched, sent) {
            (Ok(fetched), _) => fetched,
            (Err(_), Some(sent)) => sent,
            (Err(why), None) => return Err(why.clone()),
        };
        let verified = self.verifier.verify(quote, collateral, now)?;
        let mut claims = policy.tdx().judge(&verified)?;
        policy.old_tdx().show(verified.quote(), &mut claims);
        Ok(claims)
    }

    /// Returns collateral that is not at hand. A stranger's quote must not make this program fetch any, so what needs none comes first.
    fn fetch(&self, quote: &Quote<'_>, now: u64) -> Result<Arc<Collateral>, String> {
        if self.sources.fetches() {
            let signer = self.verifier.signed_platform(quote, now)?;
            self.policy.tdx().check(quote, &signer)?;
        }
        self.sources.tdx_collateral(quote)
    }
}

/// Returns Intel's collateral of the platform of a quote, as a peer brings it, if these sources have it.
pub(super) fn collateral_of(quote: &[u8], sources: &dyn Sources) -> Option<Brought> {
    let quote = Quote::parse(quote).ok()?;
    let collateral = sources.tdx_collateral(&quote).ok()?;
    Some(Brought {
        intel: serde_json::to_vec(&*collateral).ok()?,
        ..Brought::default()
    })
}

/// Returns the time in seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Returns MRTD and the RTMRs at a location.
pub(super) fn read(location: &Location) -> Result<[Register; 5], Error> {
    guest::registers(folder(location)?)
        .map_err(|error| Error::Registers(format!("the registers at {location}: {error}")))
}

/// Returns the register of the cluster ID at a location.
pub(super) fn cluster_register(location: &Location) -> Result<ClusterRegister, Error> {
    let [.., value] = read(location)?;
    ClusterRegister::new(&value).ok_or_else(|| Error::Registers("RTMR 3 has no value".into()))
}

/// Extends RTMR 3 with a cluster ID, and reads it back.
pub(super) fn mark(location: &Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
    let register = Registers::Rtmrs.after(cluster_id);
    guest::extend(
        folder(location)?,
        OF_CLUSTER_ID,
        &Registers::Rtmrs.digest(cluster_id),
    )
    .map_err(|error| Error::Registers(format!("RTMR 3 at {location}: {error}")))?;
    let got = cluster_register(location)?;
    match got == register {
        true => Ok(()),
        false => Err(Error::Registers(format!(
            "RTMR 3 is {got} after the cluster ID was measured, expected {register}: something else has measured into it. Reboot \
             the machine"
        ))),
    }
}

fn folder(location: &Location) -> Result<&Path, Error> {
    match location {
        Location::Tdx(folder) => Ok(folder),
        other => Err(Error::Registers(format!(
            "{other} has no registers of a TDX machine; expected tdx:{}",
            guest::MEASUREMENTS
        ))),
    }
}
