//! Parses event logs of real machines, from five distributions and three clouds. They are in Go modules, which the Go tool chain
//! downloads once and checks against `tests/event_logs_go/go.sum`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::join_setup::lone_service_program;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA384};
use serde_json::{Value, json};
use support::foreign::go_module;
use support::mutation::mutations;
use support::program::PATIENCE;
use support::swtpm::Swtpm;
use verifier::event_log::{
    EV_NO_ACTION, EventLog, LogEntry, SHA1, SHA256, digest_of, explain, parse,
};
use verifier::excerpt::{excerpt, of_whole_registers};
use verifier::refusal::Kind;
use verifier::secure_boot::{self, KeyEntry, SecureBoot};
use verifier::session::{DocumentRequest, PeerRole};
use verifier::sources::offline;
use verifier::{Evidence, Issuer, Measurement, Policy, qemu_vtpm};

const TPM_TOOLS: &str = "github.com/google/go-tpm-tools";
const EVENTLOG: &str = "github.com/google/go-eventlog";
/// TPM_ALG_ID.
const SHA_384: u16 = 0x000c;
/// The maximum size of a log in a document.
const ROOM: usize = 24 << 10;

/// Returns the folder of a Go module.
fn module(name: &str) -> PathBuf {
    go_module("event_logs_go", name)
}

/// Returns the logs below these folders of the modules, each once, by file name.
fn logs(folders: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
    let mut logs = BTreeMap::new();
    for (name, folder) in folders {
        for file in fs::read_dir(module(name).join(folder)).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let bytes = fs::read(path).unwrap();
            let is_log = name.ends_with(".bin") || name.ends_with("_eventlog");
            // a table of ACPI is not a log
            if is_log && !bytes.starts_with(b"CCEL") && !logs.values().any(|log| *log == bytes) {
                logs.insert(name, bytes);
            }
        }
    }
    logs
}

fn tpm_logs() -> BTreeMap<String, Vec<u8>> {
    logs(&[
        (TPM_TOOLS, "internal/test/eventlogs"),
        (EVENTLOG, "testdata/eventlogs/tpm"),
        (EVENTLOG, "testdata/legacydata"),
    ])
}

fn ccel_logs() -> BTreeMap<String, Vec<u8>> {
    logs(&[(EVENTLOG, "testdata/eventlogs/ccel")])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the value of a register after a replay.
fn replay(log: &EventLog, bank: u16, pcr: u32) -> Vec<u8> {
    let algorithm = match bank {
        SHA1 => &SHA1_FOR_LEGACY_USE_ONLY,
        SHA256 => &ring::digest::SHA256,
        _ => &SHA384,
    };
    let mut value = vec![0; algorithm.output_len()];
    for event in log.events.iter().filter(|event| event.pcr == pcr) {
        if event.kind == EV_NO_ACTION {
            if let Some([locality]) = event.data.strip_prefix(b"StartupLocality\0") {
                *value.last_mut().unwrap() = *locality;
            }
            continue;
        }
        let mut context = Context::new(algorithm);
        context.update(&value);
        context.update(digest_of(log, event, bank).unwrap());
        value = context.finish().as_ref().into();
    }
    value
}

/// Returns the registers of each log that go-tpm-tools' tests expect, by file name: (bank, register, value in hexadecimal digits).
fn expected() -> Vec<(String, u16, u32, String)> {
    let tests = module(TPM_TOOLS).join("server/eventlog_test.go");
    let (tests, names) = (fs::read_to_string(tests).unwrap(), names());
    let (mut log, mut bank, mut all) = (None, 0, vec![]);
    for line in tests.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("RawLog: test.") {
            log = names.get(name.trim_end_matches(',')).cloned();
        } else if let Some(name) = line.strip_prefix("Hash: pb.HashAlgo_") {
            bank = match name.trim_end_matches(',') {
                "SHA1" => SHA1,
                "SHA256" => SHA256,
                "SHA384" => SHA_384,
                other => panic!("{other}"),
            };
        } else if let Some((pcr, value)) = line.split_once("decodeHex(\"")
            && let Some(log) = &log
        {
            let pcr = pcr.trim_end_matches([':', ' ']).parse().unwrap();
            let value = value.trim_end_matches(['"', ')', ',']).to_owned();
            all.push((log.clone(), bank, pcr, value));
        }
    }
    all
}

