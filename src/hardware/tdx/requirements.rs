//! A policy's requirements for a TDX machine besides its registers.

use std::time::{Duration, UNIX_EPOCH};

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::dcap::{Verified, in_brackets};
use super::quote::{Attributes, Body, REGISTER_LEN, TdxQuote};
use super::tcb::{PckPlatform, TcbStatus, few};
use crate::claims::{PlatformClaims, Property, TcbPart};
use crate::hex;
use crate::json::{Digits, Number, is_default};
use crate::refusal::{Kind, Refusal};

/// What a policy requires of a TD. The default is the strictest policy that genuine machines meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TdxRequirements {
    /// The accepted statuses of platforms.
    #[serde(deserialize_with = "statuses")]
    pub tcb_statuses: Vec<TcbStatus>,
    /// For how many days after the date of its TCB level an out-of-date platform counts as one with Intel's updates
    /// (`platform_grace_period` of Intel's appraisal policies).
    #[serde(skip_serializing_if = "is_default")]
    pub platform_grace_days: u32,
    /// The advisories of Intel that may apply to a platform; empty for each one.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "advisories")]
    pub accepted_advisories: Vec<String>,
    /// The advisories of Intel that must not apply to a platform.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "advisories")]
    pub rejected_advisories: Vec<String>,
    /// The minimum evaluation number of Intel's collateral: earlier evaluations lack newer
    /// vulnerabilities.
    pub minimum_evaluation: u32,
    /// The maximum age of the collateral in days. For that long a revocation or a new vulnerability
    /// may go unnoticed.
    pub maximum_collateral_days: u32,
    /// The accepted attributes of the TD, in JSON one value or a list.
    #[serde(deserialize_with = "attributes", serialize_with = "one_or_several")]
    pub td_attributes: Vec<Number>,
    /// The accepted processor features of the TD (XFAM), in JSON one value or a list; if empty, each feature that is not always
    /// refused.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "features",
        serialize_with = "one_or_several"
    )]
    pub xfam: Vec<Number>,
    /// The accepted measurements of firmware (MRTD); empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mr_td: Vec<Digits<REGISTER_LEN>>,
    /// The accepted measurements of TDX modules; empty for every one that Intel signed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mr_seam: Vec<Digits<REGISTER_LEN>>,
    /// The accepted configurations (MRCONFIGID), which the host sets, in JSON one value or a list.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "several",
        serialize_with = "one_or_several"
    )]
    pub mr_config_id: Vec<Digits<REGISTER_LEN>>,
    /// The accepted owners (MROWNER), which the host sets, in JSON one value or a list.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "several",
        serialize_with = "one_or_several"
    )]
    pub mr_owner: Vec<Digits<REGISTER_LEN>>,
    /// The accepted configurations of the owner (MROWNERCONFIG), which the host sets, in JSON one value or a list.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "several",
        serialize_with = "one_or_several"
    )]
    pub mr_owner_config: Vec<Digits<REGISTER_LEN>>,
    /// The accepted service TDs (MRSERVICETD); a TD without one is always accepted. A service TD
    /// cannot move the TD: no policy allows the attribute MIGRATABLE.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mr_service_td: Vec<Digits<REGISTER_LEN>>,
    /// The accepted platforms by PPID or platform instance ID; empty for every one. With this list,
    /// a stolen key of another platform is useless.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<Digits<16>>,
}

impl Default for TdxRequirements {
    fn default() -> TdxRequirements {
        TdxRequirements {
            tcb_statuses: vec![TcbStatus::UpToDate],
            platform_grace_days: 0,
            accepted_advisories: vec![],
            rejected_advisories: vec![],
            minimum_evaluation: MINIMUM_EVALUATION,
            maximum_collateral_days: MAXIMUM_COLLATERAL_DAYS,
            td_attributes: vec![Number(Attributes::USUAL.0)],
            xfam: vec![],
            mr_td: vec![],
            mr_seam: vec![],
            mr_config_id: vec![],
            mr_owner: vec![],
            mr_owner_config: vec![],
            mr_service_td: vec![],
            platforms: vec![],
        }
    }
}

