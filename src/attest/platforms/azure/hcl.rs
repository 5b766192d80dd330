//! The report of Azure's paravisor (the "host compatibility layer", HCL), which a machine's TPM has
//! at an NV index: a hardware report, and runtime data (JSON) with the attestation key of the TPM.
//! The hardware report covers the hash of the runtime data.
//!
//! ```text
//!    0  "HCLA", version, size, request type, status, reserved: nothing signs this header
//!   32  report of the hardware: 1184 bytes of SEV-SNP, or 1024 of TDX (TDREPORT), or none
//! 1216  size of the rest, version 1, type of the report, hash (1 is SHA-256), length of the runtime data: 32 bits each, little endian
//! 1236  runtime data, then zeros
//! ```
//!
//! The layout is that of OpenHCL (microsoft/openvmm,
//! `openhcl_attestation_protocol/src/igvm_attest/get.rs`).

use base::bytes::Reader;

use crate::IssueError;
use tpm::{KeySource, Tpm};

/// The NV index of the report.
pub const INDEX: u32 = 0x0140_0001;
/// The attestation key.
pub const KEY: KeySource = KeySource::Persistent(0x8100_0003);
const HEADER: usize = 32;
const HARDWARE_REPORT: usize = 1184;
const TDREPORT: usize = 1024;
/// Size of the five numbers before the runtime data.
const NUMBERS: u32 = 20;
const SHA256: u32 = 1;

/// Returns the bytes at [`INDEX`] of the TPM at this location.
pub fn stored(location: &tpm::Location) -> Result<Vec<u8>, IssueError> {
    let stored = Tpm::open(location)?.nv(INDEX)?;
    stored.ok_or_else(|| {
        IssueError::new(format!(
            "the TPM has no HCL report at the NV index {INDEX:#x}: is this a confidential machine of Azure?"
        ))
    })
}

/// A report of the paravisor.
#[derive(Debug, PartialEq, Eq)]
pub struct HclReport<'a> {
    /// The report of the hardware.
    pub hardware: HardwareReport<'a>,
    /// The runtime data, byte for byte as hashed in the hardware report.
    pub runtime_data: &'a [u8],
}

/// The hardware report inside the paravisor's report. Nothing in it is verified.
#[derive(Debug, PartialEq, Eq)]
pub enum HardwareReport<'a> {
    /// A report of SEV-SNP: 1184 bytes.
    Snp(&'a [u8]),
    /// A TDREPORT of TDX: 1024 bytes. The host makes a quote from it.
    Tdx(&'a [u8]),
    /// The machine is not confidential (trusted launch).
    None,
}

impl<'a> HclReport<'a> {
    /// Parses the content of the NV index. Only padding may follow the runtime data.
    pub fn parse(bytes: &'a [u8]) -> Result<HclReport<'a>, &'static str> {
        Self::read(bytes).ok_or("the HCL report is truncated")?
    }

    fn read(bytes: &'a [u8]) -> Option<Result<HclReport<'a>, &'static str>> {
        let mut reader = Reader(bytes);
        if !reader.take(HEADER)?.starts_with(b"HCLA") {
            return Some(Err("the HCL report does not start with HCLA"));
        }
        let hardware = reader.take(HARDWARE_REPORT)?;
        let (size, version, kind) = (reader.u32_le()?, reader.u32_le()?, reader.u32_le()?);
        let (hash, length) = (reader.u32_le()?, reader.u32_le()?);
        if version != 1 {
            return Some(Err("the HCL report's data is not of version 1"));
        }
        if hash != SHA256 {
            return Some(Err("the HCL report's hash is not SHA-256"));
        }
        if length.checked_add(NUMBERS) != Some(size) {
            return Some(Err("the HCL report's two sizes contradict each other"));
        }
        let runtime_data = reader.take(usize::try_from(length).ok()?)?;
        if reader.0.iter().any(|byte| *byte != 0) {
            return Some(Err("bytes follow the runtime data of the HCL report"));
        }
        let hardware = match kind {
            2 => HardwareReport::Snp(hardware),
            4 => HardwareReport::Tdx(&hardware[..TDREPORT]),
            3 => HardwareReport::None,
            _ => {
                return Some(Err(
                    "the HCL report's type is none of SEV-SNP, TDX and trusted launch",
                ));
            }
        };
        Some(Ok(HclReport {
            hardware,
            runtime_data,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const JSON: &str = r#"{"keys":[],"vm-configuration":{"vmUniqueId":"A-1"}}"#;

    fn report(kind: u32, json: &str) -> Vec<u8> {
        let length = json.len() as u32;
        let numbers = [length + NUMBERS, 1, kind, SHA256, length].map(u32::to_le_bytes);
        [
            &b"HCLA"[..],
            &[0; HEADER - 4],
            &[7; HARDWARE_REPORT],
            numbers.as_flattened(),
            json.as_bytes(),
            &[0; 100],
        ]
        .concat()
    }

    #[test]
    fn a_report_is_cut_by_its_length_and_not_at_a_zero() {
        let json = JSON.replace("\"A-1\"", "\"A\0\"");
        for (kind, expected) in [
            (2, HardwareReport::Snp(&[7; HARDWARE_REPORT])),
            (4, HardwareReport::Tdx(&[7; TDREPORT])),
            (3, HardwareReport::None),
        ] {
            let bytes = report(kind, &json);
            let read = HclReport::parse(&bytes).unwrap();
            assert_eq!(read.hardware, expected);
            assert_eq!(read.runtime_data, json.as_bytes());
        }
    }

    #[test]
    fn a_report_of_another_form_is_refused_by_its_name() {
        let good = report(2, JSON);
        let with = |at: usize, value: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            bytes
        };
        let long = [good.as_slice(), &[1]].concat();
        for (bytes, why) in [
            (with(0, 0), "HCLA"),
            (with(1220, 2), "version 1"),
            (with(1224, 1), "type is none"),
            (with(1228, 2), "not SHA-256"),
            (with(1216, 7), "contradict"),
            (with(1232, u32::MAX), "contradict"),
            (long, "bytes follow"),
            (good[..1240].to_vec(), "truncated"),
            (vec![], "truncated"),
        ] {
            let error = HclReport::parse(&bytes).unwrap_err();
            assert!(error.contains(why), "{error}, expected {why}");
        }
    }

    #[test]
    fn mutated_reports_cause_no_panic() {
        for bytes in mutations(&report(4, JSON), 10_000) {
            if let Ok(report) = HclReport::parse(&bytes) {
                assert!(report.runtime_data.len() <= bytes.len());
            }
        }
    }
}
