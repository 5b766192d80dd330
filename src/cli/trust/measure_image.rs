//! `firstlight measure IMAGE`: the registers of machines that will boot an image, computed from only the image.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::shell::{
    error::Error,
    files::{self, FileError},
    output::Output,
};
use crate::workspace::options::words;
use base::text::hex;
use clap::Args;
use image::host::{self, ChannelState, HostChannel};
use image::{Case, Image, Loader, Platform, RegisterBank, Stage, Units};
use serde_json::{Value, json};
use verifier::{Measured, Measurement, RegisterNames, Registers};

/// The PCR into which the stages of a boot are measured.
const PHASES: u32 = 11;

/// What boots, and how.
#[derive(Debug, Args)]
pub struct BootOptions {
    /// A raw disk image or a unified kernel image; without it, this machine's TPM is read
    pub image: Option<PathBuf>,
    /// The unified kernel image that boots, on the disk's EFI system partition, as EFI/Linux/a.efi; needed if there
    /// are several
    #[arg(long, value_name = "PATH", conflicts_with = "kernel")]
    pub uki: Option<String>,
    /// The profile of the unified kernel image that boots: its ID, or its number from 0; without it the first; the
    /// policy names it
    #[arg(long, value_name = "ID")]
    pub profile: Option<String>,
    /// Instead of IMAGE: a kernel or unified kernel image that QEMU gives to OVMF (-kernel)
    #[arg(long, value_name = "FILE", conflicts_with = "image")]
    pub kernel: Option<PathBuf>,
    /// The initrd of --kernel (QEMU's -initrd)
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// The command line of --kernel (QEMU's -append)
    #[arg(
        long,
        value_name = "TEXT",
        requires = "kernel",
        allow_hyphen_values = true
    )]
    pub cmdline: Option<String>,
    /// The memory of the machine in MiB; with --kernel, PCR 4 (TDX: RTMR 1) depends on it, and with
    /// --gce-endorsement, the MRTD for Google's older hypervisors
    #[arg(long, value_name = "MIB", value_parser = mebibytes, conflicts_with_all = ["image", "kernel_as_is"])]
    pub memory: Option<u64>,
    /// QEMU does not change the kernel: QEMU 10 or newer with an OVMF of edk2-stable202505 or newer
    #[arg(long, requires = "kernel")]
    pub kernel_as_is: bool,
    /// Write only the registers of this stage: in the initramfs or in the booted system; by default the policy has
    /// both
    #[arg(long, value_name = "STAGE", value_parser = words(Stage::ALL.map(|it| (it.word(), it))))]
    pub stage: Option<Stage>,
    /// Whether the machines have Secure Boot; by default the values with and without it must be equal
    #[arg(long, value_name = "STATE", value_parser = words([("on", true), ("off", false)]))]
    pub secure_boot: Option<bool>,
    /// Which of systemd's units that measure run: all; in the initramfs only systemd-pcrphase (dracut); only those of
    /// the booted system; none; by default the values of all possibilities must be equal
    #[arg(long, value_name = "UNITS", value_parser = words(Units::ALL.map(|it| (it.word(), it))))]
    pub units: Option<Units>,
    /// Print all values of each register with the events that give them, and the channels that the image leaves open
    /// to the machine's host, but no policy
    #[arg(long)]
    pub explain: bool,
    /// Write the policy although PCR 4 (TDX: RTMR 1) or PCR 11 has no single value: machines that boot another
    /// program may meet it
    #[arg(long)]
    pub accept_incomplete: bool,
    /// Write the policy although the host can give systemd commands by EFI variables: without Secure Boot, and
    /// without efi=noruntime in the image
    #[arg(long)]
    pub accept_efi_variables: bool,
}

