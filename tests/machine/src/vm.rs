//! A computer under QEMU, with a TPM by swtpm.
//!
//! `Machine` is the part that stays when the power is off: the TPM's state, the disks. `Vm` is one boot of it. The guest's network
//! is QEMU's user-mode network with the host at 10.42.0.1: a port there leads to a loopback port of the host, which needs no
//! privilege and lets several machines run at once.

use super::console::{Console, Show};
use super::{Context, Failure, Result, dist, free_port, root, script, write_log};
use image::{BootLog, Image, KnownConditions, Loader, Platform, RegisterBank};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The host as the guest sees it.
pub const HOST: &str = "10.42.0.1";
/// The guest's own address: the first that QEMU's DHCP server hands out.
pub const GUEST: &str = "10.42.0.15";

/// The host as a guest with [`Network::Ipv6`] sees it.
pub const HOST_IPV6: &str = "fd42::2";

/// Debian 12: machines have its kernel unless a test changes it.
const DEBIAN: &str = "bookworm";
/// The kernel's command line, unless a test changes it.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet no_timer_check";
/// OVMF's code, and the template of the variables that each machine has for itself.
const UEFI_CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const UEFI_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
/// The same with Secure Boot: the template trusts Debian's test key, and only code in system management mode may write variables.
const SECURE_CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";
const SECURE_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.snakeoil.fd";

/// The name of the network card.
pub const CARD: &str = "net";

/// What starts the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS: it starts the kernel within a second, but does not measure the kernel, its command line and the initramfs.
    Bios,
    /// OVMF: it takes some seconds longer, and measures the kernel into PCR 4, and the command line and initramfs into PCR 9.
    Uefi,
    /// OVMF with Secure Boot on: it starts only files that are signed with Debian's test key.
    SecureUefi,
}

/// The network to which the network card is connected.
#[derive(Clone, PartialEq, Eq)]
pub enum Network {
    /// IPv4 with DHCP; the host is [`HOST`].
    Ipv4,
    /// Only IPv6, with router advertisements; the host's `::1` is [`HOST_IPV6`].
    Ipv6,
    /// A network link without a peer.
    Nobody,
    /// This host's tap device, to which the test gives a network.
    Tap {
        device: String,
        /// The address of the machine's network card.
        mac: String,
    },
}

/// What the firmware starts.
#[derive(Clone)]
pub enum Source {
    /// The machine's kernel with its initramfs and command line, by QEMU's `-kernel`.
    Kernel,
    /// This kernel with the machine's initramfs and command line, by QEMU's `-kernel`.
    KernelFile(PathBuf),
    /// This unified kernel image, by QEMU's `-kernel`.
    Unified(PathBuf),
    /// This raw disk image, which the machine does not change.
    Disk(PathBuf),
    /// This raw disk image, which the machine changes.
    OwnDisk(PathBuf),
    /// An empty disk, which cannot be booted, and then this disk image.
    SecondDisk(PathBuf),
}

