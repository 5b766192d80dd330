//! systemd itself checks the units of the folder systemd/.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use bootstrapper::members::renew::KUBERNETES;
use kubernetes::kubeadm::KUBELET_CLIENT_CERTIFICATE;
use std::os::unix::fs::symlink;
use support::ROOT;
use tempfile::TempDir;

/// The folder of units below a root file system.
const UNITS: &str = "usr/lib/systemd/system";

/// Returns a root file system with our units, and with the units of this machine's systemd that they name.
fn installed() -> TempDir {
    let root = TempDir::new().unwrap();
    let program = Path::new("/bin/true");
    let status = Command::new(Path::new(ROOT).join("systemd/install.sh"))
        .args([program, root.path()])
        .status()
        .unwrap();
    assert!(status.success());
    for entry in fs::read_dir(Path::new("/").join(UNITS)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().extension().is_some_and(|it| it == "target") {
            fs::copy(
                entry.path(),
                root.path().join(UNITS).join(entry.file_name()),
            )
            .unwrap();
        }
    }
    // `bootstrapper` installs it there
    let programs = root.path().join("run/state/bin");
    fs::create_dir_all(&programs).unwrap();
    fs::copy(program, programs.join("kubelet")).unwrap();
    root
}

/// Returns the names of the units in the folder systemd/.
fn units() -> Vec<String> {
    let entries = fs::read_dir(Path::new(ROOT).join("systemd")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| {
            let kinds = [".service", ".socket", ".timer", ".mount"];
            kinds.iter().any(|kind| name.ends_with(kind))
        })
        .collect()
}

/// Returns the faults of the units that systemd reports. Its exit code is 0 for most faults. Before version 254 systemd has no
/// RestartMode, and needs none.
fn faults(root: &Path) -> String {
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["verify", "--man=no"]).args(units());
    let output = in_root(analyze, root);
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines()
        .filter(|line| !line.contains("Unknown key 'RestartMode'"))
        .collect()
}

fn in_root(mut command: Command, root: &Path) -> Output {
    let root = format!("--root={}", root.display());
    command.arg(root).output().unwrap()
}

#[test]
fn systemd_finds_no_fault_in_our_units() {
    let root = installed();
    assert_eq!(faults(root.path()), "");

    let unit = root.path().join(UNITS).join("bootstrapper.service");
    let text = fs::read_to_string(&unit).unwrap();
    fs::write(&unit, text.replace("KillMode=mixed", "KillMode=mixd")).unwrap();
    let said = faults(root.path());
    assert!(said.contains("Failed to parse kill mode"), "{said}");
    fs::write(&unit, text).unwrap();
    fs::remove_file(root.path().join("usr/bin/bootstrapper")).unwrap();
    let said = faults(root.path());
    assert!(said.contains("/usr/bin/bootstrapper is not exec"), "{said}");
}

/// Outside of these folders the file system is read-only for it.
#[test]
fn the_renewal_may_write_the_certificates_that_it_renews() {
    let unit = Path::new(ROOT).join("systemd/firstlight-renew.service");
    let unit = fs::read_to_string(unit).unwrap();
    let folders = unit
        .lines()
        .find_map(|line| line.strip_prefix("ReadWritePaths="))
        .unwrap();
    for file in [KUBERNETES, KUBELET_CLIENT_CERTIFICATE] {
        let is_within = |folder: &str| Path::new(file).starts_with(folder.trim_start_matches('-'));
        assert!(folders.split(' ').any(is_within), "{file}");
    }
}

#[test]
fn the_preset_enables_all_units_except_those_that_others_start() {
    let root = installed();
    let mut preset = Command::new("systemctl");
    preset.arg("preset").args(units());
    let output = in_root(preset, root.path());
    assert!(output.status.success(), "{output:?}");
    for unit in units() {
        let mut is_enabled = Command::new("systemctl");
        is_enabled.args(["is-enabled", &unit]);
        let output = in_root(is_enabled, root.path());
        // only a node whose cluster opened its disk may run the kubelet, so only `bootstrapper` may start it
        let expected = match unit.as_str() {
            "kubelet.service" => "static",
            // its socket starts it
            "firstlight-evidence.service" => "static",
            _ => "enabled",
        };
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.trim(), expected, "{unit}");
    }
}

