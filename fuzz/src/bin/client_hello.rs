//! The ClientHello filter: hiding and revealing are inverse, and the output does not depend on how the input is split into pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;

// the fuzzer includes only this file, which needs no other
#[path = "../../../src/atls/hello.rs"]
#[allow(dead_code)] // this fuzzer does not use everything in the file
mod hello;
use hello::{HelloFilter, hide_server_name, reveal_server_name};

fuzz_target!(|input: &[u8]| {
    let mut hidden = input.to_vec();
    match hide_server_name(&mut hidden) {
        Ok(Some(_)) => assert_eq!(reveal_server_name(&hidden).as_deref(), Some(input)),
        Ok(None) => assert!(hidden == input && reveal_server_name(input).is_none()),
        Err(_) => assert_eq!(hidden, input),
    }
    let _ = reveal_server_name(input);

    let whole = filter(input, input.len().max(1));
    let bytes = filter(input, 1);
    assert_eq!(whole.is_ok(), bytes.is_ok());
    if whole.is_ok() {
        assert_eq!(whole, bytes);
    }
});

/// The bytes for rustls, the server name, and which of three protocols are offered.
type Filtered = (Vec<u8>, Option<Vec<u8>>, [bool; 3]);

fn filter(input: &[u8], piece: usize) -> Result<Filtered, ()> {
    let mut filter = HelloFilter::new();
    let mut output = Vec::new();
    for part in input.chunks(piece) {
        filter.push(part, &mut output).map_err(drop)?;
    }
    let offers = [&b""[..], b"h2", b"http/1.1"].map(|protocol| filter.offers(protocol));
    Ok((output, filter.server_name().map(<[u8]>::to_vec), offers))
}
