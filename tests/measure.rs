//! `firstlight measure IMAGE` against the tools of others: PCR 11 is systemd-measure's, the digests in PCR 4 are pesign's, and the
//! images and disks are made by objcopy, sfdisk, mkfs.fat and mtools. tests/images/measure.rs boots them.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;
use std::process::{Command, Output};

use image::{Digest, Given, Image, Stage, Units};
use support::boot_image::{disk, kernel, run, systemd_boot, uki};
use support::program::built;

const COMMAND_LINE: &[u8] = b"console=ttyS0 panic=-1";
const OS_RELEASE: &[u8] = b"ID=debian\nVERSION_ID=12\n";
const DEFAULT: &str = "EFI/BOOT/BOOTX64.EFI";

fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn linux() -> Vec<u8> {
    std::fs::read(kernel()).unwrap()
}

/// An image with Debian's kernel and the stub of a release.
fn unified(suite: &str, command_line: &[u8]) -> Vec<u8> {
    let sections: [(&str, &[u8]); 4] = [
        (".osrel", OS_RELEASE),
        (".cmdline", command_line),
        (".initrd", b"an initrd"),
        (".linux", &linux()),
    ];
    uki(&systemd_boot(suite).join("linuxx64.efi.stub"), &sections)
}

fn stage(stage: Stage, units: Units) -> Given {
    Given {
        stage: Some(stage),
        units: Some(units),
        secure_boot: Some(false),
    }
}

/// The value of each register that has only one.
fn values(image: &Image, given: &Given) -> BTreeMap<u32, String> {
    let registers = image::REGISTERS.into_iter().chain([5]);
    registers
        .filter_map(|pcr| Some((pcr, hex(&image.value(pcr, given).ok()?))))
        .collect()
}

/// What systemd-measure 252 expects in PCR 11 after these phases.
fn systemd_measure(folder: &Path, phase: &str) -> String {
    let mut command = Command::new("/lib/systemd/systemd-measure");
    command.args(["calculate", "--bank=sha256", "--json=short"]);
    command.arg(format!("--phase={phase}"));
    for section in ["linux", "osrel", "cmdline", "initrd"] {
        command.arg(format!("--{section}={}", folder.join(section).display()));
    }
    let json: serde_json::Value = serde_json::from_str(&run(&mut command)).unwrap();
    json["sha256"][0]["hash"].as_str().unwrap().to_owned()
}

#[test]
fn systemd_measure_expects_the_same_pcr_11_in_each_phase() {
    let folder = tempfile::tempdir().unwrap();
    let parts: [(&str, &[u8]); 4] = [
        ("linux", &linux()),
        ("osrel", OS_RELEASE),
        ("cmdline", COMMAND_LINE),
        ("initrd", b"an initrd"),
    ];
    for (name, content) in parts {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let image = Image::uki(&unified("bookworm", COMMAND_LINE)).unwrap();
    for (at, units, phase) in [
        (Stage::Initramfs, Units::None, ":"),
        (Stage::Initramfs, Units::All, "enter-initrd"),
        (
            Stage::Booted,
            Units::All,
            "enter-initrd:leave-initrd:sysinit:ready",
        ),
        (Stage::Booted, Units::Booted, "sysinit:ready"),
        (Stage::Booted, Units::None, ":"),
    ] {
        let expected = systemd_measure(folder.path(), phase);
        let value = image.value(11, &stage(at, units)).unwrap();
        assert_eq!(hex(&value), expected, "{phase}");
    }
}

/// What pesign says is signed of a program.
fn pesign(program: &Path) -> String {
    let said = run(Command::new("pesign").arg("-h").arg("-i").arg(program));
    let digest = said.split_whitespace().find(|word| word.len() == 64);
    digest.unwrap_or_else(|| panic!("{said}")).to_owned()
}

#[test]
fn pesign_computes_the_same_digests_of_the_programs_in_pcr_4() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("image.efi");
    let expected_kernel = pesign(&kernel());
    for suite in ["bookworm", "trixie", "sid"] {
        let bytes = unified(suite, COMMAND_LINE);
        std::fs::write(&file, &bytes).unwrap();
        let image = Image::uki(&bytes).unwrap();
        let cases = &image.registers(&stage(Stage::Initramfs, Units::None))[&4];
        let digest = |what: &str| {
            let event = cases[0].events.iter().find(|event| event.what == what);
            event.map(|event| hex(&event.digest))
        };
        assert_eq!(
            digest("the unified kernel image"),
            Some(pesign(&file)),
            "{suite}"
        );
        // newer stubs start it without the firmware
        let in_firmware = Some(expected_kernel.clone()).filter(|_| suite != "sid");
        assert_eq!(digest("the kernel in the image"), in_firmware, "{suite}");
    }
}

