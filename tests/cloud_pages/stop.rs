//! The blocks of each page stop at the first command that fails, in the shell of a person, and stop when a variable is empty that an earlier
//! command should have filled. Stand-ins take the place of all programs that act: each call is a line of a file.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use support::ROOT;
use support::boot_image::run;
use tempfile::TempDir;

use super::page::{Block, Page};

const PROGRAMS: &[&str] = &[
    "apt-get",
    "aws",
    "az",
    "curl",
    "firstlight",
    "gcloud",
    "haproxy",
    "helm",
    "kubectl",
    "make",
    "openstack",
    "qemu-img",
    "qm",
    "skopeo",
    "ssh-keygen",
    "systemctl",
    "systemd-run",
    "tofu",
    "virsh",
    "virt-install",
    "virt-xml-validate",
];

/// Writes its call, and fails or prints nothing if it is the call with the number in FAILS or SILENT.
const STAND_IN: &str = r#"#!/bin/sh
name=${0##*/}
{ printf '%s' "$name"; printf ' [%s]' "$@"; printf '\036'; } >> "$CALLS"
read -r number < "$CALLS.count"
number=$((number + 1))
echo $number > "$CALLS.count"
[ "$number" != "$FAILS" ] || exit 1
[ "$number" != "$SILENT" ] || exit 0
case "$name $*" in
  virt-install*) echo "attestation-key: 000b5a" > "$2.log" ;;
  *checkip*) echo 203.0.113.7 ;;
  curl* | *console* | *get-serial-port-output*) echo "attestation-key: 000b5a" ;;
  *" wait "* | *register-targets*) ;;
  *export-credentials*) echo AWS_ACCESS_KEY_ID=a ;;
  *"-f json"* | "firstlight measure"*) echo '{"id": "i", "secret": "s"}' ;;
  "openstack port list"*) echo 10.0.0.7 ;;
  "virsh list"*) echo control-plane-0 ;;
  ssh-keygen*) touch unused-key.pub; echo key ;;
  *) echo "$name-result-$number" ;;
esac
"#;

/// Parts of the calls with another result than the usual one.
const OTHER_RESULT: [&str; 6] = [
    "checkip",
    "console",
    "serial",
    "[json]",
    "[port] [list]",
    "curl",
];

/// Programs with a random result.
const FIXED: [(&str, &str); 2] = [
    ("openssl", "#!/bin/sh\necho abc123\n"),
    ("mktemp", "#!/bin/sh\necho \"$HOME/temporary\"\n"),
];

/// A function for the shell: writes what the next block finds in the shell.
const SAVE: &str = r#"compgen -v > "$FILES/first"
save() {
  local name
  {
    for name in $(compgen -v | grep -vxFf "$FILES/first" | grep -vE '^(BASH.*|FUNCNAME|PIPESTATUS|_|name)$'); do declare -p "$name"; done
    declare -f
  } > "$FILES/variables"
  { declare -p PATH; trap -p ERR; shopt -po errtrace pipefail; printf 'cd %q\n' "$PWD"; } > "$FILES/shell"
}
"#;

/// What goes wrong: with the call of this number, or before.
#[derive(Clone, Copy)]
enum Fault<'a> {
    None,
    Fails(usize),
    PrintsNothing(usize),
    /// Earlier blocks have not set this variable.
    Missing(&'a str),
}

/// A person's folder and shell.
pub struct Person(TempDir);

