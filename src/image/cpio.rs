//! The archives in which systemd-stub passes files to the kernel after the initrd (systemd,
//! src/boot/cpio.c): the `newc` format of the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst. The kernel measures them together
//! with the initrd.

/// The folder of the files.
const FOLDER: &str = ".extra";
const FOLDER_MODE: u32 = 0o040_555;
const FILE_MODE: u32 = 0o100_444;

/// Returns an archive with this file in the folder `.extra`.
pub fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    member(&mut archive, 1, FOLDER_MODE, FOLDER, &[]);
    member(
        &mut archive,
        2,
        FILE_MODE,
        &format!("{FOLDER}/{name}"),
        content,
    );
    // in the stub, the trailer is a constant with upper-case digits; the members have lower-case
    // ones
    archive.extend_from_slice(b"070701");
    let fields = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 11, 0];
    for field in fields {
        archive.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    archive.extend_from_slice(b"TRAILER!!!\0\0\0\0");
    archive
}

fn member(archive: &mut Vec<u8>, inode: usize, mode: u32, name: &str, content: &[u8]) {
    let (mode, size, name_size) = (mode as usize, content.len(), name.len() + 1);
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
    archive.extend_from_slice(b"070701");
    for field in fields {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend_from_slice(content);
    pad(archive);
}

/// Pads to a multiple of four bytes.
pub fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}
