//! Tests the output of `firstlight verify` about the platform of each variant. Policies name the roots of the tests.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use verifier::Variant;

use crate::json::assert_documented;
use crate::meeting::Correct;
use crate::sev_snp::with;
use crate::{
    aws_nitro_tpm, azure_sev_snp, azure_tdx, azure_trustedlaunch, gcp_sev_es, gcp_tdx, sev_snp,
};

/// The result of the program: exit code, standard output, standard error.
type Said = (i32, String, String);

fn verify(folder: &Path, variant: &Variant, policy: &Value, more: &[&str]) -> Said {
    let mut policy = policy.clone();
    policy["measurements"] = json!({"15": {"expected": "00".repeat(32)}});
    policy["exceptions"] = json!(["any-image", "zero-registers"]);
    // no request for AMD's list is sent
    if policy.get("amdRootKey").is_some() {
        policy["snp"]["revocationList"] = "optional".into();
    }
    let path = folder.join("policy.json");
    fs::write(&path, policy.to_string()).unwrap();
    let output = Command::new(support::program::built("firstlight"))
        .current_dir(folder)
        .args(["verify", "--policy", "policy.json", "--offline", "--fresh"])
        .args(["--attestation-variant", variant.name])
        .args(more)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// Verifies a machine over attested TLS by a policy with these further members.
fn verify_machine(folder: &Path, machine: &Correct, policy: &Value, more: &[&str]) -> Said {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = atls::Server::new(Some(machine.issuer.clone()), None);
    let serving = thread::spawn(move || {
        let soon = Instant::now() + Duration::from_secs(60);
        let (socket, _) = listener.accept().unwrap();
        drop(server.handshake(socket, soon));
    });
    let mut more = [&[&*address, "--timeout=60s"], more].concat();
    if let Some(collateral) = &machine.collateral {
        fs::write(folder.join("collateral.json"), collateral).unwrap();
        more.push("--collateral=collateral.json");
    }
    let said = verify(folder, machine.variant, policy, &more);
    // if the program refused the policy, nobody has connected
    let _ = TcpStream::connect(&address);
    serving.join().unwrap();
    said
}

/// Returns the program's output about the platform of a correct machine.
fn shown(machine: &Correct) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let json = ["-o", "json"];
    let (code, out, error) = verify_machine(folder.path(), machine, &machine.policy, &json);
    assert_eq!(code, 0, "{}: {error}", machine.variant.name);
    let report = assert_documented("verify", &out);
    // a chip of AWS signs any key, and AWS's hypervisor that of an image that the policy knows; this one of TDX knows no paravisor
    let believed = match machine.variant.name {
        "aws-sev-snp" if machine.policy.get("cloud").is_none() => "any key",
        "azure-tdx" => "any key",
        _ => "endorsed",
    };
    assert_eq!(report["believed"], believed, "{}", machine.variant.name);
    report["platform"].clone()
}