#[test]
fn a_disk_gives_the_values_of_the_image_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let bytes = unified("trixie", COMMAND_LINE);
    let given = stage(Stage::Initramfs, Units::All);
    let expected = values(&Image::uki(&bytes).unwrap(), &given);
    assert_eq!(
        expected.keys().copied().collect::<Vec<_>>(),
        [4, 8, 9, 11, 12, 13, 15]
    );
    let [large, small] = [vec![7; 300_000], vec![8; 3]];
    for (fat, mebibytes) in [(12, 28), (16, 40), (32, 64)] {
        let files: [(&str, &[u8]); 4] = [
            ("EFI/Linux/a long name of another file.txt", &small),
            ("startup.nsh", &large),
            (DEFAULT, &bytes),
            ("loader/random-seed", &small),
        ];
        disk(&path, mebibytes, fat, &files);
        let on_disk = Image::disk(std::fs::File::open(&path).unwrap(), None).unwrap();
        let mut got = values(&on_disk, &given);
        assert!(got.remove(&5).is_some());
        assert_eq!(got, expected, "FAT{fat}");
    }
}

fn refusal(disk: &Path, chosen: Option<&str>) -> String {
    match Image::disk(std::fs::File::open(disk).unwrap(), chosen) {
        Ok(image) => panic!("{}", image.description()),
        Err(error) => error,
    }
}

#[test]
fn what_boots_is_found_on_the_disk_or_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let image = unified("trixie", COMMAND_LINE);
    let manager = std::fs::read(systemd_boot("trixie").join("systemd-bootx64.efi")).unwrap();
    let open = |chosen| Image::disk(std::fs::File::open(&path).unwrap(), chosen).unwrap();

    disk(
        &path,
        64,
        32,
        &[
            (DEFAULT, &manager),
            ("EFI/Linux/one with a long name.efi", &image),
        ],
    );
    let only = open(None);
    assert_eq!(
        only.description(),
        "systemd-boot, then EFI/Linux/one with a long name.efi, a unified kernel image with systemd-stub 257.13-1~deb13u1"
            .replace("257.13-1~deb13u1", &version("trixie"))
    );
    let given = stage(Stage::Initramfs, Units::All);
    let [direct, managed] = [Image::uki(&image).unwrap(), only].map(|image| values(&image, &given));
    assert_ne!(managed[&4], direct[&4]);
    assert_eq!((&managed[&9], &managed[&11]), (&direct[&9], &direct[&11]));

    let two = [
        (DEFAULT, &manager[..]),
        ("EFI/Linux/a.efi", &image),
        ("EFI/Linux/b.efi", &image),
    ];
    disk(&path, 96, 32, &two);
    let said = refusal(&path, None);
    assert!(
        said.contains("EFI/Linux/a.efi, EFI/Linux/b.efi") && said.contains("--uki"),
        "{said}"
    );
    let chosen = values(&open(Some(r"\EFI\Linux\b.efi")), &given);
    assert_eq!(chosen[&4], managed[&4]);
    let said = refusal(&path, Some("EFI/Linux/c.efi"));
    assert!(said.contains("there is no EFI/Linux/c.efi"), "{said}");

    disk(&path, 64, 32, &[("EFI/Linux/a.efi", &image[..])]);
    assert!(refusal(&path, None).contains("there is no EFI/BOOT/BOOTX64.EFI"));
    disk(&path, 64, 32, &[(DEFAULT, &linux()[..])]);
    let said = refusal(&path, None);
    assert!(
        said.contains("neither a unified kernel image nor systemd-boot"),
        "{said}"
    );
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    assert!(refusal(&path, None).contains("GUID partition table"));
}

fn version(suite: &str) -> String {
    let stub = std::fs::read(systemd_boot(suite).join("linuxx64.efi.stub")).unwrap();
    let text = String::from_utf8_lossy(&stub).into_owned();
    let (_, rest) = text.split_once("#### LoaderInfo: systemd-stub ").unwrap();
    rest.split(' ').next().unwrap().to_owned()
}

/// The registers whose value is not known.
fn not_known(image: &Image, given: &Given) -> BTreeMap<u32, String> {
    let registers = image.registers(given).into_iter();
    registers
        .filter_map(|(pcr, cases)| {
            let missing = cases.into_iter().find_map(|case| case.value.err());
            missing.map(|missing| (pcr, missing.why))
        })
        .collect()
}

#[test]
fn what_cannot_be_known_is_named_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let image = unified("trixie", COMMAND_LINE);
    let given = stage(Stage::Initramfs, Units::All);
    let files = [
        (DEFAULT, &image[..]),
        ("EFI/BOOT/BOOTX64.EFI.extra.d/token.cred", b"secret"),
    ];
    disk(&path, 64, 32, &files);
    let on_disk = Image::disk(std::fs::File::open(&path).unwrap(), None).unwrap();
    let missing = not_known(&on_disk, &given);
    assert_eq!(missing.keys().copied().collect::<Vec<_>>(), [4, 9, 12, 13]);
    assert!(missing[&12].contains("EFI/BOOT/BOOTX64.EFI.extra.d/token.cred"));

    // a stub that adds a secret of the machine, unless the random seed is read-only
    let newest = unified("sid", COMMAND_LINE);
    disk(
        &path,
        64,
        32,
        &[(DEFAULT, &newest[..]), ("loader/random-seed", &[1; 32])],
    );
    let open = || Image::disk(Cursor::new(std::fs::read(&path).unwrap()), None).unwrap();
    let none = stage(Stage::Initramfs, Units::None);
    assert!(not_known(&open(), &none)[&9].contains("boot-secret"));
    let esp = path.with_extension("esp");
    let seed = ["+r", "::loader/random-seed"];
    run(Command::new("mattrib").arg("-i").arg(&esp).args(seed));
    let changed = std::fs::read(&esp).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1 << 20..][..changed.len()].copy_from_slice(&changed);
    std::fs::write(&path, bytes).unwrap();
    assert!(not_known(&open(), &none).is_empty());

    // a stub that adds the machine's console
    let silent = Image::direct_uki(&unified("sid", b"panic=-1")).unwrap();
    assert!(not_known(&silent, &none)[&9].contains("console="));
    let loud = Image::direct_uki(&newest).unwrap();
    assert!(not_known(&loud, &none).is_empty());
}

