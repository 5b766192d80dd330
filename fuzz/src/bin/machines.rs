//! A list of machines, or an SMBIOS table that may contain one. The first byte chooses one of the two, and the rest is its content.
#![no_main]

use cloud::Machines;
use cloud::r#static::oem_string;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    match kind % 2 {
        0 => {
            if let Err(error) = Machines::parse(body) {
                assert!(error.to_string().len() < 4096);
            }
        }
        _ => {
            if let Some(found) = oem_string(body, b"a=") {
                assert!(found.len() < body.len());
            }
        }
    }
});
