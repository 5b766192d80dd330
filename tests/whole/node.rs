//! A machine of the cluster: QEMU with OVMF, a TPM and a blank state disk.

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use machine::script;
use machine::vm::{Firmware, Machine, Network as Card, Source, Vm};
use machine::write_log::copy;
use support::boot_image::run;

use crate::PATIENCE;
use crate::network::{BRIDGE, HOST, Network};
use crate::servers::{ip, mac};

/// The state disk: containerd's store, etcd, and everything else that a node keeps.
const DISK: u64 = 16 << 30;
/// In MiB.
const MEMORY: u32 = 4096;

/// The clock of a machine at power-on.
#[derive(Clone, Copy)]
pub enum Clock {
    Right,
    /// So many days ahead.
    Ahead(u32),
}

pub struct Node {
    machine: Machine,
    vm: Option<Vm>,
    started: Instant,
    clock: Clock,
    name: &'static str,
    address: Ipv4Addr,
}

impl Node {
    /// A machine that is switched off. The metadata service knows it by its address.
    pub fn new(network: &Network, name: &'static str, role: &str) -> Node {
        let number = network.add(name, role);
        let device = format!("tap{number}");
        ip(&["tuntap", "add", &device, "mode", "tap"]);
        ip(&["link", "set", &device, "master", BRIDGE, "up"]);
        let mut machine = Machine::new(&format!("whole-{name}")).unwrap();
        machine.firmware = Firmware::Uefi;
        let disk = machine.folder().join("image.disk");
        copy(&image(), &disk).unwrap();
        machine.source = Source::OwnDisk(disk);
        machine.memory = MEMORY;
        machine.processors = 2;
        machine.network = Card::Tap {
            device,
            mac: mac(number),
        };
        machine.add_disk("state", DISK).unwrap();
        let [a, b, c, _] = HOST.octets();
        Node {
            machine,
            vm: None,
            started: Instant::now(),
            clock: Clock::Right,
            name,
            address: Ipv4Addr::new(a, b, c, number),
        }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Takes the machine, which is off, out of the network's list for ever.
    pub fn leave(self, network: &Network) {
        network.remove(self.address);
    }

    /// Copies the machine, which is off, into a folder below this one.
    pub fn save(&self, folder: &Path) {
        self.machine.save(&folder.join(self.name)).unwrap();
    }

    /// Makes the machine the one that was saved.
    pub fn load(&mut self, folder: &Path) {
        self.machine.load(&folder.join(self.name)).unwrap();
    }

    /// Sets the clock for the next times that the machine is switched on.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    pub fn power_on(&mut self) {
        self.machine.clock = match self.clock {
            Clock::Right => None,
            Clock::Ahead(days) => {
                let time = run(Command::new("date")
                    .args(["-u", "+%FT%T", "-d"])
                    .arg(format!("{days} days")));
                Some(time.trim().to_owned())
            }
        };
        self.started = Instant::now();
        self.vm = Some(self.machine.boot().unwrap());
    }

    /// Cuts the power: what the machine has not written to its disk is lost.
    pub fn cut_power(&mut self) {
        self.vm = None;
    }

    /// Waits until the machine has switched itself off.
    pub fn wait_for_end(&mut self) {
        let mut vm = self.vm.take().expect("the machine is on");
        vm.wait_off(PATIENCE).unwrap();
        self.lap("off");
    }

    /// Waits for a line of the console.
    pub fn wait_for_line(&mut self, text: &str) {
        let vm = self.vm.as_mut().expect("the machine is on");
        let line = vm.console.wait_for(text, PATIENCE).unwrap();
        self.lap(&line.text);
    }

    /// Prints what has happened, and how long after the power-on.
    pub fn lap(&self, what: &str) {
        println!("{:7.1} s  {what}", self.started.elapsed().as_secs_f64());
    }

    /// Returns the name of its TPM's key, which its console shows.
    pub fn attestation_key(&self) -> String {
        machine::flow::attestation_key(self.vm.as_ref().expect("the machine is on")).unwrap()
    }
}

/// The disk image, built if need be.
pub fn image() -> PathBuf {
    script("tools/mkosi.sh", &["kubernetes".as_ref()])
        .unwrap()
        .into()
}

/// The policy that `firstlight measure` computes from an image.
pub fn policy(image: &Path, more: &[&str]) -> String {
    let options = ["--secure-boot", "off", "--units", "all"];
    let options = options.iter().chain(more).map(OsStr::new);
    let arguments: Vec<_> = [image.as_os_str()].into_iter().chain(options).collect();
    machine::vm::measured(&arguments).unwrap()
}

/// Runs a command to its end, and returns its standard output.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(format!(
            "{command:?} ended with {}: {}{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        ))
    }
}
