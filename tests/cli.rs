//! The operator's command as the operator sees it: output, exit codes, files. The nodes here prove nothing; tests/services.rs
//! has nodes that do.

use support::swtpm;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::simple_server::SimpleServer;
use swtpm::Swtpm;
use tempfile::TempDir;
use verifier::Policy;

const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"11":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}},"require":"strong"}"#;

/// The program without the proxy of the person who runs the tests.
fn program() -> Command {
    let mut command = Command::new(support::program::built("firstlight"));
    command.env_remove("HTTPS_PROXY").env_remove("https_proxy");
    command
}

fn firstlight(dir: &Path, args: &[&str]) -> Output {
    let mut command = program();
    // a kubeconfig of the user who runs the tests would override that of the folder
    command
        .args(args)
        .env_remove("KUBECONFIG")
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs the command; returns exit code and standard error.
fn failure(dir: &Path, args: &[&str]) -> (i32, String) {
    let output = firstlight(dir, args);
    (output.status.code().unwrap(), text(&output.stderr))
}

fn write(dir: &Path, name: &str, content: &str, mode: u32) {
    fs::write(dir.join(name), content).unwrap();
    fs::set_permissions(dir.join(name), Permissions::from_mode(mode)).unwrap();
}

/// A folder with a policy and an init secret.
fn workspace() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "policy.json", POLICY, 0o644);
    write(dir.path(), "init-secret", "correct horse\n", 0o600);
    dir
}

fn init<'a>(endpoint: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    // a test that fails must not wait for the default of ten minutes
    let needed = [
        "init",
        "--timeout",
        "5s",
        "--endpoint",
        endpoint,
        "--policy",
        "policy.json",
        "--init-secret",
        "init-secret",
    ];
    [&needed, more].concat()
}

const RECOVER: [&str; 4] = [
    "recover",
    "--timeout=5s",
    "--endpoint=x",
    "--policy=policy.json",
];

/// An address on which no program listens. The kernel gives no port below 1024 to the other tests that run meanwhile.
const NOBODY: &str = "127.0.0.1:1";

#[test]
fn a_failure_in_json_has_its_kind_and_the_exit_code_of_the_kind() {
    let dir = workspace();
    for (args, kind, code) in [
        (&["verify"][..], "usage", 2),
        (&["verify", "--evidence", "missing.json"], "file", 1),
        (&["verify", "--evidence", "policy.json"], "content", 1),
        (
            &["recover", "--status", "--timeout", "1s", NOBODY],
            "unreachable",
            4,
        ),
    ] {
        let more = ["--policy", "policy.json", "-o", "json"];
        let output = firstlight(dir.path(), &[args, &more].concat());
        let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let error = &printed["error"];
        assert_eq!(
            (error["kind"].as_str(), output.status.code()),
            (Some(kind), Some(code)),
            "{args:?}"
        );
        let said = text(&output.stderr);
        assert!(said.contains(error["text"].as_str().unwrap()), "{said}");
    }
}