/// The measurement policy that `firstlight measure` computes with these arguments.
pub fn measured(arguments: &[&OsStr]) -> Result<String> {
    let output = Command::new(dist("firstlight")?)
        .arg("measure")
        .args(arguments)
        .output()
        .context("run firstlight")?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Failure(format!(
            "firstlight measure ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )))
    }
}

/// A computer, switched off.
pub struct Machine {
    /// What starts the kernel.
    pub firmware: Firmware,
    /// What the firmware starts.
    pub source: Source,
    /// The distribution whose kernel it is, as tools/kernel.sh names them; only for [`Source::Kernel`].
    pub kernel: &'static str,
    /// The kernel's command line.
    pub command_line: String,
    /// The machine's memory in MiB.
    pub memory: u32,
    /// The number of its processors.
    pub processors: u32,
    /// Whether it has a TPM.
    pub tpm: bool,
    /// Whether it has a hardware random number generator.
    pub random: bool,
    /// The time of its real-time clock when it is switched on, as QEMU's `-rtc base=`; `None`: the host's.
    pub clock: Option<String>,
    /// The network to which its network card is connected.
    pub network: Network,
    /// Whether it has another card, before that one: its DHCP server gives an address, but no route.
    pub card_without_route: bool,
    /// The parts that are missing when it is switched on, and that [`Vm::plug`] attaches: disks by their serial numbers, and [`CARD`].
    pub unplugged: Vec<String>,
    /// Guest ports that can be reached through a free loopback port of the host.
    pub open_ports: Vec<u16>,
    /// Ports of the host as the guest sees it (10.42.0.1), and the loopback port that each leads to.
    pub host_ports: BTreeMap<u16, u16>,
    /// A disk, `state` or `image`, and where its writes are recorded; see [`write_log`](crate::write_log). A boot appends to a log that
    /// exists.
    pub write_log: Option<(&'static str, PathBuf)>,
    /// Further arguments for QEMU.
    pub extra: Vec<String>,
    /// The further data of QEMU's DHCP server beside the address, as options of its `-netdev user`.
    pub dhcp: String,
    /// Which lines of the console are printed at once.
    pub show: Show,
    name: String,
    folder: tempfile::TempDir,
    disks: Vec<String>,
    boots: u32,
}

impl Machine {
    /// A computer with SeaBIOS, a TPM and 512 MiB, without a disk. `name` is used for its logs, target/boot/NAME-BOOT.log.
    pub fn new(name: &str) -> Result<Machine> {
        let folder = tempfile::Builder::new()
            .prefix("firstlight-")
            .tempdir()
            .context("make a folder for the machine")?;
        std::fs::create_dir(folder.path().join("tpm")).context("make a folder for the TPM")?;
        Ok(Machine {
            firmware: Firmware::Bios,
            source: Source::Kernel,
            kernel: DEBIAN,
            command_line: COMMAND_LINE.to_owned(),
            memory: 512,
            processors: 1,
            tpm: true,
            random: true,
            clock: None,
            network: Network::Ipv4,
            card_without_route: false,
            unplugged: Vec::new(),
            open_ports: Vec::new(),
            host_ports: BTreeMap::new(),
            write_log: None,
            extra: Vec::new(),
            dhcp: String::new(),
            show: Show::Nothing,
            name: name.to_owned(),
            folder,
            disks: Vec::new(),
            boots: 0,
        })
    }

    /// Adds a blank disk of `size` bytes, sparse on the host.
    pub fn add_disk(&mut self, serial: &str, size: u64) -> Result<()> {
        let path = self.disk(serial);
        File::create_new(&path)
            .and_then(|file| file.set_len(size))
            .context(&format!("make the disk {}", path.display()))?;
        self.disks.push(serial.to_owned());
        Ok(())
    }

    /// Adds a disk with the content of `image`.
    pub fn add_copy_of_disk(&mut self, serial: &str, image: &Path) -> Result<()> {
        write_log::copy(image, &self.disk(serial))?;
        self.disks.push(serial.to_owned());
        Ok(())
    }

    /// Copies what stays while the machine is off into a folder: its disks, also an [`Source::OwnDisk`], its TPM's state, the
    /// firmware's variables.
    pub fn save(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).context("make a folder for a saved machine")?;
        self.lasting()?
            .iter()
            .try_for_each(|(name, path)| write_log::copy(path, &folder.join(name)))
    }

    /// Gives a machine with the same disks what [`Machine::save`] wrote.
    pub fn load(&mut self, folder: &Path) -> Result<()> {
        self.lasting()?
            .iter()
            .try_for_each(|(name, path)| write_log::copy(&folder.join(name), path))
    }

    /// What stays while the machine is off, by a name for each.
    fn lasting(&self) -> Result<Vec<(String, PathBuf)>> {
        let disks = self.disks.iter().map(|it| (it.clone(), self.disk(it)));
        let rest = [
            ("tpm".to_owned(), self.tpm_state()),
            ("variables".to_owned(), self.variables()?),
        ];
        let own = match &self.source {
            Source::OwnDisk(path) => Some(("image".to_owned(), path.clone())),
            _ => None,
        };
        Ok(disks.chain(rest).chain(own).collect())
    }

    /// The file of a disk, which may be read while the machine is off.
    pub fn disk(&self, serial: &str) -> PathBuf {
        self.folder.path().join(format!("{serial}.disk"))
    }

    /// The file that it boots; `initramfs::build` writes it.
    pub fn initramfs(&self) -> PathBuf {
        self.folder.path().join("initramfs.cpio")
    }

    /// The measurement policy that this machine meets when it boots with UEFI: `firstlight measure` computes it from the files.
    pub fn policy(&self) -> Result<String> {
        let (kernel, memory) = (kernel_of(self.kernel)?, self.memory.to_string());
        let initramfs = self.initramfs();
        measured(&[
            OsStr::new("--kernel"),
            kernel.as_ref(),
            OsStr::new("--initrd"),
            initramfs.as_ref(),
            OsStr::new("--cmdline"),
            self.command_line.as_ref(),
            OsStr::new("--memory"),
            memory.as_ref(),
            // the host of this machine writes no variables
            OsStr::new("--accept-efi-variables"),
        ])
    }

    /// Returns the values that the firmware will measure when the machine boots its kernel with UEFI.
    pub fn event_log(&self) -> Result<BootLog> {
        let kernel = std::fs::read(kernel_of(self.kernel)?).context("read the kernel")?;
        let initramfs = std::fs::read(self.initramfs()).context("read the initramfs")?;
        let memory = u64::from(self.memory) << 20;
        let image = Image::direct_linux(
            &kernel,
            Some(&initramfs),
            &self.command_line,
            Loader::Patched(memory),
        );
        let image = image.context("compute the registers")?;
        let usual = &image.conditions(&KnownConditions::default())[0];
        Ok(image.log(Platform::Tpm(RegisterBank::Sha256), usual))
    }

    /// The folder with the TPM's state, for swtpm while the machine is off.
    pub fn tpm_state(&self) -> PathBuf {
        self.folder.path().join("tpm")
    }

    /// A folder for the other files of this machine.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Switches it on. Another process may take a port before QEMU does, so there are three attempts.
    pub fn boot(&mut self) -> Result<Vm> {
        self.boots += 1;
        for _ in 0..2 {
            let mut vm = self.start()?;
            let early = Instant::now() + Duration::from_millis(300);
            while vm.is_running() && Instant::now() < early {
                std::thread::sleep(Duration::from_millis(20));
            }
            if vm.is_running() {
                return Ok(vm);
            }
            vm.console.join();
            if !vm.errors().contains("host forwarding") {
                return Err(Failure(format!("QEMU did not start: {}", vm.errors())));
            }
        }
        self.start()
    }

    fn start(&self) -> Result<Vm> {
        let processor = script("tools/accel.sh", &[])?;

        let (network, ports) = self.network_option()?;

        // QEMU ends with the thread that started it, in whichever way that ends
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        let (board, code) = match self.firmware {
            Firmware::Bios => ("q35", None),
            Firmware::Uefi => ("q35", Some(UEFI_CODE)),
            Firmware::SecureUefi => ("q35,smm=on", Some(SECURE_CODE)),
        };
        qemu.args(processor.split_whitespace()).args([
            "-M",
            board,
            "-smp",
            &self.processors.to_string(),
            "-m",
            &self.memory.to_string(),
        ]);
        qemu.args([
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-serial",
            "stdio",
        ]);
        if self.firmware == Firmware::SecureUefi {
            qemu.args(["-global", "driver=cfi.pflash01,property=secure,value=on"]);
        }
        if let Some(code) = code {
            let variables = self.variables()?;
            qemu.args([
                "-drive",
                &format!("if=pflash,unit=0,format=raw,readonly=on,file={code}"),
            ]);
            qemu.args([
                "-drive",
                &format!("if=pflash,unit=1,format=raw,file={}", variables.display()),
            ]);
        }
        match &self.source {
            Source::Kernel | Source::KernelFile(_) => {
                let kernel = match &self.source {
                    Source::KernelFile(path) => path.clone(),
                    _ => kernel_of(self.kernel)?,
                };
                qemu.arg("-kernel").arg(kernel);
                qemu.arg("-initrd").arg(self.initramfs());
                qemu.args(["-append", &self.command_line]);
            }
            Source::Unified(path) => {
                qemu.arg("-kernel").arg(path);
            }
            Source::Disk(path) | Source::SecondDisk(path) | Source::OwnDisk(path) => {
                let snapshot = match self.source {
                    Source::OwnDisk(_) => "off",
                    _ => "on",
                };
                let drive = self.drive("image", path, &format!("snapshot={snapshot}"))?;
                let device = "virtio-blk-pci,drive=image,bootindex=1";
                qemu.args(["-drive", &drive, "-device", device]);
            }
        }
        if matches!(self.source, Source::SecondDisk(_)) {
            qemu.args([
                "-drive",
                "if=none,id=empty,format=raw,file.driver=null-co,file.size=16M,file.read-zeroes=on",
            ]);
            qemu.args(["-device", "virtio-blk-pci,drive=empty,bootindex=0"]);
        }
        if let Some(clock) = &self.clock {
            qemu.args(["-rtc", &format!("base={clock}")]);
        }
        if self.card_without_route {
            // for a network without a gateway, QEMU's DHCP server sends no route
            qemu.args([
                "-netdev",
                "user,id=nowhere,ipv6=off,net=10.99.0.0/16,restrict=on",
            ]);
            qemu.args([
                "-device",
                "virtio-net-pci,netdev=nowhere,romfile=,mac=52:54:00:00:00:01",
            ]);
        }
        qemu.args(["-netdev", &network]);
        if !self.unplugged.iter().any(|name| name == CARD) {
            let mac = match &self.network {
                Network::Tap { mac, .. } => format!(",mac={mac}"),
                _ => String::new(),
            };
            qemu.args(["-device", &(device(CARD) + &mac)]);
        }
        if self.random {
            qemu.args(["-device", "virtio-rng-pci"]);
        }
        for serial in &self.disks {
            let drive = self.drive(serial, &self.disk(serial), "cache=unsafe,discard=unmap")?;
            qemu.args(["-drive", &drive]);
            if !self.unplugged.contains(serial) {
                qemu.args(["-device", &device(serial)]);
            }
        }
        let monitor = self.folder.path().join("monitor.socket");
        let socket = format!("unix:{},server=on,wait=off", monitor.display());
        qemu.args(["-monitor", &socket]);
        if !self.unplugged.is_empty() {
            qemu.args(["-device", "pcie-root-port,id=hot,slot=1"]);
        }
        let swtpm = if self.tpm {
            Some(self.start_tpm()?)
        } else {
            None
        };
        if self.tpm {
            let socket = self.folder.path().join("tpm.socket");
            qemu.args([
                "-chardev",
                &format!("socket,id=tpm,path={}", socket.display()),
            ]);
            qemu.args([
                "-tpmdev",
                "emulator,id=tpm0,chardev=tpm",
                "-device",
                "tpm-crb,tpmdev=tpm0",
            ]);
        }
        qemu.args(&self.extra);

        let errors = self.folder.path().join("qemu.errors");
        let stderr = File::create(&errors).context("write QEMU's errors")?;
        let logs = root().join("target/boot");
        std::fs::create_dir_all(&logs).context("make the folder of the logs")?;
        let log = logs.join(format!("{}-{}.log", self.name, self.boots));
        let log = File::create(&log).context(&format!("write {}", log.display()))?;
        let mut qemu = qemu
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .context("start QEMU")?;
        let stdout = qemu
            .stdout
            .take()
            .ok_or_else(|| Failure("QEMU has no console".to_owned()))?;
        let console = Console::new(stdout, log, self.show, errors.clone());
        Ok(Vm {
            console,
            ports,
            qemu,
            swtpm,
            commands: 0,
            errors,
            monitor,
        })
    }

    /// QEMU's option for a disk, with these options if its writes are not recorded.
    fn drive(&self, id: &str, file: &Path, options: &str) -> Result<String> {
        let file = file.display();
        let Some((_, log)) = self.write_log.as_ref().filter(|it| it.0 == id) else {
            return Ok(format!("if=none,id={id},file={file},format=raw,{options}"));
        };
        let append = if log.exists() { "on" } else { "off" };
        let file_of_log = File::options().append(true).create(true).open(log);
        file_of_log.context("make the log of writes")?;
        // a cache that ignores flushes would not record them
        Ok(format!(
            "if=none,id={id},driver=blklogwrites,file.driver=raw,file.file.driver=file,file.file.filename={file},\
             log.driver=raw,log.file.driver=file,log.file.filename={},log-append={append},log-super-update-interval=1,cache=writeback,discard=unmap",
            log.display()
        ))
    }

    /// The file with the firmware's variables.
    pub fn variables(&self) -> Result<PathBuf> {
        let variables = self.folder.path().join("uefi-variables");
        let template = match self.firmware {
            Firmware::SecureUefi => SECURE_VARIABLES,
            Firmware::Uefi | Firmware::Bios => UEFI_VARIABLES,
        };
        if !variables.exists() {
            std::fs::copy(template, &variables).context(&format!("copy {template}"))?;
        }
        Ok(variables)
    }

    /// QEMU's network, and for each open port of the guest the loopback port that leads to it.
    fn network_option(&self) -> Result<(String, BTreeMap<u16, u16>)> {
        let mut ports = BTreeMap::new();
        let mut network = match &self.network {
            Network::Tap { device, .. } => {
                let network = format!("tap,id=net,ifname={device},script=no,downscript=no");
                return Ok((network, ports));
            }
            Network::Nobody => return Ok(("hubport,id=net,hubid=0".to_owned(), ports)),
            Network::Ipv6 => {
                let network = format!(
                    "user,id=net,ipv4=off,ipv6=on,ipv6-prefix=fd42::,ipv6-host={HOST_IPV6}"
                );
                return Ok((network, ports));
            }
            // 10.42.0.1 must not be QEMU's own gateway address, to which it refuses forwards
            Network::Ipv4 => format!(
                "user,id=net,ipv6=off,net=10.42.0.0/16,host=10.42.0.2,dns=10.42.0.3,dhcpstart={GUEST}{}",
                self.dhcp
            ),
        };
        for guest in &self.open_ports {
            let port = free_port()?;
            ports.insert(*guest, port);
            network.push_str(&format!(",hostfwd=tcp:127.0.0.1:{port}-:{guest}"));
        }
        for (seen, port) in &self.host_ports {
            // one nc for each connection; if no server listens, the guest sees the connection closed at once
            let relay = format!("sh -c 'exec busybox nc 127.0.0.1 {port} 2>/dev/null'");
            network.push_str(&format!(",guestfwd=tcp:{HOST}:{seen}-cmd:{relay}"));
        }
        Ok((network, ports))
    }

    /// Starts swtpm on the machine's TPM state, as after power-on, and waits for its socket.
    fn start_tpm(&self) -> Result<Child> {
        let socket = self.folder.path().join("tpm.socket");
        let _ = std::fs::remove_file(&socket);
        let swtpm = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "swtpm",
                "socket",
                "--tpm2",
                "--flags",
                "startup-clear",
                "--terminate",
            ])
            .arg("--tpmstate")
            .arg(format!("dir={}", self.tpm_state().display()))
            .arg("--ctrl")
            .arg(format!("type=unixio,path={}", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start swtpm")?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            if Instant::now() > deadline {
                return Err(Failure(format!(
                    "swtpm did not make its socket {} within 10 s",
                    socket.display()
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(swtpm)
    }
}

/// The kernel of Debian 12, which a machine boots unless its test has another.
pub fn kernel() -> Result<PathBuf> {
    kernel_of(DEBIAN)
}

fn kernel_of(suite: &str) -> Result<PathBuf> {
    let folder = PathBuf::from(script("tools/kernel.sh", &[Path::new(suite)])?);
    let version = std::fs::read_dir(folder.join("lib/modules"))
        .context("read the kernel's folder")?
        .next();
    let version = version.ok_or_else(|| Failure("the kernel has no modules".to_owned()))?;
    let version = version.context("read the kernel's folder")?.file_name();
    Ok(folder
        .join("boot")
        .join(format!("vmlinuz-{}", version.to_string_lossy())))
}

fn device(name: &str) -> String {
    match name {
        CARD => format!("virtio-net-pci,netdev={CARD},romfile=,id=card"),
        serial => format!("virtio-blk-pci,drive={serial},serial={serial}"),
    }
}

/// A computer that is switched on; the power is cut when this value ends.
pub struct Vm {
    /// Its serial line.
    pub console: Console,
    /// For each open port of the guest the loopback port that leads to it.
    pub ports: BTreeMap<u16, u16>,
    qemu: Child,
    swtpm: Option<Child>,
    commands: u32,
    errors: PathBuf,
    monitor: PathBuf,
}

impl Vm {
    /// Attaches one of [`Machine::unplugged`].
    pub fn plug(&mut self, name: &str) -> Result<()> {
        self.monitor(&format!("device_add {},bus=hot", device(name)))
    }

    /// Plugs the cable of the network card in, or pulls it out; the card is [`CARD`], also if it was plugged in later.
    pub fn set_link(&mut self, is_up: bool) -> Result<()> {
        let link = if is_up { "on" } else { "off" };
        self.monitor(&format!("set_link card {link}"))
    }

    /// Asks the operating system to shut down, as the machine's owner does.
    pub fn press_power_button(&mut self) -> Result<()> {
        self.monitor("system_powerdown")
    }

    /// Gives a command to QEMU's monitor, as a host does.
    pub fn monitor(&mut self, command: &str) -> Result<()> {
        let mut monitor = UnixStream::connect(&self.monitor).context("reach QEMU's monitor")?;
        // QEMU drops a command if its sender closes the connection, so this waits for the command's end
        let mut said = String::new();
        monitor
            .write_all(format!("{command}\n").as_bytes())
            .and_then(|()| monitor.shutdown(std::net::Shutdown::Write))
            .and_then(|()| monitor.read_to_string(&mut said))
            .context(&format!("tell QEMU {command}"))?;
        if said.contains("Error") {
            Err(Failure(format!("QEMU refuses {command}: {said}")))
        } else {
            Ok(())
        }
    }

    /// Runs a shell command in the OS stage and returns what it printed; its exit code other than 0 is an error.
    pub fn command(&mut self, command: &str, limit: Duration) -> Result<String> {
        self.commands += 1;
        let id = format!("c{}", self.commands);
        self.type_line(&format!("{id} {command}"))?;
        let done = format!("{id} done ");
        let before = self.console.lines().len();
        let end = self
            .console
            .wait_until(&format!("the end of `{command}`"), limit, |line| {
                line.starts_with(&done)
            })?;
        let prefix = format!("{id}| ");
        let lines = self.console.lines();
        let output: Vec<&str> = lines[before..]
            .iter()
            .filter_map(|line| line.text.strip_prefix(&prefix))
            .collect();
        let output = output.join("\n");
        match end.text.strip_prefix(&done) {
            Some("0") => Ok(output),
            code => Err(Failure(format!(
                "`{command}` ended with {} in the machine: {output}",
                code.unwrap_or("?")
            ))),
        }
    }

    /// Types a line on the serial console.
    pub fn type_line(&mut self, line: &str) -> Result<()> {
        let input = self
            .qemu
            .stdin
            .as_mut()
            .ok_or_else(|| Failure("the console is closed".to_owned()))?;
        writeln!(input, "{line}")
            .and_then(|()| input.flush())
            .context("type on the console")
    }

    /// Has the OS stage shut the system down, and waits until the machine is off.
    pub fn shut_down(&mut self, limit: Duration) -> Result<()> {
        self.type_line("end shut_down")?;
        self.wait_off(limit).map(|_| ())
    }

    /// Waits until the machine has switched itself off.
    pub fn wait_off(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.qemu.try_wait().context("wait for QEMU")? {
                self.console.join();
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(Failure(format!(
                    "the machine did not switch off within {} s",
                    limit.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Cuts the power. Data that the guest wrote to its disk before stays there.
    pub fn cut_power(self) {
        drop(self);
    }

    fn is_running(&mut self) -> bool {
        matches!(self.qemu.try_wait(), Ok(None))
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        if let Some(swtpm) = &mut self.swtpm {
            // swtpm ends by itself when QEMU has ended, and has then written its state
            let deadline = Instant::now() + Duration::from_secs(5);
            while matches!(swtpm.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = swtpm.kill();
            let _ = swtpm.wait();
        }
        self.console.join();
    }
}
