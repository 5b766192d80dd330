//! `firstlight measure`: prints the attestation policy that a machine meets, from the present values of its TPM; or the policy that
//! machines meet after booting an image, from only the image.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::shell::{
    error::Error,
    files::FileError,
    output::{Output, say, say_all},
};
use crate::trust::{
    launch_digest::{self, SnpOptions},
    launch_endorsement::{self, EndorsementOptions},
    measure_image::{self, BootOptions},
    policy::{Edit, text},
};
use crate::workspace::{connect, options::VariantOption};
use base::boot;
use clap::Args;
use image::firmware::Firmware;
use image::snp::Hypervisor;
use image::{Image, Platform, RegisterBank, tdx};
use tpm::Location;
use verifier::judged::LaunchDigest;
use verifier::vtpm::check_bank;
use verifier::{KeyName, Measured, Measurement, Policy, RegisterNames, Registers, Stage, Variant};

/// The version of the running kernel.
const VERSION: &str = "/proc/version";

/// The setting on the kernel command line that names a node's cluster.
const CLUSTER_ID: &str = "firstlight.cluster-id=";

/// The PCR into which systemd measures the phases of a boot.
const PHASES_PCR: u32 = 11;

/// The register of a TDX machine's firmware.
const MRTD: u32 = 0;
/// The registers that depend on what runs: drivers that the host makes the firmware load, boot
/// loader, command line, kernel and initramfs, unified kernel image, its parameters and extensions,
/// and the cluster ID. The firmware extends the other registers, which change with the host.
const OF_IMAGE: [u32; 9] = image::REGISTERS;
/// The registers of a TDX machine that depend on the boot: MRTD, RTMR 1 and 2. RTMR 0 depends on
/// the host's settings and tables.
const OF_TDX: [u32; 3] = [MRTD, 2, 3];

/// Write the attestation policy that an image or a machine meets
///
/// With IMAGE or --kernel, computes the SHA-256 registers that a TPM will have after a machine boots the image, from
/// only the image. IMAGE is a raw disk with an EFI system partition, or a unified kernel image (UKI). It prints a
/// policy (JSON) with the registers that have one value; for each of the others, it says which values it can have and
/// when, or why its value cannot be known, and what to do instead. --stage, --secure-boot and --units say how the
/// machines boot. The policy accepts any TPM until it names attestation keys. On standard error it lists the channels
/// that the image leaves open to the machine's host, each with the line that closes it.
///
/// Without an image, run it on a node whose software you trust. It prints a policy that requires the present values
/// of the TPM's registers. It names the machine's attestation key, and accepts no other machine until it names more
/// keys.
///
/// The policy always requires that PCR 15 is zero, as in a node that belongs to no cluster yet.
///
/// For an upgrade, --add-to prints a policy that also accepts this image. It accepts nodes of the old image and nodes
/// of the new one, but no node with a mixture of their registers. It also adds the machine's attestation key if the
/// policy names keys.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight measure image.raw --secure-boot off --stage initramfs --units all > policy.json
  firstlight measure image.raw --explain
  firstlight measure --kernel vmlinuz --initrd initrd.img --cmdline 'console=ttyS0' --memory 2048 > policy.json
  firstlight measure > policy.json
  firstlight measure --tpm swtpm:host=127.0.0.1,port=2321 --pcrs 4,9,15
  firstlight measure --add-to policy.json --name 'image 1.3' > policy-upgrade.json
  firstlight measure image.raw --snp-firmware OVMF.fd --hypervisor ec2 --vcpus 2,4 > policy.json
  firstlight measure --attestation-variant qemu-snp --kernel a.efi --snp-firmware OVMF.fd --vcpus 4 --vcpu-type EPYC-v4
  firstlight measure --gce-endorsement google.binarypb --gce-root GCE-cc-tcb-root_1.crt --vcpus 4 > policy.json")]
