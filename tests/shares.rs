//! The master secret as shares: `firstlight share`, the commands that take shares in place of the secret, their input from a
//! terminal, and HashiCorp Vault's implementation of the same scheme as a peer.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use cli::workspace::shares::{Named, Share, join, lines, parse, split};
use support::foreign::go_program;
use tempfile::TempDir;

const SECRET: &str = "{\n\t\"key\": \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\",\n\t\"salt\": \"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\"\n}";

/// The fingerprint of no secret: a share of another tool has none.
const NO_FINGERPRINT: [u8; 4] = [0; 4];

fn firstlight(dir: &Path, args: &[&str]) -> Output {
    Command::new(support::program::built("firstlight"))
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// A folder with the master secret, three shares of it, of which any two restore it, and an SSH key to certify.
fn workspace() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    private(dir.path(), "firstlight-mastersecret.json", SECRET);
    private(
        dir.path(),
        "key.pub",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f someone",
    );
    let made = share(dir.path(), &[]);
    assert!(
        made.contains("firstlight-shares/share-3-of-3.txt"),
        "{made}"
    );
    dir
}

fn private(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).unwrap();
    fs::set_permissions(dir.join(name), Permissions::from_mode(0o600)).unwrap();
}

/// Makes three shares; returns standard output.
fn share(dir: &Path, more: &[&str]) -> String {
    let output = firstlight(
        dir,
        &[&["share", "--threshold", "2", "--shares", "3"], more].concat(),
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

const CERTIFY: [&str; 4] = ["ssh", "--key=key.pub", "--known-hosts=known", "--overwrite"];

fn certify(dir: &Path, from: &[&str]) -> Output {
    firstlight(dir, &[&CERTIFY, from].concat())
}

const ONE: &str = "firstlight-shares/share-1-of-3.txt";
const TWO: &str = "firstlight-shares/share-2-of-3.txt";
const THREE: &str = "firstlight-shares/share-3-of-3.txt";

/// The commands of docs/shares.md: the plain secret is never in a file.
#[test]
fn a_secret_that_age_encrypts_is_taken_from_standard_input() {
    let dir = workspace();
    assert!(certify(dir.path(), &[]).status.success());
    let hosts = fs::read_to_string(dir.path().join("known")).unwrap();
    fs::remove_file(dir.path().join("known")).unwrap();
    let shell = |commands: &str| {
        let path = std::env::var("PATH").unwrap();
        let program = support::program::built("firstlight");
        Command::new("sh")
            .args(["-c", commands])
            .current_dir(dir.path())
            .env(
                "PATH",
                format!("{}:{path}", program.parent().unwrap().display()),
            )
            .output()
            .unwrap()
    };
    let encrypt = "age-keygen -o me.txt 2>/dev/null && age -r $(age-keygen -y me.txt) -o secret.age \
        firstlight-mastersecret.json && rm firstlight-mastersecret.json";
    assert!(shell(encrypt).status.success());
    let decrypt = "age -d -i me.txt secret.age | firstlight ssh --key key.pub --known-hosts known --overwrite \
        --master-secret -";
    let output = shell(decrypt);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(dir.path().join("known")).unwrap(), hosts);

    // age does not decrypt with the key of another person
    let other = "age-keygen -o you.txt 2>/dev/null && mv you.txt me.txt";
    assert!(shell(other).status.success());
    let output = shell(decrypt);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("it is empty"),
        "{said}"
    );
}

#[test]
fn shares_take_the_place_of_the_secret() {
    let dir = workspace();
    for name in [ONE, TWO, THREE] {
        let mode = fs::metadata(dir.path().join(name)).unwrap().permissions();
        assert_eq!(mode.mode() & 0o7777, 0o600, "{name}");
    }
    assert!(certify(dir.path(), &[]).status.success());
    let hosts = fs::read_to_string(dir.path().join("known")).unwrap();
    // the authority for hosts is derived from the master secret
    fs::remove_file(dir.path().join("firstlight-mastersecret.json")).unwrap();
    fs::remove_file(dir.path().join("known")).unwrap();
    let output = certify(dir.path(), &["--share", THREE, "--share", ONE]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(dir.path().join("known")).unwrap(), hosts);
    // shares can be made of shares
    let qr = share(
        dir.path(),
        &["--share", ONE, "--share", TWO, "--out", "again", "--qr"],
    );
    assert!(qr.matches('█').count() > 1000, "{qr}");
    let again = [
        "--share",
        "again/share-1-of-3.txt",
        "--share",
        "again/share-2-of-3.txt",
    ];
    assert!(certify(dir.path(), &again).status.success());
    assert_eq!(fs::read_to_string(dir.path().join("known")).unwrap(), hosts);
}

