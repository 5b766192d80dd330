//! Reports of this machine, which is a guest of SEV-SNP.

use std::path::Path;

use sys::sev_guest;

use super::report::{LEN, Report};
use crate::tsm;

/// The device of kernels without configfs-tsm.
const DEVICE: &str = "/dev/sev-guest";

/// Returns a report over these bytes, requested at VMPL 0, and the host's certificate table, which may be empty.
pub fn report(report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let device = Path::new(DEVICE);
    let (report, table) = match !tsm::exists() && device.exists() {
        false => {
            let made = tsm::report("sev_guest", report_data, Some(0))?;
            (made.evidence, made.auxiliary)
        }
        true => sev_guest::open(device)
            .and_then(|device| sev_guest::extended_report(&device, report_data, 0))
            .map_err(|error| format!("{DEVICE}: {error}"))?,
    };
    Ok((checked(report, report_data)?, table))
}

/// Returns the report after it checked that the report is over these bytes: the kernel loses an error of a write.
fn checked(mut report: Vec<u8>, report_data: &[u8; 64]) -> Result<Vec<u8>, String> {
    report.truncate(LEN);
    let parsed = Report::parse(&report)
        .map_err(|error| format!("the kernel returned no report: {error}"))?;
    match parsed.report_data == *report_data {
        true => Ok(report),
        false => Err("the kernel returned a report that was made for another caller".into()),
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
        assert!(error.contains("another caller"), "{error}");
        let error = checked(report[1..].to_vec(), &own).unwrap_err();
        assert!(error.contains("no report"), "{error}");
    }
}
