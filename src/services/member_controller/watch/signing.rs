//! The keys that sign attestation results: ES256 (RFC 7518 §3.4), as JSON web keys for those who verify
//! (RFC 7517). Without I/O; the caller passes the time.
//!
//! ```text
//! key 1   signs ───────────────── 30 days ──┐ published until its last token has expired
//! key 2                  published ── 1 day ┴ signs ───────────────── 30 days ──┐
//! key 3                                                      published ── 1 day ┴ signs
//! ```
//!
//! A verifier that fetched the keys less than a day ago knows the one that signs.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use base::crypto::Secret;
use kubernetes::client;

/// How long a key signs, in seconds.
pub const SIGNS: u64 = 30 * 86_400;
/// How long a key is published before it signs, in seconds.
pub const BEFORE: u64 = 86_400;
/// By how much the clocks of verifiers may be late, in seconds.
const SKEW: u64 = 300;
/// The most keys, and the longest text of them: four are usual, with 300 bytes each.
const MAX_KEYS: usize = 8;
const MAX_LEN: usize = 16 << 10;
/// The length of a coordinate of P-256.
const COORDINATE: usize = 32;

/// The keys in the order in which they sign.
pub struct Keys(Vec<Key>);

struct Key {
    /// When it begins to sign, in seconds since 1970.
    from: u64,
    pkcs8: Secret,
    pair: EcdsaKeyPair,
    /// Its thumbprint (RFC 7638).
    id: String,
    x: String,
    y: String,
}