#[test]
fn each_bad_share_is_named_with_its_fault() {
    let dir = workspace();
    let text = fs::read_to_string(dir.path().join(TWO)).unwrap();
    let code = text.lines().rev().nth(3).unwrap();
    let turned: String = code.chars().rev().collect();
    private(dir.path(), "damaged.txt", &text.replace(code, &turned));
    private(dir.path(), "cut.txt", &text[..text.len() - 30]);
    private(dir.path(), "empty.txt", "");
    private(dir.path(), "loose.txt", &text);
    fs::set_permissions(dir.path().join("loose.txt"), Permissions::from_mode(0o644)).unwrap();
    share(dir.path(), &["--out", "again"]);
    private(dir.path(), "other.json", &SECRET.replace("AQEB", "AQEC"));
    share(
        dir.path(),
        &["--master-secret", "other.json", "--out", "other"],
    );
    for (shares, expected) in [
        (&[ONE][..], "too few shares: 1 of 2"),
        (
            &[ONE, ONE],
            "is the same share as firstlight-shares/share-1-of-3.txt",
        ),
        (
            &[ONE, "damaged.txt"],
            "damaged.txt is not a whole share: its check is wrong",
        ),
        (
            &[ONE, "cut.txt"],
            "cut.txt is not a whole share: its check is wrong",
        ),
        (
            &[ONE, "empty.txt"],
            "empty.txt is not a whole share: it has no code",
        ),
        (&[ONE, "loose.txt"], "loose.txt may be read by others"),
        (&[ONE, "missing.txt"], "cannot open missing.txt"),
        (
            &[ONE, "again/share-2-of-3.txt"],
            "again/share-2-of-3.txt comes from another run",
        ),
        (
            &[ONE, "other/share-2-of-3.txt"],
            "other/share-2-of-3.txt is a share of another master secret",
        ),
        // without a terminal the command cannot ask for a share
        (&[ONE, "-"], "cannot ask for a share on the terminal"),
    ] {
        let args: Vec<&str> = shares.iter().flat_map(|path| ["--share", path]).collect();
        // a new session has no terminal, whatever terminal the test runs in
        let output = Command::new("setsid")
            .arg("--wait")
            .arg(support::program::built("firstlight"))
            .args(CERTIFY)
            .args(&args)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{shares:?}: {said}");
        assert!(said.contains(expected), "{shares:?}: {said}");
        for line in text
            .lines()
            .filter(|line| !line.contains(':') && !line.is_empty())
        {
            assert!(!said.contains(line), "a part of a share is in {said}");
        }
    }
    for (args, expected) in [
        (&["--threshold", "1", "--shares", "3"][..], "1 of 3 shares"),
        (&["--threshold", "4", "--shares", "3"], "4 of 3 shares"),
        (&["--threshold", "2", "--shares", "256"], "--shares"),
        (
            &["--threshold", "2", "--shares", "3"],
            "cannot create firstlight-shares/share-1-of-3.txt",
        ),
    ] {
        let output = firstlight(dir.path(), &[&["share"], args].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(expected),
            "{args:?}: {said}"
        );
    }
    let both = ["--share", ONE, "--master-secret", "other.json"];
    assert_eq!(certify(dir.path(), &both).status.code(), Some(2));
}

