//! docs/clouds/libvirt.md and infra/libvirt: what the real libvirt has made of both.

use std::fs;
use std::process::Command;

use roxmltree::{Document, Node};
use serde_json::{Value, json};
use support::ROOT;
use support::boot_image::run;
use support::foreign::fetched;

use super::super::work::Work;
use super::{Facts, Module, Plan, Provider, compare, init, init_of_page, texts};

/// Checks that the module makes the same as the page's commands, which have written the XML of each machine to page-NAME.xml.
pub fn check(work: &Work) {
    let module = Module::new("libvirt");
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let list: Value = serde_json::from_str(&work.read("machines.json")).unwrap();
    let mut variables = json!({"image": work.path("firstlight.raw"), "init_secret_hash": list["initSecretHash"], "memory": 1024,
        "hypervisor": "qemu", "state_disk_gibibytes": 50, "folder": place("machines"), "consoles": folder.path()});
    fs::write(place("now.tfvars.json"), variables.to_string()).unwrap();
    variables["control_planes"] = json!(3);
    variables["workers"] = json!(2);
    fs::write(place("later.tfvars.json"), variables.to_string()).unwrap();
    // other values, which count only for machines that are made afterwards
    let changed = json!({"image": place("other.raw"), "init_secret_hash": null, "memory": 2048, "hypervisor": "kvm",
        "state_disk_gibibytes": 40, "folder": place("other"), "consoles": place("other"), "variables": place("other")});
    fs::write(place("changed.tfvars.json"), changed.to_string()).unwrap();
    let script = format!("{ROOT}/tests/cloud_pages/infra/libvirt.sh");
    let mut command = Command::new(script);
    command.arg(fetched("opentofu.sh").join("bin/tofu"));
    command
        .arg(folder.path())
        .args(["now", "later", "changed"].map(|name| place(&format!("{name}.tfvars.json"))));
    module.environment(Provider::Usual, &mut command);
    run(&mut command);

    let mut page = Facts::from([init_of_page("libvirt")]);
    page.extend(machine(&work.read("page-control-plane-0.xml")));
    page.extend(network(&work.read("network.xml")));
    page.extend(machines_of(&list));
    page.extend(
        work.read("haproxy.cfg")
            .lines()
            .map(|line| format!("haproxy: {line}")),
    );

    let read = |name: &str| fs::read_to_string(place(name)).unwrap();
    let later = Plan::read(&read("later.json"));
    later.only(&["create", "no-op"]);
    let changed = Plan::read(&read("changed.json"));
    changed.only(&["no-op"]);
    assert!(!changed.output("machines").contains("initSecretHash"));
    let mut made = Facts::from([init(later.output("init"), "ENDPOINT")]);
    made.extend(machine(&read("machine.xml")));
    made.extend(network(&read("network.xml")));
    // with its machine an address comes into the network
    for one in later.values("libvirt_domain") {
        let card = &one["network_interface"][0];
        let [name, mac, address] =
            ["hostname", "mac", "addresses"].map(|it| texts(&card[it]).join(","));
        assert_eq!(one["name"], name.as_str());
        // the network has that of the machine that is there
        if !address.is_empty() {
            made.insert(host(&mac, &name, &address));
        }
    }
    made.extend(machines_of(
        &serde_json::from_str(later.output("machines")).unwrap(),
    ));
    made.extend(
        later
            .output("haproxy")
            .lines()
            .map(|line| format!("haproxy: {line}")),
    );
    compare("libvirt", &page, &made);
}

/// Returns the lines of a list of machines.
fn machines_of(list: &Value) -> Facts {
    let machines = list["machines"].as_array().unwrap().iter();
    let mut facts: Facts = machines.map(|one| format!("list: {one}")).collect();
    facts.insert(format!(
        "list: {} {}",
        list["endpoint"], list["initSecretHash"]
    ));
    facts
}

fn host(mac: &str, name: &str, address: &str) -> String {
    format!("address {address} for {name} {}", mac.to_lowercase())
}

fn network(xml: &str) -> Facts {
    let document = Document::parse(xml).unwrap();
    let all = |name: &'static str| {
        document
            .descendants()
            .filter(move |node| node.has_tag_name(name))
    };
    let of = |node: Node, name| node.attribute(name).unwrap_or_default().to_owned();
    let mut facts = Facts::new();
    facts.extend(all("name").map(|node| format!("network {}", node.text().unwrap())));
    facts.extend(all("forward").map(|node| format!("network mode {}", of(node, "mode"))));
    facts.extend(all("bridge").map(|node| format!("network bridge {}", of(node, "name"))));
    facts.extend(all("range").map(|node| format!("network range {}", of(node, "start"))));
    facts
        .extend(all("host").map(|node| host(&of(node, "mac"), &of(node, "name"), &of(node, "ip"))));
    for node in all("ip") {
        let mask = node
            .attribute("prefix")
            .map_or(of(node, "netmask"), |it| it.replace("24", "255.255.255.0"));
        facts.insert(format!("network {} {mask}", of(node, "address")));
    }
    facts
}

/// Returns what matters of a machine: that it boots the image as the policy wants it, and that it finds its disk.
fn machine(xml: &str) -> Facts {
    let document = Document::parse(xml).unwrap();
    let root = document.root_element();
    let mut facts = Facts::new();
    // (path, attributes; the text if there are none)
    let parts: [(&str, &[&str]); 19] = [
        ("name", &[]),
        ("memory", &["unit"]),
        ("memory", &[]),
        ("vcpu", &[]),
        ("os/type", &["arch"]),
        ("os/type", &["machine"]),
        ("os/loader", &["readonly", "type"]),
        ("os/loader", &[]),
        ("os/nvram", &["template"]),
        ("devices/disk", &["device"]),
        ("devices/disk/driver", &["type"]),
        ("devices/disk/target", &["dev", "bus"]),
        ("devices/disk/serial", &[]),
        ("devices/disk/boot", &["order"]),
        ("devices/interface/mac", &["address"]),
        ("devices/interface/model", &["type"]),
        ("devices/interface/rom", &["bar"]),
        ("devices/tpm/backend", &["type", "version"]),
        ("devices/console/log", &["append"]),
    ];
    for (path, attributes) in parts {
        let mut nodes = vec![root];
        for name in path.split('/') {
            let inner = nodes.into_iter().flat_map(|node| node.children());
            nodes = inner.filter(|node| node.has_tag_name(name)).collect();
        }
        for node in nodes {
            let values: Vec<_> = attributes
                .iter()
                .map(|it| node.attribute(*it).unwrap_or_default())
                .collect();
            let value = if attributes.is_empty() {
                node.text().unwrap_or_default().trim()
            } else {
                &values.join(" ")
            };
            facts.insert(format!("{path} {attributes:?} {value}"));
        }
    }
    let devices = root
        .children()
        .find(|node| node.has_tag_name("devices"))
        .unwrap();
    for name in [
        "disk",
        "interface",
        "tpm",
        "rng",
        "graphics",
        "video",
        "channel",
        "serial",
    ] {
        let count = devices
            .children()
            .filter(|node| node.has_tag_name(name))
            .count();
        facts.insert(format!("{count} devices {name}"));
    }
    let tpm = devices
        .children()
        .find(|node| node.has_tag_name("tpm"))
        .unwrap();
    facts.insert(format!("tpm {:?}", tpm.attribute("model")));
    facts
}
