//! Unified kernel images (UAPI group, "Unified Kernel Image"): the measurements of systemd-stub for
//! one, by the stub's version. The rules come from systemd's sources (src/boot/stub.c, measure.c,
//! cpio.c; src/fundamental/uki.c) and were compared with booted machines.

use std::fmt;

use super::cpio;
use super::digest::Digest;
use super::error::Error;
use super::event_log::{BootLog, Missing, utf16};
use super::host::Contents;
use super::linux::{self, Release};
use super::pe::{Pe, Section};
use base::boot;

/// The oldest version of systemd-stub whose rules are known here, and the newest that was compared.
const OLDEST: u32 = 252;
const NEWEST: u32 = 262;
/// The first versions in which the stub: measures on TDX machines, too; adds the operating system's
/// description to the initrd; starts the kernel without the firmware; adds a secret of the machine
/// to the initrd and a console to the command line; measures also tagged events, such as the
/// profile's, on TDX machines; ignores a read-only random seed.
const MEASURES_ON_TDX: u32 = 256;
const ADDS_OS_RELEASE: u32 = 257;
const STARTS_KERNEL: u32 = 258;
const ADDS_BOOT_SECRET: u32 = 261;
pub const MEASURES_TAGGED_ON_TDX: u32 = 261;
const HEEDS_READ_ONLY_SEED: u32 = 262;
/// Maximum number of characters of a version.
const MAX_VERSION: usize = 60;
/// Maximum number of characters of a profile's ID or title.
const MAX_PROFILE: usize = 60;

/// The measured sections in the order of measurement, each with the first version that measures it.
const MEASURED: [(&str, u32); 15] = [
    (".linux", 0),
    (".osrel", 0),
    (".cmdline", 0),
    (".initrd", 0),
    (".ucode", 256),
    (".splash", 0),
    (".dtb", 0),
    (".uname", 254),
    (".sbat", 254),
    (".pcrpkey", 0),
    (".profile", 257),
    (".dtbauto", 257),
    (".hwids", 257),
    (".efifw", 258),
    // never measured, but passed to the kernel
    (".pcrsig", u32::MAX),
];
/// Sections of which the stub uses the one that matches the machine.
const FOR_HARDWARE: [&str; 2] = [".dtbauto", ".efifw"];

/// The other files on an image's EFI system partition that matter.
#[derive(Default)]
pub struct Surroundings {
    /// Files that the stub passes to the kernel: addons, credentials, extensions.
    pub sidecars: Vec<String>,
    /// Whether the random seed is read-only.
    pub is_seed_read_only: bool,
}