/// The TCB evaluation data number that a policy requires by default: the one of Intel's TCB
/// recovery that was standard in October 2026. Intel still signs earlier evaluations, in which
/// older platforms are up to date, with new dates; the sender of collateral could choose one of
/// them.
const MINIMUM_EVALUATION: u32 = 20;
/// Half of the 30 days for which Intel's collateral is valid; the other half is for its renewal.
const MAXIMUM_COLLATERAL_DAYS: u32 = 15;
const DAY: Duration = Duration::from_secs(86_400);
/// The features that every TD has: x87 and SSE.
const XFAM_ALWAYS: u64 = 0b11;
/// The features that TDX modules support (TDX Module ABI, "XFAM"): a policy cannot list others.
const XFAM_KNOWN: u64 = 0x6dbe7;
/// Features that are refused unless the policy lists them: processor trace (8), user interrupts
/// (14) and branch records (15) reveal what the TD does.
const XFAM_NAMED: u64 = 1 << 8 | 1 << 14 | 1 << 15;
/// The names of the features by bit.
const XFAM_NAMES: &str = "x87,SSE,AVX,,,AVX-512,AVX-512,AVX-512,processor trace,PKU,,CET,CET,,user interrupts,branch records,,AMX,AMX";

/// The requirements that list values: the name in the policy, and the name for a person.
const MR_TD: (&str, &str) = ("mrTd", "the measurement of the firmware (MRTD)");
const MR_SEAM: (&str, &str) = ("mrSeam", "the measurement of the TDX module (MRSEAM)");
const CONFIG: (&str, &str) = ("mrConfigId", "MRCONFIGID");
const OWNER: (&str, &str) = ("mrOwner", "MROWNER");
const OWNER_CONFIG: (&str, &str) = ("mrOwnerConfig", "MROWNERCONFIG");
const PLATFORM: (&str, &str) = ("platforms", "the platform (PPID, platform instance)");

impl TdxRequirements {
    /// Judges a machine. Returns its claims; an error names each requirement that is not met.
    pub fn judge(&self, verified: &Verified<'_>) -> Result<PlatformClaims, Refusal> {
        let mut wrong: Vec<_> = [
            self.status(verified),
            self.advisory(verified),
            self.evaluation(verified),
            self.age(verified),
        ]
        .into_iter()
        .flatten()
        .collect();
        wrong.extend(self.unmet(&verified.quote().body, verified.platform()));
        Refusal::join(wrong)?;
        Ok(self.claims(verified))
    }

    /// Checks the requirements that need no collateral, for a quote that this platform has signed.
    pub fn check(&self, quote: &TdxQuote<'_>, platform: &PckPlatform) -> Result<(), Refusal> {
        Refusal::join(self.unmet(&quote.body, platform))
    }

    /// Returns what is wrong with a machine, independent of Intel's statements about its platform.
    fn unmet(&self, body: &Body, platform: &PckPlatform) -> Vec<Refusal> {
        let wrong = [
            self.attributes(body),
            self.features(body),
            one_of(MR_TD, &self.mr_td, &[&body.mr_td]),
            one_of(MR_SEAM, &self.mr_seam, &[&body.mr_seam]),
            one_of(CONFIG, &self.mr_config_id, &[&body.mr_config_id]),
            one_of(OWNER, &self.mr_owner, &[&body.mr_owner]),
            one_of(
                OWNER_CONFIG,
                &self.mr_owner_config,
                &[&body.mr_owner_config],
            ),
            self.platform(platform),
            self.service_td(body),
        ];
        wrong.into_iter().flatten().collect()
    }

    /// Returns whether the policy pins the firmware or the platforms.
    pub fn pins_firmware(&self) -> bool {
        !self.mr_td.is_empty() || !self.platforms.is_empty()
    }