pub(crate) struct CommandLine {
    #[command(flatten)]
    boot: BootOptions,
    /// The firmware (OVMF) of TDX machines without a TPM: the policy has its measurement (MRTD), and RTMR 1 and 2 of
    /// the image; without an image, only MRTD
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tpm", "snp_firmware", "units", "stage"])]
    tdx_firmware: Option<PathBuf>,
    #[command(flatten)]
    snp: SnpOptions,
    #[command(flatten)]
    endorsement: EndorsementOptions,
    /// Where the TPM is: device:PATH, swtpm:host=ADDRESS,port=PORT or tdx:FOLDER; by default /dev/tpmrm0, else /dev/tpm0
    #[arg(long, value_name = "LOCATION", conflicts_with_all = ["image", "kernel", "snp_firmware", "gce_endorsement"])]
    tpm: Option<Location>,
    #[command(flatten)]
    variant: VariantOption,
    /// The registers that the policy requires; by default those that show what runs: 2,3,4,8,9,11,12,13,15; of TDX
    /// machines 0,2,3 (MRTD, RTMR 1 and 2)
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pcrs: Option<Vec<u32>>,
    /// A policy, which is printed with this image added; its registers are the default of --pcrs
    #[arg(long, value_name = "FILE")]
    add_to: Option<PathBuf>,
    /// The image's name in messages; by default the name of the image's file; needed if --add-to adds a machine's
    /// image
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Name no attestation key: the policy accepts unknown machines, but also a program that has no TPM and imitates
    /// one
    #[arg(long, conflicts_with_all = ["image", "kernel", "snp_firmware", "gce_endorsement"])]
    trust_any_tpm: bool,
    /// With any, the policy also accepts evidence of the old form of attested TLS, which all nodes of Constellation use;
    /// a new policy requires the strong form
    #[arg(long, value_name = "FORM", value_parser = ["strong", "any"], default_value = "strong", conflicts_with = "add_to")]
    require: String,
    #[command(flatten)]
    output: Output,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let is_image = self.boot.image.is_some() || self.boot.kernel.is_some();
        let variant = self.variant.of(self.add_to.as_deref())?;
        self.check(variant, is_image)?;
        let named = self.variant.attestation_variant;
        let (vcpus, memory) = (self.snp.vcpus.clone(), self.boot.memory);
        // with --kernel, PCR 4 depends on the memory
        let memory = memory.filter(|_| !is_image);
        let endorsement = self.endorsement.options(vcpus, memory, named)?;
        let snp = self.snp.machines()?;
        let signs_sha384 = variant.judges("cloud.sha384");
        Ok(Options {
            source: match (is_image, self.tdx_firmware) {
                (true, tdx_firmware) => {
                    let is_tdx = tdx_firmware.is_some();
                    MeasuredSource::Image {
                        image: self
                            .boot
                            .options(is_tdx, self.pcrs.is_some(), self.output)?,
                        tdx_firmware,
                        signs_sha384,
                    }
                }
                (false, Some(path)) => MeasuredSource::TdxFirmware(path),
                (false, None) if snp.is_some() || endorsement.is_some() => {
                    MeasuredSource::FirmwareAlone
                }
                (false, None) => MeasuredSource::Tpm {
                    variant,
                    location: self.tpm,
                    trust_any_tpm: self.trust_any_tpm,
                },
            },
            pcrs: self.pcrs,
            variant: named,
            name: self.name,
            requires_strong: self.require == "strong" && self.add_to.is_none(),
            add_to: self.add_to,
            snp,
            endorsement,
        })
    }

    /// Checks what the parser cannot: options that belong together only in some cases.
    fn check(&self, variant: &Variant, is_image: bool) -> Result<(), Error> {
        let (snp, gce) = (&self.snp.snp_firmware, &self.endorsement.gce_endorsement);
        if !self.snp.vcpus.is_empty() && snp.is_none() && gce.is_none() {
            let text = "--vcpus belongs to --snp-firmware or --gce-endorsement";
            return Err(Error::Usage(text.into()));
        }
        if variant.launch.is_some() {
            self.check_launched(variant)?;
        }
        if is_image && self.tdx_firmware.is_none() && variant.registers == Registers::Rtmrs {
            return Err(Error::Usage(format!(
                "--attestation-variant {}: without the firmware the registers cannot be computed: --tdx-firmware is missing",
                variant.name
            )));
        }
        let of_machine = [
            ("pcrs", self.pcrs.is_some()),
            ("explain", self.boot.explain),
            ("memory", self.boot.memory.is_some() && gce.is_none()),
        ];
        let other = of_machine.iter().find(|(_, is_given)| *is_given);
        match other {
            Some((name, _)) if !is_image && (snp.is_some() || gce.is_some()) => Err(Error::Usage(
                format!("--{name}: without an image and --kernel only the firmware is measured"),
            )),
            _ => Ok(()),
        }
    }

    /// Checks the options for machines that are accepted by their launch digest.
    fn check_launched(&self, variant: &Variant) -> Result<(), Error> {
        let (kernel, firmware) = (&self.boot.kernel, &self.snp.snp_firmware);
        let gce = &self.endorsement.gce_endorsement;
        let why = if self.pcrs.is_some() || self.tpm.is_some() {
            "its machines have no TPM, and no registers that --pcrs could choose"
        } else if gce.is_some() || self.snp.hypervisor != Hypervisor::Qemu {
            "its machines run on QEMU with KVM: --hypervisor kvm, without --gce-endorsement"
        } else if self.boot.image.is_some() {
            "the launch digest does not contain a disk, and nothing else measures it: give the unified kernel image, or kernel, initrd and \
             command line, as QEMU gets them (--kernel)"
        } else if kernel.is_none() && firmware.is_none() {
            // this machine is measured
            return Ok(());
        } else if firmware.is_none() {
            "only the launch digest shows what boots, and it depends on the firmware: --snp-firmware is missing"
        } else if kernel.is_none() {
            "a launch digest without the kernel would accept any program: --kernel is missing"
        } else {
            return Ok(());
        };
        let name = variant.name;
        Err(Error::Usage(format!("--attestation-variant {name}: {why}")))
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What is measured.
    pub source: MeasuredSource,
    /// The registers of the policy, besides that of the cluster ID; if `None`, those of the policy
    /// in `add_to`, else those that depend on the image.
    pub pcrs: Option<Vec<u32>>,
    /// The attestation variant on the command line; the policy names it, too.
    pub variant: Option<&'static Variant>,
    /// The image's name.
    pub name: Option<String>,
    /// Whether the policy requires the strong form of attested TLS, which one in `add_to` may do anyway.
    pub requires_strong: bool,
    /// A policy to which the image is added.
    pub add_to: Option<PathBuf>,
    /// The SEV-SNP machines whose launch digests are added to the policy.
    pub snp: Option<launch_digest::SnpMachines>,
    /// Google's endorsement, whose values are added to the policy.
    pub endorsement: Option<launch_endorsement::Options>,
}

