//! Unified kernel images and kernels: the registers of any file are computed, or the file is refused.
#![no_main]

use image::{Given, Image};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let images = [
        Image::uki(bytes),
        Image::direct_uki(bytes),
        Image::direct_linux(bytes, Some(b"initrd"), "console=ttyS0", Some(1 << 29)),
    ];
    for image in images.into_iter().flatten() {
        // the description goes to a terminal
        assert!(
            image
                .description()
                .bytes()
                .all(|byte| byte == b' ' || byte.is_ascii_graphic())
        );
        assert_eq!(image.registers(&Given::default()).len(), 8);
    }
});