fn property<'a>(platform: &'a Value, name: &str) -> &'a str {
    let mut all = platform["properties"].as_array().unwrap().iter();
    let found = all.find(|one| one["name"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {platform:#}"))["value"]
        .as_str()
        .unwrap()
}

fn part(name: &str, got: u64) -> Value {
    json!({"name": name, "got": got, "minimum": got})
}

/// The claims that the correct report of the tests proves.
fn of_chip() -> Value {
    let tcb = "fmc 0, bootloader 4, tee 1, snp 24, microcode 219";
    let properties = [
        ("MEASUREMENT", &*"aa".repeat(48)),
        (
            "POLICY",
            "0x3020125 (CIPHERTEXT_HIDING, PAGE_SWAP_DISABLE), ABI 1.37",
        ),
        ("PLATFORM_INFO", "0x28 (RAPL_DIS, ALIAS_CHECK_COMPLETE)"),
        ("VMPL", "0"),
        ("GUEST_SVN", "7"),
        ("FAMILY_ID", &"00".repeat(16)),
        ("IMAGE_ID", &"00".repeat(16)),
        ("HOST_DATA", &"bb".repeat(32)),
        ("ID_KEY_DIGEST", &"cc".repeat(48)),
        ("AUTHOR_KEY_DIGEST", &"dd".repeat(48)),
        ("CURRENT_TCB", tcb),
        ("COMMITTED_TCB", tcb),
        ("LAUNCH_TCB", tcb),
        ("firmware", "1.58.40"),
        ("committed firmware", "1.58.40"),
        ("report version", "5"),
        ("LAUNCH_MIT_VECTOR", "0x3"),
        ("CURRENT_MIT_VECTOR", "0x7"),
    ]
    .map(|(name, value)| json!({"name": name, "value": value}));
    json!({
        "technology": "AMD SEV-SNP (Milan)",
        "signedBy": "amdRootKey, SEV-Milan, SEV-VCEK",
        "chip": "c5".repeat(64),
        "tcb": [part("bootloader", 4), part("tee", 1), part("snp", 24), part("microcode", 219)],
        "properties": properties,
        "bound": ["attestation key: SHA-512 in REPORT_DATA"],
    })
}

#[test]
fn verify_shows_the_chip_the_versions_the_properties_and_the_signers() {
    assert_eq!(shown(&sev_snp::correct_of_aws()), of_chip());

    let (aws, mut expected) = (shown(&sev_snp::correct_of_aws_with_documents()), of_chip());
    let document = "; the attestation document by ";
    let (chip, root) = aws["signedBy"]
        .as_str()
        .unwrap()
        .split_once(document)
        .unwrap();
    assert_eq!(
        (chip, root.len()),
        (expected["signedBy"].as_str().unwrap(), 64)
    );
    expected["signedBy"] = aws["signedBy"].clone();
    let properties = expected["properties"].as_array_mut().unwrap();
    properties.push(json!({"name": "instance", "value": aws_nitro_tpm::INSTANCE}));
    let bound = expected["bound"].as_array_mut().unwrap();
    bound.extend(
        [
            "attestation key: public_key",
            "nonce of the connection: nonce",
        ]
        .map(Value::from),
    );
    assert_eq!(aws, expected);

    let azure = shown(&azure_sev_snp::correct());
    for member in ["technology", "signedBy", "chip"] {
        assert_eq!(azure[member], of_chip()[member]);
    }
    let key = "attestation key: runtime data in REPORT_DATA";
    assert_eq!(azure["bound"], json!([key]));
    assert_eq!(property(&azure, "secure-boot"), "true");
    // the policy of this machine has no minimum
    assert_eq!(
        azure["tcb"][2],
        json!({"name": "snp", "got": 24, "minimum": 0})
    );

    let google = shown(&sev_snp::correct_of_google());
    assert_eq!(google["tcb"], of_chip()["tcb"]);
    assert_eq!(google["bound"].as_array().unwrap().len(), 3);
    assert_eq!(property(&google, "MEASUREMENT"), "aa".repeat(48));
    assert_eq!(property(&google, "instance"), "9223372036854775809");

    let google = shown(&gcp_tdx::correct());
    assert_eq!(google["technology"], "Intel TDX");
    assert_eq!(google["bound"].as_array().unwrap().len(), 3);
    assert_eq!(property(&google, "TCB status"), "UpToDate");
    assert_eq!(property(&google, "instance"), "9223372036854775809");
}

#[test]
fn verify_shows_the_instance_that_a_cloud_signed() {
    for (machine, technology, instance, key) in [
        (
            azure_trustedlaunch::correct(),
            "Azure trusted launch",
            "0123456789ab",
            "attestation key: its certificate",
        ),
        (
            gcp_sev_es::correct(),
            "Google shielded VM with AMD SEV",
            "9223372036854775809",
            "attestation key: its certificate",
        ),
        (
            aws_nitro_tpm::correct(),
            "AWS NitroTPM",
            aws_nitro_tpm::INSTANCE,
            "attestation key: public_key",
        ),
    ] {
        let platform = shown(&machine);
        assert_eq!(platform["technology"], technology);
        assert_eq!(platform["chip"], instance);
        assert_eq!(platform["bound"][0], key);
        if technology.starts_with("Google") {
            assert_eq!(property(&platform, "zone"), "europe-west3-b");
            assert_eq!(property(&platform, "project"), "example");
            assert_eq!(property(&platform, "project number"), "7");
        }
    }
}

#[test]
fn a_refused_machine_is_shown_as_far_as_its_platform_meets_the_policy() {
    let machine = sev_snp::correct_of_aws();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let words = [
        "believed:  any key\n",
        "\nplatform:  AMD SEV-SNP (Milan)\n",
        "\nsigned by: amdRootKey, SEV-Milan, SEV-VCEK\n",
        &format!("\nchip:      {}\n", "c5".repeat(64)),
        "\nbound               attestation key: SHA-512 in REPORT_DATA\n",
        "\nTCB snp             24, at least 24 is demanded\n",
        "\nVMPL                0\n",
        "\nPCR 15  ",
    ];
    let save = ["--save", "evidence.json"];
    let (code, out, error) = verify_machine(folder, &machine, &machine.policy, &save);
    assert_eq!(code, 0, "{error}");
    for words in words {
        assert!(out.contains(words), "{words}: {out}");
    }
    // the evidence says the same, by the same policy
    let of_file = ["--evidence", "evidence.json"];
    let variant = machine.variant;
    let (code, again, error) = verify(folder, variant, &machine.policy, &of_file);
    assert_eq!(code, 0, "{error}");
    let below = |text: &str| text.split_once('\n').unwrap().1.to_owned();
    assert_eq!(below(&again), below(&out));

    // its platform meets the policy, its key does not
    let json = [&of_file[..], &["-o", "json"]].concat();
    let other_key = format!("000b{}", "22".repeat(32));
    let named = with(
        machine.policy.clone(),
        &json!({"attestationKeys": [other_key]}),
    );
    let (code, out, error) = verify(folder, variant, &named, &json);
    assert_eq!(code, 3, "{error}");
    let report = assert_documented("verify", &out);
    assert_eq!(report["platform"], of_chip());
    assert!(report["believed"].is_null(), "{report:#}");
    let refusals = report["refusals"].as_array().unwrap();
    assert_eq!(refusals.len(), 1);
    assert_eq!(refusals[0]["kind"], "machine");
    assert_eq!(refusals[0]["field"], "attestationKeys");

    // its platform does not meet the policy
    let newer = with(machine.policy.clone(), &json!({"snpVersion": 25}));
    let (code, out, error) = verify(folder, variant, &newer, &json);
    assert_eq!(code, 3, "{error}");
    let report = assert_documented("verify", &out);
    assert!(report["platform"].is_null() && report["believed"].is_null());
    let reason = report["reason"].as_str().unwrap();
    assert!(
        reason.contains("snp is 24, below the minimum 25"),
        "{reason}"
    );
    let expected =
        json!([{"kind": "outdated", "field": "LAUNCH_TCB snp", "expected": "25", "got": "24"}]);
    assert_eq!(report["refusals"], expected);
}

#[test]
fn verify_shows_the_measurements_of_a_machine_with_tdx_and_its_status() {
    let platform = shown(&azure_tdx::correct());
    assert_eq!(platform["technology"], "Intel TDX");
    let signers = "intelRootKey, PCK, quoting enclave";
    assert_eq!(platform["signedBy"], signers);
    assert_eq!(platform["chip"], "dd".repeat(16));
    let names = |list: &Value| -> Vec<String> {
        let all = list.as_array().unwrap().iter();
        all.map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&platform["tcb"]), ["evaluation", "qeSVN", "pceSVN"]);
    assert_eq!(platform["tcb"][0], part("evaluation", 20));
    assert_eq!(property(&platform, "TCB status"), "UpToDate");
    assert_eq!(property(&platform, "MRTD"), "a0".repeat(48));
    assert_eq!(property(&platform, "RTMR 1"), "b1".repeat(48));
    assert_eq!(property(&platform, "FMSPC").len(), 12);
    let issued = property(&platform, "collateral issued");
    assert!(issued.ends_with('Z'), "{issued}");
    assert_eq!(property(&platform, "secure-boot"), "true");
    let key = "attestation key: runtime data in REPORTDATA";
    assert_eq!(platform["bound"], json!([key]));
}
