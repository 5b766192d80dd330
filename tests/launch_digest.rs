//! The launch digests of SEV-SNP machines: what `image` computes is what sev-snp-measure of virtee computes.

use std::fs;
use std::path::{Path, PathBuf};

use image::firmware::Firmware;
use image::snp::{Cpu, Hypervisor, Kernel, Launch, LaunchDigest};
use support::foreign::{python, rust_crate};
use support::mutation::mutations;

/// The firmware of Debian's package `ovmf`, whose metadata has no place for a kernel's hashes.
const DEBIAN: &str = "/usr/share/ovmf/OVMF.fd";
/// Reads a line with a tuple for each digest; a digest without a kernel has three empty texts.
const PROGRAM: &str = "
import ast, sys
from sevsnpmeasure import guest, sev_mode, vmm_types
for line in sys.stdin:
    vcpus, signature, firmware, kernel, initrd, command_line, features, vmm = ast.literal_eval(line)
    digest = guest.calc_launch_digest(sev_mode.SevMode.SEV_SNP, vcpus, signature, firmware, kernel, initrd,
        command_line, features, vmm_type=vmm_types.VMMType[vmm])
    print(digest.hex())
";

/// The end of an OVMF that was built from AmdSevX64.dsc, with a place for a kernel's hashes: test data of the crate `sev`.
fn with_hashes() -> PathBuf {
    rust_crate("sev", "sev").join("tests/measurement/ovmf_AmdSev_suffix.bin")
}

fn hex(digest: LaunchDigest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A machine: the firmware, the hypervisor, processors, the model and the features of each, the kernel's command line.
type Machine<'a> = (&'a Path, Hypervisor, u32, Cpu, u64, Option<&'a str>);

#[test]
fn launch_digests_are_those_of_sev_snp_measure() {
    let folder = tempfile::tempdir().unwrap();
    let (kernel, initrd) = (folder.path().join("kernel"), folder.path().join("initrd"));
    fs::write(&kernel, b"a kernel").unwrap();
    fs::write(&initrd, b"an initrd").unwrap();
    let hashes = with_hashes();
    let mut machines: Vec<Machine> = vec![];
    for hypervisor in Hypervisor::ALL {
        for processors in [1, 2, 9] {
            for features in [0x1, 0x21] {
                let milan = Cpu::named("EPYC-Milan").unwrap();
                let debian = Path::new(DEBIAN);
                machines.push((debian, hypervisor, processors, milan, features, None));
                machines.push((&hashes, hypervisor, processors, milan, features, Some("")));
            }
        }
    }
    for name in Cpu::names() {
        let cpu = Cpu::named(&format!("{name}-v1")).unwrap();
        let command_line = Some("console=ttyS0 loglevel=7");
        machines.push((&hashes, Hypervisor::Qemu, 1, cpu, 0x1, command_line));
        machines.push((&hashes, Hypervisor::Qemu, 1, cpu, 0x1, None));
    }
    let mut asked = String::new();
    let mut ours = vec![];
    for (path, hypervisor, processors, cpu, features, command_line) in machines {
        let vmm = match hypervisor {
            Hypervisor::Qemu => "QEMU",
            other => other.word(),
        };
        let (kernel_path, initrd_path) = match command_line {
            Some(_) => (kernel.to_str().unwrap(), initrd.to_str().unwrap()),
            None => ("", ""),
        };
        let (signature, line) = (cpu.0, command_line.unwrap_or_default());
        asked += &format!(
            "({processors}, {signature}, {path:?}, {kernel_path:?}, {initrd_path:?}, {line:?}, {features}, {vmm:?})\n"
        );
        let bytes = fs::read(path).unwrap();
        let firmware = Firmware::parse(&bytes).unwrap();
        let kernel = command_line.map(|command_line| Kernel {
            kernel: b"a kernel",
            initrd: b"an initrd",
            command_line,
        });
        let launch = Launch {
            firmware: &firmware,
            hypervisor,
            processors,
            cpu,
            features,
            kernel,
        };
        ours.push(hex(launch.digest().unwrap()));
    }
    let questions = folder.path().join("questions");
    fs::write(&questions, asked).unwrap();
    let output = python()
        .args(["-c", PROGRAM])
        .stdin(fs::File::open(questions).unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let theirs = String::from_utf8(output.stdout).unwrap();
    assert_eq!(ours, theirs.lines().collect::<Vec<_>>());
    // on EC2 and GCE the model does not matter, and an empty command line is none
    let different: std::collections::BTreeSet<_> = ours.iter().collect();
    assert_eq!(different.len(), ours.len());
}

/// A value that the tests of the crate `sev` and of sev-snp-measure have.
#[test]
fn the_published_launch_digest_of_the_published_firmware_is_right() {
    let bytes = fs::read(with_hashes()).unwrap();
    let firmware = Firmware::parse(&bytes).unwrap();
    let launch = Launch {
        firmware: &firmware,
        hypervisor: Hypervisor::Qemu,
        processors: 1,
        cpu: Cpu::named("EPYC-v4").unwrap(),
        features: 0x21,
        kernel: Some(Kernel {
            kernel: b"",
            initrd: b"",
            command_line: "console=ttyS0 loglevel=7",
        }),
    };
    let expected = "803f691094946e42068aaa3a8f9e26a5c89f36f7b73ecfb28c653360fe4b3aba7e534442e7e1e17895dfe778d0228977";
    assert_eq!(hex(launch.digest().unwrap()), expected);
}

#[test]
fn a_kernel_that_the_firmware_does_not_measure_is_refused() {
    let bytes = fs::read(DEBIAN).unwrap();
    let firmware = Firmware::parse(&bytes).unwrap();
    let launch = Launch {
        firmware: &firmware,
        hypervisor: Hypervisor::Qemu,
        processors: 1,
        cpu: Cpu::named("EPYC-Milan").unwrap(),
        features: 1,
        kernel: Some(Kernel {
            kernel: b"",
            initrd: b"",
            command_line: "",
        }),
    };
    let error = launch.digest().unwrap_err();
    assert!(error.contains("does not prove what it boots"), "{error}");
}

#[test]
fn damaged_firmware_gives_an_error_or_another_digest() {
    let valid = fs::read(with_hashes()).unwrap();
    let digest = |bytes: &[u8]| {
        Launch {
            firmware: &Firmware::parse(bytes)?,
            hypervisor: Hypervisor::Ec2,
            processors: 2,
            cpu: Cpu::named("EPYC-Genoa").unwrap(),
            features: 1,
            kernel: Some(Kernel {
                kernel: b"kernel",
                initrd: b"",
                command_line: "",
            }),
        }
        .digest()
    };
    let right = digest(&valid).unwrap();
    for bytes in mutations(&valid, 2_000).filter(|bytes| *bytes != valid) {
        assert_ne!(digest(&bytes), Ok(right));
    }
    for len in 0..valid.len() {
        assert!(digest(&valid[..len]).is_err());
    }
}