#[test]
fn systemd_finds_no_fault_in_the_units_of_a_key_broker() {
    let (root, programs) = (installed(), TempDir::new().unwrap());
    for program in ["join-service", "key-service"] {
        fs::copy("/bin/true", programs.path().join(program)).unwrap();
    }
    run(Command::new(at("systemd/broker/install.sh")).args([programs.path(), root.path()]));
    let units = [
        "firstlight-join-service.service",
        "firstlight-key-service.service",
    ];
    let verify = || {
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["verify", "--man=no"]).args(units);
        let output = in_root(analyze, root.path());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(verify(), "");
    for unit in units {
        let path = root.path().join(UNITS).join(unit);
        let text = fs::read_to_string(&path).unwrap();
        // nothing but the secrets that systemd hands over is the program's
        for line in ["DynamicUser=yes", "ProtectSystem=strict", "LimitCORE=0"] {
            assert!(text.contains(line), "{unit}: {line}");
        }
    }
    fs::remove_file(root.path().join("usr/bin/join-service")).unwrap();
    let said = verify();
    assert!(said.contains("/usr/bin/join-service is not exec"), "{said}");
}

#[test]
fn systemd_finds_no_fault_in_the_units_of_a_machine_with_a_volume() {
    let root = installed();
    run(Command::new(at("systemd/volume/install.sh")).args([Path::new("/bin/true"), root.path()]));
    let verify = || {
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["verify", "--man=no"]);
        analyze.args(["firstlight-volume.socket", "firstlight-volume@1.service"]);
        let output = in_root(analyze, root.path());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(verify(), "");
    fs::remove_file(root.path().join("usr/bin/firstlight-volume")).unwrap();
    let said = verify();
    assert!(
        said.contains("/usr/bin/firstlight-volume is not exec"),
        "{said}"
    );
}

