//! The metadata rules (LUKS2 specification §3): decides whether metadata belongs to a state disk,
//! enforces limits, and edits metadata.
//!
//! The rules are those of Constellation, which refuses every unknown field (here: except in digests of
//! unbound keyslots) and every cipher, hash or KDF except one, so that a host cannot give a weak header to
//! a node. Additional limits prevent a header from making a node allocate memory or compute without bound.
//! Edits work on the [`Value`] as it was read, and preserve unknown fields.
//!
//! Other tools (cryptsetup, systemd-cryptenroll) may add keyslots, tokens, priorities and flags to
//! a node's disk. Additions that change neither the data nor keyslot 0 are ignored, so that they do
//! not lock a node out.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::cluster_token::{self, ClusterToken};
use super::error::{Error, HeaderFault, ensure};
use super::header::{self, Header};
use super::json::{areas, bytes, decimal, keyslots_area, number, only, texts};
use super::layout::{
    AREA_ALIGN, BINARY_LEN, DATA_OFFSET, HDR_SIZE, STRIPES, VOLUME_KEY_LEN, VOLUME_KEY_LEN_PLAIN,
};
use super::peers::{self, Peers};
use super::token;
use Fixed::{Number, Text};
use HeaderFault::{Costly, Foreign, Malformed};

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
    /// of the token. A disk with a cluster token is initialized, whatever token 0 says: if they
    /// contradict each other, the host changed token 0, because a reset changes both.
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
    pub fn peers(&self) -> Result<Option<Peers>, HeaderFault> {
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
            has_integrity: metadata.has_integrity,
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
    /// Whether the data is authenticated.
    pub has_integrity: bool,
    /// The digest of the volume key.
    pub digest: Digest,
    pub digest_id: u32,
    /// Length of the volume key in bytes.
    pub key_size: usize,
    /// Start and end in bytes of the keyslots area.
    pub areas_start: u64,
    pub areas_end: u64,
}

#[derive(Debug)]
pub(super) struct Keyslot {
    /// Length of the key in bytes.
    pub key_size: usize,
    /// Offset and size of its area in bytes.
    pub area: (u64, u64),
    pub kdf: Kdf,
}

/// Parameters of argon2id.
#[derive(Debug)]
pub(super) struct Kdf {
    pub time: u32,
    /// In KiB.
    pub memory: u32,
    pub cpus: u32,
    pub salt: [u8; SALT_LEN],
}

/// The digest of a volume key: PBKDF2 with SHA-256.
#[derive(Debug)]
pub(super) struct Digest {
    pub iterations: u32,
    pub salt: [u8; SALT_LEN],
    pub digest: [u8; SALT_LEN],
}

impl Kdf {
    /// Returns the cost in the units of [`MAX_WORK`].
    pub fn work(&self) -> u64 {
        u64::from(self.time) * u64::from(self.memory)
    }
}

/// Checks that the object has no members except `fixed` and `others`, and that each of `fixed` has this value.
fn check_members(
    what: &str,
    object: &Value,
    fixed: &[(&str, Fixed)],
    others: &[&str],
) -> Result<(), HeaderFault> {
    for (name, expected) in fixed {
        let got = &object[name];
        let (is_equal, expected) = match expected {
            Text(text) => (got == text, format!("{text:?}")),
            Number(number) => (got.as_u64() == Some(*number), number.to_string()),
        };
        ensure(is_equal, Foreign, || {
            format!("{what}: {name} is {got}, expected {expected}")
        })?;
    }
    let names = fixed.iter().map(|(name, _)| name).chain(others);
    only(what, object, &names.copied().collect::<Vec<_>>())
}

/// The value that a member has in each header that a node accepts.
enum Fixed<'a> {
    Text(&'a str),
    Number(u64),
}

/// Returns an error that names the field unless `got` equals `expected`. The texts are compared: one
/// function for all types is much smaller than one for each.
fn equal(
    what: &str,
    field: &str,
    got: &dyn fmt::Debug,
    expected: &dyn fmt::Debug,
) -> Result<(), HeaderFault> {
    let (got, expected) = (format!("{got:?}"), format!("{expected:?}"));
    ensure(got == expected, Foreign, || {
        format!("{what}: {field} is {got}, expected {expected}")
    })
}

/// Returns an error of this kind that names the field unless the number is within the range.
fn within(
    what: &str,
    field: &str,
    kind: fn(String) -> HeaderFault,
    got: u32,
    range: RangeInclusive<u32>,
) -> Result<(), HeaderFault> {
    ensure(range.contains(&got), kind, || {
        let (least, most) = (range.start(), range.end());
        format!("{what}: {field} is {got}, expected {least} to {most}")
    })
}

/// Checks the binary header, and that the metadata ask for nothing that we do not know.
fn check_header(header: &Header) -> Result<(), HeaderFault> {
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
    let advice = if required.to_string().contains("reencrypt") {
        "finish or undo what cryptsetup began (cryptsetup reencrypt)"
    } else {
        "no node formats a disk with them (luksFormat --hw-opal, --integrity-inline): attach the right disk"
    };
    none("requirements", required, advice)?;
    none(
        "flags",
        &config["flags"],
        "`cryptsetup open --persistent` without other options removes them",
    )
}