/// What is measured.
#[derive(Debug)]
pub enum MeasuredSource {
    /// A running machine.
    Tpm {
        /// The machine's attestation variant.
        variant: &'static Variant,
        /// The TPM's location; `None` is the machine's own TPM.
        location: Option<Location>,
        /// Whether the policy accepts any TPM instead of only this machine's.
        trust_any_tpm: bool,
    },
    /// Only the firmware of TDX machines, without an image.
    TdxFirmware(PathBuf),
    /// Only the launch digests of SEV-SNP machines, or Google's endorsement, without an image.
    FirmwareAlone,
    /// An image that has not booted yet.
    Image {
        /// What boots, and how.
        image: measure_image::Options,
        /// The firmware, if the machines have TDX and no TPM.
        tdx_firmware: Option<PathBuf>,
        /// Whether a cloud signs the SHA-384 registers of the machines.
        signs_sha384: bool,
    },
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let wanted = Wanted::read(options)?;
    match &options.source {
        MeasuredSource::Tpm {
            variant,
            location,
            trust_any_tpm,
        } => {
            if let Some(launch) = variant.launch {
                let policy = wanted.of_launch(launch().map_err(Error::failed)?)?;
                return say_policy(policy.of_variant(variant.name), options);
            }
            let pcrs = wanted.pcrs.as_deref();
            let (policy, key) = of_tpm(variant, location.as_ref(), pcrs, *trust_any_tpm)?;
            let policy = with_image(wanted.present, options.name.as_deref(), &policy, key)?;
            say_policy(policy.of_variant(variant.name), options)
        }
        MeasuredSource::TdxFirmware(path) => {
            let policy = mrtd(path).and_then(of_mrtd)?;
            let policy = with_image(wanted.present, options.name.as_deref(), &policy, None)?;
            say_policy(policy, options)
        }
        MeasuredSource::FirmwareAlone => wanted.measure_firmware(),
        MeasuredSource::Image {
            image: source,
            tdx_firmware,
            signs_sha384,
        } => {
            if source.explain {
                return wanted.explain(source, &measure_image::read(source)?);
            }
            let sources = if wanted.by_launch() {
                vec![source.clone()]
            } else {
                source.each()
            };
            wanted.measure_images(&sources, tdx_firmware.as_deref(), *signs_sha384)
        }
    }
}

/// The options, with the content of the files that they name.
struct Wanted<'a> {
    options: &'a Options,
    /// The policy to which the image is added.
    present: Option<Policy>,
    /// The registers of the policy; `None` takes those that depend on the image.
    pcrs: Option<Vec<u32>>,
    endorsed: Option<launch_endorsement::Endorsed<'a>>,
}

