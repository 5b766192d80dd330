//! What the fuzzer `grpc_message` does with its input. The tests here repeat it with the inputs
//! that the fuzzer kept.

use super::header_values::{
    decode_bin, encode_bin, format_timeout, is_grpc_type, parse_timeout, percent_decode,
    percent_encode,
};
use super::message::{Assembler, decode};
use super::status::Code;

const LIMIT: usize = 1000;

/// A message with each kind of a repeated field, also in messages within it.
#[derive(Clone, PartialEq, prost::Message)]
struct Tree {
    #[prost(message, repeated, tag = "1")]
    branches: Vec<Tree>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    leaves: Vec<Vec<u8>>,
    #[prost(uint32, repeated, tag = "3")]
    numbers: Vec<u32>,
    #[prost(string, optional, tag = "4")]
    name: Option<String>,
    #[prost(fixed64, tag = "5")]
    fixed: u64,
}

impl Tree {
    fn elements(&self) -> usize {
        let below: usize = self.branches.iter().map(Tree::elements).sum();
        below + self.branches.len() + self.leaves.len() + self.numbers.len()
    }
}

/// Checks the limit of a message's fields: within it prost's result is not changed, and no message
/// has more elements.
pub fn fields(input: &[u8]) {
    let plain = <Tree as prost::Message>::decode(input);
    match decode::<Tree>(input, "request") {
        Ok(tree) => assert!(tree.elements() <= 2048 && plain == Ok(tree)),
        // a field has at most 11 pieces: a key, or a length, of 10 bytes at the end of the input
        Err(_) => assert!(plain.is_err() || input.len() > 1024),
    }
}

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
        fields(&input);
    }
}

#[cfg(test)]
#[test]
fn mutated_messages_are_decoded_within_the_limit_of_their_fields() {
    let leaf = Tree {
        leaves: vec![vec![7; 20]; 3],
        name: Some("leaf".into()),
        fixed: 7,
        ..Tree::default()
    };
    let twig = Tree {
        branches: vec![leaf.clone(), Tree::default(), leaf],
        numbers: vec![1, 0, 70_000],
        ..Tree::default()
    };
    // about as many pieces as are allowed, and many more
    for branches in [1, 55, 65] {
        let tree = Tree {
            branches: vec![twig.clone(); branches],
            ..Tree::default()
        };
        let valid = prost::Message::encode_to_vec(&tree);
        fields(&valid);
        support::mutation::mutations(&valid, 2000).for_each(|bytes| fields(&bytes));
    }
    for field in [
        &[8, 0][..],
        &[10, 0],
        &[18, 0],
        &[24, 0],
        &[42, 0],
        &[0xff; 7],
    ] {
        for count in [1, 1000, 1024, 1025, 100_000] {
            fields(&field.repeat(count));
        }
    }
}