/// systemd-analyze checks the conditions on this machine, which is not a node, and names each.
#[test]
fn agents_of_the_host_are_skipped_on_a_node_unless_the_image_overrides_it() {
    let root = installed();
    let conditions = |agent: &str| {
        let mut condition = Command::new("systemd-analyze");
        condition.args(["condition", &format!("--unit={agent}.service")]);
        let output = in_root(condition, root.path());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let agents = fs::read_to_string(Path::new(ROOT).join("systemd/host-agents")).unwrap();
    let agents = agents.lines().filter(|line| !line.starts_with('#'));
    let agents: Vec<&str> = agents.flat_map(str::split_whitespace).collect();
    for needed in ["cloud-init", "qemu-guest-agent", "walinuxagent"] {
        assert!(agents.contains(&needed), "{needed}");
    }
    let skipped = "ConditionPathExists=!/usr/bin/bootstrapper";
    for agent in agents {
        let unit = root.path().join(UNITS).join(format!("{agent}.service"));
        fs::write(unit, "[Service]\nExecStart=/usr/bin/bootstrapper\n").unwrap();
        let said = conditions(agent);
        assert!(said.contains(skipped), "{agent}: {said}");
    }
    let own = root
        .path()
        .join("etc/systemd/system/qemu-guest-agent.service.d");
    fs::create_dir_all(&own).unwrap();
    fs::write(own.join("firstlight.conf"), "").unwrap();
    let said = conditions("qemu-guest-agent");
    assert!(!said.contains(skipped), "{said}");
}

/// Returns the values of a setting of mkosi in these files.
fn settings(name: &str, files: &[&str]) -> BTreeSet<String> {
    let mut values = BTreeSet::new();
    for file in files {
        let mut is_in_it = false;
        for line in fs::read_to_string(at("mkosi").join(file)).unwrap().lines() {
            let value = match line.strip_prefix([' ', '\t']) {
                Some(value) => value,
                None => {
                    let named = line.strip_prefix(name).and_then(|it| it.strip_prefix('='));
                    is_in_it = named.is_some();
                    named.unwrap_or_default()
                }
            };
            let value = value.trim();
            if is_in_it && !value.is_empty() && !value.starts_with('#') {
                values.insert(value.to_owned());
            }
        }
    }
    values
}

fn at(path: &str) -> PathBuf {
    Path::new(ROOT).join(path)
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn of_node(arguments: &[&str]) -> String {
    run(Command::new(at("tools/node-image.sh")).args(arguments))
}

/// Installs what the image of mkosi has beside its packages, as mkosi does.
fn install_image(root: &Path, files: &[&str]) {
    let tree = at("mkosi/mkosi.extra/.");
    run(Command::new("cp").arg("-r").args([&tree, root]));
    for pair in settings("ExtraTrees", files) {
        let (from, to) = pair.split_once(':').unwrap();
        let to = root.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(at("mkosi").join(from), to).unwrap();
    }
    // in place of the programs of `make build`
    let source = TempDir::new().unwrap();
    fs::create_dir_all(source.path().join("target/dist")).unwrap();
    symlink(at("systemd"), source.path().join("systemd")).unwrap();
    fs::write(source.path().join("target/dist/bootstrapper"), "").unwrap();
    for script in ["mkosi.postinst", "mkosi.finalize"] {
        let mut mkosi = Command::new(at("mkosi").join(script));
        mkosi.env("SRCDIR", source.path()).env("BUILDROOT", root);
        if script == "mkosi.finalize" {
            run(Command::new("systemctl")
                .arg("preset-all")
                .arg(format!("--root={}", root.display())));
        }
        run(&mut mkosi);
    }
    fs::remove_file(root.join("usr/bin/bootstrapper")).unwrap();
}

/// Returns what is at the paths below a folder: a file's content, or where a link leads to.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let found = run(Command::new("find")
        .arg(root)
        .args(["!", "-type", "d", "-printf", "%P\n"]));
    let content = |path: &str| match fs::read_link(root.join(path)) {
        Ok(target) => target.into_os_string().into_encoded_bytes(),
        Err(_) => fs::read(root.join(path)).unwrap(),
    };
    found
        .lines()
        .map(|path| (path.to_owned(), content(path)))
        .collect()
}

/// The node of `make test-cluster` has the packages, files and units of the image, except for the differences that the document names.
#[test]
fn the_node_of_the_cluster_tests_is_the_image_but_for_documented_differences() {
    let document = fs::read_to_string(at("docs/testing-kubernetes.md")).unwrap();
    let (_, table) = document
        .split_once("## Differences from the image")
        .unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let quoted = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let documented: BTreeSet<String> = quoted
        .map(|line| line.split('`').next().unwrap().to_owned())
        .collect();

    let files = ["mkosi.conf", "mkosi.conf.d/release.conf"];
    let lines = |text: String| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let mut found = BTreeSet::new();
    for (of_image, of_node) in [
        (settings("Packages", &files), lines(of_node(&["packages"]))),
        (
            settings("RemoveFiles", &files),
            lines(of_node(&["removed"])),
        ),
    ] {
        assert!(of_image.len() > 10);
        found.extend(of_image.symmetric_difference(&of_node).cloned());
    }
    let (image, node) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for root in [&image, &node] {
        fs::create_dir(root.path().join("boot")).unwrap();
    }
    install_image(image.path(), &files);
    of_node(&["system", node.path().to_str().unwrap()]);
    let (image, node) = (contents(image.path()), contents(node.path()));
    assert!(image.len() > 30);
    let paths: BTreeSet<_> = image.keys().chain(node.keys()).collect();
    let differ = paths
        .into_iter()
        .filter(|path| image.get(*path) != node.get(*path));
    found.extend(differ.map(|path| format!("/{path}")));
    assert_eq!(found, documented);
}