/// Returns the file names of the logs by the names of the variables that embed them.
fn names() -> BTreeMap<String, String> {
    let source = module(TPM_TOOLS).join("internal/test/test_data.go");
    let source = fs::read_to_string(source).unwrap();
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let pairs = lines.windows(2).filter_map(|pair| {
        let file = pair[0].strip_prefix("//go:embed eventlogs/")?;
        Some((pair[1].split_once(' ')?.0.to_owned(), file.to_owned()))
    });
    pairs.collect()
}

#[test]
fn every_log_replays_to_the_registers_of_its_machine() {
    let (logs, expected) = (tpm_logs(), expected());
    let machines: BTreeSet<_> = expected.iter().map(|(log, ..)| log).collect();
    assert!(machines.len() >= 11, "{machines:?}");
    for (name, bank, pcr, value) in &expected {
        let log = parse(&logs[name]);
        assert_eq!(
            hex(&replay(&log, *bank, *pcr)),
            *value,
            "{name}: PCR {pcr} of bank {bank:#x}"
        );
    }
}

#[test]
fn every_log_is_read_to_its_end() {
    let logs = tpm_logs();
    assert!(logs.len() >= 20, "{:?}", logs.keys());
    for (name, bytes) in logs {
        assert_eq!(used(&parse(&bytes)), bytes.len(), "{name}");
    }
}

/// Returns the length of the events in bytes.
fn used(log: &EventLog) -> usize {
    let size: usize = log.events.iter().map(|event| event.data.len()).sum();
    let digests: usize = log.banks.iter().map(|(_, len)| 2 + len).sum();
    let (first, others) = (32, log.events.len() - 1);
    let head = if log.is_agile { 16 + digests } else { 32 };
    first + others * head + size
}

/// Linux hands out the whole area in which the firmware wrote its log, and some firmware fills it with zeros.
#[test]
fn a_log_ends_where_its_padding_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    for (name, bytes) in tpm_logs().into_iter().chain(ccel_logs()) {
        let log = parse(&bytes);
        for (byte, len) in [(0, 64 << 10), (0, 1 << 20), (0xff, 1 << 20), (0, 7)] {
            let mut padded = bytes[..used(&log)].to_vec();
            padded.resize(padded.len() + len, byte);
            let again = parse(&padded);
            assert_eq!(again.events, log.events, "{name}");
        }
        // the excerpt that the node sends has the same events
        let bytes = &bytes[..used(&log)];
        let mut padded = bytes.to_vec();
        padded.resize(1 << 20, 0);
        for short in [excerpt(&padded, ROOM), of_whole_registers(&padded, ROOM)] {
            assert!(!short.is_empty() && short.len() <= ROOM, "{name}");
        }
        assert_eq!(excerpt(&padded, bytes.len()), bytes, "{name}");
        if name == "short_no_action_eventlog" {
            continue;
        }
        let shown = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            explained(&[&path])
        };
        assert_eq!(shown(&padded), shown(bytes), "{name}");
    }
}

#[test]
fn an_event_without_digests_ends_a_log() {
    let bytes = &ccel_logs()["CCEL_unpadded.data.bin"];
    let event = [[1, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]; 3].concat();
    let log = [&bytes[..], &event].concat();
    assert_eq!(parse(&log).events, parse(bytes).events);
}

