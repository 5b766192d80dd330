//! The metadata rules (LUKS2 specification §3): decides whether metadata belongs to a state disk,
//! enforces limits, and edits metadata.
//!
//! The rules are those of Constellation, which refuses every unknown field and every cipher, hash
//! or KDF except one, so that a host cannot give a weak header to a node. Additional limits prevent
//! a header from making a node allocate memory or compute without bound. Edits work on the
//! [`Value`] as it was read, and preserve unknown fields.
//!
//! Other tools (cryptsetup, systemd-cryptenroll) may add keyslots, tokens, priorities and flags to
//! a node's disk. Additions that change neither the data nor keyslot 0 are ignored, so that they do
//! not lock a node out.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value, json};

use super::cluster_token::{self, ClusterToken};
use super::error::{Error, Fault, ensure};
use super::header::{self, Header};
use super::json::{areas, is_digits, keyslots_area};
use super::layout::{
    AREA_ALIGN, BINARY_LEN, DATA_OFFSET, HDR_SIZE, STRIPES, VOLUME_KEY_LEN, VOLUME_KEY_LEN_PLAIN,
};
use super::peers::{self, Peers};
use super::token;
use Fault::{Costly, Foreign, Malformed};

/// Cipher of the data and of the keyslot areas.
const CIPHER: &str = "aes-xts-plain64";
const HASH: &str = "sha256";
const INTEGRITY: &str = "hmac(sha256)";
const KDF: &str = "argon2id";
/// Size of an encrypted sector in bytes.
pub const SECTOR_SIZE: u32 = 4096;
/// Key size in bytes of the cipher of a keyslot area: AES-256-XTS.
pub(super) const AREA_KEY_LEN: usize = 64;
/// Length in bytes of the salts of keyslot and digest, and of the digest (LUKS_SALTSIZE, SHA-256).
pub(super) const SALT_LEN: usize = 32;
/// Number and type of the token of a state disk.
const TOKEN: u32 = 0;
const TOKEN_TYPE: &str = "constellation-state-disk";
/// The keyslot whose passphrase is the disk key of a node.
const KEYSLOT: &str = "0";

/// The command with which the operator restores the parameters that nodes write in keyslot 0:
/// argon2id and SHA-256.
const CONVERT: &str = "cryptsetup luksConvertKey --pbkdf argon2id --pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1 \
                       --hash sha256";

/// Cost of argon2id in keyslots that we write: the minimum that libcryptsetup accepts. The
/// passphrases are 256 random bits, so a higher cost gives no protection.
const OUR_KDF_TIME: u32 = 4;
const OUR_KDF_MEMORY_KIB: u32 = 32;
const OUR_KDF_CPUS: u32 = 1;
/// Iterations of PBKDF2 for the digest of a random key: the minimum that libcryptsetup accepts.
pub(super) const OUR_DIGEST_ITERATIONS: u32 = 1000;

// Limits of the resources that a header may demand.
/// Maximum number of keyslots and of tokens: LUKS2_KEYSLOTS_MAX, LUKS2_TOKENS_MAX of libcryptsetup.
const MAX_OBJECTS: usize = 32;
/// Maximum memory of argon2id in KiB: the default maximum of libcryptsetup, which the permanent
/// keyslot of Constellation may use.
const MAX_KDF_MEMORY_KIB: u32 = 1 << 20;
/// Maximum number of argon2id lanes: the maximum of libcryptsetup.
const MAX_KDF_CPUS: u32 = 4;
/// Maximum cost of one try of a key. The unit is about a microsecond on a slow core: one pass of
/// argon2id over one KiB, or one iteration of PBKDF2. A wrong key is tried on every keyslot, and
/// each result is tried on the digest.
///
/// The limit is 16 passes over 1 GiB. libcryptsetup uses two seconds of four threads for a keyslot,
/// which is 4 to 8 such passes, and an eighth of a second for the digest, which is up to 500 000
/// iterations.
pub(super) const MAX_WORK: u64 = 16 << 20;
/// Maximum sequence id. A counter that starts at 1 never reaches it in practice.
const MAX_SEQID: u64 = u64::MAX / 2;

