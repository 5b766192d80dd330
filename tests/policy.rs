//! Policies as each program reads them, and `firstlight policy` as the operator sees it. `src/verifier/policy/field_names.rs` and
//! `src/cli/trust/policy/tests.rs` test the single rules, and `tests/key_service.rs` the key service's policy.

use std::fs::{self, Permissions};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, cluster_id, derive_key};
use bootstrapper::trust::service_trust::{self, ServiceTrust};
use serde_json::{Value, json};
use ssh::operators::{PolicyStatement, sha256_hex};
use support::program::{Program, built};
use support::swtpm::Swtpm;
use tempfile::TempDir;
use tpm::Tpm;
use verifier::{Evidence, Issuer, KeyName, Policy, qemu_vtpm, sources};

#[path = "../benches/storm/tpm.rs"]
mod storm_tpm;

/// A misspelt field: without the check, any TPM would be accepted.
const SLIP: &str = r#"unknown field "atestationKeys"; did you mean "attestationKeys"?"#;

fn measured(members: &str) -> String {
    let value = "ab".repeat(32);
    format!(
        r#"{{"measurements":{{"11":"{value}","4":{{"expected":"{value}","warnOnly":false}}}}{members}}}"#
    )
}

fn slip() -> String {
    measured(&format!(r#","atestationKeys":["{}"]"#, key("a")))
}

fn key(name: &str) -> KeyName {
    KeyName::of(name.as_bytes())
}

fn folder(policy: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("policy.json"), policy).unwrap();
    folder
}

fn run_with(folder: &Path, args: &[&str], input: &str) -> Output {
    let mut command = Command::new(built("firstlight"));
    command.args(args).current_dir(folder);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // a command that reads no input may have ended
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Returns exit code, standard output and standard error of a command.
fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = run_with(folder, args, "");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

fn policy(folder: &Path, args: &[&str]) -> (i32, String, String) {
    run(folder, &[&["policy"], args].concat())
}

/// Policies, each with what `firstlight policy check` calls its error; the first two have none.
fn policies() -> [(String, &'static str); 14] {
    let (value, zero) = ("ab".repeat(32), "00".repeat(32));
    let only = |members: &str| format!(r#"{{"measurements":{{{members}}}}}"#);
    let any_image = only(&format!(r#""15":"{zero}""#));
    let permitted = any_image.replacen('{', r#"{"exceptions":["any-image"],"#, 1);
    let warns = format!(r#""4":{{"expected":"{value}","warnOnly":true}}"#);
    [
        (measured(""), ""),
        (permitted, ""),
        ("{".into(), "EOF while parsing"),
        (slip(), SLIP),
        (only(&warns), "no register is enforced"),
        (
            any_image,
            "does not enforce PCR 4, so any image is accepted",
        ),
        (
            only(&format!(r#""11":"{value}""#)),
            "does not enforce PCR 4, so any image is accepted",
        ),
        (
            only(&format!(r#""4":"{value}","7":"{zero}""#)),
            "PCR 7 of the first image is zero",
        ),
        (
            measured(r#","variant":"gcp-sev-es""#),
            "it is for the attestation variant \"gcp-sev-es\"",
        ),
        (
            measured(r#","cloud":{"projects":["p"]}"#),
            "cloud.projects: the attestation variant qemu-vtpm cannot check",
        ),
        (
            measured(r#","exceptions":["any-tpm"]"#),
            "exceptions: \"any-tpm\": expected any-image or zero-registers",
        ),
        (
            measured(r#","secureBoot":{"enabled":false}"#),
            "secureBoot: enabled: expected true",
        ),
        (
            measured(r#","tpm":{"vendors":["IFX"]}"#),
            "tpm: only a certified endorsement key names the vendor",
        ),
        (
            measured(
                r#","endorsementRoots":["google-2022"],"tpm":{"floors":[{"vendor":"IFX","minimum":"0x1"}]}"#,
            ),
            "tpm.floors: the attestation variant qemu-vtpm cannot check",
        ),
    ]
}

/// Writes the operator's files, and those of the services of a cluster whose master secret is zeros. The TPM is that of a member.
fn cluster(folder: &Path) -> Swtpm {
    let file = |name: &str, content: &[u8]| {
        fs::write(folder.join(name), content).unwrap();
        fs::set_permissions(folder.join(name), Permissions::from_mode(0o600)).unwrap();
    };
    let bytes = "A".repeat(43) + "=";
    let key = format!(r#"{{"key":"{bytes}","salt":"{bytes}"}}"#);
    file("firstlight-mastersecret.json", key.as_bytes());
    let state = format!(r#"{{"version":1,"measurementSalt":"{bytes}"}}"#);
    file("firstlight-state.json", state.as_bytes());
    file("secret", b"correct horse");
    for name in ["mastersecret", "salt", "measurementSalt", "shared"] {
        file(name, &[0; 32]);
    }
    fs::create_dir(folder.join("disks")).unwrap();
    let tpm = Swtpm::start();
    let measurement = Dek::named(MEASUREMENT_SECRET_ID);
    let measurement = derive_key(&[0; 32], &[0; 32], measurement.info(), KEY_LEN);
    let mut open = Tpm::open(&tpm.location().parse().unwrap()).unwrap();
    open.pcr_event(15, &cluster_id(&measurement.unwrap(), &[0; 32]))
        .unwrap();
    tpm
}

#[test]
fn each_program_refuses_what_policy_check_calls_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let tpm = cluster(path);
    let location = tpm.location();
    let variant = "--attestation-variant=qemu-vtpm";
    let commands: &[&[&str]] = &[
        &["policy", "check", "policy.json", variant],
        &[
            "init",
            "--endpoint=127.0.0.1:1",
            "--init-secret=secret",
            "--timeout=2s",
            "--trust-any-tpm",
            "--require=any",
            variant,
        ],
        &[
            "recover",
            "--endpoint=127.0.0.1:1",
            "--timeout=2s",
            "--trust-any-tpm",
            variant,
        ],
        &["status", "127.0.0.1:1", "--timeout=2s", variant],
        &["verify", "127.0.0.1:1", "--fresh", "--timeout=2s", variant],
        &["apply", "--print", "--image=x.y/z:1", variant],
    ];
    let services: &[(&str, &[&str])] = &[
        (
            "join-service",
            &[
                "--key-service=127.0.0.1:1",
                "--key-service-auth=none",
                variant,
            ],
        ),
        (
            "join-service",
            &[
                "--key-service=127.0.0.1:1",
                "--key-service-auth=secret",
                "--key-service-secret=shared",
                "--records=disks",
                variant,
            ],
        ),
        (
            "key-service",
            &[
                "--master-secret=mastersecret",
                "--salt=salt",
                "--tpm",
                &location,
                variant,
            ],
        ),
    ];
    for (text, why) in policies() {
        for name in ["policy.json", "attestationConfig"] {
            fs::write(path.join(name), &text).unwrap();
        }
        for command in commands {
            let file: &[&str] = match command[0] {
                "policy" => &[],
                _ => &["--policy=policy.json"],
            };
            let (code, out, said) = run(path, &[command, file].concat());
            let said = out + &said;
            let is_refused = said.contains("policy.json: measurement policy: ")
                || command[0] == "policy" && code == 1;
            assert_eq!(is_refused, !why.is_empty(), "{command:?}: {text}: {said}");
            assert!(
                said.contains(why) && (why.is_empty() || code == 1),
                "{command:?}: {code}: {text}: {said}"
            );
        }
        for (program, arguments) in services {
            let mut command = Command::new(built(program));
            command
                .args(*arguments)
                .args(["--listen=127.0.0.1:0", "--config=."]);
            command.current_dir(path);
            if why.is_empty() {
                Program::start(&mut command).expect("serving");
                continue;
            }
            let ended = command.output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            let is_refused = !ended.status.success() && said.contains("measurement policy: ");
            assert!(
                is_refused && said.contains(why),
                "{program}: {text}: {said}"
            );
        }
        let of_node = of_node(&path.join("policy.json"), &location);
        let said = of_node.err().map_or(String::new(), |why| why.to_string());
        // without PCR 15, which no service policy compares, nothing would be left
        let has_nothing = text.contains("exceptions\":[\"any-image");
        assert_eq!(
            said.is_empty(),
            why.is_empty() && !has_nothing,
            "{text}: {said}"
        );
    }
}

/// Reads a policy for the join services that a node asks.
fn of_node(file: &Path, tpm: &str) -> Result<ServiceTrust, service_trust::Error> {
    let policy = service_trust::read_policy(file)?;
    let tpm = tpm.parse().unwrap();
    let trust = ServiceTrust::new(Default::default(), Some(policy), &qemu_vtpm::VARIANT, tpm)?;
    trust.judge()?;
    Ok(trust)
}

#[test]
fn a_command_that_changes_a_policy_refuses_one_with_an_unknown_field() {
    let folder = folder(&slip());
    let tpm = Swtpm::start();
    let location = tpm.location();
    for command in [
        &[
            "measure",
            "--tpm",
            &location,
            "--name=b",
            "--add-to",
            "policy.json",
        ][..],
        &["policy", "show", "policy.json"],
        &["policy", "add-key", "policy.json", &key("b").to_string()],
    ] {
        let (code, _, said) = run(folder.path(), command);
        assert!(code == 1 && said.contains(SLIP), "{command:?}: {said}");
    }
    assert_eq!(
        fs::read_to_string(folder.path().join("policy.json")).unwrap(),
        slip()
    );
}

#[test]
fn a_join_service_does_not_start_with_an_unknown_field_and_keeps_its_policy_if_one_comes() {
    let folder = tempfile::tempdir().unwrap();
    let set = |text: &str| {
        fs::write(folder.path().join("new"), text).unwrap();
        fs::rename(
            folder.path().join("new"),
            folder.path().join("attestationConfig"),
        )
        .unwrap();
    };
    let service = || {
        let mut command = Command::new(built("join-service"));
        command.args([
            "--key-service=127.0.0.1:1",
            "--key-service-auth=none",
            "--listen=127.0.0.1:0",
        ]);
        command.args([
            "--attestation-variant=qemu-vtpm",
            "--metrics=127.0.0.1:0",
            "--config=.",
        ]);
        command.current_dir(folder.path());
        command
    };
    set(&slip());
    let refused = service().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains(SLIP), "{said}");
    // the policy is for machines of another variant
    set(&measured(r#","variant":"gcp-sev-es""#));
    let refused = service().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        said.contains("it is for the attestation variant \"gcp-sev-es\""),
        "{said}"
    );

    set(&measured(&format!(
        r#","variant":"qemu-vtpm","attestationKeys":["{}"]"#,
        key("a")
    )));
    let program = Program::start(&mut service());
    let line = program.expect("metrics on http://");
    let metrics = line
        .split_whitespace()
        .find(|word| word.starts_with("http://"))
        .unwrap();
    let metric = |line: &str| {
        let text = ureq::get(metrics)
            .call()
            .unwrap()
            .body_mut()
            .read_to_string()
            .unwrap();
        text.lines().any(|one| one == line)
    };
    assert!(metric("firstlight_attestation_policy_stale 0"));
    // a caller that proves nothing
    let line = program.expect("serving join requests");
    let mut words = line.split_whitespace();
    let address: SocketAddr = words.find_map(|word| word.parse().ok()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let socket = TcpStream::connect(address).unwrap();
    let _ = atls::Client::new(None, None).connect(socket, deadline);
    let counted = r#"firstlight_join_refused_evidence_total{kind="unproven"} 1"#;
    while !metric(counted) {
        assert!(Instant::now() < deadline, "{counted}");
    }
    set(&slip());
    let line = program.expect("the old policy stays in force");
    assert!(line.contains(SLIP), "{line}");
    // the line comes first
    let stale = "firstlight_attestation_policy_stale 1";
    while !metric(stale) {
        assert!(Instant::now() < deadline, "{stale}");
    }
    assert!(metric("firstlight_attestation_any_tpm 0"));
}

#[test]
fn keys_are_added_and_removed_and_the_file_keeps_its_mode() {
    let folder = folder(&measured(r#","name":"image 1","variant":"qemu-vtpm""#));
    let (file, link) = (
        folder.path().join("policy.json"),
        folder.path().join("link"),
    );
    symlink("policy.json", &link).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| key(name).to_string());
    let keys = || Policy::from_json(&fs::read_to_string(&file).unwrap()).unwrap();
    let (code, said, _) = policy(folder.path(), &["add-key", "link", &a, &b]);
    assert_eq!(code, 0);
    assert!(
        said.contains(&format!("added: {a}\n")) && said.contains(&format!("added: {b}\n")),
        "{said}"
    );
    assert_eq!(keys().keys(), &[key("a"), key("b")].into());
    let before = fs::metadata(&file).unwrap();
    let (code, said, _) = policy(folder.path(), &["add-key", "policy.json", &a[4..]]);
    assert_eq!((code, said), (0, format!("already there: {a}\n")));
    let input = format!("{c}\n\n  {b}\n");
    let output = run_with(
        folder.path(),
        &["policy", "add-key", "policy.json", "-", "-o", "json"],
        &input,
    );
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said, json!({"added": [c], "present": [b]}));
    let text = fs::read_to_string(&file).unwrap();
    let order = [
        "\"variant\"",
        "\"name\"",
        "\"4\"",
        "\"11\"",
        "\"attestationKeys\"",
    ];
    let places: Vec<_> = order.map(|word| text.find(word).unwrap()).into();
    assert!(places.is_sorted() && text.ends_with("}\n"), "{text}");
    // options that change nothing
    for (args, why) in [
        (
            &["add-key", "policy.json", "000b12"][..],
            "not a Name of an attestation key",
        ),
        (
            &["add-key", "policy.json"],
            "expected firstlight policy add-key FILE KEY..",
        ),
        (
            &["add-key", "policy.json", "-"],
            "standard input has no key",
        ),
        (
            &["add-kye", "policy.json", &a],
            "similar value exists: 'add-key'",
        ),
        (
            &["remove-key", "policy.json", &key("d").to_string()],
            "does not name the key",
        ),
        (
            &["remove-key", "policy.json", &a, &key("d").to_string()],
            "nothing was changed",
        ),
        (
            &["remove-key", "policy.json", &a, &b, &c],
            "without its last key the policy would accept any TPM",
        ),
        (
            &["add-key", "policy.json", &a, "--trust-any-tpm"],
            "--trust-any-tpm is for remove-key",
        ),
        (
            &["check", "policy.json", "policy.json"],
            "expected firstlight policy check FILE",
        ),
        (&["add-key", "none.json", &a], "cannot open none.json"),
    ] {
        let (code, _, said) = policy(folder.path(), args);
        assert!(code != 0 && said.contains(why), "{args:?}: {code} {said}");
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
    let (code, said, _) = policy(folder.path(), &["remove-key", "policy.json", &a, &b]);
    assert_eq!(code, 0);
    assert!(said.contains(&format!("removed: {a}\n")), "{said}");
    assert_eq!(keys().keys(), &[key("c")].into());
    let (code, ..) = policy(
        folder.path(),
        &["remove-key", "policy.json", &c, "--trust-any-tpm"],
    );
    assert!(code == 0 && keys().believes_any_key());
    assert!(link.is_symlink());
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode(),
        before.permissions().mode()
    );
    let others = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(others, 2);
    // a machine without a TPM has no such key
    let tdx = measured(r#","variant":"qemu-tdx""#).replace(&"ab".repeat(32), &"ab".repeat(48));
    fs::write(&file, tdx).unwrap();
    let (code, _, said) = policy(folder.path(), &["add-key", "policy.json", &a]);
    assert!(
        code == 1 && said.contains("qemu-tdx have no attestation key"),
        "{said}"
    );
}

#[test]
fn a_policy_is_checked_shown_and_compared() {
    let folder = folder(&measured(""));
    let path = folder.path();
    let (code, found, _) = policy(path, &["check", "policy.json"]);
    assert_eq!(code, 0, "{found}");
    assert!(
        found.contains("not pinned: the attestation key: any TPM is accepted"),
        "{found}"
    );
    assert!(
        found.contains("not pinned: PCR 9 (") && found.ends_with("policy.json: no error\n"),
        "{found}"
    );
    let (code, found, said) = policy(
        path,
        &[
            "check",
            "policy.json",
            "-o",
            "json",
            "--attestation-variant=qemu-tdx",
        ],
    );
    let found: Value = serde_json::from_str(&found).unwrap();
    assert!(code == 1 && said.contains("policy.json: 1 error"), "{said}");
    assert_eq!(found["errors"].as_array().unwrap().len(), 1, "{found}");

    let named = measured(&format!(
        r#","variant":"gcp-sev-es","attestationKeys":["{}"]"#,
        key("a")
    ));
    fs::write(path.join("new.json"), &named).unwrap();
    let output = run_with(path, &["policy", "show", "-"], &named);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        shown.starts_with("variant: gcp-sev-es\nimage: without a name\n  PCR 4  "),
        "{shown}"
    );
    assert!(
        shown.contains(&format!("attestation keys:\n  {}\n", key("a"))),
        "{shown}"
    );
    let (code, shown, _) = policy(path, &["show", "new.json", "-o", "json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (code, &shown["images"][0]["registers"][1]["index"]),
        (0, &json!(11))
    );
    // the variant is that of the policy
    let (_, found, _) = policy(path, &["check", "new.json", "-o", "json"]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["variant"], "gcp-sev-es");

    let (code, differences, said) = policy(path, &["diff", "policy.json", "new.json"]);
    let expected = format!(
        "- attestation keys: none is named\n+ variant: gcp-sev-es\n+ attestation key {}: believed\n",
        key("a")
    );
    assert_eq!((code, differences), (1, expected));
    assert!(said.contains("policy.json and new.json differ"), "{said}");
    let (code, differences, _) = policy(path, &["diff", "new.json", "new.json", "-o", "json"]);
    assert_eq!((code, differences.trim()), (0, "[]"));
}

/// Makes an SSH key with ssh-keygen. Returns the line of the public key.
fn ssh_key(folder: &Path, name: &str) -> String {
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f", name])
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let line = fs::read_to_string(folder.join(name).with_extension("pub")).unwrap();
    line.trim().to_owned()
}

/// Returns a folder with a policy and the list of two operators, both of whom must sign; it has their keys, and that of a stranger.
fn with_operators() -> TempDir {
    let folder = folder(&measured(""));
    let path = folder.path();
    let operators = ["anna", "ben"].map(|name| json!({"name": name, "key": ssh_key(path, name)}));
    ssh_key(path, "stranger");
    let list = json!({"required": 2, "operators": operators});
    fs::write(path.join("operators.json"), list.to_string()).unwrap();
    folder
}

const CLUSTER: &str =
    "--cluster-id=0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a";

fn sign(folder: &Path, key: &str) {
    let (code, _, said) = policy(folder, &["sign", "policy.json", "--yes", "--key", key]);
    assert_eq!(code, 0, "{said}");
}

/// Returns what `check-signatures` says of the policy: exit code, and both outputs.
fn signatures(folder: &Path) -> (i32, String) {
    let check = [
        "check-signatures",
        "policy.json",
        "--operators=operators.json",
    ];
    let (code, found, said) = policy(folder, &check);
    (code, found + &said)
}

#[test]
fn a_policy_is_signed_by_enough_operators_with_their_ssh_keys() {
    let folder = with_operators();
    let path = folder.path();
    let read = |name: &str| fs::read_to_string(path.join(name)).unwrap();
    let blocks = || read("policy.json.signatures").matches("BEGIN SSH").count();
    let (code, proposed, said) = policy(path, &["propose", "policy.json", CLUSTER, "-o", "json"]);
    assert_eq!(code, 0, "{said}");
    let proposed: Value = serde_json::from_str(&proposed).unwrap();
    let digest = sha256_hex(read("policy.json").as_bytes());
    assert_eq!(
        (&proposed["number"], &proposed["policy"]),
        (&json!(1), &json!(digest))
    );
    let first = read("policy.json.statement");
    let is_said = |code: i32, part: &str| {
        let (got, said) = signatures(path);
        assert!(got == code && said.contains(part), "{part}: {got} {said}");
    };
    is_said(1, "0 of 2 required signatures; missing: anna, ben");
    sign(path, "anna");
    is_said(1, "signed: anna\nmissing: ben\n");
    sign(path, "stranger");
    is_said(1, "1 of 2 required signatures; missing: ben");
    sign(path, "ben");
    is_said(0, "signed: anna\nsigned: ben\n");
    sign(path, "anna");
    assert_eq!(blocks(), 3);
    let signed = read("policy.json.signatures");

    // a changed byte
    fs::write(path.join("policy.json"), measured("") + " ").unwrap();
    is_said(1, "is about another policy than policy.json");
    let (code, _, said) = policy(path, &["sign", "policy.json", "--yes", "--key=anna"]);
    assert!(
        code == 1 && said.contains("is about another policy"),
        "{said}"
    );
    let (code, _, said) = policy(path, &["propose", "policy.json", CLUSTER]);
    assert!(
        code == 1 && said.contains("--overwrite replaces it"),
        "{said}"
    );
    assert_eq!(
        (
            read("policy.json.statement"),
            read("policy.json.signatures")
        ),
        (first.clone(), signed.clone())
    );
    let (code, _, said) = policy(path, &["propose", "policy.json", CLUSTER, "--overwrite"]);
    assert_eq!(code, 0, "{said}");
    let second = PolicyStatement::parse(&read("policy.json.statement")).unwrap();
    assert_eq!(
        (second.number, second.previous),
        (2, Some(sha256_hex(first.as_bytes())))
    );
    assert!(!path.join("policy.json.signatures").exists());

    // signatures of the statement before
    fs::write(path.join("policy.json.signatures"), signed).unwrap();
    is_said(1, "0 of 2 required signatures; missing: anna, ben");
    sign(path, "ben");
    assert_eq!(blocks(), 1);
    is_said(1, "1 of 2 required signatures; missing: anna");
    sign(path, "anna");
    is_said(0, "policy.json: enough operators have signed it");

    for (args, code, why) in [
        (&["sign", "policy.json", "--yes"][..], 2, "--key is missing"),
        (
            &["sign", "policy.json", "--key=anna"],
            2,
            "standard input is no terminal",
        ),
        (
            &["sign", "policy.json", "--yes", "--key=none"],
            1,
            "cannot sign with the key none",
        ),
        (
            &["check-signatures", "policy.json"],
            2,
            "--operators is missing",
        ),
        (
            &["check", "policy.json", "--number=3"],
            2,
            "are for propose",
        ),
        (
            &["propose", "operators.json", CLUSTER],
            1,
            "operators.json: measurement policy: ",
        ),
        (
            &[
                "propose",
                "policy.json",
                CLUSTER,
                "--overwrite",
                "--number=2",
            ],
            2,
            "because the statement before has the number 2",
        ),
        (
            &["propose", "policy.json", "--overwrite"],
            2,
            "the cluster's ID is unknown",
        ),
        (
            &[
                "propose",
                "policy.json",
                CLUSTER,
                "--not-after=2026-01-01T00:00:00Z",
            ],
            2,
            "expected a time in the future",
        ),
    ] {
        let (got, _, said) = policy(path, args);
        assert!(got == code && said.contains(why), "{args:?}: {got} {said}");
    }
    is_said(0, "signed: anna\nsigned: ben\n");
}

#[test]
fn apply_brings_a_signed_policy_byte_for_byte_or_not_at_all() {
    let folder = with_operators();
    let path = folder.path();
    let private = |name: &str, content: &str| {
        fs::write(path.join(name), content).unwrap();
        fs::set_permissions(path.join(name), Permissions::from_mode(0o600)).unwrap();
    };
    let bytes = "A".repeat(43) + "=";
    let state =
        |id: &str| json!({"version": 1, "measurementSalt": bytes, "clusterID": id.repeat(32)});
    private(
        "firstlight-mastersecret.json",
        &json!({"key": bytes, "salt": bytes}).to_string(),
    );
    private("firstlight-state.json", &state("0a").to_string());
    // of another form than the one in which policies are written
    let text = measured("") + "\n\n";
    fs::write(path.join("policy.json"), &text).unwrap();
    let apply = |more: &[&str]| {
        let print = [
            "apply",
            "--print",
            "--policy=policy.json",
            "--image=x.y/z:1",
        ];
        run(path, &[&print, more].concat())
    };
    let data = |more: &[&str]| {
        let (code, printed, said) = apply(more);
        assert_eq!(code, 0, "{said}");
        let list: Value = serde_json::from_str(&printed).unwrap();
        let mut objects = list["items"].as_array().unwrap().iter();
        let config = objects.find(|it| it["metadata"]["name"] == "join-config");
        config.unwrap()["data"].clone()
    };
    let refused = |more: &[&str], why: &str| {
        let (code, _, said) = apply(more);
        assert!(code == 1 && said.contains(why), "{more:?}: {code} {said}");
    };
    assert_eq!(data(&[]), json!({"attestationConfig": text}));
    let (code, _, said) = policy(path, &["propose", "policy.json"]);
    assert_eq!(code, 0, "{said}");
    refused(&[], "nobody has signed policy.json.statement yet");
    sign(path, "anna");
    let read = |name: &str| fs::read_to_string(path.join(name)).unwrap();
    let mut signed = json!({
        "attestationConfig": text,
        "policyStatement": read("policy.json.statement"),
        "policySignatures": read("policy.json.signatures"),
    });
    assert_eq!(data(&[]), signed);
    fs::write(path.join("changes.json"), "[]").unwrap();
    signed["operatorChanges"] = "[]".into();
    assert_eq!(data(&["--operator-changes=changes.json"]), signed);
    refused(
        &["--operator-changes=policy.json"],
        "policy.json: the changes of the list",
    );
    refused(
        &["--require=strong"],
        "policy.json lacks \"require\": \"strong\"",
    );
    private("firstlight-state.json", &state("0b").to_string());
    refused(&[], "is about the cluster 0a0a");
    private("firstlight-state.json", &state("0a").to_string());
    fs::write(path.join("policy.json"), text.trim_end()).unwrap();
    refused(&[], "is about another policy than policy.json");
}

#[test]
fn measure_names_the_variant_and_another_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tpm = Swtpm::start();
    let location = tpm.location();
    let (code, policy, said) = run(
        folder.path(),
        &["measure", "--tpm", &location, "--pcrs=4,11"],
    );
    assert_eq!(code, 0, "{said}");
    assert_eq!(
        Policy::from_json(&policy).unwrap().variant(),
        Some("qemu-vtpm")
    );
    fs::write(folder.path().join("policy.json"), policy).unwrap();
    let other = ["--policy=policy.json", "--attestation-variant=gcp-sev-es"];
    let verify = [
        &["verify", "127.0.0.1:1", "--timeout=2s", "--fresh"],
        &other[..],
    ]
    .concat();
    let (code, _, said) = run(folder.path(), &verify);
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains(
            "it is for the attestation variant \"qemu-vtpm\", but the machines have gcp-sev-es"
        ),
        "{said}"
    );
    let added = [
        "measure",
        "--tpm",
        &location,
        "--add-to=policy.json",
        "--name=b",
        "--attestation-variant=gcp-sev-es",
    ];
    let (code, _, said) = run(folder.path(), &added);
    assert_eq!(code, 2, "{said}");
    assert!(
        said.contains("the policy in --add-to is for qemu-vtpm"),
        "{said}"
    );
}

/// `make storm` needs an API server, so it does not run with every change. The test checks that the requirements of its verifier do
/// not refuse its own machines.
#[test]
fn the_machines_of_the_storm_meet_its_policy() {
    let policy = Policy::from_json(storm_tpm::POLICY).unwrap();
    let judge = qemu_vtpm::VARIANT.validator_for(policy, &sources::offline());
    let document = storm_tpm::Tpm::new().issue(&[1; 32], &[2; 32]).unwrap();
    let identified = judge
        .unwrap()
        .judge(&Evidence::new(&document, &[2; 32]))
        .unwrap();
    assert_eq!(identified.user_data, [1; 32]);
}
