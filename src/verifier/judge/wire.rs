//! The verifier's side of the messages of `proto/attested.proto`; [`attest::wire`] has the other.

use attest::MachineIdentity;
use proto::attested;
use tpm::{Credential, EndorsementKind, KeyEndorsement};

/// Returns the identity of a message. Leaves out endorsement keys with templates that this program
/// does not know.
pub fn read_identity(message: &attested::Identity) -> MachineIdentity {
    let known = message.endorsements.iter().filter_map(|endorsement| {
        Some(KeyEndorsement {
            kind: EndorsementKind::with_index(endorsement.template)?,
            certificate: endorsement.certificate.clone(),
            chain: endorsement.chain.clone(),
        })
    });
    MachineIdentity {
        key: message.key.clone(),
        endorsements: known.collect(),
    }
}

/// Returns the message of a credential for an endorsement key.
pub fn credential(kind: EndorsementKind, credential: &Credential) -> attested::Challenge {
    attested::Challenge {
        template: kind as u32,
        credential_blob: credential.blob.clone(),
        secret: credential.secret.clone(),
    }
}
