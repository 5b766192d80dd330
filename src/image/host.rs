//! What the host can still choose when an image is fixed: each channel through which a host that
//! changes no register could influence the machine, whether the image closes it, and the setting
//! that does. docs/threat-model.md lists the channels.
//!
//! The checks use the kernel's command line and version and, if they are uncompressed or compressed
//! with gzip, the files of the initrd. The root file system is not read.

use base::boot;

use super::initrd::{self, Files};

/// The program with which firstlight's dracut and initramfs-tools modules close the host's
/// channels, and the words that it adds to the kernel command line, unless there is a word with the
/// same name (initramfs/close-host).
const MODULE: &str = "usr/lib/firstlight/close-host";
const OF_MODULE: &str =
    "systemd.import_credentials=no systemd.gpt_auto=no systemd.ssh_auto=no noresume";
/// The name of the channel that Secure Boot closes.
pub const EFI_VARIABLES: &str = "EFI variables";
/// Programs that follow instructions of the host or the network, by their names in an initrd.
const SERVERS: [&str; 8] = [
    "sshd",
    "dropbear",
    "tinysshd",
    "qemu-ga",
    "google_guest_agent",
    "waagent",
    "amazon-ssm-agent",
    "cloud-init",
];
/// The first version of systemd that starts sshd on a vsock by itself (systemd-ssh-generator).
const SSH_BY_VSOCK: u32 = 256;
/// Names of kernel parameters that open a shell or replace the programs that start. The kernel and
/// systemd treat `-` like `_`.
const SHELLS: [&str; 17] = [
    "systemd.debug_shell",
    "rd.systemd.debug_shell",
    "systemd.unit",
    "rd.systemd.unit",
    "systemd.run",
    "rd.systemd.run",
    "rd.shell",
    "rd.break",
    "break",
    "init",
    "rdinit",
    "single",
    "emergency",
    "rescue",
    "kgdboc",
    "ekgdboc",
    "SYSTEMD_SULOGIN_FORCE",
];

/// The known facts about how an image treats its host.
pub struct Contents {
    /// The kernel's command line; `None` if the host that starts the image can choose one.
    pub command_line: Option<String>,
    /// The version in the kernel's file; empty if there is none.
    pub kernel: String,
    files: Files,
    /// The version of systemd's stub.
    pub systemd: Option<u32>,
}

/// Whether a channel is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelState {
    /// The image leaves it open.
    Open,
    /// The files that were read do not show it.
    Unseen,
    /// The image closes it.
    Closed,
}

/// A channel from the host into the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostChannel {
    /// Its name.
    pub name: &'static str,
    /// Whether the image closes it.
    pub state: ChannelState,
    /// The finding.
    pub found: String,
    /// The setting that closes it.
    pub closed_by: &'static str,
}

impl ChannelState {
    /// Returns the keyword for lists: `open`, `not seen`, `closed`.
    pub fn word(self) -> &'static str {
        match self {
            ChannelState::Open => "open",
            ChannelState::Unseen => "not seen",
            ChannelState::Closed => "closed",
        }
    }
}

/// The words of a kernel command line. If two have the same name, the last one counts.
struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    /// Returns the word with this name, and its value: empty without one.
    fn word(&self, name: &str) -> Option<(&'a str, &'a str)> {
        let mut words = self.0.split_whitespace().map(|word| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            (word, name.replace('-', "_"), value.trim_matches('"'))
        });
        let found = words.rfind(|(_, this, _)| this == name);
        found.map(|(word, _, value)| (word, value))
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.word(name).map(|(_, value)| value)
    }

    fn is_off(&self, name: &str) -> bool {
        self.value(name).is_some_and(is_no)
    }
}

fn is_no(value: &str) -> bool {
    ["0", "no", "n", "false", "f", "off"].contains(&value)
}

impl Contents {
    /// Collects the known facts about an image.
    pub fn new(
        command_line: Option<&str>,
        kernel: &str,
        initrd: &[u8],
        systemd: Option<u32>,
    ) -> Contents {
        let mut wanted = vec![MODULE];
        wanted.extend(SERVERS);
        Contents {
            command_line: command_line.map(str::to_owned),
            kernel: kernel.to_owned(),
            files: initrd::find(initrd, &wanted),
            systemd,
        }
    }

    /// Returns whether the kernel confines the code in ACPI tables.
    pub fn confines_acpi(&self) -> bool {
        boot::trusted_acpi(&self.kernel).is_none()
    }