    fn status(&self, verified: &Verified<'_>) -> Option<Refusal> {
        let out_of_date = verified.out_of_date_for();
        let status = match out_of_date {
            Some(time) if time < DAY * self.platform_grace_days => verified.status_if_updated(),
            _ => verified.status(),
        };
        (!self.tcb_statuses.contains(&status)).then(|| {
            let names: Vec<_> = self.tcb_statuses.iter().map(TcbStatus::to_string).collect();
            let (names, lacks) = (names.join(" or "), few(verified.lacks()));
            let since = match out_of_date {
                Some(time) if self.platform_grace_days > 0 => {
                    let (days, limit) = (time.as_secs() / DAY.as_secs(), self.platform_grace_days);
                    format!(
                        "; its TCB level is {days} days old, the policy's platformGraceDays permits {limit}"
                    )
                }
                _ => String::new(),
            };
            let text = format!(
                "the TCB status of the platform is {status}{}, expected {names}{}{lacks}{since}",
                in_brackets(verified.advisories()),
                if lacks.is_empty() { "" } else { ": " },
            );
            let refusal = Kind::Outdated.because(text).of("tcbStatuses");
            refusal.values(names, status)
        })
    }

    fn advisory(&self, verified: &Verified<'_>) -> Option<Refusal> {
        let refuse = |id: &String, field: &str, how: &str| {
            let text =
                format!("Intel's advisory {id} applies to the platform, which the policy {how}");
            Kind::Outdated.because(text).of(field)
        };
        let (accepted, rejected) = (&self.accepted_advisories, &self.rejected_advisories);
        let mut all = verified.advisories().iter();
        all.find_map(|id| {
            if rejected.contains(id) {
                Some(refuse(id, "rejectedAdvisories", "rejects"))
            } else if accepted.is_empty() || accepted.contains(id) {
                None
            } else {
                Some(refuse(id, "acceptedAdvisories", "does not accept"))
            }
        })
    }

    fn evaluation(&self, verified: &Verified<'_>) -> Option<Refusal> {
        let (got, minimum) = (verified.evaluation(), self.minimum_evaluation);
        (got < minimum).then(|| {
            let text = format!(
                "the collateral is of Intel's evaluation {got}, expected at least {minimum}"
            );
            let refusal = Kind::Expired.because(text).of("minimumEvaluation");
            refusal.values(minimum, got)
        })
    }

    fn age(&self, verified: &Verified<'_>) -> Option<Refusal> {
        let (age, days) = (verified.collateral_age(), self.maximum_collateral_days);
        (age > DAY * days).then(|| {
            let got = age.as_secs().div_ceil(DAY.as_secs());
            let text = format!(
                "the collateral is {got} days old, expected at most {days}: fetch it again"
            );
            let refusal = Kind::Expired.because(text).of("maximumCollateralDays");
            refusal.values(days, got)
        })
    }

    fn attributes(&self, body: &Body) -> Option<Refusal> {
        let got = body.td_attributes;
        let accepted = self.td_attributes.iter().map(|it| Attributes(it.0));
        let debug = if got.is_debug() {
            ": the host can look into a machine with DEBUG"
        } else {
            ""
        };
        (!accepted.clone().any(|it| it == got)).then(|| {
            let accepted: Vec<_> = accepted.map(|it| it.to_string()).collect();
            let accepted = accepted.join(" or ");
            let text = format!("TDATTRIBUTES: expected {accepted}, got {got}{debug}");
            let refusal = Kind::Protection.because(text).of("tdAttributes");
            refusal.values(accepted, got)
        })
    }

