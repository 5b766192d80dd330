//! `aws-nitro-tpm`: a machine asks its NitroTPM for attestation documents, by the vendor command of AWS. The NitroTPM is an emulation
//! ([`crate::nitro_tpm`]), which AWS's own program can use, too.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use support::foreign::{fetched, rust_program_with_libraries};
use tpm::{Bank, KeySource, Location, Tpm};
use verifier::aws_hypervisor::{self, NitroTpm as Documents};
use verifier::aws_nitro_tpm::{AwsMachine, VARIANT};
use verifier::nitro_document::NitroDocument;
use verifier::{Issuer, vtpm};

use crate::authority::Authority;
use crate::aws_nitro_tpm::{Draft, Hypervisor, INSTANCE, bytes, demands, good, host};
use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA};
use crate::host::Host;
use crate::meeting::{prove, proven, validator};
use crate::nitro_tpm::device::Devices;
use crate::nitro_tpm::{
    Fault, NSM_REQUEST, NitroTpm, RC_AUTH_FAIL, RC_BAD_AUTH, message, with_size,
};

/// The NV index of the messages.
const INDEX: &str = "0x0180464c";

struct Setting {
    authority: Authority,
    nitro: NitroTpm,
    host: Host,
}

impl Setting {
    fn new() -> Setting {
        Setting::with(|_| ())
    }

    /// Starts a machine whose hypervisor alters its documents.
    fn with(alter: fn(&mut Draft)) -> Setting {
        let authority = Authority::new();
        let hypervisor = Hypervisor::new(&authority, &good(), alter);
        Setting {
            authority,
            nitro: NitroTpm::start(hypervisor),
            host: host(),
        }
    }

    fn issuer(&self) -> Arc<dyn Issuer> {
        self.issuer_at(self.nitro.location())
    }

    /// The issuer of the variant, with the TPM at this location and the metadata service of the tests.
    fn issuer_at(&self, location: Location) -> Arc<dyn Issuer> {
        let machine = AwsMachine::new(self.host.url(), Some(Arc::new(Documents::default())));
        Arc::new(vtpm::TpmIssuer::new(location, None, Arc::new(machine)))
    }

    /// A policy that requires the value of PCR 4 that the TPM has.
    fn policy(&self) -> Value {
        demands(&self.authority, "0")
    }
}

/// Returns the attestation document in the instance info of a document.
pub fn sent(document: &[u8]) -> Option<Vec<u8>> {
    let document: Value = serde_json::from_slice(document).unwrap();
    let info = STANDARD.decode(document["InstanceInfo"].as_str().unwrap());
    let info: Value = serde_json::from_slice(&info.unwrap()).unwrap();
    let sent = info.get("AttestationDocument")?.as_str().unwrap();
    Some(STANDARD.decode(sent).unwrap())
}

#[test]
fn a_machine_with_a_nitro_tpm_is_accepted_by_its_sha_384_registers() {
    let setting = Setting::new();
    let issuer = setting.issuer();
    prove(issuer.clone(), validator(&VARIANT, &setting.policy())).unwrap();
    assert_eq!(
        setting.nitro.count(NSM_REQUEST),
        3,
        "one for each handshake"
    );
    assert_eq!(setting.nitro.left(), (0, 0));

    // the hypervisor signs the values in the registers, not those that a policy expects
    let mut tpm = Tpm::open(&setting.nitro.location()).unwrap();
    tpm.pcr_event(4, b"another boot loader").unwrap();
    let value = tpm.pcrs(Bank::Sha384).unwrap().remove(&4).unwrap();
    drop(tpm);
    let error = prove(issuer.clone(), validator(&VARIANT, &setting.policy())).unwrap_err();
    assert!(error.contains("SHA-384 PCR 4: expected 0000"), "{error}");
    let mut policy = setting.policy();
    let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    policy["cloud"]["sha384"]["4"] = digits.into();
    let judge = validator(&VARIANT, &policy);
    prove(issuer.clone(), judge.clone()).unwrap();

    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let claims = proven(&judge, &document);
    assert_eq!(claims.chip.as_deref(), Some(INSTANCE));
    assert_eq!(claims.bound[0], "attestation key: public_key");
    let sent = sent(&document).unwrap();
    assert_eq!(NitroDocument::parse(&sent).unwrap().user_data, None);
}

