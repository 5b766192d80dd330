//! What a node demands of a join service before it believes a ticket.
//!
//! In the strong form of attested TLS the join service proves the machine on which it runs. The node accepts a member of a cluster
//! that runs the same image as the node itself: the node compares the registers of boot loader, kernel, initrd and command line with its
//! own. PCR 15 names the cluster, and a ticket of another cluster is refused.
//!
//! Registers alone prove no machine: a program without a TPM can sign any registers with a key of its own. A fresh node with
//! `require=strong` therefore demands more ([`ServiceTrust::demand`]), which `bootstrapper` finds out (`src/bootstrapper/platform.rs`).
//! A node that rejoins needs no more, because the key must open its disk.
//!
//! | the service | a fresh node | a node that rejoins |
//! |---|---|---|
//! | proves the node's image, or one of `service-policy` | believes it | believes it |
//! | proves another image | refuses it | believes it, and says so: the key must open the disk anyway |
//! | proves no cluster, or another one than `cluster-id` | refuses it | refuses it |
//! | proves nothing | believes it, and says so; with `require=strong` refuses it | the same |
//! | proves its registers with any key | believes it, and says so; with `require=strong` only if it is of the cluster `cluster-id` | believes it |

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use attest::attestation::carried::Carried;
use attest::attestation::sources::Sources;
use attest::attestation::{
    ClusterRegister, Composite, Evidence, Identified, Image, Measurement, Policy, PolicyError,
    Registers, Stage, ValidateError, Validator, Variant, unhex,
};
use base::crypto::CLUSTER_ID_LEN;

/// The registers of boot loader, kernel, initrd and kernel command line (UAPI group, "Linux TPM PCR Registry"). All machines with one
/// image have the same values. The others depend on firmware and disks.
const OF_IMAGE: &[u32] = &[4, 8, 9, 11, 12, 13];
/// The same of a TDX machine: MRTD is the firmware, RTMR 1 the boot loader or the unified kernel image, RTMR 2 what that loads.
const OF_TDX_IMAGE: &[u32] = &[0, 2, 3];
/// The name of the node's own image in messages.
pub(crate) const OWN_IMAGE: &str = "this machine's image";

/// The ID of a cluster, as the setting `cluster-id` has it: 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterId(pub [u8; CLUSTER_ID_LEN]);

/// The settings by which a node judges join services.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The only cluster whose services are accepted.
    pub cluster: Option<ClusterId>,
    /// The images that are accepted beside the node's own.
    pub policy: Option<Policy>,
    /// Whether a service that proves nothing is refused, whatever the policy says.
    pub require_strong: bool,
}

/// What this node demands of a join service.
pub struct ServiceTrust {
    /// The settings of the node.
    pub settings: Settings,
    /// The variant of the node, and of the services.
    pub variant: &'static Variant,
    tpm: tpm::Location,
    stage: Stage,
    /// The accepted images. They are read from the TPM once.
    images: Mutex<Option<Policy>>,
}

/// What a join service proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The register of the cluster ID of its machine, which is not zero.
    pub cluster: ClusterRegister,
    /// Why its image is not one of those that this node knows.
    pub other_image: Option<String>,
    /// Whether any key could have signed this: a program without a TPM can claim the same.
    pub by_any_key: bool,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.by_any_key {
            false => "proves",
            true => "claims, as a program without a TPM could,",
        };
        let image = match self.other_image {
            None => "an accepted image, and ",
            Some(_) => "",
        };
        let (name, cluster) = (self.cluster.name(), &self.cluster);
        write!(f, "{verb} {image}the cluster with {name} {cluster}")
    }
}

impl std::str::FromStr for ClusterId {
    type Err = String;

