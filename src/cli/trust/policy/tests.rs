//! Tests of reading, writing, changing and judging policies.

use std::collections::BTreeMap;

use hardware::json::Digits;
use serde_json::{Value, json};
use support::mutation::mutations;
use verifier::variant::NAMES;
use verifier::{Exception, KeyName, Measurement, Policy, Variant};

use super::{Edit, check, facts, text};

/// A policy with every word, whose values differ from what an absent word means.
fn complete() -> Value {
    let registers = |byte: &str| {
        let expected = byte.repeat(32);
        json!({"4": {"expected": expected, "warnOnly": false}, "11": {"expected": expected, "warnOnly": true}})
    };
    let (aa, digest, dd) = ("aa".repeat(16), "bb".repeat(48), "dd".repeat(32));
    json!({
        "variant": "azure-tdx", "name": "one", "require": "strong", "exceptions": ["any-image", "zero-registers"],
        "measurements": registers("01"), "initramfs": registers("02"),
        "alsoAccepted": [{"name": "two", "measurements": registers("03"), "initramfs": registers("04")}],
        "attestationKeys": [KeyName::of(b"b").to_string(), KeyName::of(b"a").to_string()],
        "endorsementRoots": ["google-2022"],
        "secureBoot": {"enabled": true, "pk": [dd], "kek": [dd], "db": [dd, dd], "signers": [dd]},
        "tpm": {"vendors": ["IFX", "id:00001014"], "floors": [{"vendor": "IFX", "model": "SLB9672", "minimum": "0x10001"}]},
        "cloud": {"roots": ["azure-2023"], "projects": ["p", "7"], "accounts": ["123456789012"], "zones": ["z"],
                  "instances": ["i"], "sha384": [{"4": digest}, {"4": digest, "12": digest}]},
        "tdx": {"tcbStatuses": ["UpToDate", "OutOfDate"], "platformGraceDays": 30, "acceptedAdvisories": ["INTEL-SA-00837"],
                "rejectedAdvisories": ["INTEL-SA-00960"], "minimumEvaluation": 21, "maximumCollateralDays": 3,
                "tdAttributes": ["0x10000001", "0x0"], "xfam": ["0xe7", "0x602e7"], "mrTd": [digest], "mrSeam": [digest], "mrConfigId": digest,
                "mrOwner": digest, "mrOwnerConfig": digest, "mrServiceTd": [digest], "platforms": [aa]},
        "qeSVN": 1, "pceSVN": 2, "teeTCBSVN": aa, "qeVendorID": aa, "mrSeam": digest, "xfam": "e702060000000000", "intelRootKey": "",
        "snp": {"floors": [{"product": "Turin", "model": 1, "stepping": 2,
                            "minimum": {"fmc": 1, "bootloader": 2, "tee": 3, "snp": 4, "microcode": 5}}],
                "minimumAbi": [1, 55], "minimumGuestSvn": 7, "minimumFirmware": [1, 55, 39], "maximumVmpl": 1, "allowMigration": true, "refuseSmt": true,
                "policyBits": "0x1", "platformBits": "0x2", "forbiddenPlatformBits": "0x80", "mitigationBits": "0x4", "chips": ["cc".repeat(64)],
                "clouds": ["CN=c"], "launchMeasurements": [digest], "hostData": ["dd".repeat(32)],
                "familyIds": [aa], "imageIds": [aa], "idKeys": [digest],
                "authorKeys": [digest], "revocationList": "optional"},
        "bootloaderVersion": 1, "teeVersion": 2, "snpVersion": 3, "microcodeVersion": 4,
        "firmwareSignerConfig": {"acceptedKeyDigests": [digest], "enforcementPolicy": "MAAFallback", "maaURL": "https://m.example"},
        "amdRootKey": "", "amdSigningKey": ""
    })
}

fn read(value: &Value) -> Policy {
    Policy::from_json(&value.to_string()).unwrap()
}

fn enforced(values: &[(u32, u8)], len: usize) -> BTreeMap<u32, Measurement> {
    let one = |&(index, byte): &(u32, u8)| {
        let expected = vec![byte; len];
        let warn_only = false;
        (
            index,
            Measurement {
                expected,
                warn_only,
            },
        )
    };
    values.iter().map(one).collect()
}

/// No word is read and then forgotten.
#[test]
fn every_word_that_is_read_is_written_again() {
    let policy = read(&complete());
    let written: Value = serde_json::from_str(&text(&policy)).unwrap();
    assert_eq!(written, complete());
    assert_eq!(read(&written), policy);
}

