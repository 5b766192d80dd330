//! Unified kernel images and kernels: the registers of any file are computed, or the file is refused.
#![no_main]

use image::{Image, KnownConditions, Loader, Platform, RegisterBank};
use libfuzzer_sys::fuzz_target;

fn direct_linux(kernel: &[u8], loader: Loader) -> Result<Image, image::Error> {
    Image::direct_linux(kernel, Some(b"initrd"), "console=ttyS0", loader)
}

fuzz_target!(|bytes: &[u8]| {
    let images = [
        Image::uki(bytes, None),
        Image::direct_uki(bytes, None),
        direct_linux(bytes, Loader::Patched(1 << 29)),
        direct_linux(bytes, Loader::AsIs),
    ];
    for image in images.into_iter().flatten() {
        // the description goes to a terminal
        assert!(
            image
                .description()
                .bytes()
                .all(|byte| byte == b' ' || byte.is_ascii_graphic())
        );
        let given = KnownConditions::default();
        let of_tpm = image.registers(Platform::Tpm(RegisterBank::Sha256), &given);
        assert_eq!(of_tpm.len(), 8);
        assert_eq!(image.registers(Platform::Tdx, &given).len(), 2);
    }
});
