//! The variant `qemu-tdx`: documents of a machine whose quotes a hierarchy of our own signs, and its registers.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::at::At;
use hardware::Unavailable;
use serde_json::Value;
use support::foreign::go_module;
use tpm::Location;
use verifier::sources::{Sources, offline};
use verifier::{
    Evidence, Identified, IssueError, Issuer, NamedRegister, Policy, Stage, Validator, qemu_tdx, td,
};

use super::forged::{Parts, Signed};
use super::json::assert_documented;
use super::*;

/// A machine of these parts, with its collateral in the file. It keeps its last quote.
struct Machine {
    parts: Parts,
    file: PathBuf,
    last: Mutex<Option<Signed>>,
}

impl td::Quoter for Machine {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, IssueError> {
        let signed = self.parts.sign(report_data);
        let collateral = serde_json::to_vec(&signed.collateral).unwrap();
        fs::write(&self.file, collateral).unwrap();
        let quote = signed.quote.clone();
        *self.last.lock().unwrap() = Some(signed);
        Ok(quote)
    }
}

/// Returns a document of the machine with this change, for these user data, and the validator.
fn issued(change: fn(&mut Parts), policy: &str, user_data: &[u8]) -> (Vec<u8>, At) {
    let mut parts = Parts::default();
    change(&mut parts);
    let file = tempfile::NamedTempFile::new().unwrap();
    let machine = Arc::new(Machine {
        parts,
        file: file.path().into(),
        last: Mutex::new(None),
    });
    let issuer = qemu_tdx::TdIssuer::new(machine.clone(), Some(file.path().into()), None);
    let document = issuer.issue(user_data, b"nonce").unwrap();
    let last = machine.last.lock().unwrap();
    let policy = Policy::from_json(policy).unwrap();
    let policy = last.as_ref().unwrap().trusting(&policy);
    (document, validator(policy, offline()))
}

/// Returns the validator of a policy at a time at which the collateral of the tests is valid.
fn validator(policy: Policy, sources: Arc<dyn Sources>) -> At {
    let policy = Arc::new(policy);
    let hardware = td::QuoteJudge::new(&policy, &sources).unwrap();
    let validator = qemu_tdx::TdValidator::new(policy, hardware).unwrap();
    At(JULY_2025, Arc::new(validator))
}

/// Returns a policy's verdict on the machine with this change.
fn judged(change: fn(&mut Parts), policy: &str, nonce: &[u8]) -> Result<Identified, String> {
    let (document, validator) = issued(change, policy, b"key");
    let identified = validator.judge(&Evidence::new(&document, nonce));
    identified.map_err(|error| error.to_string())
}

/// Returns a policy with the registers of the test machine.
pub fn policy(change: &str) -> String {
    let entries: Vec<_> = [(0, "a0"), (1, "b0"), (2, "b1"), (3, "b2"), (4, "00")]
        .map(|(index, byte)| format!("\"{index}\":\"{}\"", byte.repeat(48)))
        .into();
    format!("{{\"measurements\":{{{}}}{change}}}", entries.join(","))
}

#[test]
fn a_machine_that_meets_the_policy_is_identified() {
    let identified = judged(|_| {}, &policy(""), b"nonce").unwrap();
    assert_eq!(identified.user_data, b"key");
    assert!(identified.cluster.unwrap().is_fresh());
    let platform = identified.platform.unwrap();
    assert_eq!(platform.chip.as_deref(), Some(&*"dd".repeat(16)));
    assert_eq!(
        platform.bound,
        ["key and nonce of the connection: REPORTDATA"]
    );
}