    fn from_str(text: &str) -> Result<ClusterId, String> {
        let id = unhex(text).map(ClusterId);
        id.ok_or_else(|| format!("expected {} hexadecimal digits", 2 * CLUSTER_ID_LEN))
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Reads the file of the setting `service-policy`.
pub fn read_policy(file: &Path) -> Result<Policy, String> {
    let wrong = |why: &dyn fmt::Display| format!("service-policy {}: {why}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
    let policy = Policy::from_json(&text)
        .and_then(Policy::without_endorsement_roots)
        .map_err(|error| wrong(&error))?;
    let policy = policy.at(Stage::Booted).of_any_cluster();
    for image in policy.images() {
        if image.measurements().values().all(|it| it.warn_only) {
            return Err(wrong(&format_args!(
                "{image} enforces no register but PCR 15, so any image would be accepted"
            )));
        }
    }
    // there must be room for the node's own image, and it must meet the requirements of images
    own_image(policy.images()[0].measurements().clone())
        .and_then(|own| policy.clone().and_image(OWN_IMAGE, own))
        .map_err(|error| wrong(&error))?;
    Ok(policy)
}

/// Returns this machine's image with these registers, and with the mark of its kernel if that confines the host's ACPI tables.
fn own_image(registers: BTreeMap<u32, Measurement>) -> Result<Image, PolicyError> {
    let own = Policy::new(registers)?;
    let own = match crate::settings::trusted_acpi() {
        None => own.with_confined_kernel(),
        Some(_) => own,
    };
    Ok(own.images()[0].clone())
}

impl ServiceTrust {
    /// Makes the demand of a node at `stage` of its boot, whose TPM is at `tpm`.
    pub fn new(
        settings: Settings,
        variant: &'static Variant,
        tpm: tpm::Location,
        stage: Stage,
    ) -> ServiceTrust {
        ServiceTrust {
            settings,
            variant,
            tpm,
            stage,
            images: Mutex::default(),
        }
    }

    /// Returns whether a service that proves nothing is refused.
    pub fn requires_strong(&self) -> bool {
        let policy = self.settings.policy.as_ref();
        self.settings.require_strong || policy.is_some_and(Policy::requires_strong)
    }

    /// Returns the register that members of the cluster of a ticket must have; `None` if nobody knows.
    pub fn cluster_of_ticket(&self, proof: Option<&Proof>) -> Option<ClusterRegister> {
        let pinned = || self.settings.cluster.map(|id| Registers::Pcrs.after(&id.0));
        proof.map(|proof| proof.cluster.clone()).or_else(pinned)
    }

    /// Returns the validator of one connection. The error may pass: the TPM does not answer.
    pub fn judge(&self) -> Result<Arc<Judge>, String> {
        let images = self.images()?;
        let carried = Arc::new(Carried::default());
        let sources: Arc<dyn Sources> = carried.clone();
        let validator = |policy| {
            self.variant
                .validator_for(policy, &sources)
                .map_err(|error| error.to_string())
        };
        let any = validator(images.clone().of_any_image())?;
        Ok(Arc::new(Judge {
            takes_collateral: self.variant.collateral.is_some(),
            carried,
            images: validator(images)?,
            any,
            believes_any: self.stage == Stage::Initramfs,
            pinned: self.settings.cluster,
            proof: OnceLock::new(),
        }))
    }

    /// Demands this policy from now on, in place of [`ServiceTrust::images`].
    pub fn demand(&mut self, images: Policy) {
        self.images = Mutex::new(Some(images));
    }

    /// Returns the accepted images: this machine's own, and those of the settings.
    pub fn images(&self) -> Result<Policy, String> {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(images) = &*images {
            return Ok(images.clone());
        }
        let measured = (self.variant.measure)(&self.tpm, self.stage)
            .map_err(|error| format!("this machine's own registers cannot be read: {error}"))?;
        let own = of_image(measured.booted);
        let accepted = match &self.settings.policy {
            None => Policy::new(own),
            Some(policy) => own_image(own).and_then(|own| policy.clone().and_image(OWN_IMAGE, own)),
        };
        let accepted = accepted.map_err(|error| format!("setting service-policy: {error}"))?;
        Ok(images.insert(accepted).clone())
    }

    /// Checks that a ticket is one of the cluster of the service that sent it, or of the setting `cluster-id`.
    pub fn check_cluster(
        &self,
        proof: Option<&Proof>,
        cluster_id: &[u8; CLUSTER_ID_LEN],
    ) -> Result<(), String> {
        match self.cluster_of_ticket(proof) {
            Some(expected) if !expected.is_of(cluster_id) => Err(format!(
                "sent a ticket of the cluster {}, but {}: expected {} {expected}, got {}",
                ClusterId(*cluster_id),
                match proof {
                    Some(_) => "its machine belongs to another one",
                    None => "the setting cluster-id names another one",
                },
                expected.name(),
                expected.kind().after(cluster_id)
            )),
            _ => Ok(()),
        }
    }
}

/// Returns the registers that are equal on all machines with one image.
fn of_image(mut registers: BTreeMap<u32, Measurement>) -> BTreeMap<u32, Measurement> {
    let is_tdx = |it: &Measurement| Registers::of(&it.expected) == Some(Registers::Rtmrs);
    let of_image = match registers.values().any(is_tdx) {
        true => OF_TDX_IMAGE,
        false => OF_IMAGE,
    };
    registers.retain(|index, _| of_image.contains(index));
    let uki = registers.get(&11);
    if uki.is_some_and(|uki| uki.expected != [0; 32]) {
        // systemd-stub from 261 on adds a secret of each machine to the initrd in PCR 9; PCR 11 has kernel, initrd and command line
        registers.remove(&9);
    }
    registers
}

/// Judges the proof of one join service.
pub struct Judge {
    /// Whether the variant needs what the node does not fetch.
    takes_collateral: bool,
    /// What the service brought of it: the sources of the validators.
    carried: Arc<Carried>,
    images: Arc<dyn Validator>,
    /// Accepts a machine with any image.
    any: Arc<dyn Validator>,
    /// Whether a machine with any image is believed: only for a rejoin.
    believes_any: bool,
    pinned: Option<ClusterId>,
    proof: OnceLock<Proof>,
}

impl Judge {
    /// Returns what the service proved; `None` if it proved nothing.
    pub fn proof(&self) -> Option<Proof> {
        self.proof.get().cloned()
    }

    fn check(&self, evidence: &Evidence<'_>) -> Result<Identified, String> {
        let session = evidence.session.as_ref();
        if let Some(brought) = session.and_then(|session| session.collateral) {
            self.carried.take(brought);
        }
        let (identified, other_image) = match evidence.judged_by(&*self.images) {
            Ok(identified) => (identified, None),
            Err(why) => {
                // an error here has another reason than the image
                let identified = evidence.judged_by(&*self.any);
                let identified = identified.map_err(|error| error.to_string())?;
                if !self.believes_any {
                    return Err(format!(
                        "{why}\nit is not {OWN_IMAGE}: if it is another image of the cluster, name it in the setting service-policy"
                    ));
                }
                (identified, Some(why.to_string()))
            }
        };
        let cluster = identified
            .cluster
            .clone()
            .ok_or("PCR 15 was not quoted, so it names no cluster")?;
        let name = cluster.name();
        if cluster.is_fresh() {
            return Err(format!(
                "{name} is zero, so its machine belongs to no cluster"
            ));
        }
        if let Some(pinned) = self.pinned.filter(|pinned| !cluster.is_of(&pinned.0)) {
            let expected = cluster.kind().after(&pinned.0);
            return Err(format!(
                "{name}: expected {expected}, got {cluster}; its machine belongs to another cluster than the setting cluster-id names"
            ));
        }
        // a connection has exactly one proof of the server
        let _ = self.proof.set(Proof {
            cluster,
            other_image,
            by_any_key: self.images.believes_any_tpm(),
        });
        Ok(identified)
    }
}

impl Composite for Judge {
    fn lead(&self) -> Arc<dyn Validator> {
        self.images.clone()
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        self.check(evidence)
            .map_err(|why| ValidateError(why.into()))
    }

    fn takes_collateral(&self) -> bool {
        self.takes_collateral
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_id_has_64_hexadecimal_digits() {
        let id: ClusterId = "0aFF".repeat(16).parse().unwrap();
        assert_eq!(id.0[..2], [0x0a, 0xff]);
        assert_eq!(id.to_string(), "0aff".repeat(16));
        for text in [
            "",
            "0a",
            &"0g".repeat(32),
            &"+1".repeat(32),
            &"é".repeat(32),
        ] {
            let error = text.parse::<ClusterId>().unwrap_err();
            assert_eq!(error, "expected 64 hexadecimal digits", "{text}");
        }
    }

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
        // this node's own image is one more, and no kernel that runs tests has the mark
        let confined = read(&format!(
            r#"{{"measurements":{{"4":"{zero}"}},"acpiTables":"confined","requireConfinedAcpi":true}}"#
        ));
        let error = confined.unwrap_err();
        assert!(
            error.contains("requireConfinedAcpi: this machine's image has no"),
            "{error}"
        );
        let strong = read(&format!(
            r#"{{"measurements":{{"4":"{zero}"}},"require":"strong"}}"#
        ));
        let settings = Settings {
            policy: Some(strong.unwrap()),
            ..Settings::default()
        };
        let variant = &attest::attestation::variant::ALL[0];
        let tpm = "device:/dev/null".parse().unwrap();
        assert!(ServiceTrust::new(settings, variant, tpm, Stage::Booted).requires_strong());
        let warning = format!(
            r#"{{"measurements":{{"4":{{"expected":"{zero}","warnOnly":true}},"15":"{zero}"}}}}"#
        );
        for (text, why) in [
            (
                format!(r#"{{"measurements":{{"15":"{zero}"}}}}"#),
                "no register but PCR 15",
            ),
            (warning, "no register but PCR 15"),
            ("{".into(), "service-policy"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(read_policy(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_ticket_is_one_of_the_cluster_of_its_service_or_of_the_settings() {
        let trust = |cluster| {
            let settings = Settings {
                cluster,
                ..Settings::default()
            };
            let tpm = "device:/dev/null".parse().unwrap();
            ServiceTrust::new(
                settings,
                &attest::attestation::variant::ALL[0],
                tpm,
                Stage::Booted,
            )
        };
        let proof = |id: &[u8; 32]| Proof {
            cluster: Registers::Pcrs.after(id),
            other_image: None,
            by_any_key: false,
        };
        let (ours, other) = ([1; 32], [2; 32]);
        let open = trust(None);
        assert!(open.check_cluster(None, &ours).is_ok());
        assert!(open.check_cluster(Some(&proof(&ours)), &ours).is_ok());
        let refused = open.check_cluster(Some(&proof(&other)), &ours).unwrap_err();
        assert!(refused.contains("belongs to another"), "{refused}");
        // the setting counts for a service that proves nothing too
        let pinned = trust(Some(ClusterId(ours)));
        assert!(pinned.check_cluster(None, &ours).is_ok());
        let refused = pinned.check_cluster(None, &other).unwrap_err();
        assert!(
            refused.contains("the setting cluster-id names another"),
            "{refused}"
        );
    }
}
