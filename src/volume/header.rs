//! Checks whether a LUKS2 header protects the data. A host can write any header, so this accepts only
//! what cryptsetup writes for a volume without options: one segment, no flags, no requirements, costs
//! that a boot can afford. A flag such as `allow-discards` would pass on to the host which blocks are
//! unused; the owner gives such options in /etc/crypttab, which the host cannot change.

use serde_json::{Map, Value};

/// The ciphers with which a volume and its keyslots may be encrypted.
pub const CIPHERS: [&str; 11] = [
    "aes-xts-plain64",
    "serpent-xts-plain64",
    "twofish-xts-plain64",
    "camellia-xts-plain64",
    "aes-cbc-essiv:sha256",
    "aes-xts-random",
    "aes-gcm-random",
    "aegis128-random",
    "aegis256-random",
    "chacha20-random",
    "xchacha12,aes-adiantum-plain64",
];
/// The minimum size of a key in bytes: a short one can be guessed, and serpent accepts an empty one.
const MIN_KEY: u64 = 16;
/// The maximum size of a key in bytes: two of AES-256 in the mode XTS, and one of HMAC-SHA-512.
const MAX_KEY: u64 = 128;
/// The maximum memory of argon2 in KiB: the default maximum of cryptsetup.
const MAX_MEMORY: u64 = 1 << 20;
/// The maximum number of threads of argon2, and of its passes over one KiB. cryptsetup takes two
/// seconds for a keyslot, which is up to 8 passes over 1 GiB.
const MAX_CPUS: u64 = 4;
const MAX_PASSES: u64 = 16 << 20;
/// The maximum number of iterations of PBKDF2: half a minute on a fast core.
const MAX_ITERATIONS: u64 = 64 << 20;
/// The size in bytes of the binary header, which the JSON area follows.
const BINARY: u64 = 4096;
/// The hashes of cryptsetup's options --hash and --pbkdf-hash. With a weak one, the host could know what a
/// derivation of a key returns.
const HASHES: [&str; 8] = [
    "sha256",
    "sha512",
    "sha384",
    "sha1",
    "sha3-256",
    "sha3-512",
    "ripemd160",
    "whirlpool",
];
/// The stripes of the anti-forensic splitter, which is constant (LUKS2 specification §3.2).
const STRIPES: u64 = 4000;

/// Returns why a header does not protect the data, if so. With a null cipher, or a key without bits,
/// in the area of a keyslot, any passphrase opens it and the host knows the volume key.
pub fn weakness(metadata: &Value) -> Option<String> {
    let parts = |name: &str| metadata[name].as_object().filter(|parts| !parts.is_empty());
    let (Some(keyslots), Some(segments)) = (parts("keyslots"), parts("segments")) else {
        return Some("it has no keyslot or no segment".into());
    };
    let keyslots = || keyslots.iter().find_map(|(number, it)| keyslot(number, it));
    let digests = || {
        let digests = parts("digests").into_iter().flatten();
        digests
            .into_iter()
            .find_map(|(number, digest)| costs(&format!("digest {number}"), digest))
    };
    keyslots()
        .or_else(|| segment(segments))
        .or_else(digests)
        .or_else(|| config(&metadata["config"]))
        .or_else(|| place(metadata))
}

/// Returns a number that LUKS2 writes as a text.
pub fn decimal(object: &Value, name: &str) -> Option<u64> {
    object[name].as_str()?.parse().ok()
}

/// Checks that the data is behind the header: a detached header, as the copy is one, may have it anywhere.
fn place(metadata: &Value) -> Option<String> {
    let config = |name| decimal(&metadata["config"], name);
    let offset = decimal(&metadata["segments"]["0"], "offset");
    let end = || {
        let copy = config("json_size")?.checked_add(BINARY)?;
        copy.checked_mul(2)?.checked_add(config("keyslots_size")?)
    };
    let is_behind = end()
        .zip(offset)
        .is_some_and(|(end, offset)| offset >= end && offset.is_multiple_of(512));
    (!is_behind).then(|| {
        let offset = &metadata["segments"]["0"]["offset"];
        format!("segment 0 has offset {offset}, expected a sector behind the header")
    })
}

