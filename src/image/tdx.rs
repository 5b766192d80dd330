//! MRTD, the measurement of a TDX machine's firmware, computed from its file. Each page that the
//! hypervisor adds to the machine before it starts extends MRTD. For measured pages, each 256 bytes
//! of content extend it, too (Intel TDX Module ABI, TDH.MEM.PAGE.ADD, TDH.MR.EXTEND).
//!
//! Linux with KVM (6.16 or newer) measures the content of a page right after it adds the page. A
//! hypervisor with another order gives another MRTD for the same firmware.

use ring::digest::{Context, SHA384};

use super::error::Error;
use super::firmware::Firmware;

const PAGE: usize = 4096;
/// The number of bytes that one extension by content covers.
const CHUNK: usize = 256;

/// Returns the MRTD of machines with this firmware.
pub fn mrtd(firmware: &Firmware<'_>) -> Result<[u8; 48], Error> {
    let mut context = Context::new(&SHA384);
    for section in firmware.tdx_sections()? {
        for start in (0..section.len).step_by(PAGE) {
            let page = section.address + start;
            context.update(&record(b"MEM.PAGE.ADD", page));
            if !section.is_measured {
                continue;
            }
            for offset in (0..PAGE as u64).step_by(CHUNK) {
                // bytes that the file does not have are zero
                let mut chunk = [0; CHUNK];
                let content = section.content.get((start + offset) as usize..);
                let content = content.unwrap_or_default();
                let len = content.len().min(CHUNK);
                chunk[..len].copy_from_slice(&content[..len]);
                context.update(&record(b"MR.EXTEND", page + offset));
                context.update(&chunk);
            }
        }
    }
    let mut value = [0; 48];
    value.copy_from_slice(context.finish().as_ref());
    Ok(value)
}

/// Returns the 128 bytes that extend MRTD: the name of the operation, and an address.
fn record(name: &[u8], address: u64) -> [u8; 128] {
    let mut record = [0; 128];
    record[..name.len()].copy_from_slice(name);
    record[16..24].copy_from_slice(&address.to_le_bytes());
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::boot_image::{TdxSection, tdx_firmware};
    use support::mutation::mutations;

    fn of(sections: &[TdxSection]) -> Result<[u8; 48], Error> {
        mrtd(&Firmware::parse(&tdx_firmware(sections)).unwrap())
    }

    #[test]
    fn each_page_counts_and_the_content_of_those_that_are_measured() {
        let page = PAGE as u64;
        let usual = [(0, 4096, 0xff000, page, 0, 1), (0, 0, 0x800000, page, 3, 0)];
        let value = of(&usual).unwrap();
        let mut expected = Context::new(&SHA384);
        expected.update(&record(b"MEM.PAGE.ADD", 0xff000));
        for chunk in 0..16 {
            expected.update(&record(b"MR.EXTEND", 0xff000 + 256 * chunk));
            expected.update(&(0..=255).collect::<Vec<u8>>());
        }
        expected.update(&record(b"MEM.PAGE.ADD", 0x800000));
        assert_eq!(value, expected.finish().as_ref());
        // memory that the machine accepts itself has no effect, but any other change has
        let accepted = [usual[0], usual[1], (0, 0, 0x900000, page, 4, 2)];
        assert_eq!(of(&accepted).unwrap(), value);
        for changed in [
            [(0, 4096, 0xff000, page, 0, 0), usual[1]],
            [(0, 4095, 0xff000, page, 0, 1), usual[1]],
            [(0, 4096, 0x100000, page, 0, 1), usual[1]],
            [usual[0], (0, 0, 0x800000, 2 * page, 3, 0)],
            [usual[1], usual[0]],
        ] {
            assert_ne!(of(&changed).unwrap(), value, "{changed:?}");
        }
    }

    #[test]
    fn damaged_metadata_is_refused() {
        let page = PAGE as u64;
        for (section, why) in [
            ((0, 0, 0x1001, page, 3, 0), "whole pages"),
            ((0, 0, 0x1000, page + 1, 3, 0), "whole pages"),
            ((0, 0, u64::MAX - 0xfff, page, 3, 0), "whole pages"),
            ((0, 8192, 0x1000, page, 0, 1), "damaged or too new"),
            ((u32::MAX, 16, 0x1000, page, 0, 1), "damaged or too new"),
            ((0, 0, 0x1000, 1 << 40, 3, 0), "damaged or too new"),
            ((0, 0, 0x1000, page, 5, 0), "the host puts a kernel"),
            ((0, 0, 0x1000, page, 77, 0), "damaged or too new"),
        ] {
            let error = of(&[section]).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        let whole = tdx_firmware(&[(0, 4096, 0xff000, page, 0, 1), (0, 0, 0x800000, page, 3, 0)]);
        for changed in mutations(&whole, 2000) {
            if let Ok(firmware) = Firmware::parse(&changed) {
                let _ = mrtd(&firmware);
            }
        }
    }
}
