use std::io::Cursor;

use support::mutation::{corpus, mutations};

use super::testing::{disk, program, unified};
use super::*;
use crate::event_log::utf16;

/// What most of these tests compute.
const PCRS: Platform = Platform::Tpm(RegisterBank::Sha256);

fn given(stage: Stage, secure_boot: bool, units: Units) -> KnownConditions {
    KnownConditions {
        stage: Some(stage),
        secure_boot: Some(secure_boot),
        units: Some(units),
    }
}

fn sha256(parts: &[&[u8]]) -> Vec<u8> {
    Digest::of(parts).in_bank(RegisterBank::Sha256).to_vec()
}

/// Returns what is measured into a register in a usual boot.
fn measured(image: &Image, pcr: u32, given: &KnownConditions) -> Vec<String> {
    let cases = &image.registers(PCRS, given)[&pcr];
    cases[0]
        .events
        .iter()
        .map(|event| event.what.clone())
        .collect()
}

fn sections(image: &Image) -> Vec<String> {
    let given = given(Stage::Initramfs, false, Units::None);
    let events = measured(image, 11, &given).into_iter();
    events
        .filter_map(|what| Some(what.strip_prefix("section ")?.to_owned()))
        .collect()
}

#[test]
fn sections_are_measured_in_the_order_of_the_stubs_version() {
    let file: [(&str, &[u8]); 5] = [
        (".hwids", b"h"),
        (".uname", b"6.1"),
        (".ucode", b"u"),
        (".pcrpkey", b"key"),
        (".splash", b"s"),
    ];
    for (version, expected) in [
        (
            "252.39-1",
            ".linux .osrel .cmdline .initrd .splash .pcrpkey",
        ),
        (
            "254",
            ".linux .osrel .cmdline .initrd .splash .uname .sbat .pcrpkey",
        ),
        (
            "256.1",
            ".linux .osrel .cmdline .initrd .ucode .splash .uname .sbat .pcrpkey",
        ),
        (
            "262~rc1",
            ".linux .osrel .cmdline .initrd .ucode .splash .uname .sbat .pcrpkey .hwids",
        ),
    ] {
        let image = Image::uki(&unified(version, &file), None).unwrap();
        assert_eq!(sections(&image).join(" "), expected, "{version}");
    }
}

#[test]
fn the_first_profile_overrides_the_sections_before_it() {
    let file: [(&str, &[u8]); 4] = [
        (".profile", b"ID=main"),
        (".splash", b"s"),
        (".profile", b"ID=other"),
        (".cmdline", b"other"),
    ];
    let image = Image::uki(&unified("257", &file), None).unwrap();
    assert_eq!(
        sections(&image).join(" "),
        ".linux .osrel .cmdline .initrd .splash .sbat .profile"
    );
    assert!(
        image.warnings()[0].contains("the profiles main, other; these values are those of main")
    );
    assert_eq!(image.profile().as_deref(), Some("main"));
    for chosen in ["other", "1"] {
        let image = Image::uki(&unified("257", &file), Some(chosen)).unwrap();
        assert_eq!(
            sections(&image).join(" "),
            ".linux .osrel .cmdline .initrd .sbat .profile"
        );
        assert_eq!(image.profile().as_deref(), Some("other"));
        assert!(image.warnings().is_empty());
    }
    let error = Image::uki(&unified("257", &file), Some("2\x1b")).err();
    assert_eq!(
        error.unwrap().to_string(),
        "the image has no profile 2?: it has main, other"
    );
    // older stubs know no profiles
    let error = Image::uki(&unified("256", &file[..1]), Some("main")).err();
    assert!(
        matches!(error, Some(Error::NotFound(why)) if why.starts_with("the image has no profiles"))
    );
    let Err(error) = Image::uki(&unified("257", &[(".cmdline", b"twice")]), None) else {
        panic!()
    };
    assert_eq!(error.to_string(), "the image has two sections .cmdline");
}