fn none(name: &str, list: &Value, advice: &str) -> Result<(), HeaderFault> {
    ensure(is_empty(list), Foreign, || {
        format!("config: the {name} are {list}, expected none: {advice}")
    })
}

fn is_empty(list: &Value) -> bool {
    list.as_array().is_none_or(Vec::is_empty)
}

fn check(
    header: &Header,
    integrity: Integrity,
    least_keyslots: usize,
) -> Result<Metadata, HeaderFault> {
    check_header(header)?;
    let (areas_start, areas_end) = keyslots_area(&header.metadata);
    let has_integrity = check_segment(&header.metadata["segments"], integrity)?;
    let key_size = if has_integrity {
        VOLUME_KEY_LEN
    } else {
        VOLUME_KEY_LEN_PLAIN
    };
    let (digest_id, digest, bound) = check_digest(&header.metadata["digests"])?;
    let all = &header.metadata["keyslots"];
    let keyslots = check_keyslots(all, &bound, key_size)?;
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
        has_integrity,
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

/// Returns whether the data is authenticated.
fn check_segment(segments: &Value, integrity: Integrity) -> Result<bool, HeaderFault> {
    let segments = objects("segment", segments)?;
    let ids: Vec<u32> = segments.iter().map(|(id, _)| *id).collect();
    equal("segments", "the list of ids", &ids, &[0])?;
    let (_, segment) = segments[0];
    let offset = DATA_OFFSET.to_string();
    let fixed = [
        ("type", Text("crypt")),
        ("offset", Text(&offset)),
        ("size", Text("dynamic")),
        ("iv_tweak", Text("0")),
        ("encryption", Text(CIPHER)),
        ("sector_size", Number(SECTOR_SIZE.into())),
    ];
    check_members("segment 0", segment, &fixed, &["flags", "integrity"])?;
    let flags = &segment["flags"];
    ensure(is_empty(flags), Foreign, || {
        format!("segment 0: flags is {flags}, expected none")
    })?;
    let of_data = &segment["integrity"];
    if of_data.is_null() {
        ensure(integrity == Integrity::Optional, Foreign, || {
            format!(
                "segment 0: integrity is missing, expected {INTEGRITY:?}: its data is not authenticated"
            )
        })?;
        return Ok(false);
    }
    let it = "segment 0: integrity";
    let fixed = [
        ("type", Text(INTEGRITY)),
        ("journal_encryption", Text("none")),
        ("journal_integrity", Text("none")),
    ];
    check_members(it, of_data, &fixed, &["key_size"])?;
    let size = &of_data["key_size"];
    let expected = VOLUME_KEY_LEN - VOLUME_KEY_LEN_PLAIN;
    ensure(size.is_null() || *size == expected, Foreign, || {
        format!("{it}: key_size (luksFormat --integrity-key-size) is {size}, expected {expected}")
    })?;
    Ok(true)
}

/// Returns whether a keyslot has the parameters of a node's keyslot, and holds the volume key.
/// Other tools make other keyslots: systemd-cryptenroll uses PBKDF2, and `cryptsetup luksAddKey`
/// has the options --unbound, --pbkdf and --hash. cryptsetup refuses --keyslot-cipher for a disk
/// with integrity.
fn is_of_node(id: &str, keyslot: &Value, bound: &[&str]) -> bool {
    bound.contains(&id)
        && keyslot["kdf"]["type"] == KDF
        && keyslot["af"]["hash"] == HASH
        && keyslot["area"]["encryption"] == CIPHER
        && keyslot["area"]["key_size"] == AREA_KEY_LEN
}

/// Checks keyslot 0, which is the node's, and each other keyslot with the same parameters. `bound` has the
/// keyslots of the volume key.
fn check_keyslots(
    keyslots: &Value,
    bound: &[&str],
    key_size: usize,
) -> Result<BTreeMap<u32, Keyslot>, HeaderFault> {
    let mut own = keyslots.clone();
    if let Some(all) = own.as_object_mut() {
        ensure(all.len() <= MAX_OBJECTS, Costly, || {
            format!("{} keyslots, expected at most {MAX_OBJECTS}", all.len())
        })?;
        all.retain(|id, keyslot| id == KEYSLOT || is_of_node(id, keyslot, bound));
    }
    let slot = &own[KEYSLOT];
    let is_ours = slot.is_null() || is_of_node(KEYSLOT, slot, bound);
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
        let keyslot = read_keyslot(&format!("keyslot {id}"), keyslot, key_size)?;
        keyslots.insert(id, keyslot);
    }
    Ok(keyslots)
}

