//! A machine's evidence, and everything that is needed to judge it again: `firstlight verify
//! --save` writes it to a file, and `--evidence` reads it.

use std::path::Path;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::shell::{
    error::Error,
    files::{self, FileError},
};
use proto::verify::USER_DATA;
use tpm::{EndorsementKind, KeyEndorsement};
use verifier::refusal::Kind;
use verifier::{
    CertifiedKey, Evidence, Identified, KeyName, MachineIdentity, PeerRole, Refusal, Session,
    Validator, Variant, role_of,
};

/// The version of the file.
const VERSION: u32 = 1;

/// The form in which evidence came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AtlsForm {
    /// Received in the strong form of attested TLS.
    Strong,
    /// Received in the old form of attested TLS.
    Old,
    /// Received from a verification service of Constellation, without TLS.
    Plain,
}

impl AtlsForm {
    /// Returns the name in the output.
    pub fn name(self) -> &'static str {
        match self {
            AtlsForm::Strong => "strong",
            AtlsForm::Old => "old",
            AtlsForm::Plain => "plain",
        }
    }
}

/// What a machine presented.
#[derive(Debug, Clone)]
pub struct PresentedEvidence {
    document: Vec<u8>,
    nonce: Vec<u8>,
    /// The values to which a document of the strong form is bound.
    session: Option<Bound>,
    is_plain: bool,
}

/// As [`Session`].
#[derive(Debug, Clone)]
struct Bound {
    digest: [u8; 32],
    secret: Vec<u8>,
    peer: MachineIdentity,
}

impl PresentedEvidence {
    /// Keeps what attested TLS received.
    pub fn of(evidence: &Evidence<'_>) -> PresentedEvidence {
        let bound = |session: Session<'_>| Bound {
            digest: *session.digest,
            secret: session.secret.into(),
            peer: session.peer.clone(),
        };
        PresentedEvidence {
            document: evidence.document.into(),
            nonce: evidence.nonce.into(),
            session: evidence.session.map(bound),
            is_plain: false,
        }
    }

    /// Keeps what a verification service sent.
    pub fn plain(document: Vec<u8>, nonce: Vec<u8>) -> PresentedEvidence {
        PresentedEvidence {
            document,
            nonce,
            session: None,
            is_plain: true,
        }
    }

    /// Returns how it came.
    pub fn channel(&self) -> AtlsForm {
        match (&self.session, self.is_plain) {
            (Some(_), _) => AtlsForm::Strong,
            (None, true) => AtlsForm::Plain,
            (None, false) => AtlsForm::Old,
        }
    }

    /// Returns the attestation document.
    pub fn document(&self) -> &[u8] {
        &self.document
    }

    /// Returns what the document proves to this validator; ignores what it is bound to.
    pub fn identified_by(&self, validator: &dyn Validator) -> Option<Identified> {
        let evidence = Evidence::new(&self.document, &self.nonce);
        validator.judge(&evidence).ok()
    }

    /// Returns the role in which the machine proves itself with these user data.
    pub fn role(&self, identified: &Identified) -> Option<PeerRole> {
        let bound = self.session.as_ref()?;
        role_of(&identified.user_data, &bound.digest, &bound.secret)
    }

    /// Judges the document as attested TLS does, with the session that was kept. A file does not
    /// prove when it was written.
    pub fn judged_by(&self, validator: &dyn Validator) -> Result<Identified, Refusal> {
        let mut evidence = Evidence::new(&self.document, &self.nonce);
        let Some(bound) = &self.session else {
            evidence.check_form(&validator.properties())?;
            let identified = validator.judge(&evidence)?;
            return if self.is_plain && identified.user_data != USER_DATA {
                let why = "its attestation document is not one of a verification service";
                Err(Kind::Nonce.because(why))
            } else {
                Ok(identified)
            };
        };
        let peer = &bound.peer;
        let challenge = validator.challenge(peer)?;
        // the user data cover the secret, so the TPM with both keys has decrypted it
        let challenge = challenge.filter(|_| !bound.secret.is_empty());
        let certified = challenge.map(|challenge| CertifiedKey {
            name: KeyName::of(&peer.key),
            tpm: challenge.tpm,
        });
        evidence.certified = certified.as_ref();
        evidence.session = Some(Session {
            digest: &bound.digest,
            secret: &bound.secret,
            peer,
            // a program that judges a file fetches the collateral itself
            collateral: None,
        });
        let identified = validator.judge(&evidence)?;
        match self.role(&identified) {
            Some(PeerRole::Server | PeerRole::JoinService) => Ok(identified),
            Some(PeerRole::Client) | None => {
                Err(Kind::Nonce.because("its attestation document is for another connection"))
            }
        }
    }

    /// Returns the text of the file.
    pub fn to_json(&self, variant: &Variant, source: &str) -> String {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let session = self.session.as_ref().map(|bound| SessionJson {
            digest: STANDARD.encode(bound.digest),
            secret: STANDARD.encode(&bound.secret),
            key: STANDARD.encode(&bound.peer.key),
            endorsements: bound.peer.endorsements.iter().map(to_json).collect(),
        });
        let file = File {
            version: VERSION,
            variant: variant.name.into(),
            source: source.into(),
            time: time.map_or(0, |time| time.as_secs()),
            form: self.channel(),
            nonce: STANDARD.encode(&self.nonce),
            session,
            document: STANDARD.encode(&self.document),
        };
        // strings and numbers are JSON
        format!(
            "{}\n",
            serde_json::to_string_pretty(&file).unwrap_or_default()
        )
    }
}

