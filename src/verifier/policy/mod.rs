//! The attestation policy: the reference values of the registers, and the accepted attestation
//! keys. The JSON is that of Constellation's `join-config`:
//!
//! ```json
//! {"measurements":{"4":{"expected":"5198fd..","warnOnly":false},"15":{"expected":"0000..","warnOnly":false}}}
//! ```
//!
//! During an upgrade a cluster runs two images and admits machines with either image. So a policy
//! can have further images, each with its own name and registers:
//!
//! ```json
//! {"measurements":{"4":{..},"15":{..}},"name":"image 1.2",
//!  "alsoAccepted":[{"name":"image 1.3","measurements":{"4":{..},"15":{..}}}]}
//! ```
//!
//! All registers of a machine must match the same image. A mix of registers of two images is
//! refused, because no measured machine has these values.
//!
//! systemd measures how far the boot is ("systemd-pcrphase"), so registers of one image differ
//! between its initramfs and the booted system. `measurements` are those of the booted system;
//! `initramfs` has the registers that differ there:
//!
//! ```json
//! {"measurements":{"4":{..},"11":{..}},"initramfs":{"11":{..}}}
//! ```
//!
//! A program without a TPM can claim any register values with its own key. So a policy can name the
//! accepted attestation keys; without names every key is accepted:
//!
//! ```json
//! {"measurements":{..},"attestationKeys":["000b5a31.."]}
//! ```
//!
//! Instead of single keys, or beside them, a policy can name roots that certify the endorsement
//! keys of TPMs: certificates in PEM (the root first, then certificates that TPMs do not hold), or
//! names of roots that the programs have built in. Then a key is accepted if it is named, or if it
//! is in a TPM whose endorsement key leads to a root:
//!
//! ```json
//! {"measurements":{..},"endorsementRoots":["google-2022","-----BEGIN CERTIFICATE-----\n.."]}
//! ```
//!
//! The certificate of an endorsement key names the vendor of its TPM, and a policy with roots can require some
//! vendors, and versions of their firmware ([`tpm`]).
//!
//! When no program of Constellation proves itself any more, a policy can require the strong form of
//! attested TLS:
//!
//! ```json
//! {"measurements":{..},"require":"strong"}
//! ```
//!
//! A host's ACPI tables contain code, and a usual kernel runs it with access to all memory.
//! `firstlight measure` marks images whose kernel confines this code, and a policy can require this
//! mark for each of its images:
//!
//! ```json
//! {"measurements":{..},"acpiTables":"confined","requireConfinedAcpi":true}
//! ```
//!
//! The events of PCR 7 show whether Secure Boot is on, and with which keys, whatever the firmware is. A policy can
//! require it without that register ([`secure_boot`]).
//!
//! The field `cloud` has the requirements for the cloud's statements about a machine
//! ([`instance`]).
//!
//! A policy can name the attestation variant of its machines. Then it cannot make a validator of
//! another variant:
//!
//! ```json
//! {"variant":"qemu-vtpm","measurements":{..}}
//! ```
//!
//! A policy that does not say what its machines run is refused ([`crate::worth`]).
//!
//! An unknown member is an error at every depth (`field_names.rs`). Constellation's programs ignore
//! unknown fields: they require the first image as a booted system, and accept every key.

pub mod constellation;
mod error;
mod exception;
mod field_names;
pub mod instance;
pub mod secure_boot;
pub mod tpm;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use hardware::json::is_default;
use hardware::tdx::TdxRequirements;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::Value;

use crate::refusal::{Kind, Refusal};
use crate::{ClusterRegister, KeyName, RegisterNames, Registers, Stage, unhex};
use base::crypto::CLUSTER_ID_LEN;
use base::text::{hex, quoted};
pub use error::{Fault, PolicyError};
pub use exception::Exception;

/// Constellation's configurations contain this text where the user must enter a value.
const PLACEHOLDER: [u8; 2] = [0x12, 0x34];
/// Maximum index of a PCR in the format. TPMs for PCs have PCRs 0 to 23.
const MAX_INDEX: u32 = 31;
/// Maximum number of images. An upgrade needs two, an upgrade that is rolled back three. Old images
/// should be removed, because their vulnerabilities remain usable.
const MAX_IMAGES: usize = 16;
/// Maximum number of attestation keys: enough for a large cluster, and it fits a ConfigMap of at
/// most 1 MiB.
const MAX_KEYS: usize = 10_000;
/// Maximum number of roots: more than there are vendors of TPMs.
const MAX_ROOTS: usize = 64;
/// Maximum size of a root in bytes: several certificates in PEM.
const MAX_ROOT: usize = 16 << 10;
/// The first and the last member of Constellation's policies for TDX.
pub(crate) const OLD_TDX: &str = "qeSVN to intelRootKey";
/// The first and the last member of Constellation's policies for SEV-SNP.
pub(crate) const OLD_SNP: &str = "bootloaderVersion to amdSigningKey";
/// The register with the host's tables in a TDX machine.
const RTMR_0: u32 = 1;
/// The value of the field `require`.
const STRONG: &str = "strong";
/// Maximum number of characters in the name of an image.
const MAX_NAME: usize = 100;
/// The bytes of an image's ID.
const ID_LEN: usize = 16;

/// The expected value of a register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measurement {
    /// The value: 32 bytes of a PCR, 48 bytes of a register of a TDX machine.
    pub expected: Vec<u8>,
    /// Whether another value is accepted, with a warning in the log.
    pub warn_only: bool,
}

/// The expected registers of machines with one image. At least one register is enforced; otherwise
/// every machine would be accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The name. Only the first image of a policy may have an empty name.
    name: String,
    /// The registers of the booted system.
    measurements: BTreeMap<u32, Measurement>,
    /// The registers that differ in the initramfs.
    initramfs: BTreeMap<u32, Measurement>,
    /// Whether the image's kernel confines the code in ACPI tables.
    has_confined_kernel: bool,
    /// See [`Image::id`].
    id: Arc<str>,
}

/// What a kernel does with the host's ACPI tables.
#[derive(Deserialize)]
enum AcpiTables {
    #[serde(rename = "confined")]
    Confined,
}

/// The accepted images (at least one) and the accepted attestation keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The name of the attestation variant; `None` if the policy names none.
    variant: Option<String>,
    images: Vec<Image>,
    /// The accepted attestation keys.
    keys: BTreeSet<KeyName>,
    /// How many of the keys are not in the JSON, and the source that names them.
    added: Vec<(&'static str, usize)>,
    /// The roots that certify further keys: names, or certificates in PEM.
    roots: Vec<String>,
    /// The requirements for what the certificate and the quote say about the TPM.
    tpm: tpm::TpmRequirements,
    /// The requirements for TDX machines besides their registers.
    tdx: TdxRequirements,
    /// The requirements for the cloud's statements about a machine.
    cloud: instance::CloudRequirements,
    /// The requirements in Constellation's policies for TDX machines.
    old_tdx: constellation::tdx::OldTdxRequirements,
    /// The requirements for SEV-SNP machines.
    snp: constellation::snp::OldSnpRequirements,
    /// Whether evidence of the old form of attested TLS is refused.
    requires_strong: bool,
    /// The requirements for Secure Boot.
    secure_boot: Option<secure_boot::SecureBootRequirements>,
    /// Whether each image must confine the code in ACPI tables.
    requires_confined_acpi: bool,
    /// The flaws that the policy may have.
    exceptions: Vec<Exception>,
    /// Whether a policy that names no keys accepts no key, instead of every key. Not a part of the
    /// JSON.
    only_named_keys: bool,
    /// Whether the statements of clouds that the policy requires may be missing. Not a part of the
    /// JSON.
    pub(crate) without_cloud_statements: bool,
}