fn read_keyslot(it: &str, keyslot: &Value, key_size: usize) -> Result<Keyslot, HeaderFault> {
    let fixed = [
        ("type", Text("luks2")),
        ("key_size", Number(key_size as u64)),
    ];
    check_members(it, keyslot, &fixed, &["af", "area", "kdf", "priority"])?;
    let [of_af, of_area, of_kdf] = ["af", "area", "kdf"].map(|part| format!("{it}: {part}"));
    let fixed = [
        ("type", Text("luks1")),
        ("stripes", Number(STRIPES as u64)),
        ("hash", Text(HASH)),
    ];
    check_members(&of_af, &keyslot["af"], &fixed, &[])?;

    let area = &keyslot["area"];
    let fixed = [
        ("type", Text("raw")),
        ("encryption", Text(CIPHER)),
        ("key_size", Number(AREA_KEY_LEN as u64)),
    ];
    check_members(&of_area, area, &fixed, &["offset", "size"])?;
    let area = (
        decimal(&of_area, area, "offset")?,
        decimal(&of_area, area, "size")?,
    );
    let (size, least) = (area.1, (key_size * STRIPES) as u64);
    ensure(size >= least, Malformed, || {
        format!("{it}: its area has {size} bytes, expected at least {least}")
    })?;

    let kdf = &keyslot["kdf"];
    let others = ["time", "memory", "cpus", "salt"];
    check_members(&of_kdf, kdf, &[("type", Text(KDF))], &others)?;
    let costs = ["time", "memory", "cpus"];
    let [time, memory, cpus] = costs.map(|cost| number(&of_kdf, kdf, cost));
    let kdf = Kdf {
        time: time?,
        memory: memory?,
        cpus: cpus?,
        salt: bytes(&of_kdf, kdf, "salt")?,
    };
    within(&of_kdf, "cpus", Costly, kdf.cpus, 1..=MAX_KDF_CPUS)?;
    // the minimum of argon2 (RFC 9106 §3.1)
    let memories = 8 * kdf.cpus..=MAX_KDF_MEMORY_KIB;
    within(&of_kdf, "memory", Costly, kdf.memory, memories)?;
    within(&of_kdf, "time", Malformed, kdf.time, 1..=u32::MAX)?;
    Ok(Keyslot {
        key_size,
        area,
        kdf,
    })
}

/// Returns the digest of the volume key, its number, and the keyslots of this key. Other digests belong to
/// unbound keyslots.
fn check_digest(digests: &Value) -> Result<(u32, Digest, Vec<&str>), HeaderFault> {
    let mut of_data = objects("digest", digests)?;
    of_data.retain(|(_, digest)| !is_empty(&digest["segments"]));
    let [(id, digest)] = of_data[..] else {
        return Err(format!("{} digests, expected 1", of_data.len()).into());
    };
    let it = format!("digest {id}");
    let fixed = [("type", Text("pbkdf2")), ("hash", Text(HASH))];
    let others = ["keyslots", "segments", "iterations", "salt", "digest"];
    check_members(&it, digest, &fixed, &others)?;
    equal(&it, "segments", &texts(&it, digest, "segments")?, &["0"])?;
    let iterations = number(&it, digest, "iterations")?;
    within(&it, "iterations", Malformed, iterations, 1..=u32::MAX)?;
    let of_key = Digest {
        iterations,
        salt: bytes(&it, digest, "salt")?,
        digest: bytes(&it, digest, "digest")?,
    };
    Ok((id, of_key, texts(&it, digest, "keyslots")?))
}

/// Checks the tokens. Other tokens are free-form, but token 0 must be that of a state disk.
fn check_tokens(tokens: &Value) -> Result<(), HeaderFault> {
    if let Some((_, token)) = objects("token", tokens)?
        .iter()
        .find(|(id, _)| *id == TOKEN)
    {
        let (kind, initialized) = (&token["type"], &token["diskIsInitialized"]);
        ensure(kind == TOKEN_TYPE, Foreign, || {
            format!("token 0: type is {kind}, expected {TOKEN_TYPE:?}")
        })?;
        ensure(initialized.is_boolean(), Foreign, || {
            format!("token 0: diskIsInitialized is {initialized}, expected a boolean")
        })?;
    }
    Ok(())
}

/// Returns the objects of a section with their numbers; `what` is the name of one object.
fn objects<'a>(what: &str, section: &'a Value) -> Result<Vec<(u32, &'a Value)>, HeaderFault> {
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
        self.keyslots.get(&0).map(|slot| slot.area)
    }
}

/// Returns the size in bytes of the area for the 4000 stripes of a key.
pub(super) fn area_size(key_size: usize) -> u64 {
    ((key_size * STRIPES) as u64).next_multiple_of(AREA_ALIGN)
}

/// Returns the key derivation of the keyslots that we write.
pub(super) fn our_kdf(salt: [u8; SALT_LEN]) -> Kdf {
    Kdf {
        time: OUR_KDF_TIME,
        memory: OUR_KDF_MEMORY_KIB,
        cpus: OUR_KDF_CPUS,
        salt,
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
            "type": KDF,
            "time": kdf.time,
            "memory": kdf.memory,
            "cpus": kdf.cpus,
            "salt": BASE64_STANDARD.encode(kdf.salt),
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