#[test]
fn registers_are_written_in_the_order_of_their_numbers_each_on_a_line() {
    let old = r#"{"measurements":{"11":{"expected":"VALUE","warnOnly":true},"4":"VALUE"},"attestationKeys":["KEY"]}"#;
    let (value, key) = ("ab".repeat(32), KeyName::of(b"a"));
    let old = old
        .replace("VALUE", &value)
        .replace("KEY", &key.to_string());
    let policy = Policy::from_json(&old).unwrap().of_variant("qemu-vtpm");
    let expected = format!(
        r#"{{
  "variant": "qemu-vtpm",
  "measurements": {{
    "4": {{"expected": "{value}", "warnOnly": false}},
    "11": {{"expected": "{value}", "warnOnly": true}}
  }},
  "attestationKeys": ["{key}"]
}}"#
    );
    assert_eq!(text(&policy), expected);
    assert_eq!(Policy::from_json(&text(&policy)).unwrap(), policy);
    let lines = text(&read(&complete()));
    assert!(
        lines
            .lines()
            .all(|line| !line.ends_with(' ') && line.len() <= 180),
        "{lines}"
    );
}

#[test]
fn the_old_system_finds_the_first_image_where_it_looks() {
    let first = Policy::new(enforced(&[(4, 1), (15, 0)], 32)).unwrap();
    let both = first
        .and_also("image 1.3", enforced(&[(4, 2), (15, 0)], 32))
        .unwrap();
    let both = both.named("image \"1.2\"").unwrap();
    let old: Value = serde_json::from_str(&text(&both)).unwrap();
    assert_eq!(old["measurements"]["4"]["expected"], "01".repeat(32));
    assert_eq!(old["alsoAccepted"][0]["name"], "image 1.3");
    assert_eq!(read(&old), both);
}

#[test]
fn each_image_of_tdx_machines_is_accepted_with_each_mrtd() {
    let registers = |values: &[(u32, u8)]| enforced(values, 48);
    let shown = |policy: &Policy| -> Vec<(String, Vec<(u32, u8)>)> {
        let images = policy.images().iter().map(|image| {
            let values = image.measurements().iter();
            let values = values.map(|(index, value)| (*index, value.expected[0]));
            (image.name().to_owned(), values.collect())
        });
        images.collect()
    };
    let of = |name: &str, values: &[(u32, u8)]| (name.to_owned(), values.to_vec());
    let policy = Policy::new(registers(&[(0, 1), (2, 2)])).unwrap();
    let policy = policy
        .and_also("new", registers(&[(0, 3), (2, 4)]))
        .unwrap();
    let both = policy.clone().and_mrtds(&[[1; 48], [3; 48]]).unwrap();
    let expected = [
        of("", &[(0, 1), (2, 2)]),
        of("MRTD 03030303", &[(0, 3), (2, 2)]),
        of("new", &[(0, 3), (2, 4)]),
        of("new, MRTD 01010101", &[(0, 1), (2, 4)]),
    ];
    assert_eq!(shown(&both), expected);
    assert_eq!(both.clone().and_mrtds(&[[3; 48]]).unwrap(), both);
    // an image that names no MRTD, or only warns, becomes one that demands it
    let mut warned = registers(&[(0, 9), (2, 2)]);
    warned.get_mut(&0).unwrap().warn_only = true;
    for loose in [registers(&[(2, 2)]), warned] {
        let policy = Policy::new(loose).unwrap();
        let one = policy.clone().and_mrtds(&[[5; 48]]).unwrap();
        assert_eq!(shown(&one), [of("", &[(0, 5), (2, 2)])]);
        assert!(!one.images()[0].measurements()[&0].warn_only);
        let two = policy.clone().and_mrtds(&[[5; 48], [6; 48]]).unwrap();
        let expected = [
            of("MRTD 05050505", &[(0, 5), (2, 2)]),
            of("MRTD 06060606", &[(0, 6), (2, 2)]),
        ];
        assert_eq!(shown(&two), expected);
        assert_eq!(policy.clone().and_mrtds(&[]).unwrap(), policy);
    }
    let many: Vec<_> = (0..=16).map(|byte| [byte; 48]).collect();
    let error = policy.and_mrtds(&many).unwrap_err().to_string();
    assert!(error.contains("more than 16"), "{error}");
}

