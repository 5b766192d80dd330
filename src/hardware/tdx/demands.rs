//! What a policy demands of a TDX machine beside its registers.

use serde::{Deserialize, Serialize};

use super::dcap::Verified;
use super::quote::{Attributes, Body, Quote};
use super::tcb::{Status, hex};
use crate::claims::{PlatformClaims, Property, TcbPart};

/// The demands. The default is the strictest that genuine machines meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Demands {
    /// The statuses of platforms that are accepted.
    pub tcb_statuses: Vec<Status>,
    /// The lowest number of Intel's evaluation: lower ones do not know newer vulnerabilities.
    pub minimum_evaluation: u32,
    /// The attributes of the TD.
    pub td_attributes: Number,
    /// The processor features of the TD (XFAM); absent: each that is not refused always.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xfam: Option<Number>,
    /// The accepted measurements of TDX modules; empty: each that Intel signed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mr_seam: Vec<Digits>,
    /// What the host must have named as configuration and owners.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mr_config_id: Option<Digits>,
    /// As before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mr_owner: Option<Digits>,
    /// As before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mr_owner_config: Option<Digits>,
    /// The accepted platforms by PPID or platform instance ID; empty: each. A stolen key of another platform is then worth nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<Digits>,
}

/// A number, in JSON as `0x` and hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number(pub u64);

/// Bytes in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Digits(String);

impl From<String> for Digits {
    fn from(text: String) -> Digits {
        Digits(text.to_ascii_lowercase())
    }
}

impl Default for Demands {
    fn default() -> Demands {
        Demands {
            tcb_statuses: vec![Status::UpToDate],
            minimum_evaluation: MINIMUM_EVALUATION,
            td_attributes: Number(Attributes::USUAL.0),
            xfam: None,
            mr_seam: vec![],
            mr_config_id: None,
            mr_owner: None,
            mr_owner_config: None,
            platforms: vec![],
        }
    }
}

/// The TCB evaluation data number that a policy demands if it names none: the one of Intel's TCB recovery that was standard in October
/// 2026. Intel still signs earlier evaluations with new dates, in which older platforms are up to date; who brings collateral could
/// choose one of them.
const MINIMUM_EVALUATION: u32 = 20;
/// The features that each TD has: x87 and SSE.
const XFAM_ALWAYS: u64 = 0b11;
/// Features that a policy must name: processor trace (8), user interrupts (14), records of branches (15) tell others what the TD does.
const XFAM_NAMED: u64 = 1 << 8 | 1 << 14 | 1 << 15;

impl Demands {
    /// Judges a machine. Returns its claims; an error names each demand that it does not meet.
    pub fn judge(&self, quote: &Quote<'_>, verified: &Verified) -> Result<PlatformClaims, String> {
        let body = &quote.body;
        let wrong: Vec<String> = [
            self.status(verified),
            self.evaluation(verified),
            self.attributes(body),
            self.features(body),
            one_of(
                "the measurement of the TDX module (MRSEAM)",
                &self.mr_seam,
                &[&body.mr_seam],
            ),
            one_of(
                "MRCONFIGID",
                self.mr_config_id.as_slice(),
                &[&body.mr_config_id],
            ),
            one_of("MROWNER", self.mr_owner.as_slice(), &[&body.mr_owner]),
            one_of(
                "MROWNERCONFIG",
                self.mr_owner_config.as_slice(),
                &[&body.mr_owner_config],
            ),
            self.platform(verified),
            service_td(body),
        ]
        .into_iter()
        .flatten()
        .collect();
        match wrong.is_empty() {
            true => Ok(self.claims(quote, verified)),
            false => Err(wrong.join("\n")),
        }
    }

    fn status(&self, verified: &Verified) -> Option<String> {
        let status = verified.status;
        let accepted = status != Status::Revoked && self.tcb_statuses.contains(&status);
        (!accepted).then(|| {
            let advisories = match verified.advisories.is_empty() {
                true => String::new(),
                false => format!(" ({})", verified.advisories.join(", ")),
            };
            let names: Vec<_> = self.tcb_statuses.iter().map(Status::to_string).collect();
            format!(
                "the TCB status of the platform is {status}{advisories}, expected {}",
                names.join(" or ")
            )
        })
    }

    fn evaluation(&self, verified: &Verified) -> Option<String> {
        let (got, minimum) = (verified.evaluation, self.minimum_evaluation);
        (got < minimum).then(|| {
            format!("the collateral is of Intel's evaluation {got}, expected at least {minimum}")
        })
    }

