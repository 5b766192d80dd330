//! The comparison of distinguished names (RFC 5280 §7.1): some vendors, such as STMicroelectronics,
//! write the name of an authority as UTF8String in one certificate and as PrintableString in another.
//!
//! Values of the three string types below match without regard to their type, the case of ASCII
//! letters, and the number of spaces. Other characters and all other types match byte by byte:
//! tables of Unicode would be large, and a name that does not match is only refused.

use base::der::{
    DerReader, Malformed, OBJECT_IDENTIFIER, PRINTABLE_STRING, SEQUENCE, SET, UTF8_STRING,
};

/// IA5String, for domain components and addresses.
const IA5_STRING: u8 = 0x16;

/// Returns whether two distinguished names are equal (RFC 5280 §7.1). Each is DER, without the tag and
/// the length of its outer SEQUENCE.
pub fn equal(one: &[u8], other: &[u8]) -> bool {
    one == other || parts(one).is_ok_and(|one| parts(other) == Ok(one))
}

/// An attribute: its type, the type of its value, and the value.
type Attribute<'a> = (&'a [u8], u8, Vec<u8>);

/// Returns the attributes of each relative name, in an order that does not depend on the encoding.
fn parts(name: &[u8]) -> Result<Vec<Vec<Attribute<'_>>>, Malformed> {
    let mut all = vec![];
    let mut name = DerReader::new(name);
    while !name.is_empty() {
        let mut attributes = vec![];
        let mut set = DerReader::new(name.expect(SET)?);
        while !set.is_empty() {
            let mut fields = DerReader::new(set.expect(SEQUENCE)?);
            let oid = fields.expect(OBJECT_IDENTIFIER)?;
            let (tag, value) = fields.read()?;
            fields.end()?;
            attributes.push(match tag {
                UTF8_STRING | PRINTABLE_STRING | IA5_STRING => (oid, UTF8_STRING, folded(value)),
                tag => (oid, tag, value.to_vec()),
            });
        }
        attributes.sort();
        all.push(attributes);
    }
    Ok(all)
}

/// Returns a text in lower case, with one space between words and none around them.
fn folded(text: &[u8]) -> Vec<u8> {
    let words = text.split(|byte| *byte == b' ');
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    words.join(&b' ').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::der::element;
    use support::mutation::mutations;

    const COMMON_NAME: &[u8] = &[0x55, 4, 3];
    const COUNTRY: &[u8] = &[0x55, 4, 6];
    const BMP_STRING: u8 = 0x1e;

    fn attribute(oid: &[u8], tag: u8, value: &str) -> Vec<u8> {
        let oid = element(OBJECT_IDENTIFIER, &[oid]);
        element(SEQUENCE, &[&oid, &element(tag, &[value.as_bytes()])])
    }

    fn name(tag: u8, value: &str) -> Vec<u8> {
        element(SET, &[&attribute(COMMON_NAME, tag, value)])
    }

    #[test]
    fn type_case_and_spaces_of_a_text_do_not_matter() {
        let good = name(UTF8_STRING, "STM TPM ECC Root CA 01");
        for same in [
            name(PRINTABLE_STRING, "STM TPM ECC Root CA 01"),
            name(IA5_STRING, "stm tpm ecc root ca 01"),
            name(PRINTABLE_STRING, "  STM TPM  ECC Root CA 01 "),
        ] {
            assert!(equal(&good, &same) && equal(&same, &good));
        }
        for other in [
            name(UTF8_STRING, "STM TPM ECC Root CA 02"),
            name(UTF8_STRING, "STMTPM ECC Root CA 01"),
            name(BMP_STRING, "STM TPM ECC Root CA 01"),
            [good.clone(), good.clone()].concat(),
            element(
                SET,
                &[&attribute(COUNTRY, UTF8_STRING, "STM TPM ECC Root CA 01")],
            ),
            vec![],
        ] {
            assert!(!equal(&good, &other) && !equal(&other, &good));
        }
        // case is folded in ASCII only
        let (small, large) = (name(UTF8_STRING, "é"), name(UTF8_STRING, "É"));
        assert!(equal(&small, &small) && !equal(&small, &large));
    }

    #[test]
    fn the_order_matters_between_relative_names_and_not_within_one() {
        let (a, b) = (
            attribute(COMMON_NAME, UTF8_STRING, "a"),
            attribute(COUNTRY, PRINTABLE_STRING, "CH"),
        );
        let set = |parts: &[&[u8]]| element(SET, parts);
        assert!(equal(&set(&[&a, &b]), &set(&[&b, &a])));
        assert!(!equal(&set(&[&a, &b]), &set(&[&a])));
        let [one, two] = [&a, &b].map(|one| set(&[one]));
        assert!(!equal(
            &[one.clone(), two.clone()].concat(),
            &[two, one].concat()
        ));
    }

    #[test]
    fn a_mutated_name_is_another_one_or_differs_only_in_what_does_not_matter() {
        let good = name(UTF8_STRING, "STM TPM ECC Root CA 01");
        for mutant in mutations(&good, 20_000) {
            if equal(&mutant, &good) {
                let text = |name: &[u8]| {
                    String::from_utf8_lossy(&name[name.len() - 22..]).to_ascii_lowercase()
                };
                assert_eq!(text(&mutant), text(&good));
            }
        }
    }
}
