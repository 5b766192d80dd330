//! `firstlight status` for a node in each of its states.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::init::init;
use crate::json::assert_documented;
use crate::program::{PATIENCE, Program};
use crate::setting::{INIT_SECRET, MASTER_KEY, Setting, wait_for_port};
use base::crypto::Secret;
use disk::state_disk::handover;
use std::time::{Instant, SystemTime};

/// Returns exit code and output for the node, with the policy in the file.
fn status(setting: &Setting, address: &str, policy: &str) -> (i32, String) {
    let mut command =
        setting.firstlight(&["status", address, "--policy", policy, "--timeout", "20s"]);
    let output = command.output().unwrap();
    let code = output.status.code().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    if [1, 2].contains(&code) {
        return (code, text);
    }
    // the output for programs has the same facts
    let json = command.args(["-o", "json"]).output().unwrap();
    let report = assert_documented("status", str::from_utf8(&json.stdout).unwrap());
    let state = match json.status.code().unwrap() {
        0 => "member",
        3 => "refused",
        4 => "unreachable",
        5 => "waits-for-key",
        6 => "fresh",
        7 => "other-cluster",
        8 => "unproven",
        other => panic!("{other}"),
    };
    assert_eq!(
        (&report["state"], json.status.code()),
        (&state.into(), Some(code))
    );
    (code, text)
}

/// Returns exit code and output of `firstlight verify` with the policy of the node.
fn verify(setting: &Setting, endpoint: &str, more: &[&str]) -> (i32, String) {
    verify_by(setting, &setting.policy(), endpoint, more)
}

/// Returns exit code and output of `firstlight verify`.
pub fn verify_by(setting: &Setting, policy: &Path, endpoint: &str, more: &[&str]) -> (i32, String) {
    let policy = policy.display().to_string();
    let args = [
        &["verify", endpoint, "--policy", &policy, "--timeout=60s"],
        more,
    ]
    .concat();
    let output = setting.firstlight(&args).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text)
}

pub fn expect(said: &(i32, String), code: i32, parts: &[&str]) {
    let (exit, text) = said;
    assert!(
        *exit == code && parts.iter().all(|part| text.contains(part)),
        "expected {code}, {parts:?}; got {exit}:\n{text}"
    );
}

/// Evidence that was saved is judged again without the node, also by another policy, and nothing of it can be changed.
fn evidence_is_judged_again(setting: &Setting, node: &str, policy: &str) {
    let run = |command: &str, more: &[&str]| {
        let args = [&[command, "--policy", policy], more].concat();
        let output = setting.firstlight(&args).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let json = serde_json::from_slice::<serde_json::Value>(&output.stdout);
        (
            output.status.code().unwrap(),
            json.unwrap_or_default(),
            text,
        )
    };
    let json = ["--fresh", "-o", "json"];
    let asked = run(
        "verify",
        &[&[node, "--save", "kept.json"], &json[..]].concat(),
    );
    assert_eq!(asked.0, 0, "{}", asked.2);
    let again = run(
        "verify",
        &[&["--evidence", "kept.json"], &json[..]].concat(),
    );
    assert_eq!(again.0, 0, "{}", again.2);
    let (mut before, mut after) = (asked.1, again.1);
    assert_eq!(before["source"].take(), node);
    assert_eq!(after["source"].take(), "kept.json");
    assert_eq!(before, after);

    let other = "ab".repeat(32);
    let of_other = [
        "--evidence",
        "kept.json",
        "--cluster-id",
        &other,
        "-o",
        "json",
    ];
    let (code, refused, said) = run("verify", &of_other);
    assert_eq!(code, 3, "{said}");
    assert_eq!(refused["verdict"], "refused");
    assert!(refused["reason"].as_str().unwrap().contains("PCR 15"));
    let registers = refused["registers"].as_array().unwrap();
    let register = registers.iter().find(|it| it["index"] == 15).unwrap();
    assert_eq!(register["verdict"], "differs");
    assert_eq!(register["got"], "00".repeat(32));
    assert!(register["expected"].as_str().unwrap().len() == 64);
    let explained = run("explain", &["kept.json", "-o", "json"]);
    assert!(
        explained.0 == 1 && explained.1["registers"].is_array(),
        "{}",
        explained.2
    );

    // a refused machine's evidence is kept, too
    let asked = run(
        "verify",
        &[node, "--cluster-id", &other, "--save", "refused.json"],
    );
    assert_eq!(asked.0, 3, "{}", asked.2);
    let again = run(
        "verify",
        &[&["--evidence", "refused.json"], &json[..]].concat(),
    );
    assert_eq!(again.0, 0, "{}", again.2);

    let kept = fs::read_to_string(setting.path("kept.json")).unwrap();
    let kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
    let replaced = |path: &str, value: &str| {
        let mut changed = kept.clone();
        *changed.pointer_mut(path).unwrap() = value.into();
        setting.file("changed.json", changed.to_string());
        run(
            "verify",
            &[&["--evidence", "changed.json"], &json[..]].concat(),
        )
    };
    let zeros = "A".repeat(43) + "=";
    let (code, _, said) = replaced("/session/digest", &zeros);
    assert!(
        code == 3 && said.contains("for another connection"),
        "{said}"
    );
    let (code, report, said) = replaced("/nonce", &zeros);
    assert!(code == 3 && said.contains("nonce does not match"), "{said}");
    // the command shows only values that the TPM signed
    assert_eq!(report["registers"], serde_json::json!([]));
    let (code, _, said) = replaced("/form", "old");
    assert!(code == 1 && said.contains("has a session"), "{said}");
    let (code, _, said) = run("verify", &["--fresh"]);
    assert!(code == 2 && said.contains("--evidence"), "{said}");
}