/// What is measured.
#[derive(Debug, Clone)]
pub struct Options {
    boots: Boots,
    /// Whether the disk has other images too, so that the name has the path of this one.
    is_one_of_several: bool,
    /// The profile of a unified kernel image that is booted, by its ID or number.
    profile: Option<String>,
    given: image::KnownConditions,
    /// The registers that the policy gets.
    pub platform: Platform,
    /// Whether to print all values instead of a policy.
    pub explain: bool,
    /// Whether the operator named the registers, so that none may be omitted.
    are_registers_named: bool,
    /// Whether the policy may lack the registers that bind it to the image.
    accepts_incomplete: bool,
    /// Whether the host may choose what the machine reads from EFI variables.
    accepts_efi_variables: bool,
    /// The form of what `explain` prints.
    pub output: Output,
}

/// What boots.
#[derive(Debug, Clone)]
enum Boots {
    /// A raw disk image, or a unified kernel image.
    Image { path: PathBuf, uki: Option<String> },
    /// What QEMU passes to OVMF.
    Kernel {
        path: PathBuf,
        initrd: Option<PathBuf>,
        command_line: String,
        loader: Loader,
    },
}

/// What QEMU passes to the firmware.
pub struct HandedOver {
    /// The file of the kernel.
    pub kernel: Vec<u8>,
    /// The initrd; empty without one.
    pub initrd: Vec<u8>,
    /// The command line.
    pub command_line: String,
}

impl Options {
    /// Returns what QEMU passes to the firmware; `None` if the firmware boots from a disk.
    pub fn handed_over(&self) -> Result<Option<HandedOver>, Error> {
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

    /// Returns whether QEMU passes the image to the firmware, so that the launch digest of an
    /// SEV-SNP machine covers it.
    pub fn is_handed_over(&self) -> bool {
        matches!(self.boots, Boots::Kernel { .. })
    }

    fn path(&self) -> &Path {
        match &self.boots {
            Boots::Image { path, .. } | Boots::Kernel { path, .. } => path,
        }
    }

    /// Returns the name of the file.
    pub fn name(&self) -> String {
        let name = self.path().file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Returns the name of the image in a policy: the file's name, and the name of the booted
    /// profile.
    pub fn name_of(&self, image: &Image) -> String {
        self.completed(&self.name(), image)
    }

    /// Returns this name with what distinguishes the image from others of the same file.
    pub fn completed(&self, name: &str, image: &Image) -> String {
        let mut name = name.to_owned();
        if let (true, Boots::Image { uki: Some(uki), .. }) = (self.is_one_of_several, &self.boots) {
            let file = uki.rsplit('/').next().unwrap_or_default();
            name = format!("{name}, {file}");
        }
        match image.profile() {
            Some(profile) => format!("{name}, profile {profile}"),
            None => name,
        }
    }

    /// Returns whether the disk has other images too.
    pub fn is_one_of_several(&self) -> bool {
        self.is_one_of_several
    }

    /// Returns the options for each image between which systemd-boot chooses on the disk, or only these if there is no choice.
    pub fn each(&self) -> Vec<Options> {
        let Boots::Image { path, uki: None } = &self.boots else {
            return vec![self.clone()];
        };
        // what is wrong with the file is said when the image is read
        let choices = File::open(path).map_or(vec![], |it| Image::choices(it).unwrap_or_default());
        if choices.len() < 2 {
            return vec![self.clone()];
        }
        let one = |uki| Options {
            boots: Boots::Image {
                path: path.clone(),
                uki: Some(uki),
            },
            is_one_of_several: true,
            ..self.clone()
        };
        choices.into_iter().map(one).collect()
    }
}

/// Returns the options for an image without further information: every boot of it is possible.
pub fn of_image(path: PathBuf, uki: Option<String>, profile: Option<String>) -> Options {
    Options {
        boots: Boots::Image { path, uki },
        is_one_of_several: false,
        profile,
        given: image::KnownConditions::default(),
        platform: Platform::Tpm(RegisterBank::Sha256),
        explain: false,
        are_registers_named: false,
        accepts_incomplete: false,
        accepts_efi_variables: false,
        output: Output::Text,
    }
}

impl BootOptions {
    /// Returns the options for the registers of TDX or of a TPM.
    pub fn options(
        self,
        is_tdx: bool,
        are_registers_named: bool,
        output: Output,
    ) -> Result<Options, Error> {
        if output == Output::Json && !self.explain {
            return Err(Error::Usage(
                "-o json belongs to --explain: a policy is JSON anyway".into(),
            ));
        }
        let boots = match (self.kernel, self.image) {
            (Some(path), _) => Boots::Kernel {
                path,
                initrd: self.initrd,
                command_line: self.cmdline.unwrap_or_default(),
                loader: match (self.memory, self.kernel_as_is) {
                    (Some(memory), _) => Loader::Patched(memory << 20),
                    (None, true) => Loader::AsIs,
                    (None, false) => Loader::Unknown,
                },
            },
            (None, image) => Boots::Image {
                path: image.unwrap_or_default(),
                uki: self.uki,
            },
        };
        Ok(Options {
            boots,
            is_one_of_several: false,
            profile: self.profile,
            given: image::KnownConditions {
                stage: self.stage,
                secure_boot: self.secure_boot,
                units: self.units,
            },
            platform: if is_tdx {
                Platform::Tdx
            } else {
                Platform::Tpm(RegisterBank::Sha256)
            },
            explain: self.explain,
            are_registers_named,
            accepts_incomplete: self.accept_incomplete,
            accepts_efi_variables: self.accept_efi_variables,
            output,
        })
    }
}

/// Parses a number of MiB.
fn mebibytes(text: &str) -> Result<u64, &'static str> {
    let number = text.parse().ok().filter(|mib| (1..1 << 40).contains(mib));
    number.ok_or("expected a number of MiB")
}

fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    Ok(files::read_bytes(path)?)
}

