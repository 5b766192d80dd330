//! `firstlight measure --snp-firmware`: the launch digests of SEV-SNP machines, computed from their
//! firmware.

use std::fs;
use std::path::PathBuf;

use crate::shell::{error::Error, usage::Given};
use crate::trust::measure_image::HandedOver;
use image::firmware::Firmware;
use image::snp::{Cpu, Hypervisor, KernelFiles, Launch, LaunchDigest};

/// Maximum number of processors of a machine.
const MAX_PROCESSORS: u32 = 4096;
/// Further options that describe SEV-SNP machines.
const FURTHER: [&str; 3] = ["vcpu-type", "hypervisor", "guest-features"];

/// SEV-SNP machines that differ only in the number of their processors.
#[derive(Debug)]
pub struct Machines {
    firmware: PathBuf,
    hypervisor: Hypervisor,
    processors: Vec<u32>,
    cpu: Cpu,
    features: u64,
}

/// Returns the machines that the command line describes; `None` without `--snp-firmware`.
pub fn options(given: &Given) -> Result<Option<Machines>, Error> {
    let Some(firmware) = given.value("snp-firmware") else {
        if let Some(name) = FURTHER.iter().find(|name| given.has(name)) {
            return Err(Error::Usage(format!("--{name} belongs to --snp-firmware")));
        }
        return if given.has("vcpus") && !given.has("gce-endorsement") {
            Err(Error::Usage(
                "--vcpus belongs to --snp-firmware or --gce-endorsement".into(),
            ))
        } else {
            Ok(None)
        };
    };
    if !given.has("vcpus") {
        return Err(Error::Usage(
            "--snp-firmware: the launch digest depends on the number of processors: --vcpus is missing".into(),
        ));
    }
    let word = given.text("hypervisor")?;
    let words = Hypervisor::ALL.map(Hypervisor::word);
    let found = Hypervisor::ALL.into_iter().find(|one| one.word() == word);
    let hypervisor = found.ok_or_else(|| {
        let words = words.join(", ");
        Error::Usage(format!("--hypervisor {word:?}: expected {words}"))
    })?;
    let cpu = match (hypervisor, given.has("vcpu-type")) {
        (Hypervisor::Qemu, false) => {
            return Err(Error::Usage(
                "--snp-firmware: with QEMU the launch digest depends on the model of the processors: --vcpu-type is missing".into(),
            ));
        }
        (Hypervisor::Qemu, true) => given.parsed("vcpu-type", cpu)?,
        (_, true) => {
            return Err(Error::Usage(format!(
                "--vcpu-type: with --hypervisor {word} the launch digest does not depend on it"
            )));
        }
        (_, false) => Cpu(0),
    };
    Ok(Some(Machines {
        firmware: firmware.into(),
        hypervisor,
        processors: given.parsed("vcpus", processors)?,
        cpu,
        features: given.parsed("guest-features", features)?,
    }))
}

fn cpu(text: &str) -> Result<Cpu, Error> {
    Cpu::named(text).ok_or_else(|| {
        let known: Vec<_> = Cpu::names().collect();
        Error::Usage(format!("expected a model of QEMU: {}", known.join(", ")))
    })
}

/// Parses numbers of processors, separated by commas.
pub fn processors(text: &str) -> Result<Vec<u32>, Error> {
    let number = |text: &str| {
        let number = text.trim().parse().ok();
        number.filter(|count| (1..=MAX_PROCESSORS).contains(count))
    };
    let all: Option<Vec<_>> = text.split(',').map(number).collect();
    all.ok_or_else(|| {
        Error::Usage(format!(
            "expected numbers from 1 to {MAX_PROCESSORS}, as 2,4"
        ))
    })
}

fn features(text: &str) -> Result<u64, &'static str> {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let bits = u64::from_str_radix(digits, 16).ok();
    let snp = bits.filter(|bits| bits & 1 == 1);
    snp.ok_or("expected SEV_FEATURES as 0x1: bit 0 is SEV-SNP")
}

impl Machines {
    /// Returns the launch digest of a machine for each number of processors.
    pub fn digests(&self, kernel: Option<&HandedOver>) -> Result<Vec<LaunchDigest>, Error> {
        let path = self.firmware.display();
        let wrong = |error| Error::failed(format!("{path}: {error}"));
        let bytes = fs::read(&self.firmware);
        let bytes = bytes.map_err(|error| Error::failed(format!("{path}: {error}")))?;
        let firmware = Firmware::parse(&bytes).map_err(wrong)?;
        let digest = |processors: &u32| {
            let launch = Launch {
                firmware: &firmware,
                hypervisor: self.hypervisor,
                processors: *processors,
                cpu: self.cpu,
                features: self.features,
                kernel: kernel.map(|files| KernelFiles {
                    kernel: &files.kernel,
                    initrd: &files.initrd,
                    command_line: &files.command_line,
                }),
            };
            launch.digest().map_err(wrong)
        };
        self.processors.iter().map(digest).collect()
    }

    /// Returns the digests as lines for a person.
    pub fn explain(&self, digests: &[LaunchDigest]) -> String {
        let line = |(count, digest): (&u32, &LaunchDigest)| {
            let digest = base::text::hex(digest);
            format!("MEASUREMENT with --vcpus {count}\n  {digest}\n")
        };
        self.processors.iter().zip(digests).map(line).collect()
    }
}
