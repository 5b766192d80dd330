//! `firstlight measure --gce-endorsement`: the measurements of the firmware of Google's
//! confidential machines, as signed by Google.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::shell::{error::Error, files};
use crate::trust::policy::Edit;
use base::text::hex;
use clap::Args;
use hardware::json::Digits;
use image::launch_endorsement::{Golden, KNOWN_ROOT, LaunchEndorsement, SignerRoot, Snp, Tdx};
use verifier::{Policy, Registers, Variant, variant};

/// The option that names the file.
const OPTION: &str = "gce-endorsement";
/// The register of a TDX machine's firmware.
const MRTD: u32 = 0;

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    file: PathBuf,
    root: PathBuf,
    firmware: Option<PathBuf>,
    /// The numbers of processors of SEV-SNP machines that are used; all if it is empty.
    processors: Vec<u32>,
    /// The memory of TDX machines in MiB that is used; any if there is none.
    memory: Option<u64>,
    /// Where the policy has the values; `None` if the operator does not specify it.
    place: Option<Place>,
}

/// Where a policy has the measurement of the firmware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In `snp.launchMeasurements`.
    LaunchDigests,
    /// In `tdx.mrTd`: its registers are PCRs.
    MrTd,
    /// In the register of TDX machines without a TPM.
    Register,
}

impl Place {
    /// Returns the place in policies of this variant; `None` if Google has no such machines.
    fn of(variant: &Variant) -> Option<Place> {
        // Google certifies who owns a machine with a TPM
        let is_of_google = variant.judges("cloud.projects");
        match variant.registers {
            Registers::Rtmrs => Some(Place::Register),
            Registers::Pcrs if is_of_google && variant.judges("tdx") => Some(Place::MrTd),
            Registers::Pcrs if is_of_google && variant.judges("snp") => Some(Place::LaunchDigests),
            Registers::Pcrs => None,
        }
    }
}

/// Google's endorsement.
#[derive(Debug, Args)]
pub struct EndorsementOptions {
    /// Google's launch endorsement (binarypb) of the firmware of its machines: the policy also requires its
    /// measurements, MEASUREMENT of SEV-SNP or MRTD of TDX; without an image, only these
    #[arg(long, value_name = "FILE", requires = "gce_root", conflicts_with_all = ["snp_firmware", "tdx_firmware"])]
    pub gce_endorsement: Option<PathBuf>,
    /// The root that certifies the signer of endorsements: GCE-cc-tcb-root_1.crt, which Google publishes
    #[arg(long, value_name = "FILE", requires = "gce_endorsement")]
    pub gce_root: Option<PathBuf>,
    /// A firmware, which must be the endorsed one
    #[arg(long, value_name = "FILE", requires = "gce_endorsement")]
    pub gce_firmware: Option<PathBuf>,
}

impl EndorsementOptions {
    /// Returns the options; `None` without `--gce-endorsement`.
    pub fn options(
        self,
        processors: Vec<u32>,
        memory: Option<u64>,
        variant: Option<&'static Variant>,
    ) -> Result<Option<Options>, Error> {
        let (Some(file), Some(root)) = (self.gce_endorsement, self.gce_root) else {
            return Ok(None);
        };
        let default = || Variant::named(variant::DEFAULT).map_err(Error::content);
        let variant = variant.map_or_else(default, Ok)?;
        let place = match (Place::of(variant), processors.is_empty(), memory) {
            (Some(place), ..) => Some(place),
            (None, false, _) => Some(Place::LaunchDigests),
            (None, true, Some(_)) => Some(Place::Register),
            (None, true, None) => None,
        };
        Ok(Some(Options {
            file,
            root,
            firmware: self.gce_firmware,
            processors,
            memory,
            place,
        }))
    }
}

/// Google's endorsement, and the part of it that the operator wants.
pub struct Endorsed<'a> {
    golden: Golden,
    options: &'a Options,
}

impl Options {
    /// Reads and verifies the endorsement, and prints its content on standard error.
    pub fn read(&self) -> Result<Endorsed<'_>, Error> {
        let wrong = |path: &Path, error: &dyn std::fmt::Display| {
            Error::content(format!("{}: {error}", path.display()))
        };
        let content = files::read_bytes;
        let root =
            SignerRoot::parse(&content(&self.root)?).map_err(|error| wrong(&self.root, &error))?;
        let endorsement = LaunchEndorsement::parse(&content(&self.file)?);
        let endorsement = endorsement.map_err(|error| wrong(&self.file, &error))?;
        let golden = endorsement.verify(&root, SystemTime::now());
        let golden = golden.map_err(|error| wrong(&self.file, &error))?.clone();
        if let Some(path) = &self.firmware {
            let checked = golden.check_firmware(&content(path)?);
            checked.map_err(|error| wrong(path, &error))?;
        }
        eprint!("{}: {}", self.file.display(), golden.explain());
        if root.fingerprint() != KNOWN_ROOT {
            log::warn!(
                "{}: the root is not GCE-cc-tcb-root_1: its SHA-256 is {}, expected {}; go on only if Google publishes this one",
                self.root.display(),
                hex(&root.fingerprint()),
                hex(&KNOWN_ROOT)
            );
        }
        Ok(Endorsed {
            golden,
            options: self,
        })
    }
}

