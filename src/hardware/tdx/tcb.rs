//! What Intel publishes about platforms and quoting enclaves, and how a platform compares with it
//! (Intel PCS API version 4, "TCB Info V3", "Enclave Identity V2"; the rules are those of Intel's
//! quote verification library).

use std::fmt;
use std::time::UNIX_EPOCH;

use base::text;
use serde::{Deserialize, Serialize};

use super::quote::Body;
use super::quote::Enclave;
use crate::refusal::{Kind, Refusal};
use crate::{hex, unhex};

/// The attribute of an enclave that its owner can look into (Intel SDM volume 3D,
/// ATTRIBUTES.DEBUG).
const ENCLAVE_DEBUG: u8 = 1 << 1;

/// How a platform compares with Intel's reference levels. The names are Intel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TcbStatus {
    /// No problem is known.
    UpToDate,
    /// Software in the machine must work around a vulnerability.
    SWHardeningNeeded,
    /// The firmware of the host should be configured in another way.
    ConfigurationNeeded,
    /// Both of these.
    ConfigurationAndSWHardeningNeeded,
    /// The platform lacks an update.
    OutOfDate,
    /// The platform lacks an update, and should be configured in another way.
    OutOfDateConfigurationNeeded,
    /// The TDX module was updated while the machine ran: it started on a platform that lacked an
    /// update.
    TDRelaunchAdvised,
    /// Like the variant above, and the host should also change its configuration.
    TDRelaunchAdvisedConfigurationNeeded,
    /// The keys of the platform are not trusted. No policy accepts it.
    Revoked,
}

impl TcbStatus {
    /// Returns the status of a platform after one part, the TDX module or the quoting enclave, got
    /// the status `part`. Intel's library considers only two statuses of a part; here each one
    /// counts, so that a policy judges all by the same list.
    pub(super) fn with_part(self, part: TcbStatus) -> TcbStatus {
        self.worse(part)
    }

    fn needs_configuration(self) -> bool {
        use TcbStatus::*;
        matches!(
            self,
            ConfigurationNeeded | ConfigurationAndSWHardeningNeeded | OutOfDateConfigurationNeeded
        )
    }

    fn needs_hardening(self) -> bool {
        matches!(
            self,
            TcbStatus::SWHardeningNeeded | TcbStatus::ConfigurationAndSWHardeningNeeded
        )
    }

    /// Returns the status of a machine that has the problems of both.
    fn worse(self, other: TcbStatus) -> TcbStatus {
        if self == TcbStatus::Revoked || other == TcbStatus::Revoked {
            return TcbStatus::Revoked;
        }
        let either = |has: fn(TcbStatus) -> bool| has(self) || has(other);
        match (
            either(TcbStatus::is_out_of_date),
            either(TcbStatus::needs_configuration),
            either(TcbStatus::needs_hardening),
        ) {
            (true, true, _) => TcbStatus::OutOfDateConfigurationNeeded,
            (true, false, _) => TcbStatus::OutOfDate,
            (false, true, true) => TcbStatus::ConfigurationAndSWHardeningNeeded,
            (false, true, false) => TcbStatus::ConfigurationNeeded,
            (false, false, true) => TcbStatus::SWHardeningNeeded,
            (false, false, false) => self,
        }
    }

    /// Returns the status after an update to the best of these levels, if this status is out of date.
    fn if_updated(self, missed: impl Iterator<Item = TcbStatus>) -> TcbStatus {
        let rest = match self {
            TcbStatus::OutOfDate => TcbStatus::UpToDate,
            TcbStatus::OutOfDateConfigurationNeeded => TcbStatus::ConfigurationNeeded,
            other => return other,
        };
        let best = missed.filter(|level| !level.is_out_of_date()).min();
        best.map_or(self, |best| rest.worse(best))
    }

    pub(super) fn is_out_of_date(self) -> bool {
        matches!(
            self,
            TcbStatus::OutOfDate | TcbStatus::OutOfDateConfigurationNeeded
        )
    }
}

/// Returns the status of a machine from the statuses at its start and now, with the present TDX
/// module.
pub(super) fn merged(launched: TcbStatus, now: Option<TcbStatus>) -> TcbStatus {
    match now {
        Some(TcbStatus::Revoked) => TcbStatus::Revoked,
        Some(now) if launched.is_out_of_date() && !now.is_out_of_date() => {
            if launched.needs_configuration() || now.needs_configuration() {
                TcbStatus::TDRelaunchAdvisedConfigurationNeeded
            } else {
                TcbStatus::TDRelaunchAdvised
            }
        }
        // the present module may be older than the one at the start: Intel's library would not
        // report this
        Some(now) => launched.worse(now),
        None => launched,
    }
}