/// Returns what the operator's command prints about a log, and its exit code.
fn told(folder: &Path, bytes: &[u8]) -> (Option<i32>, String) {
    let path = folder.join("log");
    fs::write(&path, bytes).unwrap();
    let mut command = Command::new(support::program::built("firstlight"));
    let output = command.arg("explain").arg(path).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_log_that_is_cut_within_an_event_is_said_to_be_cut() {
    let folder = tempfile::tempdir().unwrap();
    let mut logs = tpm_logs();
    logs.retain(|name, _| name.contains("debian") || name.contains("crypto_agile"));
    logs.extend(ccel_logs());
    for (name, bytes) in logs {
        let (code, whole) = told(folder.path(), &bytes);
        assert_eq!(code, Some(0), "{name}");
        assert!(!whole.contains("the log is cut"), "{name}: {whole}");
        let end = used(&parse(&bytes)) - 1;
        let (_, text) = told(folder.path(), &bytes[..end]);
        let said = format!(
            "the log is cut within an event, or damaged: its last {} of {end} bytes",
            end - used(&parse(&bytes[..end]))
        );
        assert!(text.contains(&said), "{name}: {text}");
    }
}

/// A firmware may write an entry of EV_NO_ACTION with the index 0xffffffff, which belongs to no register.
#[test]
fn the_log_of_a_tdx_guest_is_known_beside_an_entry_for_no_register() {
    let folder = tempfile::tempdir().unwrap();
    let header = [0xff, 0xff, 0xff, 0xff, 3, 0, 0, 0, 1, 0, 0, 0, 0x0c, 0];
    let event = [&header[..], &[0; 48], &[5, 0, 0, 0], b"hello"].concat();
    for (name, bytes) in ccel_logs() {
        let used = used(&parse(&bytes));
        let log = [&bytes[..used], &event].concat();
        let (code, text) = told(folder.path(), &log);
        assert_eq!(code, Some(0), "{name}: {text}");
        assert!(
            text.contains("RTMR1") && !text.contains("PCR"),
            "{name}: {text}"
        );
    }
}

/// The registers are in the quotes of the guests, and in the tests of go-eventlog.
#[test]
fn the_logs_of_tdx_guests_replay_to_their_rtmrs() {
    let rtmr_2 = "4969684dc87381fc3b3134176c8d8806eaf0a901859f5f70cfae8d17714b46c1\
                  0a8de219048c9fc09f11f381a6fbe7c1";
    let logs = ccel_logs();
    for (name, rtmrs) in [
        (
            "cos-113-intel-tdx.bin",
            [
                "3fa2f61f395b7f5feefb4ec2df61297f109ad8abcd6410c1b7df60f21f37b192\
                 97fc35e544039c7e1edece752afd17f6",
                "f62dbc072bd5d3f3438b7b35c39a727f5aea2ffc2473f43723953f530daf6250\
                 4f0a7944aa62c41a86e8a878c2b122c1",
                rtmr_2,
            ],
        ),
        (
            "cos-113-intel-tdx-dupe-separator.bin",
            [
                "a4de2df23e9611299123ba4359c42a5e578b0f8488bf1bba8ef5606d9ea5d81c\
                 97c064b482a5eac537d166bd0f0f752d",
                "0ee9366c928a77092f55e9e114c7394181fd264699155f0df77d23577618d5f6\
                 50568a17d379355a07bd846e552f4e20",
                rtmr_2,
            ],
        ),
    ] {
        let log = parse(&logs[name]);
        assert_eq!(log.banks, [(SHA_384, 48)]);
        for (number, value) in rtmrs.iter().enumerate() {
            // register 0 is MRTD
            let register = number as u32 + 1;
            assert_eq!(
                hex(&replay(&log, SHA_384, register)),
                *value,
                "{name}: RTMR{number}"
            );
        }
    }
}

/// Prints a table of the sizes.
#[test]
fn every_log_fits_a_document_as_an_excerpt_that_explains_the_same() {
    let mut too_long = 0;
    for (name, bytes) in tpm_logs() {
        let (log, short) = (parse(&bytes), excerpt(&bytes, ROOM));
        let for_old_peers = of_whole_registers(&bytes, ROOM);
        println!(
            "{name:50} {:6} {:6} {:6}",
            bytes.len(),
            short.len(),
            for_old_peers.len()
        );
        assert!(!short.is_empty() && short.len() <= ROOM, "{name}");
        assert!(
            !for_old_peers.is_empty() && for_old_peers.len() <= ROOM,
            "{name}"
        );
        too_long += usize::from(bytes.len() > ROOM);
        if !log.banks.contains(&(SHA256, 32)) {
            continue;
        }
        for pcr in 0..16 {
            let value = replay(&log, SHA256, pcr);
            assert_eq!(
                replay(&parse(&short), SHA256, pcr),
                value,
                "{name}: PCR {pcr}"
            );
            let text = explain(&short, pcr, &value, &[1; 32]);
            assert!(text.starts_with("measured into it"), "{name}: {text}");
            // a register has the same value as before, or is missing
            let old = replay(&parse(&for_old_peers), SHA256, pcr);
            assert!(old == value || old == [0; 32], "{name}: PCR {pcr}");
        }
        // the registers of a policy
        for pcr in [4, 8, 9, 11, 14] {
            let events = |log: &[u8]| {
                let events = parse(log).events.into_iter();
                events.filter(|event| event.pcr == pcr).count()
            };
            assert_eq!(events(&for_old_peers), events(&bytes), "{name}: PCR {pcr}");
        }
    }
    assert!(too_long >= 9, "{too_long}");
}

/// Runs `firstlight explain -o json`; returns its exit code and its registers.
fn explained(args: &[&Path]) -> (i32, Vec<Value>) {
    let mut command = Command::new(support::program::built("firstlight"));
    let output = command
        .arg("explain")
        .args(args)
        .args(["-o", "json"])
        .output()
        .unwrap();
    let code = output.status.code().unwrap();
    assert!(code <= 1, "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    (code, report["registers"].as_array().unwrap().clone())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Writes each log to a file of its own.
fn files(logs: BTreeMap<String, Vec<u8>>) -> (tempfile::TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    let write = |(name, bytes): (String, Vec<u8>)| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let paths = logs.into_iter().map(write).collect();
    (dir, paths)
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn the_operators_command_explains_every_log() {
    let expected = expected();
    let (_dir, paths) = files(tpm_logs().into_iter().chain(ccel_logs()).collect());
    for path in &paths {
        // it has one event, which extends nothing
        if name(path) == "short_no_action_eventlog" {
            continue;
        }
        let (code, registers) = explained(&[path]);
        assert_eq!(code, 0, "{}", name(path));
        let of_log = expected.iter().filter(|(log, ..)| log == name(path));
        for (_, _, pcr, value) in of_log.filter(|(_, bank, ..)| *bank == SHA256) {
            let register = registers.iter().find(|it| it["index"] == *pcr);
            let nothing = hex(&[0; 32]);
            let got = register.map_or(nothing.as_str(), |it| text(&it["got"]));
            assert_eq!(got, value, "{}: PCR {pcr}", name(path));
        }
    }
}

#[test]
fn the_first_event_that_differs_from_another_machine_is_found() {
    let logs = tpm_logs();
    let (old, new) = ("cos-85-amd-sev.bin", "cos-93-amd-sev.bin");
    let pair = [old, new].map(|name| (name.to_owned(), logs[name].clone()));
    let short = excerpt(&logs[old], 16 << 10);
    let pair = pair.into_iter().chain([("short".to_owned(), short)]);
    let (_dir, paths) = files(pair.collect());
    let [old, new, short] = [&paths[0], &paths[1], &paths[2]].map(PathBuf::as_path);
    let against = Path::new("--against");
    let (code, registers) = explained(&[new, against, old]);
    assert_eq!(code, 1);
    let of = |pcr: u32| registers.iter().find(|it| it["index"] == pcr).unwrap();
    // the same firmware, another kernel command line
    assert_eq!(text(&of(0)["verdict"]), "as expected");
    let difference = &of(8)["firstDifference"];
    for end in ["expected", "got"] {
        assert_eq!(text(&difference[end]["type"]), "EV_IPL");
        let words = text(&difference[end]["description"]);
        assert!(words.contains("GRUB command: "), "{words}");
    }
    assert_ne!(difference["expected"], difference["got"]);
    // an excerpt has the same events, and names what was cut
    let (code, registers) = explained(&[short, against, old]);
    assert_eq!(code, 0);
    let events = registers
        .iter()
        .flat_map(|it| it["events"].as_array().unwrap());
    let cut = events.filter(|event| text(&event["description"]).contains("(cut: "));
    assert!(cut.count() > 0);
}

/// tpm2_eventlog's description of an event.
#[derive(Default)]
struct Said {
    pcr: u32,
    kind: String,
    digests: BTreeMap<String, String>,
    variable: Option<String>,
}

/// Reads the output of tpm2_eventlog; `None` if it does not accept the log.
fn said_by_tpm2_tools(path: &Path) -> Option<Vec<Said>> {
    let output = Command::new("tpm2_eventlog").arg(path).output();
    let output = output.expect("tpm2-tools are installed");
    let (mut all, mut bank): (Vec<Said>, _) = (vec![], "sha1".to_owned());
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some((key, value)) = line.trim_start_matches([' ', '-']).split_once(": ") else {
            continue;
        };
        let value = value.trim_matches('"').to_owned();
        if key == "PCRIndex" {
            all.push(Said::default());
            bank = "sha1".into();
        }
        let Some(event) = all.last_mut() else {
            continue;
        };
        match key {
            "PCRIndex" => event.pcr = value.parse().unwrap(),
            "EventType" => event.kind = value,
            "AlgorithmId" => bank = value,
            "Digest" => drop(event.digests.insert(bank.clone(), value)),
            "UnicodeName" => event.variable = Some(value),
            _ => {}
        }
    }
    output.status.success().then_some(all)
}

#[test]
fn tpm2_tools_say_the_same_of_every_event() {
    let (_dir, paths) = files(tpm_logs());
    let mut compared = 0;
    for path in &paths {
        let Some(said) = said_by_tpm2_tools(path) else {
            println!("tpm2_eventlog does not accept {}", name(path));
            continue;
        };
        let (_, registers) = explained(&[path]);
        let bytes = fs::read(path).unwrap();
        let bank = if parse(&bytes).banks.contains(&(SHA256, 32)) {
            "sha256"
        } else {
            "sha1"
        };
        for register in &registers {
            let of_register = |said: &&Said| register["index"] == said.pcr;
            let said = said.iter().filter(of_register);
            let said: Vec<_> = said.filter(|said| said.kind != "EV_NO_ACTION").collect();
            let events = register["events"].as_array().unwrap();
            assert_eq!(events.len(), said.len(), "{}", name(path));
            for (event, said) in events.iter().zip(said) {
                assert_eq!(text(&event["digest"]), said.digests[bank], "{}", name(path));
                // it does not know the newest types
                if said.kind.starts_with("EV_") {
                    assert_eq!(text(&event["type"]), said.kind, "{}", name(path));
                }
                if let Some(variable) = &said.variable {
                    let words = text(&event["description"]);
                    let is_named = words.starts_with(&format!("{variable}: "))
                        || words.starts_with(&format!("verified by {variable}: "));
                    assert!(is_named, "{}: {variable}: {words}", name(path));
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 900, "{compared}");
}

/// Returns an emulated TPM with the registers of the machine that wrote the log.
fn tpm_of(log: &[u8]) -> Swtpm {
    let mut tpm = Swtpm::start();
    // the log has all events that the firmware of the real machine measured
    tpm.reset();
    let log = parse(log);
    let events = log.events.iter().filter(|event| event.kind != EV_NO_ACTION);
    let digest = |event: &LogEntry| format!("{}:sha256={}", event.pcr, hex(event.sha256.unwrap()));
    let digests: Vec<String> = events.map(digest).collect();
    let digests: Vec<&str> = digests.iter().map(String::as_str).collect();
    tpm.tool("tpm2_pcrextend", &digests);
    tpm
}

/// The log has 45 KiB, too many for a document.
#[test]
fn a_join_service_explains_why_it_refuses_a_real_machine() {
    let bytes = &tpm_logs()["ubuntu-2404-amd-sevsnp.bin"];
    let (tpm, folder) = (tpm_of(bytes), tempfile::tempdir().unwrap());
    let file = folder.path().join("binary_bios_measurements");
    fs::write(&file, bytes).unwrap();
    let log = parse(bytes);
    let measurement = |pcr: u32| {
        let mut value = replay(&log, SHA256, pcr);
        if matches!(pcr, 4 | 7) {
            value[0] ^= 1;
        }
        let expected = value;
        let warn_only = false;
        (
            pcr,
            Measurement {
                expected,
                warn_only,
            },
        )
    };
    let policy = Policy::new([4, 7, 8, 15].map(measurement).into()).unwrap();
    let policy_file = folder.path().join("attestationConfig");
    fs::write(&policy_file, cli::trust::policy::text(&policy)).unwrap();
    let (join, address) = lone_service_program(folder.path());
    let location = tpm.location().parse().unwrap();
    let issuer = Arc::new(qemu_vtpm::issuer(location, Some(file)));
    let client = atls::Client::new(Some(issuer.clone()), None);
    let socket = TcpStream::connect(address).unwrap();
    let connected = client.connect(socket, Instant::now() + PATIENCE);
    // in TLS 1.3 a client learns of the refusal from its first read
    if let Ok(mut transport) = connected {
        let _ = std::io::Read::read(&mut transport.reader, &mut [0]);
    }
    join.expect("PCR 4: expected ");
    println!("{}", join.output());
    // without evidence of its own the service speaks the old form, whose log has no events of Secure Boot
    join.expect("PCR 7: expected ");

    // the registers that the document of each form explains
    let request = DocumentRequest {
        role: PeerRole::Client,
        session: &[1; 32],
        nonce: &[2; 32],
        banks: &[],
        challenge: None,
        for_stranger: false,
    };
    let old = issuer.issue(&[1; 32], &[2; 32]).unwrap();
    let strong = issuer.prove(&request).unwrap();
    let evidence = folder.path().join("evidence.json");
    let verdict_of_7 = |document: &[u8]| {
        fs::write(&evidence, document).unwrap();
        let (code, registers) = explained(&[&evidence]);
        let of_7 = registers.iter().find(|it| it["index"] == 7).unwrap();
        (code, text(&of_7["verdict"]).to_owned())
    };
    // the old form leaves out Secure Boot
    assert_eq!(verdict_of_7(&old), (1, "not explained".into()));
    assert_eq!(verdict_of_7(&strong), (0, "explained".into()));
    let mut command = Command::new(support::program::built("firstlight"));
    command
        .arg("explain")
        .arg(&evidence)
        .arg("--policy")
        .arg(&policy_file);
    let output = command.output().unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.ends_with(": PCR 4 differs, PCR 7 differs\n"), "{text}");
}

/// Returns what a log shows about Secure Boot, to a verifier with the register of its machine.
fn secure_boot(log: &[u8]) -> Result<SecureBoot, String> {
    let pcr_7 = replay(&parse(log), SHA256, secure_boot::PCR);
    SecureBoot::read(log, Some(&pcr_7)).map_err(|refusal| refusal.to_string())
}

/// Returns the names in the certificates of a variable, or what an entry is without a name.
fn names_of(entries: &[KeyEntry]) -> Vec<String> {
    let shown = entries.iter().map(ToString::to_string);
    shown
        .map(|it| it.split('"').nth(1).unwrap_or("hash").to_owned())
        .collect()
}

/// Of Google's machines with its own images and with one of Red Hat, and of a workstation.
#[test]
fn the_keys_of_secure_boot_are_those_that_a_real_machine_has_measured() {
    let (microsoft, windows) = (
        "Microsoft Corporation UEFI CA 2011",
        "Microsoft Windows Production PCA 2011",
    );
    let mut on = BTreeSet::new();
    for (name, bytes) in tpm_logs() {
        if !parse(&bytes).banks.contains(&(SHA256, 32)) {
            continue;
        }
        let whole = secure_boot(&bytes);
        // the part that a document has room for shows the same
        assert_eq!(secure_boot(&excerpt(&bytes, ROOM)), whole, "{name}");
        let found = match whole {
            Ok(found) => found,
            Err(why) => {
                assert_eq!(why, "Secure Boot is off (PCR 7)", "{name}");
                continue;
            }
        };
        let names = [&found.pk, &found.kek, &found.db, &found.signers].map(|it| names_of(it));
        if name == "rhel8-uefi.bin" {
            assert_eq!(names[1], ["Microsoft Corporation KEK CA 2011"]);
            assert_eq!(names[2], [microsoft, windows]);
            assert_eq!(names[3], [microsoft, "Red Hat Secure Boot CA 5"]);
        }
        let pcr_7 = replay(&parse(&bytes), SHA256, secure_boot::PCR);
        for log in mutations(&bytes, 200) {
            let altered = SecureBoot::read(&log, Some(&pcr_7));
            assert!(
                altered.is_err() || altered == Ok(secure_boot(&bytes).unwrap()),
                "{name}"
            );
        }
        on.insert(name);
    }
    let expected = [
        "confidential-gke-debug-251000_eventlog.bin",
        "cos-101-amd-sev.bin",
        "cos-85-amd-sev.bin",
        "cos-93-amd-sev.bin",
        "eventlogwithsp800155.bin",
        "rhel8-uefi.bin",
        "sb_cert_eventlog",
    ];
    assert!(on.iter().eq(&expected), "{on:?}");
}

/// The log is cut for a document, and what is left shows the keys.
#[test]
fn a_policy_requires_secure_boot_of_a_real_machine_whatever_its_registers_are() {
    let bytes = &tpm_logs()["rhel8-uefi.bin"];
    let (tpm, folder) = (tpm_of(bytes), tempfile::tempdir().unwrap());
    let file = folder.path().join("binary_bios_measurements");
    fs::write(&file, bytes).unwrap();
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), Some(file));
    let nonce = [2; 32];
    let request = DocumentRequest {
        role: PeerRole::Client,
        session: &[1; 32],
        nonce: &nonce,
        banks: &[],
        challenge: None,
        for_stranger: false,
    };
    let strong = issuer.prove(&request).unwrap();
    let judge = |required: &Value, document: &[u8]| {
        let fresh = json!({"15": {"expected": "00".repeat(32), "warnOnly": false}});
        let policy =
            json!({"exceptions": ["any-image"], "measurements": fresh, "secureBoot": required});
        let policy = Policy::from_json(&policy.to_string()).unwrap();
        let validator = qemu_vtpm::VARIANT
            .validator_for(policy, &offline())
            .unwrap();
        let judged = validator.judge(&Evidence::new(document, &nonce));
        judged
            .err()
            .map(|refusal| (refusal.kind, refusal.field.clone().unwrap_or_default()))
    };
    let found = secure_boot(bytes).unwrap();
    let ids = |entries: &[KeyEntry]| entries.iter().map(|it| hex(&it.id)).collect::<Vec<_>>();
    let all = json!({
        "enabled": true, "pk": ids(&found.pk), "kek": ids(&found.kek), "db": ids(&found.db), "signers": ids(&found.signers),
    });
    assert_eq!(judge(&all, &strong), None);
    for list in ["pk", "kek", "db", "signers"] {
        let mut other = all.clone();
        other[list] = json!(["11".repeat(32)]);
        let field = format!("secureBoot.{list}");
        assert_eq!(judge(&other, &strong), Some((Kind::Measurement, field)));
    }
    let old = issuer.issue(&[1; 32], &nonce).unwrap();
    let refused = Some((Kind::Unproven, "secureBoot".to_owned()));
    assert_eq!(judge(&all, &old), refused);
}

#[test]
fn altered_logs_end_without_a_panic() {
    for bytes in tpm_logs().values().chain(ccel_logs().values()) {
        let short = &bytes[..bytes.len().min(32 << 10)];
        for log in mutations(short, 20) {
            let _ = explain(&log, 4, &[1; 32], &[2; 32]);
            assert!(excerpt(&log, ROOM).len() <= ROOM);
            assert!(of_whole_registers(&log, ROOM).len() <= ROOM);
        }
    }
}