impl Person {
    pub fn new() -> Person {
        let person = Person(tempfile::tempdir().unwrap());
        for folder in ["programs", "files", "home/source/docs", "home/source/mkosi"] {
            fs::create_dir_all(person.path(folder)).unwrap();
        }
        person.program("stand-in", STAND_IN);
        for name in PROGRAMS {
            symlink("stand-in", person.path("programs").join(name)).unwrap();
        }
        for (name, text) in FIXED {
            person.program(name, text);
        }
        let source = person.path("home/source");
        for file in ["docs/clouds", "docs/addons", "infra", "mkosi/node.conf"] {
            let to = source.join(file);
            run(Command::new("cp")
                .args(["-rT", &format!("{ROOT}/{file}")])
                .arg(to));
        }
        symlink("docs/clouds", source.join("clouds")).unwrap();
        for file in [
            "mkosi/release/firstlight.raw",
            "dist/firstlight-image.tar",
            "dist/firstlight",
        ] {
            let file = source.join("target").join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            // one block of a snapshot
            fs::write(file, "image").unwrap();
        }
        for chart in [
            "cilium-1.19.0.tgz",
            "aws-cloud-controller-manager-0.0.9.tgz",
        ] {
            fs::write(person.path("files").join(chart), "a chart").unwrap();
        }
        fs::write(person.path("files/variables"), "").unwrap();
        fs::write(person.path("files/shell"), "cd ~/source\n").unwrap();
        person
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.path("programs").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Copies a folder of this person.
    fn copy(&self, from: &str, to: &str) {
        run(Command::new("rm").arg("-rf").arg(self.path(to)));
        run(Command::new("cp")
            .arg("-a")
            .arg(self.path(from))
            .arg(self.path(to)));
    }

    /// Pastes a block, and leaves folder and variables for the next one; returns the calls.
    pub fn run(&self, block: &Block) -> Vec<String> {
        self.paste(block, Fault::None, true)
    }

    /// Returns the variables of earlier blocks that a block, or a function that an earlier block defines, names.
    fn variables(&self, block: &str) -> Vec<String> {
        let saved = fs::read_to_string(self.path("files/variables")).unwrap();
        let (set, functions): (Vec<&str>, Vec<&str>) =
            saved.lines().partition(|line| line.starts_with("declare "));
        let names = set.iter().filter_map(|line| line.split([' ', '=']).nth(2));
        let is_used = |name: &&str| {
            let texts = functions.iter().chain([&block]);
            let words =
                texts.flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '_'));
            words.into_iter().any(|word| word == *name)
        };
        names.filter(is_used).map(str::to_owned).collect()
    }

    /// Pastes a block into an interactive shell; returns the calls. The shell must still be open.
    fn paste(&self, block: &Block, fault: Fault, save: bool) -> Vec<String> {
        let files = self.path("files");
        // the charts come from a server; two pages write to folders of the host
        let text = block
            .text
            .replace("/var/lib/libvirt", "$HOME/libvirt")
            .replace("/etc/haproxy", "$HOME");
        let missing = match fault {
            Fault::Missing(name) => format!("unset {name}\n"),
            _ => String::new(),
        };
        let after = if save { "save\n" } else { "" };
        let script = format!(
            "{SAVE}. \"$FILES/variables\"\n{missing}. \"$FILES/shell\"\ncp -n \"$FILES\"/*.tgz .\n{text}\n{after}echo open > \"$FILES/open\"\n"
        );
        fs::write(files.join("script"), script).unwrap();
        fs::write(files.join("calls"), "").unwrap();
        fs::write(files.join("calls.count"), "0\n").unwrap();
        let _ = fs::remove_file(files.join("open"));
        let number =
            |found: Option<usize>| found.map_or(String::new(), |number| number.to_string());
        let (fails, silent) = match fault {
            Fault::Fails(number) => (Some(number), None),
            Fault::PrintsNothing(number) => (None, Some(number)),
            _ => (None, None),
        };
        let output = Command::new("bash")
            .args(["--norc", "-i"])
            .stdin(fs::File::open(files.join("script")).unwrap())
            .env_clear()
            .env("HOME", self.path("home"))
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", self.path("programs").display()),
            )
            .env("FILES", &files)
            .env("CALLS", files.join("calls"))
            .env("FAILS", number(fails))
            .env("SILENT", number(silent))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(files.join("open").exists(), "the shell is closed:\n{said}");
        if save {
            assert!(!said.contains("stopped at:"), "{said}");
        }
        let calls = fs::read_to_string(files.join("calls")).unwrap();
        calls.split_terminator('\x1e').map(str::to_owned).collect()
    }
}

/// Returns what is wrong with a block, as a person finds it after the blocks before.
fn faults(person: &Person, page: &Page, block: &Block) -> Vec<String> {
    let mut found = vec![];
    let place = format!("{}.md:{}", page.name, block.line);
    person.copy("home", "before");
    let all = person.paste(block, Fault::None, false);
    let again = |fault: Fault<'_>| {
        person.copy("before", "home");
        person.paste(block, fault, false)
    };
    let mut tried: HashMap<&str, usize> = HashMap::new();
    for (number, call) in (1..).zip(&all) {
        // a loop makes the same call many times
        let count = tried.entry(call.split(" [-").next().unwrap()).or_default();
        *count += 1;
        if *count > 2 {
            continue;
        }
        let calls = again(Fault::Fails(number));
        if let Some(next) = calls.get(number) {
            found.push(format!(
                "{place}: after {call}\nhas failed, the block calls {next}"
            ));
        }
        // what another call gets from this one; the other results go through programs that change them
        let result = format!("-result-{number}");
        let is_usual = OTHER_RESULT.iter().all(|part| !call.contains(part));
        if is_usual && !all.iter().any(|call| call.contains(&result)) {
            continue;
        }
        let calls = again(Fault::PrintsNothing(number));
        if let Some((_, wrong)) = all.iter().zip(&calls).find(|(right, call)| right != call) {
            found.push(format!(
                "{place}: {call}\nprints nothing, and the block calls {wrong}"
            ));
        }
    }
    for name in person.variables(&block.text) {
        let calls = again(Fault::Missing(&name));
        if let Some((_, wrong)) = all.iter().zip(&calls).find(|(right, call)| right != call) {
            found.push(format!("{place}: without {name} the block calls {wrong}"));
        }
    }
    person.copy("before", "home");
    person.run(block);
    found
}

const PAGES: [&str; 6] = ["aws", "azure", "gcp", "libvirt", "openstack", "proxmox"];

/// Checks each block of a page, after the blocks before it.
fn check(page: &str) {
    let (person, page) = (Person::new(), Page::read(page));
    let found: Vec<String> = page
        .blocks()
        .flat_map(|block| faults(&person, &page, &block))
        .collect();
    assert!(
        found.is_empty(),
        "{} faults:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn each_block_for_aws_stops_at_its_first_command_that_fails() {
    check(PAGES[0]);
}

#[test]
fn each_block_for_azure_stops_at_its_first_command_that_fails() {
    check(PAGES[1]);
}

#[test]
fn each_block_for_google_cloud_stops_at_its_first_command_that_fails() {
    check(PAGES[2]);
}

#[test]
fn each_block_for_libvirt_stops_at_its_first_command_that_fails() {
    check(PAGES[3]);
}

#[test]
fn each_block_for_openstack_stops_at_its_first_command_that_fails() {
    check(PAGES[4]);
}

#[test]
fn each_block_for_proxmox_stops_at_its_first_command_that_fails() {
    check(PAGES[5]);
}

#[test]
fn each_page_with_commands_is_checked() {
    let pages = Page::all().into_iter();
    let mut names: Vec<String> = pages
        .filter(|page| page.blocks().count() > 0)
        .map(|page| page.name)
        .collect();
    names.sort();
    assert_eq!(names, PAGES);
}