#[test]
fn a_cause_has_the_same_kind_in_each_command() {
    let dir = workspace();
    write(dir.path(), "bad", "{}", 0o600);
    for command in [
        "policy show FILE",
        "policy diff policy.json FILE",
        "status --policy FILE 127.0.0.1:1",
        "init --endpoint x --policy FILE --init-secret init-secret",
        "apply --policy policy.json --image i --print --master-secret FILE",
        "upgrade --components list --kubeconfig FILE v1.36.4",
        "timeline FILE",
        "verify --policy policy.json --evidence FILE",
        "recover --policy policy.json --master-secret FILE 127.0.0.1:1",
        "share --threshold 2 --shares 3 --master-secret FILE",
        "wrap --kms kms://vault --master-secret FILE",
        "ssh --key policy.json --master-secret FILE",
    ] {
        let kind = |file: &str| {
            let command = format!("{} -o json", command.replace("FILE", file));
            let output = firstlight(dir.path(), &command.split(' ').collect::<Vec<_>>());
            let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            (output.status.code(), printed["error"]["kind"].to_string())
        };
        assert_eq!(kind("missing"), (Some(1), r#""file""#.into()), "{command}");
        assert_eq!(kind("bad"), (Some(1), r#""content""#.into()), "{command}");
    }
}

/// Starts an init that waits for a node.
fn waiting_init(dir: &Path, stdout: Stdio, stderr: Stdio) -> Child {
    program()
        .args(init(NOBODY, &["--timeout", "60s"]))
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .unwrap()
}

#[test]
fn no_core_dump_takes_the_master_secret_along() {
    let dir = workspace();
    let mut waiting = waiting_init(dir.path(), Stdio::piped(), Stdio::null());
    // it has printed that it made a master secret
    waiting.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", waiting.id())).unwrap();
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    support::secrets::assert_no_core_dumps(&limits);
}

#[test]
fn help_goes_to_standard_output_and_has_examples() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        &["--help"][..],
        &["-h"],
        &["help"],
        &["help", "init"],
        &["init", "--help"],
        &["measure", "-h"],
        &["man", "--help"],
    ] {
        let output = firstlight(dir.path(), args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(text(&output.stdout).contains("Example"), "{args:?}");
        assert!(output.stderr.is_empty(), "{args:?}");
    }
    for args in [["--version"], ["-V"], ["version"]] {
        let version = text(&firstlight(dir.path(), &args).stdout);
        let number = concat!("firstlight ", env!("CARGO_PKG_VERSION"));
        // a build of a checkout names its commit
        assert!(version.starts_with(number), "{version}");
        assert_eq!(version.lines().count(), 1, "{version}");
    }
}

#[test]
fn arguments_that_make_no_sense_exit_with_2_and_point_to_the_help() {
    let dir = workspace();
    let endpoint = init("http://x/", &[]);
    let timeout = init("x", &["--timeout", "soon"]);
    let cases: [(&[&str], &str); 28] = [
        (&[], "a command is missing"),
        (&["destroy"], "unrecognized subcommand 'destroy'"),
        (&["inti"], "a similar subcommand exists: 'init'"),
        (&["help", "recovr"], "'recovr'"),
        (&["machine", "reboot"], "<NAME>..."),
        (&["--fast"], "--fast"),
        (&["migrate", "aply"], "a similar value exists: 'apply'"),
        (
            &["migrate", "plan", "--end"],
            "--end is not for this action",
        ),
        (
            &["migrate", "undo", "--master-secret", "-"],
            "each step reads it again",
        ),
        (&["--versoin"], "a similar argument exists: '--version'"),
        (
            &["init"],
            "--policy <FILE>\n  --init-secret <FILE>\n\nUsage: firstlight init",
        ),
        (
            &["init", "--policy", "p", "--init-secret", "s"],
            "--endpoint is missing",
        ),
        (
            &["recover", "x", "--endpoint", "x", "--policy", "p"],
            "cannot be used with '--endpoint <HOST[:PORT]>'",
        ),
        (
            &[
                "init",
                "x",
                "--policy",
                "p",
                "--init-secret",
                "s",
                "--kubernetes-version",
                "v1.30.0",
            ],
            "Kubernetes v1.30.0 is not supported",
        ),
        (&["version", "--foo"], "unexpected argument '--foo' found"),
        (
            &["-o", "json", "completions", "bash"],
            "unexpected argument '--output' found",
        ),
        (&["-o", "yaml", "roots"], "possible values: text, json"),
        (&["help", "init", "extra"], "extra"),
        (
            &["recover", "--endpont", "x"],
            "a similar argument exists: '--endpoint'",
        ),
        (&["metadata", "--machines", "m"], "<ACTION>"),
        (&["completions"], "<SHELL>"),
        (
            &["verify", "x", "--policy", "p", "-o", "yaml"],
            "possible values: text, json",
        ),
        (&["recover", "--endpoint", "x"], "--policy <FILE>"),
        (&endpoint, "is not an endpoint"),
        (&["init", "--endpoint"], "--endpoint"),
        (&timeout, "expected 1s to 24h"),
        (&["roots", "extra"], "extra"),
        (
            &[
                "recover",
                "--endpoint",
                "x",
                "--policy",
                "p",
                "--status",
                "--master-secret",
                "m",
            ],
            "'--status' cannot be used with",
        ),
    ];
    for (args, expected) in cases {
        let (code, stderr) = failure(dir.path(), args);
        assert_eq!(code, 2, "{args:?}: {stderr}");
        assert!(
            stderr.contains(expected) && stderr.contains("--help"),
            "{args:?}: {stderr}"
        );
    }
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        2,
        "nothing was written"
    );
}

#[test]
fn files_that_are_missing_or_wrong_exit_with_1_and_are_named() {
    let dir = workspace();
    write(dir.path(), "bad.json", "{", 0o644);
    write(dir.path(), "empty", "\n", 0o600);
    write(dir.path(), "loose", "secret", 0o640);
    for (args, expected) in [
        (init("x", &["--policy", "nothing.json"]), "nothing.json"),
        (init("x", &["--policy", "bad.json"]), "bad.json"),
        (init("x", &["--init-secret", "nothing"]), "nothing"),
        (init("x", &["--init-secret", "empty"]), "is empty"),
        (init("x", &["--init-secret", "loose"]), "chmod 600 loose"),
        (
            init("x", &["--init-secret", "-"]),
            "the init secret in - is empty",
        ),
        (
            init("x", &["--kubeconfig", "policy.json"]),
            "policy.json exists",
        ),
        (RECOVER.to_vec(), "firstlight-mastersecret.json"),
    ] {
        let (code, stderr) = failure(dir.path(), &args);
        assert_eq!(code, 1, "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
    assert!(!dir.path().join("firstlight-mastersecret.json").exists());
}

#[test]
fn a_master_secret_that_others_may_read_is_neither_used_nor_changed() {
    let dir = workspace();
    let content = r#"{"key":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","salt":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="}"#;
    write(dir.path(), "firstlight-mastersecret.json", content, 0o644);
    for args in [init("x", &[]), RECOVER.to_vec()] {
        let (code, stderr) = failure(dir.path(), &args);
        assert_eq!(code, 1, "{stderr}");
        assert!(
            stderr.contains("chmod 600 firstlight-mastersecret.json"),
            "{stderr}"
        );
    }
    assert_eq!(
        fs::read_to_string(dir.path().join("firstlight-mastersecret.json")).unwrap(),
        content
    );
}

#[test]
fn a_node_that_is_not_there_exits_with_4_and_a_second_try_uses_the_same_secrets() {
    let dir = workspace();
    let files =
        ["firstlight-mastersecret.json", "firstlight-state.json"].map(|name| dir.path().join(name));

    let started = Instant::now();
    let (code, stderr) = failure(dir.path(), &init(NOBODY, &["--timeout", "4"]));
    assert_eq!(code, 4, "{stderr}");
    assert!(
        started.elapsed() >= Duration::from_secs(4),
        "it gave up too early: {stderr}"
    );
    assert!(
        stderr.contains("waiting for")
            && stderr.contains("refused")
            && stderr.contains("gave up after "),
        "{stderr}"
    );
    assert!(stderr.contains(NOBODY), "{stderr}");
    let first = files.clone().map(|file| fs::read(file).unwrap());
    for file in &files {
        assert_eq!(
            fs::metadata(file).unwrap().permissions().mode() & 0o777,
            0o600,
            "{}",
            file.display()
        );
    }

    let output = firstlight(dir.path(), &init(NOBODY, &["--timeout", "1s"]));
    assert_eq!(output.status.code(), Some(4));
    assert!(
        text(&output.stdout).contains("Using the master secret"),
        "{}",
        text(&output.stdout)
    );
    assert_eq!(files.map(|file| fs::read(file).unwrap()), first);
}

#[test]
fn an_interrupted_wait_says_what_stays() {
    let dir = workspace();
    let mut waiting = waiting_init(dir.path(), Stdio::null(), Stdio::piped());
    let mut stderr = BufReader::new(waiting.stderr.take().unwrap());
    let mut told = String::new();
    while !told.contains("refused") {
        assert!(stderr.read_line(&mut told).unwrap() > 0, "{told}");
    }
    let id = waiting.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &id])
            .status()
            .unwrap()
            .success()
    );
    stderr.read_to_string(&mut told).unwrap();
    assert_eq!(waiting.wait().unwrap().code(), Some(130), "{told}");
    let end = "firstlight init: SIGINT: nothing was sent to a node; the master secret stays in its file, and the next init uses it\n";
    assert!(told.ends_with(end), "{told}");
}

#[test]
fn the_form_of_the_output_may_stand_before_the_command() {
    let dir = workspace();
    let json = |args: &[&str]| -> serde_json::Value {
        let output = firstlight(dir.path(), args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    for args in [
        &["-o", "json", "version"][..],
        &["version", "-o", "json"],
        &["--output=json", "--version"],
    ] {
        assert_eq!(json(args)["version"], env!("CARGO_PKG_VERSION"), "{args:?}");
    }
    // options after the command's name take effect
    let output = firstlight(dir.path(), &["-o", "json", "version", "-o", "text"]);
    assert!(text(&output.stdout).starts_with("firstlight "));
    let hash = &json(&["-o", "json", "hash-secret", "init-secret"])["initSecretHash"];
    assert!(hash.as_str().unwrap().starts_with("$2a$10$"), "{hash}");
    let secret = r#"{"key":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","salt":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="}"#;
    write(dir.path(), "firstlight-mastersecret.json", secret, 0o600);
    let shares = json(&["share", "--threshold=2", "--shares=3", "-o=json"]);
    assert_eq!(
        shares["shares"][2]["file"],
        "firstlight-shares/share-3-of-3.txt"
    );
    let key =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPiXzUZ8Hs6hYYXW3Yd1mRUbsjYVkYQtnVLyWVvjJ6b a@b";
    write(dir.path(), "key.pub", key, 0o644);
    let certified = json(&["ssh", "--key=key.pub", "-o", "json"]);
    assert_eq!(certified["certificate"], "firstlight-ssh-cert.pub");
}

/// Runs the command with these kubeconfigs in the environment; returns exit code and standard error.
fn with_kubeconfig(dir: &Path, kubeconfig: &str, args: &[&str]) -> (i32, String) {
    let mut command = program();
    let output = command
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn the_kubeconfig_of_the_environment_is_used_unless_an_option_names_another() {
    let dir = workspace();
    let status = ["status", "--policy", "policy.json", "--timeout", "1"];
    let (_, stderr) = with_kubeconfig(dir.path(), "", &status);
    assert!(stderr.contains("firstlight-admin.conf"), "{stderr}");
    let (_, stderr) = with_kubeconfig(dir.path(), "missing-one:missing-two", &status);
    assert!(stderr.contains("cannot read missing-one"), "{stderr}");
    write(dir.path(), "firstlight-admin.conf", "a: b", 0o600);
    let (_, stderr) = with_kubeconfig(dir.path(), "missing-one", &status);
    let warning = "firstlight: warning: using the kubeconfig of $KUBECONFIG, not firstlight-admin.conf in this folder";
    assert!(
        stderr.starts_with(warning) && stderr.contains("cannot read missing-one"),
        "{stderr}"
    );
    let named = [&status[..], &["--kubeconfig", "firstlight-admin.conf"]].concat();
    let (_, stderr) = with_kubeconfig(dir.path(), "missing-one", &named);
    assert!(
        stderr.contains("firstlight-admin.conf: current-context is missing")
            && !stderr.contains("warning"),
        "{stderr}"
    );
}

#[test]
fn a_node_is_named_in_either_form_by_every_command() {
    let dir = workspace();
    for command in ["init", "recover", "status", "verify", "explain"] {
        for node in [&[NOBODY][..], &["--endpoint", NOBODY]] {
            let more: &[&str] = match command {
                "init" => &["--policy=policy.json", "--init-secret=init-secret"],
                "recover" => &["--policy=policy.json", "--status"],
                "verify" => &["--policy=policy.json", "--fresh"],
                _ => &["--policy=policy.json"],
            };
            let args = [&[command], node, more, &["--timeout=1"]].concat();
            let (code, stderr) = failure(dir.path(), &args);
            assert!(code == 4 && stderr.contains(NOBODY), "{args:?}: {stderr}");
        }
    }
}

#[test]
fn a_server_without_an_address_is_said_at_once() {
    let dir = workspace();
    let ca = rcgen::generate_simple_self_signed(vec!["kubernetes".into()]).unwrap();
    let ca = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, ca.cert.pem());
    let kubeconfig = format!(
        "current-context: x\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\nclusters:\n- name: c\n  cluster: \
         {{server: 'https://nowhere.invalid:6443', certificate-authority-data: {ca}}}\nusers:\n- name: u\n  user: {{token: t}}\n"
    );
    write(dir.path(), "firstlight-admin.conf", &kubeconfig, 0o600);
    let started = Instant::now();
    let (code, stderr) = failure(
        dir.path(),
        &["status", "--policy=policy.json", "--timeout=10m"],
    );
    assert!(
        code == 4 && stderr.contains("https://nowhere.invalid:6443 has no address: "),
        "{stderr}"
    );
    support::promptly::assert_no_wait(started, Duration::from_secs(15));
}

#[test]
fn a_file_in_the_present_folder_has_defaults_and_the_command_line_replaces_them() {
    let dir = workspace();
    let config = format!(
        "policy = 'policy.json'\ntimeout = 1\n[init]\nendpoint = '{NOBODY}'\ninit-secret = 'nothing'\n"
    );
    write(dir.path(), "firstlight.toml", &config, 0o644);
    let (code, stderr) = failure(dir.path(), &["init"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("cannot open nothing"), "{stderr}");
    let (code, stderr) = failure(dir.path(), &["init", "--init-secret", "init-secret"]);
    assert_eq!(code, 4, "{stderr}");
    assert!(stderr.contains(NOBODY), "{stderr}");
    // when the command runs in another folder, the file's paths are relative to the file's folder
    let elsewhere = tempfile::tempdir().unwrap();
    let config = dir.path().join("firstlight.toml");
    let args = ["status", NOBODY, "--config", config.to_str().unwrap()];
    let (code, stderr) = failure(elsewhere.path(), &args);
    assert_eq!(code, 4, "{stderr}");
    let (code, stderr) = failure(elsewhere.path(), &["status", NOBODY]);
    assert!(code == 2 && stderr.contains("--policy <FILE>"), "{stderr}");
    write(dir.path(), "firstlight.toml", "polcy = 'p'\n", 0o644);
    let (code, stderr) = failure(dir.path(), &["roots"]);
    assert_eq!(code, 1);
    assert!(
        stderr.contains("firstlight.toml: there is no option \"polcy\"; did you mean policy?"),
        "{stderr}"
    );
    // the command decides where its secrets are, but a program of another user must not choose the policy
    write(dir.path(), "firstlight.toml", "policy = 'p'\n", 0o666);
    let (code, stderr) = failure(dir.path(), &["roots"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("other users can change it"), "{stderr}");
    assert!(
        failure(dir.path(), &["roots", "--config", "missing"])
            .1
            .contains("cannot open missing")
    );
}

#[test]
fn a_cluster_that_was_made_is_not_made_again() {
    let dir = workspace();
    let id = "ab".repeat(32);
    let state = format!(
        r#"{{"version":1,"measurementSalt":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","clusterID":"{id}"}}"#
    );
    write(dir.path(), "firstlight-state.json", &state, 0o600);
    let (code, stderr) = failure(dir.path(), &init("x", &[]));
    assert_eq!(code, 1);
    assert!(
        stderr.contains(&id) && stderr.contains("firstlight-state.json"),
        "{stderr}"
    );
}

/// Accepts connections during the test, and passes each to `talk`.
fn strange_node(talk: impl Fn(&mut std::net::TcpStream) + Send + Sync + Copy + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || talk(&mut stream.unwrap()));
        }
    });
    address.to_string()
}

#[test]
fn nodes_that_hang_hang_up_or_talk_nonsense_do_not_outlast_the_timeout() {
    let silent = strange_node(|stream| drop(stream.read_to_end(&mut vec![])));
    let closing = strange_node(|_| {});
    let noisy = strange_node(|stream| {
        while stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .is_ok()
        {}
    });
    for endpoint in [silent, closing, noisy] {
        let dir = workspace();
        let started = Instant::now();
        let (code, stderr) = failure(dir.path(), &init(&endpoint, &["--timeout", "3s"]));
        assert_eq!(code, 4, "{stderr}");
        support::promptly::assert_no_wait(started, Duration::from_secs(3));
        assert!(!stderr.contains("correct horse"), "{stderr}");
    }
}

#[test]
fn measure_prints_the_policy_of_what_the_tpm_holds() {
    let dir = tempfile::tempdir().unwrap();
    let tpm = Swtpm::start();
    tpm.tool(
        "tpm2_pcrextend",
        &[&format!("9:sha256={}", "ab".repeat(32))],
    );
    tpm.tool(
        "tpm2_pcrextend",
        &[&format!("15:sha256={}", "cd".repeat(32))],
    );
    let output = firstlight(dir.path(), &["measure", "--tpm", &tpm.location()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let policy = text(&output.stdout);
    Policy::from_json(&policy).unwrap();
    let json: serde_json::Value = serde_json::from_str(&policy).unwrap();
    let measurements = json["measurements"].as_object().unwrap();
    assert_eq!(measurements.len(), 9, "{policy}");
    let pcr9 = measurements["9"]["expected"].as_str().unwrap();
    let shown = tpm.tool("tpm2_pcrread", &["sha256:9"]).to_lowercase();
    assert!(shown.contains(pcr9) && pcr9 != "0".repeat(64), "{shown}");
    // the policy is for a machine that belongs to no cluster, although this one does
    assert_eq!(measurements["15"]["expected"], "0".repeat(64));
    // the name that tpm2-tools print for the machine's attestation key
    let public = tpm.tool("tpm2_readpublic", &["-c", "0x81008f01"]);
    let name = public
        .lines()
        .find_map(|line| line.strip_prefix("name: "))
        .unwrap();
    assert_eq!(json["attestationKeys"], serde_json::json!([name]));
    assert_eq!(json["require"], "strong");
    let any = firstlight(
        dir.path(),
        &[
            "measure",
            "--tpm",
            &tpm.location(),
            "--trust-any-tpm",
            "--pcrs",
            "4",
            "--require",
            "any",
        ],
    );
    let any: serde_json::Value = serde_json::from_slice(&any.stdout).unwrap();
    assert!(
        any.get("attestationKeys").is_none()
            && any.get("require").is_none()
            && any["measurements"]["15"]["expected"] == "0".repeat(64),
        "{any}"
    );
    assert!(text(&output.stderr).contains("this machine probably belongs to a cluster"));
}

#[test]
fn measure_writes_no_policy_of_a_bank_that_the_firmware_does_not_extend() {
    let dir = tempfile::tempdir().unwrap();
    let mut tpm = Swtpm::start();
    let measure = |tpm: &Swtpm, more: &[&str]| {
        let location = tpm.location();
        let output = firstlight(
            dir.path(),
            &[&["measure", "--tpm", &location], more].concat(),
        );
        let texts = [text(&output.stdout), text(&output.stderr)];
        (output.status.code(), texts)
    };
    tpm.reset();
    for more in [&[][..], &["--pcrs", "9,11"]] {
        let (code, [policy, said]) = measure(&tpm, more);
        assert_eq!((code, policy.as_str()), (Some(1), ""), "{said}");
        assert!(said.contains("does not extend the SHA-256 bank"), "{said}");
    }
    tpm.reboot();
    let (code, [_, said]) = measure(&tpm, &[]);
    assert_eq!(code, Some(0), "{said}");
    // the command does not know the kernel of that machine
    assert!(said.contains("the host's ACPI tables"), "{said}");
}

#[test]
fn measure_adds_an_image_to_a_policy_with_the_registers_that_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let tpm = Swtpm::start();
    let measure = |args: &[&str]| {
        firstlight(
            dir.path(),
            &[&["measure", "--tpm", &tpm.location()], args].concat(),
        )
    };
    let first = measure(&["--pcrs", "4,9,15"]);
    std::fs::write(dir.path().join("policy.json"), &first.stdout).unwrap();
    let again = measure(&["--add-to", "policy.json", "--name", "image 2"]);
    assert!(
        text(&again.stderr).contains("already accepts this machine: the first image"),
        "{}",
        text(&again.stderr)
    );
    tpm.tool(
        "tpm2_pcrextend",
        &[&format!("4:sha256={}", "ab".repeat(32))],
    );
    assert_eq!(measure(&["--add-to", "policy.json"]).status.code(), Some(2));
    let both = measure(&["--add-to", "policy.json", "--name", "image 2"]);
    assert_eq!(both.status.code(), Some(0), "{}", text(&both.stderr));
    let policy = Policy::from_json(&text(&both.stdout)).unwrap();
    let [first_image, second] = policy.images() else {
        panic!("two images: {}", text(&both.stdout))
    };
    assert_eq!(
        first_image,
        &Policy::from_json(&text(&first.stdout)).unwrap().images()[0]
    );
    assert_eq!(
        (
            second.name(),
            second.measurements().keys().copied().collect::<Vec<_>>()
        ),
        ("image 2", vec![4, 9, 15])
    );
    assert_ne!(second.measurements()[&4], first_image.measurements()[&4]);
    assert_eq!(
        measure(&["--add-to", "missing.json", "--name", "x"])
            .status
            .code(),
        Some(1)
    );
}

#[test]
fn measure_says_which_tpm_it_did_not_reach() {
    let dir = tempfile::tempdir().unwrap();
    let (code, stderr) = failure(dir.path(), &["measure", "--tpm", "device:/nonexistent/tpm"]);
    assert!(
        code == 1 && stderr.contains("/nonexistent/tpm"),
        "{code} {stderr}"
    );
    for args in [["measure", "--tpm", "tpm0"], ["measure", "--pcrs", "4;9"]] {
        assert_eq!(failure(dir.path(), &args).0, 2, "{args:?}");
    }
}

#[test]
fn apply_makes_the_policy_of_the_cluster_require_the_strong_form() {
    let dir = workspace();
    let bytes = "A".repeat(43) + "=";
    let secret = format!(r#"{{"key":"{bytes}","salt":"{bytes}"}}"#);
    write(dir.path(), "firstlight-mastersecret.json", &secret, 0o600);
    let state = format!(r#"{{"version":1,"measurementSalt":"{bytes}"}}"#);
    write(dir.path(), "firstlight-state.json", &state, 0o600);
    let policy_of_cluster = |more: &[&str]| {
        let apply = [
            "apply",
            "--print",
            "--policy=policy.json",
            "--image=x.y/z:1",
        ];
        let printed = firstlight(dir.path(), &[&apply, more].concat());
        assert!(printed.status.success(), "{}", text(&printed.stderr));
        let list: serde_json::Value = serde_json::from_slice(&printed.stdout).unwrap();
        let objects = list["items"].as_array().unwrap().iter();
        let mut configs = objects.filter(|object| object["metadata"]["name"] == "join-config");
        let config = configs.next().unwrap();
        let policy = config["data"]["attestationConfig"].as_str().unwrap();
        Policy::from_json(policy).unwrap()
    };
    let (as_before, strong) = (
        policy_of_cluster(&[]),
        policy_of_cluster(&["--require=strong"]),
    );
    assert_eq!(as_before, Policy::from_json(POLICY).unwrap());
    assert_eq!(strong, as_before.requiring_strong());
    let unknown = failure(
        dir.path(),
        &[
            "apply",
            "--require=new",
            "--policy=policy.json",
            "--image=x",
        ],
    );
    assert!(
        unknown.0 == 2 && unknown.1.contains("strong"),
        "{unknown:?}"
    );
}

#[test]
fn apply_refuses_grants_with_which_the_key_service_would_not_start() {
    let dir = workspace();
    let refused = |grants: &str| {
        let policy = ["--policy=policy.json", "--image=x.y/z:1"];
        failure(
            dir.path(),
            &[&["apply", "--grants", grants], &policy[..]].concat(),
        )
    };
    for (grants, why) in [
        ("", "\"\": expected at least one grant"),
        ("anyone", "\"anyone\": expected CALLER=CLASS,CLASS.."),
        ("a=disk", "\"a\": expected NAMESPACE/NAME"),
        ("a/b=disks", "\"disks\": expected disk, volume"),
        ("a/b=disk;a/b=ssh", "\"a/b\": this caller has two grants"),
        (
            "a/b=disk;local=disk",
            "\"local\": expected NAMESPACE/NAME or anyone",
        ),
        (
            "member=disk",
            "\"member\": expected NAMESPACE/NAME or anyone",
        ),
    ] {
        let (code, stderr) = refused(grants);
        assert_eq!(code, 2, "{stderr}");
        assert!(
            stderr.contains("--grants <") && stderr.contains(why),
            "{stderr}"
        );
    }
    // the next error is another one: the master secret is missing
    let (code, stderr) = refused("a/b=disk,id:c; anyone=id:s3proxy-kek");
    assert!(code != 2 && !stderr.contains("--grants"), "{stderr}");
}

/// Without a list of components `init` asks the servers of Kubernetes. Here they are behind a proxy that does not answer.
#[test]
fn an_init_without_a_list_of_components_makes_it_or_says_what_to_give() {
    let dir = tempfile::tempdir().unwrap();
    let policy = r#"{"measurements":{"4":{"expected":"1111111111111111111111111111111111111111111111111111111111111111"},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}},"require":"strong"}"#;
    std::fs::write(dir.path().join("policy.json"), policy).unwrap();
    let secret = dir.path().join("secret.txt");
    std::fs::write(&secret, "a secret of the operator").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let output = program()
        .args(["init", "--endpoint=127.0.0.1:1", "--policy=policy.json"])
        .args(["--init-secret=secret.txt", "--timeout=5s"])
        .args(["--kubernetes-version", "v1.33.1"])
        .env("HTTPS_PROXY", "http://127.0.0.1:1")
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(
        said.contains("Kubernetes v1.33 gets no more security updates since 2026-06-28"),
        "{said}"
    );
    assert!(
        said.contains("https://dl.k8s.io/v1.33.1/bin/linux/amd64/kubelet.sha256"),
        "{said}"
    );
    assert!(said.contains("give it with --components"), "{said}");
    assert!(!dir.path().join("firstlight-mastersecret.json").exists());
}

#[test]
fn errors_of_an_api_server_name_the_cause() {
    let version: fn(&str) -> (u16, &'static str) = |_| (200, r#"{"gitVersion":"v1.36.3"}"#);
    let page: fn(&str) -> _ = |_| (200, "<!DOCTYPE html>\n<title>Sign in</title>");
    let away: fn(&str) -> _ = |_| (503, "<html>no healthy upstream</html>");
    let refused: fn(&str) -> _ = |_| {
        (
            401,
            r#"{"kind":"Status","reason":"Unauthorized","message":"no"}"#,
        )
    };
    for (answer, server_end, client_end, exit, said) in [
        (
            version,
            2020,
            4000,
            4,
            "its certificate ended at 2020-07-31T00:00:00Z; see why the control plane has not renewed it",
        ),
        (
            refused,
            4000,
            2020,
            1,
            "the client certificate of the kubeconfig ended at 2020-07-31T00:00:00Z: copy",
        ),
        (
            refused,
            4000,
            4000,
            1,
            "the credentials are not valid, or no longer valid",
        ),
        (
            page,
            4000,
            4000,
            4,
            "an HTML page: a proxy, or another program than an API server",
        ),
        (away, 4000, 4000, 4, "(503): an HTML page: a proxy"),
    ] {
        let dir = workspace();
        let kubeconfig = SimpleServer {
            host: "127.0.0.1",
            answer,
            server_end,
            client_end,
        };
        write(
            dir.path(),
            "firstlight-admin.conf",
            &kubeconfig.start(),
            0o600,
        );
        let status = ["status", "--policy=policy.json", "--timeout=3"];
        let (code, stderr) = failure(dir.path(), &status);
        assert!(
            code == exit && stderr.contains(said),
            "{said}: {code} {stderr}"
        );
        assert!(!stderr.contains("1596"), "a time in seconds: {stderr}");
    }
}

#[test]
fn slips_are_named_with_what_is_right() {
    let dir = workspace();
    let ask = |args: &[&str]| failure(dir.path(), args).1;
    let said = ask(&["status", "--policy=policy.json", "--timeout=1"]);
    assert!(
        said.contains("name the kubeconfig by --kubeconfig or $KUBECONFIG"),
        "{said}"
    );
    let said = ask(&[
        "status",
        "node",
        "--policy=policy.json",
        "--attestation-variant=aws-sevsnp",
    ]);
    assert!(
        said.contains("a similar value exists: 'aws-sev-snp'"),
        "{said}"
    );
    let said = ask(&["apply", "--policy=policy.json", "--skip-helm-wait"]);
    assert!(!said.contains("unexpected argument"), "{said}");
    let said = ask(&[
        "status",
        "nowhere.invalid",
        "--policy=policy.json",
        "--timeout=3",
    ]);
    assert!(
        said.contains("cannot resolve the name nowhere.invalid: ") && !said.contains("is off"),
        "{said}"
    );
    // what an editor of Windows makes of a policy
    write(
        dir.path(),
        "policy.json",
        &format!("\u{feff}{POLICY}"),
        0o644,
    );
    let said = ask(&[
        "status",
        "127.0.0.1:1",
        "--policy=policy.json",
        "--timeout=1",
    ]);
    assert!(said.contains("no server answers"), "{said}");
}
