//! A release as tools/release.sh makes it: its files and signature, and what docs/get-started.md does in its folder alone
//! (`make test-release`).

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use common::published::{Published, VERSION};
use common::setting::wait_for_port;
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::fetched;
use support::program::{PROGRAMS, Program, run};
use tempfile::TempDir;

/// The pages about the files of a release. `NOTES.md` is one of these files.
const PAGES: [&str; 5] = [
    "NOTES.md",
    "docs/get-started.md",
    "docs/reproduce.md",
    "docs/services.md",
    "docs/images/install.md",
];
/// Where the pages write a name or a version.
const PLACEHOLDERS: [&str; 4] = ["PROGRAM", "VERSION", "VARIANT", "FILE"];

/// A release in a folder of its own, with the publisher's public keys and the documents beside it.
struct Release(TempDir);

/// Returns the release that the script makes, once for all tests.
fn release() -> &'static Release {
    static RELEASE: OnceLock<Release> = OnceLock::new();
    RELEASE.get_or_init(make_release)
}

fn make_release() -> Release {
    let release = Release(TempDir::new().unwrap());
    let key = release.beside("key");
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key));
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    let signers = format!("me namespaces=\"firstlight-release\" {public}");
    fs::write(release.beside("allowed_signers"), signers).unwrap();
    make_gpg_key(&release.beside("gpg"));
    let mut script = Command::new(Path::new(ROOT).join("tools/release.sh"));
    script.env("KEY", &key).env("RELEASE", release.folder());
    script
        .env("GNUPGHOME", release.beside("gpg"))
        .env("KEY_GPG", "me");
    run(&mut script);
    gpg(&release.beside("gpg"), "gpgconf", &["--kill", "all"]);
    let docs = format!("firstlight-docs-{}.tgz", env!("CARGO_PKG_VERSION"));
    run(Command::new("tar")
        .args(["xz", "--strip-components=1", "-C"])
        .arg(release.beside(""))
        .arg("-f")
        .arg(release.folder().join(docs)));
    release
}

/// Runs a program of GnuPG with keys in this folder.
fn gpg(home: &Path, program: &str, arguments: &[&str]) -> Vec<u8> {
    let mut gpg = Command::new(program);
    run(gpg.env("GNUPGHOME", home).args(arguments)).stdout
}

