//! `firstlight measure IMAGE`: the registers of machines that will boot an image, computed from the image alone.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::state::hex;
use super::usage::Given;
use attest::attestation::Measurement;
use attest::attestation::variant::Measured;
use attest::tpm::CLUSTER_ID_PCR;
use base::program::{self, Failure};
use image::{Case, Image, Stage, Units};

/// The registers that bind a policy to an image: at least one of them must be in it.
const BINDING: [u32; 3] = [4, 9, 11];

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    boots: Boots,
    given: image::Given,
    /// Whether all values are printed, and no policy.
    pub explain: bool,
    /// Whether the operator named the registers, so that none may be left out.
    are_registers_named: bool,
}

/// What boots.
#[derive(Debug)]
enum Boots {
    /// A raw disk image, or a unified kernel image.
    Image { path: PathBuf, uki: Option<String> },
    /// What QEMU hands to OVMF. The memory is in MiB.
    Kernel {
        path: PathBuf,
        initrd: Option<PathBuf>,
        command_line: String,
        memory: Option<u64>,
    },
}

/// What QEMU hands to the firmware.
pub struct HandedOver {
    /// The file of the kernel.
    pub kernel: Vec<u8>,
    /// The initrd; empty without one.
    pub initrd: Vec<u8>,
    /// The command line.
    pub command_line: String,
}

impl Options {
    /// Returns what QEMU hands to the firmware; `None` if the firmware boots from a disk.
    pub fn handed_over(&self) -> Result<Option<HandedOver>, Failure> {
        let Boots::Kernel {
            path,
            initrd,
            command_line,
            ..
        } = &self.boots
        else {
            return Ok(None);
        };
        Ok(Some(HandedOver {
            kernel: read_file(path)?,
            initrd: initrd.as_deref().map_or(Ok(vec![]), read_file)?,
            command_line: command_line.clone(),
        }))
    }

    fn path(&self) -> &Path {
        match &self.boots {
            Boots::Image { path, .. } | Boots::Kernel { path, .. } => path,
        }
    }

    /// Returns the image's name: that of its file.
    pub fn name(&self) -> String {
        let name = self.path().file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// Returns the options for an image alone: every boot of it is possible.
pub fn of_image(path: PathBuf, uki: Option<String>) -> Options {
    Options {
        boots: Boots::Image { path, uki },
        given: image::Given::default(),
        explain: false,
        are_registers_named: false,
    }
}

/// Returns the options of the command line.
pub fn options(given: &Given) -> Result<Options, Failure> {
    let useless = |options: &[&str], why: &str| match options.iter().find(|name| given.has(name)) {
        Some(name) => Err(Failure::Usage(format!("--{name} {why}"))),
        None => Ok(()),
    };
    useless(
        &["tpm", "trust-any-tpm"],
        "reads a TPM: give it without an image",
    )?;
    let path = |name| given.value(name).map(PathBuf::from);
    let boots = match (given.has_operand(), path("kernel")) {
        (true, Some(_)) => {
            return Err(Failure::Usage(
                "IMAGE and --kernel: give one of the two".into(),
            ));
        }
        (_, Some(kernel)) => {
            useless(&["uki"], "names a file on a disk: give it with IMAGE")?;
            Boots::Kernel {
                path: kernel,
                initrd: path("initrd"),
                command_line: given.text("cmdline")?,
                memory: match given.has("memory") {
                    true => Some(given.parsed("memory", mebibytes)?),
                    false => None,
                },
            }
        }
        (_, None) => {
            useless(&["initrd", "cmdline", "memory"], "belongs to --kernel")?;
            Boots::Image {
                path: given.operand()?.into(),
                uki: given.value("uki").map(program::text).transpose()?,
            }
        }
    };
    let word = |name| given.has(name).then(|| given.text(name)).transpose();
    Ok(Options {
        boots,
        given: image::Given {
            stage: one_of("stage", word("stage")?, &Stage::ALL, Stage::word)?,
            secure_boot: one_of("secure-boot", word("secure-boot")?, &[true, false], |on| {
                if on { "on" } else { "off" }
            })?,
            units: one_of("units", word("units")?, &Units::ALL, Units::word)?,
        },
        explain: given.has("explain"),
        are_registers_named: given.has("pcrs"),
    })
}

/// Returns the value whose word the operator gave.
fn one_of<T: Copy>(
    option: &str,
    given: Option<String>,
    all: &[T],
    word: fn(T) -> &'static str,
) -> Result<Option<T>, Failure> {
    let Some(given) = given else { return Ok(None) };
    let found = all.iter().copied().find(|value| word(*value) == given);
    found.map(Some).ok_or_else(|| {
        let words: Vec<_> = all.iter().map(|value| word(*value)).collect();
        Failure::Usage(format!(
            "--{option} {given:?}: expected {}",
            words.join(", ")
        ))
    })
}

fn mebibytes(text: &str) -> Result<u64, &'static str> {
    let number = text.parse().ok().filter(|mib| (1..1 << 40).contains(mib));
    number.ok_or("expected a number of MiB")
}

fn read_file(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))
}