impl<'a> Wanted<'a> {
    /// Reads the files. Fails if the present policy is for another variant than the command line names.
    fn read(options: &'a Options) -> Result<Wanted<'a>, Error> {
        let present = options
            .add_to
            .as_deref()
            .map(connect::read_policy)
            .transpose()?;
        let named = present.as_ref().and_then(Policy::variant);
        if let (Some(wanted), Some(named)) = (options.variant, named)
            && wanted.name != named
        {
            return Err(Error::Usage(format!(
                "--attestation-variant {}: the policy in --add-to is for {named}",
                wanted.name
            )));
        }
        let of_present = || present.as_ref().map(registers);
        let pcrs = options.pcrs.clone().or_else(of_present);
        let by_launch = named.and_then(|name| Variant::named(name).ok());
        if let (None, Some(variant)) = (options.variant, by_launch.filter(|it| it.launch.is_some()))
        {
            return Err(Error::Usage(format!(
                "the policy in --add-to is for {0}: give --attestation-variant {0}",
                variant.name
            )));
        }
        let endorsement = options.endorsement.as_ref();
        let endorsed = endorsement.map(|it| it.read()).transpose()?;
        Ok(Wanted {
            options,
            present,
            pcrs,
            endorsed,
        })
    }

    /// Returns whether the launch digest, and no register, shows what the machines boot.
    fn by_launch(&self) -> bool {
        let variant = self.options.variant;
        variant.is_some_and(|variant| variant.launch.is_some())
    }

    /// Returns the policy of a machine that is accepted by its launch digest.
    fn of_launch(self, digest: LaunchDigest) -> Result<Policy, Error> {
        let policy = match self.present {
            Some(present) => present,
            None => {
                let (booted, initramfs) = (BTreeMap::new(), BTreeMap::new());
                let name = self.options.name.as_deref();
                let policy = policy(Measured { booted, initramfs }, &[])?;
                let policy = policy.named(name.unwrap_or_default());
                let policy = policy.map_err(Error::content)?;
                let version = fs::read_to_string(VERSION).unwrap_or_default();
                match boot::trusted_acpi(&version) {
                    None => policy.with_confined_kernel(),
                    Some(why) => {
                        log::warn!("{why}");
                        policy
                    }
                }
            }
        };
        policy.and_launch_digests(&[digest]).map_err(Error::content)
    }

    /// Prints the policy of firmware, without an image.
    fn measure_firmware(self) -> Result<(), Error> {
        let mrtd = match (&self.present, &self.endorsed) {
            (None, Some(endorsed)) => endorsed.mrtd()?,
            _ => None,
        };
        let policy = match (&self.present, mrtd) {
            (Some(present), _) => Ok(present.clone()),
            (None, Some(mrtd)) => of_mrtd(enforced(mrtd)),
            (None, None) => of_firmware_alone(),
        };
        let policy = policy.map_err(Error::content)?;
        let policy = match (&self.options.add_to, &self.options.name) {
            (None, Some(name)) => policy.named(name).map_err(Error::content)?,
            _ => policy,
        };
        say_policy(self.with_firmware(policy, None)?, self.options)
    }

    /// Prints what each register of machines that boot this image consists of.
    fn explain(&self, source: &measure_image::Options, image: &Image) -> Result<(), Error> {
        if source.output == Output::Json {
            let explained = measure_image::explain_json(source, image);
            return source.output.json(&explained);
        }
        let mut text = measure_image::explain(source, image);
        if let Some(machines) = &self.options.snp {
            let digests = machines.digests(source.handed_over()?.as_ref())?;
            text += &machines.explain(&digests);
        }
        if let Some(endorsed) = &self.endorsed {
            text += &endorsed.explain();
        }
        say_all(&text)
    }

    /// Prints the policy of machines that boot one of these images.
    fn measure_images(
        mut self,
        sources: &[measure_image::Options],
        tdx_firmware: Option<&Path>,
        signs_sha384: bool,
    ) -> Result<(), Error> {
        let mut handed_over = None;
        for (index, source) in sources.iter().enumerate() {
            let policy = self.with_image(source, index > 0, tdx_firmware, signs_sha384)?;
            self.present = Some(policy);
            handed_over = source.handed_over()?;
        }
        let policy = self.present.take();
        let policy = policy.ok_or_else(|| Error::failed("there is no image"))?;
        say_policy(
            self.with_firmware(policy, handed_over.as_ref())?,
            self.options,
        )
    }

    /// Returns the policy that also accepts machines that boot this image. It may be equal to an image before it only if that is
    /// another file of the same disk.
    fn with_image(
        &mut self,
        source: &measure_image::Options,
        is_further: bool,
        tdx_firmware: Option<&Path>,
        signs_sha384: bool,
    ) -> Result<Policy, Error> {
        let image = &measure_image::read(source)?;
        let of_image = self.registers_of_image(tdx_firmware.is_some());
        let new = self.of_image(source, image, &of_image, tdx_firmware)?;
        let name = match &self.options.name {
            Some(name) if source.is_one_of_several() => source.completed(name, image),
            Some(name) => name.clone(),
            None => source.name_of(image),
        };
        let present = self.present.take();
        let is_equal = |it: &Policy| it.images().iter().any(|it| has_registers_of(it, &new));
        if let Some(present) = present.clone().filter(|it| is_further && is_equal(it)) {
            return Ok(present);
        }
        let lacks_sha384 = present
            .as_ref()
            .is_some_and(|it| it.cloud().sha384.is_empty());
        let mut policy = match present {
            Some(present) if self.by_launch() => with_same_kernel(present, &new)?,
            present => with_image(present, Some(&name), &new, None)?,
        };
        if signs_sha384 && lacks_sha384 {
            log::warn!(
                "the policy requires no register that the cloud signs (cloud.sha384), so none is added for this image: \
                 otherwise machines of the other images would be refused"
            );
        } else if signs_sha384 {
            let signed = measure_image::sha384(source, image, &of_image)?;
            policy = policy.and_sha384(&signed).map_err(Error::content)?;
        }
        if self.by_launch() {
            warn_without_cluster(image);
        }
        Ok(policy)
    }

    /// Returns the registers to compute from an image. The firmware of a TDX machine is no part of it.
    fn registers_of_image(&self, has_tdx: bool) -> Vec<u32> {
        if self.by_launch() {
            return vec![];
        }
        let usual: &[u32] = if has_tdx { &OF_TDX } else { &OF_IMAGE };
        let registers = self.pcrs.as_deref().unwrap_or(usual).iter().copied();
        registers.filter(|it| !has_tdx || *it != MRTD).collect()
    }

    /// Returns a policy of only the image.
    fn of_image(
        &self,
        source: &measure_image::Options,
        image: &Image,
        registers: &[u32],
        tdx_firmware: Option<&Path>,
    ) -> Result<Policy, Error> {
        let is_launched = self.options.snp.is_some() && source.is_handed_over();
        let mut measured = measure_image::values(source, image, registers, is_launched)?;
        measure_image::judge(source, image)?;
        if let Some(firmware) = tdx_firmware {
            let mrtd = mrtd(firmware)?;
            measured.booted.insert(MRTD, mrtd.clone());
            measured.initramfs.insert(MRTD, mrtd);
        }
        let pcrs: Vec<u32> = measured.booted.keys().copied().collect();
        let is_bound = is_launched || pcrs.contains(&source.platform.boot_loader());
        let policy = policy(measured, &pcrs)?;
        Ok(if is_bound && image.contents().confines_acpi() {
            policy.with_confined_kernel()
        } else {
            policy
        })
    }

    /// Returns the policy with its requirements for the firmware.
    fn with_firmware(
        &self,
        policy: Policy,
        kernel: Option<&measure_image::HandedOver>,
    ) -> Result<Policy, Error> {
        let policy = with_launch_digests(policy, self.options.snp.as_ref(), kernel)?;
        match &self.endorsed {
            Some(endorsed) => endorsed.added_to(policy),
            None => Ok(policy),
        }
    }
}

/// Returns whether an image has the registers of the image of a policy.
fn has_registers_of(image: &verifier::Image, policy: &Policy) -> bool {
    let mut images = policy.images().iter();
    images
        .all(|it| it.measurements() == image.measurements() && it.initramfs() == image.initramfs())
}

/// Returns the policy with the launch digests of these machines added.
fn with_launch_digests(
    policy: Policy,
    machines: Option<&launch_digest::SnpMachines>,
    kernel: Option<&measure_image::HandedOver>,
) -> Result<Policy, Error> {
    match machines {
        Some(machines) => policy
            .and_launch_digests(&machines.digests(kernel)?)
            .map_err(Error::content),
        None => Ok(policy),
    }
}

/// Returns the policy of the machine with this TPM, and the name of its attestation key.
fn of_tpm(
    variant: &Variant,
    location: Option<&Location>,
    pcrs: Option<&[u32]>,
    trust_any_tpm: bool,
) -> Result<(Policy, Option<KeyName>), Error> {
    let location = match location {
        Some(location) => location.clone(),
        None => (variant.location)().map_err(Error::failed)?,
    };
    let measured = (variant.measure)(&location, Stage::Booted).map_err(Error::failed)?;
    if kind(&measured.booted) == Registers::Pcrs {
        let values = measured.booted.iter();
        let values = values.map(|(pcr, value)| (*pcr, value.expected.clone()));
        check_bank(&values.collect())
            .map_err(|why| Error::content(format!("{location}: {why}")))?;
    }
    if let Some(writer) = verifier::foreign_writer(&location) {
        log::warn!("{writer}");
    }
    let pcrs = pcrs.unwrap_or(match kind(&measured.booted) {
        Registers::Pcrs => &OF_IMAGE,
        Registers::Rtmrs => &OF_TDX,
    });
    let boot_loader = match kind(&measured.booted) {
        Registers::Pcrs => Platform::Tpm(RegisterBank::Sha256).boot_loader(),
        Registers::Rtmrs => Platform::Tdx.boot_loader(),
    };
    let mut policy =
        policy(measured, pcrs).map_err(|error| Error::content(format!("{location}: {error}")))?;
    // a TPM behind a port belongs to another machine
    let version = match location {
        Location::Swtpm(..) => String::new(),
        _ => fs::read_to_string(VERSION).unwrap_or_default(),
    };
    match boot::trusted_acpi(&version) {
        None if pcrs.contains(&boot_loader) => policy = policy.with_confined_kernel(),
        Some(why) if !policy.images()[0].confines_acpi() => log::warn!("{why}"),
        _ => {}
    }
    let key = if trust_any_tpm {
        None
    } else {
        variant.key_name(&location).map_err(Error::failed)?
    };
    Ok((policy, key))
}

/// Returns the policy for TDX machines whose firmware has this MRTD, and that belong to no cluster
/// yet.
fn of_mrtd(mrtd: Measurement) -> Result<Policy, Error> {
    log::warn!(
        "the policy has only the firmware (MRTD), not what boots (RTMR 1 and 2): give an image, too, or run firstlight measure on a \
         machine"
    );
    let values = BTreeMap::from([(MRTD, mrtd)]);
    let (booted, initramfs) = (values.clone(), values);
    policy(Measured { booted, initramfs }, &[MRTD])
}

/// Returns the MRTD of the firmware in this file.
fn mrtd(path: &Path) -> Result<Measurement, Error> {
    let wrong = |why: String| FileError::Content(path.into(), why);
    let bytes = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let mrtd = Firmware::parse(&bytes).and_then(|firmware| tdx::mrtd(&firmware));
    let mrtd = mrtd.map_err(|error| wrong(error.to_string()))?;
    Ok(enforced(mrtd))
}

fn enforced(mrtd: [u8; 48]) -> Measurement {
    Measurement {
        expected: mrtd.into(),
        warn_only: false,
    }
}

/// Returns the policy for machines with a TPM that belong to no cluster yet. What is added to it is of the firmware.
fn of_firmware_alone() -> Result<Policy, Error> {
    log::warn!(
        "the policy has only the firmware, not what boots (the registers of the TPM): give an image, or --add-to"
    );
    let (booted, initramfs) = (BTreeMap::new(), BTreeMap::new());
    policy(Measured { booted, initramfs }, &[])
}

/// Prints the policy, with the variant from the command line.
fn say_policy(policy: Policy, options: &Options) -> Result<(), Error> {
    let policy = match options.variant {
        Some(variant) => policy.of_variant(variant.name),
        None => policy,
    };
    let policy = if options.requires_strong {
        policy.requiring_strong()
    } else {
        policy
    };
    let variant = policy.variant().and_then(|name| Variant::named(name).ok());
    if let Some(Err(flaw)) = variant.map(|variant| variant.check_worth(&policy)) {
        log::warn!("nodes and services refuse this policy: {flaw}");
    }
    say(text(&policy))
}

/// Returns the new policy; with `--add-to`, the old policy with the image added.
fn with_image(
    present: Option<Policy>,
    name: Option<&str>,
    policy: &Policy,
    key: Option<KeyName>,
) -> Result<Policy, Error> {
    match present {
        Some(present) => add(present, name, policy, key),
        None => policy
            .clone()
            .named(name.unwrap_or_default())
            .and_then(|policy| policy.believing(key))
            .map_err(Error::content),
    }
}

/// Warns if the launch digest may not contain the cluster, which no register names on these
/// machines.
fn warn_without_cluster(image: &Image) {
    let line = image.contents().command_line.as_deref();
    if !line.is_some_and(|line| line.contains(CLUSTER_ID)) {
        log::warn!(
            "the command line has no {CLUSTER_ID}: machines of this variant start only if the initrd has the setting cluster-id \
             (firstlight cluster-id prints it)"
        );
    }
}

/// Returns the policy to which the launch digests of another image can be added. It has one mark
/// for all of them.
fn with_same_kernel(present: Policy, new: &Policy) -> Result<Policy, Error> {
    let [old, new] = [&present, new].map(|policy| policy.images()[0].has_confined_kernel());
    if old == new {
        Ok(present)
    } else {
        Err(Error::content(
            "--add-to: only one of the two images has a kernel that confines the host's ACPI tables (acpiTables), and a policy for this \
         variant has one mark for all its launch digests: make two policies, or remove the mark",
        ))
    }
}

/// Returns the registers of a policy's first image.
fn registers(policy: &Policy) -> Vec<u32> {
    policy.images()[0].measurements().keys().copied().collect()
}

/// Adds the image of `new` to the policy `present`, under this name. Also adds the key if the
/// policy lists keys.
fn add(
    present: Policy,
    name: Option<&str>,
    new: &Policy,
    key: Option<KeyName>,
) -> Result<Policy, Error> {
    let new_image = &new.images()[0];
    let key = key.filter(|key| !present.keys().is_empty() && !present.keys().contains(key));
    let same = present.images().iter().find(|image| {
        image.measurements() == new_image.measurements()
            && image.initramfs() == new_image.initramfs()
    });
    let policy = match (same, key, name) {
        (Some(same), None, _) => {
            return Err(Error::content(format!(
                "the policy already accepts this machine: {same}"
            )));
        }
        (Some(_), Some(_), _) => Ok(present),
        (None, _, None) => {
            return Err(Error::Usage(
                "--add-to: the image needs a name: --name is missing".into(),
            ));
        }
        (None, _, Some(name)) => {
            if registers(new) != registers(&present) {
                log::warn!(
                    "the register numbers differ from those of {}",
                    present.images()[0]
                );
            }
            present.and_image(name, new_image.clone())
        }
    };
    policy
        .and_then(|policy| policy.believing(key))
        .map_err(Error::content)
}

/// Returns the kind of these registers.
fn kind(values: &BTreeMap<u32, Measurement>) -> Registers {
    let first = values.values().next();
    let kind = first.and_then(|value| Registers::of(&value.expected));
    kind.unwrap_or(Registers::Pcrs)
}

/// Returns a policy with these registers, and with the cluster ID's register, which must be zero as
/// on a machine that belongs to no cluster.
fn policy(measured: Measured, pcrs: &[u32]) -> Result<Policy, Error> {
    let Measured {
        booted: mut values,
        mut initramfs,
    } = measured;
    if pcrs.contains(&PHASES_PCR) && !initramfs.contains_key(&PHASES_PCR) {
        log::warn!(
            "the event log does not explain PCR {PHASES_PCR}: the policy requires its present value in the initramfs too; if \
             systemd measures the phases of the boot, nodes are refused there"
        );
    }
    let kind = kind(&values);
    let of_cluster = kind.of_cluster_id();
    initramfs.retain(|pcr, _| pcrs.contains(pcr) && *pcr != of_cluster);
    let zero = Measurement {
        expected: kind.fresh().as_ref().into(),
        warn_only: false,
    };
    if values
        .insert(of_cluster, zero.clone())
        .is_some_and(|value| value != zero)
    {
        log::warn!(
            "{0} is not zero: this machine probably belongs to a cluster; the policy accepts only machines whose {0} is zero",
            kind.name(of_cluster)
        );
    }
    let entry = |pcr: &u32| {
        values
            .get(pcr)
            .map(|value| (*pcr, value.clone()))
            .ok_or_else(|| match kind {
                Registers::Pcrs => format!("the TPM has no PCR {pcr}"),
                Registers::Rtmrs => {
                    format!("a TDX machine has no register {pcr}, but 0 (MRTD) to 4 (RTMR 3)")
                }
            })
            .map_err(Error::Content)
    };
    Policy::new(
        pcrs.iter()
            .chain([&of_cluster])
            .map(entry)
            .collect::<Result<_, Error>>()?,
    )
    .and_then(|policy| policy.with_initramfs(initramfs))
    .map_err(Error::content)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn values() -> BTreeMap<u32, Measurement> {
        (0..24)
            .map(|pcr| {
                (
                    pcr,
                    Measurement {
                        expected: vec![pcr as u8; 32],
                        warn_only: false,
                    },
                )
            })
            .collect()
    }

    fn measured_as(booted: BTreeMap<u32, Measurement>) -> Measured {
        let initramfs = booted.clone();
        Measured { booted, initramfs }
    }

    fn measured() -> Measured {
        measured_as(values())
    }

    #[test]
    fn a_register_that_differs_in_the_initramfs_is_in_the_policy_twice() {
        let mut machine = measured();
        machine.initramfs.insert(11, values()[&3].clone());
        machine.initramfs.insert(9, values()[&3].clone());
        let policy = policy(machine, &[4, 11]).unwrap();
        let image = &policy.images()[0];
        assert_eq!(image.measurements()[&11].expected, [11; 32]);
        assert_eq!(image.initramfs().keys().copied().collect::<Vec<_>>(), [11]);
        assert_eq!(image.initramfs()[&11].expected, [3; 32]);
        // an image with the same registers but other ones in the initramfs is another image
        let one_stage = super::policy(measured(), &[4, 11]).unwrap();
        assert!(add(policy, Some("other"), &one_stage, None).is_ok());
    }

    #[test]
    fn the_policy_has_the_registers_asked_for_and_wants_no_cluster_yet() {
        let expected = |byte: &str| byte.repeat(32);
        for registers in [&[4, 15][..], &[4]] {
            assert_eq!(
                text(&policy(measured(), registers).unwrap()),
                format!(
                    "{{\n  \"measurements\": {{\n    \"4\": {{\"expected\": \"{}\", \"warnOnly\": false}},\n    \
                     \"15\": {{\"expected\": \"{}\", \"warnOnly\": false}}\n  }}\n}}",
                    expected("04"),
                    expected("00")
                )
            );
        }
    }

    fn refusal(added: Result<Policy, Error>) -> String {
        added.unwrap_err().to_string()
    }

    #[test]
    fn an_image_is_added_beside_the_others_unless_it_is_there() {
        let present = policy(measured(), &[4, 15]).unwrap();
        assert!(
            refusal(add(present.clone(), Some("same"), &present, None))
                .contains("already accepts this machine: the first image")
        );
        let newer = BTreeMap::from([(
            4,
            Measurement {
                expected: vec![9; 32],
                warn_only: false,
            },
        )]);
        let newer = policy(measured_as(newer), &[4, 15]).unwrap();
        assert!(refusal(add(present.clone(), None, &newer, None)).contains("--name is missing"));
        let both = add(present.clone(), Some("newer"), &newer, None).unwrap();
        assert_eq!(both.images()[0], present.images()[0]);
        assert_eq!(
            (
                both.images()[1].name(),
                both.images()[1].measurements()[&4].expected.clone()
            ),
            ("newer", vec![9; 32])
        );
        assert!(
            both.images()
                .iter()
                .all(|image| image.measurements()[&15].expected == [0; 32])
        );
        let third = policy(measured(), &[4, 9, 15]).unwrap();
        assert!(refusal(add(both, Some("newer"), &third, None)).contains("two images"));
    }

    #[test]
    fn a_machine_of_the_same_image_adds_its_key_to_a_policy_that_names_keys() {
        let (image, key, other) = (
            policy(measured(), &[4]).unwrap(),
            KeyName::of(b"a"),
            KeyName::of(b"b"),
        );
        let named = image.clone().believing([key]).unwrap();
        assert_eq!(
            add(named.clone(), None, &image, Some(other))
                .unwrap()
                .keys(),
            &[key, other].into()
        );
        assert!(refusal(add(named, None, &image, Some(key))).contains("already"));
        // a policy that accepts any TPM still accepts any
        let newer = policy(measured(), &[4, 9]).unwrap();
        assert!(
            add(image, Some("newer"), &newer, Some(key))
                .unwrap()
                .keys()
                .is_empty()
        );
    }

    #[test]
    fn the_policy_of_a_tdx_machine_wants_no_cluster_in_rtmr_3() {
        let value = |number: u32| Measurement {
            expected: vec![number as u8; 48],
            warn_only: false,
        };
        let machine = measured_as((0..5).map(|number| (number, value(number))).collect());
        let policy = policy(machine.clone(), &OF_TDX).unwrap();
        let image = &policy.images()[0];
        assert_eq!(
            image.measurements().keys().copied().collect::<Vec<_>>(),
            [0, 2, 3, 4]
        );
        assert_eq!(image.measurements()[&4].expected, [0; 48]);
        assert!(image.initramfs().is_empty());
        let error = super::policy(machine, &[9]).unwrap_err().to_string();
        assert!(error.contains("no register 9"), "{error}");
    }

    #[test]
    fn a_register_that_is_not_there_is_named() {
        assert_eq!(
            policy(measured(), &[4, 30]).unwrap_err().to_string(),
            "the TPM has no PCR 30"
        );
        assert!(policy(measured_as(BTreeMap::new()), &[4]).is_err());
    }
}
