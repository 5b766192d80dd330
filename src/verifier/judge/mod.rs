//! The judge of attested TLS: a peer is accepted if a validator accepts its document, and the
//! document is bound to this connection.

pub mod self_signed;
pub mod wire;

use std::sync::Arc;

use attest::session;
use attest::{Accepted, ConnectionJudge, Form, Judge, KeyName, PeerRole, Presented, Refused};
use base::der::Malformed;
use base::text::hex;
use base::x509;
use proto::attested;
use tpm::Bank;

use crate::refusal::{Kind, Refusal};
use crate::sha256;
use crate::validator::{
    CertifiedKey, Claims, CredentialChallenge, Evidence, Identified, Session, Validator,
};

/// The field in the refusal of a peer that proves itself by another attestation variant than the verifier expects.
pub const OTHER_VARIANT: &str = "variant";

/// The PCR banks of which quotes are requested: policies have values of this one.
const BANKS: [Bank; 1] = [Bank::Sha256];

/// Returns the judge of a client or server that accepts only peers whose document this validator
/// accepts.
pub fn judge(validator: Arc<dyn Validator>) -> Arc<dyn Judge> {
    Arc::new(Validators(vec![validator]))
}

/// For tests and benches: returns the judge of a client or server that accepts only peers whose document one of the
/// `validators` accepts. **Without validators there is no judge: every peer is accepted.**
pub fn judge_of_any(validators: Vec<Arc<dyn Validator>>) -> Option<Arc<dyn Judge>> {
    (!validators.is_empty()).then(|| Arc::new(Validators(validators)) as Arc<dyn Judge>)
}

/// Returns the refusal in an error of attested TLS.
pub fn refusal(refused: Refused) -> Refusal {
    match refused.downcast::<Refusal>() {
        Ok(refusal) => *refusal,
        Err(other) => Kind::Unproven.because(other.to_string()),
    }
}

struct Validators(Vec<Arc<dyn Validator>>);

impl Judge for Validators {
    fn certificate(&self, certificate: &[u8], nonce: &[u8]) -> Result<Accepted, Refused> {
        let identified = self.of_connection().verify(certificate, nonce)?;
        Ok(accepted(Form::Old, identified))
    }

    fn no_document(&self) -> Refused {
        self.no_document_of(&[]).into()
    }

    fn connection(&self, peers: &'static [PeerRole]) -> Box<dyn ConnectionJudge> {
        Box::new(OfConnection {
            validators: self.of_connection(),
            peers,
            challenge: None,
        })
    }
}

fn accepted(form: Form, identified: Identified) -> Accepted {
    Accepted {
        machine: identified.machine,
        claims: Arc::new(Claims {
            form,
            stage: identified.stage,
            image: identified.image,
            platform: identified.platform,
        }),
    }
}

impl Validators {
    /// Returns the validators for one connection, whose policies no longer change.
    fn of_connection(&self) -> Validators {
        let fixed = |validator: &Arc<dyn Validator>| {
            let of_connection = validator.of_connection();
            of_connection.unwrap_or_else(|| validator.clone())
        };
        Validators(self.0.iter().map(fixed).collect())
    }

    /// Returns the validator of the variant with this OID.
    fn of(&self, oid: &[u8]) -> Option<&Arc<dyn Validator>> {
        let mut all = self.0.iter();
        all.find(|validator| validator.properties().oid == oid)
    }

    /// Validates the certificate of a peer; `nonce` is the nonce that we sent to the peer. Returns
    /// the content of the document.
    ///
    /// The certificate must be signed by its own key. It must have no unknown critical extension,
    /// and no extended key usage without serverAuth (RFC 5280 §4.2.1.12; for clients too, as in
    /// Constellation). The first extension of a known variant is used: its document must be valid
    /// for the nonce and bind the key of this certificate. TLS itself verifies that the peer has the
    /// private key.
    fn verify(&self, certificate: &[u8], nonce: &[u8]) -> Result<Identified, Refusal> {
        let public_key = self_signed::verify(&certificate.into())?;
        let extensions = x509::extensions(certificate).map_err(|Malformed| {
            Kind::Malformed.because("the extensions of its certificate are malformed")
        })?;
        let decisive = extensions
            .iter()
            .find_map(|extension| Some((self.of(extension.oid)?, extension.value)));
        let (validator, document) = decisive.ok_or_else(|| {
            let oids: Vec<_> = extensions.iter().map(|extension| extension.oid).collect();
            self.no_document_of(&oids)
        })?;

        let evidence = Evidence::new(document, nonce);
        evidence.check_form(&validator.properties())?;
        let identified = validator.judge(&evidence)?;
        if identified.user_data != sha256(&[&public_key]) {
            return Err(Kind::Binding
                .because("its attestation document is for another key than its certificate's"));
        }
        Ok(identified)
    }

    /// Returns the refusal of a peer whose documents, with these OIDs, are of no accepted variant.
    fn no_document_of(&self, oids: &[&[u8]]) -> Refusal {
        /// Maximum number of OIDs in the error; the peer decides how many there are.
        const SHOWN: usize = 4;
        let hex = |oid: &[u8]| hex(&oid[..oid.len().min(32)]);
        let expected: Vec<_> = (self.0.iter())
            .map(|validator| hex(validator.properties().oid))
            .collect();
        let got: Vec<_> = oids.iter().take(SHOWN).map(|oid| hex(oid)).collect();
        let refusal = Kind::Unproven.because(format!(
            "it has no attestation document of an accepted variant (expected OID {}, got {})",
            expected.join(" or "),
            if got.is_empty() {
                "no document".into()
            } else {
                got.join(", ")
            }
        ));
        if got.is_empty() {
            refusal
        } else {
            // the machine proves itself by another variant than the caller expects
            refusal.of(OTHER_VARIANT)
        }
    }
}