/// The state of the disk according to token 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    /// There is no token 0, or `diskIsInitialized` is not a boolean. Constellation treats the disk
    /// as uninitialized. That is correct if a format by Constellation was interrupted, but the disk
    /// may also be any other LUKS2 disk.
    Unmarked,
    /// `diskIsInitialized` is false: the disk is formatted and does not hold the state of a node.
    Uninitialized,
    /// `diskIsInitialized` is true, or there is a cluster token: the disk holds the state of a node.
    Initialized,
}

/// Whether a header without integrity protection is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Integrity {
    /// It is refused: a state disk must be authenticated.
    Required,
    /// It is accepted: for volumes that were made without integrity.
    Optional,
}

/// The parameters for the kernel's mapping of the data segment. It extends from [`DATA_OFFSET`] to the
/// end of the device, its sectors have 4096 bytes, and its cipher is `aes-xts-plain64`. `Header::geometry` makes it from checked fields, and nothing checks
/// them again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// UUID of the header, in lower case.
    pub uuid: String,
    /// Whether its sectors are authenticated (`hmac(sha256)`).
    pub has_integrity: bool,
    /// Length of the volume key in bytes: 96 with integrity, else 64.
    pub key_size: usize,
    /// Number of the digest of the volume key; cryptsetup uses it in the name of the key in a
    /// keyring.
    pub digest_id: u32,
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Header({}, sequence id {}, {:?})",
            self.uuid(),
            self.sequence_id(),
            self.state()
        )
    }
}

impl Header {
    /// Returns the state of the disk according to token 0. [`Header::check_ours`] checks the `type`
    /// of the token. A disk with a cluster token is initialized, whatever token 0 says: only the
    /// host can have changed that one, because a reset removes both.
    pub fn state(&self) -> DiskState {
        let tokens = &self.metadata["tokens"];
        match tokens[TOKEN.to_string()]["diskIsInitialized"].as_bool() {
            _ if token::find(tokens, cluster_token::TYPE) != Ok(None) => DiskState::Initialized,
            None => DiskState::Unmarked,
            Some(false) => DiskState::Uninitialized,
            Some(true) => DiskState::Initialized,
        }
    }

    /// Returns whether token 0 says that the disk is initialized.
    pub fn is_marked(&self) -> bool {
        self.metadata["tokens"][TOKEN.to_string()]["diskIsInitialized"] == true
    }

    /// Returns the cluster token; `None` if there is none. Errors: [`Error::NotOurs`].
    pub fn cluster_token(&self) -> Result<Option<ClusterToken>, Error> {
        cluster_token::read(&self.metadata["tokens"]).map_err(Error::NotOurs)
    }

    /// Returns the addresses of the cluster's join services; `None` if the header has none. The
    /// error says what is wrong with the token.
    pub fn peers(&self) -> Result<Option<Peers>, Fault> {
        peers::read(&self.metadata["tokens"])
    }

    /// Checks that this is a complete header of a state disk (made by Constellation or Firstlight)
    /// within all limits.
    ///
    /// [`Error::NotOurs`] names the object, its value and the expected value.
    pub fn check_ours(&self, integrity: Integrity) -> Result<(), Error> {
        self.checked(integrity).map(drop)
    }

    /// Returns whether this header passes [`Header::check_ours`] with integrity, except that it has
    /// no keyslot and no token: the result of an interrupted format by Constellation. No key opens
    /// the disk, so no data can be lost.
    pub fn is_keyless(&self) -> bool {
        let tokens = self.metadata["tokens"].as_object();
        tokens.is_some_and(Map::is_empty)
            && check(self, Integrity::Required, 0).is_ok_and(|metadata| metadata.areas.is_empty())
    }

    /// Returns whether this header passes [`Header::check_ours`] with integrity and contains only
    /// the one keyslot that a format by Constellation adds: no token, no second keyslot, no label.
    /// A state disk whose format was interrupted has such a header, and so has a volume of
    /// Constellation's storage driver; only the content of the disk distinguishes them.
    pub fn is_unmarked_format(&self) -> bool {
        let named = self.binary.label != [0; 48] || self.binary.subsystem != [0; 48];
        let no_token = self.metadata["tokens"]
            .as_object()
            .is_some_and(Map::is_empty);
        let one_keyslot = |metadata: Metadata| {
            metadata.areas.len() == 1
                && metadata
                    .keyslot_area()
                    .is_some_and(|(at, _)| at == metadata.areas_start)
        };
        // another tool has changed this header
        let flagged = !self.metadata["config"]["flags"].is_null()
            || !self.metadata["keyslots"][KEYSLOT]["priority"].is_null();
        !named && !flagged && no_token && self.checked(Integrity::Required).is_ok_and(one_keyslot)
    }

