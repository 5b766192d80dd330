//! The requirements of a fresh node on a join service, before the node accepts a ticket.
//!
//! In the strong form of attested TLS the join service proves the machine on which it runs. The
//! node accepts a member of a cluster that runs the same image as the node itself: the node
//! compares the registers of boot loader, kernel, initrd and command line with its own, or the
//! launch digest that contains them. PCR 15 names the cluster, and a ticket of another cluster is
//! refused.
//!
//! Register values alone do not prove a machine: a program without a TPM can sign any values with a
//! key of its own. So a fresh node with `require=strong` has a further requirement
//! ([`ServiceTrust::demand`]), which [`platform`](crate::trust::platform) derives.
//!
//! | the service | a fresh node |
//! |---|---|
//! | proves the node's image, or one of `service-policy` | accepts it |
//! | proves another image | refuses it |
//! | proves no cluster, or another one than `cluster-id` | refuses it |
//! | proves nothing | accepts it, and says so; with `require=strong` refuses it |
//! | proves its registers with any key | accepts it, and says so; with `require=strong` only if it is of the cluster `cluster-id` |
//!
//! A rejoining node does not verify join services: the disk shows whether a key is right (the crate
//! `unlock`).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use attest::ClusterRegister;
use base::crypto::CLUSTER_ID_LEN;
use base::sync::lock;
use base::text::hex;
use node::service_trust::{ClusterId, TrustSettings};
use node::ticket_client::TicketFailure;
use verifier::carried::Carried;
use verifier::judged::LaunchDigest;
use verifier::refusal::Kind;
use verifier::sources::Sources;
use verifier::{
    CredentialChallenge, Evidence, Identified, Image, MachineIdentity, Measurement, NamedRegister,
    Policy, PolicyError, Properties, Refusal, RegisterNames, Registers, Stage, Validator, Variant,
};

/// The registers of boot loader, kernel, initrd and kernel command line (UAPI group, "Linux TPM PCR
/// Registry"). All machines with one image have the same values. The other registers depend on
/// firmware and disks.
const OF_IMAGE: &[u32] = &[4, 8, 9, 11, 12, 13];
/// The corresponding registers of a TDX machine: MRTD is the firmware, RTMR 1 the boot loader or
/// the unified kernel image, RTMR 2 what the boot loader loads.
const OF_TDX_IMAGE: &[u32] = &[0, 2, 3];
/// The name of the node's own image in messages.
const OWN_IMAGE: &str = "this machine's image";

/// The requirements of this node on a join service.
pub struct ServiceTrust {
    /// The settings of the node.
    pub settings: TrustSettings,
    /// The images that are accepted in addition to the node's own.
    policy: Option<Policy>,
    /// The variant of the node, and of the services.
    pub variant: &'static Variant,
    tpm: tpm::Location,
    /// The accepted images. They are read from the TPM once.
    images: Mutex<Option<Policy>>,
}

