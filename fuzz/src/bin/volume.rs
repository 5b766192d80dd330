//! What `firstlight-volume` reads: the settings of a volume, the header's metadata, which a host can write, the name of the socket of
//! systemd-cryptsetup, a line of crypttab, a recovery key as it was typed.
#![no_main]

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use volume::settings::{Volume, check_name};
use volume::{cryptsetup, header, recovery_key, serve};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(metadata) = serde_json::from_slice(bytes) {
        let _ = header::weakness(&metadata);
        let _ = cryptsetup::keyslots_of(&metadata).count();
    }
    if let Ok(address) = SocketAddr::from_abstract_name(bytes) {
        let _ = serve::name_of(&address);
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(volume) = Volume::parse(text) {
        assert!(volume.check().is_ok());
    }
    if check_name(text).is_ok() {
        assert!(!text.contains('/'));
    }
    serve::has_option(text, "data", "header=/h");
    if let Ok(key) = recovery_key::parse(text) {
        assert_eq!(recovery_key::parse(&key).as_ref(), Ok(&key));
    }
});
