//! How the state disk of a cloud is recognized.

use std::fs;
use std::path::Path;

use base::machines::Cloud;
use serde_json::Value;
use sys::nvme;

/// How a cloud marks the state disk among the disks of a machine. In every cloud, a disk with the
/// serial number `state` is the state disk.
pub struct Mark {
    /// A description for messages.
    pub description: &'static str,
    /// The label of the state disk.
    pub label: &'static str,
    /// Returns the label that the cloud gives to a disk; `None` if it gives none. The first
    /// argument is the folder in which the kernel lists block devices (`/sys/block`), the second a
    /// name in it.
    pub label_of: fn(&Path, &str) -> Option<String>,
}

/// Returns what marks the state disk in this cloud.
pub fn mark(cloud: Cloud) -> &'static Mark {
    match cloud {
        // the disks have no labels; as in Constellation
        Cloud::Qemu | Cloud::Static | Cloud::OpenStack | Cloud::Stackit => &Mark {
            description: "/dev/vdb without a serial number",
            label: "vdb",
            label_of: name_without_serial,
        },
        Cloud::Aws => &Mark {
            description: "the EBS volume that is attached as /dev/sdb",
            label: "sdb",
            label_of: volume_name,
        },
        Cloud::Gcp => &Mark {
            description: "the persistent disk with the device name state-disk",
            label: "state-disk",
            label_of: device_name,
        },
        Cloud::Azure => &Mark {
            description: "the data disk with the logical unit number 0",
            label: "lun0",
            label_of: data_disk,
        },
    }
}

/// Returns the serial number of a disk; empty if it has none.
pub fn serial(block_devices: &Path, disk: &str) -> String {
    let serial = fs::read_to_string(block_devices.join(disk).join("serial"));
    serial.unwrap_or_default().trim().to_owned()
}

/// Returns the name of a disk; `None` if the disk has a serial number.
fn name_without_serial(block_devices: &Path, disk: &str) -> Option<String> {
    let has_serial = !serial(block_devices, disk).is_empty();
    (!has_serial).then(|| disk.to_owned())
}

/// Returns the name under which an EBS volume is attached, e.g. `sdb`. The volume's NVMe controller
/// has it in the vendor-specific area ("Amazon EBS volumes and NVMe").
fn volume_name(_: &Path, disk: &str) -> Option<String> {
    if !disk.starts_with("nvme") {
        return None;
    }
    volume_name_in(&nvme::identify_controller(&Path::new("/dev").join(disk)).ok()?)
}

/// Returns the name in the answer to Identify Controller.
fn volume_name_in(answer: &[u8; nvme::ANSWER]) -> Option<String> {
    // NVM Express Base Specification, Identify Controller: model number, vendor specific
    let (model, name) = (text(&answer[24..64]), text(&answer[3072..3104]));
    let name = name.strip_prefix("/dev/").unwrap_or(&name);
    (model == "Amazon Elastic Block Store").then(|| name.to_owned())
}

/// Returns the device name of a persistent disk: from its NVMe namespace, or the identification of
/// a SCSI disk.
fn device_name(block_devices: &Path, disk: &str) -> Option<String> {
    if disk.starts_with("nvme") {
        let device = Path::new("/dev").join(disk);
        let answer = nvme::identify_namespace(&device, namespace(block_devices, disk)?);
        return name_in_namespace(&answer.ok()?);
    }
    name_in_page(&fs::read(block_devices.join(disk).join("device/vpd_pg83")).ok()?)
}

/// Returns the identifier of an NVMe namespace. The number in the name of the disk is another one, as soon as
/// an identifier is left out.
fn namespace(block_devices: &Path, disk: &str) -> Option<u32> {
    let nsid = fs::read_to_string(block_devices.join(disk).join("nsid"));
    nsid.ok()?.trim().parse().ok()
}

/// Returns the device name in the answer to Identify Namespace: JSON in the area of the vendor
/// (google_nvme_id of Google's guest configs).
fn name_in_namespace(answer: &[u8; nvme::ANSWER]) -> Option<String> {
    let vendor: Value = serde_json::from_str(&text(&answer[384..])).ok()?;
    vendor["device_name"].as_str().map(str::to_owned)
}

/// Returns the device name in page 83h of the vital product data (SPC-4, Device Identification):
/// the designator with the vendor's identification (T10) is `Google  PersistentDisk  NAME`.
fn name_in_page(page: &[u8]) -> Option<String> {
    let mut rest = page.get(4..)?;
    while let [_, kind, _, len, more @ ..] = rest {
        let len = usize::from(*len);
        let value = text(more.get(..len)?);
        if kind & 0xf == 1 && value.starts_with("Google") {
            return value.split_whitespace().last().map(str::to_owned);
        }
        rest = &more[len..];
    }
    None
}

/// Returns `lunN` for the data disk with the logical unit number N, as Azure's udev rules do. The
/// disk is on the second SCSI controller of Hyper-V, or on the controller of NVMe disks, where the
/// first namespace is the disk of the operating system.
fn data_disk(block_devices: &Path, disk: &str) -> Option<String> {
    let folder = block_devices.join(disk);
    let read = |name: &str| fs::read_to_string(folder.join(name));
    if disk.starts_with("nvme") {
        let model = read("device/model").ok()?;
        let lun = namespace(block_devices, disk)?.checked_sub(2)?;
        return model
            .starts_with("MSFT NVMe Accelerator")
            .then(|| format!("lun{lun}"));
    }
    let device = fs::canonicalize(folder.join("device")).ok()?;
    let is_of_data = device
        .iter()
        .any(|part| part.to_string_lossy().starts_with("f8b3781b-"));
    // HOST:CHANNEL:TARGET:LUN
    let name = device.file_name()?.to_string_lossy();
    let (_, lun) = name.rsplit_once(':')?;
    is_of_data.then(|| format!("lun{lun}"))
}