    /// Returns each channel. `proves_secure_boot`: whether the registers show that Secure Boot is
    /// on.
    pub fn channels(&self, proves_secure_boot: bool) -> Vec<HostChannel> {
        let with = |has_module| {
            let line = self.command_line.as_deref().unwrap_or_default();
            let added = if has_module { OF_MODULE } else { "" };
            let judge = Judge {
                contents: self,
                words: &format!("{added} {line}"),
                has_module,
                proves_secure_boot,
            };
            judge.channels()
        };
        let mut channels = with(self.files.found.contains(MODULE));
        if self.files.unread.is_some() {
            // the module closes some of them
            for (channel, closed) in channels.iter_mut().zip(with(true)) {
                if (channel.state, closed.state) == (ChannelState::Open, ChannelState::Closed) {
                    channel.state = ChannelState::Unseen;
                    channel.found +=
                        "; the initrd cannot be read: closed if it has firstlight's module";
                }
            }
        }
        channels
    }
}

/// Judges the contents of an image.
struct Judge<'a> {
    contents: &'a Contents,
    /// The kernel command line as systemd gets it.
    words: &'a str,
    has_module: bool,
    proves_secure_boot: bool,
}

impl Judge<'_> {
    fn channels(&self) -> Vec<HostChannel> {
        vec![
            self.root(),
            self.efi_variables(),
            self.credentials(),
            self.acpi(),
            self.shells(),
            self.shell_after_failure(),
            self.consoles(),
            self.servers(),
            self.resume(),
            self.sysrq(),
            self.partitions(),
        ]
    }

    fn words(&self) -> Words<'_> {
        Words(self.words)
    }

    fn root(&self) -> HostChannel {
        let words = self.words();
        let (state, found) = match self
            .contents
            .command_line
            .as_deref()
            .map(boot::unverified_root)
        {
            None => (
                ChannelState::Open,
                "the image has no command line of its own",
            ),
            Some(Some(_)) => (ChannelState::Open, "root= without the hash of dm-verity"),
            Some(None)
                if [
                    "roothash",
                    "usrhash",
                    "dm_mod.create",
                    "systemd.verity_root_data",
                ]
                .iter()
                .any(|name| words.value(name).is_some()) =>
            {
                (ChannelState::Closed, "verified by dm-verity")
            }
            Some(None) => (
                ChannelState::Unseen,
                "neither root= nor roothash=: the initrd decides",
            ),
        };
        channel(
            "root file system",
            state,
            found,
            "roothash=HASH on the kernel command line, with dm-verity (docs/images/host.md)",
        )
    }

    /// systemd 252 to 257 takes the variable SystemdOptions for a part of the kernel command line
    /// unless Secure Boot is on.
    fn efi_variables(&self) -> HostChannel {
        let words = self.words();
        // both the kernel and the initrd's module use each word
        let has = |option: &str| {
            let mut all = words.0.split_whitespace();
            let options = |word: &str| {
                let options = word.strip_prefix("efi=").unwrap_or_default();
                options.split(',').any(|it| it == option)
            };
            all.any(options)
        };
        let (state, found) = if has("noruntime") || words.value("noefi").is_some() {
            (ChannelState::Closed, "the kernel does not read them")
        } else if self.has_module && !has("runtime") {
            (ChannelState::Closed, "the initrd has firstlight's module")
        } else if self.proves_secure_boot {
            (ChannelState::Closed, "PCR 4 shows that Secure Boot is on")
        } else {
            (
                ChannelState::Open,
                "systemd reads SystemdOptions like the kernel command line, and no register has it",
            )
        };
        channel(
            EFI_VARIABLES,
            state,
            found,
            "efi=noruntime on the kernel command line",
        )
    }

    fn credentials(&self) -> HostChannel {
        let (state, found) = if self.words().is_off("systemd.import_credentials") {
            (ChannelState::Closed, "systemd imports none")
        } else {
            (
                ChannelState::Open,
                "systemd imports them from SMBIOS and fw_cfg, and no register has them",
            )
        };
        channel(
            "credentials",
            state,
            found,
            "systemd.import_credentials=no on the kernel command line",
        )
    }

    fn acpi(&self) -> HostChannel {
        let (state, found) = if self.contents.confines_acpi() {
            (ChannelState::Closed, "the kernel confines the code in them")
        } else {
            (
                ChannelState::Open,
                "the kernel lets the code in them write its memory",
            )
        };
        channel(
            "ACPI tables",
            state,
            found,
            "a kernel that confines them, as that of make mkosi; on TDX machines also a policy with RTMR 0 (docs/attestation.md)",
        )
    }

    fn shells(&self) -> HostChannel {
        let words = self.words();
        let is_open = |name: &&&str| match (**name, words.value(name)) {
            (_, None) => false,
            // these are switches
            (
                "systemd.debug_shell"
                | "rd.systemd.debug_shell"
                | "rd.shell"
                | "SYSTEMD_SULOGIN_FORCE",
                Some(value),
            ) => !is_no(value),
            ("systemd.unit" | "rd.systemd.unit", Some(value)) => ["rescue", "emergency", "debug"]
                .iter()
                .any(|it| value.contains(it)),
            _ => true,
        };
        let open: Vec<&str> = SHELLS
            .iter()
            .filter(is_open)
            .filter_map(|name| Some(words.word(name)?.0))
            .collect();
        let (state, found) = if open.is_empty() {
            (ChannelState::Closed, "none".to_owned())
        } else {
            (ChannelState::Open, open.join(" "))
        };
        channel(
            "parameters of shells",
            state,
            &found,
            "remove them from the kernel command line",
        )
    }

    /// Without these words dracut and initramfs-tools open a shell on the console if the boot
    /// fails, and the host can make it fail.
    fn shell_after_failure(&self) -> HostChannel {
        let words = self.words();
        let panics = words.value("panic").is_some_and(|value| value != "0");
        let (state, found) = if panics || words.is_off("rd.shell") {
            (ChannelState::Closed, "the machine restarts instead")
        } else {
            (
                ChannelState::Open,
                "an initrd may open a shell on the console if the boot fails",
            )
        };
        channel(
            "shell after a failure",
            state,
            found,
            "panic=10 rd.shell=0 rd.emergency=reboot on the kernel command line",
        )
    }

    fn consoles(&self) -> HostChannel {
        channel(
            "logins on consoles",
            ChannelState::Unseen,
            "the root file system was not read",
            "mask getty@, serial-getty@, console-getty, debug-shell in the root file system",
        )
    }

    fn servers(&self) -> HostChannel {
        let found: Vec<&str> = SERVERS
            .into_iter()
            .filter(|name| self.contents.files.found.contains(name))
            .collect();
        let by_vsock = self
            .contents
            .systemd
            .is_some_and(|version| version >= SSH_BY_VSOCK)
            && !self.words().is_off("systemd.ssh_auto");
        let (state, text) = match (&found[..], by_vsock) {
            ([_, ..], _) => (
                ChannelState::Open,
                format!("the initrd has {}", found.join(", ")),
            ),
            ([], true) => (
                ChannelState::Unseen,
                "the root file system was not read; systemd starts an sshd on a vsock".to_owned(),
            ),
            ([], false) => (
                ChannelState::Unseen,
                "the root file system was not read".to_owned(),
            ),
        };
        channel(
            "sshd and guest agents",
            state,
            &text,
            "remove them from the image; systemd.ssh_auto=no on the kernel command line",
        )
    }

    fn resume(&self) -> HostChannel {
        let words = self.words();
        let names = ["noresume", "nohibernate"];
        let is_off =
            names.iter().any(|name| words.value(name).is_some()) || words.is_off("hibernate");
        let (state, found) = match (words.word("resume"), is_off.then_some(())) {
            (_, Some(())) => (ChannelState::Closed, "off"),
            (Some((word, _)), None) => (ChannelState::Open, word),
            (None, None) => (
                ChannelState::Open,
                "the EFI variable HibernateLocation or the initrd may name a disk, whose content becomes the memory",
            ),
        };
        channel(
            "resume from hibernation",
            state,
            found,
            "noresume on the kernel command line",
        )
    }

    fn sysrq(&self) -> HostChannel {
        let words = self.words();
        let (state, found) = match words.value("sysctl.kernel.sysrq") {
            _ if words.value("sysrq_always_enabled").is_some() => {
                (ChannelState::Open, "sysrq_always_enabled")
            }
            Some("0") => (ChannelState::Closed, "off"),
            None if self.has_module => (ChannelState::Closed, "the initrd has firstlight's module"),
            _ => (
                ChannelState::Unseen,
                "the kernel's default counts until the root file system sets another",
            ),
        };
        channel(
            "SysRq on consoles",
            state,
            found,
            "sysctl.kernel.sysrq=0 on the kernel command line",
        )
    }

    fn partitions(&self) -> HostChannel {
        let (state, found) = if self.words().is_off("systemd.gpt_auto") {
            (ChannelState::Closed, "systemd.gpt_auto=no")
        } else {
            (
                ChannelState::Open,
                "systemd mounts partitions by their types, also those that the host adds",
            )
        };
        channel(
            "partitions by type (gpt-auto)",
            state,
            found,
            "systemd.gpt_auto=no on the kernel command line",
        )
    }
}