#[test]
fn the_number_of_a_profile_is_measured_unless_it_is_the_first() {
    let file: [(&str, &[u8]); 2] = [(".profile", b"ID=main"), (".profile", b"ID=other")];
    for (version, is_on_tdx) in [("259.5", false), ("261", true)] {
        let bytes = unified(version, &file);
        let image = |profile| Image::direct_uki(&bytes, Some(profile)).unwrap();
        let given = given(Stage::Initramfs, false, Units::None);
        let value = |profile| image(profile).value(PCRS, 12, &given).unwrap();
        assert_eq!(value("main"), [0; 32]);
        assert_eq!(
            value("other"),
            replayed(RegisterBank::Sha256, &[&utf16("1")])
        );
        let conditions = image("other").conditions(&given)[0];
        let log = image("other").log(Platform::Tdx, &conditions);
        let first = log.events(RTMR_2).next().unwrap();
        assert_eq!(
            first.what == "the number of the profile",
            is_on_tdx,
            "{version}"
        );
    }
}

#[test]
fn a_credential_that_systemd_writes_is_named_with_its_cure() {
    let advice = |version| {
        let image = Image::direct_uki(&unified(version, &[]), None).unwrap();
        let given = given(Stage::Booted, false, Units::Booted);
        let cases = &image.registers(PCRS, &given)[&9];
        cases[0].value.clone().unwrap_err().instead
    };
    for version in ["259.5", "260", "261.2"] {
        let advice = advice(version);
        assert!(
            advice.contains("PCR 12 differs from the second boot on"),
            "{advice}"
        );
    }
    assert_eq!(
        advice("262"),
        "pin PCR 11 with 12 and 13, or mask these units"
    );
}

#[test]
fn a_section_is_measured_as_it_is_in_memory() {
    let digest = |bytes: &[u8]| {
        let image = Image::uki(bytes, None).unwrap();
        let log = image.registers(PCRS, &given(Stage::Initramfs, false, Units::None));
        let event = log[&11][0]
            .events
            .iter()
            .find(|event| event.what == "section .initrd");
        event.unwrap().digest.clone()
    };
    let mut bytes = unified("257", &[]);
    assert_eq!(digest(&bytes), sha256(&[b"initrd"]));
    // VirtualSize of the fifth section
    let size = 0x44 + 20 + 240 + 40 * 4 + 8;
    bytes[size] = 4;
    assert_eq!(digest(&bytes), sha256(&[b"init"]));
    bytes[size] = 20;
    assert_eq!(digest(&bytes), sha256(&[b"initrd", &[0; 14]]));
    bytes[size + 3] = 0x7f;
    let error = Image::uki(&bytes, None).err().unwrap();
    assert!(error.to_string().contains("in memory"), "{error}");
}

#[test]
fn a_signature_does_not_change_the_digest() {
    let unsigned = program(&[(".text", b"some code")]);
    let mut signed = unsigned.clone();
    signed[0x44 + 20 + 64..][..4].copy_from_slice(b"sum!");
    let entry = 0x44 + 20 + 112 + 8 * 4;
    signed[entry..entry + 4].copy_from_slice(&(unsigned.len() as u32).to_le_bytes());
    signed[entry + 4] = 16;
    signed.extend([7; 16]);
    let digest = |bytes: &[u8]| pe::Pe::parse(bytes).unwrap().authenticode().unwrap();
    assert_eq!(digest(&signed), digest(&unsigned));
    signed[1020] = 1;
    assert_ne!(digest(&signed), digest(&unsigned));
}

#[test]
fn the_kernel_in_an_image_is_measured_by_old_stubs_without_secure_boot() {
    for (version, secure_boot, expected) in [
        ("257.13", false, true),
        ("257.13", true, false),
        ("258", false, false),
    ] {
        let image = Image::uki(&unified(version, &[]), None).unwrap();
        let events = measured(
            &image,
            4,
            &given(Stage::Initramfs, secure_boot, Units::None),
        );
        let is_measured = events.contains(&"the kernel in the image".to_owned());
        assert_eq!(is_measured, expected, "{version} {secure_boot}");
    }
}

