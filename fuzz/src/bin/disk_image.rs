//! Disk images: partition table, FAT file system, what boots from it.
#![no_main]

use std::io::Cursor;

use image::{Given, Image};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for chosen in [None, Some("EFI/BOOT/BOOTX64.EFI")] {
        if let Ok(image) = Image::disk(Cursor::new(bytes), chosen) {
            assert_eq!(image.registers(&Given::default()).len(), 8);
        }
    }
});
