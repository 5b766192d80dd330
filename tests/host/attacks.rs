//! The attacks: for each, the input that a host gives a machine, and the mark that shows that the attack worked.

use super::Image;
use machine::host::{Variable, Vendor, utf16};
use machine::vm::Machine;
use machine::{Context, Failure, Result};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
use support::boot_image::run;

/// The place where a mark appears.
pub enum Seen {
    /// On the serial console: the word `host-runs-NAME`, written by the attack itself.
    Console,
    /// On the serial console: this text, by a program of the image.
    Text(&'static str),
    /// This shell command succeeds in the booted system. The image of mkosi has no shell: not looked for there.
    Command(&'static str),
    /// In the machine's output on the console that the host has added.
    SecondConsole(&'static str),
}

/// An attack of a host.
pub struct Attack {
    /// Its name.
    pub name: &'static str,
    /// Gives the machine the attack's input.
    pub give: fn(&mut Given, mark: &str) -> Result<()>,
    /// Its mark.
    pub seen: Seen,
    /// The images on which the attack works, if they contain nothing of Firstlight.
    pub works: fn(Image) -> bool,
}

/// The inputs of all attacks of a boot together.
pub struct Given<'a> {
    pub machine: &'a mut Machine,
    variables: Vec<Variable>,
    /// The words of the variable SystemdOptions.
    options: Vec<String>,
    /// The lines of the credential tmpfiles.extra.
    files: String,
}

const CONSOLE: &str = "/dev/ttyS0";
/// UUID of the swap that pretends to hold a hibernated system.
const HIBERNATED: &str = "5ec1e7a0-2222-4000-8000-000000000001";

/// Has systemd 256 or newer, which knows more credentials.
fn systemd_257(image: Image) -> bool {
    !matches!(image, Image::Initrd(maker) if maker.suite == "bookworm")
}

/// Has systemd in the initrd.
fn dracut(image: Image) -> bool {
    matches!(image, Image::Initrd(maker) if maker.system.starts_with("dracut"))
}

/// The credentials and variables are read in the booted system of each of them, where mkosi's command line does not forbid it.
fn initrd(image: Image) -> bool {
    matches!(image, Image::Initrd(_))
}

fn never(_: Image) -> bool {
    false
}

/// Each of them is tried on each image, all in one boot.
pub const ATTACKS: &[Attack] = &[
    // EFI variables
    Attack {
        name: "options-run",
        give: |given, mark| {
            let word = format!("systemd.run=\"{}\"", echo(mark));
            given.options.push(word);
            given
                .options
                .push("systemd.run_success_action=none".to_owned());
            given
                .options
                .push("systemd.run_failure_action=none".to_owned());
            // the command replaces the default target, and the machine must boot as without the attack
            given
                .options
                .push("systemd.wants=multi-user.target".to_owned());
            Ok(())
        },
        seen: Seen::Console,
        works: initrd,
    },
    Attack {
        name: "options-host-name",
        give: |given, mark| {
            given.options.push(format!("systemd.hostname={mark}"));
            Ok(())
        },
        seen: Seen::Command("grep host-runs-options /proc/sys/kernel/hostname"),
        works: initrd,
    },
    Attack {
        name: "hibernate-location",
        give: |given, _| {
            let location = serde_json::json!({
                "uuid": HIBERNATED, "offset": 0, "kernelVersion": "", "osReleaseId": "debian",
                "osReleaseImageId": "", "osReleaseVersionId": "", "osReleaseImageVersion": "",
            });
            given.variables.push(Variable {
                vendor: Vendor::Systemd,
                name: "HibernateLocation",
                content: utf16(&location.to_string()),
            });
            given.swap("hibernated", HIBERNATED, true)
        },
        seen: Seen::Command("dmesg | grep -i 'PM: .*resum\\|hibernation: resum\\|Image mismatch'"),
        works: never,
    },
    Attack {
        name: "mok",
        give: |given, mark| {
            let content = signature_list(&certificate(mark)?);
            given.variables.push(Variable {
                vendor: Vendor::Shim,
                name: "MokListRT",
                content,
            });
            Ok(())
        },
        seen: Seen::Command("grep host-runs-mok /proc/keys"),
        works: never,
    },
    // credentials
    Attack {
        name: "credential-files",
        give: |given, mark| {
            let rule =
                format!("KERNEL==\"vda|dm-*\", RUN+=\"/bin/sh -c 'echo {mark} >{CONSOLE}'\"\n");
            given.file("/run/udev/rules.d/99-host.rules", &rule);
            Ok(())
        },
        seen: Seen::Console,
        works: dracut,
    },
    Attack {
        name: "credential-files-unit",
        give: |given, mark| {
            given.file("/run/systemd/system/host-files.service", &unit(mark));
            given.files.push_str(
                "d /run/systemd/system/multi-user.target.wants\n\
                 L /run/systemd/system/multi-user.target.wants/host-files.service - - - - ../host-files.service\n",
            );
            Ok(())
        },
        seen: Seen::Console,
        works: dracut,
    },
    Attack {
        name: "credential-unit",
        give: |given, mark| {
            let machine = &mut given.machine;
            machine.add_credential("systemd.extra-unit.host.service", &unit(mark))?;
            let wants = "[Unit]\nWants=host.service\n";
            machine.add_credential("systemd.unit-dropin.sysinit.target", wants)
        },
        seen: Seen::Console,
        // the mark does not show in the image of mkosi, for a reason that is not known
        works: |image| initrd(image) && systemd_257(image),
    },
    Attack {
        name: "credential-user",
        give: |given, mark| {
            let user = format!("u hostuser 4711 \"{mark}\"");
            given.machine.add_credential("sysusers.extra", &user)
        },
        seen: Seen::Command("grep host-runs-credential-user /etc/passwd"),
        works: initrd,
    },
    Attack {
        name: "credential-sysctl",
        give: |given, mark| {
            let setting = format!("kernel.domainname={mark}\n");
            given
                .machine
                .add_fw_cfg_credential("sysctl.extra", &setting)
        },
        seen: Seen::Command("grep host-runs-credential-sysctl /proc/sys/kernel/domainname"),
        works: initrd,
    },
    Attack {
        name: "credential-rules",
        give: |given, mark| {
            let run = format!(
                "KERNEL==\"vda|dm-*\", RUN+=\"/bin/sh -c 'echo {mark} >{CONSOLE}'\", RUN+=\"{}\"\n",
                echo(mark)
            );
            given.machine.add_credential("udev.rules.99-host", &run)
        },
        seen: Seen::Console,
        works: systemd_257,
    },
    Attack {
        name: "credential-mount",
        give: |given, _| {
            let line = "LABEL=HOSTFS /run/host-runs-credential-mount ext4 ro,nofail,x-systemd.device-timeout=900 0 0\n";
            given.file_system("hostfs", "HOSTFS")?;
            given.machine.add_fw_cfg_credential("fstab.extra", line)
        },
        seen: Seen::Command("grep host-runs-credential-mount /proc/mounts"),
        works: |image| initrd(image) && systemd_257(image),
    },
    Attack {
        name: "credential-ssh-key",
        give: |given, mark| {
            let key = format!("ssh-ed25519 AAAA {mark}");
            given
                .machine
                .add_credential("ssh.authorized_keys.root", &key)
        },
        seen: Seen::Command("grep host-runs-credential-ssh-key /root/.ssh/authorized_keys"),
        works: initrd,
    },
    Attack {
        name: "credential-password",
        give: |given, _| {
            let machine = &mut given.machine;
            machine.add_credential("passwd.plaintext-password.root", "host")
        },
        seen: Seen::Command("grep '^root:[$]' /etc/shadow"),
        works: never,
    },
    // consoles and keys
    Attack {
        name: "sysrq",
        // the harness sends a break and a key
        give: |_, _| Ok(()),
        seen: Seen::Text("sysrq: HELP"),
        // a file in the image of mkosi turns this off, and the test removes only the words of the image's command line
        works: initrd,
    },
    // devices
    Attack {
        name: "device-virtiofs",
        give: |given, _| given.folder(),
        seen: Seen::Command("grep '^virtiofs ' /proc/modules"),
        works: initrd,
    },
    Attack {
        name: "device-usb-disk",
        give: |given, _| {
            let disk = given.new_file_system("usb", "HOSTUSB")?;
            let drive = format!("if=none,id=usb,format=raw,file={}", disk.display());
            given.machine.add_device(&[
                "-device",
                "qemu-xhci",
                "-drive",
                &drive,
                "-device",
                "usb-storage,drive=usb",
            ]);
            Ok(())
        },
        seen: Seen::Command("grep -E '^(usb_storage|uas) ' /proc/modules"),
        works: never,
    },
    Attack {
        name: "login-on-hvc0",
        give: |given, _| {
            let log = second_console(given.machine);
            let chardev = format!("file,id=hvc,path={}", log.display());
            given.machine.add_device(&[
                "-device",
                "virtio-serial-pci",
                "-chardev",
                &chardev,
                "-device",
                "virtconsole,chardev=hvc",
            ]);
            Ok(())
        },
        seen: Seen::SecondConsole("login:"),
        // seen with Debian 12's dracut; where a machine is slow, systemd gives this console up
        works: dracut,
    },
    Attack {
        name: "device-agent",
        give: |given, _| {
            given.machine.add_device(&[
                "-chardev",
                "null,id=agent",
                "-device",
                "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
            ]);
            Ok(())
        },
        seen: Seen::Command("systemctl list-units --plain --no-legend | grep -i agent"),
        works: never,
    },
    // the network
    Attack {
        name: "dhcp-host-name",
        give: |given, mark| {
            // also text that a shell would run
            let name = format!("{mark}'$(echo {mark} >{CONSOLE})`echo {mark} >{CONSOLE}`");
            given.machine.dhcp = format!(",hostname={name},domainname={mark}");
            Ok(())
        },
        seen: Seen::Console,
        works: never,
    },
    Attack {
        name: "dhcp-domain",
        give: |_, _| Ok(()),
        seen: Seen::Command("grep host-runs-dhcp /proc/sys/kernel/hostname"),
        // in an initrd of initramfs-tools our own script asks DHCP; an image without the script sends no request
        works: never,
    },
    // disks
    Attack {
        name: "swap",
        give: |given, _| given.swap("swap", "5ec1e7a0-1111-4000-8000-000000000001", false),
        seen: Seen::Command("grep -q /dev /proc/swaps"),
        works: never,
    },
];

/// A command that writes a word to the console, without a shell.
fn echo(mark: &str) -> String {
    format!("/usr/bin/shuf -e {mark} -o {CONSOLE}")
}

/// A unit that writes the word, with a shell or without.
fn unit(mark: &str) -> String {
    format!(
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=-{}\n\
         ExecStart=-/bin/sh -c 'echo {mark} >{CONSOLE}'\n",
        echo(mark)
    )
}

/// Gives the machine all of them.
pub fn give_all(machine: &mut Machine) -> Result<()> {
    let mut given = Given {
        machine,
        variables: Vec::new(),
        options: Vec::new(),
        files: String::new(),
    };
    for attack in ATTACKS {
        (attack.give)(&mut given, &mark(attack))?;
    }
    let options = given.options.join(" ");
    given.variables.push(Variable {
        vendor: Vendor::Systemd,
        name: "SystemdOptions",
        content: utf16(&options),
    });
    let (variables, files) = (given.variables, given.files);
    machine.add_fw_cfg_credential("tmpfiles.extra", &files)?;
    machine.set_variables(&variables)
}

/// The file of the console that the host has added.
pub fn second_console(machine: &Machine) -> PathBuf {
    machine.folder().join("second-console")
}

/// The word that an attack writes.
pub fn mark(attack: &Attack) -> String {
    format!("host-runs-{}", attack.name)
}

impl Given<'_> {
    /// Has the credential tmpfiles.extra write a file.
    fn file(&mut self, path: &str, content: &str) {
        use base64::Engine;
        let content = base64::engine::general_purpose::STANDARD.encode(content);
        self.files
            .push_str(&format!("f~ {path} - - - - {content}\n"));
    }

    /// Adds a device with a folder of the host. The driver of 9p would be loaded in the same way, but the kernel under test has none.
    fn folder(&mut self) -> Result<()> {
        let folder = self.machine.folder().join("shared");
        let socket = self.machine.folder().join("shared.socket");
        std::fs::create_dir(&folder).context("make a folder")?;
        let mut daemon = Command::new("/usr/lib/qemu/virtiofsd")
            .arg(format!("--socket-path={}", socket.display()))
            .arg("-o")
            .arg(format!("source={}", folder.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start virtiofsd")?;
        while !socket.exists() {
            if let Some(status) = daemon.try_wait().context("watch virtiofsd")? {
                return Err(Failure(format!("virtiofsd ended: {status}")));
            }
            thread::sleep(Duration::from_millis(10));
        }
        // it ends with the machine
        thread::spawn(move || daemon.wait());
        let memory = self.machine.memory;
        self.machine.add_device(&[
            "-chardev",
            &format!("socket,id=share,path={}", socket.display()),
            "-device",
            "vhost-user-fs-pci,chardev=share,tag=host",
            // the daemon reads and writes the machine's memory
            "-object",
            &format!("memory-backend-memfd,id=shared,size={memory}M,share=on"),
            "-numa",
            "node,memdev=shared",
        ]);
        Ok(())
    }

    /// Adds a disk with swap; `hibernated`: with the signature of a hibernated system (kernel/power/swap.c).
    fn swap(&mut self, serial: &str, uuid: &str, hibernated: bool) -> Result<()> {
        let file = self.machine.folder().join(format!("{serial}.new"));
        std::fs::File::create(&file)
            .and_then(|it| it.set_len(4 << 20))
            .context("make a disk")?;
        run(Command::new("/sbin/mkswap")
            .args(["--quiet", "--uuid", uuid])
            .arg(&file));
        if hibernated {
            let mut content = std::fs::read(&file).context("read a disk")?;
            content[4076..4096].copy_from_slice(b"SWAPSPACE2S1SUSPEND\0");
            std::fs::write(&file, content).context("write a disk")?;
        }
        self.machine.add_copy_of_disk(serial, &file)
    }

    /// Adds a disk with a file system of this label.
    fn file_system(&mut self, serial: &str, label: &str) -> Result<()> {
        let file = self.new_file_system(serial, label)?;
        self.machine.add_copy_of_disk(serial, &file)
    }

    fn new_file_system(&mut self, name: &str, label: &str) -> Result<PathBuf> {
        let file = self.machine.folder().join(format!("{name}.new"));
        std::fs::File::create(&file)
            .and_then(|it| it.set_len(4 << 20))
            .context("make a disk")?;
        run(Command::new("/sbin/mke2fs")
            .args(["-q", "-t", "ext4", "-L", label])
            .arg(&file));
        Ok(file)
    }
}

/// Makes a certificate with this name, as DER.
fn certificate(name: &str) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir().context("make a folder")?;
    let [key, certificate] = ["key", "certificate"].map(|it| folder.path().join(it));
    run(Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3650", "-outform", "DER",
        ])
        .args(["-subj", &format!("/CN={name}"), "-keyout"])
        .arg(key)
        .arg("-out")
        .arg(&certificate));
    std::fs::read(certificate).context("read a certificate")
}

/// An EFI_SIGNATURE_LIST with one certificate (UEFI 2.10, section 32.4.1).
fn signature_list(certificate: &[u8]) -> Vec<u8> {
    // EFI_CERT_X509_GUID
    let kind = [
        0xa1, 0x59, 0xc0, 0xa5, 0xe4, 0x94, 0xa7, 0x4a, 0x87, 0xb5, 0xab, 0x15, 0x5c, 0x2b, 0xf0,
        0x72,
    ];
    let signature = (certificate.len() + 16) as u32;
    let header = [28 + signature, 0, signature]
        .map(u32::to_le_bytes)
        .concat();
    [&kind[..], &header, &[0; 16], certificate].concat()
}
