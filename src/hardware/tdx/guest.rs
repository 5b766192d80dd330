//! Quotes and registers of this machine, which is a TD.

use std::fs;
use std::io;
use std::path::Path;

use super::quote::{MAX_QUOTE, Quote, REGISTER_LEN, Register};
use crate::tsm::{self, Report};

/// The folder in which the kernel shows the registers of a TD, and extends them (Linux 6.16,
/// Documentation/ABI/testing/sysfs-devices-virtual-misc-tdx_guest).
pub const MEASUREMENTS: &str = "/sys/class/misc/tdx_guest/measurements";

/// Returns a quote over these bytes, which the quote contains.
pub fn quote(report_data: &[u8; 64]) -> Result<Vec<u8>, String> {
    checked(tsm::report("tdx_guest", report_data, None)?, report_data)
}

/// Returns the quote in a report, after it checked that the quote is over these bytes: the kernel loses an error of a write.
fn checked(report: Report, report_data: &[u8; 64]) -> Result<Vec<u8>, String> {
    if report.evidence.len() > MAX_QUOTE {
        let len = report.evidence.len();
        return Err(format!(
            "the kernel returned a quote of {len} bytes, expected at most {MAX_QUOTE}"
        ));
    }
    let quote = Quote::parse(&report.evidence)
        .map_err(|error| format!("the kernel returned no quote: {error}"))?;
    match quote.body.report_data == *report_data {
        true => Ok(report.evidence),
        false => Err("the kernel returned a quote that was made for another caller".into()),
    }
}

/// Returns the registers of this machine from the kernel's folder: MRTD, RTMR 0 to 3.
pub fn registers(folder: &Path) -> io::Result<[Register; 5]> {
    let read = |name: &str| {
        let bytes = fs::read(folder.join(name))?;
        let length = bytes.len();
        bytes.try_into().map_err(|_| {
            io::Error::other(format!(
                "{name} has {length} bytes, expected {REGISTER_LEN}"
            ))
        })
    };
    Ok([
        read("mrtd:sha384")?,
        read("rtmr0:sha384")?,
        read("rtmr1:sha384")?,
        read("rtmr2:sha384")?,
        read("rtmr3:sha384")?,
    ])
}

/// Extends an RTMR with a digest: the kernel does it for a write of 48 bytes.
pub fn extend(folder: &Path, rtmr: u32, digest: &[u8]) -> io::Result<()> {
    let file = folder.join(format!("rtmr{rtmr}:sha384"));
    let mut file = fs::OpenOptions::new().write(true).open(file)?;
    // one write: the kernel refuses a part
    match io::Write::write(&mut file, digest)? {
        REGISTER_LEN => Ok(()),
        written => Err(io::Error::other(format!(
            "the kernel took {written} of {REGISTER_LEN} bytes"
        ))),
    }
}