#[test]
fn firstlight_verify_shows_the_registers_and_the_platform() {
    let mut parts = Parts::of_today();
    parts.keep_keys();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("collateral.json");
    let signed = parts.sign(&[0; 64]);
    fs::write(&file, serde_json::to_vec(&signed.collateral).unwrap()).unwrap();
    let mut demands: Value = serde_json::from_str(&policy("")).unwrap();
    demands["intelRootKey"] = signed.root_in_pem.into();
    fs::write(folder.path().join("policy.json"), demands.to_string()).unwrap();
    let machine = Arc::new(Machine {
        parts,
        file: file.clone(),
        last: Mutex::new(None),
    });

    let verify = |sent: Option<PathBuf>, more: &[&str]| {
        let issuer = Arc::new(qemu_tdx::TdIssuer::new(machine.clone(), sent, None));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = thread::spawn(move || {
            let soon = Instant::now() + Duration::from_secs(60);
            let (socket, _) = listener.accept().unwrap();
            drop(atls::Server::new(Some(issuer), None).handshake(socket, soon));
        });
        let output = Command::new(support::program::built("firstlight"))
            .current_dir(folder.path())
            .args(["verify", &address, "--timeout=60s", "--offline", "--fresh"])
            .args(["--attestation-variant=qemu-tdx", "--policy=policy.json"])
            .args(more)
            .output()
            .unwrap();
        serving.join().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (said, error) = (text(output.stdout), text(output.stderr));
        assert_eq!(output.status.code(), Some(0), "{said}{error}");
        said
    };
    // the machine sends its collateral, or the verifier has it
    let text = verify(Some(file), &[]);
    for line in [
        "verdict:   proven".into(),
        "key:       none".into(),
        "believed:  endorsed".into(),
        "platform:  Intel TDX".into(),
        "signed by: intelRootKey, PCK, quoting enclave".into(),
        format!("chip:      {}", "dd".repeat(16)),
        "bound              key and nonce of the connection: REPORTDATA".into(),
        "TCB evaluation     20, at least 20 is demanded".into(),
        "TCB status         UpToDate".into(),
        format!("MRTD               {}", "a0".repeat(48)),
        format!("RTMR 0             {}", "b0".repeat(48)),
        "MRTD    as expected  a0a0a0a0..  virtual firmware".into(),
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
    let report = verify(None, &["--collateral=collateral.json", "-o", "json"]);
    let report = assert_documented("verify", &report);
    assert_eq!(report["registers"].as_array().unwrap().len(), 5);
    assert_eq!(report["platform"]["chip"], "dd".repeat(16));
}

#[test]
fn a_machine_that_is_wrong_in_one_thing_is_refused_by_its_name() {
    let other = policy("").replace(&"b1".repeat(48), &"b7".repeat(48));
    let error = judged(|_| {}, &other, b"nonce").unwrap_err();
    assert!(
        error.starts_with("RTMR 1: expected b7b7") && error.contains("got b1b1"),
        "{error}"
    );
    let same: fn(&mut Parts) = |_| {};
    let refused =
        |change, in_policy: &str, nonce| judged(change, &policy(in_policy), nonce).unwrap_err();
    for (error, why) in [
        (
            refused(same, "", b"other"),
            "another connection: its nonce does not match",
        ),
        (
            refused(|it| it.body[472] = 1, "", b"nonce"),
            "RTMR 3: expected 0000",
        ),
        (
            refused(|it| it.body[136] = 1, "", b"nonce"),
            "MRTD: expected a0a0",
        ),
        (
            refused(|it| it.status = "Revoked", "", b"nonce"),
            "is Revoked",
        ),
        (
            refused(|it| it.body[120] = 1, "", b"nonce"),
            "the host can look into a machine with DEBUG",
        ),
        (
            refused(same, r#","tdx":{"minimumEvaluation":21}"#, b"nonce"),
            "evaluation 20, expected at least 21",
        ),
        (
            refused(same, r#","tdx":{"maximumCollateralDays":3}"#, b"nonce"),
            "the collateral is 11 days old, expected at most 3",
        ),
        (
            refused(
                same,
                r#","tdx":{"platforms":["00000000000000000000000000000000"]}"#,
                b"nonce",
            ),
            "(PPID, platform instance): expected 00000000000000000000000000000000, got eeee",
        ),
    ] {
        assert!(error.contains(why), "{why}: {error}");
    }
    let accepted = policy(
        r#","tdx":{"tcbStatuses":["UpToDate","OutOfDate"],"platforms":["DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD"]}"#,
    );
    judged(|it| it.status = "OutOfDate", &accepted, b"nonce").unwrap();
}

/// Returns the collateral of a hierarchy, and counts the requests for it.
struct Asked {
    collateral: Arc<TdxCollateral>,
    times: AtomicUsize,
}

impl Sources for Asked {
    fn fetches(&self) -> bool {
        true
    }

    fn tdx_collateral(&self, _quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        self.times.fetch_add(1, Ordering::SeqCst);
        Ok(self.collateral.clone())
    }
}

/// An attacker can write a quote, with a certificate of their own, that names any platform.
#[test]
fn collateral_is_fetched_only_for_a_platform_that_signed_what_meets_the_policy() {
    let judged = |change: fn(&mut Parts), further: &str, root: Option<&Signed>| {
        let mut parts = Parts::default();
        change(&mut parts);
        let hash = ring::digest::digest(&ring::digest::SHA256, b"keynonce");
        let signed = parts.sign(&[hash.as_ref(), &[0; 32]].concat().try_into().unwrap());
        let sources = Arc::new(Asked {
            collateral: Arc::new(signed.collateral.clone()),
            times: AtomicUsize::new(0),
        });
        let policy = Policy::from_json(&policy(further)).unwrap();
        let policy = root.unwrap_or(&signed).trusting(&policy);
        let validator = validator(policy, sources.clone());
        let document = serde_json::json!({
            "RawQuote": STANDARD.encode(&signed.quote),
            "UserData": STANDARD.encode(b"key"),
        });
        let judged = validator.judge(&Evidence::new(document.to_string().as_bytes(), b"nonce"));
        let times = sources.times.load(Ordering::SeqCst);
        (judged.map(drop).map_err(|error| error.to_string()), times)
    };
    let same: fn(&mut Parts) = |_| {};
    assert_eq!(judged(same, "", None), (Ok(()), 1));
    let of_others = Parts::default().sign(&[0; 64]);
    for ((judged, times), why) in [
        (
            judged(same, "", Some(&of_others)),
            "does not lead to the root",
        ),
        (
            judged(|it| it.issuer_of_pck = "root", "", None),
            "a wrong place in the chain",
        ),
        (
            judged(|it| it.other_pck = true, "", None),
            "is not signed by the platform's key",
        ),
        (
            judged(|it| it.qe_report[320] = 1, "", None),
            "not the one that the quoting enclave names",
        ),
        (
            judged(|it| it.other_attestation_key = true, "", None),
            "is not signed by its attestation key",
        ),
        (
            judged(|it| it.body[376] = 7, "", None),
            "RTMR 1: expected b1b1",
        ),
        (judged(|it| it.body[120] = 1, "", None), "DEBUG"),
        (
            judged(
                same,
                r#","tdx":{"platforms":["00000000000000000000000000000000"]}"#,
                None,
            ),
            "(PPID, platform instance)",
        ),
    ] {
        let error = judged.unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
        assert_eq!(times, 0, "{why}");
    }
}

/// Returns the log of a genuine TDX machine, and the RTMRs 0 to 2 to which it leads (its quote is in no package, but go-eventlog's tests
/// have the values).
fn genuine_log() -> (PathBuf, Vec<u8>) {
    let module = go_module("event_logs_go", "github.com/google/go-eventlog");
    let rtmrs = "3fa2f61f395b7f5feefb4ec2df61297f109ad8abcd6410c1b7df60f21f37b19297fc35e544039c7e1edece752afd17f6\
                 f62dbc072bd5d3f3438b7b35c39a727f5aea2ffc2473f43723953f530daf62504f0a7944aa62c41a86e8a878c2b122c1\
                 4969684dc87381fc3b3134176c8d8806eaf0a901859f5f70cfae8d17714b46c10a8de219048c9fc09f11f381a6fbe7c1";
    let byte = |at| u8::from_str_radix(&rtmrs[at..at + 2], 16).unwrap();
    let log = module.join("testdata/eventlogs/ccel/cos-113-intel-tdx.bin");
    (log, (0..rtmrs.len()).step_by(2).map(byte).collect())
}

/// Runs `firstlight explain` on a file with this content; returns its exit code, its errors, and the registers by name.
fn explained(content: &[u8], more: &[&str]) -> (i32, String, BTreeMap<String, Value>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), content).unwrap();
    let output = Command::new(support::program::built("firstlight"))
        .arg("explain")
        .arg(file.path())
        .args(["-o", "json"])
        .args(more)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let registers = report["registers"].as_array().cloned().unwrap_or_default();
    let by_name = |it: Value| (it["name"].as_str().unwrap().to_owned(), it);
    let registers = registers.into_iter().map(by_name).collect();
    (output.status.code().unwrap(), errors, registers)
}

#[test]
fn a_document_has_the_log_and_the_events_of_each_register_are_shown() {
    let (log, rtmrs) = genuine_log();
    let mut parts = Parts::default();
    parts.body[328..472].copy_from_slice(&rtmrs);
    let file = tempfile::NamedTempFile::new().unwrap();
    let issued = |parts: Parts| {
        let machine = Arc::new(Machine {
            parts,
            file: file.path().into(),
            last: Mutex::new(None),
        });
        let collateral = Some(file.path().into());
        let issuer = qemu_tdx::TdIssuer::new(machine, collateral, Some(log.clone()));
        issuer.issue(b"key", b"nonce").unwrap()
    };
    let document = issued(parts.clone());
    assert!(document.len() <= 48 << 10, "{}", document.len());
    let saved = serde_json::json!({"document": STANDARD.encode(&document)}).to_string();
    for content in [&document[..], saved.as_bytes()] {
        let (code, errors, registers) = explained(content, &[]);
        assert_eq!(code, 0, "{errors}");
        let names: Vec<_> = registers.keys().map(String::as_str).collect();
        assert_eq!(names, ["MRTD", "RTMR0", "RTMR1", "RTMR2"]);
        assert_eq!(registers["MRTD"]["verdict"], "not in the log");
        for (number, rtmr) in rtmrs.chunks(48).enumerate() {
            let register = &registers[&format!("RTMR{number}")];
            assert_eq!(register["verdict"], "explained");
            let value: String = rtmr.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(register["got"], value);
            assert!(register["events"].as_array().unwrap().len() > 3);
        }
    }
    // a member of a cluster, which the operator names or not
    let member = verifier::Registers::Rtmrs.after(&[0x11; 32]);
    parts.body[472..520].copy_from_slice(member.as_ref());
    let document = issued(parts.clone());
    let (code, errors, registers) = explained(&document, &[]);
    assert_eq!(code, 0, "{errors}");
    assert_eq!(registers["RTMR3"]["verdict"], "not in the log");
    for (id, code, verdict) in [("11", 0, "as expected"), ("12", 1, "differs")] {
        let (got, errors, registers) = explained(&document, &["--cluster-id", &id.repeat(32)]);
        assert_eq!(got, code, "{errors}");
        assert_eq!(registers["RTMR3"]["verdict"], verdict);
    }
    // a register that cannot be computed from the log
    parts.body[376] ^= 1;
    let (code, errors, registers) = explained(&issued(parts), &[]);
    assert_eq!(code, 1);
    assert!(errors.contains("RTMR1 not explained"), "{errors}");
    assert_eq!(
        registers["RTMR1"]["notes"][0],
        "the events below do not give this value"
    );
}

#[test]
fn a_policy_of_a_tpm_is_none_of_a_tdx_machine() {
    let text = format!(r#"{{"measurements":{{"4":"{}"}}}}"#, "00".repeat(32));
    let policy = Policy::from_json(&text).unwrap();
    let error = qemu_tdx::VARIANT.validator_for(policy, &offline());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("have registers of 48 bytes"), "{error}");
}

/// Returns a folder as the kernel shows it, with these RTMRs and with MRTD.
pub fn kernels_folder(rtmr: [u8; 4]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, byte| fs::write(folder.path().join(name), [byte; 48]).unwrap();
    write("mrtd:sha384", 0xa0);
    for (number, byte) in rtmr.into_iter().enumerate() {
        write(&format!("rtmr{number}:sha384"), byte);
    }
    folder
}

/// Runs `firstlight measure`; returns its exit code, the policy, and the errors.
fn measured(args: &[&str]) -> (i32, Value, String) {
    let mut command = Command::new(support::program::built("firstlight"));
    let output = command.arg("measure").args(args).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let policy = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code().unwrap(), policy, errors)
}