#[test]
fn a_changed_policy_keeps_the_rest() {
    let policy = read(&complete());
    let digest = [0xee; 48];
    let more = policy
        .clone()
        .and_launch_digests(&[digest, digest])
        .unwrap();
    assert_eq!(more.snp().snp.launch_measurements.len(), 2);
    assert_eq!(more.clone().and_launch_digests(&[digest]).unwrap(), more);
    assert_eq!(policy.clone().and_launch_digests(&[]).unwrap(), policy);
    let signed = policy
        .clone()
        .and_sha384(&BTreeMap::from([(4, vec![0xee; 48])]))
        .unwrap();
    assert_eq!(signed.cloud().sha384.len(), 3);
    let plain = Policy::new(enforced(&[(4, 1)], 32)).unwrap();
    let one = plain
        .clone()
        .and_sha384(&BTreeMap::from([(4, vec![1; 48])]))
        .unwrap();
    let two = one
        .clone()
        .and_sha384(&BTreeMap::from([(4, vec![2; 48])]))
        .unwrap();
    assert_eq!((one.cloud().sha384.len(), two.cloud().sha384.len()), (1, 2));
    let roots = [
        "google-2022".to_owned(),
        "-----BEGIN CERTIFICATE-----\nAA==\n".into(),
    ];
    let certified = plain.clone().certified_by(roots.clone()).unwrap();
    assert_eq!(certified.endorsement_roots(), roots);
    let (a, b) = (KeyName::of(b"a"), KeyName::of(b"b"));
    let without = policy.clone().disbelieving(&[a]).unwrap();
    assert_eq!(without.keys(), &[b].into());
    assert_eq!(without.believing([a]).unwrap(), policy);
    let none = plain
        .clone()
        .believing([a])
        .unwrap()
        .disbelieving(&[a])
        .unwrap();
    assert_eq!(none, plain);
    let staged = plain
        .clone()
        .with_initramfs(enforced(&[(4, 2)], 32))
        .unwrap();
    assert_eq!(staged.images()[0].initramfs()[&4].expected, [2; 32]);
    assert_eq!(plain.named("a").unwrap().images()[0].name(), "a");
}

#[test]
fn what_differs_is_named_once() {
    let shown = |old: &Value, new: &Value| -> String {
        let differences = facts::differences(&read(old), &read(new));
        differences.iter().map(ToString::to_string).collect()
    };
    let old = complete();
    assert_eq!(shown(&old, &old), "");
    let mut new = old.clone();
    new["variant"] = "azure-sev-snp".into();
    new["measurements"]["4"]["warnOnly"] = true.into();
    new["measurements"]["11"]["warnOnly"] = false.into();
    new["attestationKeys"] = json!([KeyName::of(b"a").to_string(), KeyName::of(b"c").to_string()]);
    new["cloud"]["zones"] = json!(["z", "y"]);
    new["snp"]["minimumGuestSvn"] = 8.into();
    new.as_object_mut().unwrap().remove("require");
    let (b, c, one) = (KeyName::of(b"b"), KeyName::of(b"c"), "01".repeat(32));
    let expected = format!(
        "- variant: azure-tdx\n+ variant: azure-sev-snp\n\
         - one: PCR 4: {one} (enforced)\n+ one: PCR 4: {one} (only warns)\n\
         - one: PCR 11: {one} (only warns)\n+ one: PCR 11: {one} (enforced)\n\
         - attestation key {b}: believed\n- require: strong\n- cloud.zones: z\n\
         - snp.minimumGuestSvn: 7\n+ snp.minimumGuestSvn: 8\n\
         + attestation key {c}: believed\n+ cloud.zones z: accepted\n+ cloud.zones y: accepted\n"
    );
    assert_eq!(shown(&old, &new), expected);
}

#[test]
fn each_requirement_is_shown_in_words() {
    let json = facts::json(&read(&complete()));
    let requirements = json["requirements"].as_array().unwrap();
    // the roots that replace built-in ones are empty
    assert_eq!(requirements.len(), 61);
    for one in requirements {
        assert!(one["meaning"] != "" && one["values"] != json!([]), "{one}");
    }
    let table = facts::table(&read(&complete()));
    for line in [
        "variant: azure-tdx\nimage: one\n",
        "  PCR 4    enforced    0101",
        "  PCR 11   only warns  0101",
        "  PCR 11 in the initramfs  only warns  0202",
        "  snp.minimumAbi: minimum version of the ABI in the guest policy\n    [1,55]\n",
        "    [1,55,39]\n",
        "  cloud.projects: the machine is in one of these projects of Google Cloud\n    p\n    7\n",
    ] {
        assert!(table.contains(line), "{line}: {table}");
    }
}