/// Makes a key without a passphrase, and writes its public part beside the folder.
fn make_gpg_key(home: &Path) {
    fs::create_dir(home).unwrap();
    fs::set_permissions(home, fs::Permissions::from_mode(0o700)).unwrap();
    let alone = ["--batch", "--passphrase", "", "--quick-generate-key", "me"];
    gpg(home, "gpg", &[&alone[..], &["ed25519", "sign"]].concat());
    let public = gpg(home, "gpg", &["--export", "me"]);
    fs::write(home.with_extension("pub"), public).unwrap();
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

    /// Returns the names in its folder.
    fn names(&self) -> BTreeSet<String> {
        names(&self.folder())
    }

    /// Returns the reference values, one file for each attestation variant.
    fn reference_values(&self) -> Vec<String> {
        let names = self.names().into_iter();
        names
            .filter(|name| name.starts_with("firstlight-node-image-") && name.ends_with(".json"))
            .collect()
    }

    /// Returns the digest of its container image, as its notes name it.
    fn digest(&self) -> String {
        let notes = self.page("NOTES.md");
        let (_, digest) = notes.split_once("`sha256:").unwrap();
        format!("sha256:{}", digest.split_once('`').unwrap().0)
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

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
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
    expected.remove("apt");
    let of_apt = names(&release.folder().join("apt")).into_iter();
    expected.extend(of_apt.map(|name| format!("apt/{name}")));
    let is_signature = |name: &str| name.ends_with(".sig") || name == "apt/InRelease";
    expected.retain(|name| !is_signature(name) && name != "SHA256SUMS");
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

    // each file of reference values alone
    let verify = commands.iter().find(|line| line.contains("-Y verify"));
    for name in release.reference_values() {
        let alone = release.beside("alone");
        let _ = fs::remove_dir_all(&alone);
        fs::create_dir(&alone).unwrap();
        for file in [&name, &format!("{name}.sig")] {
            fs::copy(release.file(file), alone.join(file)).unwrap();
        }
        let check = || {
            let verify = verify.unwrap().replace("SHA256SUMS", &name);
            let verify = verify.replace("-f allowed_signers", "-f ../allowed_signers");
            let verify = verify.replace("releases@example.com", "me");
            let mut bash = Command::new("bash");
            bash.args(["-ec", &verify]).current_dir(&alone);
            bash.output().unwrap().status.success()
        };
        assert!(check(), "{name}");
        let mut changed = fs::read(alone.join(&name)).unwrap();
        changed[20] ^= 1;
        fs::write(alone.join(&name), changed).unwrap();
        assert!(!check(), "{name}");
    }
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn the_reference_values_are_those_of_the_node_image() {
    let release = release();
    let number = env!("CARGO_PKG_VERSION");
    let image = release.beside("image.raw");
    let packed = release.file(&format!("firstlight-node-image-{number}.raw.zst"));
    run(Command::new("zstd").arg("-dqo").arg(&image).arg(packed));
    let settings = fs::read_to_string(Path::new(ROOT).join("mkosi/node.conf")).unwrap();
    let variants = settings
        .lines()
        .filter_map(|line| line.strip_prefix("attestation-variant="));
    let variants: Vec<&str> = variants.collect();
    assert_eq!(release.reference_values().len(), variants.len());
    for variant in variants {
        let mut measure = Command::new(release.file("firstlight-linux-amd64"));
        measure.arg("measure").arg(&image);
        measure.args(["--attestation-variant", variant]);
        let measured = run(measure.args(["--secure-boot", "off", "--units", "all"])).stdout;
        let mut measured: Value = serde_json::from_slice(&measured).unwrap();
        let values = release.page(&format!("firstlight-node-image-{variant}.json"));
        let values: Value = serde_json::from_str(&values).unwrap();
        let name = values["name"].as_str().unwrap();
        assert!(name.starts_with(&format!("firstlight-node-image-{number}")));
        measured["name"] = name.into();
        assert_eq!(values, measured);
        assert!(values["measurements"]["4"]["expected"].is_string());
    }
    fs::remove_file(image).unwrap();
}

/// A Debian that knows the publisher's key, and the commands of docs/images/install.md.
#[test]
#[ignore = "needs root and Debian's archive: make test-release"]
fn apt_installs_from_the_release_and_takes_nothing_that_its_publisher_did_not_sign() {
    let release = release();
    let root = release.beside("debian");
    let mut debian = Command::new("mmdebstrap");
    debian.args(["--quiet", "--variant=minbase", "bookworm"]);
    run(debian.arg(&root));
    let repository = root.join("srv/apt");
    let fresh = || {
        let _ = fs::remove_dir_all(&repository);
        let mut copy = Command::new("cp");
        run(copy
            .arg("-r")
            .arg(release.folder().join("apt"))
            .arg(&repository));
    };
    fresh();
    fs::copy(release.beside("gpg.pub"), root.join("firstlight.gpg")).unwrap();
    let page = release.page("docs/images/install.md");
    let commands = block(&page, "With packages", "signed-by");
    let install = "apt-get install ";
    assert!(commands.contains(install), "{commands}");
    let commands = commands
        .replace("https://example.com/firstlight/apt", "file:/srv/apt")
        .replace(install, "apt-get install --yes --no-install-recommends ");
    let in_debian = |commands: &str| {
        let mut chroot = Command::new("chroot");
        chroot.arg(&root).args(["sh", "-exc", commands]);
        chroot.env("DEBIAN_FRONTEND", "noninteractive");
        chroot.stdin(Stdio::null()).output().unwrap()
    };
    let installed = in_debian(&commands);
    assert!(installed.status.success(), "{}", text(&installed.stderr));
    for (program, path) in [
        ("bootstrapper", "usr/bin/bootstrapper"),
        ("unlock", "usr/lib/firstlight/unlock"),
    ] {
        let there = fs::read(root.join(path)).unwrap();
        let program = release.file(&format!("{program}-linux-amd64"));
        assert!(there == fs::read(program).unwrap(), "{path}");
    }

    // only this repository, so that nothing else can fail
    let only = "-o Dir::Etc::sourcelist=/etc/apt/sources.list.d/firstlight.list -o Dir::Etc::sourceparts=-";
    let update = format!(
        "rm -rf /var/lib/apt/lists/*; apt-get {only} -o APT::Update::Error-Mode=any update"
    );
    let refused = |what: &str, commands: &str, why: &str| {
        let output = in_debian(commands);
        let said = text(&output.stdout) + &text(&output.stderr);
        let is_refused = !output.status.success() && said.contains(why);
        assert!(is_refused, "{what}: {said}");
    };
    assert!(in_debian(&update).status.success());
    let package = format!("firstlight_{}_amd64.deb", env!("CARGO_PKG_VERSION"));
    let download = format!("{update}; cd /tmp; apt-get {only} download firstlight");
    assert!(in_debian(&download).status.success());
    let change = |name: &str| {
        let path = repository.join(name);
        let mut content = fs::read(&path).unwrap();
        let middle = content.len() / 2;
        content[middle] ^= 1;
        fs::write(path, content).unwrap();
    };
    change(&package);
    refused(
        "a changed package",
        &format!("rm -f /tmp/*.deb; {download}"),
        "Hash Sum mismatch",
    );
    fresh();
    change("Packages");
    fs::remove_file(repository.join("Packages.gz")).unwrap();
    refused("a changed list", &update, "Hash Sum mismatch");
    fresh();
    change("InRelease");
    refused("a changed signature", &update, "not signed");
    fresh();
    fs::remove_file(repository.join("InRelease")).unwrap();
    refused("no signature", &update, "not signed");
}

/// The digest is the one under which a registry has the image, and each place of the release that names the image has it.
#[test]
#[ignore = "needs programs and packages: make test-release"]
fn a_registry_has_the_image_under_the_digest_that_pages_and_chart_name() {
    let release = release();
    let digest = release.digest();
    let number = env!("CARGO_PKG_VERSION");
    let crane = fetched("registry.sh");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut serve = Command::new(&crane);
    serve.args(["registry", "serve", "--address", &address.to_string()]);
    let _registry = Program::start(&mut serve);
    wait_for_port(address);
    // what docs/services.md tells an operator to run
    let page = release.page("docs/services.md");
    let push = block(&page, "From a release", "skopeo copy");
    let push = push
        .replace("registry.example.com", &address.to_string())
        .replace(
            "skopeo copy",
            "skopeo --insecure-policy copy --dest-tls-verify=false",
        );
    bash(&release.folder(), Command::new("bash"), &push);
    let name = format!("{address}/firstlight:{number}");
    let mut asked = Command::new(&crane);
    let asked = run(asked.args(["digest", "--insecure", &name])).stdout;
    assert_eq!(text(&asked).trim(), digest);

    let pinned = format!("registry.example.com/firstlight:{number}@{digest}");
    let mut without = Command::new("grep");
    without.args([
        "-rEn",
        &format!("firstlight:{}", number.replace('.', "\\.")),
    ]);
    without.args(["--include=*.md", "--include=*.tf", "."]);
    let named = run(without.current_dir(release.beside(""))).stdout;
    let named = text(&named);
    let lines = named.lines().filter(|line| {
        let is_ours = [
            "./docs/",
            "./infra/",
            "./charts/",
            "./README.md",
            "./CHANGELOG.md",
        ];
        is_ours.iter().any(|begin| line.starts_with(begin)) && !line.contains("docker://")
    });
    let (with, without): (Vec<_>, Vec<_>) = lines
        .filter(|line| !line.starts_with("./docs/options.md"))
        .partition(|line| line.contains(&pinned));
    assert!(with.len() > 10, "{named}");
    assert!(without.is_empty(), "{without:?}");
}

#[test]
#[ignore = "needs programs and packages: make test-release"]
fn the_pages_name_each_file_of_a_release_and_no_other() {
    let release = release();
    let mut names = release.names();
    assert!(names.remove("apt"));
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
        ".raw.zst",
        "firstlight-node-image-VARIANT.json",
        ".json.sig",
        "SHA256SUMS",
        "SHA256SUMS.sig",
    ];
    page.split(|c| !is_part(c))
        .map(|word| word.trim_end_matches(['.', ',']))
        .filter(|word| {
            let begins = [
                &["firstlight", "*", "SHA256SUMS", "NOTES.md"],
                &PROGRAMS[..5],
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
            "oci-archive:{}",
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
    let digest = release.digest();
    let expected = format!("image: \"registry.example.com/firstlight@{digest}\"");
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
    for name in release.names().iter().filter(|name| *name != "apt") {
        fs::copy(release.file(name), folder.path().join(name)).unwrap();
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
