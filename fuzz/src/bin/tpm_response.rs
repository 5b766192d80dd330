//! The responses of a TPM to the commands of a node: the header, and the parameters of each command.
#![no_main]

use tpm::{answers, parse_response};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok((_, parameters)) = parse_response(bytes) {
        assert_eq!(parameters.len(), bytes.len() - 10);
        read(parameters);
    }
    read(bytes);
});

/// Reads the parameters of each command.
fn read(bytes: &[u8]) {
    let _ = (answers::of_sessions(bytes), answers::handles(bytes));
    let _ = (answers::banks(bytes), answers::pcrs(bytes));
    let _ = (answers::quote(bytes), answers::first(bytes));
    let _ = (answers::secret(bytes), answers::created(bytes));
    let _ = (answers::session(bytes), answers::nv_public(bytes));
}