#[test]
fn what_a_policy_leaves_open_is_named_for_each_variant() {
    for name in NAMES {
        let variant = Variant::named(name).unwrap();
        let len = if name == "qemu-tdx" { 48 } else { 32 };
        let usual: &[(u32, u8)] = match len {
            48 => &[(0, 1), (1, 1), (2, 1), (3, 1), (4, 0)],
            _ => &[
                (4, 1),
                (7, 1),
                (8, 0),
                (9, 1),
                (11, 1),
                (12, 0),
                (13, 0),
                (15, 0),
            ],
        };
        let usual = match variant.launch {
            None => usual,
            Some(_) => &[(15, 0)],
        };
        let policy = Policy::new(enforced(usual, len)).unwrap();
        let policy = policy.with_platform(|_, snp, _| {
            let launched = variant.launch.map(|_| Digits([0xaa; 48]));
            snp.snp.launch_measurements.extend(launched);
        });
        let policy = policy.unwrap().requiring_strong().of_variant(name);
        let found = check::found(&policy, variant);
        let (any_tpm, firmware) = ("the attestation key:", "the firmware (");
        let versions = "the versions of AMD's firmware";
        let (project, account) = ("the project (", "the account (");
        let expected: &[&str] = match name {
            "qemu-vtpm" => &[any_tpm],
            "azure-tdx" => &[any_tpm, firmware],
            "azure-sev-snp" => &[any_tpm, firmware, versions],
            "aws-sev-snp" => &[any_tpm, firmware, versions, account],
            "gcp-sev-snp" => &[firmware, versions, project],
            "gcp-tdx" => &[firmware, project],
            "gcp-sev-es" => &[project],
            "aws-nitro-tpm" => &[any_tpm, account],
            "qemu-snp" => &[versions],
            _ => &[],
        };
        assert_eq!(found.errors, [""; 0], "{name}");
        assert_eq!(found.open.len(), expected.len(), "{name}: {:?}", found.open);
        for (open, expected) in found.open.iter().zip(expected) {
            assert!(open.starts_with(expected), "{name}: {open}");
        }
    }
}

#[test]
fn a_policy_that_pins_nothing_useful_is_an_error() {
    let variant = Variant::named("qemu-vtpm").unwrap();
    let found = |values: &[(u32, u8)]| {
        let policy = Policy::new(enforced(values, 32)).unwrap();
        check::found(&policy, variant)
    };
    let no_image = found(&[(9, 1), (15, 0)]);
    assert_eq!(no_image.errors.len(), 1);
    assert!(no_image.errors[0].contains("does not enforce PCR 4, so any image is accepted"));
    for open in [
        "PCR 4 (",
        "PCR 7 (",
        "the form of attested TLS",
        "the attestation variant",
    ] {
        assert!(
            no_image.open.iter().any(|it| it.starts_with(open)),
            "{open}"
        );
    }
    // zero though the firmware extends it: the bank is not in use
    let zeros = found(&[(4, 1), (7, 0), (8, 0), (11, 0)]);
    assert_eq!(zeros.errors.len(), 1, "{:?}", zeros.errors);
    assert!(zeros.errors[0].contains("PCR 7 of the first image is zero"));
    // both at once, and permitted
    let both = Policy::new(enforced(&[(7, 0)], 32)).unwrap();
    assert_eq!(check::found(&both, variant).errors.len(), 2);
    let permitted = both
        .permitting(Exception::AnyImage)
        .permitting(Exception::ZeroRegisters);
    let plain = Policy::new(enforced(&[(4, 1)], 32)).unwrap();
    let useless = check::found(&plain.permitting(Exception::AnyImage), variant);
    assert!(
        useless.errors.is_empty()
            && useless
                .open
                .iter()
                .any(|it| it.starts_with("the exception any-image (exceptions)")),
        "{:?}",
        useless.open
    );
    let permitted = check::found(&permitted, variant);
    assert_eq!(permitted.errors, [""; 0]);
    let of_exceptions = permitted
        .open
        .iter()
        .filter(|it| it.ends_with(": an exception permits it"));
    assert_eq!(of_exceptions.count(), 2, "{:?}", permitted.open);
    let mut signed = json!({"measurements": {"4": "01".repeat(32)}});
    signed["cloud"] = json!({"sha384": {"4": "00".repeat(48)}});
    let aws = Variant::named("aws-nitro-tpm").unwrap();
    let errors = check::found(&read(&signed), aws).errors;
    assert!(
        errors[0].contains("cloud.sha384: PCR 4 is zero"),
        "{errors:?}"
    );
    // what no machine of the variant proves
    let errors = check::found(&read(&signed), variant).errors;
    assert!(
        errors[0].contains("cloud.sha384: the attestation variant qemu-vtpm"),
        "{errors:?}"
    );
    // a register that only warns in one stage of the boot
    let mut warned = json!({"measurements": {"4": "01".repeat(32), "15": "00".repeat(32)}});
    warned["initramfs"] = json!({"4": {"expected": "01".repeat(32), "warnOnly": true}});
    let errors = check::found(&read(&warned), variant).errors;
    assert!(errors[0].contains("does not enforce PCR 4,"), "{errors:?}");
}

#[test]
fn altered_policies_are_refused_or_written_as_they_were_read() {
    for text in mutations(complete().to_string().as_bytes(), 5000) {
        let Ok(policy) = Policy::from_json(&String::from_utf8_lossy(&text)) else {
            continue;
        };
        assert_eq!(
            Policy::from_json(&super::text(&policy)).as_ref(),
            Ok(&policy)
        );
        assert_eq!(facts::differences(&policy, &policy).len(), 0);
        let _ = (facts::table(&policy), facts::json(&policy));
    }
}
