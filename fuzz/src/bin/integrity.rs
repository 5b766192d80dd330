//! The check whether a dm-integrity device can contain data. The host may have written anything into its superblock and journal.
//!
//! Input: the start of the device; zeros follow it, so that there is room for the journal that a superblock announces.
#![no_main]

use std::io::Cursor;

use disk::device_mapper::may_hold_data;
use libfuzzer_sys::fuzz_target;

/// The size is larger than a journal of two sections, and the end that must be zeros.
const ROOM: usize = 2 << 20;

fuzz_target!(|input: &[u8]| {
    let mut disk = input.to_vec();
    disk.resize(input.len() + ROOM, 0);
    match may_hold_data(&mut Cursor::new(disk), 0).expect("memory does not fail") {
        Some(why) => assert!(why.len() < 4096),
        // each sector of a fresh journal ends with its round
        None => assert!(
            input.starts_with(b"integrt\0")
                && input[4096..]
                    .chunks_exact(512)
                    .any(|sector| sector[511] == 0x11)
        ),
    }
});
