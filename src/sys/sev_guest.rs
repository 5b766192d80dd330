//! Reports of SEV-SNP through `/dev/sev-guest` (linux/sev-guest.h,
//! Documentation/virt/coco/sev-guest.rst), for kernels without configfs-tsm.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::check;

// _IOWR('S', 2, struct snp_guest_request_ioctl)
const SNP_GET_EXT_REPORT: u32 = 0xc020_5302;
/// Length in bytes of a response (`struct snp_report_resp`), and of what the kernel takes for
/// certificates (SEV_FW_BLOB_MAX_SIZE).
const RESPONSE_LEN: usize = 4000;
const CERTIFICATES_LEN: usize = 0x4000;
/// Where the firmware's answer has its status, its length, and the report.
const REPORT_AT: usize = 0x20;

/// `struct snp_guest_request_ioctl`.
#[repr(C)]
struct Request {
    version: u8,
    request: u64,
    response: u64,
    /// The firmware's error in the lower half, the hypervisor's in the upper half.
    error: u64,
}

/// `struct snp_ext_report_req`.
#[repr(C)]
struct ExtendedReport {
    report_data: [u8; 64],
    vmpl: u32,
    reserved: [u8; 28],
    certificates: u64,
    certificates_len: u32,
}

/// Opens the device.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Returns the firmware's response for these bytes at this VMPL, without its header, and the host's
/// certificate table. Both may have padding at the end. `EIO`: the error has the status codes of
/// firmware and hypervisor.
pub fn extended_report(
    device: &File,
    report_data: &[u8; 64],
    vmpl: u32,
) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut response = vec![0_u8; RESPONSE_LEN];
    let mut certificates = vec![0_u8; CERTIFICATES_LEN];
    let demand = ExtendedReport {
        report_data: *report_data,
        vmpl,
        reserved: [0; 28],
        certificates: certificates.as_mut_ptr() as u64,
        certificates_len: CERTIFICATES_LEN as u32,
    };
    let mut request = Request {
        version: 1,
        request: &raw const demand as u64,
        response: response.as_mut_ptr() as u64,
        error: 0,
    };
    // SAFETY: the kernel reads `demand`, and writes at most RESPONSE_LEN bytes to `response`,
    // CERTIFICATES_LEN bytes to `certificates`, and the struct itself; all of them live until the
    // call returns, and any bytes are valid in them.
    let done = check(unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            SNP_GET_EXT_REPORT as _,
            &raw mut request,
        )
    });
    done.map_err(|error| match request.error {
        0 => error,
        said => io::Error::new(
            error.kind(),
            format!("{error} (firmware and hypervisor: {said:#x})"),
        ),
    })?;
    let number = |at: usize| match response.get(at..at + 4) {
        Some([a, b, c, d]) => u32::from_le_bytes([*a, *b, *c, *d]),
        _ => 0,
    };
    match number(0) {
        0 => Ok((response.split_off(REPORT_AT), certificates)),
        status => Err(io::Error::other(format!(
            "the firmware refused the request with the status {status:#x}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's header says so.
    #[test]
    fn the_structures_have_the_sizes_of_the_kernel() {
        assert_eq!(
            size_of::<Request>(),
            (SNP_GET_EXT_REPORT >> 16 & 0x3fff) as usize
        );
        assert_eq!(size_of::<ExtendedReport>(), 112);
        assert_eq!(std::mem::offset_of!(ExtendedReport, certificates), 96);
    }

    #[test]
    fn another_device_makes_no_report() {
        let device = open(Path::new("/dev/null")).unwrap();
        let error = extended_report(&device, &[1; 64], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