/// Reads the image.
pub fn read(options: &Options) -> Result<Image, Error> {
    let path = options.path();
    let profile = options.profile.as_deref();
    let image = match &options.boots {
        Boots::Kernel {
            path,
            initrd,
            command_line,
            loader,
        } => {
            let kernel = read_file(path)?;
            let initrd = initrd.as_deref().map(read_file).transpose()?;
            if Image::is_uki(&kernel) {
                if initrd.is_some() || !command_line.is_empty() {
                    return Err(Error::Usage(
                        "a unified kernel image has its own initrd and command line: omit --initrd and --cmdline".into(),
                    ));
                }
                Image::direct_uki(&kernel, profile)
            } else if profile.is_some() {
                return Err(Error::Usage(
                    "--profile: the kernel is not a unified kernel image, and only those have profiles".into(),
                ));
            } else {
                Image::direct_linux(&kernel, initrd.as_deref(), command_line, *loader)
            }
        }
        Boots::Image { path, uki } => {
            let wrong = |error| FileError::Io("open", path.clone(), error);
            let mut file = File::open(path).map_err(wrong)?;
            let mut start = [0; 2];
            match file.read_exact(&mut start) {
                Ok(()) if start == *b"MZ" && uki.is_none() => {
                    Image::uki(&read_file(path)?, profile)
                }
                _ => Image::disk(file, uki.as_deref(), profile),
            }
        }
    };
    let image = image.map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
    for warning in image.warnings() {
        log::warn!("{}: {warning}", path.display());
    }
    if options.platform == Platform::Tdx && image.has_partition_table() {
        log::warn!(
            "{}: RTMR 1 covers the partition table: the policy accepts only disks with the size and the partitions of this file",
            path.display()
        );
    }
    Ok(image)
}

