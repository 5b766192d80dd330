//! The answers of key management services, which may contain a key: no error repeats them.
#![no_main]

use keywrap::aws_kms;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    for error in [
        aws_kms::parse_encrypted("host", input).err(),
        aws_kms::parse_decrypted("host", input).err(),
        aws_kms::check_key("host", "key", input).err(),
    ]
    .into_iter()
    .flatten()
    {
        assert!(error.to_string().len() < 1024);
    }
});
