//! Runs the commands of docs/clouds/*.md, as these pages have them, and compares what they make with what the modules below infra/ make.
//! The clients and emulators come from Python's package index, OpenTofu from the Go module proxy (`make cloud-pages`).

mod aws;
mod infra;
mod libvirt;
mod operators;
mod page;
mod parsers;
mod stop;
mod work;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::ROOT;

use page::Page;

/// Returns the folder with the programs of one of the clouds' clients.
fn client(name: &str) -> PathBuf {
    let script = Path::new(ROOT).join("tools/cloud-clients.sh");
    let output = Command::new(script).arg(name).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap().trim().into()
}

#[test]
fn each_block_of_commands_is_valid_for_bash() {
    let mut checked = 0;
    for page in Page::all() {
        for block in page.blocks() {
            let output = Command::new("bash")
                .args(["-n", "-c", &block.text])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.is_empty(), "{}:{}: {said}", page.name, block.line);
            checked += 1;
        }
    }
    assert!(checked > 20, "{checked} blocks");
}

/// Returns the ports of the table in docs/clouds.md, those of a row with commas as several.
fn ports() -> BTreeSet<String> {
    let text = fs::read_to_string(Path::new(ROOT).join("docs/clouds.md")).unwrap();
    let (_, section) = text.split_once("## Ports between nodes").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let first = rows.filter_map(|row| row.split('|').nth(1));
    let words = first.flat_map(|cell| cell.split([' ', ',']));
    words
        .filter(|word| word.starts_with(|char: char| char.is_ascii_digit()))
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_cloud_opens_each_port_of_the_table() {
    let ports = ports();
    assert!(ports.len() >= 8, "{ports:?}");
    // libvirt and Proxmox have no firewall of their own
    for page in ["aws", "azure", "gcp", "openstack"].map(Page::read) {
        let commands: String = page.blocks().map(|block| block.text).collect();
        for port in &ports {
            let port = port.replace('-', page.range());
            assert!(commands.contains(&port), "{}: no {port}", page.name);
        }
    }
}

/// The modules open the same ports as the pages: `infra` compares them.
#[test]
fn control_planes_may_ask_each_node_for_evidence() {
    for (page, rule) in [
        ("aws", r#"allow "$NODES" tcp 9000 "$CONTROL_PLANES""#),
        (
            "azure",
            r#"allow watch Tcp 9000 "$NODES" "$CONTROL_PLANES""#,
        ),
        (
            "gcp",
            r#"allow watch tcp:9000 node "--source-tags=$CLUSTER-control-plane""#,
        ),
        ("openstack", "allow nodes tcp 9000 control-planes"),
    ] {
        let commands: String = Page::read(page).blocks().map(|block| block.text).collect();
        let has_rule = commands.lines().any(|line| line == rule);
        assert!(has_rule, "{page}: no {rule}");
    }
}

/// Returns the text of the error.
fn error<T: std::fmt::Debug>(result: Result<T, base::machines::Error>) -> String {
    result.unwrap_err().to_string()
}