#[test]
fn a_node_that_waits_for_its_key_says_for_which_and_whom_it_asked() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let _node = Program::start(&mut setting.unlock(&disk));
    wait_for_port(setting.node(9999));
    let policy = setting.policy().display().to_string();
    let host = setting.host(2).to_string();
    // its TPM, an emulated one, has no event log, so nothing explains what its firmware measured
    let args = ["explain", &host, "--policy", &policy, "--timeout", "60s"];
    let explained = setting.firstlight(&args).output().unwrap();
    let text = String::from_utf8([explained.stdout, explained.stderr].concat()).unwrap();
    assert!(
        text.contains("PCR 15: as expected") && text.contains("PCR 7: not explained"),
        "{text}"
    );
    let waiting = format!("{host}:9999");
    let proven = verify(&setting, &waiting, &["--fresh"]);
    let facts = [
        "proven",
        "strong",
        "role:      server",
        "cluster:   none",
        "000b",
        "named",
        "PCR 15  as expected        00000000..  the ID of the cluster",
    ];
    expect(&proven, 0, &facts);
    let id = ["--cluster-id", &"ab".repeat(32)];
    let refused = verify(&setting, &waiting, &id);
    expect(&refused, 3, &["attestation refused", "PCR 15  differs"]);
    let nobody = verify(
        &setting,
        &format!("{host}:9998"),
        &["--fresh", "-o", "json"],
    );
    expect(&nobody, 4, &["9998", r#""verdict": "unreachable""#]);
    evidence_is_judged_again(&setting, &waiting, &policy);
    let unknown = verify(&setting, &waiting, &["--state=absent.json"]);
    expect(&unknown, 2, &["the cluster's ID is unknown"]);
    let said = status(&setting, &host, &policy);
    let attested = format!("{host}:9999 (recovery server): attested, meets the policy");
    let elsewhere = [
        format!("{host}:9000 (InitServer): no answer"),
        format!("{host}:30090 (join service): no answer"),
    ];
    let uuid = Command::new("cryptsetup")
        .arg("luksUUID")
        .arg(&disk)
        .output()
        .unwrap();
    let uuid = String::from_utf8(uuid.stdout).unwrap();
    assert!(!uuid.is_empty());
    let facts = [
        "Node:        in its initramfs, waiting for the key",
        uuid.trim(),
        "Since:",
    ];
    expect(
        &said,
        5,
        &[
            &attested,
            &elsewhere[0],
            &elsewhere[1],
            facts[0],
            facts[1],
            facts[2],
        ],
    );

    // the chart of its boot so far
    let picture = setting.path("boot.svg");
    let drawn = ["status", &host, "--policy", &policy, "--timeline", "--svg"];
    let output = setting.firstlight(&drawn).arg(&picture).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let rows = [
        "ended at",
        "unlock kernel and initrd",
        "unlock attestation-key: 000b",
    ];
    expect(&(output.status.code().unwrap(), text), 5, &rows);
    let picture = fs::read_to_string(&picture).unwrap();
    assert!(
        picture.contains("unlock attestation-key: 000b"),
        "{picture}"
    );

    let other = setting
        .policy_of(&[(15, [0; 32]), (4, [7; 32])])
        .display()
        .to_string();
    expect(
        &status(&setting, &host, &other),
        3,
        &["attestation refused", "PCR 4: expected 0707", "got "],
    );
}

#[test]
fn a_node_is_fresh_until_its_init_and_a_member_of_that_cluster_from_then_on() {
    let mut setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    wait_for_port(setting.node(9000));
    let policy = setting.policy().display().to_string();
    let host = setting.host(2).to_string();
    let attested = format!("{host}:9000 (InitServer): attested, meets the policy");
    let elsewhere = "9999 (recovery server): no";
    expect(
        &status(&setting, &host, &policy),
        6,
        &[&attested, "waiting for `firstlight init`", elsewhere],
    );
    // only one server of the node
    let said = status(&setting, &format!("{host}:9000"), &policy);
    expect(&said, 6, &[&attested]);
    assert!(!said.1.contains("9999"), "{}", said.1);

    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    node.expect("member: `firstlight status` is answered");
    let state: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(setting.path("firstlight-state.json")).unwrap())
            .unwrap();
    let member = format!("{host}:9000 (member): attested, meets the policy");
    let of_this = format!(
        "a member of this cluster, {}",
        state["clusterID"].as_str().unwrap()
    );
    expect(&status(&setting, &host, &policy), 0, &[&member, &of_this]);

    // the operator's state names the cluster and the key
    let proven = verify(&setting, &host, &["-o", "json"]);
    assert_eq!(proven.0, 0, "{}", proven.1);
    let proven: serde_json::Value = serde_json::from_str(&proven.1).unwrap();
    assert_eq!(proven["verdict"], "proven");
    assert_eq!(proven["cluster"], state["clusterID"]);
    expect(&verify(&setting, &host, &["--fresh"]), 3, &["PCR 15"]);

    // the operator has another cluster, or the ID is unknown
    let with = |more: &[&str]| {
        let args = [&["status", &host, "--policy", &policy], more].concat();
        let output = setting.firstlight(&args).output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8([output.stdout, output.stderr].concat()).unwrap(),
        )
    };
    let other = "ab".repeat(32);
    expect(
        &with(&["--cluster-id", &other]),
        7,
        &[&member, &format!("of another cluster than {other}")],
    );
    expect(
        &with(&["--state", "absent.json"]),
        7,
        &[&member, "whether it is yours"],
    );
    expect(
        &with(&["--cluster-id", "ab"]),
        2,
        &["64 hexadecimal digits"],
    );

    // the duration of each step of its boot: from the node, and from its file
    let drawn = with(&["--timeline"]);
    let rows = [
        "run    phase: state disk",
        "run    phase: emergency SSH",
        "run    member:",
    ];
    expect(&drawn, 0, &rows);
    let output = setting
        .firstlight(&["timeline"])
        .arg(setting.path("timeline"))
        .output();
    let chart = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(
        chart.contains("ended at") && drawn.1.contains(&chart),
        "{chart}"
    );

    // registers that do not meet the policy are a different result, with their numbers
    let altered = setting
        .policy_of(&[(15, [0; 32]), (4, [7; 32])])
        .display()
        .to_string();
    let said = status(&setting, &host, &altered);
    expect(&said, 3, &["attestation refused", "PCR 4: expected 0707"]);
    assert!(!said.1.contains("PCR 15"), "{}", said.1);
    let policy = setting.policy().display().to_string();

    // it offers no method but health and the record of its boot, and needs little memory while it runs
    let mut second = init(&setting, INIT_SECRET, &setting.policy());
    assert!(!second.exit().success());
    let memory = fs::read_to_string(format!("/proc/{}/status", node.id())).unwrap();
    let resident = memory
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let resident: u64 = resident
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    println!("a member has {resident} KiB resident");
    assert!(resident < 16 << 10, "{resident} KiB");
    node.terminate();
    assert!(node.exit().success());

    // after a reboot it is also a member: unlock has measured the cluster, and has left the certificate of the rejoin ticket
    let key = ssh::host::host_key(&setting.path("mount")).unwrap();
    let authority = ssh::Authority::from_seed(&Secret::new(vec![9; 32])).unwrap();
    let renewed = authority
        .host_certificate(&key, &["node-1".to_owned()], SystemTime::now())
        .unwrap();
    handover::leave_host_certificate(&setting.path("state.key"), renewed.as_bytes()).unwrap();
    let mut again = Program::start(&mut setting.bootstrapper(&disk));
    again.expect("member: `firstlight status` is answered");
    assert!(
        again
            .output()
            .contains("ssh: the host certificate is renewed"),
        "{}",
        again.output()
    );
    let certificate = fs::read_to_string(setting.path("mount/ssh/ssh_host_cert.pub")).unwrap();
    assert_eq!(certificate.trim_end(), renewed.trim_end());
    expect(&status(&setting, &host, &policy), 0, &[&of_this]);
    again.terminate();
    assert!(again.exit().success());

    // a fresh node, since the TPM belongs to no cluster
    setting.tpm.reboot();
    let _unlock = Program::start(&mut setting.unlock(&disk));
    wait_for_port(setting.node(9999));
    expect(
        &status(&setting, &host, &policy),
        5,
        &["waiting for the key of its disk"],
    );
}

