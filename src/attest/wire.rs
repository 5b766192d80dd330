//! Converts the messages of `proto/attested.proto` to and from the types of this crate.

use super::{Challenge, Identity, Oid};
use proto::attested;
use tpm::{Credential, Endorsement, EndorsementKind};

/// Returns the message of an identity with the OID of its variant.
pub fn identity(variant: Oid, identity: Identity) -> attested::Identity {
    let endorsements = identity.endorsements.into_iter();
    attested::Identity {
        variant: variant.to_vec(),
        key: identity.key,
        endorsements: endorsements
            .map(|endorsement| attested::Endorsement {
                template: endorsement.kind as u32,
                certificate: endorsement.certificate,
                chain: endorsement.chain,
            })
            .collect(),
    }
}

/// Returns the identity of a message. Leaves out endorsement keys with templates that this program
/// does not know.
pub fn read_identity(message: &attested::Identity) -> Identity {
    let known = message.endorsements.iter().filter_map(|endorsement| {
        Some(Endorsement {
            kind: EndorsementKind::with_index(endorsement.template)?,
            certificate: endorsement.certificate.clone(),
            chain: endorsement.chain.clone(),
        })
    });
    Identity {
        key: message.key.clone(),
        endorsements: known.collect(),
    }
}

/// Returns the message of a challenge, without its secret.
pub fn challenge(challenge: &Challenge) -> attested::Challenge {
    credential(challenge.kind, &challenge.credential)
}

/// Returns the message of a credential for an endorsement key.
pub fn credential(kind: EndorsementKind, credential: &Credential) -> attested::Challenge {
    attested::Challenge {
        template: kind as u32,
        credential_blob: credential.blob.clone(),
        secret: credential.secret.clone(),
    }
}

/// Returns the credential of a message, and the endorsement key that decrypts it. The error is a
/// clause about the sender.
pub fn read_credential(
    message: attested::Challenge,
) -> Result<(EndorsementKind, Credential), String> {
    let template = message.template;
    let kind = EndorsementKind::with_index(template).ok_or_else(|| {
        format!(
            "its challenge is for the endorsement key of NV index {template:#x}, which this machine did not offer"
        )
    })?;
    let credential = Credential {
        blob: message.credential_blob,
        secret: message.secret,
    };
    Ok((kind, credential))
}
