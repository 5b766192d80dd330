//! What the fuzzer `grpc_message` does with its input. The tests here repeat it with the inputs
//! that the fuzzer kept.

use super::header_values::{
    decode_bin, encode_bin, format_timeout, is_grpc_type, parse_timeout, percent_decode,
    percent_encode,
};
use super::message::Assembler;
use super::status::Code;

const LIMIT: usize = 1000;

/// Checks the message framing: the cuts of the stream change nothing, and no message exceeds the
/// limit. Also checks the parsers of headers that have a format of their own.
pub fn messages(input: &[u8]) {
    let whole = assemble(input, input.len().max(1));
    let bytes = assemble(input, 1);
    assert!(whole == bytes);
    assert!(whole.0.iter().all(|message| message.len() <= LIMIT));
    if let Some(timeout) = parse_timeout(input) {
        assert!(parse_timeout(format_timeout(timeout).as_bytes()) >= Some(timeout));
    }
    let text = percent_decode(input);
    assert_eq!(percent_decode(&percent_encode(&text)), text);
    if let Some(bytes) = decode_bin(input) {
        assert_eq!(decode_bin(encode_bin(&bytes).as_bytes()), Some(bytes));
    }
    let code = Code::from_header(input);
    assert_eq!(Code::from_header(code.as_header()), code);
    _ = (Code::from_http(input), is_grpc_type(input));
}

/// Returns the complete messages, and whether the stream may end there.
fn assemble(input: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
    let mut assembler = Assembler::default();
    let fine = input
        .chunks(piece)
        .all(|piece| assembler.feed(piece, LIMIT, true).is_ok());
    let mut messages = Vec::new();
    while let Some(message) = assembler.pop() {
        messages.push(message.to_vec());
        assembler.reuse(message);
    }
    (messages, fine && assembler.is_between_messages())
}

#[cfg(test)]
#[test]
fn inputs_kept_by_the_fuzzer_break_no_invariant() {
    for (name, input) in support::mutation::corpus("grpc_message") {
        println!("{name}");
        messages(&input);
    }
}