/// An image, reduced to the measured parts.
pub struct Uki {
    /// The stub's version: `257.13-1~deb13u1`, and its first number.
    pub version: String,
    major: u32,
    image: Digest,
    /// The kernel's own digest, if the firmware starts it.
    kernel: Option<Digest>,
    /// The measured sections with their digests.
    sections: Digests,
    /// The sections of which one is chosen by the hardware.
    for_hardware: Vec<&'static str>,
    command_line: Result<Digest, Missing>,
    /// The initrd with what the stub adds to it; `Ok(None)` if there is nothing.
    initrd: Result<Option<Digest>, Missing>,
    has_command_line: bool,
    /// The release of the kernel.
    release: Release,
    sidecars: Vec<String>,
    /// The profile that boots, if the image has any.
    profile: Option<Profile>,
    /// Whether the command line disables the units: `systemd.tpm2_measured_os=0`, or
    /// `efi=noruntime` without `SYSTEMD_FORCE_MEASURE=1`.
    is_measuring_off: bool,
    /// The known facts about how it treats the host.
    pub contents: Contents,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

/// Returns the name and the version that systemd's stub and boot manager have in their section
/// .sdmagic: `systemd-stub` and `257.13-1`; `None` for another program.
pub fn systemd_program(pe: &Pe) -> Option<(String, String)> {
    let text = pe.section(".sdmagic")?.in_memory().ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let text = text
        .strip_prefix("#### LoaderInfo: ")?
        .split(" ####")
        .next()?;
    let (name, version) = text.split_once(' ')?;
    let is_plain = version.bytes().all(|byte| byte.is_ascii_graphic());
    (is_plain && version.len() <= MAX_VERSION).then(|| (name.to_owned(), version.to_owned()))
}

/// Returns whether a file is a program that begins with systemd-stub.
pub fn has_stub(bytes: &[u8]) -> bool {
    let program = Pe::parse(bytes).ok().as_ref().and_then(systemd_program);
    program.is_some_and(|(name, _)| name == "systemd-stub")
}

/// Returns the kernel command line in an image.
pub fn words(bytes: &[u8]) -> Result<String, Error> {
    let pe = Pe::parse(bytes)?;
    let section = pe
        .section(".cmdline")
        .ok_or_else(|| Error::NotFound("the image has no section .cmdline".into()))?;
    let text = section.in_memory()?;
    Ok(String::from_utf8_lossy(&text)
        .trim_end_matches(['\0', '\n'])
        .into())
}

/// Returns the first number of a version of systemd.
pub fn major(version: &str) -> Option<u32> {
    release(version).map(|(major, _)| major)
}

/// Returns the first two numbers of a version of systemd: 252 and 39 of `252.39-1~deb12u2`. The
/// second is 0 if there is none.
fn release(version: &str) -> Option<(u32, u32)> {
    let number = |text: &str| {
        text.split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    };
    let (_, rest) = version.split_once('.').unwrap_or_default();
    Some((number(version)?, number(rest).unwrap_or(0)))
}

/// Returns the version of the image's systemd-stub, and its first number.
fn stub(pe: &Pe) -> Result<(String, u32), Error> {
    let foreign = "not a unified kernel image: it has no systemd-stub; give a kernel by --kernel";
    let (_, version) = systemd_program(pe)
        .filter(|(name, _)| name == "systemd-stub")
        .ok_or_else(|| Error::Foreign(foreign.into()))?;
    let major = major(&version)
        .filter(|major| *major >= OLDEST)
        .ok_or_else(|| {
            let text = format!("systemd-stub {version}: expected {OLDEST} or newer");
            Error::Unsupported(text)
        })?;
    Ok((version, major))
}

/// Returns the digest of the kernel if the firmware starts it, and so measures it.
fn started_kernel(linux: &[u8], major: u32) -> Result<Option<Digest>, Error> {
    if major >= STARTS_KERNEL {
        return Ok(None);
    }
    let kernel = Pe::parse(linux).and_then(|kernel| kernel.authenticode());
    kernel
        .map(Some)
        .map_err(|error| error.within("section .linux"))
}

/// Returns whether the command line turns off those units of systemd that measure. They measure only if they find a variable of the
/// stub, or if the command line requires it.
fn turns_measuring_off(words: &str, major: u32) -> bool {
    let has = |start: &str| words.split_whitespace().any(|word| word.starts_with(start));
    let is_blind = has("efi=noruntime") && !has("SYSTEMD_FORCE_MEASURE=1");
    let is_turned_off = major >= ADDS_BOOT_SECRET
        && words.split_whitespace().any(|word| {
            let value = word.strip_prefix("systemd.tpm2_measured_os=");
            value.is_some_and(|value| ["0", "no", "n", "false", "f", "off"].contains(&value))
        });
    is_blind || is_turned_off
}

/// Returns the digest of the command line that the stub passes on.
fn command_line(text: Option<&[u8]>, version: &str, major: u32) -> Result<Digest, Missing> {
    let text = text.ok_or_else(|| {
        Missing::new(
            "the image has no command line, so the program that starts it chooses one",
            "put the command line into the image (section .cmdline)",
        )
    })?;
    let has_console = String::from_utf8_lossy(text)
        .split_whitespace()
        .any(|word| word.starts_with("console="));
    if major >= ADDS_BOOT_SECRET && !has_console {
        return Err(Missing::new(
            format!(
                "systemd-stub {version} adds the machine's console to a command line without console="
            ),
            "write console= into the command line, or pin PCR 11 with 12 and 13",
        ));
    }
    let passed_on = passed_on(text, version).ok_or_else(|| {
        Missing::new(
            format!("the command line has control characters or spaces that systemd-stub {version} may drop"),
            "write the command line without them, or pin PCR 11 with 12 and 13",
        )
    })?;
    Ok(Digest::of(&[&utf16(&passed_on)]))
}

/// Returns whether the stub adds a secret of the machine to the initrd.
fn adds_boot_secret(major: u32, surroundings: Option<&Surroundings>) -> bool {
    major >= ADDS_BOOT_SECRET
        && surroundings.is_some_and(|it| !it.is_seed_read_only || major < HEEDS_READ_ONLY_SEED)
}

fn boot_secret(version: &str) -> Missing {
    Missing::new(
        format!(
            "systemd-stub {version} adds a secret of each machine (.extra/boot-secret) to the initrd"
        ),
        "pin PCR 11, which has kernel, initrd and command line, with 12 and 13; or make the file \
         loader/random-seed of the EFI system partition read-only (systemd 262)",
    )
}

/// Measured sections, each with its digest.
type Digests = Vec<(&'static str, Digest)>;

impl Uki {
    /// Reads an image. `surroundings` is `None` if the image does not lie on an EFI system
    /// partition. `chosen` is the ID or the number of the profile that boots, the first if it is
    /// `None`.
    pub fn parse(
        bytes: &[u8],
        surroundings: Option<&Surroundings>,
        chosen: Option<&str>,
    ) -> Result<Uki, Error> {
        let pe = Pe::parse(bytes)?;
        let (version, major) = stub(&pe)?;
        let mut warnings = Vec::new();
        if major > NEWEST {
            warnings.push(format!(
                "systemd-stub {version} is newer than {NEWEST}, whose rules are used: compare with a booted machine"
            ));
        }
        let profiles = Profile::all(&pe, major)?;
        let index = chosen.map_or(Ok(0), |chosen| Profile::find(&profiles, chosen))?;
        let sections = Sections::of(&pe, major, index)?;
        if profiles.len() > 1 && chosen.is_none() {
            let first = &profiles[0];
            warnings.push(format!(
                "the image has the profiles {}; these values are those of {first}, the first: --profile chooses another",
                Profile::list(&profiles)
            ));
        }
        let linux = sections
            .read(".linux")?
            .ok_or_else(|| Error::NotFound("the image has no kernel: no section .linux".into()))?;
        let (kernel, release) = (started_kernel(&linux, major)?, Release::of(&linux));
        let text = sections.read(".cmdline")?;
        let words = text.as_deref().map(String::from_utf8_lossy);
        let contents = Contents::new(
            words.as_deref(),
            linux::version(&linux),
            &sections.read(".initrd")?.unwrap_or_default(),
            Some(major),
        );
        drop(linux);
        let words = words.unwrap_or_default();
        warnings.extend(boot::unverified_root(&words).map(str::to_owned));
        let initrd = if adds_boot_secret(major, surroundings) {
            Err(boot_secret(&version))
        } else {
            Ok(sections.initrd(major)?)
        };
        let (measured, for_hardware) = sections.measured(major)?;
        Ok(Uki {
            image: pe.authenticode()?,
            kernel,
            sections: measured,
            for_hardware,
            command_line: command_line(text.as_deref(), &version, major),
            initrd,
            has_command_line: text.is_some(),
            release,
            sidecars: surroundings
                .map(|it| it.sidecars.clone())
                .unwrap_or_default(),
            profile: profiles.into_iter().nth(index),
            is_measuring_off: turns_measuring_off(&words, major),
            contents,
            version,
            major,
            warnings,
        })
    }

    /// Returns the profile that boots; `None` if the image has none.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// Returns the version of systemd whose units measure in the booted machine; `None` if they are
    /// disabled. The stub's version is used for the initramfs and the system, too, which usually
    /// come from the same release.
    pub fn systemd(&self) -> Option<u32> {
        (!self.is_measuring_off).then_some(self.major)
    }

    /// Adds the event of the firmware for loading the image.
    pub fn measure_image(&self, log: &mut BootLog) {
        log.extend(4, "the unified kernel image", self.image);
    }

    /// Adds the measurements of the stub and the kernel. `secure_boot`: whether the firmware checks
    /// signatures.
    pub fn measure(&self, secure_boot: bool, log: &mut BootLog) {
        let option = self.profile.as_ref().and_then(Profile::option);
        let is_measured = self.major >= MEASURES_TAGGED_ON_TDX || !log.is_tdx();
        if let (Some(option), true) = (option, is_measured) {
            log.utf16(
                12,
                "the number of the profile",
                option.trim_start_matches('@'),
            );
        }
        if self.major >= MEASURES_ON_TDX || !log.is_tdx() {
            self.measure_sections(log);
        }
        for (name, pcr) in self
            .sidecars
            .iter()
            .flat_map(|name| [4, 9, 12, 13].map(|pcr| (name, pcr)))
        {
            let why = format!("the stub passes on {name}, a file that is not part of the image");
            let instead = if name.contains("/nvpcr-anchor.") {
                "mask systemd-tpm2-setup, which wrote it (systemd 259 to 261), and remove it"
            } else {
                "remove it, or put what it does into the image"
            };
            log.unknown(pcr, &why, instead);
        }
        if let (Some(kernel), false) = (self.kernel, secure_boot) {
            log.extend(4, "the kernel in the image", kernel);
        }
        if let Some(missing) = self.release.measures(log.is_tdx()).err() {
            log.missing(9, missing);
        }
        match (&self.command_line, &self.initrd) {
            (Ok(command_line), Ok(initrd)) => {
                log.extend(9, "the kernel's command line", *command_line);
                if let Some(initrd) = initrd {
                    log.extend(9, "the initrd with what the stub adds", *initrd);
                }
            }
            (Err(missing), _) | (_, Err(missing)) => log.missing(9, missing.clone()),
        }
    }

    /// Adds the measurements of the stub.
    fn measure_sections(&self, log: &mut BootLog) {
        for (name, digest) in &self.sections {
            log.extend(
                11,
                format!("the name {name}"),
                Digest::of(&[name.as_bytes(), b"\0"]),
            );
            log.extend(11, format!("section {name}"), *digest);
        }
        for name in &self.for_hardware {
            let why = format!(
                "the image has sections {name}, of which the stub measures the one that fits the machine"
            );
            log.unknown(11, &why, "compare with the event log of such a machine");
        }
        if !self.has_command_line {
            log.unknown(
                12,
                "the image has no command line: the stub measures the one that it is given",
                "put the command line into the image (section .cmdline)",
            );
        }
    }
}

/// A profile of an image: sections that replace or add to the sections before all profiles (UAPI
/// group, "Unified Kernel Image").
pub struct Profile {
    /// Its number, from 0: systemd-boot starts `@1` as the second.
    number: usize,
    /// Its ID; empty without one.
    id: String,
    /// Its title; empty without one.
    title: String,
}

impl Profile {
    /// Returns the profiles of an image.
    fn all(pe: &Pe, major: u32) -> Result<Vec<Profile>, Error> {
        let sections = pe.sections().iter().filter(|it| is_profile(it, major));
        let profiles = sections.enumerate().map(|(number, section)| {
            let text = section.in_memory()?;
            let text = String::from_utf8_lossy(&text);
            let value = |name: &str| {
                let mut lines = text.lines().map(|line| line.trim().trim_end_matches('\0'));
                let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
                let value = value.unwrap_or_default().trim_matches(['"', '\'']);
                base::text::printable(value, MAX_PROFILE)
            };
            let (id, title) = (value("ID"), value("TITLE"));
            Ok(Profile { number, id, title })
        });
        profiles.collect()
    }

    /// Returns the index of the profile with this ID or number.
    fn find(profiles: &[Profile], chosen: &str) -> Result<usize, Error> {
        if profiles.is_empty() {
            let text = "the image has no profiles: omit --profile";
            return Err(Error::NotFound(text.into()));
        }
        let by_id = profiles.iter().position(|it| it.id == chosen);
        let by_number = || {
            profiles
                .iter()
                .position(|it| it.number.to_string() == chosen)
        };
        by_id.or_else(by_number).ok_or_else(|| {
            let chosen = base::text::printable(chosen, MAX_PROFILE);
            let known = Profile::list(profiles);
            Error::NotFound(format!("the image has no profile {chosen}: it has {known}"))
        })
    }

    fn list(profiles: &[Profile]) -> String {
        let names: Vec<_> = profiles.iter().map(Profile::to_string).collect();
        names.join(", ")
    }

    /// Returns the option by which systemd-boot starts the profile; `None` for the first, which
    /// needs none.
    pub fn option(&self) -> Option<String> {
        (self.number > 0).then(|| format!("@{}", self.number))
    }

    /// Returns the title; empty without one.
    pub fn title(&self) -> &str {
        &self.title
    }
}

impl fmt::Display for Profile {
    /// Writes the ID, or the number of a profile without one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.id.is_empty() {
            write!(f, "{}", self.number)
        } else {
            f.write_str(&self.id)
        }
    }
}