#[derive(Deserialize)]
struct Json {
    variant: Option<String>,
    #[serde(default)]
    tpm: tpm::TpmRequirements,
    #[serde(default)]
    tdx: TdxRequirements,
    #[serde(default)]
    cloud: instance::CloudRequirements,
    #[serde(flatten)]
    old_tdx: constellation::tdx::OldTdxRequirements,
    #[serde(flatten)]
    snp: constellation::snp::OldSnpRequirements,
    measurements: BTreeMap<String, JsonMeasurement>,
    #[serde(default)]
    initramfs: BTreeMap<String, JsonMeasurement>,
    #[serde(default)]
    name: String,
    #[serde(default, rename = "alsoAccepted")]
    also_accepted: Vec<JsonImage>,
    #[serde(default, rename = "attestationKeys")]
    attestation_keys: Vec<String>,
    #[serde(default, rename = "endorsementRoots")]
    endorsement_roots: Vec<String>,
    require: Option<String>,
    #[serde(rename = "secureBoot")]
    secure_boot: Option<secure_boot::SecureBootRequirements>,
    #[serde(default, rename = "acpiTables")]
    acpi_tables: Option<AcpiTables>,
    #[serde(default, rename = "requireConfinedAcpi")]
    requires_confined_acpi: bool,
    #[serde(default)]
    exceptions: Vec<String>,
}

#[derive(Deserialize)]
struct JsonImage {
    name: String,
    measurements: BTreeMap<String, JsonMeasurement>,
    #[serde(default)]
    initramfs: BTreeMap<String, JsonMeasurement>,
    #[serde(default, rename = "acpiTables")]
    acpi_tables: Option<AcpiTables>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum JsonMeasurement {
    /// The form in old clusters: only a value, which is always enforced.
    Bare(String),
    Full {
        expected: String,
        #[serde(default, rename = "warnOnly")]
        warn_only: bool,
    },
}

impl Image {
    fn new(
        name: &str,
        measurements: BTreeMap<u32, Measurement>,
        initramfs: BTreeMap<u32, Measurement>,
    ) -> Result<Image, PolicyError> {
        let mut image = Image {
            name: name.into(),
            measurements,
            initramfs,
            has_confined_kernel: false,
            id: "".into(),
        };
        image.check()?;
        Ok(image)
    }

    /// Fails if the parts of the image contradict each other.
    fn check(&mut self) -> Result<(), PolicyError> {
        let name = &self.name;
        let is_plain = name.chars().all(|c| c == ' ' || c.is_ascii_graphic());
        if !is_plain || name.len() > MAX_NAME || name.trim() != name {
            return Err(Fault::Image.because(format!(
                "the name {}: expected at most {MAX_NAME} plain characters",
                quoted(name, 120)
            )));
        }
        self.initramfs
            .retain(|index, measurement| self.measurements.get(index) != Some(measurement));
        let values = self.measurements.values().chain(self.initramfs.values());
        let kinds: BTreeSet<_> = values.map(|it| Registers::of(&it.expected)).collect();
        if kinds.len() > 1 || kinds.contains(&None) {
            return Err(Fault::Image.because(
                "its registers differ in length: expected 32 bytes each, or 48 of a TDX machine",
            ));
        }
        let enforces_nothing = |measurements: BTreeMap<u32, Measurement>| {
            measurements
                .values()
                .all(|measurement| measurement.warn_only)
        };
        if Stage::ALL
            .map(|stage| self.at(stage))
            .into_iter()
            .any(enforces_nothing)
        {
            let why = "no register is enforced, so it would accept any machine";
            return Err(Fault::Image.because(why));
        }
        self.id = self.compute_id();
        Ok(())
    }

    fn compute_id(&self) -> Arc<str> {
        let mut bytes = vec![];
        for registers in [&self.measurements, &self.initramfs] {
            // a count keeps the two lists apart
            bytes.push(registers.len() as u8);
            for (index, measurement) in registers {
                bytes.extend([*index as u8, u8::from(measurement.warn_only)]);
                bytes.extend(&measurement.expected);
            }
        }
        hex(&digest(&SHA256, &bytes).as_ref()[..ID_LEN]).into()
    }

    /// Returns the registers at this stage.
    fn at(&self, stage: Stage) -> BTreeMap<u32, Measurement> {
        let mut measurements = self.measurements.clone();
        if stage == Stage::Initramfs {
            measurements.extend(self.initramfs.clone());
        }
        measurements
    }

    fn from_json(
        name: &str,
        measurements: BTreeMap<String, JsonMeasurement>,
        initramfs: BTreeMap<String, JsonMeasurement>,
        acpi_tables: Option<AcpiTables>,
    ) -> Result<Image, PolicyError> {
        let mut image = Image {
            name: name.into(),
            measurements: Image::measurements_from_json(measurements)?,
            initramfs: Image::measurements_from_json(initramfs)
                .map_err(|error| error.within("initramfs"))?,
            has_confined_kernel: acpi_tables.is_some(),
            id: "".into(),
        };
        image.check()?;
        Ok(image)
    }

    fn measurements_from_json(
        json: BTreeMap<String, JsonMeasurement>,
    ) -> Result<BTreeMap<u32, Measurement>, PolicyError> {
        let mut measurements = BTreeMap::new();
        for (name, measurement) in json {
            let index = name.parse().ok().filter(|index| *index <= MAX_INDEX);
            let index = index.ok_or_else(|| {
                Fault::Image.because(format!(
                    "{} is not a PCR: expected 0 to {MAX_INDEX}",
                    quoted(&name, 80)
                ))
            })?;
            let (expected, warn_only) = match measurement {
                JsonMeasurement::Bare(expected) => (expected, false),
                JsonMeasurement::Full {
                    expected,
                    warn_only,
                } => (expected, warn_only),
            };
            let expected = register(&expected).ok_or_else(|| {
                Fault::Image.because(format!(
                    "PCR {index}: expected 64 hex digits (a TDX machine: 96), got {}",
                    quoted(&expected, 120)
                ))
            })?;
            if !warn_only && expected.chunks(2).all(|pair| pair == PLACEHOLDER) {
                return Err(Fault::Image.because(format!(
                    "PCR {index} has the placeholder 1234..: replace it with the value of a correct machine"
                )));
            }
            if measurements
                .insert(
                    index,
                    Measurement {
                        expected,
                        warn_only,
                    },
                )
                .is_some()
            {
                return Err(Fault::Image.because(format!("PCR {index} appears twice")));
            }
        }
        Ok(measurements)
    }