impl Endorsed<'_> {
    fn wrong(&self, error: impl std::fmt::Display) -> Error {
        Error::content(format!("{}: {error}", self.options.file.display()))
    }

    fn snp(&self) -> Result<&Snp, Error> {
        let missing = || {
            self.wrong(
                "it has nothing for SEV-SNP: take the one that is named after MEASUREMENT, from the folder sevsnp",
            )
        };
        self.golden.snp.as_ref().ok_or_else(missing)
    }

    fn tdx(&self) -> Result<&Tdx, Error> {
        let missing = || {
            self.wrong(
                "it has nothing for TDX: take the one that is named after MRTD, from the folder tdx",
            )
        };
        self.golden.tdx.as_ref().ok_or_else(missing)
    }

    fn mrtds(&self) -> Result<Vec<[u8; 48]>, Error> {
        let mrtds = self.tdx()?.mrtds(self.options.memory);
        mrtds.map_err(|error| self.wrong(error))
    }

    /// Returns MRTD for a policy that has no other register; `None` if the policy is for machines with a TPM.
    pub fn mrtd(&self) -> Result<Option<[u8; 48]>, Error> {
        let (snp, tdx) = (&self.golden.snp, &self.golden.tdx);
        let place = match (self.options.place, snp, tdx) {
            (Some(place), ..) => place,
            (None, Some(_), None) => Place::LaunchDigests,
            (None, None, Some(_)) => Place::Register,
            (None, None, None) => return Err(self.wrong("it has nothing for SEV-SNP and TDX")),
            (None, Some(_), Some(_)) => {
                let named = |place| {
                    let mut all = variant::ALL.iter();
                    let found = all.find(|variant| Place::of(variant) == Some(place));
                    found.map_or("", |variant| variant.name)
                };
                return Err(Error::Usage(format!(
                    "--{OPTION}: it is for SEV-SNP and for TDX: give --attestation-variant {}, {} or {}",
                    named(Place::LaunchDigests),
                    named(Place::MrTd),
                    named(Place::Register)
                )));
            }
        };
        match place {
            Place::LaunchDigests | Place::MrTd => Ok(None),
            Place::Register => Ok(self.mrtds()?.first().copied()),
        }
    }

    /// Returns where this policy has the values.
    fn place_in(&self, policy: &Policy) -> Place {
        let named = policy.variant().and_then(|name| Variant::named(name).ok());
        let place = named.and_then(Place::of).or(self.options.place);
        match policy.registers() {
            Registers::Rtmrs => Place::Register,
            Registers::Pcrs => place
                .filter(|place| *place == Place::MrTd)
                .unwrap_or(Place::LaunchDigests),
        }
    }

    /// Returns the policy that also accepts the firmware that Google endorses. Prints on standard
    /// error which other firmware the policy accepts.
    pub fn added_to(&self, policy: Policy) -> Result<Policy, Error> {
        match self.place_in(&policy) {
            Place::LaunchDigests if self.options.memory.is_some() => Err(Error::Usage(
                "--memory: the launch digest of SEV-SNP machines does not depend on it".into(),
            )),
            Place::LaunchDigests => {
                let snp = self.snp()?;
                let digests = snp.digests(&self.options.processors);
                let digests = digests.map_err(|error| self.wrong(error))?;
                let all: Vec<_> = snp.measurements.values().collect();
                for known in &policy.snp().snp.launch_measurements {
                    if !all.contains(&&known.0) {
                        let known = hex(&known.0);
                        eprintln!("  the policy also accepts the launch digest {known}");
                    }
                }
                policy.and_launch_digests(&digests).map_err(Error::content)
            }
            Place::MrTd | Place::Register if !self.options.processors.is_empty() => Err(
                Error::Usage("--vcpus: MRTD of TDX machines does not depend on it".into()),
            ),
            Place::MrTd => {
                let mrtds = self.mrtds()?.into_iter().map(Digits);
                let all: Vec<_> = self.tdx()?.measurements.iter().map(|one| one.1).collect();
                for known in &policy.tdx().mr_td {
                    if !all.contains(&known.0) {
                        let known = hex(&known.0);
                        eprintln!("  the policy also accepts the MRTD {known}");
                    }
                }
                let added = policy.with_platform(|_, _, tdx| {
                    for mrtd in mrtds {
                        if !tdx.mr_td.contains(&mrtd) {
                            tdx.mr_td.push(mrtd);
                        }
                    }
                });
                added.map_err(Error::content)
            }
            Place::Register => {
                let all: Vec<_> = self.tdx()?.measurements.iter().map(|one| one.1).collect();
                for image in policy.images() {
                    if let Some(own) = image.measurements().get(&MRTD)
                        && !own.warn_only
                        && !all.iter().any(|mrtd| own.expected == mrtd)
                    {
                        let own = hex(&own.expected);
                        eprintln!("  the policy also accepts {image} with the MRTD {own}");
                    }
                }
                policy.and_mrtds(&self.mrtds()?).map_err(|error| {
                    Error::content(format!(
                        "{error}; --memory accepts only machines of one size"
                    ))
                })
            }
        }
    }

    /// Returns the measurements as lines.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        if let Some(snp) = &self.golden.snp {
            for (count, digest) in &snp.measurements {
                text += &format!("MEASUREMENT with --vcpus {count}\n  {}\n", hex(digest));
            }
        }
        if let Some(tdx) = &self.golden.tdx {
            for (gib, mrtd) in &tdx.measurements {
                let memory = match gib {
                    0 => "any memory".into(),
                    gib => format!("{gib} GiB"),
                };
                text += &format!("MRTD with {memory}\n  {}\n", hex(mrtd));
            }
        }
        text
    }
}
