//! Quotes and registers of this machine, a TD (Intel TDX): only the fields that the attester reads.

use std::fs;
use std::io;
use std::path::Path;

use crate::{Error, tsm};

/// Maximum size of a quote in bytes: genuine ones have about 5 KiB, and their certificate chain
/// differs by some hundred bytes.
pub const MAX_QUOTE: usize = 32 << 10;
/// Length in bytes of a register.
pub const REGISTER_LEN: usize = 48;
/// The offset of REPORTDATA in the body of a quote.
const REPORT_DATA: usize = 520;

/// A register: MRTD, an RTMR, or an identity of 48 bytes.
pub type Register = [u8; REGISTER_LEN];

/// The folder in which the kernel shows the registers of a TD, and extends them (Linux 6.16,
/// Documentation/ABI/testing/sysfs-devices-virtual-misc-tdx_guest).
pub const MEASUREMENTS: &str = "/sys/class/misc/tdx_guest/measurements";

/// Returns a quote over these bytes, which the quote contains.
pub fn quote(report_data: &[u8; 64]) -> Result<Vec<u8>, Error> {
    let (quote, _) = tsm::report("tdx_guest", report_data, None)?;
    checked(quote, report_data)
}

/// Returns the quote if it covers these bytes. The check is needed because the kernel does not
/// report every failed write.
fn checked(quote: Vec<u8>, report_data: &[u8; 64]) -> Result<Vec<u8>, Error> {
    let len = quote.len();
    let wrong = match bound(&quote) {
        _ if len > MAX_QUOTE => format!("a quote of {len} bytes, expected at most {MAX_QUOTE}"),
        None => "no quote of version 4 or 5".into(),
        Some(bound) if bound == report_data => return Ok(quote),
        Some(_) => "a quote that was made for another caller".into(),
    };
    Err(Error::Malformed(format!("the kernel returned {wrong}")))
}

/// Returns REPORTDATA of a quote. Its body follows 48 bytes in version 4, and 54 in version 5.
fn bound(quote: &[u8]) -> Option<&[u8]> {
    let body = match quote.get(..2)? {
        [4, 0] => 48,
        [5, 0] => 54,
        _ => return None,
    };
    quote.get(body + REPORT_DATA..)?.get(..64)
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
    // one write: the kernel refuses a partial one
    match io::Write::write(&mut file, digest)? {
        REGISTER_LEN => Ok(()),
        written => Err(io::Error::other(format!(
            "the kernel accepted {written} of {REGISTER_LEN} bytes"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_for_another_caller_is_refused() {
        for (version, at) in [(4, 568), (5, 574)] {
            let mut evidence = vec![0; 1000];
            evidence[0] = version;
            evidence[at] = 7;
            let own = |first| {
                let mut own = [0; 64];
                own[0] = first;
                own
            };
            assert_eq!(checked(evidence.clone(), &own(7)).unwrap(), evidence);
            let error = checked(evidence.clone(), &own(8)).unwrap_err();
            assert!(error.to_string().contains("another caller"), "{error}");
            let error = checked(evidence[..600].to_vec(), &own(7)).unwrap_err();
            assert!(error.to_string().contains("no quote"), "{error}");
            evidence.resize(MAX_QUOTE + 1, 0);
            let error = checked(evidence, &own(7)).unwrap_err();
            assert!(error.to_string().contains("expected at most"), "{error}");
        }
    }
}