/// Returns the value of each of these registers that has only one value at each stage of the boot,
/// or at the stage that the operator named. For other registers it warns, or fails if the operator
/// named them. `is_launched`: whether a launch digest in the policy covers the image.
pub fn values(
    options: &Options,
    image: &Image,
    registers: &[u32],
    is_launched: bool,
) -> Result<Measured, Error> {
    let (mut booted, mut initramfs) = (BTreeMap::new(), BTreeMap::new());
    let mut several = String::new();
    let platform = options.platform;
    // the requirement for the register of the cluster does not come from the image
    for register in registers.iter().filter(|it| !is_of_cluster(platform, **it)) {
        let at = |stage| {
            let stage = Some(options.given.stage.unwrap_or(stage));
            let given = image::KnownConditions {
                stage,
                ..options.given
            };
            image.value(platform, *register, &given)
        };
        match (at(Stage::Initramfs), at(Stage::Booted)) {
            (Ok(in_initramfs), Ok(when_booted)) => {
                initramfs.insert(*register, enforced(in_initramfs));
                booted.insert(*register, enforced(when_booted));
            }
            (Err(cases), _) | (_, Err(cases)) => {
                let all = image.value(platform, *register, &options.given).err();
                several += &lines(platform, *register, &all.unwrap_or(cases), false);
            }
        }
    }
    let choose =
        "--secure-boot and --units choose among several values; --explain prints the events";
    if !several.is_empty() && options.are_registers_named {
        return Err(Error::content(format!(
            "some registers have several possible values ({choose}):\n{}",
            several.trim_end()
        )));
    }
    check_binding(options, registers, &booted, several.trim_end(), is_launched)?;
    if !several.is_empty() {
        log::warn!(
            "these registers have several possible values, and are not in the policy ({choose}):\n{}",
            several.trim_end()
        );
    }
    Ok(Measured { booted, initramfs })
}

/// Fails if a policy with these values accepts machines that boot something else. `several` lists
/// the registers without a value.
fn check_binding(
    options: &Options,
    registers: &[u32],
    values: &BTreeMap<u32, Measurement>,
    several: &str,
    is_launched: bool,
) -> Result<(), Error> {
    let boot_loader = options.platform.boot_loader();
    let binds = is_launched
        || values
            .get(&boot_loader)
            .is_some_and(|it| it.expected.iter().any(|byte| *byte != 0));
    let (register, why) = if !binds {
        let why = "without it, another program could run first and make the same measurements into the other registers as the image";
        (boot_loader, why)
    } else if options.platform != Platform::Tdx
        && registers.contains(&PHASES)
        && !values.contains_key(&PHASES)
    {
        let why = "without it, a booted system could get the key that only an initramfs may get";
        (PHASES, why)
    } else {
        return Ok(());
    };
    let name = options.platform.name(register);
    let choose = "--secure-boot and --units choose among several values, --memory or --kernel-as-is gives that of --kernel; \
                  --explain prints the events";
    if options.accepts_incomplete {
        log::warn!("the policy lacks {name} (--accept-incomplete): {why}");
        return Ok(());
    }
    Err(Error::content(format!(
        "{name} would not be in the policy: {why}. {choose}; --accept-incomplete writes the policy nevertheless\n{several}"
    )))
}

/// Reports what the host can still choose when the image is fixed. Fails if the host can choose
/// what systemd reads from EFI variables and no register in the policy covers it.
pub fn judge(options: &Options, image: &Image) -> Result<(), Error> {
    let channels = image.channels(options.platform, &options.given);
    let is = |state| {
        channels
            .iter()
            .filter(move |it: &&HostChannel| it.state == state)
    };
    let open: String = is(ChannelState::Open).map(line).collect();
    let unseen: Vec<&str> = is(ChannelState::Unseen).map(|it| it.name).collect();
    let path = options.path().display();
    if !open.is_empty() {
        log::warn!(
            "{path} leaves these channels open to the host (docs/threat-model.md):\n{}",
            open.trim_end()
        );
    }
    if !unseen.is_empty() {
        log::info!(
            "{path}: cannot tell whether these channels are closed to the host: {}; --explain says why",
            unseen.join(", ")
        );
    }
    let efi = channels
        .iter()
        .find(|it| it.name == host::EFI_VARIABLES && it.state != ChannelState::Closed);
    match efi {
        Some(efi) if options.given.secure_boot != Some(true) && !options.accepts_efi_variables => {
            Err(Error::content(format!(
                "{path}: without Secure Boot the host of the machine chooses its EFI variables: {}. Build the image with {}, or accept \
                 that the host can run programs in the machine (--accept-efi-variables)",
                efi.found, efi.closed_by
            )))
        }
        _ => Ok(()),
    }
}