#[test]
fn a_running_machine_is_measured_into_a_policy_that_it_meets() {
    let folder = kernels_folder([0xb0, 0xb1, 0xb2, 0]);
    let location = format!("tdx:{}", folder.path().display());
    let machine = ["--attestation-variant", "qemu-tdx", "--tpm", &location];
    let (code, policy, errors) = measured(&machine);
    assert_eq!(code, 0, "{errors}");
    let registers = policy["measurements"].as_object().unwrap();
    assert_eq!(registers.keys().collect::<Vec<_>>(), ["0", "2", "3", "4"]);
    assert_eq!(registers["2"]["expected"], "b1".repeat(48));
    assert_eq!(registers["4"]["expected"], "00".repeat(48));
    assert!(judged(|_| {}, &policy.to_string(), b"nonce").is_ok());
    let error = judged(|it| it.body[376] = 0, &policy.to_string(), b"nonce").unwrap_err();
    assert!(error.starts_with("RTMR 1: expected b1b1"), "{error}");
    let (code, _, errors) = measured(&[&machine[..], &["--pcrs", "9"]].concat());
    assert!(code != 0 && errors.contains("no register 9"), "{errors}");
}

/// Computes MRTD from the words of Intel's documents, apart from our code: Debian has a genuine firmware, but no published tool for
/// it is in the registries.
const MRTD: &str = "
import hashlib, struct, sys
file = open(sys.argv[1], 'rb').read()
end = file.rfind(bytes.fromhex('35657ae44a989847865e4685a7bf8ec2'))
table = file[len(file) - struct.unpack('<I', file[end - 6:end - 2])[0]:]
mrtd = hashlib.sha384()
for number in range(struct.unpack('<I', table[12:16])[0]):
    at, raw, address, size, kind, attributes = struct.unpack('<IIQQII', table[16 + 32 * number:48 + 32 * number])
    content = file[at:at + raw].ljust(size, bytes(1))
    for page in range(0, size, 4096):
        mrtd.update(b'MEM.PAGE.ADD'.ljust(16, bytes(1)) + struct.pack('<Q', address + page) + bytes(104))
        for chunk in range(page, page + 4096, 256) if attributes & 1 else []:
            mrtd.update(b'MR.EXTEND'.ljust(16, bytes(1)) + struct.pack('<Q', address + chunk) + bytes(104))
            mrtd.update(content[chunk:chunk + 256])