    /// Returns the kind of the registers.
    fn registers(&self) -> Registers {
        let first = self.measurements.values().next();
        let kind = first.and_then(|first| Registers::of(&first.expected));
        kind.unwrap_or(Registers::Pcrs)
    }

    /// Returns 32 hexadecimal digits that depend on all registers of the image at both stages, and on nothing else: in each policy
    /// the image has the same ID, whatever its name is. A policy for one stage or cluster keeps the IDs of the policy that it was
    /// made from.
    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    /// Returns the name; empty if the image has none.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the expected value of each register of the booted system.
    pub fn measurements(&self) -> &BTreeMap<u32, Measurement> {
        &self.measurements
    }

    /// Returns the registers that differ in the initramfs.
    pub fn initramfs(&self) -> &BTreeMap<u32, Measurement> {
        &self.initramfs
    }

    /// Returns whether the host's ACPI tables cannot change the machine: its kernel confines them,
    /// or a TDX machine's RTMR 0 pins them.
    pub fn confines_acpi(&self) -> bool {
        let rtmr_0 = self.measurements.get(&RTMR_0).filter(|it| !it.warn_only);
        self.has_confined_kernel || self.registers() == Registers::Rtmrs && rtmr_0.is_some()
    }

    /// Returns whether the policy says that the kernel of this image confines the code in ACPI
    /// tables.
    pub fn has_confined_kernel(&self) -> bool {
        self.has_confined_kernel
    }

    /// Returns the registers of the booted system that do not have the expected value, in ascending
    /// order: index, expected value, and actual value (`None`: the register is not in `values`).
    pub fn mismatches<'a>(
        &'a self,
        values: &'a BTreeMap<u32, Vec<u8>>,
    ) -> impl Iterator<Item = (u32, &'a Measurement, Option<&'a [u8]>)> {
        self.measurements
            .iter()
            .map(|(index, measurement)| (*index, measurement, values.get(index).map(Vec::as_slice)))
            .filter(|(_, measurement, got)| *got != Some(measurement.expected.as_slice()))
    }

    /// Returns the distance of a machine from this image: the number of wrong registers that are
    /// enforced, then the number of other wrong registers.
    fn distance(&self, values: &BTreeMap<u32, Vec<u8>>) -> (usize, usize) {
        self.mismatches(values)
            .fold((0, 0), |(enforced, warned), (_, measurement, _)| {
                if measurement.warn_only {
                    (enforced, warned + 1)
                } else {
                    (enforced + 1, warned)
                }
            })
    }
}

impl fmt::Display for Image {
    /// Writes the name of the image for messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.name.is_empty() {
            "the first image"
        } else {
            &self.name
        })
    }
}

impl Policy {
    /// Makes a policy with one image without a name that accepts every attestation key.
    pub fn new(measurements: BTreeMap<u32, Measurement>) -> Result<Policy, PolicyError> {
        let images = vec![Image::new("", measurements, BTreeMap::new())?];
        Policy {
            variant: None,
            images,
            keys: BTreeSet::new(),
            added: vec![],
            roots: vec![],
            tpm: tpm::TpmRequirements::default(),
            tdx: TdxRequirements::default(),
            cloud: instance::CloudRequirements::default(),
            old_tdx: constellation::tdx::OldTdxRequirements::default(),
            snp: constellation::snp::OldSnpRequirements::default(),
            requires_strong: false,
            secure_boot: None,
            requires_confined_acpi: false,
            exceptions: vec![],
            only_named_keys: false,
            without_cloud_statements: false,
        }
        .checked()
    }

    /// Returns the policy if its parts do not contradict each other.
    fn checked(self) -> Result<Policy, PolicyError> {
        let (images, keys) = (&self.images, &self.keys);
        if images.len() > MAX_IMAGES {
            return Err(Fault::TooMany.because(format!(
                "it has {} images, more than {MAX_IMAGES}",
                images.len()
            )));
        }
        for (at, image) in images.iter().enumerate() {
            if image.registers() != images[0].registers() {
                return Err(Fault::Image.because(format!(
                    "{image} has registers of another length than {}",
                    images[0]
                )));
            }
            if at > 0 && image.name.is_empty() {
                return Err(Fault::Image.because("a further image has no name"));
            }
            if self.requires_confined_acpi && !image.confines_acpi() {
                return Err(Fault::Image.because(format!(
                    "requireConfinedAcpi: {image} has no \"acpiTables\":\"confined\": its kernel lets the host's ACPI tables write \
                     to kernel memory"
                )));
            }
            if images[..at].iter().any(|other| other.name == image.name) {
                return Err(
                    Fault::Image.because(format!("two images have the name {:?}", image.name))
                );
            }
        }
        if keys.len() > MAX_KEYS {
            return Err(Fault::TooMany.because(format!(
                "it names {} attestation keys, more than {MAX_KEYS}",
                keys.len()
            )));
        }
        if self.roots.len() > MAX_ROOTS {
            return Err(Fault::TooMany.because(format!(
                "endorsementRoots has {} entries, more than {MAX_ROOTS}",
                self.roots.len()
            )));
        }
        if let Some(required) = &self.secure_boot {
            let checked = required.check();
            checked.map_err(|error| error.within("secureBoot"))?;
        }
        self.tpm.check().map_err(|error| error.within("tpm"))?;
        if !self.tpm.is_empty() && self.roots.is_empty() {
            return Err(Fault::Requirement.because(
                "tpm: only a certified endorsement key names the vendor of its TPM: add endorsementRoots, the roots of the vendors",
            ));
        }
        self.old_tdx.check_form()?;
        self.cloud.check().map_err(|error| error.within("cloud"))?;
        if let Some(root) = self.roots.iter().find(|root| root.len() > MAX_ROOT) {
            return Err(Fault::TooMany.because(format!(
                "endorsementRoots: an entry has {} bytes, more than {MAX_ROOT}",
                root.len()
            )));
        }
        Ok(self)
    }

