//! The collateral that a server sends with its document, and the clients that get it.

use std::sync::{Arc, Mutex};

use super::dummy::{Dummy, OID};
use super::*;
use proto::attested::Collateral;
use verifier::{
    CredentialChallenge, Evidence, Identified, MAX_COLLATERAL, MachineIdentity, Properties,
};

/// Accepts the same as [`Dummy`], and keeps the collateral that came with it.
pub struct Taking {
    takes: bool,
    got: Mutex<Vec<Option<Collateral>>>,
}

impl Taking {
    /// Makes a validator that demands collateral, or not.
    pub fn new(takes: bool) -> Arc<Taking> {
        let got = Mutex::default();
        Arc::new(Taking { takes, got })
    }
}

impl Validator for Taking {
    fn properties(&self) -> Properties {
        Properties {
            takes_collateral: self.takes,
            ..Dummy(OID).properties()
        }
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let session = evidence.session.as_ref();
        let got = session.and_then(|session| session.collateral.cloned());
        self.got.lock().unwrap().push(got);
        Dummy(OID).judge(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

/// Brings this collateral.
struct Bringing(Collateral);

impl Issuer for Bringing {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Dummy(OID).issue(user_data, nonce)
    }

    fn collateral(&self, document: &[u8]) -> Option<Collateral> {
        assert!(document.starts_with(b"{"), "of the document that is sent");
        Some(self.0.clone())
    }
}

#[test]
fn collateral_goes_to_the_client_that_demands_it_as_long_as_it_is_not_too_long() {
    for (len, takes, comes) in [
        (1, true, true),
        (1, false, false),
        // a document and this do not fit the buffer of TLS
        (MAX_COLLATERAL - 16, true, true),
        (MAX_COLLATERAL, true, false),
    ] {
        let collateral = Collateral {
            intel: vec![7; len],
            ..Collateral::default()
        };
        let taking = Taking::new(takes);
        let bringing = Some(Arc::new(Bringing(collateral.clone())) as Arc<dyn Issuer>);
        let (client, server) = meet(
            Client::new(None, Some(judge(taking.clone()))),
            Server::new(bringing, None),
        );
        greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
        let got = taking.got.lock().unwrap();
        assert_eq!(got.len(), 1);
        assert!(got[0] == comes.then_some(collateral), "{len} bytes");
    }
}
