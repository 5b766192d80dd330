//! Evidence of attackers: documents, quotes, certificates, exchanges and event logs. Each field is altered, in genuine evidence and
//! in evidence that a program without a TPM signed correctly. Each is refused for the expected reason, with little memory.

mod certificates;
mod documents;
mod event_logs;
mod exchanges;
mod quotes;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use common::forger::Forger;
use support::memory::{Counting, most as memory};
use support::swtpm::PCR_4;
use verifier::{Evidence, Measurement, Policy, Validator, qemu_vtpm};

const USER_DATA: &[u8] = &[5; 32];
const NONCE: &[u8] = &[6; 32];

static FORGER: LazyLock<Forger> = LazyLock::new(Forger::new);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns a policy that requires these values of the registers 4 and 15.
fn demanding(pcr_4: [u8; 32]) -> Policy {
    let enforced = |expected| Measurement {
        expected,
        warn_only: false,
    };
    Policy::new(BTreeMap::from([
        (4, enforced(pcr_4.into())),
        (15, enforced(vec![0; 32])),
    ]))
    .unwrap()
}

fn policy() -> Policy {
    demanding(PCR_4)
}

/// Returns the reason for which a document is refused. The verifier may use a few times the memory of the document; the constant is
/// for the policy and the texts.
fn refusal(what: &str, document: &[u8]) -> Option<String> {
    refusal_by(policy(), what, document)
}

fn refusal_by(policy: Policy, what: &str, document: &[u8]) -> Option<String> {
    let validator = qemu_vtpm::validator(Arc::new(policy));
    let (judged, held) = memory(|| {
        validator
            .judge(&Evidence::new(document, NONCE))
            .map(|it| it.user_data)
    });
    assert!(
        held <= 8 * document.len() + (64 << 10),
        "{what}: {held} bytes for a document of {}",
        document.len()
    );
    match judged {
        Ok(user_data) => {
            assert_eq!(user_data, USER_DATA, "{what}");
            None
        }
        Err(why) => Some(why.to_string()),
    }
}

fn expect(what: &str, document: &[u8], reason: &str) {
    match refusal(what, document) {
        None => panic!("{what}: accepted"),
        Some(why) => assert!(
            why.contains(reason),
            "{what}: expected {reason:?}, got: {why}"
        ),
    }
}
