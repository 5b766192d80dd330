//! Compares `firstlight measure IMAGE` with the tools of other projects: PCR 11 with systemd-measure's, the digests in PCR 4 with
//! pesign's. objcopy, sfdisk, mkfs.fat and mtools make the images and disks. tests/images/measure.rs boots them.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::join_setup::lone_service_program;
use image::{Image, KnownConditions, Loader, Platform, RegisterBank, Stage, Units};
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use rpc::grpc::{CallOptions, Status};
use support::boot_image::{disk, kernel, run, systemd_boot, tdx_firmware, uki};
use support::foreign::fetched;
use support::program::built;
use support::swtpm::Swtpm;
use verifier::{Measurement, Policy, qemu_vtpm, vtpm};

const COMMAND_LINE: &[u8] = b"console=ttyS0 panic=-1 efi=noruntime SYSTEMD_FORCE_MEASURE=1";
/// Differs in one byte.
const OTHER_COMMAND_LINE: &[u8] = b"console=ttyS0 panic=-2 efi=noruntime SYSTEMD_FORCE_MEASURE=1";
const OS_RELEASE: &[u8] = b"ID=debian\nVERSION_ID=12\n";
const DEFAULT: &str = "EFI/BOOT/BOOTX64.EFI";

/// The registers that most of these tests compute.
const PCRS: Platform = Platform::Tpm(RegisterBank::Sha256);

fn hex(digest: &[u8]) -> String {
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

fn stage(stage: Stage, units: Units) -> KnownConditions {
    KnownConditions {
        stage: Some(stage),
        units: Some(units),
        secure_boot: Some(false),
    }
}

/// The value of each register that has only one.
fn values(image: &Image, given: &KnownConditions) -> BTreeMap<u32, String> {
    let registers = image::REGISTERS.into_iter().chain([5]);
    registers
        .filter_map(|pcr| Some((pcr, hex(&image.value(PCRS, pcr, given).ok()?))))
        .collect()
}

/// The value of PCR 11 after these phases that systemd-measure 252 computes.
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
    let image = Image::uki(&unified("bookworm", COMMAND_LINE), None).unwrap();
    for (at, units, phase) in [
        (Stage::Initramfs, Units::None, ":"),
        (Stage::Initramfs, Units::All, "enter-initrd"),
        (
            Stage::Booted,
            Units::All,
            "enter-initrd:leave-initrd:sysinit:ready",
        ),
        // without units that distinguish the two
        (Stage::Initramfs, Units::Phases, "enter-initrd"),
        (Stage::Booted, Units::Booted, "sysinit:ready"),
        (Stage::Booted, Units::None, ":"),
    ] {
        let expected = systemd_measure(folder.path(), phase);
        let value = image.value(PCRS, 11, &stage(at, units)).unwrap();
        assert_eq!(hex(&value), expected, "{phase}");
    }
}

/// The digest of a program's signed parts, by pesign.
fn pesign(program: &Path) -> String {
    let said = run(Command::new("pesign").arg("-h").arg("-i").arg(program));
    let digest = said.split_whitespace().find(|word| word.len() == 64);
    digest.unwrap_or_else(|| panic!("{said}")).to_owned()
}

#[test]
fn pesign_computes_the_same_digests_of_the_programs_in_pcr_4() {
    check_digests("bookworm", true);
    check_digests("trixie", true);
}

#[test]
#[ignore = "takes the newest systemd-stub that there is: make test-images"]
fn pesign_computes_the_same_digest_of_an_image_with_the_newest_stub() {
    // newer stubs start the kernel without the firmware
    check_digests("sid", false);
}

fn check_digests(suite: &str, starts_in_firmware: bool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("image.efi");
    let bytes = unified(suite, COMMAND_LINE);
    std::fs::write(&file, &bytes).unwrap();
    let image = Image::uki(&bytes, None).unwrap();
    let cases = &image.registers(PCRS, &stage(Stage::Initramfs, Units::None))[&4];
    let digest = |what: &str| {
        let event = cases[0].events.iter().find(|event| event.what == what);
        event.map(|event| hex(&event.digest))
    };
    let whole = digest("the unified kernel image");
    assert_eq!(whole, Some(pesign(&file)), "{suite}");
    let in_firmware = starts_in_firmware.then(|| pesign(&kernel()));
    assert_eq!(digest("the kernel in the image"), in_firmware, "{suite}");
}

#[test]
fn a_disk_gives_the_values_of_the_image_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let bytes = unified("trixie", COMMAND_LINE);
    let given = stage(Stage::Initramfs, Units::All);
    let expected = values(&Image::uki(&bytes, None).unwrap(), &given);
    assert_eq!(
        expected.keys().copied().collect::<Vec<_>>(),
        [2, 3, 4, 8, 9, 11, 12, 13, 15]
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
        let on_disk = Image::disk(std::fs::File::open(&path).unwrap(), None, None).unwrap();
        let mut got = values(&on_disk, &given);
        assert!(got.remove(&5).is_some());
        assert_eq!(got, expected, "FAT{fat}");
    }
}