#[test]
fn a_machine_without_an_answer_says_why_and_proves_what_the_old_system_proves() {
    let setting = Setting::new();
    let any = validator(&VARIANT, &json!({}));
    for (fault, asked) in [
        // these TPMs never make documents, so the program asks them only once
        (Fault::UnknownCommand, 1),
        (Fault::SmallIndices, 0),
        // the other TPMs may make a document the next time
        (Fault::Refusal, 3),
        (Fault::NoAnswer, 3),
        (Fault::Garbage, 3),
        (Fault::Oversize, 3),
    ] {
        setting.nitro.set(fault);
        let before = setting.nitro.count(NSM_REQUEST);
        let issuer = setting.issuer();
        prove(issuer.clone(), any.clone()).unwrap();
        let after = setting.nitro.count(NSM_REQUEST);
        assert_eq!(after - before, asked, "{fault:?}");
        let error = prove(issuer.clone(), validator(&VARIANT, &setting.policy())).unwrap_err();
        let why = "sent no attestation document of its NitroTPM";
        assert!(error.contains(why), "{fault:?}: {error}");
        assert_eq!(setting.nitro.left(), (0, 0), "{fault:?}");
    }
    setting.nitro.set(Fault::None);
    prove(setting.issuer(), validator(&VARIANT, &setting.policy())).unwrap();
}

#[test]
fn a_machine_names_the_reason_why_it_has_no_document() {
    let setting = Setting::new();
    let documents = Documents::default();
    let ask = || {
        let mut tpm = Tpm::open(&setting.nitro.location()).unwrap();
        let asked = documents_of(&documents, &mut tpm);
        // the TPM is usable after each error
        tpm.quotes(KeySource::Own, &[1; 32], &[]).unwrap();
        asked
    };
    for (fault, why) in [
        (Fault::Refusal, "AWS's hypervisor refused: InvalidOperation"),
        (
            Fault::NoAnswer,
            "cannot be read: expected a document and nothing else",
        ),
        (
            Fault::Garbage,
            "cannot be read: it is not CBOR of the expected form",
        ),
        (
            Fault::Oversize,
            "cannot be read: it is not CBOR of the expected form",
        ),
        (Fault::Busy(100), "It stayed busy for seconds"),
        (
            Fault::UnknownCommand,
            "is no NitroTPM, or it makes no attestation documents: AWS's command for attestation documents (0x20000001): \
             the TPM does not know the command",
        ),
    ] {
        setting.nitro.set(fault);
        let error = ask().unwrap_err();
        assert!(error.contains(why), "{fault:?}: {error}, expected {why}");
        assert_eq!(setting.nitro.left(), (0, 0), "{fault:?}");
    }
    assert_eq!(ask(), Ok(None), "the log has said it");
    setting.nitro.set(Fault::Busy(2));
    let again = Documents::default();
    let mut tpm = Tpm::open(&setting.nitro.location()).unwrap();
    documents_of(&again, &mut tpm).unwrap().unwrap();
}

#[test]
fn a_command_that_never_ends_costs_a_machine_seconds_and_its_document() {
    let setting = Setting::new();
    setting.nitro.set(Fault::Hang);
    let mut tpm = Tpm::open(&setting.nitro.location()).unwrap();
    let error = documents_of(&Documents::default(), &mut tpm).unwrap_err();
    assert!(error.contains("did not answer within 20 s"), "{error}");
    tpm.quotes(KeySource::Own, &[1; 32], &[]).unwrap();
    // no program could end the session
    assert_eq!(setting.nitro.left(), (0, 1));
}