/// Why this node cannot judge join services.
#[derive(Debug)]
pub enum Error {
    /// The file of the setting `service-policy` cannot be read.
    Read(PathBuf, io::Error),
    /// The file of the setting `service-policy` has no policy for join services.
    File(PathBuf, PolicyError),
    /// The policy of the setting `service-policy` is for another kind of machine, or accepts any image.
    Setting(PolicyError),
    /// The TPM does not return the registers of this machine.
    Registers(tpm::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Read(file, error) => write!(
                f,
                "cannot read the service-policy {}: {error}",
                file.display()
            ),
            Error::File(file, error) => write!(f, "service-policy {}: {error}", file.display()),
            Error::Setting(error) => write!(f, "setting service-policy: {error}"),
            Error::Registers(error) => {
                write!(f, "this machine's own registers cannot be read: {error}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Reads the file of the setting `service-policy`.
pub fn read_policy(file: &Path) -> Result<Policy, Error> {
    let wrong = |error| Error::File(file.into(), error);
    let text = std::fs::read_to_string(file).map_err(|error| Error::Read(file.into(), error))?;
    let policy = Policy::from_json(&text)
        .and_then(Policy::without_endorsement_roots)
        .map_err(wrong)?;
    let policy = policy.at(Stage::Booted).of_any_cluster();
    if pins_launch(&policy) {
        return Ok(policy);
    }
    // there must be room for the node's own image, and it must meet the requirements of images
    own_image(policy.images()[0].measurements().clone())
        .and_then(|own| policy.clone().and_image(OWN_IMAGE, own))
        .map_err(wrong)?;
    Ok(policy)
}

/// Returns this machine's image with these registers. If its kernel confines the host's ACPI
/// tables, the image is marked so.
fn own_image(registers: BTreeMap<u32, Measurement>) -> Result<Image, PolicyError> {
    let own = Policy::new(registers)?;
    let own = match node::settings::trusted_acpi() {
        None => own.with_confined_kernel(),
        Some(_) => own,
    };
    Ok(own.images()[0].clone())
}

impl ServiceTrust {
    /// Makes the requirements of a booted node, whose TPM is at `tpm`. `policy` is the content of
    /// the setting `service-policy`. Fails if this policy accepts any image, and has no exception that permits this.
    pub fn new(
        mut settings: TrustSettings,
        policy: Option<Policy>,
        variant: &'static Variant,
        tpm: tpm::Location,
    ) -> Result<ServiceTrust, Error> {
        if let Some(policy) = &policy {
            variant.check_worth(policy).map_err(Error::Setting)?;
        }
        settings.require_strong |= policy.as_ref().is_some_and(Policy::requires_strong);
        Ok(ServiceTrust {
            settings,
            policy,
            variant,
            tpm,
            images: Mutex::default(),
        })
    }

    /// Returns the validator of one connection. The error may be temporary: the TPM does not
    /// answer.
    pub fn judge(&self) -> Result<Arc<ServiceValidator>, Error> {
        let images = self.images()?;
        let carried = Arc::new(Carried::default());
        let sources: Arc<dyn Sources> = carried.clone();
        let validator = |policy| {
            self.variant
                .validator_for(policy, &sources)
                .map_err(Error::Setting)
        };
        let any = validator(images.clone().of_any_image())?;
        Ok(Arc::new(ServiceValidator {
            takes_collateral: self.variant.collateral.is_some(),
            carried,
            images: validator(images)?,
            any,
            pinned: self.settings.cluster,
            proof: OnceLock::new(),
        }))
    }

    /// Replaces [`ServiceTrust::images`] by this policy.
    pub fn demand(&mut self, images: Policy) {
        self.images = Mutex::new(Some(images));
    }

    /// Returns the accepted images: this machine's own, and those of the settings.
    pub fn images(&self) -> Result<Policy, Error> {
        let mut images = lock(&self.images);
        if let Some(images) = &*images {
            return Ok(images.clone());
        }
        if let Some(launch) = self.variant.launch {
            let own = launch().map_err(Error::Registers)?;
            let accepted = and_launch(self.policy.as_ref(), own).map_err(Error::Setting)?;
            return Ok(images.insert(accepted).clone());
        }
        let measured =
            (self.variant.measure)(&self.tpm, Stage::Booted).map_err(Error::Registers)?;
        let own = of_image(measured.booted);
        let accepted = match &self.policy {
            None => Policy::new(own),
            Some(policy) => own_image(own).and_then(|own| policy.clone().and_image(OWN_IMAGE, own)),
        };
        let accepted = accepted.map_err(Error::Setting)?;
        Ok(images.insert(accepted).clone())
    }
}

/// Returns the policy of services that have the launch digest of this machine, or one in
/// `service-policy`. If that names who signs launch digests, its requirements are enough.
fn and_launch(policy: Option<&Policy>, own: LaunchDigest) -> Result<Policy, PolicyError> {
    let policy = match policy {
        Some(policy) => policy.clone(),
        None => of_any_launch()?,
    };
    policy.with_platform(|_, snp, _| {
        let demands = &mut snp.snp;
        let names_signer = !demands.id_keys.is_empty() || !demands.author_keys.is_empty();
        if !names_signer && !demands.launch_measurements.contains(&own.into()) {
            demands.launch_measurements.push(own.into());
        }
    })
}

/// Returns a policy without registers.
fn of_any_launch() -> Result<Policy, PolicyError> {
    let fresh = Registers::Pcrs.fresh().as_ref().to_vec();
    let zero = Measurement {
        expected: fresh,
        warn_only: false,
    };
    let mut registers = BTreeMap::new();
    registers.insert(Registers::Pcrs.of_cluster_id(), zero);
    Ok(Policy::new(registers)?.of_any_cluster())
}

/// Returns whether machines of the policy's variant are accepted by their launch digest, and the
/// policy names some.
fn pins_launch(policy: &Policy) -> bool {
    let variant = policy.variant().map(Variant::named);
    let by_launch = variant.is_some_and(|it| it.is_ok_and(|it| it.launch.is_some()));
    by_launch && policy.snp().snp.pins_launch()
}

/// Returns the registers that are equal on all machines with one image.
fn of_image(mut registers: BTreeMap<u32, Measurement>) -> BTreeMap<u32, Measurement> {
    let is_tdx = |it: &Measurement| Registers::of(&it.expected) == Some(Registers::Rtmrs);
    let of_image = if registers.values().any(is_tdx) {
        OF_TDX_IMAGE
    } else {
        OF_IMAGE
    };
    registers.retain(|index, _| of_image.contains(index));
    let uki = registers.get(&11);
    if uki.is_some_and(|uki| uki.expected != [0; 32]) {
        // since version 261 systemd-stub adds a secret of the machine to the initrd, so PCR 9
        // differs; PCR 11 covers kernel, initrd and command line
        registers.remove(&9);
    }
    registers
}

/// Judges the proof of one join service.
pub struct ServiceValidator {
    /// Whether the variant needs collateral, which the node does not fetch.
    takes_collateral: bool,
    /// The collateral that the service sent, as source for the validators.
    carried: Arc<Carried>,
    images: Arc<dyn Validator>,
    /// A validator that accepts any image. If it accepts a machine that the policy refuses, only
    /// the image was wrong.
    any: Arc<dyn Validator>,
    pinned: Option<ClusterId>,
    proof: OnceLock<ServiceProof>,
}

impl ServiceValidator {
    /// Returns what the service proved; `None` if it sent no evidence.
    pub fn proof(&self) -> Option<&ServiceProof> {
        self.proof.get()
    }

    /// Checks that the ticket's cluster is the sender's, or the one that `cluster-id` names.
    pub fn check_cluster(&self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), TicketFailure> {
        check_cluster(self.pinned, self.proof(), cluster_id)
    }

    fn check(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let session = evidence.session.as_ref();
        if let Some(brought) = session.and_then(|session| session.collateral) {
            self.carried.take(brought);
        }
        let identified = self.images.judge(evidence).or_else(|why| {
            // an error here is not caused by the image
            self.any.judge(evidence)?;
            Err(why.reworded(|why| format!(
                "{why}\nthe peer does not run {OWN_IMAGE}: if it runs another image of the cluster, name that image in the setting service-policy"
            )))
        })?;
        let cluster = identified.cluster.clone().ok_or_else(|| {
            Kind::Unproven.because("PCR 15 was not quoted, so it names no cluster")
        })?;
        let name = cluster.name();
        if cluster.is_fresh() {
            let text = format!("{name} is zero, so its machine belongs to no cluster");
            return Err(Kind::Measurement.because(text).of(name));
        }
        if let Some(pinned) = self.pinned.filter(|pinned| !cluster.is_of(&pinned.0)) {
            let expected = cluster.kind().after(&pinned.0);
            let refusal = Kind::Measurement.because(format!(
                "{name}: expected {expected}, got {cluster}; its machine belongs to another cluster than the setting cluster-id names"
            ));
            return Err(refusal.of(name).values(expected, cluster));
        }
        // a connection has exactly one proof of the server
        let _ = self.proof.set(ServiceProof {
            cluster,
            by_any_key: self.images.properties().believes_any_tpm,
        });
        Ok(identified)
    }
}

/// The result of verifying a join service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceProof {
    /// The cluster ID's register on the service's machine; it is not zero.
    pub cluster: ClusterRegister,
    /// Whether any key could have signed the evidence: a program without a TPM can claim the same.
    pub by_any_key: bool,
}

impl fmt::Display for ServiceProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.by_any_key {
            "claims (a program without a TPM could, too)"
        } else {
            "proves"
        };
        let (name, cluster) = (self.cluster.name(), &self.cluster);
        write!(
            f,
            "{verb} an accepted image and the cluster with {name} {cluster}"
        )
    }
}

/// See [`ServiceValidator::check_cluster`].
fn check_cluster(
    pinned: Option<ClusterId>,
    proof: Option<&ServiceProof>,
    cluster_id: &[u8; CLUSTER_ID_LEN],
) -> Result<(), TicketFailure> {
    let pinned = || pinned.map(|id| Registers::Pcrs.after(&id.0));
    let proved = proof.map(|proof| proof.cluster.clone());
    match proved.or_else(pinned) {
        Some(expected) if !expected.is_of(cluster_id) => Err(TicketFailure::lasting(format!(
            "sent a ticket of the cluster {}, but {}: expected {} {expected}, got {}",
            hex(cluster_id),
            match proof {
                Some(_) => "its machine belongs to another one",
                None => "the setting cluster-id names another one",
            },
            expected.name(),
            expected.kind().after(cluster_id)
        ))),
        _ => Ok(()),
    }
}

impl Validator for ServiceValidator {
    fn properties(&self) -> Properties {
        Properties {
            takes_collateral: self.takes_collateral,
            ..self.images.properties()
        }
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.images.challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.check(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use verifier::Exception;

    use super::*;

    #[test]
    fn the_register_with_a_machine_s_secret_is_not_one_of_the_image() {
        let registers = |values: &[(u32, u8)]| -> BTreeMap<u32, Measurement> {
            let measured = values.iter().map(|(index, byte)| {
                let expected = vec![*byte; 32];
                (
                    *index,
                    Measurement {
                        expected,
                        warn_only: false,
                    },
                )
            });
            measured.collect()
        };
        let indices = |values| of_image(registers(values)).into_keys().collect::<Vec<_>>();
        // a unified kernel image, GRUB, and a log that does not explain PCR 11
        assert_eq!(indices(&[(4, 1), (7, 1), (9, 2), (11, 3)]), [4, 11]);
        assert_eq!(indices(&[(4, 1), (9, 2), (11, 0), (15, 1)]), [4, 9, 11]);
        assert_eq!(indices(&[(4, 1), (9, 2)]), [4, 9]);
    }

    #[test]
    fn a_policy_of_services_names_an_image() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy.json");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read_policy(&file)
        };
        let zero = "00".repeat(32);
        let policy = read(&format!(
            r#"{{"measurements":{{"4":"{zero}","11":"{zero}","15":"{zero}"}},"initramfs":{{"11":"{}"}}}}"#,
            "11".repeat(32)
        ));
        let policy = policy.unwrap();
        assert!(!policy.knows_stages(), "services are booted systems");
        let registers: Vec<_> = policy.images()[0].measurements().keys().collect();
        assert_eq!(registers, [&4, &11], "PCR 15 is not compared by the policy");
        assert!(!policy.requires_strong());
        // the node's own image is counted too, and test kernels do not have the mark
        let confined = read(&format!(
            r#"{{"measurements":{{"4":"{zero}"}},"acpiTables":"confined","requireConfinedAcpi":true}}"#
        ));
        let error = confined.unwrap_err().to_string();
        assert!(
            error.contains("requireConfinedAcpi: this machine's image has no"),
            "{error}"
        );
        let one = "11".repeat(32);
        let strong = read(&format!(
            r#"{{"measurements":{{"4":"{one}"}},"require":"strong"}}"#
        ));
        let trust = |policy| {
            let (variant, tpm) = (&verifier::variant::ALL[0], "device:/dev/null");
            let tpm = tpm.parse().unwrap();
            ServiceTrust::new(TrustSettings::default(), Some(policy), variant, tpm)
        };
        assert!(trust(strong.unwrap()).unwrap().settings.require_strong);
        let warning = format!(
            r#"{{"measurements":{{"4":{{"expected":"{zero}","warnOnly":true}},"15":"{zero}"}}}}"#
        );
        let only_cluster = format!(r#"{{"measurements":{{"15":"{zero}"}}}}"#);
        for text in [only_cluster, warning] {
            let nothing_left = read(&text).unwrap_err().to_string();
            assert!(nothing_left.contains("no register is enforced"), "{text}");
        }
        let without_loader = read(&format!(r#"{{"measurements":{{"8":"{one}"}}}}"#)).unwrap();
        let error = trust(without_loader.clone()).err().unwrap().to_string();
        assert!(error.contains("does not enforce PCR 4"), "{error}");
        assert!(trust(without_loader.permitting(Exception::AnyImage)).is_ok());
        assert!(matches!(read("{"), Err(Error::File(..))));
        let missing = read_policy(&folder.path().join("none"));
        assert!(matches!(missing, Err(Error::Read(..))));
    }

    #[test]
    fn a_ticket_is_one_of_the_cluster_of_its_service_or_of_the_settings() {
        let proof = |id: &[u8; 32]| ServiceProof {
            cluster: Registers::Pcrs.after(id),
            by_any_key: false,
        };
        let (ours, other) = ([1; 32], [2; 32]);
        assert!(check_cluster(None, None, &ours).is_ok());
        assert!(check_cluster(None, Some(&proof(&ours)), &ours).is_ok());
        let refused = check_cluster(None, Some(&proof(&other)), &ours).unwrap_err();
        assert!(refused.is_lasting && refused.text.contains("belongs to another"));
        // the setting also applies to a service that sends no evidence
        let pinned = Some(ClusterId(ours));
        assert!(check_cluster(pinned, None, &ours).is_ok());
        let refused = check_cluster(pinned, None, &other).unwrap_err();
        assert!(
            refused
                .text
                .contains("the setting cluster-id names another")
        );
    }
}