    /// Returns the parameters for mapping the data segment.
    pub fn geometry(&self) -> Result<Geometry, Error> {
        let metadata = self.checked(Integrity::Optional)?;
        Ok(Geometry {
            uuid: self.uuid(),
            key_size: metadata.key_size,
            has_integrity: metadata.segment.integrity.is_some(),
            digest_id: metadata.digest_id,
        })
    }

    /// Parses the metadata and checks all rules.
    pub(super) fn checked(&self, integrity: Integrity) -> Result<Metadata, Error> {
        check(self, integrity, 1).map_err(Error::NotOurs)
    }
}

/// Metadata that has passed all rules.
#[derive(Debug)]
pub(super) struct Metadata {
    /// The keyslots that may hold the key of the node.
    pub keyslots: BTreeMap<u32, Keyslot>,
    /// Start and end in bytes of the areas of all keyslots, in order.
    areas: Vec<(u64, u64)>,
    pub segment: Segment,
    /// The digest of the volume key.
    pub digest: Digest,
    pub digest_id: u32,
    /// Length of the volume key in bytes.
    pub key_size: usize,
    /// Start and end in bytes of the keyslots area.
    pub areas_start: u64,
    pub areas_end: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keyslot {
    #[serde(rename = "type")]
    kind: String,
    pub key_size: usize,
    af: Af,
    pub area: Area,
    pub kdf: Kdf,
    /// `cryptsetup config --priority`: the order in which cryptsetup tries keyslots.
    #[serde(default, rename = "priority")]
    _priority: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Af {
    #[serde(rename = "type")]
    kind: String,
    stripes: usize,
    #[serde(rename = "hash")]
    _hash: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Area {
    #[serde(rename = "type")]
    kind: String,
    pub offset: Decimal,
    pub size: Decimal,
    #[serde(rename = "encryption")]
    _encryption: IgnoredAny,
    #[serde(rename = "key_size")]
    _key_size: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kdf {
    #[serde(rename = "type")]
    kind: String,
    pub time: u32,
    pub memory: u32,
    pub cpus: u32,
    pub salt: Base64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Segment {
    #[serde(rename = "type")]
    kind: String,
    offset: String,
    size: String,
    #[serde(default)]
    flags: Vec<String>,
    iv_tweak: String,
    encryption: String,
    sector_size: u32,
    integrity: Option<SegmentIntegrity>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SegmentIntegrity {
    #[serde(rename = "type")]
    kind: String,
    journal_encryption: String,
    journal_integrity: String,
    key_size: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Digest {
    #[serde(rename = "type")]
    kind: String,
    pub keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    pub iterations: u32,
    pub salt: Base64,
    pub digest: Base64,
}

impl Kdf {
    /// Returns the cost in the units of [`MAX_WORK`].
    pub fn work(&self) -> u64 {
        u64::from(self.time) * u64::from(self.memory)
    }
}

/// A 64-bit number, which LUKS2 writes as a decimal string (specification §3).
#[derive(Debug, Clone, Copy)]
pub(super) struct Decimal(pub u64);

impl<'de> Deserialize<'de> for Decimal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.parse() {
            Ok(number) if is_digits(&text) => Ok(Decimal(number)),
            _ => Err(de::Error::custom(format!(
                "{text:?} is not a decimal number of 64 bits"
            ))),
        }
    }
}

/// Bytes in standard base64.
#[derive(Debug)]
pub(super) struct Base64(pub Vec<u8>);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64_STANDARD
            .decode(&text)
            .map(Base64)
            .map_err(|e| de::Error::custom(format!("not base64: {e}")))
    }
}

/// Checks that the object has no members except `known`.
fn only(what: &str, object: &Value, known: &[&str]) -> Result<(), Fault> {
    let mut names = object.as_object().into_iter().flat_map(Map::keys);
    match names.find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Foreign(format!("{what}: unknown field `{name}`"))),
    }
}

/// Returns an error that names the field unless `got` equals `expected`. The texts are compared: one
/// function for all types is much smaller than one for each.
fn equal(
    what: &str,
    field: &str,
    got: &dyn fmt::Debug,
    expected: &dyn fmt::Debug,
) -> Result<(), Fault> {
    let (got, expected) = (format!("{got:?}"), format!("{expected:?}"));
    ensure(got == expected, Foreign, || {
        format!("{what}: {field} is {got}, expected {expected}")
    })
}

/// Returns an error of this kind that names the field unless the number is within the range.
fn within(
    what: &str,
    field: &str,
    kind: fn(String) -> Fault,
    got: u32,
    range: RangeInclusive<u32>,
) -> Result<(), Fault> {
    ensure(range.contains(&got), kind, || {
        let (least, most) = (range.start(), range.end());
        format!("{what}: {field} is {got}, expected {least} to {most}")
    })
}

/// Checks fields as [`equal`] does: each with its value and the expected one.
fn all_equal(what: &str, fields: &[(&str, &str, &str)]) -> Result<(), Fault> {
    let mut fields = fields.iter();
    fields.try_for_each(|(field, got, expected)| equal(what, field, got, expected))
}

/// Checks the binary header, and that the metadata ask for nothing that we do not know.
fn check_header(header: &Header) -> Result<(), Fault> {
    let uuid = header.uuid();
    ensure(header::is_uuid(&uuid), Malformed, || {
        format!("its UUID {uuid:?} is not a UUID")
    })?;
    equal(
        "binary header",
        "the size",
        &header.binary.hdr_size,
        &HDR_SIZE,
    )?;
    ensure(header.binary.seqid <= MAX_SEQID, Foreign, || {
        format!("its sequence id {} is too large", header.binary.seqid)
    })?;
    only(
        "the metadata",
        &header.metadata,
        &["keyslots", "tokens", "segments", "digests", "config"],
    )?;
    let config = &header.metadata["config"];
    let known = ["json_size", "keyslots_size", "flags", "requirements"];
    only("config", config, &known)?;
    let required = &config["requirements"]["mandatory"];
    let advice = match required.to_string().contains("reencrypt") {
        true => "finish or undo what cryptsetup began (cryptsetup reencrypt)",
        false => {
            "no node formats a disk with them (luksFormat --hw-opal, --integrity-inline): attach the right disk"
        }
    };
    none("requirements", required, advice)?;
    none(
        "flags",
        &config["flags"],
        "`cryptsetup open --persistent` without other options removes them",
    )
}

fn none(name: &str, list: &Value, advice: &str) -> Result<(), Fault> {
    let is_empty = list.as_array().is_none_or(Vec::is_empty);
    ensure(is_empty, Foreign, || {
        format!("config: the {name} are {list}, expected none: {advice}")
    })
}

fn check(header: &Header, integrity: Integrity, least_keyslots: usize) -> Result<Metadata, Fault> {
    check_header(header)?;
    let (areas_start, areas_end) = keyslots_area(&header.metadata);
    let segment = check_segment(&header.metadata["segments"], integrity)?;
    let key_size = if segment.integrity.is_some() {
        VOLUME_KEY_LEN
    } else {
        VOLUME_KEY_LEN_PLAIN
    };
    let (digest_id, digest) = check_digest(&header.metadata["digests"])?;
    let all = &header.metadata["keyslots"];
    let keyslots = check_keyslots(all, &digest, key_size)?;
    let areas = areas(&header.metadata)?;
    ensure(areas.len() >= least_keyslots, Foreign, || {
        "it has no keyslot, so no key can open it".into()
    })?;
    ensure(areas.is_empty() || !keyslots.is_empty(), Foreign, || {
        format!(
            "no keyslot has the parameters of a node ({KDF}, {CIPHER}, {HASH}, for the data), so no key can open it"
        )
    })?;
    check_tokens(&header.metadata["tokens"])?;
    cluster_token::read(&header.metadata["tokens"])?;
    let metadata = Metadata {
        keyslots,
        areas,
        segment,
        digest,
        digest_id,
        key_size,
        areas_start,
        areas_end,
    };
    let work = metadata.work();
    ensure(work <= MAX_WORK, Costly, || {
        format!(
            "one try of a key would cost {work} KiB of argon2id passes and PBKDF2 iterations over {} keyslots, expected at \
             most {MAX_WORK}; `cryptsetup luksConvertKey` with a lower --pbkdf-memory reduces the cost of a keyslot",
            metadata.keyslots.len()
        )
    })?;
    Ok(metadata)
}

fn check_segment(segments: &Value, integrity: Integrity) -> Result<Segment, Fault> {
    let segments = objects("segment", segments)?;
    let ids: Vec<u32> = segments.iter().map(|(id, _)| *id).collect();
    equal("segments", "the list of ids", &ids, &[0])?;
    let (_, segment) = segments[0];
    let segment: Segment = typed("segment", 0, segment)?;
    let fields = [
        ("type", &*segment.kind, "crypt"),
        ("offset", &*segment.offset, &*DATA_OFFSET.to_string()),
        ("size", &*segment.size, "dynamic"),
        ("iv_tweak", &*segment.iv_tweak, "0"),
        ("encryption", &*segment.encryption, CIPHER),
    ];
    all_equal("segment 0", &fields)?;
    equal("segment 0", "flags", &segment.flags, &[""; 0])?;
    equal(
        "segment 0",
        "sector_size",
        &segment.sector_size,
        &SECTOR_SIZE,
    )?;
    let Some(of_data) = &segment.integrity else {
        ensure(integrity == Integrity::Optional, Foreign, || {
            format!(
                "segment 0: integrity is missing, expected {INTEGRITY:?}: its data is not authenticated"
            )
        })?;
        return Ok(segment);
    };
    let it = "segment 0: integrity";
    let fields = [
        ("type", &*of_data.kind, INTEGRITY),
        ("journal_encryption", &*of_data.journal_encryption, "none"),
        ("journal_integrity", &*of_data.journal_integrity, "none"),
    ];
    all_equal(it, &fields)?;
    let least = VOLUME_KEY_LEN - VOLUME_KEY_LEN_PLAIN;
    let size = of_data.key_size.unwrap_or(least);
    equal(
        it,
        "key_size (luksFormat --integrity-key-size)",
        &size,
        &least,
    )?;
    Ok(segment)
}

/// Returns whether a keyslot has the parameters of a node's keyslot, and holds the volume key.
/// Other tools make other keyslots: systemd-cryptenroll uses PBKDF2, and `cryptsetup luksAddKey`
/// has the options --unbound, --pbkdf and --hash. cryptsetup refuses --keyslot-cipher for a disk
/// with integrity.
fn is_of_node(id: &str, keyslot: &Value, digest: &Digest) -> bool {
    digest.keyslots.iter().any(|bound| bound == id)
        && keyslot["kdf"]["type"] == KDF
        && keyslot["af"]["hash"] == HASH
        && keyslot["area"]["encryption"] == CIPHER
        && keyslot["area"]["key_size"] == AREA_KEY_LEN
}

/// Checks keyslot 0, which is the node's, and each other keyslot with the same parameters.
fn check_keyslots(
    keyslots: &Value,
    digest: &Digest,
    key_size: usize,
) -> Result<BTreeMap<u32, Keyslot>, Fault> {
    let mut own = keyslots.clone();
    if let Some(all) = own.as_object_mut() {
        ensure(all.len() <= MAX_OBJECTS, Costly, || {
            format!("{} keyslots, expected at most {MAX_OBJECTS}", all.len())
        })?;
        all.retain(|id, keyslot| id == KEYSLOT || is_of_node(id, keyslot, digest));
    }
    let slot = &own[KEYSLOT];
    let is_ours = slot.is_null() || is_of_node(KEYSLOT, slot, digest);
    ensure(is_ours, Foreign, || {
        format!(
            "keyslot {KEYSLOT}: kdf type is {}, af hash is {}, area encryption is {}, area key_size is {}, expected {KDF:?}, {HASH:?}, \
             {CIPHER:?}, {AREA_KEY_LEN}, and the key of the data: {CONVERT} --key-slot {KEYSLOT} changes the parameters back",
            slot["kdf"]["type"],
            slot["af"]["hash"],
            slot["area"]["encryption"],
            slot["area"]["key_size"]
        )
    })?;
    let mut keyslots = BTreeMap::new();
    for (id, keyslot) in objects("keyslot", &own)? {
        let keyslot: Keyslot = typed("keyslot", id, keyslot)?;
        keyslots.insert(id, keyslot);
    }
    for (id, keyslot) in &keyslots {
        let it = format!("keyslot {id}");
        let fields = [
            ("type", &*keyslot.kind, "luks2"),
            ("af type", &*keyslot.af.kind, "luks1"),
            ("area type", &*keyslot.area.kind, "raw"),
        ];
        all_equal(&it, &fields)?;
        equal(&it, "key_size", &keyslot.key_size, &key_size)?;
        equal(&it, "af stripes", &keyslot.af.stripes, &STRIPES)?;
        let (size, least) = (keyslot.area.size.0, (keyslot.key_size * STRIPES) as u64);
        ensure(size >= least, Malformed, || {
            format!("{it}: its area has {size} bytes, expected at least {least}")
        })?;
        let Kdf {
            time,
            memory,
            cpus,
            salt,
            ..
        } = &keyslot.kdf;
        equal(&it, "length of the kdf salt", &salt.0.len(), &SALT_LEN)?;
        within(&it, "kdf cpus", Costly, *cpus, 1..=MAX_KDF_CPUS)?;
        // the minimum of argon2 (RFC 9106 §3.1)
        let memories = 8 * cpus..=MAX_KDF_MEMORY_KIB;
        within(&it, "kdf memory", Costly, *memory, memories)?;
        within(&it, "kdf time", Malformed, *time, 1..=u32::MAX)?;
    }
    Ok(keyslots)
}

/// Checks the digest of the volume key. Other digests belong to unbound keyslots.
fn check_digest(digests: &Value) -> Result<(u32, Digest), Fault> {
    let mut of_data = Vec::new();
    for (id, digest) in objects("digest", digests)? {
        let digest: Digest = typed("digest", id, digest)?;
        if !digest.segments.is_empty() {
            of_data.push((id, digest));
        }
    }
    let count = of_data.len();
    let of_data = of_data.pop().filter(|_| count == 1);
    let (id, digest) = of_data.ok_or(format!("{count} digests, expected 1"))?;
    let it = format!("digest {id}");
    let fields = [
        ("type", &*digest.kind, "pbkdf2"),
        ("hash", &*digest.hash, HASH),
    ];
    all_equal(&it, &fields)?;
    equal(&it, "segments", &digest.segments, &["0"])?;
    equal(&it, "length of the salt", &digest.salt.0.len(), &SALT_LEN)?;
    equal(
        &it,
        "length of the digest",
        &digest.digest.0.len(),
        &SALT_LEN,
    )?;
    let iterations = 1..=u32::MAX;
    within(&it, "iterations", Malformed, digest.iterations, iterations)?;
    Ok((id, digest))
}

/// Checks the tokens. Other tokens are free-form, but token 0 must be that of a state disk.
fn check_tokens(tokens: &Value) -> Result<(), Fault> {
    if let Some((_, token)) = objects("token", tokens)?
        .iter()
        .find(|(id, _)| *id == TOKEN)
    {
        equal(
            "token 0",
            "type",
            &token["type"].as_str().unwrap_or_default(),
            &TOKEN_TYPE,
        )?;
        let initialized = &token["diskIsInitialized"];
        ensure(initialized.is_boolean(), Foreign, || {
            format!("token 0: diskIsInitialized is {initialized}, expected a boolean")
        })?;
    }
    Ok(())
}

/// Returns the objects of a section with their numbers; `what` is the name of one object.
fn objects<'a>(what: &str, section: &'a Value) -> Result<Vec<(u32, &'a Value)>, Fault> {
    let section = section
        .as_object()
        .ok_or(format!("{what}s is not an object"))?;
    ensure(section.len() <= MAX_OBJECTS, Costly, || {
        format!("{} {what}s, expected at most {MAX_OBJECTS}", section.len())
    })?;
    let mut objects = Vec::new();
    for (id, object) in section {
        let number: u32 = id
            .parse()
            .map_err(|_| format!("{what} id {id:?} is not a number"))?;
        equal(what, "id", id, &number.to_string())?;
        objects.push((number, object));
    }
    Ok(objects)
}