/// Reads a file that [`PresentedEvidence::to_json`] made, and returns the variant of its document.
pub fn read(path: &Path) -> Result<(PresentedEvidence, &'static Variant), Error> {
    let bytes = files::read(path)?;
    parse(&bytes).map_err(|why| FileError::Content(path.into(), why.to_string()).into())
}

/// Parses the content of such a file.
pub fn parse(bytes: &[u8]) -> Result<(PresentedEvidence, &'static Variant), Error> {
    let file: File = serde_json::from_slice(bytes)
        .map_err(|error| format!("not evidence that `firstlight verify --save` wrote: {error}"))?;
    if file.version != VERSION {
        let version = file.version;
        let text = format!("evidence of version {version}, expected {VERSION}");
        return Err(Error::Content(text));
    }
    let variant = Variant::named(&file.variant).map_err(Error::content)?;
    let session = file.session.map(|session| session.parse()).transpose()?;
    if session.is_some() != (file.form == AtlsForm::Strong) {
        let text = "only evidence of the form \"strong\" has a session";
        return Err(Error::content(text));
    }
    let presented = PresentedEvidence {
        document: decode("document", &file.document)?,
        nonce: decode("nonce", &file.nonce)?,
        session,
        is_plain: file.form == AtlsForm::Plain,
    };
    Ok((presented, variant))
}

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    variant: String,
    /// The server or file that the evidence comes from.
    source: String,
    /// Seconds since 1970.
    time: u64,
    form: AtlsForm,
    nonce: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    session: Option<SessionJson>,
    document: String,
}

#[derive(Serialize, Deserialize)]
struct SessionJson {
    digest: String,
    secret: String,
    key: String,
    endorsements: Vec<EndorsementJson>,
}

#[derive(Serialize, Deserialize)]
struct EndorsementJson {
    template: u32,
    certificate: String,
    chain: Vec<String>,
}

fn to_json(endorsement: &KeyEndorsement) -> EndorsementJson {
    EndorsementJson {
        template: endorsement.kind as u32,
        certificate: STANDARD.encode(&endorsement.certificate),
        chain: endorsement
            .chain
            .iter()
            .map(|it| STANDARD.encode(it))
            .collect(),
    }
}

impl SessionJson {
    fn parse(&self) -> Result<Bound, Error> {
        let digest = decode("digest", &self.digest)?;
        let digest = digest
            .try_into()
            .map_err(|_| Error::content("the digest of its session does not have 32 bytes"))?;
        let endorsements = self.endorsements.iter().map(|it| {
            Ok(KeyEndorsement {
                kind: EndorsementKind::with_index(it.template)
                    .ok_or_else(|| format!("the template {:#x} is not known", it.template))?,
                certificate: decode("certificate", &it.certificate)?,
                chain: it
                    .chain
                    .iter()
                    .map(|it| decode("chain", it))
                    .collect::<Result<_, _>>()?,
            })
        });
        Ok(Bound {
            digest,
            secret: decode("secret", &self.secret)?,
            peer: MachineIdentity {
                key: decode("key", &self.key)?,
                endorsements: endorsements.collect::<Result<_, Error>>()?,
            },
        })
    }
}

fn decode(name: &str, text: &str) -> Result<Vec<u8>, Error> {
    let decoded = STANDARD.decode(text);
    decoded.map_err(|error| Error::Content(format!("{name}: wrong base64: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;
    use verifier::variant;

    fn kept() -> PresentedEvidence {
        let endorsement = KeyEndorsement {
            kind: EndorsementKind::P256,
            certificate: vec![4; 200],
            chain: vec![vec![5; 100]],
        };
        PresentedEvidence {
            document: b"{}".to_vec(),
            nonce: vec![1; 32],
            session: Some(Bound {
                digest: [2; 32],
                secret: vec![3; 32],
                peer: MachineIdentity {
                    key: vec![6; 90],
                    endorsements: vec![endorsement],
                },
            }),
            is_plain: false,
        }
    }

    #[test]
    fn a_file_has_all_that_the_judgement_needs() {
        let of_strong = kept();
        let old = PresentedEvidence {
            session: None,
            ..of_strong.clone()
        };
        let plain = PresentedEvidence::plain(b"{}".to_vec(), vec![1; 32]);
        for presented in [of_strong, old, plain] {
            let text = presented.to_json(&variant::ALL[0], "node:9000");
            let (read, variant) = parse(text.as_bytes()).unwrap();
            assert_eq!(format!("{read:?}"), format!("{presented:?}"));
            assert_eq!(variant.name, variant::ALL[0].name);
        }
    }

    #[test]
    fn hostile_files_are_refused_without_a_panic() {
        let text = kept().to_json(&variant::ALL[0], "node:9000");
        for bytes in mutations(text.as_bytes(), 2000) {
            if let Ok((presented, _)) = parse(&bytes) {
                assert!(presented.document.len() <= bytes.len());
            }
        }
    }
}
