//! The keys of keyslots, which no memory may hold.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use argon2::{Algorithm, Argon2, Params, Version};
use base::crypto::Secret;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Where the primary header has its metadata, and how much at most.
const METADATA: std::ops::Range<u64> = 4096..16384;
const KEY_LEN: usize = 64;

/// Derives the key of each keyslot of the disk from `passphrase`, as its header says.
pub fn area_keys(disk: &Path, passphrase: &Secret) -> Vec<[u8; KEY_LEN]> {
    let mut text = vec![0; (METADATA.end - METADATA.start) as usize];
    let disk = File::open(disk).unwrap();
    disk.read_exact_at(&mut text, METADATA.start).unwrap();
    let json = serde_json::Deserializer::from_slice(&text)
        .into_iter::<serde_json::Value>()
        .next();
    let json = json.unwrap().unwrap();
    let keyslots = json["keyslots"].as_object().unwrap().values();
    let derived = |keyslot: &serde_json::Value| {
        let kdf = &keyslot["kdf"];
        let number = |field: &str| kdf[field].as_u64().unwrap() as u32;
        let params = Params::new(
            number("memory"),
            number("time"),
            number("cpus"),
            Some(KEY_LEN),
        );
        let salt = STANDARD.decode(kdf["salt"].as_str().unwrap()).unwrap();
        let mut key = [0; KEY_LEN];
        Argon2::new(Algorithm::Argon2id, Version::V0x13, params.unwrap())
            .hash_password_into(passphrase.expose(), &salt, &mut key)
            .unwrap();
        key
    };
    keyslots.map(derived).collect()
}