fn typed<T: de::DeserializeOwned>(what: &str, id: u32, value: &Value) -> Result<T, Fault> {
    T::deserialize(value).map_err(|e| Foreign(format!("{what} {id}: {e}")))
}

impl Metadata {
    /// Returns the cost of a key that opens no keyslot, in the units of [`MAX_WORK`].
    pub fn work(&self) -> u64 {
        let cost = |slot: &Keyslot| slot.kdf.work() + u64::from(self.digest.iterations);
        self.keyslots.values().map(cost).sum()
    }

    /// Returns the offset in bytes of free space for the keyslot area of a key of `key_size` bytes;
    /// `None` if there is none.
    pub fn free_area(&self, key_size: usize) -> Option<u64> {
        let size = area_size(key_size);
        let mut at = self.areas_start;
        for (start, end) in &self.areas {
            if at + size <= *start {
                break;
            }
            at = end.next_multiple_of(AREA_ALIGN);
        }
        (at + size <= self.areas_end).then_some(at)
    }

    /// Returns the area of keyslot 0 (offset and size in bytes); `None` if there is none.
    pub fn keyslot_area(&self) -> Option<(u64, u64)> {
        self.keyslots
            .get(&0)
            .map(|slot| (slot.area.offset.0, slot.area.size.0))
    }
}