/// mkfs.vfat makes a FAT32 of any size if an option requires it, and systemd-repart passes this option for a small partition.
#[test]
fn a_fat32_with_too_few_clusters_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    // mtools reads it as FAT16, as firmware does, so mtools cannot write a file into it
    disk(&path, 32, 32, &[]);
    let said = refusal(&path, None);
    let expected =
        "EFI system partition: it is FAT32 with 64496 clusters, but FAT32 has at least 65525";
    assert!(said.starts_with(expected), "{said}");
}

/// Runs Debian 13's ukify, which has this folder as its working directory.
fn ukify(folder: &Path, arguments: &[&str]) {
    let tools = systemd_boot("trixie");
    let mut command = Command::new(fetched("python.sh"));
    command
        .arg(tools.join("ukify"))
        .arg("build")
        .args(arguments);
    let stub = if arguments.iter().any(|it| it.starts_with("--linux")) {
        "linuxx64.efi.stub"
    } else {
        // only a profile
        "addonx64.efi.stub"
    };
    command.arg(format!("--stub={}", tools.join(stub).display()));
    run(command.current_dir(folder));
}

#[test]
fn a_profile_of_an_image_is_chosen_and_named_in_the_policy() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("initrd"), b"an initrd").unwrap();
    std::fs::write(at("release"), OS_RELEASE).unwrap();
    let line = String::from_utf8(COMMAND_LINE.into()).unwrap();
    let [main, reset, plain] =
        ["main", "reset", "plain"].map(|word| format!("--cmdline={line} {word}"));
    let of_reset = "--profile=ID=reset\nTITLE=Factory reset";
    ukify(folder.path(), &[of_reset, &reset, "--output=reset.efi"]);
    ukify(
        folder.path(),
        &["--profile=TITLE=Plain", &plain, "--output=plain.efi"],
    );
    let linux = format!("--linux={}", kernel().display());
    let build = |own: [&str; 2], more: &[&str], output: &str| {
        let parts = [&linux, "--initrd=initrd", "--os-release=@release"];
        ukify(
            folder.path(),
            &[&parts[..], &own, more, &[&format!("--output={output}")]].concat(),
        );
    };
    let joined = ["--join-profile=reset.efi", "--join-profile=plain.efi"];
    build([&main, "--profile=ID=main\nTITLE=Main"], &joined, "all.efi");
    // the same profile as the first of an image
    build([&reset, of_reset], &joined[1..], "first.efi");
    build([&main, "--os-release=@release"], &[], "none.efi");

    let measure = |arguments: &[&str]| {
        let output = firstlight(&[arguments, &ONE_VALUE[..]].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    };
    let policy = |arguments: &[&str]| {
        let policy = Policy::from_json(&measure(arguments).unwrap()).unwrap();
        let image = &policy.images()[0];
        let values = image.measurements().clone();
        (
            image.name().to_owned(),
            [9, 11].map(|pcr| values[&pcr].expected.clone()),
        )
    };
    let (all, first) = (at("all.efi"), at("first.efi"));
    let (name, of_main) = policy(&[&all]);
    assert_eq!(name, "all.efi, profile main");
    let (name, of_first) = policy(&[&first]);
    assert_eq!(name, "first.efi, profile reset");
    for word in ["reset", "1"] {
        let (name, chosen) = policy(&[&all, "--profile", word]);
        assert_eq!(name, "all.efi, profile reset");
        assert_eq!(chosen, of_first, "--profile {word}");
        assert_ne!(chosen[1], of_main[1]);
    }
    assert_eq!(policy(&[&all, "--profile", "main"]).1, of_main);
    assert_eq!(policy(&[&all, "--profile", "2"]).0, "all.efi, profile 2");
    assert_eq!(
        policy(&[&all, "--profile", "2", "--name", "mine"]).0,
        "mine"
    );
    // from a disk, and by QEMU's `-kernel`
    let path = folder.path().join("disk.raw");
    disk(&path, 96, 32, &[(DEFAULT, &std::fs::read(&all).unwrap())]);
    let (name, on_disk) = policy(&[path.to_str().unwrap(), "--profile", "reset"]);
    assert_eq!(
        (name.as_str(), on_disk),
        ("disk.raw, profile reset", of_first)
    );
    // systemd-boot passes the number on, and measures that first
    let manager = std::fs::read(systemd_boot("trixie").join("systemd-bootx64.efi")).unwrap();
    let all_profiles = std::fs::read(&all).unwrap();
    disk(
        &path,
        96,
        32,
        &[(DEFAULT, &manager), ("EFI/Linux/all.efi", &all_profiles)],
    );
    let managed = measure(&[path.to_str().unwrap(), "--profile", "reset", "--explain"]).unwrap();
    let events = [
        "systemd-boot's option for the profile",
        "the number of the profile",
    ];
    let [option, number] = events.map(|it| managed.find(it).expect(it));
    assert!(option < number, "{managed}");
    let (name, _) = policy(&["--kernel", &all, "--profile", "reset"]);
    assert_eq!(name, "all.efi, profile reset");
    let explained = measure(&[&all, "--profile", "reset", "--explain"]).unwrap();
    assert!(
        explained.contains("its profile reset (Factory reset)"),
        "{explained}"
    );

    let error = measure(&[&all, "--profile", "rescue"]).unwrap_err();
    assert!(
        error.contains("no profile rescue: it has main, reset, 2"),
        "{error}"
    );
    let error = measure(&[&at("none.efi"), "--profile", "main"]).unwrap_err();
    assert!(error.contains("the image has no profiles"), "{error}");
    assert_eq!(policy(&[&at("none.efi")]).0, "none.efi");
    let error =
        measure(&["--kernel", kernel().to_str().unwrap(), "--profile", "main"]).unwrap_err();
    assert!(error.contains("--profile: "), "{error}");
}

