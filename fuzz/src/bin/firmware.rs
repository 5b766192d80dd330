//! The file of a firmware, from which the launch digest of an SEV-SNP machine is computed.
#![no_main]

use image::firmware::Firmware;
use image::snp::{Cpu, Hypervisor, KernelFiles, Launch};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(firmware) = Firmware::parse(bytes) else {
        return;
    };
    let _ = image::tdx::mrtd(&firmware);
    for hypervisor in Hypervisor::ALL {
        let launch = Launch {
            firmware: &firmware,
            hypervisor,
            processors: 2,
            cpu: Cpu(0),
            features: 1,
            kernel: Some(KernelFiles {
                kernel: b"",
                initrd: b"",
                command_line: "",
            }),
        };
        let _ = launch.digest();
    }
});
