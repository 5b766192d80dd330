//! Google's launch endorsement of a firmware, and the file of the root that certifies its signer. Input: a byte with the length of
//! the root's file in units of 16 bytes, the root's file, the endorsement.
#![no_main]

use std::time::{Duration, UNIX_EPOCH};

use image::launch_endorsement::{LaunchEndorsement, SignerRoot};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((len, files)) = bytes.split_first() else {
        return;
    };
    let Some((root, file)) = files.split_at_checked(usize::from(*len) * 16) else {
        return;
    };
    let (root, endorsement) = (SignerRoot::parse(root), LaunchEndorsement::parse(file));
    if let (Ok(root), Ok(endorsement)) = (root, endorsement) {
        // in 2026
        let now = UNIX_EPOCH + Duration::from_secs(1_795_000_000);
        if let Ok(golden) = endorsement.verify(&root, now) {
            golden.explain();
        }
    }
});