    fn features(&self, body: &Body) -> Option<Refusal> {
        let got = body.xfam;
        let (wrong, start) = match self.xfam.as_slice() {
            [] => (
                XFAM_ALWAYS & !got | got & (XFAM_NAMED | !XFAM_KNOWN),
                String::new(),
            ),
            accepted if accepted.contains(&Number(got)) => return None,
            [Number(first), ..] => {
                let accepted: Vec<_> = self.xfam.iter().map(|it| format!("{:#x}", it.0)).collect();
                let expected = format!(": expected {}, got", accepted.join(" or "));
                (got ^ first, expected)
            }
        };
        let advice = if self.xfam.is_empty() && wrong & !XFAM_NAMED == 0 {
            "; the policy's xfam can accept it"
        } else {
            ""
        };
        let bits = (0..64).filter(|bit| wrong >> bit & 1 == 1);
        let named = bits.map(|bit| {
            let name = XFAM_NAMES.split(',').nth(bit).unwrap_or_default();
            let name = if name.is_empty() { "unknown" } else { name };
            let state = if got >> bit & 1 == 1 { "on" } else { "off" };
            format!("{name} (bit {bit}) {state}")
        });
        let named = named.collect::<Vec<_>>().join(", ");
        (wrong != 0).then(|| {
            let text = format!("XFAM{start} {got:#x}: {named}{advice}");
            Kind::Protection.because(text).of("xfam")
        })
    }

    /// Refuses a TD that has or had a service TD, unless the policy lists this service TD.
    fn service_td(&self, body: &Body) -> Option<Refusal> {
        let hash = body.td15.as_ref().map(|td15| td15.mr_service_td);
        let bound = body.service_tds.iter().flatten();
        let mut all = hash
            .map(|hash| (hash, 0))
            .into_iter()
            .chain(bound.map(|it| (it.hash, it.attributes)));
        let other = all.find(|(hash, attributes)| {
            if *hash == [0; REGISTER_LEN] {
                *attributes != 0
            } else {
                !self.mr_service_td.contains(&Digits(*hash))
            }
        });
        other.map(|(hash, attributes)| {
            let text = format!(
                "another TD serves the machine (MRSERVICETD {}, attributes {attributes:#x}); the policy's mrServiceTd can accept it",
                hex(&hash)
            );
            Kind::Protection.because(text).of("mrServiceTd")
        })
    }

    fn platform(&self, platform: &PckPlatform) -> Option<Refusal> {
        let mut ids = vec![&platform.ppid[..]];
        ids.extend(platform.instance.as_ref().map(|id| &id[..]));
        let mut other = one_of(PLATFORM, &self.platforms, &ids)?;
        other.kind = Kind::Machine;
        Some(other)
    }

    fn claims(&self, verified: &Verified<'_>) -> PlatformClaims {
        let (body, platform) = (&verified.quote().body, verified.platform());
        let issued = UNIX_EPOCH + Duration::from_secs(verified.collateral_issued());
        let [rtmr_0, rtmr_1, rtmr_2, rtmr_3] = body.rtmr.map(|it| hex(&it));
        let mut properties = vec![
            ("TCB status", verified.status().to_string()),
            ("collateral issued", base::time::seconds(issued)),
            ("FMSPC", hex(&platform.fmspc)),
            ("PPID", hex(&platform.ppid)),
            ("CPUSVN", hex(&platform.cpu_svn)),
            ("PCESVN", platform.pce_svn.to_string()),
            ("TEE_TCB_SVN", hex(&body.tee_tcb_svn)),
            ("TDATTRIBUTES", body.td_attributes.to_string()),
            ("XFAM", format!("{:#018x}", body.xfam)),
            ("MRTD", hex(&body.mr_td)),
            ("RTMR 0", rtmr_0),
            ("RTMR 1", rtmr_1),
            ("RTMR 2", rtmr_2),
            ("RTMR 3", rtmr_3),
            ("MRSEAM", hex(&body.mr_seam)),
            ("MRCONFIGID", hex(&body.mr_config_id)),
            ("MROWNER", hex(&body.mr_owner)),
            ("MROWNERCONFIG", hex(&body.mr_owner_config)),
        ];
        if let Some(time) = verified.out_of_date_for() {
            let days = time.as_secs() / DAY.as_secs();
            properties.push(("days since the TCB level's date", days.to_string()));
        }
        if !verified.advisories().is_empty() {
            properties.push(("advisories", verified.advisories().join(", ")));
        }
        PlatformClaims {
            technology: "Intel TDX".into(),
            signed_by: format!("{}, PCK, quoting enclave", verified.root()),
            chip: Some(hex(platform.instance.as_ref().unwrap_or(&platform.ppid))),
            tcb: vec![TcbPart {
                name: "evaluation",
                got: verified.evaluation().into(),
                minimum: self.minimum_evaluation.into(),
            }],
            properties: properties
                .into_iter()
                .map(|(name, value)| Property { name, value })
                .collect(),
            bound: vec![],
        }
    }
}