fn keyslot(number: &str, keyslot: &Value) -> Option<String> {
    let area = &keyslot["area"];
    if keyslot["type"] != "luks2" || is_weak(&area["encryption"]) {
        return Some(unsafe_part("keyslot", number, &area["encryption"]));
    }
    if !has_key(area) || !has_key(keyslot) {
        return Some(format!(
            "keyslot {number} has a key of less than {MIN_KEY} or more than {MAX_KEY} bytes"
        ));
    }
    let splitter = &keyslot["af"];
    if let Some(why) = hash(&format!("keyslot {number}"), &splitter["hash"]) {
        return Some(why);
    }
    if area["type"] != "raw" || splitter["type"] != "luks1" || splitter["stripes"] != STRIPES {
        return Some(format!(
            "keyslot {number} has another area or splitter than cryptsetup writes"
        ));
    }
    costs(&format!("keyslot {number}"), &keyslot["kdf"])
}

fn hash(what: &str, hash: &Value) -> Option<String> {
    let is_known = HASHES.iter().any(|known| hash == known);
    (!is_known).then(|| {
        format!(
            "{what} has the hash {hash}, expected one of {}",
            HASHES.join(", ")
        )
    })
}

/// Checks what the derivation of a key costs, of a keyslot or a digest, and its hash.
fn costs(what: &str, kdf: &Value) -> Option<String> {
    if kdf["type"] == "pbkdf2"
        && let Some(why) = hash(what, &kdf["hash"])
    {
        return Some(why);
    }
    let number = |field: &str| kdf[field].as_u64().filter(|number| *number > 0);
    let is_affordable = match kdf["type"].as_str() {
        Some("pbkdf2") => number("iterations").is_some_and(|it| it <= MAX_ITERATIONS),
        Some("argon2i" | "argon2id") => match (number("memory"), number("time"), number("cpus")) {
            (Some(memory), Some(time), Some(cpus)) => {
                memory <= MAX_MEMORY
                    && cpus <= MAX_CPUS
                    && memory.saturating_mul(time) <= MAX_PASSES
            }
            _ => false,
        },
        _ => false,
    };
    (!is_affordable).then(|| {
        format!(
            "{what} needs more than {MAX_ITERATIONS} iterations of pbkdf2, {MAX_MEMORY} KiB, {MAX_CPUS} threads or {MAX_PASSES} passes \
             over one KiB of argon2, or another derivation of the key"
        )
    })
}

/// Checks the segment, which is the whole device behind the header.
fn segment(segments: &Map<String, Value>) -> Option<String> {
    let Some(segment) = segments.get("0").filter(|_| segments.len() == 1) else {
        return Some(format!(
            "it has {} segments, expected one, with the number 0",
            segments.len()
        ));
    };
    if segment["type"] != "crypt" || is_weak(&segment["encryption"]) {
        return Some(unsafe_part("segment", "0", &segment["encryption"]));
    }
    let known = [
        "type",
        "offset",
        "size",
        "iv_tweak",
        "encryption",
        "sector_size",
        "integrity",
    ];
    let other = segment.as_object().into_iter().flatten();
    if let Some((field, value)) = other
        .into_iter()
        .find(|(field, _)| !known.contains(&field.as_str()))
    {
        return Some(format!("segment 0 has {field} {value}"));
    }
    for (field, expected) in [("size", "dynamic"), ("iv_tweak", "0")] {
        if segment[field] != expected {
            let got = &segment[field];
            return Some(format!(
                "segment 0 has {field} {got}, expected {expected:?}"
            ));
        }
    }
    let integrity = match segment.get("integrity") {
        None => return None,
        Some(Value::Object(integrity)) => integrity,
        Some(other) => return Some(format!("segment 0 has the integrity {other}")),
    };
    let is_usual = |(field, value): (&String, &Value)| match field.as_str() {
        "type" => value.is_string(),
        "key_size" => value.is_u64(),
        field => field.starts_with("journal_") && value == "none",
    };
    let other = integrity.iter().find(|field| !is_usual(*field));
    other.map(|(field, value)| format!("segment 0 has the integrity {field} {value}"))
}

/// Checks the flags and the requirements: a volume has none.
fn config(config: &Value) -> Option<String> {
    let is_empty = |value: &Value| match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields
            .iter()
            .all(|(name, list)| name == "mandatory" && list.as_array().is_some_and(Vec::is_empty)),
        _ => false,
    };
    let is_usual = |(field, value): &(&String, &Value)| match field.as_str() {
        "json_size" | "keyslots_size" => value.is_string(),
        "flags" | "requirements" => is_empty(value),
        _ => false,
    };
    let Some(fields) = config.as_object() else {
        return Some("it has no config".into());
    };
    let other = fields.iter().find(|field| !is_usual(field));
    other.map(|(field, value)| {
        let advice = match field.as_str() {
            "flags" => "give options such as discard in /etc/crypttab",
            _ if value.to_string().contains("reencrypt") => "finish or undo what cryptsetup reencrypt began",
            _ => "a volume needs a drive without abilities of its own (luksFormat --hw-opal, --integrity-inline)",
        };
        format!("it has the {field} {value}, expected none: {advice}")
    })
}

