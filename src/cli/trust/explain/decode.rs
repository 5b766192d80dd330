//! Describes an event of a TCG event log for a person ("TCG PC Client Platform Firmware Profile
//! Specification", §10.4 and §10.2; UEFI 2.11 for its variables, §3.1.3 and §32.4.1). The log may
//! come from an untrusted machine, so every text is made printable and is limited in length.

use super::device_path;
use super::text::{ascii, guid, plain, utf16};
use base::bytes::Reader;
use base::x509::Certificate;
use verifier::event_log::{self, LogEntry};

/// Maximum number of certificates of a variable that are shown.
const SHOWN_NAMES: usize = 8;
/// Maximum number of partitions that are listed.
const SHOWN_PARTITIONS: usize = 32;
/// EFI_CERT_X509_GUID (UEFI 2.11, §32.4.1).
const X509: &str = "a5c059a1-94e4-4aa7-87b5-ab155c2bf072";

/// Returns the name of an event's type (§10.4.1).
pub fn type_name(kind: u32) -> String {
    let rare = match kind {
        0x2 => "EV_UNUSED",
        0x3 => "EV_NO_ACTION",
        0xb => "EV_TABLE_OF_DEVICES",
        0xe => "EV_IPL_PARTITION_DATA",
        0xf => "EV_NONHOST_CODE",
        0x10 => "EV_NONHOST_CONFIG",
        0x12 => "EV_OMIT_BOOT_DEVICE_EVENTS",
        0x13 => "EV_POST_CODE2",
        0x8000_0005 => "EV_EFI_RUNTIME_SERVICES_DRIVER",
        0x8000_000a => "EV_EFI_PLATFORM_FIRMWARE_BLOB2",
        0x8000_000b => "EV_EFI_HANDOFF_TABLES2",
        0x8000_000c => "EV_EFI_VARIABLE_BOOT2",
        0x8000_000d => "EV_EFI_GPT_EVENT2",
        0x8000_0010 => "EV_EFI_HCRTM_EVENT",
        0x8000_00e1 => "EV_EFI_SPDM_FIRMWARE_BLOB",
        0x8000_00e2 => "EV_EFI_SPDM_FIRMWARE_CONFIG",
        _ => return event_log::kind_name(kind).into(),
    };
    rare.into()
}

/// Returns a description of the measured data.
pub fn describe(event: &LogEntry) -> String {
    let (data, len) = event.uncut();
    let words = match event.kind {
        0x3 => no_action(data),
        0x8 => version(data),
        0x1 | 0x8000_0008 => blob(data),
        0x13 | 0x8000_000a => described_blob(data),
        0x4 => separator(data),
        0x6 => tagged(data),
        0xd => loader(event.pcr, data, announces(event)),
        0x11 => non_host(data),
        0x8000_0001 | 0x8000_0002 | 0x8000_000c => variable(data),
        0x8000_00e0 => authority(data),
        0x8000_0003..=0x8000_0005 => image(data),
        0x8000_0006 | 0x8000_000d => partitions(data),
        _ => None,
    };
    let words = words.unwrap_or_else(|| text(data));
    if len > data.len() {
        format!("{words} (cut: {} of {len} bytes)", data.len())
    } else {
        words
    }
}

/// Returns a description of data in an unknown form: its text, or its length.
fn text(data: &[u8]) -> String {
    match words(data) {
        Some(words) => words,
        None if data.is_empty() => String::new(),
        None => format!("{} bytes", data.len()),
    }
}

/// Returns data that is a text, in ASCII or UTF-16, with or without a terminating zero.
fn words(data: &[u8]) -> Option<String> {
    ascii(data).or_else(|| utf16(data))
}

fn no_action(data: &[u8]) -> Option<String> {
    let name = data.get(..16)?;
    if let Some([locality]) = data.strip_prefix(b"StartupLocality\0") {
        return Some(format!("the TPM started at locality {locality}"));
    }
    let name = ascii(name)?;
    Some(match name.as_str() {
        "Spec ID Event03" => "header of the log: crypto-agile".into(),
        "Spec ID Event00" => "header of the log: SHA-1".into(),
        _ => format!("{name}, {} bytes; not extended", data.len()),
    })
}

/// Returns the version of the firmware: a text, or a GUID.
fn version(data: &[u8]) -> Option<String> {
    match data.len() {
        16 => words(data).or_else(|| guid(data)),
        _ => words(data),
    }
    .map(|version| format!("version of the firmware: {version}"))
}