#[test]
fn each_value_says_when_a_register_has_it() {
    let image = Image::uki(&unified("252.39", &[]), None).unwrap();
    let registers = image.registers(PCRS, &KnownConditions::default());
    let when = |pcr: u32| -> Vec<(Option<Stage>, &str)> {
        let cases = registers[&pcr].iter();
        cases.map(|case| (case.stage, case.when.as_str())).collect()
    };
    assert_eq!(
        when(4),
        [
            (None, "Secure Boot off, the first boot option starts"),
            (None, "Secure Boot on, the first boot option starts"),
            (None, "Secure Boot off, after a boot option that failed"),
            (None, "Secure Boot on, after a boot option that failed"),
        ]
    );
    assert_eq!(when(9), [(None, "")]);
    assert_eq!(
        when(11),
        [
            (Some(Stage::Initramfs), "systemd's units: all"),
            (Some(Stage::Initramfs), "systemd's units: booted or none"),
            (Some(Stage::Booted), "systemd's units: all"),
            (Some(Stage::Booted), "systemd's units: booted"),
            (Some(Stage::Booted), "systemd's units: none"),
        ]
    );
    assert_eq!(registers[&11][1].value, registers[&11][4].value);
    assert_eq!(
        image.value(PCRS, 12, &KnownConditions::default()),
        Ok(vec![0; 32])
    );
    assert!(image.value(PCRS, 11, &KnownConditions::default()).is_err());
    // the firmware's own registers are not the image's
    assert!(image.value(PCRS, 7, &KnownConditions::default()).is_err());
}

#[test]
fn newer_systemd_ends_the_firmwares_registers_with_a_separator() {
    let image = Image::direct_uki(&unified("261.2", &[]), None).unwrap();
    for pcr in [4, 5, 12, 13] {
        for (units, expected) in [(Units::All, true), (Units::Phases, false)] {
            let events = measured(&image, pcr, &given(Stage::Initramfs, false, units));
            assert_eq!(
                events.last().is_some_and(|last| last == "\"os-separator\""),
                expected
            );
        }
    }
    let off: [(&str, &[u8]); 2] = [
        (".profile", b"ID=main"),
        (".cmdline", b"console=ttyS0 systemd.tpm2_measured_os=0"),
    ];
    let image = Image::direct_uki(&unified("262", &off), None).unwrap();
    let values = [Stage::Initramfs, Stage::Booted].map(|stage| {
        let given = KnownConditions {
            stage: Some(stage),
            ..KnownConditions::default()
        };
        [4, 9, 11, 12, 13, 15].map(|pcr| image.value(PCRS, pcr, &given).unwrap())
    });
    assert_eq!(values[0], values[1]);
}

#[test]
fn a_command_line_that_versions_change_differently_is_not_predicted_for_them() {
    let command_line = |version: &str, text: &[u8]| {
        let magic = format!("#### LoaderInfo: systemd-stub {version} ####\0");
        let kernel = program(&[(".text", b"a kernel")]);
        let file: [(&str, &[u8]); 3] = [
            (".sdmagic", magic.as_bytes()),
            (".cmdline", text),
            (".linux", &kernel),
        ];
        let image = Image::uki(&program(&file), None).unwrap();
        let cases = &image.registers(PCRS, &given(Stage::Initramfs, false, Units::None))[&9];
        cases[0]
            .value
            .clone()
            .ok()
            .map(|_| cases[0].events[0].digest.clone())
    };
    let handed_over = |text: &str| Some(sha256(&[&utf16(text)]));
    assert_eq!(command_line("252.39-1", b" a b\n"), handed_over(" a b"));
    assert_eq!(command_line("252.4", b"a b\n"), None);
    assert_eq!(command_line("254", b" a\tb\n"), handed_over(" a b"));
    assert_eq!(command_line("257", b" a\tb\n\0rest"), handed_over("a b"));
    assert_eq!(command_line("253", b"a b\n"), None);
    assert_eq!(command_line("255", b" a"), None);
    assert_eq!(command_line("255", b"a"), handed_over("a"));
    assert_eq!(command_line("257", b"a\xff"), None);
}

/// Returns a kernel for QEMU's `-kernel` of this version.
fn linux(version: &str) -> Vec<u8> {
    let mut kernel = program(&[(".text", b"code")]);
    let at = kernel.len();
    kernel.extend([version.as_bytes(), b" (who@where) #1\0"].concat());
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x20e..0x210].copy_from_slice(&((at - 0x200) as u16).to_le_bytes());
    kernel[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    kernel
}

/// Returns the value of a register that has these events.
fn replayed(bank: RegisterBank, events: &[&[u8]]) -> Vec<u8> {
    events.iter().fold(vec![0; bank.size()], |value, event| {
        let digest = Digest::of(&[event]);
        bank.extended(&value, digest.in_bank(bank))
    })
}

