//! Reads CBOR (RFC 8949) as AWS's hypervisor writes it. Maps, arrays and strings may have a
//! definite length, or an indefinite length that ends with a break code. The length that the input
//! claims never decides how much memory is allocated.

use minicbor::Decoder;
use minicbor::data::Type;
use minicbor::decode::Error;

/// Returns whether a map or an array has a further entry. `left` is the count in its head. Without
/// a count (`None`) a break code ends it; this function then consumes that code.
pub fn has_next(reader: &mut Decoder<'_>, left: &mut Option<u64>) -> Result<bool, Error> {
    let Some(left) = left else {
        return Ok(reader.datatype()? != Type::Break || reader.skip().map(|()| false)?);
    };
    let has_next = *left > 0;
    *left = left.saturating_sub(1);
    Ok(has_next)
}

/// Reads a text.
pub fn text(reader: &mut Decoder<'_>) -> Result<String, Error> {
    reader.str_iter()?.collect()
}

/// Reads bytes.
pub fn bytes(reader: &mut Decoder<'_>) -> Result<Vec<u8>, Error> {
    let chunks = reader.bytes_iter()?.collect::<Result<Vec<_>, _>>();
    chunks.map(|chunks| chunks.concat())
}