/// UEFI_PLATFORM_FIRMWARE_BLOB, or a text.
fn blob(data: &[u8]) -> Option<String> {
    if data.len() != 16 {
        return words(data);
    }
    let mut reader = Reader(data);
    let (base, len) = (reader.u64_le()?, reader.u64_le()?);
    Some(format!("{len} bytes of firmware at {base:#x}"))
}

/// UEFI_PLATFORM_FIRMWARE_BLOB2.
fn described_blob(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    let len = reader.u8()?;
    let name = words(reader.take(len.into())?)?;
    Some(format!("{name}: {}", blob(reader.0)?))
}

fn separator(data: &[u8]) -> Option<String> {
    Some(match data {
        [0, 0, 0, 0] | [0xff, 0xff, 0xff, 0xff] => "end of the firmware's part".into(),
        [1, 0, 0, 0] => "the firmware failed".into(),
        _ => return None,
    })
}

/// TCG_PCClientTaggedEvent.
fn tagged(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    let (tag, len) = (reader.u32_le()?, reader.u32_le()?);
    let words = words(reader.take(len as usize)?);
    // Linux, drivers/firmware/efi/libstub; systemd, src/boot
    let what = match tag {
        0x8f3b_22ec => return Some("initrd that the kernel loaded".into()),
        0x8f3b_22ed => return Some("command line that the kernel got".into()),
        0xf5bc_582a => "loader.conf",
        0x6c46_f751 => "devicetree addon",
        0x49df_fe0f => "initrd addon",
        0xdac0_8e1a => "microcode addon",
        0x13ae_d6db => "profile of the UKI",
        _ => return Some(format!("tag {tag:#x} {}", words.unwrap_or_default())),
    };
    Some(match words {
        Some(words) => format!("{what}: {words}"),
        None => what.into(),
    })
}

/// Returns whether systemd-stub measured the name of a section instead of its content.
fn announces(event: &LogEntry) -> bool {
    let name: Vec<u8> = event.data.iter().step_by(2).copied().collect();
    let digest = ring::digest::digest(&ring::digest::SHA256, &name);
    event.sha256.is_some_and(|sha256| sha256 == digest.as_ref())
}

/// Describes measurements of boot loaders: systemd-stub, GRUB, shim.
fn loader(pcr: u32, data: &[u8], is_name: bool) -> Option<String> {
    let words = words(data)?;
    let after = |prefixes: &[&str]| {
        let mut found = prefixes.iter().filter_map(|it| words.strip_prefix(it));
        found.next().map(str::to_owned)
    };
    if words.starts_with('.') && !words.contains(' ') {
        return Some(if is_name {
            format!("name of the UKI section {words}")
        } else {
            format!("UKI section {words}")
        });
    }
    if let Some(line) = after(&["kernel_cmdline: ", "grub_kernel_cmdline "]) {
        return Some(format!("kernel command line: {line}"));
    }
    if let Some(command) = after(&["grub_cmd: ", "grub_cmd "]) {
        return Some(format!("GRUB command: {command}"));
    }
    if let Some(line) = after(&["module_cmdline: "]) {
        return Some(format!("command line of a GRUB module: {line}"));
    }
    let is_wide = utf16(data).is_some() && ascii(data).is_none();
    Some(match pcr {
        9 if words.starts_with(['(', '/']) => format!("file that GRUB read: {words}"),
        14 => format!("shim: {words}"),
        // systemd-boot before version 251 used PCR 8
        8 | 12 if is_wide && words.contains('=') => format!("kernel command line: {words}"),
        _ => words,
    })
}

/// Google's Compute Engine.
fn non_host(data: &[u8]) -> Option<String> {
    let kind = data.strip_prefix(b"GCE NonHostInfo\0")?.first()?;
    let names = ["none", "AMD SEV", "AMD SEV-ES", "Intel TDX", "AMD SEV-SNP"];
    let name = names.get(usize::from(*kind)).unwrap_or(&"unknown");
    Some(format!("memory encryption by the host: {name}"))
}

/// UEFI_VARIABLE_DATA: a name, and its content as far as the log has it.
fn variable_parts(data: &[u8]) -> Option<(String, &[u8])> {
    let mut reader = Reader(data);
    reader.take(16)?;
    let (name_len, _) = (reader.u64_le()?, reader.u64_le()?);
    let name_len = usize::try_from(name_len).ok()?.checked_mul(2)?;
    let name = utf16(reader.take(name_len)?)?;
    Some((name, reader.0))
}

