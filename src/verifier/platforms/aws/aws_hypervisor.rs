//! The common part of the AWS variants: the document in which AWS's hypervisor signs the PCRs of a
//! machine's NitroTPM, together with a key that the machine chose, and EC2's description of the
//! instance.
//!
//! The document alone proves only that some EC2 instance requested it: anybody with an instance can
//! have any key signed. But a machine whose SHA-384 PCRs are those of a known image sends only its
//! own key. So the key is endorsed if the policy contains these PCR values (`cloud.sha384`).
//!
//! The document contains the ID of the instance. If the policy limits accounts or zones
//! (`cloud.accounts`, `cloud.zones`), a validator with credentials of the account asks EC2 for
//! those of this instance.

use std::sync::Arc;

pub use attest::aws_hypervisor::*;
use base::text;
use hardware::claims::Property;

use crate::ak_certificate::AkRoot;
use crate::document::Base64;
use crate::instance::{CloudInstance, CloudRequirements, ID, Sha384};
use crate::nitro_document::NitroDocument;
use crate::refusal::{Kind, Refusal};
use crate::sources::Sources;
use crate::vtpm::Quoted;
use crate::{PlatformClaims, Policy, PolicyError, hex};
use tpm::Bank;

/// The root certificate for NitroTPMs and Nitro Enclaves.
pub const ROOTS: &[&roots::Root] = &[&roots::AWS_NITRO];

/// Judges by the hypervisor's document, and by EC2's description of the instance.
pub struct AwsHypervisor {
    roots: Vec<AkRoot>,
    demands: CloudRequirements,
    /// The requirements that the hypervisor's document must meet: all except those that only EC2
    /// can answer.
    signed: CloudRequirements,
    sources: Arc<dyn Sources>,
}

impl AwsHypervisor {
    /// Makes a judge by a policy.
    pub fn new(policy: &Policy, sources: &Arc<dyn Sources>) -> Result<AwsHypervisor, PolicyError> {
        let demands = policy.cloud();
        Ok(AwsHypervisor {
            roots: AkRoot::demanded(demands, ROOTS)?,
            signed: CloudRequirements {
                accounts: vec![],
                zones: vec![],
                ..demands.clone()
            },
            demands: demands.clone(),
            sources: sources.clone(),
        })
    }

    /// Returns whether the policy requires a document.
    pub fn is_demanded(&self) -> bool {
        self.demands != CloudRequirements::default()
    }

    /// Returns whether an accepted document proves that the attestation key is in the NitroTPM with
    /// the document's PCRs: an image that the policy knows sends only the key of its own TPM.
    pub fn endorses_keys(&self) -> bool {
        !self.demands.sha384.is_empty()
    }

    /// Returns what a document proves. `instance_id` is the ID that the machine claims, if any.
    pub fn judge(
        &self,
        quoted: &Quoted<'_>,
        document: Option<&Base64>,
        instance_id: Option<&str>,
    ) -> Result<PlatformClaims, Refusal> {
        let document = document.ok_or_else(|| Kind::Unproven.because(
            "the policy requires values that AWS's hypervisor signs (cloud), but the machine sent no attestation document of its NitroTPM: its \
             log says why. If it can make none, remove cloud from the policy, and name its key (attestationKeys)",
        ))?;
        self.judge_document(quoted, &document.0, instance_id)
            .map_err(|refusal| {
                refusal.reworded(|why| format!("the attestation document of the NitroTPM: {why}"))
            })
    }

    fn judge_document(
        &self,
        quoted: &Quoted<'_>,
        document: &[u8],
        instance_id: Option<&str>,
    ) -> Result<PlatformClaims, Refusal> {
        let document = NitroDocument::parse(document)?;
        let root = document.verify(&self.roots, quoted.now)?;
        if document.nonce.as_deref() != Some(&quoted.extra_data) {
            return Err(
                Kind::Nonce.because("it was made for another connection: its nonce does not match")
            );
        }
        if document.public_key.as_ref() != Some(&quoted.spki) {
            return Err(
                Kind::Binding.because("it names another key than the one that signed the quote")
            );
        }
        let module = &document.module;
        let (id, _) = module.split_once("-tpm").ok_or_else(|| {
            Kind::Unproven.because(format!("it is from {module:.80}, which is no NitroTPM"))
        })?;
        if let Some(said) = instance_id.filter(|said| *said != id) {
            let said = text::quoted(said, 80);
            return Err(Kind::Binding.because(format!(
                "it is from {module:.80}, but the machine says that it is {said}"
            )));
        }
        let instance = CloudInstance {
            id: Some(id.into()),
            ..CloudInstance::default()
        };
        self.signed.judge(&instance)?;
        check_quoted(&document, quoted)?;
        check_signed(&document, &self.demands.sha384)?;
        let nonce = "nonce of the connection: nonce".to_owned();
        Ok(PlatformClaims {
            technology: "AWS NitroTPM".into(),
            signed_by: root.into(),
            properties: instance.properties(),
            chip: instance.id,
            tcb: vec![],
            bound: if self.endorses_keys() {
                vec!["attestation key: public_key".into(), nonce]
            } else {
                vec![nonce]
            },
        })
    }

    /// Asks EC2 about the instance in the claims, if the policy has requirements that only EC2 can
    /// answer.
    pub fn confirm(&self, mut platform: PlatformClaims) -> Result<PlatformClaims, Refusal> {
        if self.signed == self.demands {
            return Ok(platform);
        }
        let is_id = |property: &Property| property.name == ID;
        let id = platform.properties.iter().find(|one| is_id(one));
        let id = id.ok_or_else(|| Kind::Unproven.because("the claims name no instance of EC2"))?;
        let instance = self.sources.ec2_instance(&id.value)?;
        self.demands.judge(&instance)?;
        platform.properties.retain(|one| !is_id(one));
        platform.properties.extend(instance.properties());
        Ok(platform)
    }
}

/// Checks that the document has all PCRs of one of these sets. The error describes the set with the
/// fewest differences.
fn check_signed(document: &NitroDocument, sets: &[Sha384]) -> Result<(), Refusal> {
    let others = |set: &Sha384| -> Vec<Refusal> {
        let line = |(index, expected): (&u32, &String)| {
            let got = document.pcrs.get(index).map(|value| hex(value));
            let is_other = got.as_ref() != Some(expected);
            let got = got.unwrap_or_else(|| "nothing".into());
            let text = format!("SHA-384 PCR {index}: expected {expected}, got {got}");
            let refusal = Kind::Measurement
                .because(text)
                .of(format!("SHA-384 PCR {index}"));
            is_other.then(|| refusal.values(expected, got))
        };
        set.iter().filter_map(line).collect()
    };
    let nearest = sets.iter().map(others).min_by_key(Vec::len);
    // one line, as this is a part of a sentence
    Refusal::join(nearest.unwrap_or_default())
        .map_err(|refusal| refusal.reworded(|lines| lines.replace('\n', "; ")))
}

/// Checks that the document's values equal those that the TPM quoted, if it quoted that bank.
fn check_quoted(document: &NitroDocument, quoted: &Quoted<'_>) -> Result<(), Refusal> {
    let Some(quoted) = quoted.pcrs_of(Bank::Sha384)? else {
        return Ok(());
    };
    for (index, value) in &document.pcrs {
        if quoted.get(index).is_some_and(|quoted| quoted != value) {
            let text = format!("its PCR {index} is not the one that the TPM quoted");
            return Err(Kind::Binding
                .because(text)
                .of(format!("SHA-384 PCR {index}")));
        }
    }
    Ok(())
}
