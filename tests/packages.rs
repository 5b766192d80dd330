//! The Debian packages of `tools/deb.sh`: Debian's own tools judge them, resolve and install them, and make initrds from them.
//!
//! They need `make build`'s programs, so `cargo test` skips them; `make deb` runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use support::ROOT;
use tempfile::TempDir;

const PACKAGES: [&str; 3] = ["firstlight", "firstlight-initramfs", "firstlight-node"];

fn root() -> &'static Path {
    Path::new(ROOT)
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

/// Runs commands of the shell with the functions of tools/lib.sh.
fn shell(commands: &str, arguments: &[&Path]) -> Output {
    let mut command = Command::new("bash");
    command
        .args(["-c", &format!(". tools/lib.sh; {commands}"), "tools/test"])
        .args(arguments)
        .current_dir(root());
    run(&mut command)
}

fn deb(package: &str) -> PathBuf {
    let version = env!("CARGO_PKG_VERSION");
    root().join(format!("target/deb/{package}_{version}_amd64.deb"))
}

/// Returns the root file system of a small Debian, as a copy that may be changed.
fn debian() -> TempDir {
    let copy = TempDir::new().unwrap();
    shell(
        r#"cp -a "$(tools/debian.sh bookworm)/root/." "$1""#,
        &[copy.path()],
    );
    copy
}

/// Returns the paths below `root` that are not folders, sorted.
fn files(root: &Path) -> Vec<String> {
    let mut find = Command::new("find");
    find.arg(root).args(["!", "-type", "d", "-printf", "%P\n"]);
    let mut files: Vec<_> = text(&run(&mut find).stdout)
        .lines()
        .map(str::to_owned)
        // dpkg's own records
        .filter(|path| !path.starts_with("var/lib/"))
        .collect();
    files.sort();
    files
}

#[test]
#[ignore = "needs packages: make deb"]
fn lintian_finds_no_error() {
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error", "--allow-root"]);
    let output = run(lintian.args(PACKAGES.map(deb)));
    print!("{}", text(&output.stdout));
}

#[test]
#[ignore = "needs packages: make deb"]
fn apt_finds_all_that_the_packages_depend_on() {
    let empty = TempDir::new().unwrap();
    let status = empty.path().join("status");
    fs::write(&status, "").unwrap();
    let arguments: Vec<PathBuf> = [vec![status], PACKAGES.map(deb).to_vec()].concat();
    for suite in ["bookworm", "trixie"] {
        let commands = format!(
            r#"status=$1; shift; source="deb $(mirror) {suite} main"
            private_apt "$source" -- update
            private_apt "$source" -- -o Dir::State::status="$status" --no-install-recommends --simulate install "$@""#
        );
        let arguments: Vec<&Path> = arguments.iter().map(PathBuf::as_path).collect();
        shell(&commands, &arguments);
    }
}

#[test]
#[ignore = "needs packages: make deb"]
fn the_packages_can_be_installed_and_leave_nothing_behind() {
    let debian = debian();
    let before = files(debian.path());
    let packages = PACKAGES.map(deb);
    let arguments = [
        &[debian.path()][..],
        &packages.each_ref().map(|it| it.as_path()),
    ]
    .concat();
    shell(r#"install_package "$@""#, &arguments);

    let installed = files(debian.path());
    for path in [
        "usr/bin/firstlight",
        "usr/share/man/man1/firstlight.1.gz",
        "usr/share/bash-completion/completions/firstlight",
        "usr/lib/firstlight/unlock",
        "usr/lib/dracut/modules.d/95firstlight/module-setup.sh",
        "usr/share/initramfs-tools/hooks/firstlight",
        "etc/firstlight/node.conf",
        "usr/bin/bootstrapper",
        "etc/systemd/system/multi-user.target.wants/bootstrapper.service",
        "etc/systemd/system/local-fs.target.requires/var.mount",
    ] {
        assert!(installed.iter().any(|it| it == path), "no {path}");
    }
    let kubelet = |path: &String| path.starts_with("etc/") && path.contains("kubelet");
    assert_eq!(installed.iter().find(|path| kubelet(path)), None);

    let mut dpkg = Command::new("dpkg");
    dpkg.arg(format!("--root={}", debian.path().display()));
    dpkg.args([
        "--log=/dev/null",
        "--force-not-root",
        "--force-script-chrootless",
    ]);
    run(dpkg.arg("--purge").args(PACKAGES));
    assert_eq!(files(debian.path()), before);
}

#[test]
#[ignore = "needs packages: make deb"]
fn both_systems_put_unlock_into_the_initrd_without_being_asked() {
    let folder = TempDir::new().unwrap();
    for system in ["dracut", "initramfs-tools"] {
        let initrd = folder.path().join(system);
        let mut make = Command::new(root().join("tools/initrd.sh"));
        make.args([system, "bookworm"]).arg(&initrd);
        run(make.arg(deb("firstlight-initramfs")));
        let content = folder.path().join("content");
        shell(
            // the initrd is followed by zeros
            r#"rm -rf "$2"; mkdir "$2"; cd "$2"; { zstd -dc "$1" 2>/dev/null || true; } | cpio --quiet -idm '*firstlight*'"#,
            &[&initrd, &content],
        );
        let unlock = fs::read(content.join("usr/lib/firstlight/unlock")).unwrap();
        let built = fs::read(root().join("target/dist/unlock")).unwrap();
        assert!(unlock == built, "{system}: another unlock");
        assert!(
            content.join("etc/firstlight/node.conf").exists(),
            "{system}"
        );
    }
}