/// Returns a channel as a line.
fn line(channel: &HostChannel) -> String {
    let HostChannel {
        name,
        state,
        found,
        closed_by,
    } = channel;
    let state = state.word();
    match state {
        "closed" => format!("  {name}: {state}: {found}\n"),
        _ => format!("  {name}: {state}: {found}. Closed by: {closed_by}\n"),
    }
}

/// Returns the values of these PCRs in the SHA-384 bank that are the same at all stages of the
/// boot: AWS's document does not distinguish stages.
pub fn sha384(
    options: &Options,
    image: &Image,
    pcrs: &[u32],
) -> Result<BTreeMap<u32, Vec<u8>>, Error> {
    let platform = Platform::Tpm(RegisterBank::Sha384);
    let one = |pcr: &u32| Some((*pcr, image.value(platform, *pcr, &options.given).ok()?));
    let of_image = pcrs.iter().filter(|it| !is_of_cluster(platform, **it));
    let values: BTreeMap<u32, Vec<u8>> = of_image.filter_map(one).collect();
    if values.contains_key(&platform.boot_loader()) || options.accepts_incomplete {
        Ok(values)
    } else {
        Err(Error::content(
            "PCR 4 has several SHA-384 values: --secure-boot, --units and --stage choose among them",
        ))
    }
}

/// Returns whether a register contains the ID of the cluster.
fn is_of_cluster(platform: Platform, register: u32) -> bool {
    let kind = match platform {
        Platform::Tpm(_) => Registers::Pcrs,
        Platform::Tdx => Registers::Rtmrs,
    };
    register == kind.of_cluster_id()
}

fn enforced(expected: Vec<u8>) -> Measurement {
    Measurement {
        expected,
        warn_only: false,
    }
}

/// Returns all possible values of each register with the events that give them, and what the host
/// can still choose.
pub fn explain(options: &Options, image: &Image) -> String {
    let mut text = format!("{}: {}\n", options.path().display(), image.description());
    for (register, cases) in image.registers(options.platform, &options.given) {
        text += &lines(options.platform, register, &cases, true);
    }
    text += "what the image leaves open to the machine's host\n";
    let channels = image.channels(options.platform, &options.given);
    text + &channels.iter().map(line).collect::<String>()
}

/// Returns the same information for programs.
pub fn explain_json(options: &Options, image: &Image) -> Value {
    let registers = image.registers(options.platform, &options.given);
    let registers = registers.into_iter().map(|(register, cases)| {
        let cases: Vec<Value> = cases.iter().map(case_json).collect();
        json!({"index": register, "name": options.platform.name(register), "values": cases})
    });
    let channels = image.channels(options.platform, &options.given);
    let channels = channels.iter().map(|it| {
        json!({"name": it.name, "state": it.state.word(), "found": it.found, "closedBy": it.closed_by})
    });
    json!({
        "image": options.path().display().to_string(),
        "boots": image.description(),
        "kernel": image.contents().kernel,
        "registers": registers.collect::<Vec<Value>>(),
        "host": channels.collect::<Vec<Value>>(),
    })
}

fn case_json(case: &Case) -> Value {
    let events = case.events.iter();
    let events = events.map(|it| json!({"digest": hex(&it.digest), "what": it.what}));
    json!({
        "value": case.value.as_deref().ok().map(hex),
        "why": case.value.as_ref().err().map(|missing| &missing.why),
        "instead": case.value.as_ref().err().map(|missing| &missing.instead),
        "stage": case.stage.map(Stage::word),
        "when": case.when,
        "events": events.collect::<Vec<Value>>(),
    })
}

/// Returns the possible values of a register as lines.
fn lines(platform: Platform, register: u32, cases: &[Case], with_events: bool) -> String {
    let mut text = format!("{}\n", platform.name(register));
    for case in cases {
        let when: Vec<&str> = case
            .stage
            .map(Stage::words)
            .into_iter()
            .chain(Some(case.when.as_str()).filter(|when| !when.is_empty()))
            .collect();
        let when = if when.is_empty() {
            String::new()
        } else {
            format!("  {}", when.join(", "))
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