    /// Parses the JSON. An unknown field is an error.
    pub fn from_json(text: &str) -> Result<Policy, PolicyError> {
        // editors of Windows write a byte order mark
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let wrong = |why: String| Fault::Json.because(why);
        field_names::check(text).map_err(|error| wrong(error.to_string()))?;
        // as text, so that the programs have one parser of policies
        let parse = |text: &str| serde_json::from_str::<Json>(text);
        let read = |value: &Value| parse(&value.to_string()).err().map(|it| without_place(&it));
        let json = parse(text);
        let json = json.map_err(|error| match field_names::of_other_type(text, read) {
            Some(field) => wrong(format!("{}: {error}", quoted(&field, 120))),
            None => wrong(error.to_string()),
        })?;
        let first = Image::from_json(
            &json.name,
            json.measurements,
            json.initramfs,
            json.acpi_tables,
        );
        let mut images = vec![first?];
        for image in json.also_accepted {
            let wrong = |error: PolicyError| {
                error.within(format_args!("alsoAccepted: {}", quoted(&image.name, 120)))
            };
            let parsed = Image::from_json(
                &image.name,
                image.measurements,
                image.initramfs,
                image.acpi_tables,
            );
            images.push(parsed.map_err(wrong)?);
        }
        let keys = json.attestation_keys.iter().map(|name| name.parse());
        let keys = keys
            .collect::<Result<_, _>>()
            .map_err(|error: String| Fault::Key.because(format!("attestationKeys: {error}")))?;
        if let Some(other) = json.require.as_ref().filter(|form| *form != STRONG) {
            let text = format!(
                "require has the value {}, expected {STRONG:?}",
                quoted(other, 80)
            );
            return Err(Fault::Requirement.because(text));
        }
        let mut policy = Policy {
            variant: json.variant,
            images,
            keys,
            added: vec![],
            roots: json.endorsement_roots,
            tpm: json.tpm,
            tdx: json.tdx,
            cloud: json.cloud,
            old_tdx: json.old_tdx,
            snp: json.snp,
            requires_strong: json.require.is_some(),
            secure_boot: json.secure_boot,
            requires_confined_acpi: json.requires_confined_acpi,
            exceptions: vec![],
            only_named_keys: false,
            without_cloud_statements: false,
        };
        for name in &json.exceptions {
            policy = policy.permitting(Exception::named(name)?);
        }
        policy.checked()
    }

    /// Returns the policy of machines of this attestation variant.
    pub fn of_variant(mut self, name: &str) -> Policy {
        self.variant = Some(name.to_owned());
        self
    }