fn is_weak(encryption: &Value) -> bool {
    let cipher = encryption.as_str().unwrap_or_default();
    !CIPHERS.contains(&cipher)
}

fn has_key(part: &Value) -> bool {
    let size = part["key_size"].as_u64();
    size.is_some_and(|size| (MIN_KEY..=MAX_KEY).contains(&size))
}

fn unsafe_part(kind: &str, number: &str, encryption: &Value) -> String {
    let ciphers = CIPHERS.join(", ");
    format!("{kind} {number} is encrypted with {encryption}, expected one of {ciphers}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// What cryptsetup 2.6.1 writes for `luksFormat` and `luksAddKey --pbkdf pbkdf2`.
    const VALID: &str = r#"{"keyslots":{
        "0":{"type":"luks2","key_size":64,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
            "area":{"type":"raw","offset":"32768","size":"258048","encryption":"aes-xts-plain64","key_size":64},
            "kdf":{"type":"argon2id","time":4,"memory":126366,"cpus":2,"salt":"AA=="}},
        "1":{"type":"luks2","key_size":64,"priority":2,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
            "area":{"type":"raw","offset":"290816","size":"258048","encryption":"aes-xts-plain64","key_size":64},
            "kdf":{"type":"pbkdf2","hash":"sha256","iterations":1000,"salt":"AA=="}}},
        "tokens":{"0":{"type":"firstlight-volume","keyslots":["1"]}},
        "segments":{"0":{"type":"crypt","offset":"16777216","size":"dynamic","iv_tweak":"0","encryption":"aes-xts-plain64","sector_size":4096}},
        "digests":{"0":{"type":"pbkdf2","keyslots":["0","1"],"segments":["0"],"hash":"sha256","iterations":342671,"salt":"AA==","digest":"AA=="}},
        "config":{"json_size":"12288","keyslots_size":"16744448"}}"#;

    fn valid() -> Value {
        serde_json::from_str(VALID).unwrap()
    }

    /// Returns the valid header with another value at this place; null removes it.
    fn changed(place: &str, value: &Value) -> Value {
        let mut metadata = valid();
        let (parent, name) = place.rsplit_once('/').unwrap();
        let parent = metadata.pointer_mut(parent).unwrap().as_object_mut();
        match value {
            Value::Null => drop(parent.unwrap().remove(name).unwrap()),
            value => drop(parent.unwrap().insert(name.into(), value.clone())),
        }
        metadata
    }

    #[test]
    fn a_header_that_does_not_protect_the_data_is_refused() {
        assert_eq!(weakness(&valid()), None);
        let null = "\"cipher_null-ecb\"";
        for (place, value, why) in [
            (
                "/keyslots/0/area/encryption",
                null,
                "keyslot 0 is encrypted with",
            ),
            (
                "/keyslots/1/area/encryption",
                "null",
                "keyslot 1 is encrypted with",
            ),
            ("/keyslots/0/type", "\"reencrypt\"", "keyslot 0"),
            // serpent accepts an empty key
            ("/keyslots/0/area/key_size", "0", "key of less than 16"),
            ("/keyslots/0/area/key_size", "129", "more than 128"),
            ("/keyslots/0/key_size", "1", "key of less than 16"),
            ("/keyslots/0/key_size", "\"64\"", "key of less than 16"),
            ("/keyslots/0/area/type", "\"datashift\"", "another area"),
            ("/keyslots/0/af/type", "\"none\"", "splitter"),
            ("/keyslots/0/af/stripes", "4294967295", "splitter"),
            ("/keyslots/0/kdf/memory", "4194304", "keyslot 0 needs more"),
            ("/keyslots/0/kdf/cpus", "64", "keyslot 0 needs more"),
            ("/keyslots/0/kdf/time", "4294967295", "keyslot 0 needs more"),
            ("/keyslots/0/kdf/time", "0", "keyslot 0 needs more"),
            ("/keyslots/0/kdf/time", "null", "keyslot 0 needs more"),
            ("/keyslots/0/kdf/type", "\"none\"", "another derivation"),
            (
                "/keyslots/1/kdf/iterations",
                "4294967295",
                "keyslot 1 needs more",
            ),
            ("/digests/0/iterations", "4294967295", "digest 0 needs more"),
            (
                "/segments/0/encryption",
                null,
                "segment 0 is encrypted with",
            ),
            (
                "/segments/0/encryption",
                "\"capi:ecb(cipher_null)-plain\"",
                "segment 0 is encrypted with",
            ),
            (
                "/segments/0/encryption",
                "\"aes-ecb\"",
                "segment 0 is encrypted with",
            ),
            ("/segments/0/type", "\"linear\"", "segment 0"),
            (
                "/segments/0/flags",
                "[\"in-reencryption\"]",
                "segment 0 has flags",
            ),
            ("/segments/0/size", "\"4096\"", "segment 0 has size"),
            ("/segments/0/iv_tweak", "\"8\"", "segment 0 has iv_tweak"),
            (
                "/segments/0/integrity",
                "\"none\"",
                "the integrity \"none\"",
            ),
            (
                "/segments/0/integrity",
                r#"{"type":"hmac(sha256)","journal_encryption":"ctr(aes)"}"#,
                "the integrity journal_encryption",
            ),
            (
                "/segments/0/integrity",
                r#"{"type":"crc32","meta_device":"/dev/sdb"}"#,
                "meta_device",
            ),
            ("/segments/0/offset", "\"0\"", "segment 0 has offset \"0\""),
            ("/segments/0/offset", "\"16777215\"", "segment 0 has offset"),
            ("/segments/0/offset", "\"16777217\"", "segment 0 has offset"),
            ("/segments/0/offset", "16777216", "segment 0 has offset"),
            (
                "/keyslots/0/af/hash",
                "\"null\"",
                "keyslot 0 has the hash \"null\"",
            ),
            (
                "/keyslots/1/kdf/hash",
                "\"crc32\"",
                "keyslot 1 has the hash \"crc32\"",
            ),
            (
                "/digests/0/hash",
                "\"md5\"",
                "digest 0 has the hash \"md5\"",
            ),
            ("/segments/1", "{}", "it has 2 segments"),
            ("/segments", "{}", "no keyslot or no segment"),
            ("/keyslots", "null", "no keyslot or no segment"),
            (
                "/config/flags",
                "[\"allow-discards\"]",
                "the flags [\"allow-discards\"], expected none",
            ),
            ("/config/flags", "[\"no-journal\"]", "the flags"),
            (
                "/config/flags",
                "[\"same-cpu-crypt\",\"submit-from-crypt-cpus\"]",
                "the flags",
            ),
            ("/config/flags", "{\"a\":[]}", "the flags"),
            (
                "/config/requirements",
                "{\"mandatory\":[\"online-reencrypt\"]}",
                "expected none: finish or undo what cryptsetup reencrypt began",
            ),
            (
                "/config/requirements",
                "{\"mandatory\":[\"opal\"]}",
                "expected none: a volume needs a drive without abilities",
            ),
            ("/config/requirements", "[\"opal\"]", "the requirements"),
            ("/config/other", "1", "the other 1"),
            ("/config", "null", "it has no config"),
        ] {
            let metadata = changed(place, &serde_json::from_str(value).unwrap());
            let found = weakness(&metadata).unwrap_or_else(|| panic!("{place} {value}"));
            assert!(found.contains(why), "{place} {value}: {found}");
        }
    }

    #[test]
    fn what_cryptsetup_writes_is_accepted() {
        let integrity =
            r#"{"type":"hmac(sha256)","journal_encryption":"none","journal_integrity":"none"}"#;
        for (place, value) in [
            ("/config/flags", "[]"),
            ("/config/requirements", "{}"),
            ("/config/requirements", "{\"mandatory\":[]}"),
            ("/segments/0/integrity", integrity),
            ("/segments/0/sector_size", "512"),
            ("/keyslots/0/kdf/memory", "1048576"),
            ("/keyslots/0/key_size", "96"),
            ("/segments/0/offset", "\"33554432\""),
            ("/keyslots/1/kdf/hash", "\"sha512\""),
            ("/keyslots/1", "null"),
            ("/tokens/0", "null"),
        ] {
            let metadata = changed(place, &serde_json::from_str(value).unwrap());
            assert_eq!(weakness(&metadata), None, "{place} {value}");
        }
    }

    #[test]
    fn no_header_makes_the_check_panic() {
        for bytes in mutations(VALID.as_bytes(), 20_000) {
            if let Ok(metadata) = serde_json::from_slice(&bytes) {
                let _ = weakness(&metadata);
            }
        }
    }
}
