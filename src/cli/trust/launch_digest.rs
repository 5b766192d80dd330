//! `firstlight measure --snp-firmware`: the launch digests of SEV-SNP machines, computed from their
//! firmware.

use std::path::PathBuf;

use crate::shell::{error::Error, files};
use crate::trust::measure_image::HandedOver;
use crate::workspace::options::words;
use clap::{Args, value_parser};
use image::firmware::Firmware;
use image::snp::{Cpu, Hypervisor, KernelFiles, Launch, PredictedDigest};

/// Maximum number of processors of a machine.
const MAX_PROCESSORS: i64 = 4096;
/// SEV-SNP machines that differ only in the number of their processors.
#[derive(Debug)]
pub struct SnpMachines {
    firmware: PathBuf,
    hypervisor: Hypervisor,
    processors: Vec<u32>,
    cpu: Cpu,
    features: u64,
}

/// The SEV-SNP machines.
#[derive(Debug, Args)]
pub struct SnpOptions {
    /// The firmware (OVMF) of SEV-SNP machines: the policy also requires its launch digest; without an image, only
    /// that
    #[arg(long, value_name = "FILE", requires = "vcpus")]
    pub snp_firmware: Option<PathBuf>,
    /// The number of processors of SEV-SNP machines; several, as 2,4,8, give a launch digest each; from an
    /// endorsement all are taken by default
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = value_parser!(u32).range(1..=MAX_PROCESSORS))]
    pub vcpus: Vec<u32>,
    /// QEMU's model of the processors of SEV-SNP machines, as EPYC-Milan or EPYC-v4
    #[arg(long, value_name = "MODEL", requires = "snp_firmware", value_parser = cpu)]
    pub vcpu_type: Option<Cpu>,
    /// The hypervisor of SEV-SNP machines: QEMU with KVM, that of Amazon EC2, or that of Google
    #[arg(long, value_name = "NAME", requires = "snp_firmware", value_parser = words(Hypervisor::ALL.map(|it| (it.word(), it))), default_value = "kvm")]
    pub hypervisor: Hypervisor,
    /// SEV_FEATURES of the processors of SEV-SNP machines; bit 0 SEV-SNP, 5 debug swap
    #[arg(long, value_name = "BITS", requires = "snp_firmware", value_parser = features, default_value = "0x1")]
    pub guest_features: u64,
}

impl SnpOptions {
    /// Returns the machines that the command line describes; `None` without `--snp-firmware`.
    pub fn machines(self) -> Result<Option<SnpMachines>, Error> {
        let Some(firmware) = self.snp_firmware else {
            return Ok(None);
        };
        let cpu = match (self.hypervisor, self.vcpu_type) {
            (Hypervisor::Qemu, None) => {
                return Err(Error::Usage(
                    "--snp-firmware: with QEMU the launch digest depends on the model of the processors: --vcpu-type is missing".into(),
                ));
            }
            (Hypervisor::Qemu, Some(cpu)) => cpu,
            (other, Some(_)) => {
                return Err(Error::Usage(format!(
                    "--vcpu-type: with --hypervisor {} the launch digest does not depend on it",
                    other.word()
                )));
            }
            (_, None) => Cpu(0),
        };
        Ok(Some(SnpMachines {
            firmware,
            hypervisor: self.hypervisor,
            processors: self.vcpus,
            cpu,
            features: self.guest_features,
        }))
    }
}

fn cpu(text: &str) -> Result<Cpu, Error> {
    Cpu::named(text).ok_or_else(|| {
        let known: Vec<_> = Cpu::names().collect();
        Error::Usage(format!("expected a model of QEMU: {}", known.join(", ")))
    })
}

fn features(text: &str) -> Result<u64, &'static str> {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let bits = u64::from_str_radix(digits, 16).ok();
    let snp = bits.filter(|bits| bits & 1 == 1);
    snp.ok_or("expected SEV_FEATURES as 0x1: bit 0 is SEV-SNP")
}

impl SnpMachines {
    /// Returns the launch digest of a machine for each number of processors.
    pub fn digests(&self, kernel: Option<&HandedOver>) -> Result<Vec<PredictedDigest>, Error> {
        let path = self.firmware.display();
        let wrong = |error| Error::content(format!("{path}: {error}"));
        let bytes = files::read_bytes(&self.firmware)?;
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
    pub fn explain(&self, digests: &[PredictedDigest]) -> String {
        let line = |(count, digest): (&u32, &PredictedDigest)| {
            let digest = base::text::hex(digest);
            format!("MEASUREMENT with --vcpus {count}\n  {digest}\n")
        };
        self.processors.iter().zip(digests).map(line).collect()
    }
}