    fn attributes(&self, body: &Body) -> Option<String> {
        let (got, wanted) = (body.td_attributes, Attributes(self.td_attributes.0));
        let debug = match got.is_debug() && !wanted.is_debug() {
            true => ": the host can look into a machine with DEBUG",
            false => "",
        };
        (got != wanted).then(|| format!("TDATTRIBUTES: expected {wanted}, got {got}{debug}"))
    }

    fn features(&self, body: &Body) -> Option<String> {
        let got = body.xfam;
        let right = match self.xfam {
            Some(wanted) => got == wanted.0,
            None => got & XFAM_ALWAYS == XFAM_ALWAYS && got & XFAM_NAMED == 0,
        };
        (!right).then(|| match self.xfam {
            Some(wanted) => format!("XFAM: expected {:#x}, got {got:#x}", wanted.0),
            None => format!("XFAM {got:#x}: x87 and SSE are missing, or processor trace, user interrupts or branch records are on: name it in the policy to accept it"),
        })
    }

    fn platform(&self, verified: &Verified) -> Option<String> {
        let platform = &verified.platform;
        let instance = platform.instance.as_ref().map_or(&[][..], |id| id);
        one_of(
            "the platform (PPID, platform instance)",
            &self.platforms,
            &[&platform.ppid, instance],
        )
    }

    fn claims(&self, quote: &Quote<'_>, verified: &Verified) -> PlatformClaims {
        let (body, platform) = (&quote.body, &verified.platform);
        let svn = |name, got: u64| TcbPart {
            name,
            got,
            minimum: 0,
        };
        let mut properties = vec![
            Property {
                name: "TCB status",
                value: verified.status.to_string(),
            },
            Property {
                name: "FMSPC",
                value: hex(&platform.fmspc),
            },
            Property {
                name: "TDATTRIBUTES",
                value: body.td_attributes.to_string(),
            },
            Property {
                name: "XFAM",
                value: format!("{:#018x}", body.xfam),
            },
            Property {
                name: "MRSEAM",
                value: hex(&body.mr_seam),
            },
            Property {
                name: "MRCONFIGID",
                value: hex(&body.mr_config_id),
            },
            Property {
                name: "TEE_TCB_SVN",
                value: hex(&body.tee_tcb_svn),
            },
        ];
        if !verified.advisories.is_empty() {
            properties.push(Property {
                name: "advisories",
                value: verified.advisories.join(", "),
            });
        }
        PlatformClaims {
            technology: "Intel TDX".into(),
            signed_by: "Intel SGX Root CA, PCK, quoting enclave".into(),
            chip: Some(hex(platform.instance.as_ref().unwrap_or(&platform.ppid))),
            tcb: vec![
                TcbPart {
                    name: "evaluation",
                    got: verified.evaluation.into(),
                    minimum: self.minimum_evaluation.into(),
                },
                svn("pceSVN", platform.pce_svn.into()),
            ],
            properties,
            bound: vec![],
        }
    }
}

/// Says that none of the values is one that is accepted; `None` if nothing is demanded.
fn one_of(name: &str, accepted: &[Digits], got: &[&[u8]]) -> Option<String> {
    let got: Vec<_> = got
        .iter()
        .filter(|it| !it.is_empty())
        .map(|it| hex(it))
        .collect();
    let found = accepted.is_empty() || accepted.iter().any(|it| got.contains(&it.0));
    (!found).then(|| {
        let accepted: Vec<_> = accepted.iter().map(|it| it.0.as_str()).collect();
        format!(
            "{name}: expected {}, got {}",
            accepted.join(" or "),
            got.join(", ")
        )
    })
}

/// Refuses a TD that another TD serves: it can migrate it.
fn service_td(body: &Body) -> Option<String> {
    let served = body
        .td15
        .as_ref()
        .is_some_and(|td15| td15.mr_service_td != [0; 48]);
    served
        .then(|| "another TD serves the machine (MRSERVICETD is not zero) and could move it".into())
}

impl Serialize for Number {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:#x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text
            .strip_prefix("0x")
            .filter(|digits| !digits.starts_with('+'));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let expected = "expected 0x and at most 16 hexadecimal digits";
        number
            .map(Number)
            .ok_or_else(|| serde::de::Error::custom(expected))
    }
}
