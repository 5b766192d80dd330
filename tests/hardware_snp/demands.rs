//! The requirements of a policy on SEV-SNP machines, in its JSON (`snp`).

use hardware::refusal::Refusal;
use hardware::snp::requirements::SnpRequirements;
use serde_json::{Value, json};

use crate::forged::Hierarchy;

fn read(demands: &Value) -> Result<SnpRequirements, String> {
    serde_json::from_value(demands.clone()).map_err(|error| error.to_string())
}

/// Judges the correct report after a change by these requirements.
fn judge(demands: &Value, change: fn(&mut [u8])) -> Result<(), Refusal> {
    let demands = read(demands).unwrap();
    let judged = Hierarchy::get().judge(change, &demands);
    judged.map(drop)
}

/// A floor of the chip of the correct report, with one part of its minimum replaced.
fn floor(part: &str, version: u8) -> Value {
    let mut minimum = json!({"bootloader": 4, "tee": 1, "snp": 24, "microcode": 219});
    minimum[part] = version.into();
    json!({"floors": [{"product": "Milan", "model": 1, "stepping": 1, "minimum": minimum}]})
}

/// Every possible requirement, with the strictest value that the correct report meets.
fn all() -> Value {
    let mut all = floor("tee", 1);
    let further = json!({
        "minimumAbi": [1, 37], "minimumGuestSvn": 7, "minimumFirmware": [1, 58, 40], "maximumVmpl": 1, "allowMigration": true, "refuseSmt": true,
        "policyBits": "0x3000000", "platformBits": "0x20", "forbiddenPlatformBits": "0x82", "mitigationBits": "0x3",
        "chips": ["c5".repeat(64), "c5".repeat(8)], "launchMeasurements": ["aa".repeat(48)], "hostData": ["bb".repeat(32)],
        "familyIds": ["00".repeat(16)], "imageIds": ["00".repeat(16)], "idKeys": ["cc".repeat(48)], "authorKeys": ["dd".repeat(48)], "revocationList": "optional",
    });
    for (name, value) in further.as_object().unwrap() {
        all[name] = value.clone();
    }
    all
}

#[test]
fn a_report_that_meets_each_demand_is_accepted_and_the_json_comes_back() {
    judge(&all(), |_| ()).unwrap();
    let written = serde_json::to_value(read(&all()).unwrap()).unwrap();
    assert_eq!(written, all());
    assert_eq!(
        serde_json::to_value(SnpRequirements::default()).unwrap(),
        json!({})
    );
    judge(&json!({}), |_| ()).unwrap();
}

#[test]
fn each_demand_that_is_not_met_is_named() {
    let one = |name: &str, value: Value| json!({ name: value });
    let of = |product: &str, further: Value| {
        let mut floor = json!({"product": product, "minimum": {}});
        for (name, value) in further.as_object().unwrap() {
            floor[name] = value.clone();
        }
        json!({ "floors": [floor] })
    };
    let no_floor = "none for a Milan of the family 0x19, model 0x1, stepping 1";
    for (demands, expected) in [
        (
            floor("bootloader", 5),
            "LAUNCH_TCB: the version of bootloader is 4, below the minimum 5",
        ),
        (
            floor("tee", 2),
            "LAUNCH_TCB: the version of tee is 1, below the minimum 2",
        ),
        (
            floor("snp", 25),
            "LAUNCH_TCB: the version of snp is 24, below the minimum 25",
        ),
        (
            floor("microcode", 220),
            "LAUNCH_TCB: the version of microcode is 219, below the minimum 220",
        ),
        (
            floor("fmc", 1),
            "LAUNCH_TCB: the version of fmc is 0, below the minimum 1",
        ),
        (of("Genoa", json!({})), no_floor),
        (of("Turin", json!({})), no_floor),
        (of("Milan", json!({"model": 0x11})), no_floor),
        (of("Milan", json!({"model": 1, "stepping": 2})), no_floor),
        (
            one("minimumAbi", json!([1, 38])),
            "demands an ABI below 1.38",
        ),
        (one("minimumAbi", json!([2, 0])), "demands an ABI below 2.0"),
        (
            one("minimumGuestSvn", json!(8)),
            "GUEST_SVN is 7, below the minimum 8",
        ),
        (
            one("policyBits", json!("0x800000")),
            "lacks the bits 0x800000",
        ),
        (
            one("platformBits", json!("0x24")),
            "platform info lacks the bits 0x4",
        ),
        (
            one("forbiddenPlatformBits", json!("0xa0")),
            "platform info has the bits 0x20",
        ),
        (
            one("minimumFirmware", json!([1, 58, 41])),
            "CURRENT_VERSION is 1.58.40, below the minimum 1.58.41",
        ),
        (
            one("familyIds", json!(["ab".repeat(16)])),
            "FAMILY_ID is 0000",
        ),
        (
            one("imageIds", json!(["ab".repeat(16)])),
            "IMAGE_ID is 0000",
        ),
        (
            one("mitigationBits", json!("0x7")),
            "mitigation vectors lack the bits 0x4",
        ),
        (one("chips", json!(["c6".repeat(64)])), "c5 is not accepted"),
        (one("chips", json!(["c5".repeat(8)])), "c5 is not accepted"),
        (
            one("clouds", json!(["CN=cc-us-east-2.amazonaws.com"])),
            "the cloud of the VLEK is none",
        ),
        (
            one("launchMeasurements", json!(["ab".repeat(48)])),
            "MEASUREMENT is aaaa",
        ),
        (
            one("hostData", json!(["ab".repeat(32)])),
            "HOST_DATA is bbbb",
        ),
        (
            one("idKeys", json!(["ab".repeat(48)])),
            "ID_KEY_DIGEST is cccc",
        ),
        (
            one("authorKeys", json!(["ab".repeat(48)])),
            "AUTHOR_KEY_DIGEST is dddd",
        ),
    ] {
        let why = judge(&demands, |_| ()).expect_err(expected);
        assert!(why.text.contains(expected), "expected {expected}: {why}");
        // a program finds the requirement by its name in the policy
        let field = why.field.clone().unwrap();
        match demands.get("floors") {
            Some(_) => assert!(
                field == "floors" || expected.starts_with(&field[..10]),
                "{field}"
            ),
            None => assert!(demands.get(&field).is_some(), "{field}"),
        }
    }
}

