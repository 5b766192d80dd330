//! Requests to NVMe devices: the command Identify (NVM Express Base Specification, admin commands).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::check;

/// Size of an answer in bytes.
pub const ANSWER: usize = 4096;

// _IOWR('N', 0x41, struct nvme_admin_cmd) of linux/nvme_ioctl.h
const NVME_IOCTL_ADMIN_CMD: u32 = 0xc048_4e41;
/// The opcode of Identify.
const IDENTIFY: u8 = 6;
/// The object that Identify describes (CNS): the namespace, the controller.
const NAMESPACE: u32 = 0;
const CONTROLLER: u32 = 1;
/// Time limit of a command in milliseconds.
const TIMEOUT: u32 = 2000;

/// `struct nvme_admin_cmd`.
#[repr(C)]
#[derive(Default)]
struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dwords_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_len: u32,
    data_len: u32,
    dwords_10_15: [u32; 6],
    timeout: u32,
    result: u32,
}

/// Returns what the controller of the block device at `path` says about itself.
pub fn identify_controller(path: &Path) -> io::Result<[u8; ANSWER]> {
    identify(path, CONTROLLER, 0)
}

/// Returns what the controller of the block device at `path` says about this namespace.
pub fn identify_namespace(path: &Path, namespace: u32) -> io::Result<[u8; ANSWER]> {
    identify(path, NAMESPACE, namespace)
}

fn identify(path: &Path, what: u32, namespace: u32) -> io::Result<[u8; ANSWER]> {
    let device = File::open(path)?;
    let mut answer = [0; ANSWER];
    let mut command = Command {
        opcode: IDENTIFY,
        namespace,
        address: answer.as_mut_ptr() as u64,
        data_len: ANSWER as u32,
        timeout: TIMEOUT,
        ..Command::default()
    };
    command.dwords_10_15[0] = what;
    // SAFETY: the kernel reads and writes one nvme_admin_cmd, which `Command` is, and writes at
    // most data_len bytes to address.
    check(unsafe { libc::ioctl(device.as_raw_fd(), NVME_IOCTL_ADMIN_CMD as _, &mut command) })?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_as_the_kernel_has_it_and_other_files_answer_nothing() {
        assert_eq!(size_of::<Command>(), 72);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(identify_controller(file.path()).is_err());
        assert!(identify_namespace(Path::new("/nonexistent"), 1).is_err());
    }
}
