//! A file of `firstlight verify --save`, which another person may have sent.
#![no_main]

use cli::trust::verify::presented::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    match parse(input) {
        Ok((presented, _)) => assert!(presented.document().len() <= input.len()),
        Err(why) => assert!(why.to_string().len() < 4096),
    }
});