/// Requirements that only one of the four TCBs, or another field of the report, does not meet.
#[test]
fn each_field_of_a_report_must_meet_the_demand() {
    let floors = || floor("bootloader", 3);
    type Case = (Value, fn(&mut [u8]), &'static str);
    let cases: [Case; 11] = [
        (
            floors(),
            |report| report[0x1f0] = 2,
            "LAUNCH_TCB: the version of bootloader is 2",
        ),
        (
            floors(),
            |report| report[0x1e0] = 2,
            "COMMITTED_TCB: the version of bootloader is 2",
        ),
        // the certificate of the chip has the reported TCB
        (
            floors(),
            |report| report[0x180] = 3,
            "the certificate of its chip is for",
        ),
        (
            floors(),
            |report| report[0x38] = 3,
            "CURRENT_TCB: the version of bootloader is 3, below that of",
        ),
        (json!({}), |report| report[0x30] = 1, "VMPL 1, above 0"),
        (json!({}), |report| report[0xa] |= 4, "(MIGRATE_MA)"),
        (
            json!({"refuseSmt": true}),
            |report| report[0xa] |= 1,
            "(SMT)",
        ),
        (
            json!({"refuseSmt": true}),
            |report| report[0x40] |= 1,
            "(SMT_EN)",
        ),
        (
            json!({"authorKeys": ["dd".repeat(48)]}),
            |report| report[0x48] = 0,
            "(AUTHOR_KEY_EN)",
        ),
        (
            json!({"minimumFirmware": [1, 58, 40]}),
            |report| report[0x1ec] = 39,
            "COMMITTED_VERSION is 1.58.39, below the minimum 1.58.40",
        ),
        (
            json!({"idKeys": ["00".repeat(48)]}),
            |report| report[0xe0..0x110].fill(0),
            "without an ID block",
        ),
    ];
    for (demands, change, expected) in cases {
        let why = judge(&demands, change).expect_err(expected);
        assert!(why.text.contains(expected), "expected {expected}: {why}");
    }
    judge(&json!({"maximumVmpl": 1}), |report| report[0x30] = 1).unwrap();
    judge(&json!({"allowMigration": true}), |report| report[0xa] |= 4).unwrap();
}

#[test]
fn demands_that_are_wrong_are_refused() {
    for (demands, expected) in [
        (json!({"chip": []}), "unknown field `chip`"),
        (
            json!({"chips": ["c5"]}),
            "a chip has 128 hexadecimal digits",
        ),
        (
            json!({"hostData": ["bb"]}),
            "expected 64 hexadecimal digits",
        ),
        (
            json!({"revocationList": "never"}),
            "unknown variant `never`",
        ),
        (
            json!({"imageIds": ["bb".repeat(32)]}),
            "expected 32 hexadecimal digits",
        ),
        (json!({"minimumFirmware": [1, 58]}), "a tuple of size 3"),
        (json!({"policyBits": 3}), "expected a string"),
        (json!({"policyBits": "3"}), "expected 0x"),
        (json!({"minimumAbi": "1.55"}), "a tuple"),
        (
            json!({"floors": [{"minimum": {}}]}),
            "missing field `product`",
        ),
        (
            json!({"floors": [{"product": "Milan"}]}),
            "missing field `minimum`",
        ),
        (
            json!({"floors": [{"product": "Rome", "minimum": {}}]}),
            "unknown variant `Rome`",
        ),
        (
            json!({"floors": [{"product": "Milan", "minimum": {"ucode": 1}}]}),
            "unknown field `ucode`",
        ),
        (
            json!({"floors": [{"product": "Milan", "minimum": {"snp": 256}}]}),
            "256",
        ),
    ] {
        let why = read(&demands).unwrap_err();
        assert!(why.contains(expected), "expected {expected}: {why}");
    }
}
