//! Converts the messages of `proto/attested.proto` to and from the types of this crate. The crate
//! `verifier` reads what a machine sends about itself.

use super::{MachineIdentity, Oid};
use proto::attested;
use tpm::{Credential, EndorsementKind};

/// Returns the message of an identity with the OID of its variant.
pub fn identity(variant: Oid, identity: MachineIdentity) -> attested::Identity {
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