print(mrtd.hexdigest())
";

#[test]
fn mrtd_is_computed_from_the_firmware() {
    let firmware = "/usr/share/ovmf/OVMF.fd";
    let output = Command::new("python3")
        .args(["-c", MRTD, firmware])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let expected = String::from_utf8(output.stdout).unwrap();
    let (code, policy, errors) = measured(&["--tdx-firmware", firmware]);
    assert_eq!(code, 0, "{errors}");
    assert!(
        errors.contains("the policy has only the firmware"),
        "{errors}"
    );
    let registers = policy["measurements"].as_object().unwrap();
    assert_eq!(registers.keys().collect::<Vec<_>>(), ["0", "4"]);
    assert_eq!(registers["0"]["expected"], expected.trim());
    let policy: Policy = Policy::from_json(&policy.to_string()).unwrap();
    assert!(qemu_tdx::VARIANT.validator_for(policy, &offline()).is_ok());
    let (code, _, errors) = measured(&["--tdx-firmware", "/usr/share/OVMF/OVMF_VARS.fd"]);
    assert!(
        code != 0 && errors.contains("no table of GUIDs"),
        "{errors}"
    );
}

#[test]
fn the_registers_of_a_machine_are_read_and_a_wrong_one_is_noticed() {
    let folder = kernels_folder([1, 2, 4, 0]);
    let location: Location = format!("tdx:{}", folder.path().display()).parse().unwrap();
    let measured = (qemu_tdx::VARIANT.measure)(&location, Stage::Booted).unwrap();
    let first: Vec<_> = measured.booted.values().map(|it| it.expected[0]).collect();
    assert_eq!(first, [0xa0, 1, 2, 4, 0]);
    assert!(!bootstrapper::trust::evidence::is_marked(&location).unwrap());
    // a plain file keeps what is written to it, unlike a register: the machine notices that it was not extended
    let error = verifier::mark(&location, &[7; 32]).unwrap_err().to_string();
    assert!(
        error.contains("another program has measured into it"),
        "{error}"
    );
    assert!(bootstrapper::trust::evidence::is_marked(&location).unwrap());
    let written = fs::read(folder.path().join("rtmr3:sha384")).unwrap();
    assert_eq!(
        written,
        ring::digest::digest(&ring::digest::SHA384, &[7; 32]).as_ref()
    );
    fs::write(folder.path().join("rtmr3:sha384"), [0; 47]).unwrap();
    let error = verifier::cluster_register(&location)
        .unwrap_err()
        .to_string();
    assert!(error.contains("47 bytes, expected 48"), "{error}");
    let tpm: Location = "device:/dev/null".parse().unwrap();
    let error = (qemu_tdx::VARIANT.measure)(&tpm, Stage::Booted)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("expected tdx:/sys/class/misc/tdx_guest/measurements"),
        "{error}"
    );
    let error = tpm::Tpm::open(&location).err().unwrap().to_string();
    assert!(error.contains("has no TPM"), "{error}");
}
