//! Tells why a machine that waits for its key reaches nobody.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use base::stop::Stop;
use base::timeline::Timeline;
use sys::interfaces;

const CARDS: &str = "/sys/class/net";
/// The buses of clouds: the file that tells a device's kind, and how it begins for a network card. PCI's class 02 is "network
/// controller", virtio's device type 1 "network card", and on Hyper-V the class ID is that of `hv_netvsc`.
const BUSES: [(&str, &str, &str); 3] = [
    ("/sys/bus/pci/devices", "class", "0x02"),
    ("/sys/bus/virtio/devices", "device", "0x0001"),
    (
        "/sys/bus/vmbus/devices",
        "class_id",
        "{f8615163-df3e-46c5-913f-f2d2f965ed0e}",
    ),
];

/// Interval between two looks at the addresses.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Reports the first address of this machine as an event, unless `finished` is set before it has one.
pub fn report(finished: Stop, timeline: Timeline) {
    let thread = thread::Builder::new().name("network".into());
    let reported = thread.spawn(move || {
        while !finished.wait(POLL_INTERVAL) {
            if let Some(address) = address() {
                timeline.event("network", address);
                return;
            }
        }
    });
    if let Err(error) = reported {
        log::warn!("cannot create a thread that watches the network: {error}");
    }
}

/// Returns an address by which this machine may reach others: not of the loopback interface, and not only of the local link.
pub fn address() -> Option<IpAddr> {
    let addresses = interfaces::addresses().unwrap_or_default();
    addresses.into_iter().find(|address| match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    })
}

/// Describes a network without which this machine reaches nobody; `None` if it has an address.
pub fn trouble() -> Option<String> {
    if address().is_some() {
        return None;
    }
    let cards = cards(Path::new(CARDS));
    let orphans: Vec<String> = BUSES
        .iter()
        .flat_map(|(bus, file, kind)| without_driver(Path::new(bus), file, kind))
        .collect();
    Some(match (cards.is_empty(), orphans.is_empty()) {
        (false, _) => format!(
            "no address yet: {}; check DHCP, or the static address on the kernel command line",
            cards.join(", ")
        ),
        (true, false) => format!(
            "no network card works: no driver for {}; the initrd lacks its kernel module",
            orphans.join(", ")
        ),
        (true, true) => "this machine has no network card".to_owned(),
    })
}

/// Returns each network card with the state of its link. An interface without a device below it, such as `lo`, is no card.
fn cards(folder: &Path) -> Vec<String> {
    let link = |name: &String| {
        // reading it fails while the interface is down
        let link = match fs::read_to_string(folder.join(name).join("carrier")).as_deref() {
            Ok("1\n") => "has a link",
            Ok(_) => "has no link",
            Err(_) => "is down",
        };
        format!("{name} {link}")
    };
    let mut cards = names(folder);
    cards.retain(|name| folder.join(name).join("device").exists());
    cards.iter().map(link).collect()
}

/// Returns the devices of a bus that no driver has taken: those in whose `file` a text beginning with `kind` is.
fn without_driver(bus: &Path, file: &str, kind: &str) -> Vec<String> {
    let is_orphan = |name: &String| {
        let device = bus.join(name);
        let is_kind = |text: String| text.starts_with(kind);
        fs::read_to_string(device.join(file)).is_ok_and(is_kind) && !device.join("driver").exists()
    };
    let describe = |name: &String| {
        let alias = fs::read_to_string(bus.join(name).join("modalias")).unwrap_or_default();
        format!("{name} ({})", alias.trim_end())
    };
    let mut devices = names(bus);
    devices.retain(is_orphan);
    devices.iter().map(describe).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_card_is_listed_with_its_link_and_loopback_is_none() {
        let sys = tempfile::tempdir().unwrap();
        for (name, carrier) in [("eth0", Some("1\n")), ("eth1", Some("0\n")), ("eth2", None)] {
            let card = sys.path().join(name);
            fs::create_dir_all(card.join("device")).unwrap();
            if let Some(carrier) = carrier {
                fs::write(card.join("carrier"), carrier).unwrap();
            }
        }
        fs::create_dir(sys.path().join("lo")).unwrap();
        let expected = ["eth0 has a link", "eth1 has no link", "eth2 is down"];
        assert_eq!(cards(sys.path()), expected);
    }

    #[test]
    fn a_device_without_a_driver_is_named_with_what_its_module_is_found_by() {
        let bus = tempfile::tempdir().unwrap();
        let device = |name: &str, class: &str| {
            let device = bus.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("class"), class).unwrap();
            fs::write(device.join("modalias"), format!("pci:{name}\n")).unwrap();
            device
        };
        device("0000:00:02.0", "0x020000\n");
        device("0000:00:03.0", "0x010000\n");
        let driven = device("0000:00:04.0", "0x020000\n");
        symlink("/", driven.join("driver")).unwrap();
        let orphans = without_driver(bus.path(), "class", "0x02");
        assert_eq!(orphans, ["0000:00:02.0 (pci:0000:00:02.0)"]);
    }
}