#[test]
fn many_who_ask_a_member_at_once_are_turned_away_and_the_next_is_answered() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    let policy = setting.policy().display().to_string();
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    node.expect("member: `firstlight status` is answered");
    let idle: Vec<_> = (0..64)
        .map(|_| std::net::TcpStream::connect(setting.node(9000)).unwrap())
        .collect();
    let threads = fs::read_dir(format!("/proc/{}/task", node.id()))
        .unwrap()
        .count();
    assert!(threads < 32, "{threads} threads");
    drop(idle);
    // until the server knows that they are closed, it may turn this caller away too
    let member = format!("{}:9000", setting.host(2));
    let asked = Instant::now();
    let mut said = status(&setting, &member, &policy);
    while said.0 == 4 && asked.elapsed() < PATIENCE {
        said = status(&setting, &member, &policy);
    }
    expect(&said, 0, &["a member of this cluster"]);
}

#[test]
fn a_join_service_wants_proof_and_gives_none() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let policy = setting.policy();
    let _join = setting.join_service(3, keys, &policy);
    let host = setting.host(3).to_string();
    let guarded =
        format!("{host}:30090 (join service): proves nothing, and requires a proof from callers");
    let said = status(&setting, &host, &policy.display().to_string());
    // the key service on that machine does not use TLS
    expect(
        &said,
        8,
        &[
            &guarded,
            "probably a control plane of a cluster",
            ":9000 (InitServer): no answer: ",
        ],
    );
}

#[test]
fn nobody_at_all_is_4_and_nonsense_is_2() {
    let setting = Setting::new();
    let policy = setting.policy().display().to_string();
    expect(
        &status(&setting, &setting.host(9).to_string(), &policy),
        4,
        &["no server answers", "refused"],
    );
    expect(
        &status(&setting, "http://node", &policy),
        2,
        &["is not an endpoint"],
    );
    expect(
        &status(&setting, &setting.host(9).to_string(), "absent.json"),
        1,
        &["absent.json"],
    );
}