/// Returns the size in bytes of the area for the 4000 stripes of a key.
pub(super) fn area_size(key_size: usize) -> u64 {
    ((key_size * STRIPES) as u64).next_multiple_of(AREA_ALIGN)
}

/// Returns the key derivation of the keyslots that we write.
pub(super) fn our_kdf(salt: [u8; SALT_LEN]) -> Kdf {
    Kdf {
        kind: KDF.into(),
        time: OUR_KDF_TIME,
        memory: OUR_KDF_MEMORY_KIB,
        cpus: OUR_KDF_CPUS,
        salt: Base64(salt.to_vec()),
    }
}

/// Returns the metadata of a disk that we format: one keyslot, one segment with integrity, and the
/// token with `false`.
pub(super) fn new(keyslot: Value, digest_salt: &[u8], digest: &[u8]) -> Value {
    let areas_start = 2 * HDR_SIZE;
    let mut metadata = json!({
        "keyslots": { KEYSLOT: keyslot },
        "tokens": {},
        "segments": { "0": {
            "type": "crypt",
            "offset": DATA_OFFSET.to_string(),
            "size": "dynamic",
            "iv_tweak": "0",
            "encryption": CIPHER,
            "sector_size": SECTOR_SIZE,
            "integrity": { "type": INTEGRITY, "journal_encryption": "none", "journal_integrity": "none" },
        }},
        "digests": { "0": {
            "type": "pbkdf2",
            "keyslots": [KEYSLOT],
            "segments": ["0"],
            "hash": HASH,
            "iterations": OUR_DIGEST_ITERATIONS,
            "salt": BASE64_STANDARD.encode(digest_salt),
            "digest": BASE64_STANDARD.encode(digest),
        }},
        "config": {
            "json_size": (HDR_SIZE - BINARY_LEN as u64).to_string(),
            "keyslots_size": (DATA_OFFSET - areas_start).to_string(),
        },
    });
    set_token(&mut metadata, false);
    metadata
}

