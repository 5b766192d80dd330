//! The little DER that certificates of chips need beside a chain: their public key, and an extension.

/// Returns tag and content of the first value, and what follows it.
fn value(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7f => (first.into(), rest),
        0x81 | 0x82 => {
            let (bytes, rest) = rest.split_at_checked((first & 3).into())?;
            let len = bytes
                .iter()
                .fold(0, |len, byte| len << 8 | usize::from(*byte));
            (len, rest)
        }
        // nothing here is longer than 64 KiB
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    Some((tag, content, rest))
}

/// Returns the content of a value with this tag that is all of `der`.
pub(super) fn only(der: &[u8], tag: u8) -> Option<&[u8]> {
    match value(der)? {
        (found, content, []) if found == tag => Some(content),
        _ => None,
    }
}

/// Returns tags and contents of the values of a sequence; ends where the bytes are not DER.
pub(super) fn values(mut der: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (tag, content, rest) = value(der)?;
        der = rest;
        Some((tag, content))
    })
}

/// The tag of a SEQUENCE.
pub(super) const SEQUENCE: u8 = 0x30;
/// The tag of an OCTET STRING.
pub(super) const OCTETS: u8 = 0x04;
/// The tag of an INTEGER.
pub(super) const INTEGER: u8 = 0x02;
/// The tag of an OBJECT IDENTIFIER.
const OID: u8 = 0x06;

/// Returns the values of a SEQUENCE OF SEQUENCE { OBJECT IDENTIFIER, value }, by their identifiers.
pub(super) fn by_oid(der: &[u8]) -> impl Iterator<Item = (&[u8], (u8, &[u8]))> {
    values(der).filter_map(|(_, pair)| {
        let mut pair = values(pair);
        match (pair.next()?, pair.last()?) {
            ((OID, oid), value) => Some((oid, value)),
            _ => None,
        }
    })
}

/// Returns the content of the first extension of a certificate (RFC 5280) with this OID.
pub(super) fn extension<'a>(certificate: &'a [u8], oid: &[u8]) -> Option<&'a [u8]> {
    let (_, tbs) = values(only(certificate, SEQUENCE)?).next()?;
    let (_, extensions) = values(tbs).find(|(tag, _)| *tag == 0xa3)?;
    let mut all = by_oid(only(extensions, SEQUENCE)?);
    let (_, (tag, content)) = all.find(|(found, _)| *found == oid)?;
    (tag == OCTETS).then_some(content)
}

/// Returns an INTEGER of at most 16 bits.
pub(super) fn small((tag, content): (u8, &[u8])) -> Option<u16> {
    let unsigned = match content {
        [0, rest @ ..] => rest,
        [first, ..] if *first >= 0x80 => return None,
        other => other,
    };
    let value = unsigned
        .iter()
        .fold(0, |value, byte| value << 8 | u32::from(*byte));
    (tag == INTEGER && unsigned.len() <= 2).then_some(value as u16)
}