fn channel(
    name: &'static str,
    state: ChannelState,
    found: &str,
    closed_by: &'static str,
) -> HostChannel {
    HostChannel {
        name,
        state,
        found: found.to_owned(),
        closed_by,
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpio;
    use super::*;

    const CLOSED: &str = "console=ttyS0 panic=10 roothash=ab efi=noruntime systemd.import_credentials=no systemd.gpt-auto=no noresume \
                          sysctl.kernel.sysrq=0 systemd.ssh_auto=no";

    fn contents(command_line: &str, kernel: &str, initrd: &[u8]) -> Contents {
        Contents::new(Some(command_line), kernel, initrd, Some(257))
    }

    /// The channels in this state.
    fn named(contents: &Contents, state: ChannelState) -> Vec<&'static str> {
        let channels = contents.channels(false).into_iter();
        channels
            .filter(|it| it.state == state)
            .map(|it| it.name)
            .collect()
    }

    #[test]
    fn what_an_image_leaves_open_is_named() {
        let closed = contents(CLOSED, "6.12 aml-confined", &[]);
        assert_eq!(named(&closed, ChannelState::Open), Vec::<&str>::new());
        assert_eq!(
            named(&closed, ChannelState::Unseen),
            ["logins on consoles", "sshd and guest agents"]
        );
        let open = contents("root=/dev/vda1", "6.12", &[]);
        assert_eq!(
            named(&open, ChannelState::Open),
            [
                "root file system",
                "EFI variables",
                "credentials",
                "ACPI tables",
                "shell after a failure",
                "resume from hibernation",
                "partitions by type (gpt-auto)",
            ]
        );
        let without = Contents::new(None, "", &[], None);
        assert!(named(&without, ChannelState::Open).contains(&"root file system"));
    }

    #[test]
    fn each_line_closes_its_channel_and_its_opposite_does_not() {
        for (channel, word, opposite) in [
            ("EFI variables", "efi=noruntime", "efi=debug"),
            ("EFI variables", "efi=debug,noruntime", "efi=noruntimes"),
            (
                "credentials",
                "systemd.import_credentials=no",
                "systemd.import_credentials=yes",
            ),
            (
                "resume from hibernation",
                "resume=/dev/vdb noresume",
                "resume=/dev/vdb",
            ),
            (
                "SysRq on consoles",
                "sysctl.kernel.sysrq=0",
                "sysctl.kernel.sysrq=0 sysrq_always_enabled",
            ),
            (
                "partitions by type (gpt-auto)",
                "systemd.gpt_auto=0",
                "systemd.gpt_auto=0 systemd.gpt_auto=1",
            ),
            ("shell after a failure", "panic=1", "panic=0"),
            (
                "parameters of shells",
                "systemd.debug-shell=no",
                "systemd.debug-shell",
            ),
            (
                "parameters of shells",
                "systemd.unit=multi-user.target",
                "systemd.unit=rescue.target",
            ),
            ("parameters of shells", "rd.shell=0", "rd.shell"),
            ("parameters of shells", "quiet", "init=/bin/sh"),
            ("parameters of shells", "quiet", "break=premount"),
        ] {
            let is_closed = |line: &str| {
                named(&contents(line, "", &[]), ChannelState::Closed).contains(&channel)
            };
            assert!(is_closed(word), "{word}");
            assert!(!is_closed(opposite), "{opposite}");
        }
    }

    #[test]
    fn the_initrd_tells_as_far_as_it_can_be_read() {
        let by_module = [
            "EFI variables",
            "credentials",
            "resume from hibernation",
            "partitions by type (gpt-auto)",
        ];
        let with = |line: &str| contents(line, "", &cpio::archive(MODULE, b""));
        let packed = contents("quiet", "", b"\x28\xb5\x2f\xfd");
        for channel in by_module {
            assert!(
                named(&with("quiet"), ChannelState::Closed).contains(&channel),
                "{channel}"
            );
            assert!(
                named(&packed, ChannelState::Unseen).contains(&channel),
                "{channel}"
            );
            let without = contents("quiet", "", &cpio::archive("init", b""));
            assert!(
                named(&without, ChannelState::Open).contains(&channel),
                "{channel}"
            );
        }
        // the kernel command line overrides the module
        let line = "efi=runtime systemd.import_credentials=yes";
        assert_eq!(named(&with(line), ChannelState::Open)[..2], by_module[..2]);
        let served = contents(CLOSED, "aml-confined", &cpio::archive("usr/sbin/sshd", b""));
        assert_eq!(
            named(&served, ChannelState::Open),
            ["sshd and guest agents"]
        );
        // with Secure Boot measured into a register, systemd ignores the variables
        let channels = contents("quiet", "", &[]).channels(true);
        let efi = channels.iter().find(|it| it.name == "EFI variables");
        assert_eq!(efi.map(|it| it.state), Some(ChannelState::Closed));
    }
}