/// A terminal of script(1). The test types each line when the program asks for it.
#[test]
fn a_share_can_be_typed_and_is_not_shown() {
    let dir = workspace();
    let command = format!(
        "{} ssh --key key.pub --known-hosts known --share {ONE} --share -",
        support::program::built("firstlight").display()
    );
    let mut script = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut keys, mut screen) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
    let mut shown = String::new();
    let mut wait_for = |expected: &str| {
        let begin = shown.len();
        let mut byte = [0];
        while !shown[begin..].contains(expected) {
            assert_eq!(screen.read(&mut byte).unwrap(), 1, "{expected:?}: {shown}");
            shown.push(byte[0].into());
        }
    };
    let text = fs::read_to_string(dir.path().join(TWO)).unwrap();
    let is_code = |line: &&str| !line.contains(':') && !line.is_empty();
    let code: Vec<&str> = text.lines().filter(is_code).collect();
    // first with one line less than needed
    for typed in [&code[1..], &code] {
        for (index, line) in typed.iter().chain(&[""]).enumerate() {
            wait_for(&format!("line {}: ", index + 1));
            writeln!(keys, "{}", line.to_lowercase()).unwrap();
        }
        if typed.len() < code.len() {
            wait_for("Type it again.");
        }
    }
    wait_for("A certificate for root");
    drop(keys);
    let mut rest = String::new();
    screen.read_to_string(&mut rest).unwrap();
    assert!(script.wait().unwrap().success());
    for line in code {
        assert!(!shown.to_uppercase().contains(line), "{shown}");
    }
}

/// Runs Vault's implementation with values in hexadecimal, one a line.
fn vault(args: &[&str], values: &[String]) -> Vec<String> {
    let program = go_program("shamir_go", env!("CARGO_TARGET_TMPDIR"));
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    for value in values {
        writeln!(input, "{value}").unwrap();
    }
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn named(shares: &[Share]) -> Vec<Named> {
    let named = |share: &Share| Named {
        name: format!("share {}", share.number),
        share: share.clone(),
    };
    shares.iter().map(named).collect()
}

/// The bytes of a master secret that are shared: the length of the key, the key, the salt.
fn shared(kms: &MasterSecret) -> String {
    let len = kms.key().len();
    format!(
        "{len:02x}{}{}",
        hex(kms.key().expose()),
        hex(kms.salt().expose())
    )
}

#[test]
fn vault_joins_our_shares() {
    let kms = MasterSecret::new(Secret::random(32), Secret::random(32)).unwrap();
    for (threshold, count) in [(2, 2), (3, 5), (7, 20)] {
        let shares = split(&kms, threshold, count).unwrap();
        let last = &shares[usize::from(count - threshold)..];
        let shares: Vec<String> = last
            .iter()
            .map(|share| hex(share.vault().expose()))
            .collect();
        assert_eq!(vault(&["combine"], &shares), [shared(&kms)]);
        // with one share less, the peer returns other bytes, or refuses a single share
        if threshold > 2 {
            assert_ne!(vault(&["combine"], &shares[1..]), [shared(&kms)]);
        }
    }
}

#[test]
fn we_join_the_shares_of_vault() {
    let kms = MasterSecret::new(Secret::random(32), Secret::random(32)).unwrap();
    let fingerprint = split(&kms, 2, 2).unwrap()[0].fingerprint;
    for (threshold, count) in [(2, 2), (3, 5), (7, 20)] {
        let args = ["split", &threshold.to_string(), &count.to_string()];
        let shares: Vec<Share> = vault(&args, &[shared(&kms)])
            .iter()
            .map(|share| Share::from_vault(&unhex(share), threshold, fingerprint, [1; 4]).unwrap())
            // as text, as a person would type it
            .map(|share| parse(lines(&share).as_bytes()).unwrap())
            .collect();
        assert_eq!(shares.len(), usize::from(count as u8));
        assert_eq!(join(&named(&shares)).unwrap(), kms);
        let foreign: Vec<Share> = shares
            .iter()
            .map(|share| {
                Share::from_vault(share.vault().expose(), threshold, NO_FINGERPRINT, [1; 4])
                    .unwrap()
            })
            .collect();
        let error = join(&named(&foreign)).unwrap_err();
        assert!(error.to_string().contains("fingerprint"), "{error}");
    }
}