impl Key {
    /// `None` if the kernel gives no random numbers. ring wipes neither what it returns here nor its
    /// own form of a key; the program's allocator wipes what is freed.
    fn generate(from: u64) -> Option<Key> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).ok()?;
        Key::new(from, Secret::new(pkcs8.as_ref().to_vec()))
    }

    fn new(from: u64, pkcs8: Secret) -> Option<Key> {
        let (scheme, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let pair = EcdsaKeyPair::from_pkcs8(scheme, pkcs8.expose(), &random).ok()?;
        // SEC 1 §2.3.3: 4, x, y
        let point = pair.public_key().as_ref().get(1..)?;
        let (x, y) = point.split_at_checked(COORDINATE)?;
        let [x, y] = [x, y].map(|it| URL_SAFE_NO_PAD.encode(it));
        let members = format!(r#"{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}"#);
        let id = URL_SAFE_NO_PAD.encode(digest(&SHA256, members.as_bytes()));
        Some(Key {
            from,
            pkcs8,
            pair,
            id,
            x,
            y,
        })
    }

    fn stored(&self) -> (u64, &Secret) {
        (self.from, &self.pkcs8)
    }
}

impl Keys {
    /// Reads what [`Keys::to_json`] wrote.
    pub fn parse(text: &[u8]) -> Result<Keys, NoKeys> {
        if text.len() > MAX_LEN {
            return Err(NoKeys::TooLong(text.len()));
        }
        let mut list: Value = serde_json::from_slice(text).map_err(NoKeys::Json)?;
        let keys = read(&list);
        client::wipe(&mut list);
        let mut keys = keys?;
        keys.sort_by_key(|key| key.from);
        Ok(Keys(keys))
    }

    /// Returns the keys as JSON.
    pub fn to_json(&self) -> Secret {
        // it must not grow, which would leave copies behind
        let mut text = Zeroizing::new(String::with_capacity(MAX_LEN));
        text.push('[');
        for (from, pkcs8) in self.0.iter().map(Key::stored) {
            let comma = if text.len() > 1 { "," } else { "" };
            let key = Zeroizing::new(STANDARD.encode(pkcs8.expose()));
            let entry = Zeroizing::new(format!(r#"{comma}{{"from":{from},"key":"{}"}}"#, *key));
            text.push_str(&entry);
        }
        text.push(']');
        Secret::new(text.as_bytes().to_vec())
    }

    /// Returns the keys that should be there at this time, if tokens are valid for `life` seconds;
    /// `None` if these are right.
    pub fn renewed(&self, now: u64, life: u64) -> Option<Keys> {
        let kept = self.0.iter().enumerate().filter(|(at, _)| {
            let next = self.0.get(at + 1);
            // the last token of a key was signed when the next one began
            next.is_none_or(|next| next.from.saturating_add(life + SKEW) > now)
        });
        let mut plan: Vec<(u64, Secret)> =
            kept.map(|(_, key)| (key.from, key.pkcs8.clone())).collect();
        let has_signer = self.signer(now).is_some();
        let last = self.0.last().map(|key| key.from);
        let added = match last {
            // none, or all of them begin later because the clock was put back
            _ if !has_signer => Some(now),
            Some(last) if last <= now && now >= last.saturating_add(SIGNS - BEFORE) => {
                Some(now + BEFORE)
            }
            _ => None,
        };
        if added.is_none() && plan.len() == self.0.len() {
            return None;
        }
        let new = added.map(Key::generate);
        if new.is_some() {
            // the oldest ones go first
            plan.drain(..plan.len().saturating_sub(MAX_KEYS - 1));
        }
        let kept = plan
            .into_iter()
            .filter_map(|(from, pkcs8)| Key::new(from, pkcs8));
        let mut keys: Vec<Key> = kept.chain(new.flatten()).collect();
        keys.sort_by_key(|key| key.from);
        Some(Keys(keys))
    }

    /// Returns no keys.
    pub fn none() -> Keys {
        Keys(Vec::new())
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the key with this thumbprint is one of them.
    pub fn has(&self, id: &str) -> bool {
        self.0.iter().any(|key| key.id == id)
    }

    /// Returns whether those who know the other keys know none of these.
    pub fn are_others_than(&self, before: &Keys) -> bool {
        !self.is_empty() && !self.0.iter().any(|key| before.has(&key.id))
    }

    /// Returns the thumbprint of the key that signs at this time.
    pub fn signer_id(&self, now: u64) -> Option<&str> {
        Some(&*self.signer(now)?.id)
    }

    fn signer(&self, now: u64) -> Option<&Key> {
        self.0.iter().rev().find(|key| key.from <= now)
    }

    /// Returns the public keys as a JSON web key set.
    pub fn public(&self) -> Value {
        let keys = self.0.iter().map(|Key { id, x, y, .. }| {
            json!({"kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": id, "x": x, "y": y})
        });
        json!({"keys": keys.collect::<Vec<_>>()})
    }

    /// Signs claims at this time, as a JSON web token in the compact form; `None` if there is no key
    /// for this time.
    pub fn sign(&self, claims: &Value, now: u64) -> Option<String> {
        let key = self.signer(now)?;
        // RFC 9782 §4.1: an EAT as a JWT
        let header = json!({"alg": "ES256", "kid": key.id, "typ": "eat+jwt"});
        let [header, claims] = [&header, claims].map(|it| URL_SAFE_NO_PAD.encode(it.to_string()));
        let signed = format!("{header}.{claims}");
        let signature = key
            .pair
            .sign(&SystemRandom::new(), signed.as_bytes())
            .ok()?;
        Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

fn read(list: &Value) -> Result<Vec<Key>, NoKeys> {
    let list = list.as_array().ok_or(NoKeys::NoList)?;
    if list.len() > MAX_KEYS {
        return Err(NoKeys::TooMany(list.len()));
    }
    let key = |entry: &Value| {
        let from = entry["from"].as_u64()?;
        let pkcs8 = STANDARD.decode(entry["key"].as_str()?).ok()?;
        Key::new(from, Secret::new(pkcs8))
    };
    let keys = list.iter().enumerate();
    keys.map(|(at, entry)| key(entry).ok_or(NoKeys::Key(at)))
        .collect()
}

/// Why a text has no keys.
#[derive(Debug)]
pub enum NoKeys {
    /// It is longer than this program reads: its length.
    TooLong(usize),
    /// It is no JSON.
    Json(serde_json::Error),
    /// It is no list.
    NoList,
    /// It has more keys than this program reads.
    TooMany(usize),
    /// The entry at this place has no key.
    Key(usize),
}

impl fmt::Display for NoKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoKeys::TooLong(len) => write!(f, "it has {len} bytes, more than {MAX_LEN}"),
            NoKeys::Json(error) => write!(f, "it is not JSON: {error}"),
            NoKeys::NoList => f.write_str("it is not a list of keys"),
            NoKeys::TooMany(count) => write!(f, "it has {count} keys, more than {MAX_KEYS}"),
            NoKeys::Key(at) => write!(
                f,
                "key {at}: expected `from`, a number, and `key`, a key of P-256"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
    use support::mutation::mutations;

    const LIFE: u64 = 900;
    const NOW: u64 = 1_800_000_000;

    fn key(from: u64) -> Key {
        Key::generate(from).unwrap()
    }

    fn ids(keys: &Keys) -> Vec<&str> {
        keys.0.iter().map(|key| &*key.id).collect()
    }

    fn kid(token: &str) -> String {
        let header = token.split('.').next().unwrap();
        let header = URL_SAFE_NO_PAD.decode(header).unwrap();
        let header: Value = serde_json::from_slice(&header).unwrap();
        header["kid"].as_str().unwrap().to_owned()
    }

    #[test]
    fn keys_come_back_as_they_were_written() {
        let keys = Keys(vec![key(7), key(9)]);
        let read = Keys::parse(keys.to_json().expose()).unwrap();
        assert_eq!(ids(&read), ids(&keys));
        assert_eq!(read.public(), keys.public());
        assert_eq!(Keys::parse(b"[]").unwrap().0.len(), 0);
    }

    #[test]
    fn a_token_verifies_with_the_published_key_and_an_altered_one_does_not() {
        let keys = Keys::none().renewed(NOW, LIFE).unwrap();
        let token = keys.sign(&json!({"sub": "n"}), NOW).unwrap();
        let (signed, signature) = token.rsplit_once('.').unwrap();
        let public = keys.public();
        let key = &public["keys"][0];
        assert_eq!(kid(&token), key["kid"].as_str().unwrap());
        let coordinate = |name: &str| URL_SAFE_NO_PAD.decode(key[name].as_str().unwrap()).unwrap();
        let point = [vec![4], coordinate("x"), coordinate("y")].concat();
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point);
        let signature = URL_SAFE_NO_PAD.decode(signature).unwrap();
        public.verify(signed.as_bytes(), &signature).unwrap();
        let altered = signed.replacen('.', ".A", 1);
        assert!(public.verify(altered.as_bytes(), &signature).is_err());
    }

    #[test]
    fn the_public_keys_have_nothing_of_the_private_ones() {
        let keys = Keys(vec![key(7)]);
        let public = keys.public()["keys"][0].clone();
        let names: Vec<_> = public.as_object().unwrap().keys().cloned().collect();
        assert_eq!(names, ["alg", "crv", "kid", "kty", "use", "x", "y"]);
    }

    #[test]
    fn the_next_key_is_published_before_it_signs_and_the_old_one_until_its_tokens_expired() {
        let first = Keys::none().renewed(NOW, LIFE).unwrap();
        let one = first.0[0].id.clone();
        assert!(first.renewed(NOW + SIGNS - BEFORE - 1, LIFE).is_none());
        let at = NOW + SIGNS - BEFORE;
        let both = first.renewed(at, LIFE).unwrap();
        assert_eq!((ids(&both)[0], both.0.len()), (&*one, 2));
        let two = both.0[1].id.clone();
        let signer = |keys: &Keys, now| kid(&keys.sign(&Value::Null, now).unwrap());
        assert_eq!(signer(&both, at + BEFORE - 1), one);
        assert_eq!(signer(&both, at + BEFORE), two);
        let expired = at + BEFORE + LIFE + SKEW;
        assert!(both.renewed(expired - 1, LIFE).is_none());
        assert_eq!(ids(&both.renewed(expired, LIFE).unwrap()), [&*two]);
        // a service that was away for a year
        let late = both.renewed(NOW + 365 * 86_400, LIFE).unwrap();
        assert_eq!((ids(&late)[0], late.0.len()), (&*two, 2));
    }

    #[test]
    fn a_clock_that_was_put_back_or_a_list_that_is_full_leaves_a_key_that_signs() {
        let future = Keys(vec![key(NOW + SIGNS)]);
        assert!(future.sign(&Value::Null, NOW).is_none());
        let renewed = future.renewed(NOW, LIFE).unwrap();
        assert!(renewed.sign(&Value::Null, NOW).is_some());
        let many = (0..MAX_KEYS as u64).map(|at| key(NOW + 1 + at));
        let full = Keys(many.collect()).renewed(NOW, LIFE).unwrap();
        assert_eq!(full.0.len(), MAX_KEYS);
        assert!(full.sign(&Value::Null, NOW).is_some());
        Keys::parse(full.to_json().expose()).unwrap();
    }

    #[test]
    fn a_text_that_is_no_list_of_keys_is_refused_with_what_was_expected() {
        for (text, expected) in [
            (&b"x"[..], "not JSON"),
            (b"{}", "not a list"),
            (b"[1]", "key 0: expected `from`"),
            (br#"[{"from":1,"key":"AAAA"}]"#, "a key of P-256"),
            (&b"[0,0,0,0,0,0,0,0,0]"[..], "9 keys, more than 8"),
            (&[b' '; MAX_LEN + 1], "more than 16384"),
        ] {
            let why = Keys::parse(text).err().unwrap().to_string();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn mutated_keys_are_read_or_refused() {
        let keys = Keys(vec![key(7), key(NOW)]);
        for text in mutations(keys.to_json().expose(), 2000) {
            if let Ok(keys) = Keys::parse(&text) {
                keys.public();
                keys.renewed(NOW, LIFE);
            }
        }
    }
}