/// libtpms has no index of 8192 bytes.
#[test]
fn a_software_tpm_is_no_nitro_tpm() {
    let (cloud, documents) = (CloudTpm::start(), Documents::default());
    let mut tpm = Tpm::open(&cloud.location()).unwrap();
    let error = documents_of(&documents, &mut tpm).unwrap_err();
    let why = "is no NitroTPM, or it makes no attestation documents: NV_DefineSpace: ";
    assert!(error.contains(why), "{error}");
    assert_eq!(documents_of(&documents, &mut tpm), Ok(None));
    tpm.quotes(KeySource::Own, &[1; 32], &[]).unwrap();
}

fn documents_of(documents: &Documents, tpm: &mut Tpm) -> Result<Option<Vec<u8>>, String> {
    let document = aws_hypervisor::Documents::document(documents, tpm, &[1; 32], &[2; 294]);
    document.map_err(|error| error.to_string())
}

#[test]
fn a_document_for_another_connection_or_key_is_refused() {
    type Alter = fn(&mut Draft);
    let cases: [(Alter, &str); 2] = [
        (
            |draft| draft.set("nonce", bytes(&[7; 32])),
            "made for another connection",
        ),
        (
            |draft| draft.set("public_key", bytes(&[7; 294])),
            "names another key",
        ),
    ];
    for (alter, why) in cases {
        let setting = Setting::with(alter);
        let error = prove(setting.issuer(), validator(&VARIANT, &setting.policy())).unwrap_err();
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn an_index_that_a_killed_run_has_left_is_removed() {
    let setting = Setting::new();
    let tool = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(name);
        command
            .args(arguments)
            .env("TPM2TOOLS_TCTI", setting.nitro.notation());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let attributes = ["-s", "8192", "-a", "authread|authwrite", "-p", "lost"];
    tool(
        "tpm2_nvdefine",
        &[&[INDEX, "-C", "o"], &attributes[..]].concat(),
    );
    assert!(tool("tpm2_getcap", &["handles-nv-index"]).contains("0x180464C"));
    assert_eq!(setting.nitro.left(), (1, 0));
    prove(setting.issuer(), validator(&VARIANT, &setting.policy())).unwrap();
    assert_eq!(setting.nitro.left(), (0, 0));
}

/// If the emulation accepted every proof, it would not notice a wrong machine.
#[test]
fn the_emulation_refuses_who_does_not_know_the_value_of_the_index() {
    let setting = Setting::new();
    let index = &INDEX[2..];
    let index = u32::from_str_radix(index, 16).unwrap().to_be_bytes();
    let run = |tag: u16, code: u32, parts: &[&[u8]]| {
        let mut engine = setting.nitro.engine.lock().unwrap();
        let answer = engine.run(&message(tag, code, &parts.concat())).unwrap();
        let code = u32::from_be_bytes(answer[6..10].try_into().unwrap());
        (code, answer[10..].to_vec())
    };
    let password = |password: &[u8]| {
        let area = [&[0x40, 0, 0, 9, 0, 0, 0][..], &with_size(password)].concat();
        [&(area.len() as u32).to_be_bytes(), &area[..]].concat()
    };
    let owner = 0x4000_0001u32.to_be_bytes();
    let public = [&index[..], &[0, 0x0d, 0, 4, 0, 4, 0, 0, 0x20, 0]].concat();
    let definition = [with_size(b"secret"), with_size(&public)].concat();
    let defined = run(0x8002, 0x12a, &[&owner, &password(b""), &definition]);
    assert_eq!(defined.0, 0);
    let write = |given: &[u8]| {
        let data = [&with_size(b"request")[..], &[0, 0]].concat();
        run(0x8002, 0x137, &[&index, &index, &password(given), &data]).0
    };
    assert_eq!((write(b"guess"), write(b"secret")), (RC_BAD_AUTH, 0));
    // a session without salt, with a proof under another key
    let null = 0x4000_0007u32.to_be_bytes();
    let nonce = with_size(&[1; 64]);
    let session = [&null[..], &null, &nonce, &[0, 0, 0, 0, 0x10, 0, 0x0d]];
    let (code, started) = run(0x8001, 0x176, &session);
    assert_eq!(code, 0);
    let proof = [&started[..4], &nonce, &[1], &nonce].concat();
    let area = [&(proof.len() as u32).to_be_bytes(), &proof[..]].concat();
    let refused = run(0x8002, NSM_REQUEST, &[&index, &index, &area]);
    assert_eq!(refused.0, RC_AUTH_FAIL);
}

/// `/dev/tpmrm0` refuses commands that the TPM does not list.
#[test]
fn a_machine_asks_its_device_without_the_resource_manager_if_that_refuses() {
    let setting = Setting::new();
    let devices = Devices::of(&setting.nitro);
    for (name, fault, asked) in [
        ("tpmrm0", Fault::None, 3),
        ("tpmrm0", Fault::UnlistedCommand, 3),
        ("tpm0", Fault::None, 3),
    ] {
        setting.nitro.set(fault);
        let before = setting.nitro.count(NSM_REQUEST);
        let issuer = setting.issuer_at(Location::Device(devices.path(name)));
        prove(issuer, validator(&VARIANT, &setting.policy())).unwrap();
        assert_eq!(setting.nitro.count(NSM_REQUEST) - before, asked, "{name}");
        assert_eq!(setting.nitro.left(), (0, 0), "{name}: {fault:?}");
    }
}

/// The emulation has room for one index.
#[test]
fn programs_on_one_machine_take_turns() {
    let setting = Setting::new();
    let devices = Devices::of(&setting.nitro);
    let device = devices.path("tpmrm0");
    // a lock of another descriptor is like one of another program
    let other = fs::File::open(&device).unwrap();
    other.try_lock().unwrap();
    let issuer = setting.issuer_at(Location::Device(device));
    std::thread::scope(|scope| {
        let proved = scope.spawn(|| prove(issuer, validator(&VARIANT, &setting.policy())));
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert_eq!(setting.nitro.count(NSM_REQUEST), 0);
        drop(other);
        proved.join().unwrap().unwrap();
    });
}

/// AWS's library asks the same emulation, as AWS's program does. Then the machine's document differs only in the values that the
/// machine passed.
#[test]
#[ignore = "it builds the packages of the peer"]
fn awss_own_program_gets_a_document_from_the_same_emulation() {
    let tss = fetched("tss.sh");
    let root = tss.join("root");
    let peer = rust_program_with_libraries(
        "nitro_peer",
        "nitro-peer",
        &[
            (
                "PKG_CONFIG_LIBDIR",
                format!("{}/usr/lib/x86_64-linux-gnu/pkgconfig", root.display()),
            ),
            ("PKG_CONFIG_SYSROOT_DIR", root.display().to_string()),
            // the libraries need a newer C library than this machine may have; they run with their own
            ("RUSTFLAGS", "-Clink-arg=-Wl,--allow-shlib-undefined".into()),
        ],
    );
    let setting = Setting::new();
    let devices = Devices::of(&setting.nitro);
    let issuer = setting.issuer_at(Location::Device(devices.path("tpmrm0")));
    let ours = sent(&issuer.issue(USER_DATA, NONCE).unwrap()).unwrap();
    let ours = NitroDocument::parse(&ours).unwrap();
    let (nonce, key) = (
        ours.nonce.clone().unwrap(),
        ours.public_key.clone().unwrap(),
    );

    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let ask = || {
        Command::new(tss.join("run"))
            .arg(&peer)
            .args([file("nonce", &nonce), file("key", &key)])
            .env("TPM_DEVICE", devices.path("tpm0"))
            .output()
            .unwrap()
    };
    let output = ask();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let theirs = NitroDocument::parse(&output.stdout).unwrap();
    assert_eq!(
        (theirs.nonce, theirs.public_key),
        (ours.nonce, ours.public_key)
    );
    assert_eq!((&theirs.pcrs, theirs.module), (&ours.pcrs, ours.module));
    assert_eq!(theirs.user_data, ours.user_data);
    assert_eq!(setting.nitro.left(), (0, 0));

    // both see the same refusal
    setting.nitro.set(Fault::Refusal);
    let output = ask();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("InvalidOperation"), "{said}");
}
