//! Initrds: for any bytes, the files are listed up to the first that cannot be read.
#![no_main]

use image::host::Contents;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let contents = Contents::new(Some("quiet"), "", bytes, Some(257));
    assert_eq!(contents.channels(false).len(), 11);
});