fn variable(data: &[u8]) -> Option<String> {
    let (name, contents) = variable_parts(data)?;
    let what = match (name.as_str(), contents) {
        (_, []) => Some("not set".into()),
        ("SecureBoot" | "SetupMode" | "AuditMode" | "DeployedMode" | "MokSBState", [state]) => {
            Some(if *state == 0 { "off" } else { "on" }.to_owned())
        }
        ("BootOrder", order) => {
            let numbers = order.chunks_exact(2);
            let numbers = numbers.map(|it| format!("{:02X}{:02X}", it[1], it[0]));
            Some(plain(&numbers.collect::<Vec<_>>().join(", ")))
        }
        ("PK" | "KEK" | "db" | "dbx" | "dbt" | "dbr" | "MokList" | "MokListX", lists) => {
            signatures(lists)
        }
        (name, option) if is_boot_option(name) => boot_option(option),
        _ => None,
    };
    let what = what.unwrap_or_else(|| text(contents));
    Some(format!("{name}: {what}"))
}

/// Returns whether a variable is a boot option, such as `Boot0001`.
fn is_boot_option(name: &str) -> bool {
    let number = name.strip_prefix("Boot");
    number.is_some_and(|it| it.len() == 4 && it.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// EFI_LOAD_OPTION (UEFI 2.11, §3.1.3).
fn boot_option(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    reader.u32_le()?;
    let path_len = reader.u16_le()?;
    let units = reader.0.chunks_exact(2);
    let end = units.into_iter().position(|unit| unit == [0, 0])?;
    let name = utf16(reader.take((end + 1) * 2)?).unwrap_or_default();
    let path = device_path::text(reader.take(path_len.into())?);
    Some(format!("{name:?}, {path}"))
}

/// Counts the signatures of EFI_SIGNATURE_LISTs, and names the certificates.
fn signatures(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    let (mut names, mut certificates, mut hashes) = (vec![], 0, 0);
    while !reader.0.is_empty() {
        let (kind, len) = (guid(reader.take(16)?)?, reader.u32_le()? as usize);
        let (header, each) = (reader.u32_le()? as usize, reader.u32_le()? as usize);
        // the list's header has 28 bytes
        let list = reader.take(len.checked_sub(28)?)?;
        let signatures = list.get(header..)?;
        let signatures = signatures.chunks_exact(Some(each).filter(|each| *each > 16)?);
        if kind == X509 {
            certificates += signatures.len()
        } else {
            hashes += signatures.len()
        }
        if kind == X509 {
            names.extend(signatures.filter_map(|it| common_name(&it[16..])));
        }
    }
    let plural = |count: usize, one: &str, many: &str| match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {many}"),
    };
    let mut text = plural(certificates, "certificate", "certificates");
    if !names.is_empty() {
        let more = if names.len() > SHOWN_NAMES {
            ", .."
        } else {
            ""
        };
        names.truncate(SHOWN_NAMES);
        text.push_str(&format!(" ({}{more})", names.join(", ")));
    }
    Some(format!("{text}, {}", plural(hashes, "hash", "hashes")))
}

/// Returns the common name of a certificate's subject.
fn common_name(certificate: &[u8]) -> Option<String> {
    let name = Certificate::parse(certificate).ok()?.common_name()?;
    Some(format!("{:?}", ascii(name.as_bytes())?))
}

/// What verified an image: UEFI_VARIABLE_DATA with one EFI_SIGNATURE_DATA; or a variable of shim.
fn authority(data: &[u8]) -> Option<String> {
    let (name, contents) = variable_parts(data)?;
    let certificate = contents.get(16..).and_then(common_name);
    Some(match certificate {
        Some(certificate) => format!("verified by {name}: {certificate}"),
        None => variable(data)?,
    })
}

/// UEFI_IMAGE_LOAD_EVENT.
fn image(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    reader.take(16)?;
    let (_, len) = (reader.u64_le()?, reader.u64_le()?);
    let len = usize::try_from(len).ok()?.min(reader.0.len());
    Some(device_path::text(reader.take(len)?))
}

/// UEFI_GPT_DATA.
fn partitions(data: &[u8]) -> Option<String> {
    let header = data.get(..92)?;
    let disk = guid(&header[56..72])?;
    let size = Reader(&header[84..]).u32_le()? as usize;
    let mut reader = Reader(&data[92..]);
    let count = reader.u64_le()?;
    let entries = reader
        .0
        .chunks_exact(Some(size).filter(|size| *size >= 128)?);
    let names = entries.take(SHOWN_PARTITIONS).filter_map(|entry| {
        let name = utf16(&entry[56..128]).unwrap_or_default();
        Some(format!("{} {name:?}", guid(&entry[16..32])?))
    });
    let names: Vec<_> = names.collect();
    Some(format!(
        "disk {disk} with {count} partitions: {}",
        names.join(", ")
    ))
}
