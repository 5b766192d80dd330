//! Explains why a machine that waits for its key cannot reach any host.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use base::boot::timeline::Timeline;
use base::file::sorted_names;
use base::stop::Stop;
use sys::interfaces;

const CARDS: &str = "/sys/class/net";
/// The device buses in clouds: the file with a device's kind, and the beginning of its content for
/// a network card. PCI's class 02 is "network controller", virtio's device type 1 "network card",
/// and on Hyper-V the class ID is that of `hv_netvsc`.
const BUSES: [(&str, &str, &str); 3] = [
    ("/sys/bus/pci/devices", "class", "0x02"),
    ("/sys/bus/virtio/devices", "device", "0x0001"),
    (
        "/sys/bus/vmbus/devices",
        "class_id",
        "{f8615163-df3e-46c5-913f-f2d2f965ed0e}",
    ),
];

/// The state file of systemd-networkd, and the file in which the C library's resolver finds its DNS
/// servers.
const NETWORKD: &str = "/run/systemd/netif/state";
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Interval between two checks of the addresses and the DNS servers.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Until `finished` is set, reports the first address of this machine as an event, and configures
/// the DNS servers that systemd-networkd has learned.
pub fn watch(finished: Stop, timeline: Timeline) {
    let thread = thread::Builder::new().name("network".into());
    let watched = thread.spawn(move || {
        let (mut is_reported, mut has_dns) = (false, false);
        while !finished.wait(POLL_INTERVAL) {
            if !is_reported && let Some(address) = address() {
                timeline.event("network", address);
                is_reported = true;
            }
            has_dns = has_dns || use_dns_servers(Path::new(NETWORKD), Path::new(RESOLV_CONF));
            if is_reported && has_dns {
                return;
            }
        }
    });
    if let Err(error) = watched {
        log::warn!("cannot create a thread that watches the network: {error}");
    }
}

/// Writes the DNS servers of systemd-networkd into `resolv_conf`, unless another program has
/// written the file: an initrd with networkd has no resolver of its own, except if systemd-resolved
/// was added. Returns whether the file names servers now.
fn use_dns_servers(networkd: &Path, resolv_conf: &Path) -> bool {
    // systemd-resolved makes this file a link
    if fs::symlink_metadata(resolv_conf).is_ok_and(|file| file.is_symlink() || file.len() > 0) {
        return true;
    }
    let state = fs::read_to_string(networkd).unwrap_or_default();
    let servers: String = dns_servers(&state)
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    !servers.is_empty() && fs::write(resolv_conf, servers).is_ok()
}

/// Returns the DNS servers in systemd-networkd's state file, which lists them in the line `DNS=`.
fn dns_servers(state: &str) -> impl Iterator<Item = IpAddr> {
    let servers = state.lines().filter_map(|line| line.strip_prefix("DNS="));
    servers
        .flat_map(str::split_ascii_whitespace)
        .filter_map(|server| server.parse().ok())
}

/// Returns an address by which this machine may reach others: no loopback address, and no
/// link-local one.
pub fn address() -> Option<IpAddr> {
    let addresses = interfaces::addresses().unwrap_or_default();
    addresses.into_iter().find(|address| match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    })
}

/// Describes why this machine has no network; `None` if it has an address.
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
            "no IP address yet: {}; check DHCP, or the static address on the kernel command line",
            cards.join(", ")
        ),
        (true, false) => format!(
            "no network card works: no driver for {}; the initrd lacks its kernel module",
            orphans.join(", ")
        ),
        (true, true) => "this machine has no network card".to_owned(),
    })
}

/// Returns each network card with the state of its link. An interface without a device below it,
/// such as `lo`, is no card.
fn cards(folder: &Path) -> Vec<String> {
    let link = |name: &String| {
        // reading this file fails while the interface is down
        let link = match fs::read_to_string(folder.join(name).join("carrier")).as_deref() {
            Ok("1\n") => "has a link",
            Ok(_) => "has no link",
            Err(_) => "is down",
        };
        format!("{name} {link}")
    };
    let mut cards = sorted_names(folder);
    cards.retain(|name| folder.join(name).join("device").exists());
    cards.iter().map(link).collect()
}

/// Returns the devices on a bus that have no driver and in whose `file` the text begins with
/// `kind`.
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
    let mut devices = sorted_names(bus);
    devices.retain(is_orphan);
    devices.iter().map(describe).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_dns_servers_of_networkd_are_used_unless_others_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let [networkd, resolv_conf] = ["state", "resolv.conf"].map(|name| folder.path().join(name));
        assert!(!use_dns_servers(&networkd, &resolv_conf));
        fs::write(&networkd, "OPER_STATE=routable\nDNS=\n").unwrap();
        assert!(!use_dns_servers(&networkd, &resolv_conf));
        let servers = "OPER_STATE=routable\nDNS=10.42.0.3 fd42::3 192.0.2.1:53#dns.example ../x\n";
        fs::write(&networkd, servers).unwrap();
        assert!(use_dns_servers(&networkd, &resolv_conf));
        let written = || fs::read_to_string(&resolv_conf).unwrap();
        assert_eq!(written(), "nameserver 10.42.0.3\nnameserver fd42::3\n");
        fs::write(&networkd, "DNS=192.0.2.7\n").unwrap();
        assert!(use_dns_servers(&networkd, &resolv_conf));
        assert_eq!(written(), "nameserver 10.42.0.3\nnameserver fd42::3\n");
        let link = folder.path().join("link");
        symlink("stub-resolv.conf", &link).unwrap();
        assert!(use_dns_servers(&networkd, &link) && !link.exists());
    }

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
