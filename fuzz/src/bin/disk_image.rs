//! Disk images: the partition table, the FAT file system, and the program that boots from it.
#![no_main]

use std::io::Cursor;

use image::{Image, KnownConditions, Platform, RegisterBank};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for chosen in [None, Some("EFI/BOOT/BOOTX64.EFI")] {
        if let Ok(image) = Image::disk(Cursor::new(bytes), chosen, None) {
            let given = KnownConditions::default();
            let of_tpm = image.registers(Platform::Tpm(RegisterBank::Sha256), &given);
            assert_eq!(of_tpm.len(), 8);
            assert_eq!(image.registers(Platform::Tdx, &given).len(), 2);
        }
    }
});
