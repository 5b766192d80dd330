//! The text of a share of the master secret: an accepted share is the same after it was written and parsed again.
#![no_main]

use cli::workspace::shares::{lines, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Ok(share) = parse(text) {
        assert_eq!(parse(lines(&share).as_bytes()), Ok(share));
    }
});
