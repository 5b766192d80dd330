//! How the state disk of a cloud is recognized.

use std::fs;
use std::path::Path;

/// What marks the state disk among the disks of a machine. A disk with the serial number `state` is it in every cloud.
pub struct StateDisk {
    /// What it is, for texts.
    pub description: &'static str,
    /// The label of the state disk.
    pub label: &'static str,
    /// Returns the label that the cloud gives to a disk; `None` if it gives none. The first argument is the folder in which the kernel
    /// lists block devices (`/sys/block`), the second a name in it.
    pub label_of: fn(&Path, &str) -> Option<String>,
}

/// The second disk of virtio, in clouds and machines whose disks have no labels: as the old system does it. A disk with a serial number
/// is another one.
pub const SECOND_VIRTIO: StateDisk = StateDisk {
    description: "/dev/vdb without a serial number",
    label: "vdb",
    label_of: |block_devices, disk| {
        let serial = fs::read_to_string(block_devices.join(disk).join("serial"));
        let has_serial = serial.is_ok_and(|serial| !serial.trim().is_empty());
        (!has_serial).then(|| disk.to_owned())
    },
};

/// Returns the text in a field that zeros or spaces fill up; empty if it is none.
pub fn text(field: &[u8]) -> String {
    let is_padding = |byte: &u8| matches!(byte, 0 | b' ');
    let text = field
        .iter()
        .position(|byte| *byte == 0)
        .map_or(field, |end| &field[..end]);
    let is_visible = text
        .iter()
        .all(|byte| is_padding(byte) || byte.is_ascii_graphic());
    match is_visible {
        true => String::from_utf8_lossy(text).trim().to_owned(),
        false => String::new(),
    }
}
