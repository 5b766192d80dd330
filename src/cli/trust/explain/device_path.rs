//! The text of an EFI device path (UEFI 2.11, chapter 10): where the firmware found an image.

use super::text::{ascii, guid, utf16};
use base::text::hex;

use base::bytes::Reader;

/// Maximum number of nodes; those of real machines have less than 20.
const MAX_NODES: usize = 40;
const END: u8 = 0x7f;

/// Returns the text of a path, as the UEFI shell shows it (§10.6.1.6), up to its end or to the
/// first node that is not complete.
pub fn text(path: &[u8]) -> String {
    let mut reader = Reader(path);
    let nodes: Vec<_> = std::iter::from_fn(|| node(&mut reader))
        .take(MAX_NODES)
        .collect();
    nodes.join("/")
}

fn node(reader: &mut Reader) -> Option<String> {
    let (kind, sub, len) = (reader.u8()?, reader.u8()?, reader.u16_le()?);
    if kind == END {
        return None;
    }
    let data = reader.take(usize::from(len).checked_sub(4)?)?;
    Some(known(kind, sub, &mut Reader(data)).unwrap_or_else(|| format!("Path({kind},{sub})")))
}

fn known(kind: u8, sub: u8, data: &mut Reader) -> Option<String> {
    Some(match (kind, sub) {
        (1, 1) => {
            let (function, device) = (data.u8()?, data.u8()?);
            format!("Pci({device:#x},{function:#x})")
        }
        (1, 4) => format!("VenHw({})", guid(data.0)?),
        (2, 1) => {
            let (id, unit) = (data.u32_le()?, data.u32_le()?);
            match id {
                0x0a03_41d0 => format!("PciRoot({unit:#x})"),
                0x0a08_41d0 => format!("PcieRoot({unit:#x})"),
                _ => format!("Acpi({id:#x},{unit:#x})"),
            }
        }
        (3, 2) => format!("Scsi({:#x},{:#x})", data.u16_le()?, data.u16_le()?),
        (3, 5) => format!("USB({:#x},{:#x})", data.u8()?, data.u8()?),
        (3, 11) => format!("MAC({})", hex(data.take(6)?)),
        (3, 18) => {
            let (port, multiplier, unit) = (data.u16_le()?, data.u16_le()?, data.u16_le()?);
            format!("Sata({port:#x},{multiplier:#x},{unit:#x})")
        }
        (3, 23) => {
            let (namespace, id) = (data.u32_le()?, data.u64_le()?);
            format!("NVMe({namespace:#x},{id:016x})")
        }
        (3, 24) => format!("Uri({})", ascii(data.0)?),
        (4, 1) => {
            let (partition, start, size) = (data.u32_le()?, data.u64_le()?, data.u64_le()?);
            let (signature, format) = (data.take(16)?, data.u8()?);
            match format {
                2 => format!(
                    "HD({partition},GPT,{},{start:#x},{size:#x})",
                    guid(signature)?
                ),
                _ => format!("HD({partition},{start:#x},{size:#x})"),
            }
        }
        (4, 3) => format!("VenMedia({})", guid(data.0)?),
        (4, 4) => utf16(data.0)?,
        (4, 6) => format!("FvFile({})", guid(data.0)?),
        (4, 7) => format!("Fv({})", guid(data.0)?),
        (4, 8) => {
            data.u32_le()?;
            format!("Offset({:#x},{:#x})", data.u64_le()?, data.u64_le()?)
        }
        (5, 1) => {
            data.take(4)?;
            format!("BBS({})", ascii(data.0)?)
        }
        _ => return None,
    })
}