/// Says that none of the values is accepted; `None` if there is no requirement. `names` are the
/// requirement's name in the policy, and the name of the value for a person.
fn one_of<const N: usize>(
    names: (&str, &str),
    accepted: &[Digits<N>],
    got: &[&[u8]],
) -> Option<Refusal> {
    let found = accepted.is_empty() || accepted.iter().any(|it| got.contains(&&it.0[..]));
    (!found).then(|| {
        let accepted: Vec<_> = accepted.iter().map(|it| hex(&it.0)).collect();
        let got: Vec<_> = got.iter().map(|it| hex(it)).collect();
        let ((field, name), accepted, got) = (names, accepted.join(" or "), got.join(", "));
        let text = format!("{name}: expected {accepted}, got {got}");
        let refusal = Kind::Measurement.because(text).of(field);
        refusal.values(accepted, got)
    })
}

fn statuses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TcbStatus>, D::Error> {
    let statuses = Vec::deserialize(deserializer)?;
    if statuses.contains(&TcbStatus::Revoked) {
        Err(D::Error::custom(
            "tcbStatuses: no policy can accept a platform that is Revoked",
        ))
    } else {
        Ok(statuses)
    }
}

fn attributes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Number>, D::Error> {
    let all: Vec<Number> = several(deserializer)?;
    match all
        .iter()
        .map(|it| Attributes(it.0).never_allowed())
        .find(|never| never.0 != 0)
    {
        None => Ok(all),
        Some(never) => Err(D::Error::custom(format!(
            "tdAttributes: no policy can allow {never}"
        ))),
    }
}

/// Reads one value or a list.
fn several<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let all = match Value::deserialize(deserializer)? {
        Value::Array(all) => all,
        one => vec![one],
    };
    all.into_iter()
        .map(|one| T::deserialize(one).map_err(D::Error::custom))
        .collect()
}

/// Writes a list with one entry as that entry.
fn one_or_several<T: Serialize, S: Serializer>(
    all: &[T],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match all {
        [one] => one.serialize(serializer),
        all => all.serialize(serializer),
    }
}

fn features<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Number>, D::Error> {
    let all: Vec<Number> = several(deserializer)?;
    match all.iter().fold(0, |bits, it| bits | it.0 & !XFAM_KNOWN) {
        0 => Ok(all),
        unknown => Err(D::Error::custom(format!(
            "xfam: the features {unknown:#x} are unknown"
        ))),
    }
}

/// Reads names of advisories. One that Intel never gives would reject nothing.
fn advisories<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let all = Vec::<String>::deserialize(deserializer)?;
    let is_name = |id: &str| {
        let number = id
            .strip_prefix("INTEL-SA-")
            .or(id.strip_prefix("INTEL-DOC-"));
        number.is_some_and(|it| it.len() == 5 && it.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match all.iter().find(|id| !is_name(id)) {
        None => Ok(all),
        Some(other) => Err(D::Error::custom(format!(
            "{} is not an advisory: expected a name like INTEL-SA-00837 or INTEL-DOC-10003",
            base::text::quoted(other, 40)
        ))),
    }
}
