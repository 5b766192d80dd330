//! Launch digests of SEV-SNP machines: the crate `image` computes the same ones as virtee's sev-snp-measure.

use std::fs;
use std::path::{Path, PathBuf};

use image::Error;
use image::firmware::Firmware;
use image::snp::{Cpu, Hypervisor, KernelFiles, Launch, PredictedDigest};
use support::boot_image;
use support::foreign::{python, rust_crate};
use support::mutation::mutations;
use support::program::measure;
use tempfile::TempDir;
use verifier::Policy;

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

fn hex(digest: PredictedDigest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The answer of sev-snp-measure to these lines.
fn sev_snp_measure(asked: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
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
    theirs.lines().map(str::to_owned).collect()
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
        let kernel = command_line.map(|command_line| KernelFiles {
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
    assert_eq!(ours, sev_snp_measure(&asked));
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
        kernel: Some(KernelFiles {
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
        kernel: Some(KernelFiles {
            kernel: b"",
            initrd: b"",
            command_line: "",
        }),
    };
    let error = launch.digest().unwrap_err();
    let expected = |why: &str| why.contains("evidence does not show which");
    assert!(
        matches!(&error, Error::Unsupported(why) if expected(why)),
        "{error}"
    );
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
            kernel: Some(KernelFiles {
                kernel: b"kernel",
                initrd: b"",
                command_line: "",
            }),
        }
        .digest()
    };
    let right = digest(&valid).unwrap();
    for bytes in mutations(&valid, 2_000).filter(|bytes| *bytes != valid) {
        assert_ne!(digest(&bytes).ok(), Some(right));
    }
    for len in 0..valid.len() {
        assert!(digest(&valid[..len]).is_err());
    }
}

/// The launch digests that a policy accepts.
fn accepted(policy: &str) -> Vec<String> {
    Policy::from_json(policy).unwrap();
    let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
    let digests = policy["snp"]["launchMeasurements"].as_array().unwrap();
    let text = |digest: &serde_json::Value| digest.as_str().unwrap().to_owned();
    digests.iter().map(text).collect()
}

/// Returns a folder with a kernel and an initrd, and their paths and that of a policy.
fn folder() -> (TempDir, [String; 3]) {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["kernel", "initrd", "policy"].map(|name| folder.path().join(name));
    fs::copy(boot_image::kernel(), &paths[0]).unwrap();
    fs::write(&paths[1], b"an initrd").unwrap();
    (folder, paths.map(|path| path.to_str().unwrap().to_owned()))
}

#[test]
fn firstlight_measure_puts_the_launch_digests_into_the_policy() {
    let (_folder, [kernel, initrd, policy]) = folder();
    let hashes = with_hashes();
    let hashes = hashes.to_str().unwrap();
    let (milan, genoa) = (
        Cpu::named("EPYC-Milan").unwrap().0,
        Cpu::named("EPYC-Genoa").unwrap().0,
    );
    let theirs = sev_snp_measure(&format!(
        "(2, {milan}, {DEBIAN:?}, '', '', '', 1, 'QEMU')\n\
         (4, {milan}, {DEBIAN:?}, '', '', '', 1, 'QEMU')\n\
         (2, 0, {DEBIAN:?}, '', '', '', 1, 'ec2')\n\
         (1, {genoa}, {hashes:?}, {kernel:?}, {initrd:?}, 'console=ttyS0', 33, 'QEMU')\n"
    ));

    // only the firmware, for two sizes of machines
    let qemu = ["--snp-firmware", DEBIAN, "--vcpu-type", "EPYC-Milan-v2"];
    let (code, said, errors) = measure(&[&qemu[..], &["--vcpus", "2,4"]].concat());
    assert_eq!(code, 0, "{errors}");
    assert!(errors.contains("only the firmware"), "{errors}");
    assert_eq!(accepted(&said), theirs[..2]);
    let registers = Policy::from_json(&said).unwrap().images()[0]
        .measurements()
        .clone();
    assert_eq!(registers.keys().collect::<Vec<_>>(), [&15]);

    // the digest of another hypervisor is added; an existing digest is not repeated
    fs::write(&policy, &said).unwrap();
    let ec2 = [
        "--snp-firmware",
        DEBIAN,
        "--hypervisor",
        "ec2",
        "--vcpus",
        "2",
    ];
    let (code, said, errors) = measure(&[&ec2[..], &["--add-to", &policy]].concat());
    assert_eq!(code, 0, "{errors}");
    assert_eq!(accepted(&said), theirs[..3]);
    fs::write(&policy, &said).unwrap();
    let (_, again, _) = measure(&[&ec2[..], &["--add-to", &policy]].concat());
    assert_eq!(again, said);

    // the kernel that QEMU hands over is in the digest and in the registers of the TPM
    let handed_over = [
        "--kernel",
        &kernel,
        "--initrd",
        &initrd,
        "--cmdline",
        "console=ttyS0",
    ];
    let machine = [
        "--snp-firmware",
        hashes,
        "--vcpus",
        "1",
        "--vcpu-type",
        "EPYC-Genoa",
    ];
    let further = ["--guest-features", "0x21", "--memory", "2048"];
    let all = [&handed_over[..], &machine, &further].concat();
    // the launch digest covers the kernel, so the policy may leave out PCR 4
    let nine = ["--pcrs", "9", "--accept-efi-variables"];
    let (code, said, errors) = measure(&[&all[..], &nine].concat());
    assert_eq!(code, 0, "{errors}");
    assert_eq!(accepted(&said), theirs[3..]);
    assert!(
        Policy::from_json(&said).unwrap().images()[0]
            .measurements()
            .contains_key(&9)
    );
    let (code, said, errors) = measure(&[&all[..], &["--explain"]].concat());
    assert_eq!(code, 0, "{errors}");
    let expected = format!("MEASUREMENT with --vcpus 1\n  {}\n", theirs[3]);
    assert!(said.ends_with(&expected), "{said}");
}

/// Machines without a TPM: the launch digest is their only measurement.
#[test]
fn a_policy_of_machines_without_a_tpm_has_the_kernel_in_the_launch_digest() {
    let (folder, [kernel, initrd, policy]) = folder();
    let hashes = with_hashes();
    let hashes = hashes.to_str().unwrap();
    let cpu = Cpu::named("EPYC-v4").unwrap().0;
    let line = "efi=noruntime firstlight.cluster-id=07";
    let theirs = sev_snp_measure(&format!(
        "(2, {cpu}, {hashes:?}, {kernel:?}, {initrd:?}, {line:?}, 1, 'QEMU')\n\
         (4, {cpu}, {hashes:?}, {kernel:?}, {initrd:?}, {line:?}, 1, 'QEMU')\n\
         (2, {cpu}, {hashes:?}, {kernel:?}, {initrd:?}, 'efi=noruntime', 1, 'QEMU')\n"
    ));
    let variant = ["--attestation-variant", "qemu-snp"];
    let handed_over = ["--kernel", &kernel, "--initrd", &initrd];
    let machine = ["--snp-firmware", hashes, "--vcpu-type", "EPYC-v4"];
    let all = [&variant[..], &handed_over, &machine].concat();
    let sizes = [&all[..], &["--cmdline", line, "--vcpus", "2,4"]].concat();
    let (code, said, errors) = measure(&sizes);
    assert_eq!(code, 0, "{errors}");
    assert!(
        !errors.contains("has no firstlight.cluster-id="),
        "{errors}"
    );
    assert_eq!(accepted(&said), theirs[..2]);
    let made = Policy::from_json(&said).unwrap();
    assert_eq!(made.variant(), Some("qemu-snp"));
    assert_eq!(
        made.images()[0].measurements().keys().collect::<Vec<_>>(),
        [&15]
    );
    let sources = verifier::sources::offline();
    verifier::qemu_snp::VARIANT
        .validator_for(made, &sources)
        .unwrap();
    // a further image adds its launch digest
    fs::write(&policy, &said).unwrap();
    let other = [
        "--cmdline",
        "efi=noruntime",
        "--vcpus",
        "2",
        "--add-to",
        &policy,
    ];
    let (code, said, errors) = measure(&[&all[..], &other].concat());
    assert_eq!(code, 0, "{errors}");
    assert!(errors.contains("has no firstlight.cluster-id="), "{errors}");
    assert_eq!(accepted(&said), theirs);

    let disk = folder.path().join("disk").to_str().unwrap().to_owned();
    let with = |given: &[&'static str]| -> Vec<String> {
        given.iter().map(|it| (*it).to_owned()).collect()
    };
    let cases = [
        (
            with(&["--pcrs", "4"]),
            "no registers that --pcrs could choose",
        ),
        (
            with(&["--tpm", "device:/dev/null"]),
            "its machines have no TPM",
        ),
        (vec![disk], "does not contain a disk"),
        (
            vec!["--kernel".into(), kernel.clone()],
            "--snp-firmware is missing",
        ),
        (
            with(&[
                "--snp-firmware",
                DEBIAN,
                "--vcpus",
                "2",
                "--vcpu-type",
                "EPYC",
            ]),
            "--kernel is missing",
        ),
        (
            with(&[
                "--snp-firmware",
                DEBIAN,
                "--vcpus",
                "2",
                "--hypervisor",
                "ec2",
            ]),
            "run on QEMU with KVM",
        ),
    ];
    for (given, expected) in cases {
        let given: Vec<&str> = given.iter().map(String::as_str).collect();
        let (code, said, errors) = measure(&[&variant[..], &given].concat());
        assert!(code == 2 && said.is_empty(), "{code}: {expected}: {said}");
        assert!(errors.contains(expected), "expected {expected}: {errors}");
    }
    let (code, _, errors) = measure(
        &[
            &handed_over[..],
            &machine,
            &["--vcpus", "2", "--add-to", &policy],
        ]
        .concat(),
    );
    assert!(
        code == 2 && errors.contains("give --attestation-variant qemu-snp"),
        "{errors}"
    );
    // an OVMF without a place for the hashes does not measure the kernel
    let debian = [
        "--snp-firmware",
        DEBIAN,
        "--vcpu-type",
        "EPYC",
        "--vcpus",
        "1",
        "--cmdline",
        line,
    ];
    let (code, _, errors) = measure(&[&variant[..], &handed_over, &debian].concat());
    assert!(
        code == 1 && errors.contains("evidence does not show which"),
        "{errors}"
    );
    // this machine has no such chip
    let (code, _, errors) = measure(&variant);
    assert!(
        code == 1 && errors.contains("the launch digest of this machine"),
        "{errors}"
    );
}

#[test]
fn what_a_launch_digest_lacks_is_named() {
    let firmware = ["--snp-firmware", DEBIAN];
    let with_cpu = [&firmware[..], &["--vcpu-type", "EPYC"]].concat();
    let with_both = [&with_cpu[..], &["--vcpus", "2"]].concat();
    for (given, more, expected) in [
        (
            &firmware[..],
            &["--vcpu-type", "EPYC"][..],
            "--vcpus <NUMBERS>",
        ),
        (&firmware, &["--vcpus", "2"], "--vcpu-type is missing"),
        (&with_cpu, &["--vcpus", "0"], "0 is not in 1..=4096"),
        (&with_cpu, &["--vcpus", "2,x"], "invalid value 'x'"),
        (
            &firmware,
            &["--vcpus", "2", "--vcpu-type", "Xeon"],
            "expected a model of QEMU",
        ),
        (
            &with_both,
            &["--hypervisor", "xen"],
            "possible values: kvm, ec2, gce",
        ),
        (
            &with_both,
            &["--hypervisor", "gce"],
            "does not depend on it",
        ),
        (
            &with_both,
            &["--guest-features", "0x20"],
            "bit 0 is SEV-SNP",
        ),
        (&with_both, &["--cmdline", "quiet"], "--kernel <FILE>"),
        (&with_both, &["--pcrs", "4"], "only the firmware"),
        (
            &with_both,
            &["--tdx-firmware", DEBIAN],
            "cannot be used with",
        ),
        (&[], &["--vcpus", "2"], "--vcpus belongs to --snp-firmware"),
    ] {
        let (code, said, errors) = measure(&[given, more].concat());
        assert!(code == 2 && said.is_empty(), "{code}: {expected}: {said}");
        assert!(errors.contains(expected), "expected {expected}: {errors}");
    }
    let with_kernel = [&with_both[..], &["--kernel", "/bin/sh"]].concat();
    assert_ne!(measure(&with_kernel).0, 0);
    let no_firmware = [
        "--snp-firmware",
        "/bin/sh",
        "--vcpu-type",
        "EPYC",
        "--vcpus",
        "1",
    ];
    let (code, _, errors) = measure(&no_firmware);
    assert!(
        code == 1 && errors.contains("no table of GUIDs"),
        "{errors}"
    );
}