/// Returns the text in a field that is padded with zeros or spaces; empty if there is none.
fn text(field: &[u8]) -> String {
    let is_padding = |byte: &u8| matches!(byte, 0 | b' ');
    let text = field
        .iter()
        .position(|byte| *byte == 0)
        .map_or(field, |end| &field[..end]);
    let is_visible = text
        .iter()
        .all(|byte| is_padding(byte) || byte.is_ascii_graphic());
    if is_visible {
        String::from_utf8_lossy(text).trim().to_owned()
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use support::mutation::mutations;

    use super::*;

    #[test]
    fn the_volume_name_is_that_of_an_ebs_volume() {
        let mut answer = [0; nvme::ANSWER];
        answer[24..64].copy_from_slice(b"Amazon Elastic Block Store              ");
        for (field, name) in [
            (&b"sdb"[..], "sdb"),
            (b"/dev/sdb", "sdb"),
            (b"xvda", "xvda"),
        ] {
            answer[3072..3104].fill(b' ');
            answer[3072..3072 + field.len()].copy_from_slice(field);
            assert_eq!(volume_name_in(&answer).as_deref(), Some(name));
        }
        answer[24..64].copy_from_slice(b"Amazon EC2 NVMe Instance Storage        ");
        assert_eq!(volume_name_in(&answer), None);
    }

    #[test]
    fn a_disk_has_its_device_name_by_nvme_and_by_scsi() {
        let mut answer = [0; nvme::ANSWER];
        let vendor = br#"{"device_name":"state-disk","disk_type":"PERSISTENT"}"#;
        answer[384..384 + vendor.len()].copy_from_slice(vendor);
        assert_eq!(name_in_namespace(&answer).as_deref(), Some("state-disk"));
        answer[384] = b'x';
        assert_eq!(name_in_namespace(&answer), None);
        let designator =
            |kind: u8, value: &[u8]| [&[2, kind, 0, value.len() as u8], value].concat();
        let body = [
            designator(3, &[0x50, 1, 2, 3, 4, 5, 6, 7]),
            designator(1, b"Google  PersistentDisk  state-disk"),
        ]
        .concat();
        let page = [&[0, 0x83, 0, body.len() as u8], &body[..]].concat();
        assert_eq!(name_in_page(&page).as_deref(), Some("state-disk"));
        assert_eq!(name_in_page(&page[..20]), None);
        for page in mutations(&page, 5000) {
            let _ = name_in_page(&page);
        }
    }

    #[test]
    fn a_namespace_has_its_own_number_and_not_that_of_its_name() {
        let blocks = tempfile::tempdir().unwrap();
        for (name, nsid) in [("nvme0n1", "1\n"), ("nvme0n2", "7\n"), ("nvme1n1", "x\n")] {
            fs::create_dir(blocks.path().join(name)).unwrap();
            fs::write(blocks.path().join(name).join("nsid"), nsid).unwrap();
        }
        for (name, expected) in [
            ("nvme0n1", Some(1)),
            ("nvme0n2", Some(7)),
            ("nvme1n1", None),
            ("nvme2n1", None),
        ] {
            assert_eq!(namespace(blocks.path(), name), expected, "{name}");
        }
    }

    #[test]
    fn the_data_disk_has_its_number_by_scsi_and_by_nvme() {
        let sys = tempfile::tempdir().unwrap();
        let blocks = sys.path().join("block");
        let add = |name: &str, controller: &str, lun: u32| {
            let device =
                format!("vmbus/{controller}-1e82-4818-a1c3-63d806ec15bb/host1/1:0:0:{lun}");
            let device = sys.path().join(device);
            fs::create_dir_all(&device).unwrap();
            fs::create_dir_all(blocks.join(name)).unwrap();
            symlink(device, blocks.join(name).join("device")).unwrap();
        };
        add("sda", "f8b3781a", 0);
        add("sdb", "f8b3781b", 0);
        add("sdc", "f8b3781b", 3);
        for (name, namespace) in [("nvme0n1", "1\n"), ("nvme0n2", "2\n"), ("nvme0n3", "5\n")] {
            fs::create_dir_all(blocks.join(name).join("device")).unwrap();
            fs::write(blocks.join(name).join("nsid"), namespace).unwrap();
            let model = blocks.join(name).join("device/model");
            fs::write(model, "MSFT NVMe Accelerator v1.0              \n").unwrap();
        }
        for (name, expected) in [
            ("sda", None),
            ("sdb", Some("lun0")),
            ("sdc", Some("lun3")),
            ("nvme0n1", None),
            ("nvme0n2", Some("lun0")),
            // the disks with the numbers 1 and 2 were detached
            ("nvme0n3", Some("lun3")),
            ("sdz", None),
        ] {
            assert_eq!(data_disk(&blocks, name).as_deref(), expected, "{name}");
        }
    }
}