/// Returns a keyslot object for a key of `key_size` bytes in the area at `offset`.
pub(super) fn keyslot(key_size: usize, offset: u64, kdf: &Kdf) -> Value {
    json!({
        "type": "luks2",
        "key_size": key_size,
        "af": { "type": "luks1", "stripes": STRIPES, "hash": HASH },
        "area": {
            "type": "raw",
            "offset": offset.to_string(),
            "size": area_size(key_size).to_string(),
            "encryption": CIPHER,
            "key_size": AREA_KEY_LEN,
        },
        "kdf": {
            "type": kdf.kind,
            "time": kdf.time,
            "memory": kdf.memory,
            "cpus": kdf.cpus,
            "salt": BASE64_STANDARD.encode(&kdf.salt.0),
        },
    })
}

/// Sets keyslot 0, and makes it the only keyslot of the digest `digest_id`.
pub(super) fn set_keyslot(metadata: &mut Value, keyslot: Value, digest_id: u32) {
    metadata["keyslots"][KEYSLOT] = keyslot;
    if let Some(list) = metadata["digests"][digest_id.to_string()]["keyslots"].as_array_mut()
        && !list.iter().any(|id| id == KEYSLOT)
    {
        list.push(KEYSLOT.into());
    }
}

/// Sets token 0.
pub(super) fn set_token(metadata: &mut Value, initialized: bool) {
    metadata["tokens"][TOKEN.to_string()] =
        json!({ "type": TOKEN_TYPE, "keyslots": [], "diskIsInitialized": initialized });
}