    /// Returns the name of the attestation variant, if the policy names one.
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }

    /// Returns the policy whose first image has a kernel that confines the code in ACPI tables.
    pub fn with_confined_kernel(mut self) -> Policy {
        self.images[0].has_confined_kernel = true;
        self
    }

    /// Returns the policy with a further image without separate registers of the initramfs.
    pub fn and_also(
        self,
        name: &str,
        measurements: BTreeMap<u32, Measurement>,
    ) -> Result<Policy, PolicyError> {
        let image = Image::new(name, measurements, BTreeMap::new())?;
        self.and_image(name, image)
    }

    /// Returns the policy with a further image, under this name.
    pub fn and_image(mut self, name: &str, mut image: Image) -> Result<Policy, PolicyError> {
        image.name = name.into();
        image.check()?;
        self.images.push(image);
        self.checked()
    }

    /// Returns the policy for machines at this stage of their boot.
    pub fn at(mut self, stage: Stage) -> Policy {
        for image in &mut self.images {
            image.measurements = image.at(stage);
            image.initramfs.clear();
        }
        self
    }

    /// Returns whether a register of an image differs between the stages of a boot.
    pub fn knows_stages(&self) -> bool {
        self.images.iter().any(|image| !image.initramfs.is_empty())
    }

    /// Returns the policy with further accepted attestation keys. A policy that accepted every key
    /// then accepts only these.
    pub fn believing(
        mut self,
        keys: impl IntoIterator<Item = KeyName>,
    ) -> Result<Policy, PolicyError> {
        self.keys.extend(keys);
        self.checked()
    }

    /// Like [`Self::believing`], for keys from another source than the policy. A refusal names the
    /// source.
    pub fn believing_those_of(
        mut self,
        source: &'static str,
        keys: impl IntoIterator<Item = KeyName>,
    ) -> Result<Policy, PolicyError> {
        let before = self.keys.len();
        self.keys.extend(keys);
        match self.keys.len() - before {
            0 => {}
            new => self.added.push((source, new)),
        }
        self.checked()
    }

    /// Returns the policy without named keys, roots and requirements for TPMs; it accepts every attestation key.
    pub fn believing_any(mut self) -> Policy {
        self.keys.clear();
        self.added.clear();
        self.roots.clear();
        self.tpm = Default::default();
        self
    }

    /// Returns the policy without its requirements on statements of clouds; then nothing endorses
    /// the key. It must not be used to admit a machine.
    pub fn without_cloud_statements(mut self) -> Policy {
        self.without_cloud_statements = true;
        self
    }

    /// Returns the policy that refuses evidence of the old form of attested TLS.
    pub fn requiring_strong(mut self) -> Policy {
        self.requires_strong = true;
        self
    }

    /// Returns whether evidence of the old form of attested TLS is refused.
    pub fn requires_strong(&self) -> bool {
        self.requires_strong
    }

    /// Returns the policy that accepts no attestation key if it names none, unless a root certifies
    /// the key.
    pub fn only_named_keys(mut self) -> Policy {
        self.only_named_keys = true;
        self
    }

    /// Returns whether the attestation key with this name is accepted without a certificate.
    pub fn believes(&self, key: &KeyName) -> bool {
        self.keys.contains(key) || self.believes_any_key()
    }

    /// Returns the policy's requirements besides registers, by the names of their members. Each
    /// variant can check some of them.
    pub(crate) fn demanded(&self) -> Vec<&'static str> {
        let cloud = &self.cloud;
        let of_report = constellation::snp::OldSnpRequirements {
            snp: Default::default(),
            ..self.snp.clone()
        };
        let all = [
            ("attestationKeys", !self.keys.is_empty()),
            ("endorsementRoots", !self.roots.is_empty()),
            ("tpm.vendors", !self.tpm.vendors.is_empty()),
            ("tpm.floors", !self.tpm.floors.is_empty()),
            ("secureBoot", self.secure_boot.is_some()),
            ("cloud.roots", !cloud.roots.is_empty()),
            ("cloud.projects", !cloud.projects.is_empty()),
            ("cloud.zones", !cloud.zones.is_empty()),
            ("cloud.instances", !cloud.instances.is_empty()),
            ("cloud.accounts", !cloud.accounts.is_empty()),
            ("cloud.sha384", !cloud.sha384.is_empty()),
            ("tdx", !is_default(&self.tdx)),
            (OLD_TDX, !is_default(&self.old_tdx)),
            ("snp", !is_default(&self.snp.snp)),
            (OLD_SNP, !is_default(&of_report)),
        ];
        let demanded = all.into_iter().filter(|(_, is_demanded)| *is_demanded);
        demanded.map(|(name, _)| name).collect()
    }

    /// Returns whether every attestation key is accepted.
    pub fn believes_any_key(&self) -> bool {
        self.keys.is_empty() && self.roots.is_empty() && !self.only_named_keys
    }

    /// Describes for the message of a refused key how many other keys are accepted, and from which
    /// sources.
    pub(crate) fn names_others(&self) -> String {
        let own = self.keys.len() - self.added.iter().map(|(_, count)| count).sum::<usize>();
        match (&self.added[..], own) {
            ([], 0) => "and the policy names no key".into(),
            ([], 1) => "not the one that the policy names".into(),
            ([], own) => format!("none of the {own} that the policy names"),
            (added, own) => added.iter().fold(
                format!("none of the accepted keys: the policy names {own}"),
                |text, (source, count)| format!("{text}, {source} {count}"),
            ),
        }
    }

    /// Returns the named attestation keys.
    pub fn keys(&self) -> &BTreeSet<KeyName> {
        &self.keys
    }

    /// Returns the roots that certify further attestation keys: names of built-in roots, or
    /// certificates in PEM.
    pub fn endorsement_roots(&self) -> &[String] {
        &self.roots
    }

    /// Returns the requirements for what the certificate and the quote say about the TPM.
    pub fn tpm(&self) -> &tpm::TpmRequirements {
        &self.tpm
    }

    /// Fails if the policy names roots. For programs that do not verify certificates of endorsement
    /// keys.
    pub fn without_endorsement_roots(self) -> Result<Policy, PolicyError> {
        if self.roots.is_empty() {
            Ok(self)
        } else {
            Err(Fault::Root.because(
            "it has endorsementRoots, but this program does not verify certificates of TPMs: name the accepted keys \
             (attestationKeys) instead",
        ))
        }
    }

    /// Returns the images, at least one.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Returns the kind of the machines' registers.
    pub fn registers(&self) -> Registers {
        self.images[0].registers()
    }

    /// Returns the requirements in Constellation's policies for TDX machines.
    pub fn old_tdx(&self) -> &constellation::tdx::OldTdxRequirements {
        &self.old_tdx
    }

    /// Returns the requirements for SEV-SNP machines.
    pub fn snp(&self) -> &constellation::snp::OldSnpRequirements {
        &self.snp
    }

    /// Returns the requirements for Secure Boot.
    pub fn secure_boot(&self) -> Option<&secure_boot::SecureBootRequirements> {
        self.secure_boot.as_ref()
    }

    /// Returns whether each image must have a kernel that confines the code in ACPI tables.
    pub fn requires_confined_acpi(&self) -> bool {
        self.requires_confined_acpi
    }

    /// Returns the policy with other requirements for the cloud's statements, SEV-SNP and TDX.
    pub fn with_platform(
        mut self,
        change: impl FnOnce(
            &mut instance::CloudRequirements,
            &mut constellation::snp::OldSnpRequirements,
            &mut TdxRequirements,
        ),
    ) -> Result<Policy, PolicyError> {
        change(&mut self.cloud, &mut self.snp, &mut self.tdx);
        self.checked()
    }

    /// Returns the policy that also permits this flaw.
    pub fn permitting(mut self, flaw: Exception) -> Policy {
        if !self.permits(flaw) {
            self.exceptions.push(flaw);
        }
        self
    }

    /// Returns whether the policy may have this flaw.
    pub fn permits(&self, flaw: Exception) -> bool {
        self.exceptions.contains(&flaw)
    }

    /// Returns the flaws that the policy may have, each once.
    pub fn exceptions(&self) -> &[Exception] {
        &self.exceptions
    }

    /// Returns the requirements for the cloud's statements about a machine.
    pub fn cloud(&self) -> &instance::CloudRequirements {
        &self.cloud
    }

    /// Returns the requirements for TDX machines besides the registers.
    pub fn tdx(&self) -> &TdxRequirements {
        &self.tdx
    }

    /// Checks registers, and returns the image that has them. The refusal has a line made by `say`
    /// for each enforced register with a wrong value; other wrong registers are logged.
    pub(crate) fn check(
        &self,
        values: &BTreeMap<u32, Vec<u8>>,
        say: impl Fn(u32, &Measurement, Option<&[u8]>) -> String,
    ) -> Result<&Image, Refusal> {
        let image = self.nearest(values);
        let mut refused = vec![];
        for (index, measurement, got) in image.mismatches(values) {
            let text = say(index, measurement, got);
            if measurement.warn_only {
                log::warn!("accepted a machine with a warning: {text}");
            } else {
                let name = self.registers().name(index);
                let mut refusal = Kind::Measurement.because(text).of(name);
                refusal.expected = Some(hex(&measurement.expected));
                refusal.got = got.map(hex);
                refused.push(refusal);
            }
        }
        let judged = Refusal::join(refused);
        if let [_] = self.images() {
            return judged.map(|()| image);
        }
        judged.map_err(|refusal| {
            refusal.reworded(|lines| format!(
                "the machine runs none of the {} accepted images; the differences from {image}, the nearest:\n{lines}",
                self.images().len()
            ))
        })?;
        log::debug!("the machine runs {image}");
        Ok(image)
    }

    /// Returns the policy for a machine that has joined no cluster in this boot: the register of
    /// the cluster ID must be zero. Only such a machine may receive a disk key or the master
    /// secret.
    pub fn expecting_fresh(self) -> Policy {
        let fresh = self.registers().fresh();
        self.expecting(&fresh)
    }

    /// Returns the policy for a member of this cluster: the register of the cluster ID must be
    /// extended with it.
    pub fn expecting_cluster(self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Policy {
        let extended = self.registers().after(cluster_id);
        self.expecting(&extended)
    }

    /// Returns the policy with this expected value of the register of the cluster ID.
    pub fn expecting(mut self, register: &ClusterRegister) -> Policy {
        let index = self.registers().of_cluster_id();
        for image in &mut self.images {
            image.initramfs.remove(&index);
            image.measurements.insert(
                index,
                Measurement {
                    expected: register.as_ref().to_vec(),
                    warn_only: false,
                },
            );
        }
        self
    }

    /// Returns the policy without the register of the cluster ID. It shows only which image a
    /// machine runs, and must not be used to admit a machine.
    pub fn of_any_cluster(mut self) -> Policy {
        let index = self.registers().of_cluster_id();
        for image in &mut self.images {
            image.initramfs.remove(&index);
            image.measurements.remove(&index);
        }
        self
    }

    /// Returns the policy without registers and Secure Boot. It accepts any machine with an accepted
    /// attestation key, and must not be used to admit a machine.
    pub fn of_any_image(mut self) -> Policy {
        self.secure_boot = None;
        self.images.truncate(1);
        for image in &mut self.images {
            image.initramfs.clear();
            image.measurements.clear();
        }
        self
    }

    /// Returns the image with the smallest distance from these values; if several have it, the
    /// first one.
    pub fn nearest(&self, values: &BTreeMap<u32, Vec<u8>>) -> &Image {
        let nearest = self
            .images
            .iter()
            .min_by_key(|image| image.distance(values));
        nearest.unwrap_or(&self.images[0])
    }

    /// Returns [`Image::mismatches`] of the nearest image. The policy is met if none of them is
    /// enforced.
    pub fn mismatches<'a>(
        &'a self,
        values: &'a BTreeMap<u32, Vec<u8>>,
    ) -> impl Iterator<Item = (u32, &'a Measurement, Option<&'a [u8]>)> {
        self.nearest(values).mismatches(values)
    }
}