/// The judge of one connection of the strong form.
struct OfConnection {
    validators: Validators,
    /// The roles in which the peer may prove itself.
    peers: &'static [PeerRole],
    /// The credential challenge that this end sent.
    challenge: Option<CredentialChallenge>,
}

impl ConnectionJudge for OfConnection {
    fn demand(&self) -> attested::Demand {
        let mut all = self.validators.0.iter().map(|it| it.properties());
        attested::Demand {
            banks: BANKS.map(|bank| bank as u32).to_vec(),
            challenges: all.clone().any(|it| it.challenges),
            collateral: all.any(|it| it.takes_collateral),
        }
    }

    fn challenge(
        &mut self,
        peer: &attested::Identity,
    ) -> Result<Option<attested::Challenge>, Refused> {
        if let Some(validator) = self.validators.of(&peer.variant) {
            self.challenge = validator.challenge(&wire::read_identity(peer))?;
        }
        let challenge = self.challenge.as_ref();
        Ok(challenge.map(|it| wire::credential(it.kind, &it.credential)))
    }

    fn proof(&self, presented: &Presented<'_>) -> Result<Accepted, Refused> {
        Ok(accepted(Form::Strong, self.verify(presented)?))
    }
}

impl OfConnection {
    fn verify(&self, presented: &Presented<'_>) -> Result<Identified, Refusal> {
        let Some(identity) = presented.identity else {
            let why = if self.peers.contains(&PeerRole::JoinService) {
                "it sent no evidence: if it is a join service, its host may give it none (its log says why)"
            } else {
                "it sent no attestation document"
            };
            return Err(Kind::Unproven.because(why));
        };
        let validator = self.validators.of(&identity.variant);
        let validator =
            validator.ok_or_else(|| self.validators.no_document_of(&[&identity.variant]))?;
        let challenge = self.challenge.as_ref();
        let secret = challenge.map_or(&[][..], |challenge| &challenge.secret[..]);
        let peer = wire::read_identity(identity);
        let certified = challenge.map(|challenge| CertifiedKey {
            name: KeyName::of(&peer.key),
            tpm: challenge.tpm.clone(),
        });
        let identified = validator.judge(&Evidence {
            certified: certified.as_ref(),
            session: Some(Session {
                digest: presented.session,
                secret,
                peer: &peer,
                collateral: presented.proof.collateral.as_ref(),
            }),
            ..Evidence::new(&presented.proof.document, presented.nonce)
        })?;
        match role_of(&identified.user_data, presented.session, secret) {
            Some(role) if self.peers.contains(&role) => Ok(identified),
            Some(role) => Err(Kind::Binding.because(format!(
                "its attestation document is that of a {}, expected that of a {}",
                role.name(),
                self.peers[0].name()
            ))),
            None => Err(Kind::Nonce.because("its attestation document is for another connection")),
        }
    }
}

/// Returns the role that these user data name for this connection; `None` if they belong to another
/// connection.
pub fn role_of(user_data: &[u8], session: &[u8; 32], secret: &[u8]) -> Option<PeerRole> {
    let names = |role: &PeerRole| session::user_data(*role, session, secret) == user_data;
    let roles = [PeerRole::Client, PeerRole::Server, PeerRole::JoinService];
    roles.into_iter().find(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validator::Properties;
    use attest::MachineIdentity;

    /// A validator whose policy has changed since the connection began, from the policy `before`.
    struct Changed {
        requires_strong: bool,
        before: Option<Arc<dyn Validator>>,
    }

    impl Validator for Changed {
        fn properties(&self) -> Properties {
            Properties {
                oid: &[0x06, 0x01, 0x2a],
                challenges: self.requires_strong,
                takes_collateral: false,
                requires_strong: self.requires_strong,
                believes_any_tpm: false,
            }
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            Ok(None)
        }

        fn judge(&self, _: &Evidence<'_>) -> Result<Identified, Refusal> {
            Ok(Identified::default())
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            self.before.clone()
        }
    }

    #[test]
    fn a_connection_is_judged_by_one_policy() {
        let before = Changed {
            requires_strong: false,
            before: None,
        };
        let changed = Changed {
            requires_strong: true,
            before: Some(Arc::new(before)),
        };
        let validators = Validators(vec![Arc::new(changed)]);
        let connection = validators.connection(&[PeerRole::Client]);
        assert!(!connection.demand().challenges);
        // both forms of attested TLS use these
        let fixed = validators.of_connection();
        assert!(!fixed.0[0].properties().requires_strong);
    }

    #[test]
    fn a_refusal_of_another_type_keeps_its_text() {
        let malformed = Kind::Malformed.because("too short");
        assert_eq!(refusal(malformed.into()).kind, Kind::Malformed);
        let other = refusal("a text".into());
        assert_eq!(other.kind, Kind::Unproven);
        assert_eq!(other.to_string(), "a text");
    }
}
