//! The variant `qemu-tdx`: a TDX machine without a TPM, whose own registers are the measurements.
//! `attest` describes its document.

use std::collections::BTreeMap;
use std::sync::Arc;

pub use attest::qemu_tdx::*;
use hardware::tdx::quote::{Body, Register, TdxQuote};

use crate::judged::{Measured, TDX};
use crate::policy::{Fault, PolicyError};
use crate::refusal::Kind;
use crate::sources::Sources;
use crate::{
    ClusterRegister, CredentialChallenge, Evidence, Identified, MachineIdentity, Measurement,
    Policy, Properties, Refusal, RegisterNames, Registers, Stage, Variant, hex, json, td,
};
use proto::attested::Collateral as Brought;
use tpm::Location;

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::qemu_tdx::VARIANT,
    judges: &[TDX],
    key: None,
    launch: None,
    validator: |policy, sources| {
        let policy = Arc::new(policy);
        let hardware = td::QuoteJudge::new(&policy, sources)?;
        Ok(Arc::new(TdValidator::new(policy, hardware)?))
    },
    collateral: Some(collateral),
    measure,
};

/// The content of a document; nothing in it is verified.
pub struct Said {
    /// The registers, by their numbers in policies.
    pub registers: BTreeMap<u32, Vec<u8>>,
    /// The event log of the firmware; empty if there is none.
    pub event_log: Vec<u8>,
}

/// Returns the content of a document of this variant; `None` if it is not one.
pub fn said(document: &[u8]) -> Option<Said> {
    let document: TdxDocument = serde_json::from_slice(document).ok()?;
    let quote = TdxQuote::parse(&document.raw_quote.0).ok()?;
    Some(Said {
        registers: registers(&quote.body),
        event_log: document.event_log.0,
    })
}

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Brought> {
    let document: TdxDocument = serde_json::from_slice(document).ok()?;
    td::collateral_of(&document.raw_quote.0, sources)
}

/// Validates documents against a policy.
pub struct TdValidator {
    policy: Arc<Policy>,
    hardware: td::QuoteJudge,
}

impl TdValidator {
    /// Makes a validator for a policy; `hardware` judges by it. It must be a policy of TDX
    /// machines.
    pub fn new(policy: Arc<Policy>, hardware: td::QuoteJudge) -> Result<TdValidator, PolicyError> {
        // a policy that accepts any image has no registers
        let has_some = !policy.images()[0].measurements().is_empty();
        if has_some && policy.registers() == Registers::Pcrs {
            return Err(Fault::Variant.because(
                "it has PCRs of a TPM, but machines of the variant qemu-tdx have registers of 48 bytes: 0 is MRTD, 1 to 4 are \
                 RTMR 0 to 3",
            ));
        }
        Ok(TdValidator { policy, hardware })
    }

    fn check(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let document: TdxDocument = json::document(evidence.document)?;
        let quote = TdxQuote::parse(&document.raw_quote.0)?;
        if quote.body.report_data != report_data(&document.user_data.0, evidence.nonce) {
            return Err(Kind::Nonce
                .because("the quote was made for another connection: its nonce does not match"));
        }
        let cluster = ClusterRegister::new(&quote.body.rtmr[3]);
        // before the signatures: a quote with wrong registers must not make this program fetch
        // collateral
        let image = self
            .policy
            .check(&registers(&quote.body), |index, measurement, got| {
                let (name, expected) = (Registers::Rtmrs.name(index), hex(&measurement.expected));
                match got {
                    Some(got) => format!("{name}: expected {expected}, got {}", hex(got)),
                    None => {
                        format!(
                            "{name}: expected {expected}, but a TDX machine has no such register"
                        )
                    }
                }
            })?;
        let sent = document.collateral.as_ref();
        let mut platform = self.hardware.judge(quote, sent, evidence.now)?;
        platform.bound = vec!["key and nonce of the connection: REPORTDATA".into()];
        Ok(Identified {
            user_data: document.user_data.0,
            machine: None,
            stage: None,
            image: Some(image.id().clone()),
            platform: Some(Arc::new(hardware::claims::printable(platform))),
            is_endorsed: true,
            tpm: None,
            cluster,
        })
    }
}

impl crate::Validator for TdValidator {
    fn properties(&self) -> Properties {
        Properties {
            oid: OID,
            challenges: false,
            takes_collateral: false,
            requires_strong: self.policy.requires_strong(),
            believes_any_tpm: false,
        }
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.check(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn crate::Validator>> {
        None
    }
}

/// Returns the registers, by their numbers in policies.
fn registers(body: &Body) -> BTreeMap<u32, Vec<u8>> {
    by_number(&[
        body.mr_td,
        body.rtmr[0],
        body.rtmr[1],
        body.rtmr[2],
        body.rtmr[3],
    ])
}

fn by_number(registers: &[Register; 5]) -> BTreeMap<u32, Vec<u8>> {
    (0..).zip(registers.iter().map(|it| it.to_vec())).collect()
}

/// Returns the registers of this machine. systemd does not extend them, so they are the same at
/// each stage.
fn measure(location: &Location, _stage: Stage) -> Result<Measured, tpm::Error> {
    let measured = |(index, expected)| {
        let warn_only = false;
        (
            index,
            Measurement {
                expected,
                warn_only,
            },
        )
    };
    let values = by_number(&td::read(location)?);
    let values: BTreeMap<_, _> = values.into_iter().map(measured).collect();
    Ok(Measured {
        booted: values.clone(),
        initramfs: values,
    })
}