/// Returns what is wrong with a JSON text, without line and column.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (why, _) = text.split_once(" at line ").unwrap_or((&text, ""));
    why.to_owned()
}

/// Decodes the hexadecimal digits of a register.
fn register(text: &str) -> Option<Vec<u8>> {
    let long = || unhex::<48>(text).map(Vec::from);
    unhex::<32>(text).map(Vec::from).or_else(long)
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    fn old_default() -> String {
        let entry = |index, value: &str| {
            format!("\"{index}\":{{\"expected\":\"{value}\",\"warnOnly\":false}}")
        };
        let value = "db794e9bc200e22550514674ca3494119b00b2db74ffe2f7c970bf6bf5bc1cae";
        let entries = [
            entry(11, value),
            entry(12, ZERO),
            entry(15, ZERO),
            entry(4, value),
            entry(8, ZERO),
        ];
        format!("{{\"measurements\":{{{}}}}}", entries.join(","))
    }

    #[test]
    fn the_registers_of_a_tdx_machine_are_read() {
        let entry = |index: u32, digit: &str| {
            let value = digit.repeat(96);
            format!("\"{index}\":{{\"expected\":\"{value}\",\"warnOnly\":false}}")
        };
        let text = format!(
            "{{\"measurements\":{{{},{}}}}}",
            entry(0, "a"),
            entry(4, "b")
        );
        let policy = Policy::from_json(&text).unwrap();
        assert_eq!(policy.registers(), Registers::Rtmrs);
        let fresh = policy.clone().expecting_fresh();
        assert_eq!(fresh.images()[0].measurements()[&4].expected, [0; 48]);
        assert_eq!(policy.of_any_cluster().images()[0].measurements().len(), 1);
        let mixed = text.replace(&"a".repeat(96), &"a".repeat(64));
        let error = Policy::from_json(&mixed).unwrap_err().to_string();
        assert!(error.contains("differ in length"), "{error}");
        let other = enforced(&[(4, 1)]);
        let error = Policy::from_json(&text).unwrap().and_also("other", other);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("other has registers of another length"),
            "{error}"
        );
    }

    #[test]
    fn a_bare_value_is_enforced() {
        let policy = Policy::from_json(&format!(r#"{{"measurements":{{"4":"{ZERO}"}}}}"#)).unwrap();
        assert_eq!(
            policy.images()[0].measurements()[&4],
            Measurement {
                expected: vec![0; 32],
                warn_only: false
            }
        );
    }

    #[test]
    fn a_policy_that_enforces_nothing_is_refused() {
        let warn_only =
            format!(r#"{{"measurements":{{"4":{{"expected":"{ZERO}","warnOnly":true}}}}}}"#);
        let error = Policy::from_json(&warn_only).unwrap_err().to_string();
        assert!(error.contains("any machine"), "{error}");
        let none = Policy::from_json(r#"{"measurements":{}}"#).unwrap_err();
        assert!(
            none.to_string().contains("it would require nothing"),
            "{none}"
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |name: &str, value: &str| {
            format!(r#"{{"measurements":{{"{name}":{{"expected":"{value}"}}}}}}"#)
        };
        for (text, why) in [
            (with("4", "12"), "PCR 4: expected 64 hex digits"),
            (with("4", &"+1".repeat(32)), "hex digits"),
            (with("4", &"1234".repeat(16)), "PCR 4 has the placeholder"),
            (with("x", ZERO), "\"x\" is not a PCR"),
            (with("32", ZERO), "\"32\" is not a PCR"),
            (
                format!(r#"{{"measurements":{{"4":"{ZERO}","04":"{ZERO}"}}}}"#),
                "twice",
            ),
            ("{}".into(), "measurements"),
        ] {
            let error = Policy::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    /// A policy of an image whose PCR 11 differs between the stages.
    fn staged() -> String {
        let value = |digit: &str| {
            let expected = digit.repeat(64);
            format!("{{\"expected\":\"{expected}\",\"warnOnly\":false}}")
        };
        let (booted, initramfs) = (value("b"), value("a"));
        format!(
            "{{\"measurements\":{{\"11\":{booted},\"4\":{booted}}},\"initramfs\":{{\"11\":{initramfs}}}}}"
        )
    }

    #[test]
    fn an_image_has_registers_for_each_stage() {
        let policy = Policy::from_json(&staged()).unwrap();
        assert!(policy.knows_stages());
        for (stage, expected) in [(Stage::Initramfs, 0xaa), (Stage::Booted, 0xbb)] {
            let policy = policy.clone().at(stage);
            assert!(!policy.knows_stages());
            let registers = policy.images()[0].measurements();
            assert_eq!(registers[&11].expected, [expected; 32], "{stage}");
            assert_eq!(registers[&4].expected, [0xbb; 32], "{stage}");
        }
    }

    #[test]
    fn a_register_that_does_not_differ_is_not_written_twice() {
        let text = staged().replace(&"a".repeat(64), &"b".repeat(64));
        let policy = Policy::from_json(&text).unwrap();
        assert!(!policy.knows_stages());
        assert!(policy.images()[0].initramfs().is_empty());
    }

    #[test]
    fn the_initramfs_must_enforce_a_register_too() {
        let warn = format!("{{\"expected\":\"{ZERO}\",\"warnOnly\":true}}");
        let text =
            format!("{{\"measurements\":{{\"4\":\"{ZERO}\"}},\"initramfs\":{{\"4\":{warn}}}}}");
        let error = Policy::from_json(&text).unwrap_err().to_string();
        assert!(error.contains("any machine"), "{error}");
        let error = Policy::from_json(&text.replace("initramfs\":{\"4\"", "initramfs\":{\"x\""));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("initramfs: \"x\" is not a PCR"), "{error}");
    }

    #[test]
    fn the_register_of_the_cluster_id_is_the_same_at_each_stage() {
        let text = staged().replace("\"11\"", "\"15\"");
        let policy = Policy::from_json(&text).unwrap().expecting_fresh();
        for stage in Stage::ALL {
            let policy = policy.clone().at(stage);
            assert_eq!(policy.images()[0].measurements()[&15].expected, [0; 32]);
        }
    }

    #[test]
    fn mismatches_name_the_register_and_a_missing_one_too() {
        let policy = Policy::from_json(&old_default()).unwrap();
        let values = BTreeMap::from([
            (8, vec![0; 32]),
            (12, vec![1; 32]),
            (15, vec![0; 32]),
            (4, vec![0; 48]),
        ]);
        let found: Vec<_> = policy
            .mismatches(&values)
            .map(|(index, _, got)| (index, got.is_some()))
            .collect();
        assert_eq!(found, [(4, true), (11, false), (12, true)]);
    }

    #[test]
    fn a_fresh_machine_has_zero_in_pcr_15_whatever_the_policy_says() {
        let open = format!(r#"{{"measurements":{{"4":"{ZERO}"}}}}"#);
        let warn_only = format!(
            r#"{{"measurements":{{"4":"{ZERO}","15":{{"expected":"{ZERO}","warnOnly":true}}}}}}"#
        );
        let other = format!(
            r#"{{"measurements":{{"4":"{ZERO}","15":"{}"}}}}"#,
            "ab".repeat(32)
        );
        for text in [open, warn_only, other] {
            let policy = Policy::from_json(&text).unwrap().expecting_fresh();
            assert_eq!(
                policy.images()[0].measurements()[&15],
                Measurement {
                    expected: vec![0; 32],
                    warn_only: false
                }
            );
        }
    }

    #[test]
    fn named_keys_are_read_and_added_to() {
        let text = old_default();
        assert!(Policy::from_json(&text).unwrap().keys().is_empty());
        let (a, b) = (KeyName::of(b"a"), KeyName::of(b"b"));
        let named = upgrade().believing([b, a, b]).unwrap();
        assert_eq!(
            named.keys().iter().copied().collect::<BTreeSet<_>>(),
            BTreeSet::from([a, b])
        );
        assert_eq!(named.believing_any(), upgrade());
        let with = |keys: &str| {
            format!(
                "{},\"attestationKeys\":{keys}}}",
                text.strip_suffix('}').unwrap()
            )
        };
        let read = |keys: &str| Policy::from_json(&with(keys)).unwrap();
        let bare = read(&format!("[\"{}\"]", a.digest()));
        assert_eq!(bare, read(&format!("[\"{a}\"]")));
        assert_eq!(bare.keys(), &[a].into());
        for (keys, why) in [
            (r#"["000b12"]"#, "attestationKeys: not a Name"),
            ("[1]", "string"),
        ] {
            let error = Policy::from_json(&with(keys)).unwrap_err().to_string();
            assert!(error.contains(why), "{keys}: {error}");
        }
    }

    #[test]
    fn roots_end_the_belief_in_any_key() {
        let text = old_default();
        let with = |roots: &str| {
            let start = text.strip_suffix('}').unwrap();
            format!("{start},\"endorsementRoots\":{roots}}}")
        };
        let roots = ["google-2022", "-----BEGIN CERTIFICATE-----\nAA==\n"];
        let policy = Policy::from_json(&text).unwrap();
        let certified = Policy::from_json(&with(&serde_json::json!(roots).to_string())).unwrap();
        assert_eq!(certified.endorsement_roots(), roots);
        assert!(policy.believes_any_key() && !certified.believes_any_key());
        let key = KeyName::of(b"a");
        assert!(!certified.believes(&key));
        let both = certified.clone().believing([key]).unwrap();
        assert!(both.believes(&key) && !both.believes(&KeyName::of(b"b")));
        assert_eq!(both.believing_any(), policy);
        let error = certified.without_endorsement_roots().unwrap_err();
        assert!(error.to_string().contains("does not verify"), "{error}");
        for (roots, why) in [
            ("[1]".into(), "string"),
            (
                format!("[\"{}\"]", "x".repeat(MAX_ROOT + 1)),
                "bytes, more than",
            ),
            (
                format!("[{}\"x\"]", "\"x\",".repeat(MAX_ROOTS)),
                "65 entries",
            ),
        ] {
            let error = Policy::from_json(&with(&roots)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_policy_can_require_the_strong_form() {
        let with = |require: &str| {
            let text = format!(r#"{{"measurements":{{"15":"{ZERO}"}}{require}}}"#);
            Policy::from_json(&text)
        };
        let (any, strong) = (with("").unwrap(), with(r#","require":"strong""#).unwrap());
        assert!(!any.requires_strong() && strong.requires_strong());
        assert_eq!(any.requiring_strong(), strong);
        // a requirement that a later version added is an error, not ignored
        let error = with(r#","require":"stronger""#).unwrap_err().to_string();
        assert!(error.contains("stronger"), "{error}");
    }

    #[test]
    fn a_policy_can_demand_that_each_image_confines_the_hosts_acpi_tables() {
        let policy = |mark: &str, further: &str, demand: &str| {
            Policy::from_json(&format!(
                r#"{{"measurements":{{"8":"{ZERO}"}}{mark},"name":"a"{further}{demand}}}"#
            ))
        };
        let (mark, demand) = (
            r#","acpiTables":"confined""#,
            r#","requireConfinedAcpi":true"#,
        );
        let other = |mark: &str| {
            format!(r#","alsoAccepted":[{{"name":"b","measurements":{{"9":"{ZERO}"}}{mark}}}]"#)
        };
        let marked = policy(mark, &other(mark), demand).unwrap();
        assert!(marked.images().iter().all(Image::confines_acpi));
        for (wrong, name) in [
            (policy("", &other(mark), demand), "a has no"),
            (policy(mark, &other(""), demand), "b has no"),
            (
                marked.clone().and_also("c", enforced(&[(4, 1)])),
                "c has no",
            ),
        ] {
            let error = wrong.unwrap_err().to_string();
            assert!(
                error.contains("requireConfinedAcpi") && error.contains(name),
                "{error}"
            );
        }
        let open = policy("", &other(mark), "").unwrap();
        assert!(!open.images()[0].confines_acpi() && open.images()[1].confines_acpi());
        // a value that a later version added is not read as the mark
        assert!(policy(r#","acpiTables":"measured""#, "", "").is_err());
        // a mark belongs to its image only
        let new = policy(mark, "", "").unwrap();
        let both = marked.and_image("c", new.images()[0].clone()).unwrap();
        assert!(both.images()[2].confines_acpi());
        assert!(open.with_confined_kernel().images()[0].confines_acpi());
    }

    #[test]
    fn rtmr_0_of_a_tdx_machine_pins_the_hosts_acpi_tables() {
        let policy = |register: &str| {
            let value = "ab".repeat(48);
            Policy::from_json(&format!(
                r#"{{"measurements":{{"2":"{value}","1":{register}}},"requireConfinedAcpi":true}}"#
            ).replace("VALUE", &value))
        };
        assert!(policy(r#""VALUE""#).is_ok());
        assert!(policy(r#"{"expected":"VALUE","warnOnly":true}"#).is_err());
    }

    fn enforced(values: &[(u32, u8)]) -> BTreeMap<u32, Measurement> {
        let entry = |&(index, byte)| {
            (
                index,
                Measurement {
                    expected: vec![byte; 32],
                    warn_only: false,
                },
            )
        };
        values.iter().map(entry).collect()
    }

    fn machine(values: &[(u32, u8)]) -> BTreeMap<u32, Vec<u8>> {
        values
            .iter()
            .map(|&(index, byte)| (index, vec![byte; 32]))
            .collect()
    }

    /// Returns a policy with two images, as in an upgrade.
    fn upgrade() -> Policy {
        let old = Policy::new(enforced(&[(4, 1), (9, 1), (15, 0)])).unwrap();
        old.and_also("image 1.3", enforced(&[(4, 2), (9, 2), (15, 0)]))
            .unwrap()
    }

    #[test]
    fn a_machine_meets_one_image_as_a_whole() {
        let policy = upgrade();
        let wrong = |values: &[(u32, u8)]| policy.mismatches(&machine(values)).count();
        assert_eq!(wrong(&[(4, 1), (9, 1), (15, 0)]), 0);
        assert_eq!(wrong(&[(4, 2), (9, 2), (15, 0)]), 0);
        for mixed in [[(4, 1), (9, 2), (15, 0)], [(4, 2), (9, 1), (15, 0)]] {
            assert_eq!(wrong(&mixed), 1, "{mixed:?}");
        }
        assert_eq!(wrong(&[(4, 2), (9, 2), (15, 7)]), 1);
    }

    #[test]
    fn an_image_has_the_same_id_in_each_policy_and_at_each_stage() {
        let id = |policy: &Policy, at: usize| policy.images()[at].id().to_string();
        let (both, old) = (upgrade(), Policy::new(enforced(&[(4, 1), (9, 1), (15, 0)])));
        let old = old.unwrap();
        assert_eq!(id(&both, 0), id(&old, 0));
        assert_eq!(id(&both, 0).len(), 32);
        assert_ne!(id(&both, 0), id(&both, 1));
        let other_name = old.clone().and_image("x", both.images()[1].clone());
        assert_eq!(id(&other_name.unwrap(), 1), id(&both, 1));
        // what is required of the register of the cluster ID is no property of the image
        assert_eq!(id(&old.clone().expecting_cluster(&[7; 32]), 0), id(&old, 0));
        let json = |more: &str| {
            let entry = |warn| format!(r#"{{"expected":"{}","warnOnly":{warn}}}"#, "01".repeat(32));
            let registers = format!(r#""4":{},"11":{}"#, entry(false), entry(true));
            let text = format!(r#"{{"measurements":{{{registers}}}{more}}}"#);
            Policy::from_json(&text).unwrap()
        };
        let initramfs = format!(r#","initramfs":{{"11":"{}"}}"#, "02".repeat(32));
        let (plain, staged) = (json(""), json(&initramfs));
        assert_ne!(id(&plain, 0), id(&staged, 0));
        for stage in Stage::ALL {
            assert_eq!(id(&staged.clone().at(stage), 0), id(&staged, 0));
        }
        let enforced = plain.images()[0].measurements().clone();
        let warned = |warn_only| {
            enforced.clone().into_iter().map(move |(index, it)| {
                (
                    index,
                    Measurement {
                        warn_only: index == 11 && warn_only,
                        ..it
                    },
                )
            })
        };
        assert_eq!(
            id(&Policy::new(warned(true).collect()).unwrap(), 0),
            id(&plain, 0)
        );
        assert_ne!(
            id(&Policy::new(warned(false).collect()).unwrap(), 0),
            id(&plain, 0)
        );
        let found = both.check(&machine(&[(4, 2), (9, 2), (15, 0)]), |_, _, _| {
            String::new()
        });
        assert_eq!(*found.unwrap().id(), *both.images()[1].id());
    }

    #[test]
    fn what_is_said_of_a_machine_is_measured_against_the_nearest_image() {
        let policy = upgrade();
        let values = machine(&[(4, 2), (9, 3), (15, 0)]);
        assert_eq!(policy.nearest(&values).name(), "image 1.3");
        let found: Vec<_> = policy
            .mismatches(&values)
            .map(|(index, m, _)| (index, m.expected[0]))
            .collect();
        assert_eq!(found, [(9, 2)]);
        let far = machine(&[(4, 8), (9, 8), (15, 0)]);
        assert_eq!(policy.nearest(&far).to_string(), "the first image");
    }

    #[test]
    fn a_warning_does_not_outweigh_what_is_enforced() {
        let mut lenient = enforced(&[(4, 2), (9, 2), (11, 2)]);
        lenient
            .values_mut()
            .skip(1)
            .for_each(|measurement| measurement.warn_only = true);
        let policy = Policy::new(enforced(&[(4, 1)]))
            .unwrap()
            .and_also("lenient", lenient)
            .unwrap();
        let values = machine(&[(4, 2), (9, 8), (11, 8)]);
        assert!(
            policy
                .mismatches(&values)
                .all(|(_, measurement, _)| measurement.warn_only)
        );
    }

    #[test]
    fn all_images_become_those_of_the_cluster() {
        let members = upgrade()
            .and_also("other", enforced(&[(4, 3)]))
            .unwrap()
            .expecting_cluster(&[0x11; 32]);
        for image in members.images() {
            assert_eq!(
                image.measurements()[&15].expected,
                Registers::Pcrs.after(&[0x11; 32]).as_ref()
            );
        }
    }

    #[test]
    fn images_that_are_none_or_have_the_same_name_are_refused_by_name() {
        let with = |further: &str| {
            format!(r#"{{"measurements":{{"4":"{ZERO}"}},"name":"a","alsoAccepted":[{further}]}}"#)
        };
        let image = |name: &str, expected: &str| {
            format!(
                r#"{{"name":"{name}","measurements":{{"4":{{"expected":"{expected}","warnOnly":false}}}}}}"#
            )
        };
        for (further, why) in [
            (
                image("b", "12"),
                "alsoAccepted: \"b\": PCR 4: expected 64 hex digits",
            ),
            (
                image("b", ZERO).replace("false", "true"),
                "alsoAccepted: \"b\": no register is enforced",
            ),
            (image("a", ZERO), "two images have the name \"a\""),
            (image("", ZERO), "a further image has no name"),
            (image("b\\u001b[2J", ZERO), "plain characters"),
            (image(&"b".repeat(MAX_NAME + 1), ZERO), "plain characters"),
            (
                format!(r#"{{"measurements":{{"4":"{ZERO}"}}}}"#),
                "missing field `name`",
            ),
            (
                (0..MAX_IMAGES)
                    .map(|n| image(&format!("i{n}"), ZERO))
                    .collect::<Vec<_>>()
                    .join(","),
                "more than 16",
            ),
        ] {
            let error = Policy::from_json(&with(&further)).unwrap_err().to_string();
            assert!(error.contains(why), "{further}: {error}");
        }
        assert!(Policy::from_json(&with(&image("b", ZERO))).is_ok());
    }

    #[test]
    fn hostile_texts_are_refused_without_a_panic_and_what_is_read_enforces_a_register() {
        let (first, further) = (
            r#"{"measurements":{"4":"00"}"#,
            r#"{"name":"b","measurements":{"4":"00"}}"#,
        );
        let text = format!(
            r#"{first},"alsoAccepted":[{further}],"attestationKeys":["00"],"endorsementRoots":["x"]}}"#
        );
        let text = text.replace("00", ZERO);
        assert!(Policy::from_json(&text).is_ok());
        for text in mutations(text.as_bytes(), 5000) {
            if let Ok(policy) = Policy::from_json(&String::from_utf8_lossy(&text)) {
                let none = BTreeMap::new();
                let mut wrong = policy.mismatches(&none);
                assert!(wrong.any(|(_, measurement, _)| !measurement.warn_only));
            }
        }
    }
}
