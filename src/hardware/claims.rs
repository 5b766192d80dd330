//! The facts that the evidence of a platform proves about a machine, in terms that its operator
//! knows. Validators fill in [`PlatformClaims`].

use serde::Serialize;

/// Maximum length of a text in characters: texts that others signed may have any length, and
/// genuine texts are shorter.
const MAX_TEXT: usize = 400;

/// The proven facts about a machine besides the values of its registers. Validators return them,
/// policies judge them, `firstlight verify` and audit records show them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlatformClaims {
    /// The technology that protects the machine, and the product: `AMD SEV-SNP (Milan)`.
    pub technology: String,
    /// Who signed the evidence, down from the root: `ARK-Milan, SEV-Milan, SEV-VCEK`.
    pub signed_by: String,
    /// The chip or the instance, in lower-case hexadecimal or as the cloud writes it; `None` if the
    /// evidence masks it.
    pub chip: Option<String>,
    /// The version of each part of the trusted computing base, with the minimum in the policy.
    pub tcb: Vec<TcbPart>,
    /// The other properties by name, in the order in which they are shown: policy bits, launch
    /// measurement.
    pub properties: Vec<Property>,
    /// Which values are bound to each other: `attestation key: REPORT_DATA`.
    pub bound: Vec<String>,
}

/// The version of a part of the trusted computing base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TcbPart {
    /// The name as in the policy.
    pub name: &'static str,
    /// The version of the machine.
    pub got: u64,
    /// The minimum in the policy.
    pub minimum: u64,
}

/// A property of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Property {
    /// The name that the vendor uses.
    pub name: &'static str,
    /// The value.
    pub value: String,
}

/// Returns the claims with short texts without control characters: records and terminals show each
/// on one line.
pub fn printable(mut claims: PlatformClaims) -> PlatformClaims {
    let texts = [&mut claims.technology, &mut claims.signed_by]
        .into_iter()
        .chain(&mut claims.chip)
        .chain(claims.properties.iter_mut().map(|it| &mut it.value))
        .chain(&mut claims.bound);
    for text in texts {
        let is_plain = |c: char| c == ' ' || c.is_ascii_graphic();
        if text.len() > MAX_TEXT || !text.chars().all(is_plain) {
            let plain = |c: char| if is_plain(c) { c } else { '?' };
            let end = text.chars().nth(MAX_TEXT).map_or("", |_| "..");
            *text = text.chars().take(MAX_TEXT).map(plain).collect::<String>() + end;
        }
    }
    claims
}

/// Returns the claims in one line: the technology, the chip, the versions.
pub fn line(claims: &PlatformClaims) -> String {
    let chip = claims.chip.iter().map(|chip| format!(", chip {chip:.16}"));
    let version = |part: &TcbPart| {
        let TcbPart { name, got, minimum } = part;
        format!(", {name} {got} (minimum {minimum})")
    };
    let more = chip.chain(claims.tcb.iter().map(version));
    claims.technology.clone() + &more.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claims_of_a_peer_are_short_and_do_nothing_to_a_terminal() {
        let hostile = || format!("a\x1b[2J\nverdict: proven\u{202e}{}", "b".repeat(9000));
        let claims = PlatformClaims {
            technology: hostile(),
            signed_by: hostile(),
            chip: Some(hostile()),
            tcb: vec![],
            properties: vec![Property {
                name: "name",
                value: hostile(),
            }],
            bound: vec![hostile(), "key: REPORT_DATA".into()],
        };
        let claims = printable(claims);
        let expected = format!("a?[2J?verdict: proven?{}..", "b".repeat(MAX_TEXT - 22));
        assert_eq!(claims.technology, expected);
        assert_eq!(claims.signed_by, expected);
        assert_eq!(claims.chip.as_deref(), Some(&*expected));
        assert_eq!(claims.properties[0].value, expected);
        assert_eq!(claims.bound, [&expected, "key: REPORT_DATA"]);
    }
}