/// Reads the image.
pub fn read(options: &Options) -> Result<Image, Failure> {
    let path = options.path();
    let image = match &options.boots {
        Boots::Kernel {
            path,
            initrd,
            command_line,
            memory,
        } => {
            let kernel = read_file(path)?;
            let initrd = initrd.as_deref().map(read_file).transpose()?;
            if Image::is_uki(&kernel) {
                if initrd.is_some() || !command_line.is_empty() {
                    return Err(Failure::Usage(
                        "a unified kernel image has its own initrd and command line: omit --initrd and --cmdline".into(),
                    ));
                }
                Image::direct_uki(&kernel)
            } else {
                let memory = memory.map(|mib| mib << 20);
                Image::direct_linux(&kernel, initrd.as_deref(), command_line, memory)
            }
        }
        Boots::Image { path, uki } => {
            let wrong = |error| Failure::failed(format!("{}: {error}", path.display()));
            let mut file = File::open(path).map_err(wrong)?;
            let mut start = [0; 2];
            match file.read_exact(&mut start) {
                Ok(()) if start == *b"MZ" && uki.is_none() => Image::uki(&read_file(path)?),
                _ => Image::disk(file, uki.as_deref()),
            }
        }
    };
    let image = image.map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
    for warning in image.warnings() {
        log::warn!("{}: {warning}", path.display());
    }
    Ok(image)
}

/// Returns the value of each of these registers that has only one at each stage of the boot, or at the stage that the operator named.
/// Warns of the others, unless the operator named them; then they are an error.
pub fn values(options: &Options, image: &Image, pcrs: &[u32]) -> Result<Measured, Failure> {
    let (mut booted, mut initramfs) = (BTreeMap::new(), BTreeMap::new());
    let mut several = String::new();
    // what a policy demands of PCR 15 is not the image's
    for pcr in pcrs.iter().filter(|pcr| **pcr != CLUSTER_ID_PCR) {
        let at = |stage| {
            let stage = Some(options.given.stage.unwrap_or(stage));
            let given = image::Given {
                stage,
                ..options.given
            };
            image.value(*pcr, &given).map(enforced)
        };
        match (at(Stage::Initramfs), at(Stage::Booted)) {
            (Ok(in_initramfs), Ok(when_booted)) => {
                initramfs.insert(*pcr, in_initramfs);
                booted.insert(*pcr, when_booted);
            }
            (Err(cases), _) | (_, Err(cases)) => {
                let cases = image.value(*pcr, &options.given).err().unwrap_or(cases);
                several.push_str(&register(*pcr, &cases, false));
            }
        }
    }
    let choose =
        "--secure-boot and --units choose among several values; --explain prints the events";
    if !several.is_empty() && options.are_registers_named {
        return Err(Failure::failed(format!(
            "not every register has one value ({choose}):\n{}",
            several.trim_end()
        )));
    }
    // a register that nothing extends has the same value for every image
    let binds = |pcr: &u32| {
        booted
            .get(pcr)
            .is_some_and(|value| value.expected != [0; 32])
    };
    if !BINDING.iter().any(binds) {
        return Err(Failure::failed(format!(
            "no register that binds a policy to the image has one value ({choose}):\n{}",
            several.trim_end()
        )));
    }
    if !several.is_empty() {
        log::warn!(
            "these registers are not in the policy ({choose}):\n{}",
            several.trim_end()
        );
    }
    Ok(Measured { booted, initramfs })
}

fn enforced(expected: image::Digest) -> Measurement {
    Measurement {
        expected: expected.into(),
        warn_only: false,
    }
}

/// Returns all values of each register with the events that give them.
pub fn explain(options: &Options, image: &Image) -> String {
    let mut text = format!("{}: {}\n", options.path().display(), image.description());
    for (pcr, cases) in image.registers(&options.given) {
        text.push_str(&register(pcr, &cases, true));
    }
    text
}

/// Returns the cases of a register as lines.
fn register(pcr: u32, cases: &[Case], with_events: bool) -> String {
    let mut text = format!("PCR {pcr}\n");
    for case in cases {
        let when: Vec<&str> = case
            .stage
            .map(Stage::words)
            .into_iter()
            .chain(Some(case.when.as_str()).filter(|when| !when.is_empty()))
            .collect();
        let when = match when.is_empty() {
            true => String::new(),
            false => format!("  {}", when.join(", ")),
        };
        // writing to a string does not fail
        let _ = match &case.value {
            Ok(value) => writeln!(text, "  {}{when}", hex(value)),
            Err(missing) => writeln!(
                text,
                "  not known{when}: {}. Instead: {}",
                missing.why, missing.instead
            ),
        };
        for event in case.events.iter().filter(|_| with_events) {
            let _ = writeln!(text, "    {}  {}", hex(&event.digest), event.what);
        }
    }
    text
}
