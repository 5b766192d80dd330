//! Reports of this machine, a guest of SEV-SNP: only the fields that the attester reads (AMD 56860
//! §7.3).

use std::fmt;
use std::ops::Range;
use std::path::Path;

use sys::sev_guest;

use crate::{Error, tsm};

/// Length of a report in bytes.
pub const LEN: usize = 0x4a0;
/// The offsets in a report of REPORT_DATA, and of the signer info, which names the key that signed
/// it.
const REPORT_DATA: Range<usize> = 0x50..0x90;
const SIGNER_INFO: Range<usize> = 0x48..0x4c;
/// The device of kernels without configfs-tsm.
const DEVICE: &str = "/dev/sev-guest";

/// The key that signs a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportSigner {
    /// The versioned chip endorsement key.
    Vcek,
    /// The versioned loaded endorsement key, which a cloud gives to its machines.
    Vlek,
}

impl ReportSigner {
    /// Returns the key that the signer info of a report names.
    pub fn of(info: u32) -> Result<ReportSigner, Error> {
        if info & 2 != 0 {
            let text = "the host masked the key of the chip, so the report is not signed";
            return Err(Error::Malformed(text.into()));
        }
        let unsigned = match info >> 2 & 7 {
            0 => return Ok(ReportSigner::Vcek),
            1 => return Ok(ReportSigner::Vlek),
            7 => "the report is not signed".into(),
            other => format!("the report is signed by the unknown key {other}"),
        };
        Err(Error::Malformed(unsigned))
    }

    /// Returns the key that signed a report of this machine.
    pub fn of_report(report: &[u8]) -> Result<ReportSigner, Error> {
        let info = report
            .get(SIGNER_INFO)
            .and_then(|info| info.try_into().ok());
        let missing = || Error::Malformed("the report has no signer info".into());
        let info = info.ok_or_else(missing)?;
        ReportSigner::of(u32::from_le_bytes(info))
    }
}

impl fmt::Display for ReportSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReportSigner::Vcek => "VCEK",
            ReportSigner::Vlek => "VLEK",
        })
    }
}

/// Returns a report over these bytes, requested at VMPL 0, and the host's certificate table, which
/// may be empty.
pub fn report(report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let device = Path::new(DEVICE);
    let (report, table) = if !tsm::exists() && device.exists() {
        sev_guest::open(device)
            .and_then(|device| sev_guest::extended_report(&device, report_data, 0))
            .map_err(|error| Error::Unavailable(format!("{DEVICE}: {error}")))?
    } else {
        tsm::report("sev_guest", report_data, Some(0))?
    };
    Ok((checked(report, report_data)?, table))
}

/// Returns the report if it covers these bytes. The check is needed because the kernel does not
/// report every failed write.
fn checked(mut report: Vec<u8>, report_data: &[u8; 64]) -> Result<Vec<u8>, Error> {
    report.truncate(LEN);
    if report.len() != LEN {
        let len = report.len();
        let text = format!("the kernel returned no report: it has {len} bytes, expected {LEN}");
        return Err(Error::Malformed(text));
    }
    let other = "the kernel returned a report that was made for another caller";
    if report[REPORT_DATA] == *report_data {
        Ok(report)
    } else {
        Err(Error::Malformed(other.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_for_another_caller_is_refused() {
        let mut report = vec![0; LEN];
        report[0] = 2;
        report[0xa] = 2;
        report[0x34] = 1;
        report[0x50] = 7;
        let mut own = [0; 64];
        own[0] = 7;
        let longer = [report.clone(), vec![0; 100]].concat();
        assert_eq!(checked(longer, &own).unwrap(), report);
        let error = checked(report.clone(), &[0; 64]).unwrap_err();
        assert!(error.to_string().contains("another caller"), "{error}");
        let error = checked(report[1..].to_vec(), &own).unwrap_err();
        assert!(error.to_string().contains("no report"), "{error}");
    }
}
