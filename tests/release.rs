//! A release as tools/release.sh makes it: its files and signature, and what docs/get-started.md does in its folder alone
//! (`make test-release`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::published::{Published, VERSION};
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::fetched;
use tempfile::TempDir;

const PROGRAMS: [&str; 6] = [
    "unlock",
    "bootstrapper",
    "join-service",
    "key-service",
    "firstlight",
    "firstlight-volume",
];
/// The pages about the files of a release. `NOTES.md` is one of these files.
const PAGES: [&str; 5] = [
    "NOTES.md",
    "docs/get-started.md",
    "docs/reproduce.md",
    "docs/services.md",
    "docs/images/install.md",
];
/// Where the pages write a name or a version.
const PLACEHOLDERS: [&str; 3] = ["PROGRAM", "VERSION", "FILE"];

/// A release in a folder of its own, with the publisher's public key and the documents beside it.
struct Release(TempDir);

/// Makes a release.
fn release() -> Release {
    let release = Release(TempDir::new().unwrap());
    let key = release.beside("key");
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key));
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    let signers = format!("me namespaces=\"firstlight-release\" {public}");
    fs::write(release.beside("allowed_signers"), signers).unwrap();
    let mut script = Command::new(Path::new(ROOT).join("tools/release.sh"));
    run(script.env("KEY", &key).env("RELEASE", release.folder()));
    let docs = format!("firstlight-docs-{}.tgz", env!("CARGO_PKG_VERSION"));
    run(Command::new("tar")
        .args(["xz", "--strip-components=1", "-C"])
        .arg(release.beside(""))
        .arg("-f")
        .arg(release.folder().join(docs)));
    release
}

impl Release {
    fn folder(&self) -> PathBuf {
        self.beside("release")
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.folder().join(name);
        assert!(path.is_file(), "the release has no {name}");
        path
    }

    fn names(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.folder()).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// Returns a page of the release's own documents, or a file of the release.
    fn page(&self, name: &str) -> String {
        let of_docs = self.beside(name);
        fs::read_to_string(if of_docs.exists() {
            of_docs
        } else {
            self.file(name)
        })
        .unwrap()
    }
}

fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}:\n{said}{errors}");
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn each_file_has_a_hash_that_the_publishers_key_signs() {
    let release = release();
    let sums = release.page("SHA256SUMS");
    let hashed: BTreeSet<String> = sums.lines().map(|line| line[66..].to_owned()).collect();
    let mut expected = release.names();
    expected.retain(|name| !name.starts_with("SHA256SUMS"));
    assert_eq!(hashed, expected);
    // the commands of docs/reproduce.md, with the test's name and key
    let page = release.page("docs/reproduce.md");
    let commands = block(&page, "How", "allowed_signers");
    let commands: Vec<&str> = commands.lines().skip(1).collect();
    let check = |file: &str| {
        let commands = commands
            .join("\n")
            .replace("-f allowed_signers", "-f ../allowed_signers")
            .replace("releases@example.com", "me")
            .replace("< SHA256SUMS", &format!("< {file}"));
        let mut bash = Command::new("bash");
        bash.args(["-ec", &commands]).current_dir(release.folder());
        bash.output().unwrap()
    };
    let checked = check("SHA256SUMS");
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    assert!(text(&checked.stdout).contains("firstlight-linux-amd64: OK"));
    assert!(!check("NOTES.md").status.success());
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn the_pages_name_each_file_of_a_release_and_no_other() {
    let release = release();
    let names = release.names();
    let notes = release.page("NOTES.md");
    let mut patterns = Vec::new();
    for page in PAGES {
        let text = release.page(page);
        for pattern in file_names(&text) {
            assert!(
                names.iter().any(|name| matches(&pattern, name)),
                "{page} names {pattern}, and the release has only {names:?}"
            );
            patterns.push((page, pattern));
        }
    }
    for name in &names {
        for (is_notes, reader) in [(true, "NOTES.md"), (false, "the documents")] {
            let named = patterns
                .iter()
                .any(|(page, pattern)| (*page == "NOTES.md") == is_notes && matches(pattern, name));
            assert!(
                named || name == "NOTES.md" && is_notes,
                "{name} is not named in {reader}"
            );
        }
    }
    assert!(notes.contains("docs/get-started.md"));
    for page in ["README.md", "SECURITY.md", "CHANGELOG.md"] {
        assert!(release.beside(page).is_file(), "{page}");
    }
}

/// Returns the words of a page that are names of files of a release, with `*` for each part that differs.
fn file_names(page: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-*+".contains(c);
    let ends = [
        ".deb",
        "-linux-amd64",
        ".tar",
        ".tgz",
        ".cdx.json",
        "SHA256SUMS",
        "SHA256SUMS.sig",
    ];
    page.split(|c| !is_part(c))
        .map(|word| word.trim_end_matches(['.', ',']))
        .filter(|word| {
            let begins = [
                &["firstlight", "*", "SHA256SUMS", "NOTES.md"],
                &PROGRAMS[..4],
            ]
            .concat()
            .into_iter()
            .chain(PLACEHOLDERS)
            .any(|begin| word.starts_with(begin));
            begins && (*word == "NOTES.md" || ends.iter().any(|end| word.ends_with(end)))
        })
        .map(|word| {
            PLACEHOLDERS
                .iter()
                .fold(word.to_owned(), |word, it| word.replace(it, "*"))
        })
        .collect()
}

/// Returns whether a name matches a pattern with `*`.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((begin, rest)) => name.strip_prefix(begin).is_some_and(|name| {
            (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))
        }),
    }
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn packages_image_and_chart_have_the_programs_and_the_version_of_the_release() {
    let release = release();
    let number = env!("CARGO_PKG_VERSION");
    let program = |name: &str| release.file(&format!("{name}-linux-amd64"));
    for name in PROGRAMS {
        let said = text(&run(Command::new(program(name)).arg("--version")).stdout);
        assert!(said.contains(&format!(" {number} ")), "{said}");
    }
    for (package, path, name) in [
        ("firstlight", "./usr/bin/firstlight", "firstlight"),
        (
            "firstlight-initramfs",
            "./usr/lib/firstlight/unlock",
            "unlock",
        ),
        ("firstlight-node", "./usr/bin/bootstrapper", "bootstrapper"),
        (
            "firstlight-broker",
            "./usr/bin/join-service",
            "join-service",
        ),
        (
            "firstlight-volume",
            "./usr/bin/firstlight-volume",
            "firstlight-volume",
        ),
    ] {
        let deb = release.file(&format!("{package}_{number}_amd64.deb"));
        let unpack = "dpkg-deb --fsys-tarfile \"$0\" | tar xO \"$1\"";
        let in_it = run(Command::new("bash").args(["-c", unpack]).arg(deb).arg(path));
        assert!(
            in_it.stdout == fs::read(program(name)).unwrap(),
            "{package}"
        );
    }

    // skopeo, which the pages of the clouds use, reads the archive and checks its hashes
    let image = release.beside("image");
    run(Command::new("skopeo")
        .args(["--insecure-policy", "copy"])
        .arg(format!(
            "docker-archive:{}",
            release.file("firstlight-image.tar").display()
        ))
        .arg(format!("dir:{}", image.display())));
    let manifest = fs::read(image.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let layer = manifest["layers"][0]["digest"].as_str().unwrap();
    let layer = image.join(layer.strip_prefix("sha256:").unwrap());
    for name in ["join-service", "key-service"] {
        let mut unpack = Command::new("tar");
        unpack.arg("xaOf").arg(&layer).arg(format!("./{name}"));
        assert!(run(&mut unpack).stdout == fs::read(program(name)).unwrap());
    }

    let chart = release.file(&format!("firstlight-chart-{number}.tgz"));
    let helm = |command: &[&str]| {
        let mut helm = Command::new(fetched("helm.sh"));
        text(
            &run(helm
                .args(command)
                .arg(&chart)
                .args(["--namespace", "kube-system"]))
            .stdout,
        )
    };
    let described = helm(&["show", "chart"]);
    assert!(
        described.contains(&format!("\nversion: {number}\n")),
        "{described}"
    );
    let policy = json!({"measurements": {"4": {"expected": "11".repeat(32)}}}).to_string();
    let policy = format!("--set-json=attestationPolicy={}", json!(policy));
    let values = [
        "--kube-version=v1.34.4",
        "--set=image.repository=registry.example.com/firstlight,masterSecret.existingSecret=mine",
        &policy,
        "--set=measurementSalt=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    ];
    let objects = helm(&[&["template", "firstlight"], &values[..]].concat());
    let expected = format!("image: \"registry.example.com/firstlight:{number}\"");
    assert!(objects.contains(&expected), "{objects}");
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn the_command_makes_a_list_of_components_and_checks_it() {
    let release = release();
    let published = Published::start();
    let firstlight = release.file("firstlight-linux-amd64");
    let made = published.list(&firstlight, &[VERSION]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let list = published.folder.path().join("components.json");
    fs::write(&list, &made.stdout).unwrap();
    run(Command::new(&firstlight)
        .args(["components", "--check"])
        .arg(&list));
}

/// Returns the first block of commands with these words below this heading.
fn block(page: &str, heading: &str, words: &str) -> String {
    let (_, section) = page.split_once(&format!("# {heading}\n")).unwrap();
    let blocks = section.split("```sh\n").skip(1);
    let mut blocks = blocks.map(|rest| rest.split("```").next().unwrap());
    let found = blocks.find(|block| block.contains(words));
    found
        .unwrap_or_else(|| panic!("no block with {words} below {heading}"))
        .to_owned()
}

/// The page's reader has a machine with QEMU, and the folder of a release. All commands are the page's, except that this test installs
/// nothing on this machine, and answers where the page says that the reader has to do something.
#[test]
#[ignore = "needs root, Debian's archive and QEMU: make test-release"]
fn get_started_works_in_the_folder_of_a_release_alone() {
    let release = release();
    let page = release.page("docs/get-started.md");
    // a copy, since the page writes into the folder
    let folder = TempDir::new().unwrap();
    for name in release.names() {
        fs::copy(release.file(&name), folder.path().join(name)).unwrap();
    }
    let mut image = block(&page, "From a release", "mmdebstrap");
    let install = "apt-get install mmdebstrap\n";
    assert!(image.starts_with(install), "{image}");
    image = image.replace(install, "");
    let second = "2. Secret, list, policy";
    let secret = block(&page, second, "init-secret.txt");
    let measure = block(&page, second, "--kernel vmlinuz");
    let measure = measure.lines().find(|line| line.contains("vmlinuz"));
    let disks = block(&page, "3. Start the machine", "state.img");
    let prepare = [&image, &secret, measure.unwrap(), &disks].map(str::to_owned);
    bash(folder.path(), Command::new("bash"), &prepare.join("\n"));

    let mut start = block(&page, "3. Start the machine", "swtpm");
    if fetched("accel.sh").to_str().unwrap().contains("tcg") {
        let emulated = "accel=tcg -cpu qemu64,-cx16";
        assert!(page.contains(&format!("Without KVM write `{emulated}`")));
        start = start.replace("accel=kvm -cpu host", emulated);
    }
    fs::write(folder.path().join("start"), start).unwrap();
    let own = block(&page, "4. Make it yours", "KEY=");
    let key = "KEY=$(tr -d '\\r' < console.txt | sed -n 's/.*attestation-key: //p' | head -1)";
    let own = own.replace("KEY=000b…", key);
    assert!(own.contains(key), "{own}");
    // it has this exit code before the init: `firstlight status --help`
    let status = "firstlight status 127.0.0.1:9000 --policy policy.json\n";
    let no_member = format!("{} || [ $? = 6 ]\n", status.trim_end());
    let own = own.replace(status, &no_member);
    assert!(own.contains(&no_member), "{own}");
    let recover = block(&page, "5. Reboot", "firstlight recover");
    let status = block(&page, "5. Reboot", "firstlight status");
    let booted = format!(
        "{BOOT}boot 'waiting: for a cluster'\n{own}off\nboot 'waiting: for a key of disk'\n{recover}wait_for 'mounted: /run/state'\nwait_for 'is answered on'\n{status}off\n"
    );
    // in a network of its own, where the page's ports are free
    let mut alone = Command::new("unshare");
    alone.args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    alone.arg("bash");
    let said = bash(folder.path(), alone, &booted);
    for line in [
        "The node is initialized; no cluster was set up on it",
        "opened its disk",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

/// The reader's part: starts the machine, looks at the console, ends QEMU.
const BOOT: &str = "ip link set lo up
wait_for() {
  local -; set +x
  for _ in $(seq 900); do
    ! grep -q \"$1\" console.txt || return 0
    kill -0 $machine || break
    sleep 1
  done
  tail -n 40 console.txt; echo \"the console does not say: $1\"; exit 1
}
boot() { bash start > console.txt 2>&1 & machine=$!; wait_for \"$1\"; }
off() { kill $(pgrep -P $machine qemu); wait $machine || true; }
";

/// Runs commands in a folder until one fails; returns what they print.
fn bash(folder: &Path, mut bash: Command, commands: &str) -> String {
    // a reader has no other programs of ours
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let bash = bash.args(["-euxo", "pipefail", "-c", &format!("exec 2>&1\n{commands}")]);
    let bash = bash.current_dir(folder).env("PATH", path);
    let output = bash.stdin(Stdio::null()).output().unwrap();
    let said = text(&output.stdout);
    print!("{said}");
    assert!(output.status.success(), "{}", output.status);
    said
}
