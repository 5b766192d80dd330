//! SSH public keys: lines, private key files, and the bytes that a joining node sends. Each accepted key can be certified. Certificates of
//! operators and their signatures, which none of these bytes can be.
#![no_main]

use std::sync::LazyLock;
use std::time::SystemTime;

use base::crypto::Secret;
use libfuzzer_sys::fuzz_target;
use ssh::certificate::UserCertificate;
use ssh::{Authority, PublicKey, signature};

static AUTHORITY: LazyLock<Authority> =
    LazyLock::new(|| Authority::from_seed(&Secret::new(vec![7; 32])).expect("a seed of 32 bytes"));

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let keys = [
        PublicKey::from_blob(bytes),
        PublicKey::from_line(&text),
        PublicKey::from_private_key_file(&text),
    ];
    let authority = AUTHORITY.public();
    assert!(UserCertificate::verify(bytes, authority, SystemTime::UNIX_EPOCH).is_err());
    assert!(signature::verify(bytes, authority, "operator@firstlight", b"").is_err());
    let _ = (
        UserCertificate::blob_of_line(&text),
        signature::blob_of_file(&text),
    );
    for key in keys.into_iter().flatten() {
        assert_eq!(PublicKey::from_blob(key.blob()).as_ref(), Ok(&key));
        assert_eq!(PublicKey::from_line(&key.line()).as_ref(), Ok(&key));
        let certificate = AUTHORITY
            .host_certificate(&key, &["node".to_owned()], SystemTime::UNIX_EPOCH)
            .expect("a name");
        assert!(
            PublicKey::from_line(&certificate).is_err(),
            "a certificate is no key to certify"
        );
    }
});
