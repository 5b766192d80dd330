//! The Debian packages of `tools/deb.sh`: Debian's own tools check them, resolve their dependencies, install them, and make initrds
//! from them.
//!
//! They need `make build`'s programs, so `cargo test` skips them; `make deb` runs them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::ROOT;
use support::program::{PROGRAMS, run};
use tempfile::TempDir;

const PACKAGES: [&str; 5] = [
    "firstlight",
    "firstlight-initramfs",
    "firstlight-node",
    "firstlight-broker",
    "firstlight-volume",
];

fn root() -> &'static Path {
    Path::new(ROOT)
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
        "usr/bin/join-service",
        "usr/share/man/man8/key-service.8.gz",
        "usr/bin/firstlight-volume",
        "usr/lib/systemd/system/firstlight-volume.socket",
        "usr/lib/systemd/system/systemd-cryptsetup@.service.d/firstlight.conf",
        "usr/lib/systemd/system/firstlight-join-service.service",
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

/// The initrd of a package is the same as one with the programs, so the boot tests of one also test the other.
#[test]
#[ignore = "needs packages: make deb"]
fn an_initrd_is_the_same_with_the_package_as_with_the_script() {
    let folder = TempDir::new().unwrap();
    let program = root().join("target/dist/unlock");
    for system in ["dracut", "initramfs-tools"] {
        let make = |from: &Path, name: &str| {
            let initrd = folder.path().join(format!("{system}.{name}"));
            make_initrd(system, &initrd, from, &[]);
            initrd
        };
        let initrd = make(&deb("firstlight-initramfs"), "package");
        let other = make(&program, "script");
        assert!(fs::read(&initrd).unwrap() == fs::read(other).unwrap());

        let content = content(&initrd);
        let unlock = fs::read(content.path().join("usr/lib/firstlight/unlock")).unwrap();
        assert!(unlock == fs::read(&program).unwrap(), "{system}");
    }
}

/// `unlock` uses no HTTPS in any cloud, so the certificates would only make the initrd larger.
#[test]
#[ignore = "needs packages: make deb"]
fn the_initrd_of_a_cloud_has_no_authorities_of_web_servers() {
    let folder = TempDir::new().unwrap();
    let program = root().join("target/dist/unlock");
    let authorities = folder.path().join("authorities");
    fs::write(&authorities, "the image trusts these\n").unwrap();
    let image = [
        ("SETTINGS", " csp = azure"),
        ("AUTHORITIES", authorities.to_str().unwrap()),
    ];
    for system in ["dracut", "initramfs-tools"] {
        let initrd = folder.path().join(system);
        let said = make_initrd(system, &initrd, &program, &image);
        assert!(!said.contains("ca-certificates"), "{said}");
        let content = content(&initrd);
        let node = content.path().join("etc/firstlight/node.conf");
        assert!(node.exists(), "{system}");
        let file = content.path().join("etc/ssl/certs/ca-certificates.crt");
        assert!(!file.exists(), "{system}");
    }
}

/// Makes an initrd with Debian 12's `system` and the variables `image` of tools/initrd.sh. Returns what it says.
fn make_initrd(system: &str, initrd: &Path, from: &Path, image: &[(&str, &str)]) -> String {
    let mut make = Command::new(root().join("tools/initrd.sh"));
    make.args([system, "bookworm"]).arg(initrd).arg(from);
    make.envs(image.iter().copied());
    text(&run(&mut make).stderr)
}

/// Unpacks the files of Firstlight from an initrd.
fn content(initrd: &Path) -> TempDir {
    let content = TempDir::new().unwrap();
    shell(
        // zeros follow the compressed part
        r#"cd "$2"; { zstd -dc "$1" 2>/dev/null || true; } | cpio --quiet -idm '*firstlight*' '*ca-certificates.crt'"#,
        &[initrd, content.path()],
    );
    content
}

/// A program names the source files in which it may panic; their crates have to be in its bill of materials.
#[test]
#[ignore = "needs packages: make deb"]
fn the_bill_of_materials_has_each_crate_that_the_program_names() {
    for program in PROGRAMS {
        let bill = root().join(format!("target/deb/{program}.cdx.json"));
        let bill: Value = serde_json::from_slice(&fs::read(bill).unwrap()).unwrap();
        let components = bill["components"].as_array().unwrap().iter();
        let listed: BTreeSet<String> = components
            .map(|it| {
                format!(
                    "{}-{}",
                    it["name"].as_str().unwrap(),
                    it["version"].as_str().unwrap()
                )
            })
            .collect();
        let binary = fs::read(root().join("target/dist").join(program)).unwrap();
        let named = crates_named_in(&String::from_utf8_lossy(&binary));
        assert!(named.len() > 10, "{program}: {named:?}");
        let missing: Vec<_> = named.difference(&listed).collect();
        assert!(missing.is_empty(), "{program}: {missing:?}");
    }
}

#[test]
#[ignore = "needs packages: make deb"]
fn each_package_has_the_license_texts_of_the_libraries_in_it() {
    for (package, prefix, program) in [
        ("firstlight", "", "firstlight"),
        ("firstlight-initramfs", "", "unlock"),
        ("firstlight-node", "", "bootstrapper"),
        ("firstlight-broker", "join-service-", "join-service"),
        ("firstlight-broker", "key-service-", "key-service"),
        ("firstlight-volume", "", "firstlight-volume"),
    ] {
        let member = format!("./usr/share/doc/{package}/{prefix}third-party.gz");
        let texts = shell(
            r#"dpkg-deb --fsys-tarfile "$1" | tar xO "$2" | gzip -d"#,
            &[&deb(package), Path::new(&member)],
        );
        let texts = text(&texts.stdout);
        let bill = root().join(format!("target/deb/{program}.cdx.json"));
        let bill: Value = serde_json::from_slice(&fs::read(bill).unwrap()).unwrap();
        for component in bill["components"].as_array().unwrap() {
            let field = |name: &str| component[name].as_str().unwrap();
            let library = format!("{} {}", field("name"), field("version"));
            // crates of this workspace have no source that can be fetched, and have the program's license
            let ours = component.get("purl").is_none();
            let named = texts
                .lines()
                .any(|line| line.split(", ").any(|it| it == library));
            assert_eq!(named, !ours, "{package}: {library}");
        }
        for words in [
            "Permission is hereby granted, free of charge",
            "Redistribution and use in source and binary forms",
            "Rich Felker",
        ] {
            assert!(texts.contains(words), "{package}: {words}");
        }
    }
}

/// Returns `NAME-VERSION` from the paths `/cargo/registry/src/INDEX/NAME-VERSION/..`, which tools/build.sh gives the sources.
fn crates_named_in(binary: &str) -> BTreeSet<String> {
    let paths = binary.split("/cargo/registry/src/").skip(1);
    paths
        .filter_map(|path| path.split('/').nth(1))
        .map(str::to_owned)
        .collect()
}