/// Returns whether a profile begins with a section.
fn is_profile(section: &Section, major: u32) -> bool {
    section.name == b".profile" && major >= 257
}

/// The sections of a profile, by their names.
struct Sections<'a>(Vec<(&'static str, Section<'a>)>);

impl<'a> Sections<'a> {
    /// Returns the sections of a profile: its own, and those before all profiles.
    fn of(pe: &Pe<'a>, major: u32, profile: usize) -> Result<Sections<'a>, Error> {
        let all = pe.sections();
        let starts = (0..all.len()).filter(|index| is_profile(&all[*index], major));
        let starts: Vec<_> = starts.chain([all.len()]).collect();
        let start = |number: usize| starts.get(number).copied().unwrap_or(all.len());
        let base = &all[..start(0)];
        let own = &all[start(profile)..start(profile + 1)];
        let mut sections = Vec::new();
        for (name, _) in MEASURED {
            let named = |section: &&Section| section.name == name.as_bytes() && !section.is_empty();
            for part in [own, base] {
                let mut found = part.iter().filter(named);
                if let Some(section) = found.next() {
                    if found.next().is_some() && !FOR_HARDWARE.contains(&name) {
                        let text = format!("the image has two sections {name}");
                        return Err(Error::Malformed(text));
                    }
                    sections.push((name, *section));
                    break;
                }
            }
        }
        Ok(Sections(sections))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let section = self.0.iter().find(|(this, _)| *this == name);
        section.map(|(_, section)| section.in_memory()).transpose()
    }

    /// Returns the sections that this version of the stub measures, and the names of the sections from which the stub chooses one
    /// by the hardware.
    fn measured(&self, major: u32) -> Result<(Digests, Vec<&'static str>), Error> {
        let (mut measured, mut for_hardware) = (Vec::new(), Vec::new());
        for (name, since) in MEASURED {
            match self.read(name)? {
                Some(_) if since > major => {}
                Some(_) if FOR_HARDWARE.contains(&name) => for_hardware.push(name),
                Some(data) => measured.push((name, Digest::of(&[&data]))),
                None => {}
            }
        }
        Ok((measured, for_hardware))
    }

    /// Returns the digest of what the kernel gets as its initrd.
    fn initrd(&self, major: u32) -> Result<Option<Digest>, Error> {
        let mut parts = Vec::new();
        for name in [".ucode", ".initrd"] {
            let is_known = name != ".ucode" || major >= 256;
            parts.extend(self.read(name)?.filter(|_| is_known));
        }
        let added = [
            (".pcrsig", "tpm2-pcr-signature.json", 0),
            (".pcrpkey", "tpm2-pcr-public-key.pem", 0),
            (".osrel", "os-release", ADDS_OS_RELEASE),
            (".profile", "profile", ADDS_OS_RELEASE),
        ];
        for (section, file, since) in added {
            if major >= since {
                parts.extend(
                    self.read(section)?
                        .map(|content| cpio::archive(file, &content)),
                );
            }
        }
        if parts.len() > 1 {
            parts.iter_mut().for_each(cpio::pad);
        }
        let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
        Ok((!parts.is_empty()).then(|| Digest::of(&parts)))
    }
}

/// Returns the command line that the stub passes on to the kernel; `None` if it cannot be
/// predicted, because the text has characters that versions treat differently.
fn passed_on(section: &[u8], version: &str) -> Option<String> {
    let text = section.split(|byte| *byte == 0).next()?;
    let text = str::from_utf8(text).ok()?;
    // 254 and late releases of 252 replace control characters by spaces and drop those at the end,
    // 257 also those at the beginning
    let spaced: String = text
        .chars()
        .map(|c| if c <= ' ' { ' ' } else { c })
        .collect();
    let at_end = spaced.trim_end_matches(' ');
    let at_both = at_end.trim_start_matches(' ');
    let candidates = match release(version)? {
        (252, 39..) | (254, _) => &[at_end][..],
        (..=253, _) => &[text, at_end],
        (255..=256, _) => &[at_end, at_both],
        _ => &[at_both],
    };
    let first = candidates.first()?;
    candidates
        .iter()
        .all(|candidate| candidate == first)
        .then(|| (*first).to_owned())
}