fn refusal(disk: &Path, chosen: Option<&str>) -> String {
    match Image::disk(std::fs::File::open(disk).unwrap(), chosen, None) {
        Ok(image) => panic!("{}", image.description()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_boots_is_found_on_the_disk_or_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let image = unified("trixie", COMMAND_LINE);
    let manager = std::fs::read(systemd_boot("trixie").join("systemd-bootx64.efi")).unwrap();
    let open = |chosen| Image::disk(std::fs::File::open(&path).unwrap(), chosen, None).unwrap();

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
    let [direct, managed] =
        [Image::uki(&image, None).unwrap(), only].map(|image| values(&image, &given));
    assert_ne!(managed[&4], direct[&4]);
    assert_eq!((&managed[&9], &managed[&11]), (&direct[&9], &direct[&11]));

    // the second one is the first one again
    let other = unified("trixie", b"console=ttyS1");
    let several = [
        (DEFAULT, &manager[..]),
        ("EFI/Linux/a.efi", &image),
        ("EFI/Linux/b.efi", &image),
        ("EFI/Linux/c.efi", &other),
    ];
    disk(&path, 96, 32, &several);
    let said = refusal(&path, None);
    assert!(
        said.contains("EFI/Linux/a.efi, EFI/Linux/b.efi, EFI/Linux/c.efi")
            && said.contains("--uki"),
        "{said}"
    );
    // the policy has each once
    let options = [
        "--secure-boot",
        "off",
        "--units",
        "all",
        "--accept-efi-variables",
    ];
    let output = firstlight(&[&[path.to_str().unwrap()], &options[..]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let policy = Policy::from_json(&String::from_utf8_lossy(&output.stdout)).expect(&said);
    let names = policy.images().iter().map(|image| image.name());
    assert!(names.eq(["disk.raw, a.efi", "disk.raw, c.efi"]), "{said}");
    let chosen = values(&open(Some(r"\EFI\Linux\b.efi")), &given);
    assert_eq!(chosen[&4], managed[&4]);
    let said = refusal(&path, Some("EFI/Linux/d.efi"));
    assert!(said.contains("there is no EFI/Linux/d.efi"), "{said}");

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
fn not_known(image: &Image, given: &KnownConditions) -> BTreeMap<u32, String> {
    let registers = image.registers(PCRS, given).into_iter();
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
    let on_disk = Image::disk(std::fs::File::open(&path).unwrap(), None, None).unwrap();
    let missing = not_known(&on_disk, &given);
    assert_eq!(missing.keys().copied().collect::<Vec<_>>(), [4, 9, 12, 13]);
    assert!(missing[&12].contains("EFI/BOOT/BOOTX64.EFI.extra.d/token.cred"));
}

#[test]
#[ignore = "takes the newest systemd-stub that there is: make test-images"]
fn what_the_newest_stub_adds_is_named_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    // a secret of the machine, unless the random seed is read-only
    let newest = unified("sid", COMMAND_LINE);
    disk(
        &path,
        64,
        32,
        &[(DEFAULT, &newest[..]), ("loader/random-seed", &[1; 32])],
    );
    let open = || Image::disk(Cursor::new(std::fs::read(&path).unwrap()), None, None).unwrap();
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

    // the machine's console
    let silent = Image::direct_uki(&unified("sid", b"panic=-1"), None).unwrap();
    assert!(not_known(&silent, &none)[&9].contains("console="));
    let loud = Image::direct_uki(&newest, None).unwrap();
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
        let policy = verifier::Policy::from_json(policy).unwrap();
        assert_eq!(
            (policy.images()[0].name(), policy.keys().len()),
            ("image-1.efi", 0)
        );
        policy.images()[0].measurements().keys().copied().collect()
    };
    // the command writes a policy without PCR 4 or 11 only with an option that accepts this
    let (code, policy, said) = measure(&[]);
    assert_eq!((code, policy.as_str()), (Some(1), ""), "{said}");
    let of_4 = [
        "PCR 4 would not be in the policy",
        "Secure Boot on",
        "--accept-incomplete",
    ];
    for word in of_4.into_iter().chain(["PCR 11", "initramfs", "--units"]) {
        assert!(said.contains(word), "{word}: {said}");
    }
    let (code, policy, said) = measure(&["--secure-boot", "off"]);
    assert_eq!((code, policy.as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("PCR 11 would not be in"), "{said}");
    let (code, policy, said) = measure(&["--pcrs", "9,12"]);
    assert_eq!((code, policy.as_str()), (Some(1), ""), "{said}");
    assert!(said.contains("PCR 4 would not be in"), "{said}");
    let (code, policy, said) = measure(&["--accept-incomplete"]);
    assert_eq!(
        (code, registers(&policy)),
        (Some(0), vec![2, 3, 8, 9, 12, 13, 15]),
        "{said}"
    );
    assert!(said.contains("lacks PCR 4"), "{said}");
    let (code, policy, said) = measure(&[
        "--stage",
        "booted",
        "--secure-boot",
        "off",
        "--units",
        "all",
    ]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(registers(&policy), [2, 3, 4, 8, 9, 11, 12, 13, 15]);

    // without a stage, the policy has both
    let (code, policy, said) = measure(&["--secure-boot", "off", "--units", "all"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(registers(&policy), [2, 3, 4, 8, 9, 11, 12, 13, 15]);
    let policy = verifier::Policy::from_json(&policy).unwrap();
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
    std::fs::write(&path, unified("bookworm", OTHER_COMMAND_LINE)).unwrap();
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

/// The options under which each register has one value.
const ONE_VALUE: [&str; 4] = ["--secure-boot", "off", "--units", "all"];

/// A Debian kernel, with other words in place of its builder in its version.
fn marked(kernel: &[u8]) -> Vec<u8> {
    let mut kernel = kernel.to_vec();
    let at = 0x200 + usize::from(u16::from_le_bytes([kernel[0x20e], kernel[0x20f]]));
    let length = kernel[at..].iter().position(|byte| *byte == 0).unwrap();
    let word = b" aml-confined";
    kernel[at + length - word.len()..at + length].copy_from_slice(word);
    kernel
}

/// The command lists the channels of the host that no register shows. For those by which the host can run commands in the machine,
/// the operator must pass an option.
#[test]
fn an_image_is_judged_by_what_it_leaves_open_to_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.efi");
    let measure = |kernel: &[u8], command_line: &str, more: &[&str]| {
        let sections: [(&str, &[u8]); 3] = [
            (".cmdline", command_line.as_bytes()),
            (".initrd", b""),
            (".linux", kernel),
        ];
        let stub = systemd_boot("trixie").join("linuxx64.efi.stub");
        std::fs::write(&path, uki(&stub, &sections)).unwrap();
        let output = firstlight(&[&[path.to_str().unwrap()], more].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = [text(&output.stdout), text(&output.stderr)];
        (output.status.code().unwrap(), said)
    };
    let closed = "console=ttyS0 panic=10 roothash=ab efi=noruntime SYSTEMD_FORCE_MEASURE=1 \
                  systemd.import_credentials=no systemd.gpt_auto=no noresume";
    let (stock, confined) = (linux(), marked(&linux()));

    let (code, [policy, said]) = measure(&confined, closed, &ONE_VALUE);
    assert_eq!(code, 0, "{said}");
    assert!(!said.contains("leaves these channels open"), "{said}");
    assert!(policy.contains(r#""acpiTables": "confined""#), "{policy}");

    // a stock kernel trusts the host's ACPI tables
    let (code, [policy, said]) = measure(&stock, closed, &ONE_VALUE);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("ACPI tables: open"), "{said}");
    assert!(!policy.contains("acpiTables"), "{policy}");
    // a policy can refuse such a kernel
    let demanding = folder.path().join("policy.json");
    let (_, [policy, _]) = measure(&confined, closed, &ONE_VALUE);
    let demand = policy.trim().strip_suffix('}').unwrap().to_owned();
    std::fs::write(&demanding, demand + r#","requireConfinedAcpi":true}"#).unwrap();
    let added = ["--add-to", demanding.to_str().unwrap(), "--name", "second"];
    let more = [&ONE_VALUE[..], &added].concat();
    let (code, [policy, said]) = measure(&stock, closed, &more);
    assert_eq!((code, policy.as_str()), (1, ""), "{said}");
    assert!(said.contains("requireConfinedAcpi: second"), "{said}");

    // EFI variables are commands to systemd
    let open = closed.replace(" efi=noruntime", "");
    let (code, [policy, said]) = measure(&stock, &open, &ONE_VALUE);
    assert_eq!((code, policy.as_str()), (1, ""), "{said}");
    for word in ["SystemdOptions", "efi=noruntime", "--accept-efi-variables"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let accepted = [&ONE_VALUE[..], &["--accept-efi-variables"]].concat();
    let (code, [_, said]) = measure(&stock, &open, &accepted);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("EFI variables: open"), "{said}");
    // PCR 4 has another value with Secure Boot
    let on = ["--secure-boot", "on", "--units", "all"];
    let (code, [_, said]) = measure(&stock, &open, &on);
    assert!(code == 0 && !said.contains("EFI variables"), "{said}");

    // the list for people and for programs
    let explain = [&ONE_VALUE[..], &["--explain"]].concat();
    let (code, [text, _]) = measure(&stock, "root=/dev/vda1 rd.break", &explain);
    assert_eq!(code, 0);
    for line in [
        "  root file system: open: ",
        "  credentials: open: ",
        "  parameters of shells: open: rd.break. Closed by: remove",
        "  logins on consoles: not seen: ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let (_, [json, said]) = measure(&stock, &open, &[&explain[..], &["-o", "json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{said}"));
    let host = json["host"].as_array().unwrap();
    let efi = host
        .iter()
        .find(|it| it["name"] == "EFI variables")
        .unwrap();
    assert_eq!(efi["state"], "open");
    assert_eq!(json["registers"][0]["name"], "PCR 2");
    assert_eq!(measure(&stock, &open, &["-o", "json"]).0, 2);
}

/// The values that AWS's own tool computes from an image: PCR 4 and 12, without Secure Boot.
fn nitro_pcr_compute(image: &Path) -> [String; 2] {
    let mut command = Command::new(fetched("nitro-pcr-compute.sh"));
    let said = run(command.arg("--image").arg(image));
    let computed: serde_json::Value = serde_json::from_str(&said).unwrap();
    let computed = &computed["Measurements"];
    assert_eq!(computed["HashAlgorithm"], "SHA384");
    ["PCR4", "PCR12"].map(|name| computed[name].as_str().unwrap().to_lowercase())
}

#[test]
#[ignore = "builds a program of AWS: make test-images"]
fn awss_tool_computes_the_same_sha_384_values_of_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.efi");
    for suite in ["bookworm", "trixie", "sid"] {
        std::fs::write(&path, unified(suite, COMMAND_LINE)).unwrap();
        let given = ["--secure-boot", "off", "--units", "none"];
        let variant = ["--attestation-variant", "aws-nitro-tpm"];
        let output = firstlight(&[&[path.to_str().unwrap()], &given[..], &variant].concat());
        let policy = String::from_utf8(output.stdout).unwrap();
        let policy = Policy::from_json(&policy).unwrap_or_else(|error| panic!("{error}: {policy}"));
        let [signed] = &policy.cloud().sha384[..] else {
            panic!("{policy:?}")
        };
        let [pcr_4, pcr_12] = nitro_pcr_compute(&path);
        assert_eq!((&signed[&4], &signed[&12]), (&pcr_4, &pcr_12), "{suite}");
    }
}

/// The stages of a machine have different values, but AWS's document knows no stages.
#[test]
fn the_sha_384_values_of_a_policy_are_those_of_all_stages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.efi");
    std::fs::write(&path, unified("bookworm", COMMAND_LINE)).unwrap();
    let measure = |more: &[&str]| {
        let variant = ["--attestation-variant", "aws-nitro-tpm"];
        let output = firstlight(&[&[path.to_str().unwrap()], &variant[..], more].concat());
        let policy = String::from_utf8(output.stdout).unwrap();
        let Ok(policy) = Policy::from_json(&policy) else {
            return Err(String::from_utf8(output.stderr).unwrap());
        };
        Ok((
            policy.images()[0].measurements().keys().copied().collect(),
            policy.cloud().sha384[0].keys().copied().collect(),
        ))
    };
    let off = ["--secure-boot", "off", "--units", "all"];
    let (pcrs, signed): (Vec<u32>, Vec<u32>) = measure(&off).unwrap();
    assert_eq!(pcrs, [2, 3, 4, 8, 9, 11, 12, 13, 15]);
    assert_eq!(signed, [2, 3, 4, 8, 9, 12, 13]);
    let (_, signed) = measure(&[&off[..], &["--stage", "booted"]].concat()).unwrap();
    assert_eq!(signed, [2, 3, 4, 8, 9, 11, 12, 13]);
    let error = measure(&[&off[..2], &["--pcrs", "11"]].concat()).unwrap_err();
    assert!(error.contains("PCR 11"), "{error}");

    // a policy of several images accepts AWS's values of each
    let policy = folder.path().join("policy.json");
    let file = path.to_str().unwrap();
    let variant = ["--attestation-variant", "aws-nitro-tpm"];
    let first = firstlight(&[&[file], &variant[..], &off].concat());
    std::fs::write(&policy, first.stdout).unwrap();
    std::fs::write(&path, unified("bookworm", OTHER_COMMAND_LINE)).unwrap();
    let further = ["--add-to", policy.to_str().unwrap(), "--name", "second"];
    let both = firstlight(&[&[file], &variant[..], &off, &further].concat());
    let both = Policy::from_json(&String::from_utf8(both.stdout).unwrap()).unwrap();
    assert_eq!((both.images().len(), both.cloud().sha384.len()), (2, 2));

    // a policy without AWS's values still accepts the machines of its first image
    let text = std::fs::read_to_string(&policy).unwrap();
    let mut first: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(first.as_object_mut().unwrap().remove("cloud").is_some());
    std::fs::write(&policy, first.to_string()).unwrap();
    let both = firstlight(&[&[file], &variant[..], &off, &further].concat());
    let said = String::from_utf8(both.stderr).unwrap();
    assert!(said.contains("so none is added for this image"), "{said}");
    let both = Policy::from_json(&String::from_utf8(both.stdout).unwrap()).unwrap();
    assert_eq!((both.images().len(), both.cloud().sha384.len()), (2, 0));

    // the same for the machines with SEV-SNP
    let variant = ["--attestation-variant", "aws-sev-snp"];
    let policy = firstlight(&[&[file], &variant[..], &off].concat()).stdout;
    let policy = Policy::from_json(&String::from_utf8(policy).unwrap()).unwrap();
    assert_eq!(policy.cloud().sha384.len(), 1);
}

/// The policy of a TDX machine has the firmware's MRTD, and the values that firmware, stub and kernel measure when they boot a disk.
#[test]
fn the_policy_of_tdx_machines_has_the_firmware_and_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let [firmware, kernel, initrd, file] =
        ["OVMF.fd", "vmlinuz", "initrd", "image.efi"].map(|name| folder.path().join(name));
    // a page that is measured
    let page = (0, 4096, 0xff000, 4096, 0, 1);
    std::fs::write(&firmware, tdx_firmware(&[page])).unwrap();
    // the first kernel that measures on TDX machines is 6.9
    let linux = of_version(&linux(), b"6.9.0");
    std::fs::write(&kernel, &linux).unwrap();
    std::fs::write(&initrd, b"an initrd").unwrap();
    std::fs::write(&file, unified("trixie", COMMAND_LINE)).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let [firmware, kernel, initrd, file] = [&firmware, &kernel, &initrd, &file].map(|it| text(it));
    let of_firmware = ["--tdx-firmware", &firmware];
    let direct = [
        "--kernel",
        &kernel,
        "--initrd",
        &initrd,
        "--cmdline",
        "quiet efi=noruntime",
    ];
    let measure = |arguments: &[&[&str]]| {
        let output = firstlight(&arguments.concat());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (text(output.stdout), text(output.stderr))
    };
    let (policy, said) = measure(&[&direct, &["--kernel-as-is"], &of_firmware]);
    let values = policy_values(&policy);
    assert_eq!(
        values.keys().copied().collect::<Vec<_>>(),
        [0, 2, 3, 4],
        "{said}"
    );
    let (alone, _) = measure(&[&of_firmware]);
    assert_eq!(policy_values(&alone)[&0], values[&0]);
    assert_eq!(values[&4], [0; 48]);
    let loader = Loader::AsIs;
    let image =
        Image::direct_linux(&linux, Some(b"an initrd"), "quiet efi=noruntime", loader).unwrap();
    for register in [2, 3] {
        let expected = image.value(Platform::Tdx, register, &KnownConditions::default());
        assert_eq!(expected.as_ref(), Ok(&values[&register]));
    }
    // the fields that QEMU changes in the kernel's header
    let (changed, _) = measure(&[&direct, &["--memory", "2048"], &of_firmware]);
    let changed = policy_values(&changed);
    assert_ne!(changed[&2], values[&2]);
    assert_eq!(changed[&3], values[&3]);

    let (explained, _) = measure(&[&direct, &["--kernel-as-is", "--explain"], &of_firmware]);
    for word in ["RTMR 1", "RTMR 2", "the kernel's command line"] {
        assert!(explained.contains(word), "{explained}");
    }
    for (arguments, why) in [
        (&[&[file.as_str()][..], &of_firmware][..], "partition table"),
        (&[&direct, &of_firmware], "--kernel-as-is"),
        (
            &[&direct, &["--memory", "1", "--kernel-as-is"], &of_firmware],
            "cannot be used with",
        ),
        (&[&direct, &of_firmware, &["--units", "all"]], "--units"),
        (&[&direct, &of_firmware, &["--tpm", "device:x"]], "--tpm"),
        (
            &[&[&file], &["--attestation-variant", "qemu-tdx"]],
            "--tdx-firmware is missing",
        ),
        (&[&[&file], &["--kernel-as-is"]], "--kernel-as-is"),
    ] {
        let (policy, said) = measure(arguments);
        assert!(policy.is_empty() && said.contains(why), "{why}: {said}");
    }
}

/// Returns a kernel whose header has another version.
fn of_version(kernel: &[u8], version: &[u8]) -> Vec<u8> {
    let mut kernel = kernel.to_vec();
    let at = 0x200 + usize::from(u16::from_le_bytes([kernel[0x20e], kernel[0x20f]]));
    kernel[at..at + version.len()].copy_from_slice(version);
    kernel
}

/// The policy of the image with the usual command line.
fn measure_again(folder: &tempfile::TempDir, given: &[&str]) -> String {
    let path = folder.path().join("usual.efi");
    std::fs::write(&path, unified("bookworm", COMMAND_LINE)).unwrap();
    let output = firstlight(&[&[path.to_str().unwrap()], given].concat());
    String::from_utf8(output.stdout).unwrap()
}

fn policy_values(policy: &str) -> BTreeMap<u32, Vec<u8>> {
    let policy = verifier::Policy::from_json(policy).unwrap();
    let measurements = policy.images()[0].measurements().iter();
    measurements
        .map(|(pcr, value)| (*pcr, value.expected.clone()))
        .collect()
}

/// An event in the log of a firmware and of systemd-stub: the type, its name in messages, the data, and the words for it in messages.
fn logged(what: &str) -> (u32, &'static str, Vec<u8>, String) {
    let utf16 = |text: &str| -> Vec<u8> {
        let units = text.encode_utf16().chain([0]);
        units.flat_map(u16::to_le_bytes).collect()
    };
    let tagged = |text: &str| {
        // an ID and a length come first
        let data = [&[0; 8], text.as_bytes(), b"\0"].concat();
        (0x6, "EV_EVENT_TAG", data, format!(" {text:?}"))
    };
    match what.split_once(' ') {
        Some(("section", name)) => (0xd, "EV_IPL", utf16(name), format!(" {name:?}")),
        _ if what.starts_with("the name ") => (0xd, "EV_IPL", utf16(&what[9..]), String::new()),
        _ if what.ends_with("command line") => tagged("LOADED_IMAGE::LoadOptions"),
        _ if what.starts_with("the initr") => tagged("Linux initrd"),
        _ if what == "a separator" => (0x4, "EV_SEPARATOR", vec![0; 4], String::new()),
        _ if what.starts_with('"') => (0x8000_0007, "EV_EFI_ACTION", vec![], String::new()),
        _ => (
            0x8000_0003,
            "EV_EFI_BOOT_SERVICES_APPLICATION",
            vec![],
            String::new(),
        ),
    }
}

/// The registers that these tests compare.
const COMPARED: [u32; 3] = [4, 9, 11];

/// Restarts the TPM, and makes the measurements of a boot. Returns the event log of that boot (TCG PC Client Platform Firmware
/// Profile, §10).
fn measure_boot(tpm: &mut Swtpm, log: &image::BootLog) -> Vec<u8> {
    tpm.reset();
    let spec = b"Spec ID Event03\0\0\0\0\0\0\x02\0\x02\x01\0\0\0\x0b\0\x20\0\0";
    let mut bytes = [&[0, 0, 0, 0, 3, 0, 0, 0][..], &[0; 20]].concat();
    bytes.extend((spec.len() as u32).to_le_bytes());
    bytes.extend(spec);
    let mut extended = Vec::new();
    for event in COMPARED.iter().flat_map(|pcr| log.events(*pcr)) {
        let (kind, _, data, _) = logged(&event.what);
        for number in [event.register, kind, 1] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([0x0b, 0]);
        bytes.extend(&event.digest);
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes.extend(data);
        extended.push(format!("{}:sha256={}", event.register, hex(&event.digest)));
    }
    // the variables of Secure Boot that a firmware measures
    extended.push(format!("7:sha256={}", "07".repeat(32)));
    let arguments: Vec<_> = extended.iter().map(String::as_str).collect();
    tpm.tool("tpm2_pcrextend", &arguments);
    bytes
}

/// An image of one of the forms that can be measured.
fn image_of(form: &str, folder: &Path, linux: &[u8], initrd: &[u8], command_line: &str) -> Image {
    if form == "kernel, initrd and command line" {
        return Image::direct_linux(
            linux,
            Some(initrd),
            command_line,
            Loader::Patched(512 << 20),
        )
        .unwrap();
    }
    let sections: [(&str, &[u8]); 4] = [
        (".osrel", OS_RELEASE),
        (".cmdline", command_line.as_bytes()),
        (".initrd", initrd),
        (".linux", linux),
    ];
    let bytes = uki(&systemd_boot("trixie").join("linuxx64.efi.stub"), &sections);
    if form == "unified kernel image" {
        return Image::uki(&bytes, None).unwrap();
    }
    let path = folder.join("disk.raw");
    disk(&path, 40, 16, &[(DEFAULT, &bytes)]);
    Image::disk(std::fs::File::open(&path).unwrap(), None, None).unwrap()
}

/// One changed byte in any part of an image: the join service refuses the machine, and its log names that part with its digest.
#[test]
fn a_machine_with_a_changed_part_is_refused_and_the_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let conditions = KnownConditions {
        units: Some(Units::None),
        secure_boot: Some(false),
        stage: Some(Stage::Initramfs),
    };
    let boot = |image: &Image| image.log(PCRS, &image.conditions(&conditions)[0]);
    let (linux, initrd) = (linux(), b"an initrd".to_vec());
    let command_line = "console=ttyS0 roothash=0123456789abcdef";
    let changed = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    let parts: [(&str, Vec<u8>, Vec<u8>, String); 4] = [
        (
            "kernel",
            changed(&linux, linux.len() / 2),
            initrd.clone(),
            command_line.into(),
        ),
        (
            "initrd",
            linux.clone(),
            changed(&initrd, 3),
            command_line.into(),
        ),
        (
            "command line",
            linux.clone(),
            initrd.clone(),
            command_line.replace("ttyS0", "ttyS1"),
        ),
        (
            "root hash",
            linux.clone(),
            initrd.clone(),
            command_line.replace("abcdef", "abcdee"),
        ),
    ];
    let mut tpm = Swtpm::start();
    for form in [
        "disk",
        "unified kernel image",
        "kernel, initrd and command line",
    ] {
        let honest = boot(&image_of(
            form,
            folder.path(),
            &linux,
            &initrd,
            command_line,
        ));
        let enforced = |pcr| Measurement {
            expected: honest.value(pcr).unwrap(),
            warn_only: false,
        };
        let policy = COMPARED.map(|pcr| (pcr, enforced(pcr))).into();
        let policy = cli::trust::policy::text(&Policy::new(policy).unwrap());
        std::fs::write(folder.path().join("attestationConfig"), policy).unwrap();
        let (join, address) = lone_service_program(folder.path());
        let mut is_accepted = |log: &image::BootLog| {
            let file = folder.path().join("event-log");
            std::fs::write(&file, measure_boot(&mut tpm, log)).unwrap();
            let location = tpm.location().parse().unwrap();
            accepts(address, qemu_vtpm::issuer(location, Some(file)))
        };
        assert!(is_accepted(&honest), "{form}: {}", join.output());
        for (part, linux, initrd, command_line) in &parts {
            let altered = boot(&image_of(form, folder.path(), linux, initrd, command_line));
            assert!(!is_accepted(&altered), "{form}: {part}");
            let mut named = Vec::new();
            for pcr in COMPARED {
                let events = honest.events(pcr).zip(altered.events(pcr));
                for (_, event) in events.filter(|(a, b)| a.digest != b.digest) {
                    let (_, kind, _, words) = logged(&event.what);
                    let digest = hex(&event.digest);
                    join.expect(&format!("{kind} {}..{words}", &digest[..8]));
                    named.push(format!("PCR {pcr}{words}"));
                }
            }
            assert_eq!(named, names(form, part), "{form}: {part}");
        }
    }
}

/// The words in the refusal when this part of an image of this form has changed.
fn names(form: &str, part: &str) -> Vec<&'static str> {
    let is_unified = form != "kernel, initrd and command line";
    match (is_unified, part) {
        (true, "kernel") => vec!["PCR 4", "PCR 4", "PCR 11 \".linux\""],
        (true, "initrd") => vec!["PCR 4", "PCR 9 \"Linux initrd\"", "PCR 11 \".initrd\""],
        (true, _) => vec![
            "PCR 4",
            "PCR 9 \"LOADED_IMAGE::LoadOptions\"",
            "PCR 11 \".cmdline\"",
        ],
        (false, "kernel") => vec!["PCR 4"],
        (false, "initrd") => vec!["PCR 9 \"Linux initrd\""],
        (false, _) => vec!["PCR 9 \"LOADED_IMAGE::LoadOptions\""],
    }
}

/// Returns whether the join service answers a machine that proves itself by `issuer`.
fn accepts(address: SocketAddr, issuer: vtpm::TpmIssuer) -> bool {
    let client = atls::Client::new(Some(Arc::new(issuer)), None);
    let socket = TcpStream::connect(address).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let Ok(transport) = client.connect(socket, deadline) else {
        return false;
    };
    let channel = rpc::grpc::Channel::new(transport, "x").unwrap();
    let request = IssueRejoinTicketRequest {
        disk_uuid: "00000000-0000-0000-0000-000000000000".into(),
    };
    let options = CallOptions {
        timeout: Some(Duration::from_secs(60)),
        ..CallOptions::default()
    };
    let answer: Result<IssueRejoinTicketResponse, Status> =
        channel.unary(ISSUE_REJOIN_TICKET, &request, &options);
    // it has no key service; only an accepted machine gets this answer
    let answer = answer.err().unwrap();
    answer.message().contains("key service")
}