/// The order is that of edk2's OvmfPkg/Tcg/TdTcg2Dxe and of the tool tdx-measure for machines of
/// Ubuntu 25.04.
#[test]
fn a_tdx_machine_measures_a_kernel_of_qemu_into_two_registers() {
    let kernel = linux("6.12.3-1-amd64");
    let image = |loader| Image::direct_linux(&kernel, Some(b"initrd"), "quiet", loader).unwrap();
    let value =
        |image: &Image, register| image.value(Platform::Tdx, register, &KnownConditions::default());
    let programs = pe::Pe::parse(&kernel).unwrap().authenticode().unwrap();
    let kernel_of = programs.in_bank(RegisterBank::Sha384);
    let first = RegisterBank::Sha384.extended(&[0; 48], kernel_of);
    let words: [&[u8]; 4] = [
        b"Calling EFI Application from Boot Option",
        &[0; 4],
        b"Exit Boot Services Invocation",
        b"Exit Boot Services Returned with Success",
    ];
    let rtmr_1 = words.iter().fold(first, |value, event| {
        RegisterBank::Sha384.extended(&value, Digest::of(&[event]).in_bank(RegisterBank::Sha384))
    });
    let as_is = image(Loader::AsIs);
    assert_eq!(value(&as_is, RTMR_1), Ok(rtmr_1.clone()));
    let rtmr_2 = replayed(
        RegisterBank::Sha384,
        &[&utf16("quiet initrd=initrd"), b"initrd"],
    );
    assert_eq!(value(&as_is, RTMR_2), Ok(rtmr_2.clone()));
    // QEMU's changes of the header affect only RTMR 1
    let patched = image(Loader::Patched(1 << 30));
    assert!(value(&patched, RTMR_1).is_ok_and(|value| value != rtmr_1));
    assert_eq!(value(&patched, RTMR_2), Ok(rtmr_2));
    let unknown = value(&image(Loader::Unknown), RTMR_1).unwrap_err();
    let why = &unknown[0].value.as_ref().unwrap_err().instead;
    assert!(
        why.contains("--memory") && why.contains("--kernel-as-is"),
        "{why}"
    );
    // MRTD is the firmware's, RTMR 0 the host's, RTMR 3 the cluster's
    for register in [0, 1, 4] {
        assert!(value(&as_is, register).is_err(), "{register}");
    }
}

#[test]
fn a_tdx_machine_measures_a_disk_into_two_registers() {
    let kernel = linux("6.12");
    let image = |stub: &str| {
        let magic = format!("#### LoaderInfo: systemd-stub {stub} ####\0");
        let file: [(&str, &[u8]); 4] = [
            (".sdmagic", magic.as_bytes()),
            (".cmdline", b"console=ttyS0"),
            (".initrd", b"initrd"),
            (".linux", &kernel),
        ];
        program(&file)
    };
    let names = |stub: &str, register| {
        let image = Image::disk(Cursor::new(disk(&image(stub))), None, None).unwrap();
        let cases = &image.registers(Platform::Tdx, &KnownConditions::default())[&register];
        assert!(cases[0].value.is_ok() && cases[0].stage.is_none());
        let names = cases[0].events.iter().map(|event| event.what.clone());
        names.collect::<Vec<_>>().join(", ")
    };
    let calling = "\"Calling EFI Application from Boot Option\", a separator, the partition table, the unified kernel image";
    let exit = "\"Exit Boot Services Invocation\", \"Exit Boot Services Returned with Success\"";
    assert_eq!(names("258", RTMR_1), format!("{calling}, {exit}"));
    // an older stub has the firmware start the kernel
    assert_eq!(
        names("257", RTMR_1),
        format!("{calling}, the kernel in the image, {exit}")
    );
    let sections = ".linux .cmdline .initrd".split(' ');
    let sections = sections.map(|name| format!("the name {name}, section {name}, "));
    let sections: String = sections.collect();
    let of_kernel = "the kernel's command line, the initrd with what the stub adds";
    assert_eq!(names("256", RTMR_2), sections + of_kernel);
    // 256 is the first stub that measures for TDX
    assert_eq!(names("255", RTMR_2), of_kernel);
}

#[test]
fn what_a_tdx_machine_measures_is_not_known_of_an_old_kernel_or_an_unknown_disk() {
    let missing = |image: Image, register| {
        let cases = image.value(Platform::Tdx, register, &KnownConditions::default());
        cases.unwrap_err()[0].value.clone().unwrap_err().why
    };
    let direct = |kernel: &[u8]| Image::direct_linux(kernel, None, "", Loader::AsIs).unwrap();
    assert!(missing(direct(&linux("6.8.0-60-generic")), RTMR_2).contains("Linux 6.8"));
    assert!(missing(direct(&linux("six")), RTMR_2).contains("its version"));
    let file = Image::uki(&unified("257", &[]), None).unwrap();
    assert!(missing(file, RTMR_1).contains("partition table"));
    let file = Image::uki(&unified("257", &[]), None).unwrap();
    assert!(missing(file, RTMR_2).contains("its version"));
}

