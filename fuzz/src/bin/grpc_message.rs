//! Message framing: how the stream is cut into pieces changes nothing, and no message exceeds the limit. Also the parsers
//! of `grpc-timeout` and `grpc-message`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../src/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // the other modules name its types
mod h2;

#[allow(dead_code, unused_imports)] // of them, this fuzzer does not need all
#[path = "../../../src/grpc"]
mod grpc {
    mod message;
    mod metadata;
    mod status;

    const LIMIT: usize = 1000;

    pub fn check(input: &[u8]) {
        let whole = assemble(input, input.len().max(1));
        let bytes = assemble(input, 1);
        assert!(whole == bytes);
        assert!(whole.0.iter().all(|message| message.len() <= LIMIT));
        if let Some(timeout) = message::parse_timeout(input) {
            assert!(message::parse_timeout(message::format_timeout(timeout).as_bytes()) >= Some(timeout));
        }
        let text = status::percent_decode(input);
        assert_eq!(status::percent_decode(&status::percent_encode(&text)), text);
    }

    /// The complete messages, and whether the stream may end there.
    fn assemble(input: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
        let mut assembler = message::Assembler::default();
        let fine = input.chunks(piece).all(|piece| assembler.feed(piece, LIMIT).is_ok());
        let messages = std::iter::from_fn(|| assembler.pop()).map(|message| message.to_vec()).collect();
        (messages, fine && assembler.is_between_messages())
    }
}

fuzz_target!(|input: &[u8]| grpc::check(input));
