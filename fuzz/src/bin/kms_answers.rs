//! The answers of key management services, which may contain a key: no error repeats them.
#![no_main]

use keywrap::{aws_kms, azure_kms, gcp_credentials, gcp_kms, kmip, oauth};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    for error in [
        aws_kms::parse_encrypted("host", input).err(),
        aws_kms::parse_decrypted("host", input).err(),
        aws_kms::parse_created("host", input).err(),
        aws_kms::check_key("host", "key", input).err(),
        azure_kms::parse_key("host", "key", input).err(),
        azure_kms::parse_wrapped("host", "key", input).err(),
        azure_kms::parse_unwrapped("host", input).err(),
        azure_kms::split(input).err(),
        gcp_kms::parse_encrypted("host", input).err(),
        gcp_kms::parse_decrypted("host", input).err(),
        gcp_kms::check_key("host", "key", input).err(),
        kmip::parse_encrypted("host", "key", input).err(),
        kmip::parse_decrypted("host", "key", input).err(),
        kmip::check_stored(input).err(),
        oauth::parse_token("host", input).err(),
    ]
    .into_iter()
    .flatten()
    {
        assert!(error.to_string().len() < 1024);
    }
    azure_kms::parse_error(input);
    if let Err(why) = gcp_credentials::Account::parse(input) {
        assert!(why.to_string().len() < 1024);
    }
});
