//! The responses of a TPM to the commands of a node: the header, and the parameters of each command.
#![no_main]

use tpm::{parse_response, read_answers};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok((_, parameters)) = parse_response(bytes) {
        assert_eq!(parameters.len(), bytes.len() - 10);
        read_answers(parameters);
    }
    read_answers(bytes);
});