impl fmt::Display for TcbStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A platform, as its PCK certificate names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PckPlatform {
    /// The security version of each part of the processor.
    pub cpu_svn: [u8; 16],
    /// The security version of the provisioning enclave.
    pub pce_svn: u16,
    /// The provisioning ID, which identifies the processor permanently.
    pub ppid: [u8; 16],
    /// The identity of the provisioning enclave.
    pub pce_id: [u8; 2],
    /// Family, model, stepping and platform type: each TCB information is for one of them.
    pub fmspc: [u8; 6],
    /// The ID of a platform with several processors; it changes when the platform is set up anew.
    pub instance: Option<[u8; 16]>,
}

/// "TCB Info" of TDX.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TcbInfo {
    id: String,
    version: u32,
    issue_date: Date,
    next_update: Date,
    fmspc: String,
    pce_id: String,
    /// How levels are compared: Intel defines 0 only.
    tcb_type: u32,
    #[serde(rename = "tcbEvaluationDataNumber")]
    pub evaluation: u32,
    tcb_levels: Vec<Level<Tcb>>,
    tdx_module: Module,
    #[serde(default, rename = "tdxModuleIdentities")]
    modules: Vec<ModuleIdentity>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Level<T> {
    tcb: T,
    /// On this day no vulnerability of this level was known.
    #[serde(rename = "tcbDate")]
    date: Date,
    #[serde(rename = "tcbStatus", deserialize_with = "of_level")]
    status: TcbStatus,
    #[serde(default, rename = "advisoryIDs")]
    advisories: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Tcb {
    #[serde(rename = "sgxtcbcomponents")]
    sgx: [Component; 16],
    #[serde(rename = "tdxtcbcomponents")]
    tdx: [Component; 16],
    pcesvn: u16,
}

#[derive(Debug, Deserialize)]
struct Component {
    svn: u8,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Module {
    mrsigner: String,
    attributes: String,
    attributes_mask: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ModuleIdentity {
    id: String,
    #[serde(flatten)]
    module: Module,
    tcb_levels: Vec<Level<Svn>>,
}

/// "Enclave Identity" of the quoting enclave.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Identity {
    id: String,
    version: u32,
    issue_date: Date,
    next_update: Date,
    #[serde(rename = "tcbEvaluationDataNumber")]
    pub evaluation: u32,
    miscselect: String,
    miscselect_mask: String,
    attributes: String,
    attributes_mask: String,
    mrsigner: String,
    isvprodid: u16,
    tcb_levels: Vec<Level<Svn>>,
}

#[derive(Debug, Deserialize)]
struct Svn {
    isvsvn: u16,
}

/// The statements of a level about a platform.
pub(super) struct Judged {
    pub status: TcbStatus,
    /// The status after an update; the same if there is none.
    pub if_updated: TcbStatus,
    /// The date of the level of an out-of-date part, in seconds since 1970.
    pub out_of_date_since: Option<u64>,
    pub advisories: Vec<String>,
    /// The parts that are too old.
    pub lacks: Vec<String>,
}

impl Judged {
    /// Returns what is said of a part that reaches a level with this status, date and advisories; `missed` are the statuses of the
    /// higher levels.
    fn new(
        (status, date, advisories): (TcbStatus, Date, &[String]),
        missed: impl Iterator<Item = TcbStatus>,
        lacks: Vec<String>,
    ) -> Judged {
        Judged {
            status,
            if_updated: status.if_updated(missed),
            out_of_date_since: status.is_out_of_date().then_some(date.0),
            advisories: advisories.to_vec(),
            lacks,
        }
    }

    /// Adds what is said of a part.
    fn add(&mut self, part: Judged) {
        self.status = self.status.with_part(part.status);
        self.if_updated = self.if_updated.with_part(part.if_updated);
        self.out_of_date_since = earliest(self.out_of_date_since, part.out_of_date_since);
        self.advisories.extend(part.advisories);
        self.lacks.extend(part.lacks);
    }
}

/// Returns the earlier of two times, each of which may be missing.
pub(super) fn earliest(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

/// Maximum number of parts of a platform that an error names.
const NAMED: usize = 4;

/// Joins the first texts, and appends how many more there are.
pub(super) fn few(all: &[String]) -> String {
    let named = all[..all.len().min(NAMED)].join(", ");
    match all.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named}, and {more} more"),
    }
}

/// Returns a text that says that a version is too old; `None` if it is not.
fn too_old(name: &str, got: u16, wanted: u16) -> Option<String> {
    (got < wanted).then(|| format!("{name} is {got}, expected at least {wanted}"))
}

impl TcbInfo {
    /// Checks that it is valid, and returns when Intel issued it.
    pub fn check_dates(&self, now: u64) -> Result<u64, Refusal> {
        check_dates("TCB information", &self.issue_date, &self.next_update, now)
    }

    /// Checks that the information is for this platform.
    pub fn check_platform(&self, platform: &PckPlatform) -> Result<(), Refusal> {
        if self.id != "TDX" || self.version != 3 || self.tcb_type != 0 {
            return Err(Kind::Malformed.because(format!(
                "the TCB information is {} {} of the type {}, expected \"TDX\" 3 of the type 0",
                text::quoted(&self.id, 20),
                self.version,
                self.tcb_type
            )));
        }
        let (fmspc, pce_id) = (unhex(&self.fmspc), unhex(&self.pce_id));
        if fmspc.as_deref() != Some(&platform.fmspc[..])
            || pce_id.as_deref() != Some(&platform.pce_id[..])
        {
            let (info, quote) = (&self.fmspc, hex(&platform.fmspc));
            let text = format!(
                "the TCB information is of platforms with FMSPC {info:.20}, but the quote is of a platform with FMSPC {quote}"
            );
            return Err(Kind::Binding.because(text).of("FMSPC"));
        }
        Ok(())
    }

    /// Returns the identity of the TDX module with the version in these SVNs; `None` if the levels
    /// of the platform judge it.
    fn module(&self, svn: &[u8; 16]) -> Result<Option<&ModuleIdentity>, Refusal> {
        if svn[1] == 0 {
            return Ok(None);
        }
        let id = format!("TDX_{:02X}", svn[1]);
        let module = self
            .modules
            .iter()
            .find(|module| module.id.eq_ignore_ascii_case(&id));
        module
            .map(Some)
            .ok_or_else(|| Kind::Unproven.because(format!("Intel names no TDX module {id}")))
    }

    /// Checks who signed the TDX module, and its attributes.
    pub fn check_module(&self, body: &Body) -> Result<(), Refusal> {
        let module = self
            .module(&body.tee_tcb_svn)?
            .map_or(&self.tdx_module, |identity| &identity.module);
        if unhex(&module.mrsigner).as_deref() != Some(&body.mr_signer_seam[..]) {
            let text = "the TDX module is not signed by Intel (MRSIGNERSEAM)";
            return Err(Kind::Signature.because(text).of("MRSIGNERSEAM"));
        }
        let (wanted, mask) = (unhex(&module.attributes), unhex(&module.attributes_mask));
        let got = body.seam_attributes.to_le_bytes();
        let right = matches_masked(&got, wanted.as_deref(), mask.as_deref());
        let beyond =
            mask.is_none_or(|mask| got.iter().zip(mask).any(|(got, mask)| got & !mask != 0));
        if right && !beyond {
            Ok(())
        } else {
            let (got, expected) = (body.seam_attributes, &module.attributes);
            let text =
                format!("the TDX module has the attributes {got:#x}, expected {expected:.20}");
            Err(Kind::Protection.because(text).of("SEAMATTRIBUTES"))
        }
    }

    /// Returns the highest level that a platform with these SVNs of TDX reaches.
    pub fn level_of(&self, platform: &PckPlatform, svn: &[u8; 16]) -> Result<Judged, Refusal> {
        let mut levels: Vec<_> = self.tcb_levels.iter().collect();
        levels.sort_by_key(|level| std::cmp::Reverse(level.tcb.order()));
        let lacks = |level: &Level<Tcb>| level.tcb.lacks(platform, svn);
        // of several levels with equally few parts that are too old, take the lowest
        let nearest = |status: Option<TcbStatus>| {
            let levels = levels.iter().rev();
            let levels = levels.filter(|level| status.is_none_or(|it| level.status == it));
            let nearest = levels.map(|level| lacks(level)).min_by_key(Vec::len);
            nearest.unwrap_or_default()
        };
        let level = levels.iter().position(|level| lacks(level).is_empty());
        let (missed, level) = level.map(|at| (&levels[..at], levels[at])).ok_or_else(|| {
            let lacks = few(&nearest(None));
            Kind::Outdated.because(format!(
                "the platform is older than every TCB level that Intel lists: {lacks}"
            ))
        })?;
        let mut judged = Judged::new(
            (level.status, level.date, &level.advisories),
            missed.iter().map(|level| level.status),
            nearest(Some(TcbStatus::UpToDate)),
        );
        if let Some(module) = self.module(svn)? {
            judged.add(judged_by(
                "the TDX module",
                &module.tcb_levels,
                svn[0].into(),
            )?);
        }
        Ok(judged)
    }
}

impl Tcb {
    /// Returns what levels are ordered by.
    fn order(&self) -> ([u8; 16], u16, [u8; 16]) {
        let svns = |components: &[Component; 16]| std::array::from_fn(|at| components[at].svn);
        (svns(&self.sgx), self.pcesvn, svns(&self.tdx))
    }

    /// Returns each part of the platform that is older than this level requires. If Intel publishes
    /// an identity for the TDX module, the first two TDX SVNs are ignored.
    fn lacks(&self, platform: &PckPlatform, svn: &[u8; 16]) -> Vec<String> {
        let older = |name: &str, got: &[u8; 16], wanted: &[Component; 16], skip: usize| {
            let one = |at: usize| {
                too_old(
                    &format!("{name}[{at}]"),
                    got[at].into(),
                    wanted[at].svn.into(),
                )
            };
            (skip..16).filter_map(one).collect::<Vec<_>>()
        };
        let skip = if svn[1] > 0 { 2 } else { 0 };
        let mut lacks = older("CPUSVN", &platform.cpu_svn, &self.sgx, 0);
        lacks.extend(too_old("PCESVN", platform.pce_svn, self.pcesvn));
        lacks.extend(older("TEE_TCB_SVN", svn, &self.tdx, skip));
        lacks
    }
}

impl Identity {
    /// Checks that it is valid, and returns when Intel issued it.
    pub fn check_dates(&self, now: u64) -> Result<u64, Refusal> {
        check_dates("QE identity", &self.issue_date, &self.next_update, now)
    }

    /// Checks that an enclave is Intel's quoting enclave, and returns the level of its version.
    pub fn level_of(&self, enclave: &Enclave<'_>) -> Result<Judged, Refusal> {
        if self.id != "TD_QE" || ![2, 3].contains(&self.version) {
            return Err(Kind::Malformed.because(format!(
                "the QE identity is {} {}, expected \"TD_QE\" 2 or 3",
                text::quoted(&self.id, 20),
                self.version
            )));
        }
        let is = |got: &[u8], wanted: &str, mask: &str| {
            matches_masked(got, unhex(wanted).as_deref(), unhex(mask).as_deref())
        };
        // MISCSELECT is a number, and its text starts with the most significant byte
        let mut misc_select = *enclave.misc_select;
        misc_select.reverse();
        let right = unhex(&self.mrsigner).as_deref() == Some(&enclave.mr_signer[..])
            && self.isvprodid == enclave.product
            && is(&misc_select, &self.miscselect, &self.miscselect_mask)
            && is(enclave.attributes, &self.attributes, &self.attributes_mask)
            && enclave.attributes[0] & ENCLAVE_DEBUG == 0;
        if !right {
            let text = "the quoting enclave is not the one that Intel names (QE identity)";
            return Err(Kind::Signature.because(text));
        }
        judged_by("the quoting enclave", &self.tcb_levels, enclave.svn)
    }
}

/// Returns the highest level that a version of the module or the enclave reaches.
fn judged_by(name: &str, levels: &[Level<Svn>], svn: u16) -> Result<Judged, Refusal> {
    let reached = levels.iter().filter(|level| level.tcb.isvsvn <= svn);
    let level = reached.max_by_key(|level| level.tcb.isvsvn);
    let level = level.ok_or_else(|| {
        let text = format!("{name} is older than every version that Intel lists: SVN {svn}");
        Kind::Outdated.because(text)
    })?;
    let good = levels.iter().filter(|it| it.status == TcbStatus::UpToDate);
    let good = good.map(|it| it.tcb.isvsvn).min().unwrap_or(0);
    let missed = levels.iter().filter(|it| it.tcb.isvsvn > svn);
    Ok(Judged::new(
        (level.status, level.date, &level.advisories),
        missed.map(|level| level.status),
        too_old(&format!("the SVN of {name}"), svn, good)
            .into_iter()
            .collect(),
    ))
}

/// Returns whether the bytes have this value in the bits of the mask; false if lengths differ.
fn matches_masked(got: &[u8], wanted: Option<&[u8]>, mask: Option<&[u8]>) -> bool {
    let (Some(wanted), Some(mask)) = (wanted, mask) else {
        return false;
    };
    let same_len = wanted.len() == got.len() && mask.len() == got.len();
    same_len
        && got
            .iter()
            .zip(wanted)
            .zip(mask)
            .all(|((got, wanted), mask)| got & mask == wanted & mask)
}

/// A time of a text as `2025-06-19T10:16:03Z`, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Date(u64);

impl<'de> Deserialize<'de> for Date {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Date, D::Error> {
        let text = String::deserialize(deserializer)?;
        let since = base::time::parse(&text).and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let since = since.map(|since| Date(since.as_secs()));
        since.ok_or_else(|| serde::de::Error::custom("expected a time as 2025-06-19T10:16:03Z"))
    }
}

/// Reads the status of a level. A relaunch status never occurs in Intel's data: a verifier finds it
/// by comparing two levels.
fn of_level<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<TcbStatus, D::Error> {
    use TcbStatus::*;
    match TcbStatus::deserialize(deserializer)? {
        TDRelaunchAdvised | TDRelaunchAdvisedConfigurationNeeded => Err(serde::de::Error::custom(
            "no level of Intel has the status TDRelaunchAdvised",
        )),
        status => Ok(status),
    }
}

fn check_dates(name: &str, issued: &Date, until: &Date, now: u64) -> Result<u64, Refusal> {
    if now < issued.0 {
        return Err(Kind::Expired.because(format!(
            "the {name} is not valid yet: is the clock of this machine right?"
        )));
    }
    if now > until.0 {
        return Err(Kind::Expired.because(format!(
            "the {name} has expired: fetch the collateral again"
        )));
    }
    Ok(issued.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_merge_so_that_nothing_is_lost() {
        use TcbStatus::*;
        for (platform, part, expected) in [
            (UpToDate, UpToDate, UpToDate),
            (SWHardeningNeeded, UpToDate, SWHardeningNeeded),
            (SWHardeningNeeded, OutOfDate, OutOfDate),
            (ConfigurationNeeded, OutOfDate, OutOfDateConfigurationNeeded),
            (
                ConfigurationAndSWHardeningNeeded,
                OutOfDate,
                OutOfDateConfigurationNeeded,
            ),
            (OutOfDate, UpToDate, OutOfDate),
            (UpToDate, Revoked, Revoked),
            (Revoked, OutOfDate, Revoked),
            (UpToDate, SWHardeningNeeded, SWHardeningNeeded),
            (OutOfDate, ConfigurationNeeded, OutOfDateConfigurationNeeded),
        ] {
            assert_eq!(platform.with_part(part), expected, "{platform} {part}");
        }
        for (launched, now, expected) in [
            (UpToDate, None, UpToDate),
            (OutOfDate, Some(UpToDate), TDRelaunchAdvised),
            (OutOfDate, Some(OutOfDate), OutOfDate),
            (
                OutOfDate,
                Some(ConfigurationNeeded),
                TDRelaunchAdvisedConfigurationNeeded,
            ),
            (
                OutOfDateConfigurationNeeded,
                Some(UpToDate),
                TDRelaunchAdvisedConfigurationNeeded,
            ),
            (UpToDate, Some(OutOfDate), OutOfDate),
            (UpToDate, Some(UpToDate), UpToDate),
            (
                SWHardeningNeeded,
                Some(ConfigurationNeeded),
                ConfigurationAndSWHardeningNeeded,
            ),
            (UpToDate, Some(SWHardeningNeeded), SWHardeningNeeded),
            (UpToDate, Some(Revoked), Revoked),
            (Revoked, Some(OutOfDate), Revoked),
            (OutOfDate, Some(Revoked), Revoked),
            (
                OutOfDate,
                Some(OutOfDateConfigurationNeeded),
                OutOfDateConfigurationNeeded,
            ),
        ] {
            assert_eq!(merged(launched, now), expected, "{launched} {now:?}");
        }
    }
}
