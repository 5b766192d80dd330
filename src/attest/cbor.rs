//! Reads CBOR (RFC 8949) as AWS's hypervisor writes it. Maps, arrays and strings may have a
//! definite length, or an indefinite length that ends with a break code. The length that the input
//! claims never decides how much memory is allocated.

use minicbor::Decoder;
use minicbor::decode::Error;

/// Reads a text.
pub fn text(reader: &mut Decoder<'_>) -> Result<String, Error> {
    reader.str_iter()?.collect()
}

/// Reads bytes.
pub fn bytes(reader: &mut Decoder<'_>) -> Result<Vec<u8>, Error> {
    let chunks = reader.bytes_iter()?.collect::<Result<Vec<_>, _>>();
    chunks.map(|chunks| chunks.concat())
}
