//! `firstlight components`: it makes the list of a version from servers like those of Kubernetes, and checks it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::published::{Published, VERSION, sha256};
use serde_json::Value;

fn firstlight(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(support::program::built("firstlight"));
    command.args(args).current_dir(folder).output().unwrap()
}

fn make_list(published: &Published, more: &[&str]) -> Output {
    published.list(&support::program::built("firstlight"), more)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_list_has_the_published_hashes_and_a_node_can_check_them() {
    let published = Published::start();
    let made = make_list(&published, &[VERSION, "--etcd", "3.6.4-0"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let list: Vec<Value> = serde_json::from_slice(&made.stdout).unwrap();
    assert_eq!(list.len(), 9);
    let kubelet = list
        .iter()
        .find(|entry| entry["install_path"] == "/run/state/bin/kubelet")
        .unwrap();
    assert_eq!(
        kubelet["hash"],
        format!("sha256:{}", sha256(b"the program kubelet"))
    );
    assert_eq!(
        kubelet["url"],
        format!("{}/dl/{VERSION}/bin/linux/amd64/kubelet", published.url)
    );
    let patches: Vec<String> = list
        .iter()
        .filter_map(|entry| {
            entry["url"]
                .as_str()?
                .strip_prefix("data:application/json;base64,")
        })
        .map(|patch| {
            use base64::Engine;
            text(
                &base64::engine::general_purpose::STANDARD
                    .decode(patch)
                    .unwrap(),
            )
        })
        .collect();
    let scheduler = sha256(br#"{"schemaVersion":2,"manifests":[],"name":"kube-scheduler"}"#);
    for image in [
        format!("registry.k8s.io/kube-scheduler:{VERSION}@sha256:{scheduler}"),
        format!(
            "registry.k8s.io/etcd:3.6.4-0@sha256:{}",
            sha256(br#"{"manifests":[]}"#)
        ),
    ] {
        assert!(
            patches.iter().any(|patch| patch.contains(&image)),
            "{image}: {patches:?}"
        );
    }
    // without a tag of etcd, the operator learns that no hash pins etcd
    let made_without = make_list(&published, &[VERSION]);
    let list: Vec<Value> = serde_json::from_slice(&made_without.stdout).unwrap();
    assert_eq!(list.len(), 8);
    assert!(
        text(&made_without.stderr).contains("no digest pins it"),
        "{}",
        text(&made_without.stderr)
    );

    let folder = published.folder.path();
    fs::write(folder.join("components.json"), &made.stdout).unwrap();
    fs::create_dir(folder.join("files")).unwrap();
    fs::write(folder.join("files/kubelet"), "the program kubelet").unwrap();
    let check = |more: &[&str]| {
        firstlight(
            folder,
            &[&["components", "--check", "components.json"], more].concat(),
        )
    };
    let checked = check(&["--files", "files"]);
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    assert!(
        text(&checked.stdout)
            .contains("9 components, each in the form that a node requires; 1 files"),
        "{}",
        text(&checked.stdout)
    );
    fs::write(folder.join("files/kubeadm"), "another program").unwrap();
    let checked = check(&["--files", "files"]);
    assert_eq!(checked.status.code(), Some(1));
    let said = text(&checked.stderr);
    assert!(
        said.contains("files/kubeadm: expected sha256:") && said.contains("got sha256:"),
        "{said}"
    );

    // lists that a node refuses
    let list = text(&made.stdout);
    for (from, to, expected) in [
        (
            "/run/state/bin/kubelet",
            "/etc/kubelet",
            "not in an allowed directory",
        ),
        (
            "/run/state/bin/kubelet",
            "/run/state/bin/kubelets",
            "no component is installed as kubelet",
        ),
        (
            &*format!("sha256:{}", sha256(b"the program kubelet")),
            "",
            "it has no hash",
        ),
        ("[", "", "not a list of components"),
    ] {
        fs::write(folder.join("components.json"), list.replacen(from, to, 1)).unwrap();
        let checked = check(&[]);
        let said = text(&checked.stderr);
        assert!(
            checked.status.code() == Some(1) && said.contains(expected),
            "{expected}: {said}"
        );
    }
}

/// As kubeadm takes `v1.36`. A list that was made before says what its newest patch is.
#[test]
fn a_minor_version_stands_for_its_newest_patch() {
    let published = Published::start();
    let missing = make_list(&published, &["v1.34"]);
    let said = text(&missing.stderr);
    assert!(
        missing.status.code() == Some(1) && said.contains("stable-1.34.txt: not published"),
        "{said}"
    );
    published.write("dl/release/stable-1.34.txt", "v1.34.4\n");
    let made = make_list(&published, &["v1.34"]);
    let said = text(&made.stderr);
    assert!(made.status.success(), "{said}");
    assert!(
        said.contains("v1.34: the newest patch is v1.34.4"),
        "{said}"
    );
    assert!(text(&made.stdout).contains("/v1.34.4/bin/linux/amd64/kubelet"));
    for bad in ["v1.35.1", "v1.34", "v1.34.x", "<html>"] {
        published.write("dl/release/stable-1.34.txt", bad);
        let refused = make_list(&published, &["v1.34"]);
        assert!(!refused.status.success(), "{bad}");
    }
    let folder = published.folder.path();
    fs::write(folder.join("list.json"), &made.stdout).unwrap();
    // as an editor of Windows writes it
    let marked = [&b"\xef\xbb\xbf"[..], &made.stdout].concat();
    fs::write(folder.join("marked.json"), marked).unwrap();
    for command in [&["upgrade"][..], &["rollout", "plan", "--kubernetes"]] {
        for list in ["list.json", "marked.json"] {
            let with = |version: &str| {
                let more = ["--components", list, "--kubeconfig", "none.conf"];
                let args = [command, &[version], &more].concat();
                text(&firstlight(folder, &args).stderr)
            };
            for version in ["v1.34", "1.34"] {
                let said = with(version);
                assert!(said.contains("the newest patch is v1.34.4"), "{said}");
            }
            for version in ["v1.34.4", "1.34.4"] {
                let said = with(version);
                let is_read = said.contains("none.conf") && said.contains("does not exist");
                assert!(is_read, "{said}");
            }
            let said = with("v1.35");
            let expected = format!("{list}: expected a patch of v1.35, got \"v1.34.4\"");
            assert!(said.contains(&expected), "{said}");
        }
    }
}

#[test]
fn what_is_not_published_is_named() {
    let published = Published::start();
    let failure = |more: &[&str], code, expected: &str| {
        let output = make_list(&published, more);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{more:?}: {said}");
        assert!(said.contains(expected), "{more:?}: {said}");
        assert!(output.stdout.is_empty(), "{more:?}");
    };
    failure(
        &["v1.34.99"],
        1,
        "kubelet.sha256: not published (status 404)",
    );
    failure(&["v1.34.x"], 2, "expected");
    failure(&["v1.20.0"], 2, "v1.31 to");
    failure(&[], 2, "VERSION");
    failure(&[VERSION, "--check", "x"], 2, "cannot be used with");
    failure(
        &[VERSION, "--etcd", "0.0.0"],
        1,
        "etcd/manifests/0.0.0: not published",
    );
    failure(
        &[VERSION, "--downloads", "http://localhost"],
        2,
        "expected https://",
    );
    failure(&[VERSION, "--ca", "/dev/null"], 1, "/dev/null");
    published.write(
        &format!("dl/{VERSION}/bin/linux/amd64/kubectl.sha256"),
        "<html>sign in</html>",
    );
    failure(
        &[VERSION],
        1,
        "kubectl.sha256: expected a SHA-256 of 64 hexadecimal digits, got \"<html>sign in</html>\"",
    );
    published.write(
        &format!("dl/{VERSION}/bin/linux/amd64/kubectl.sha256"),
        &"A".repeat(2 << 20),
    );
    failure(&[VERSION], 1, "more than 1048576 bytes");
    published.write(
        &format!("dl/{VERSION}/bin/linux/amd64/kubectl.sha256"),
        &sha256(b""),
    );
    published.write(&format!("v2/kube-scheduler/manifests/{VERSION}"), "{}");
    failure(&[VERSION], 1, "not an image index: it has no manifests");
    // an unreachable server
    let away = [
        "components",
        VERSION,
        "--downloads",
        "https://127.0.0.1:1",
        "--timeout",
        "5s",
    ];
    let output = firstlight(published.folder.path(), &away);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
}
