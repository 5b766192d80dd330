//! Constellation's `dummy` variant, for tests: a document that anyone can make, JSON `{"UserData":
//! base64, "Nonce": base64}`.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, Evidence, Identified, IssueError, Issuer, MachineIdentity, Oid,
    Properties, Refusal, Validator,
};

/// OID 1.3.9900.1.1.
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x01];
/// OID 1.3.9900.1.2: another variant.
#[allow(dead_code)]
pub const OTHER_OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x02];

/// The variant with this OID.
#[derive(Clone, Copy)]
pub struct Dummy(pub Oid);

impl Issuer for Dummy {
    fn oid(&self) -> Oid {
        self.0
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let document =
            json!({"UserData": STANDARD.encode(user_data), "Nonce": STANDARD.encode(nonce)});
        Ok(document.to_string().into_bytes())
    }
}

impl Validator for Dummy {
    fn properties(&self) -> Properties {
        Properties::of_any_tpm(self.0)
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let document: Value = serde_json::from_slice(evidence.document)
            .map_err(|error| refusal(&format!("not JSON: {error}")))?;
        let field = |name: &str| {
            let text = document
                .get(name)
                .and_then(Value::as_str)
                .ok_or_else(|| refusal(&format!("no {name}")))?;
            STANDARD
                .decode(text)
                .map_err(|error| refusal(&format!("{name} is not base64: {error}")))
        };
        if field("Nonce")? != evidence.nonce {
            return Err(refusal("the document is for another nonce"));
        }
        Ok(Identified {
            user_data: field("UserData")?,
            ..Identified::default()
        })
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

fn refusal(text: &str) -> Refusal {
    Kind::Unproven.because(text)
}
