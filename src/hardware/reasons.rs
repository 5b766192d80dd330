//! The reasons of a refusal: several in one, and the names of their kinds.

use crate::refusal::{Kind, Refusal};

/// Returns the name of a kind in JSON output and metrics.
pub fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Malformed => "malformed",
        Kind::Signature => "signature",
        Kind::Chain => "chain",
        Kind::Certificate => "certificate",
        Kind::Revoked => "revoked",
        Kind::Expired => "expired",
        Kind::Nonce => "nonce",
        Kind::Form => "form",
        Kind::Binding => "binding",
        Kind::Measurement => "measurement",
        Kind::Machine => "machine",
        Kind::Outdated => "outdated",
        Kind::Protection => "protection",
        Kind::Collateral => "collateral",
        Kind::Unproven => "unproven",
    }
}

/// Joins several reasons, a line for each; succeeds if there are none. The first one is the kind of
/// the whole.
pub fn unless_none(all: Vec<Refusal>) -> Result<(), Refusal> {
    let lines: Vec<_> = all.iter().map(|one| &*one.text).collect();
    let text = lines.join("\n");
    let mut all = all.into_iter();
    match all.next() {
        None => Ok(()),
        Some(mut first) => {
            first.text = text;
            first.others = all.collect();
            Err(first)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_reasons_are_one_refusal_with_a_line_for_each() {
        let old = Kind::Outdated.because("SNP is 1").of("snp").values(2, 1);
        let debug = Kind::Protection.because("DEBUG is on");
        assert_eq!(unless_none(vec![]), Ok(()));
        let alone = unless_none(vec![old.clone()]);
        assert_eq!(alone.unwrap_err(), old);
        let both = unless_none(vec![old, debug.clone()]).unwrap_err();
        assert_eq!(both.to_string(), "SNP is 1\nDEBUG is on");
        assert_eq!(
            (both.kind, both.field.as_deref()),
            (Kind::Outdated, Some("snp"))
        );
        assert_eq!(*both.others, [debug]);
    }
}