fn firstlight(arguments: &[&str]) -> Output {
    let mut command = Command::new(built("firstlight"));
    command.arg("measure").args(arguments).output().unwrap()
}

#[test]
fn the_command_writes_what_has_one_value_and_explains_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image-1.efi");
    std::fs::write(&path, unified("bookworm", COMMAND_LINE)).unwrap();
    let file = path.to_str().unwrap();
    let measure = |more: &[&str]| {
        let output = firstlight(&[&[file], more].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let registers = |policy: &str| -> Vec<u32> {
        let policy = attest::attestation::Policy::from_json(policy).unwrap();
        assert_eq!(
            (policy.images()[0].name(), policy.keys().len()),
            ("image-1.efi", 0)
        );
        policy.images()[0].measurements().keys().copied().collect()
    };
    let (code, policy, said) = measure(&[]);
    assert_eq!(
        (code, registers(&policy)),
        (Some(0), vec![8, 9, 12, 13, 15]),
        "{said}"
    );
    for word in ["PCR 4", "Secure Boot on", "PCR 11", "initramfs", "--units"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let (code, policy, said) = measure(&[
        "--stage",
        "booted",
        "--secure-boot",
        "off",
        "--units",
        "all",
    ]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert_eq!(registers(&policy), [4, 8, 9, 11, 12, 13, 15]);

    // without a stage, the policy has both
    let (code, policy, said) = measure(&["--secure-boot", "off", "--units", "all"]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert_eq!(registers(&policy), [4, 8, 9, 11, 12, 13, 15]);
    let policy = attest::attestation::Policy::from_json(&policy).unwrap();
    let initramfs = policy.images()[0].initramfs();
    assert_eq!(initramfs.keys().copied().collect::<Vec<_>>(), [11]);

    let (code, policy, said) = measure(&["--pcrs", "4,9"]);
    assert_eq!((code, policy.as_str()), (Some(1), ""));
    assert!(said.contains("PCR 4") && !said.contains("PCR 9"), "{said}");
    let (_, _, said) = measure(&["--pcrs", "9,7"]);
    assert!(said.contains("PCR 7") && said.contains("machine"), "{said}");
    let (code, explained, _) = measure(&["--explain"]);
    assert_eq!(code, Some(0));
    for word in [
        "systemd-stub 252",
        "the kernel in the image",
        "section .cmdline",
        "PCR 5",
    ] {
        assert!(explained.contains(word), "{word}: {explained}");
    }
    for wrong in [
        &["--stage", "early"][..],
        &["--kernel", file],
        &["--memory", "512"],
        &["--trust-any-tpm"],
    ] {
        assert_eq!(measure(wrong).0, Some(2), "{wrong:?}");
    }

    // one byte of the command line
    std::fs::write(&path, unified("bookworm", b"console=ttyS0 panic=-2")).unwrap();
    let given = [
        "--stage",
        "booted",
        "--secure-boot",
        "off",
        "--units",
        "all",
    ];
    let (_, other, _) = measure(&given);
    let changed: Vec<u32> = [
        policy_values(&other),
        policy_values(&measure_again(&folder, &given)),
    ]
    .into_iter()
    .reduce(|a, b| {
        a.into_iter()
            .filter(|(pcr, value)| b[pcr] != *value)
            .collect()
    })
    .unwrap()
    .into_keys()
    .collect();
    assert_eq!(changed, [4, 9, 11]);
}

/// The policy of the image with the usual command line.
fn measure_again(folder: &tempfile::TempDir, given: &[&str]) -> String {
    let path = folder.path().join("usual.efi");
    std::fs::write(&path, unified("bookworm", COMMAND_LINE)).unwrap();
    let output = firstlight(&[&[path.to_str().unwrap()], given].concat());
    String::from_utf8(output.stdout).unwrap()
}

fn policy_values(policy: &str) -> BTreeMap<u32, Digest> {
    let policy = attest::attestation::Policy::from_json(policy).unwrap();
    let measurements = policy.images()[0].measurements().iter();
    measurements
        .map(|(pcr, value)| (*pcr, value.expected))
        .collect()
}