#[test]
fn other_files_are_refused_with_a_reason() {
    let refusal = |bytes: &[u8]| Image::uki(bytes, None).err().unwrap();
    let foreign =
        |bytes: &[u8], words| matches!(refusal(bytes), Error::Foreign(why) if why.contains(words));
    assert!(foreign(b"#!/bin/sh", "MZ"));
    assert!(foreign(&program(&[(".text", b"x")]), "no systemd-stub"));
    let old = refusal(&unified("249", &[]));
    assert!(matches!(&old, Error::Unsupported(why) if why.contains("expected 252 or newer")));
    let stub: [(&str, &[u8]); 1] = [(".sdmagic", b"#### LoaderInfo: systemd-stub 257 ####\0")];
    let kernel = refusal(&program(&stub));
    assert!(matches!(&kernel, Error::NotFound(why) if why.contains(".linux")));
    let newer = Image::uki(&unified("299", &[]), None).unwrap();
    assert!(newer.warnings()[0].contains("newer than"));
    assert!(Image::direct_linux(&program(&stub), None, "", Loader::Unknown).is_err());
}

#[test]
fn a_disk_gives_the_values_of_its_image() {
    let image = unified("257", &[]);
    let on_disk = Image::disk(Cursor::new(disk(&image)), None, None).unwrap();
    let given = given(Stage::Booted, false, Units::All);
    for pcr in [4, 8, 9, 11, 12, 13] {
        let expected = Image::uki(&image, None).unwrap().value(PCRS, pcr, &given);
        assert!(expected.is_ok(), "{pcr}");
        assert_eq!(on_disk.value(PCRS, pcr, &given), expected, "{pcr}");
    }
    assert!(on_disk.value(PCRS, 5, &given).is_ok());
}

/// The value of a register with only a separator, as genuine event logs of Google's machines and of OVMF have it.
#[test]
fn the_registers_of_the_firmwares_drivers_have_a_separator_alone() {
    let image = Image::uki(&unified("257", &[]), None).unwrap();
    let given = given(Stage::Booted, false, Units::All);
    for pcr in [2, 3] {
        let value = image.value(PCRS, pcr, &given).unwrap();
        let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            digits,
            "3d458cfe55cc03ea1f443f1562beec8df51c75e14a9fcf9a7234a13f198e7969"
        );
    }
}

#[test]
fn a_cycle_of_clusters_ends() {
    let image = unified("257", &[]);
    let mut bytes = disk(&image);
    // the table's entries of the clusters 2 and 3: each names the other
    bytes[4 * 512 + 3..][..3].copy_from_slice(&[3, 0x20, 0]);
    let error = Image::disk(Cursor::new(bytes), None, None).err().unwrap();
    assert!(
        matches!(&error, Error::Malformed(why) if why.contains("cycle")),
        "{error}"
    );
}

/// Reads the bytes as each kind of image, and computes everything.
fn compute(bytes: &[u8]) {
    let images = [
        Image::uki(bytes, None),
        Image::direct_uki(bytes, None),
        Image::direct_linux(
            bytes,
            Some(b"initrd"),
            "console=ttyS0",
            Loader::Patched(1 << 29),
        ),
        Image::disk(Cursor::new(bytes), None, None),
        Image::disk(Cursor::new(bytes), Some("EFI/BOOT/BOOTX64.EFI"), None),
    ];
    for image in images.into_iter().flatten() {
        for platform in [PCRS, Platform::Tpm(RegisterBank::Sha384), Platform::Tdx] {
            image.registers(platform, &KnownConditions::default());
        }
    }
}

#[test]
fn hostile_images_end_without_a_panic() {
    let image = unified("257", &[(".profile", b"ID=main")]);
    for valid in [image.clone(), disk(&image)] {
        mutations(&valid, 3000).for_each(|bytes| compute(&bytes));
    }
    for target in ["uki", "disk_image"] {
        corpus(target).iter().for_each(|(_, bytes)| compute(bytes));
    }
}
