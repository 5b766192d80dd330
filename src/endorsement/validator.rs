//! The validator that requires certified attestation keys.

use std::sync::Arc;

use rustls::pki_types::UnixTime;
use zeroize::Zeroizing;

use tpm::{EndorsementKind, KeyEndorsement};
use verifier::refusal::Kind;
use verifier::sources::Sources;
use verifier::stage::validator_at_any_stage;
use verifier::{
    CredentialChallenge, Evidence, Identified, KeyName, MachineIdentity, Policy, PolicyError,
    Properties, Refusal, Validator, Variant,
};

use crate::credential::EndorsementKey;
use crate::roots::TpmRoot;
use crate::{attestation_key, certificate, model};

/// TPM_ALG_SHA256, with which the Name of every accepted key starts.
const ALG_SHA256: [u8; 2] = [0x00, 0x0b];
/// The templates in the order in which a credential is made for them: a TPM makes an ECC key in
/// milliseconds, an RSA key in up to several seconds.
const PREFERRED: [EndorsementKind; 3] = [
    EndorsementKind::P256,
    EndorsementKind::P384,
    EndorsementKind::Rsa2048,
];

/// Returns the validator of a policy, for machines at any stage of their boot if the policy knows
/// stages. An error names the root in the policy that cannot be read, or why the policy does not say what its machines run.
pub fn validator(
    variant: &Variant,
    policy: Policy,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, PolicyError> {
    let judge = validator_at_any_stage(variant, policy.clone(), sources)?;
    certifying(judge, &policy, sources)
}

/// Returns a validator that judges like `inner`, and also requires that the roots in `policy`
/// certify the attestation key.
pub fn certifying(
    inner: Arc<dyn Validator>,
    policy: &Policy,
    sources: &Arc<dyn Sources>,
) -> Result<Arc<dyn Validator>, PolicyError> {
    if policy.endorsement_roots().is_empty() {
        return Ok(inner);
    }
    let roots = policy
        .endorsement_roots()
        .iter()
        .map(|entry| TpmRoot::parse(entry))
        .collect::<Result<_, _>>()
        .map_err(|error: PolicyError| error.within("endorsementRoots"))?;
    let listed = policy.keys().iter().copied();
    Ok(Arc::new(Certifying {
        inner,
        roots,
        sources: sources.clone(),
        exempt: listed.filter(|_| policy.tpm().is_empty()).collect(),
    }))
}

struct Certifying {
    inner: Arc<dyn Validator>,
    roots: Vec<TpmRoot>,
    sources: Arc<dyn Sources>,
    /// The keys that need no certificate: those that the policy lists, if it requires nothing of their TPMs.
    exempt: Vec<KeyName>,
}

impl Certifying {
    fn make_challenge(
        &self,
        peer: &MachineIdentity,
        time: UnixTime,
    ) -> Result<Option<CredentialChallenge>, Refusal> {
        let key = &peer.key;
        if self.exempt.contains(&KeyName::of(key)) {
            return Ok(None);
        }
        attestation_key::check(key).map_err(|why| Kind::Unproven.because(why))?;
        let name = [&ALG_SHA256[..], digest(key).as_ref()].concat();
        let mut why = vec![];
        for kind in PREFERRED {
            for endorsement in peer.endorsements.iter().filter(|one| one.kind == kind) {
                match self.verify(endorsement, time) {
                    Ok((key, root)) => {
                        let secret = Zeroizing::new(base::crypto::random::<32>());
                        return Ok(Some(CredentialChallenge {
                            kind,
                            credential: key.make_credential(&name, &secret)?,
                            secret,
                            certified_by: root.into(),
                            tpm: model::named(&endorsement.certificate),
                        }));
                    }
                    Err(refusal) => why.push(refusal.reworded(|why| {
                        format!(
                            "the certificate of its endorsement key ({kind:?}) is refused: {why}"
                        )
                    })),
                }
            }
        }
        verifier::Refusal::join(why)?;
        Err(Kind::Unproven.because(
            "the policy requires a certified attestation key, but its TPM has no certificate of an endorsement key with RSA 2048, P-256 or P-384. A virtual \
                     TPM gets one from swtpm_setup --create-ek-cert; else add the name of its attestation key to the policy \
                     (attestationKeys)",
        ))
    }
}

impl Certifying {
    /// Verifies the certificate of an endorsement key, if necessary with the certificate of its
    /// issuer from the sources.
    fn verify(
        &self,
        endorsement: &KeyEndorsement,
        time: UnixTime,
    ) -> Result<(EndorsementKey, &str), Refusal> {
        let refused = match certificate::verify(endorsement, &self.roots, time) {
            Err(refused) if certificate::is_of_endorsement_key(endorsement) => refused,
            result => return result,
        };
        let issuer = match self.sources.issuer(&endorsement.certificate) {
            Ok(Some(issuer)) => issuer,
            Ok(None) => return Err(refused),
            Err(missing) => return Err(refused.reworded(|why| format!("{why}; {missing}"))),
        };
        let mut with_issuer = endorsement.clone();
        with_issuer.chain.push(issuer);
        let verified = certificate::verify(&with_issuer, &self.roots, time)?;
        self.sources.keep_issuer(&endorsement.certificate);
        Ok(verified)
    }
}

fn digest(bytes: &[u8]) -> ring::digest::Digest {
    ring::digest::digest(&ring::digest::SHA256, bytes)
}

impl Validator for Certifying {
    fn properties(&self) -> Properties {
        Properties {
            challenges: true,
            ..self.inner.properties()
        }
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.make_challenge(peer, UnixTime::now())
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        self.inner.judge(evidence)
    }

    /// The roots are fixed; a policy that changes makes another validator.
    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}
