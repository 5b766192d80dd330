//! The JSON area of a header copy: parses its bytes to valid LUKS2 metadata, and writes metadata as
//! text.
//!
//! Metadata is valid if libcryptsetup (2.6 to 2.8) accepts it: the rules are §3 of the
//! specification and the checks of libcryptsetup. A copy that violates a rule is ignored, and the
//! other copy is used. The rules for several segments are omitted, because a state disk has one
//! segment. [`metadata`](super::metadata) checks this, and all limits of our own.

use std::fmt::Write as _;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value};

use super::error::HeaderFault::{self, Foreign, Malformed};
use super::error::ensure;
use super::layout::{AREA_ALIGN, BINARY_LEN};

/// Maximum nesting depth: the default of json-c, with which libcryptsetup parses.
const MAX_DEPTH: usize = 32;
/// Maximum size in bytes of the keyslots area (LUKS2_MAX_KEYSLOTS_SIZE of libcryptsetup). The size
/// is a multiple of [`AREA_ALIGN`].
const MAX_KEYSLOTS_SIZE: u64 = 128 << 20;
/// Alignment in bytes of the start and end of segments: a sector of device-mapper.
const SECTOR: u64 = 512;

/// Parses the JSON area of one copy: one JSON object, then at least one zero byte, and zero bytes
/// to the end.
///
/// The error says what is wrong with this copy.
pub(super) fn parse(area: &[u8]) -> Result<Value, HeaderFault> {
    let end = area
        .iter()
        .position(|b| *b == 0)
        .ok_or_else(|| "the JSON area has no end".to_owned())?;
    ensure(area[end..].iter().all(|b| *b == 0), Malformed, || {
        "the JSON area has bytes after its end".into()
    })?;
    ensure(area[0] == b'{', Malformed, || {
        "the JSON area does not begin with '{'".into()
    })?;
    let metadata: Value =
        serde_json::from_slice(&area[..end]).map_err(|e| format!("the JSON area: {e}"))?;
    let depth = depth(&metadata);
    ensure(depth <= MAX_DEPTH, Malformed, || {
        format!("the JSON area: {depth} levels deep, expected at most {MAX_DEPTH}")
    })?;
    check(&metadata, area.len() as u64).map_err(|why| format!("the JSON area: {why}"))?;
    Ok(metadata)
}

/// Returns the nesting depth of `value`. The recursion is limited by the parser, which accepts at
/// most 128 levels.
fn depth(value: &Value) -> usize {
    let below = match value {
        Value::Object(members) => members.values().map(depth).max(),
        Value::Array(items) => items.iter().map(depth).max(),
        _ => None,
    };
    1 + below.unwrap_or(0)
}

/// Checks all rules. The error names the object that violates a rule.
fn check(metadata: &Value, json_size: u64) -> Result<(), HeaderFault> {
    let [keyslots, tokens, segments, digests] =
        ["keyslots", "tokens", "segments", "digests"].map(|name| section(metadata, name));
    let (keyslots, segments, digests) = (keyslots?, segments?, digests?);
    for (id, token) in tokens? {
        let it = format!("token {id}");
        text(&it, token, "type")?;
        references(&it, token, "keyslots", keyslots)?;
    }
    for (id, digest) in digests {
        let it = format!("digest {id}");
        text(&it, digest, "type")?;
        references(&it, digest, "keyslots", keyslots)?;
        references(&it, digest, "segments", segments)?;
    }
    ensure(segments.contains_key("0"), Malformed, || {
        "no segment 0".into()
    })?;
    let digests_of = |list: &str, id: &str| {
        let has = |digest: &&Value| {
            digest[list]
                .as_array()
                .is_some_and(|ids| ids.iter().any(|other| other == id))
        };
        digests.values().filter(has).count()
    };
    for (id, segment) in segments {
        let it = format!("segment {id}");
        check_segment(&it, segment)?;
        ensure(
            segment["type"] != "crypt" || digests_of("segments", id) > 0,
            Malformed,
            || format!("{it}: no digest refers to it"),
        )?;
    }
    for (id, keyslot) in keyslots {
        let it = format!("keyslot {id}");
        check_keyslot(&it, keyslot)?;
        let digests = digests_of("keyslots", id);
        ensure(digests == 1, Malformed, || {
            format!("{it}: {digests} digests refer to it, expected 1")
        })?;
    }
    check_config(metadata, json_size)?;
    areas(metadata).map(drop)
}

fn check_segment(it: &str, segment: &Value) -> Result<(), HeaderFault> {
    let kind = text(it, segment, "type")?;
    let offset = decimal(it, segment, "offset")?;
    let size = match text(it, segment, "size")? {
        "dynamic" => None,
        _ => Some(decimal(it, segment, "size")?),
    };
    let whole = |size: u64, sector: u64| size > 0 && size.is_multiple_of(sector);
    ensure(
        offset.is_multiple_of(SECTOR) && size.is_none_or(|size| whole(size, SECTOR)),
        Malformed,
        || {
            format!(
                "{it}: its offset {offset} and its size {size:?} are not multiples of {SECTOR} bytes"
            )
        },
    )?;
    if segment.get("flags").is_some() {
        texts(it, segment, "flags")?;
    }
    if kind != "crypt" {
        return Ok(());
    }
    decimal(it, segment, "iv_tweak")?;
    text(it, segment, "encryption")?;
    let sector = u64::from(number(it, segment, "sector_size")?);
    ensure(
        whole(sector, SECTOR) && size.is_none_or(|size| whole(size, sector)),
        Malformed,
        || {
            format!(
                "{it}: sector_size is {sector}, expected a multiple of {SECTOR} that divides its size"
            )
        },
    )?;
    if let Some(integrity) = segment.get("integrity") {
        for name in ["type", "journal_encryption", "journal_integrity"] {
            text(&format!("{it}: integrity"), integrity, name)?;
        }
    }
    Ok(())
}

fn check_keyslot(it: &str, keyslot: &Value) -> Result<(), HeaderFault> {
    let kind = text(it, keyslot, "type")?;
    number(it, keyslot, "key_size")?;
    let area = format!("{it}: area");
    text(&area, &keyslot["area"], "type")?;
    // keyslots of other types belong to other programs
    if kind != "luks2" {
        return Ok(());
    }
    for name in ["kdf", "af"] {
        ensure(keyslot[name].is_object(), Malformed, || {
            format!("{it}: no object {name:?}")
        })?;
    }
    let (kdf, af) = (format!("{it}: kdf"), format!("{it}: af"));
    let (texts, integers): (&[&str], &[&str]) = match text(&kdf, &keyslot["kdf"], "type")? {
        "pbkdf2" => (&["hash", "salt"], &["iterations"]),
        "argon2i" | "argon2id" => (&["salt"], &["time", "memory", "cpus"]),
        _ => (&[], &[]),
    };
    for name in texts {
        text(&kdf, &keyslot["kdf"], name)?;
    }
    for name in integers {
        integer(&kdf, &keyslot["kdf"], name)?;
    }
    ensure(
        text(&af, &keyslot["af"], "type")? == "luks1",
        Malformed,
        || format!("{af}: its type is not \"luks1\""),
    )?;
    text(&af, &keyslot["af"], "hash")?;
    integer(&af, &keyslot["af"], "stripes")?;
    ensure(keyslot["area"]["type"] == "raw", Malformed, || {
        format!("{area}: its type is not \"raw\"")
    })?;
    text(&area, &keyslot["area"], "encryption")?;
    integer(&area, &keyslot["area"], "key_size")
}

/// Checks the sizes of the two areas, and that the data starts behind them.
fn check_config(metadata: &Value, json_size: u64) -> Result<(), HeaderFault> {
    let config = &metadata["config"];
    ensure(config.is_object(), Malformed, || {
        "no object \"config\"".into()
    })?;
    let size = decimal("config", config, "json_size")?;
    ensure(size == json_size, Malformed, || {
        format!("config: json_size is {size}, expected {json_size}")
    })?;
    let size = decimal("config", config, "keyslots_size")?;
    ensure(
        size <= MAX_KEYSLOTS_SIZE && size.is_multiple_of(AREA_ALIGN),
        Malformed,
        || {
            format!(
                "config: keyslots_size is {size}, expected a multiple of {AREA_ALIGN} up to {MAX_KEYSLOTS_SIZE}"
            )
        },
    )?;
    let data = decimal("segment 0", &metadata["segments"]["0"], "offset")?;
    let (_, areas_end) = keyslots_area(metadata);
    ensure(data == 0 || areas_end <= data, Malformed, || {
        format!(
            "segment 0: it starts at byte {data}, within the keyslots area, which ends at {areas_end}"
        )
    })?;
    if config.get("flags").is_some() {
        texts("config", config, "flags")?;
    }
    match config.get("requirements") {
        None => Ok(()),
        Some(Value::Object(requirements)) if !requirements.contains_key("mandatory") => Ok(()),
        Some(requirements) => texts("config: requirements", requirements, "mandatory").map(drop),
    }
}

/// Returns the start and end in bytes of the area of each keyslot, in order. Each must lie within
/// the keyslots area, and no two may overlap.
pub(super) fn areas(metadata: &Value) -> Result<Vec<(u64, u64)>, HeaderFault> {
    let (start, end) = keyslots_area(metadata);
    let mut areas: Vec<(u64, u64, &str)> = Vec::new();
    for (id, keyslot) in section(metadata, "keyslots")? {
        let it = format!("keyslot {id}");
        let (offset, size) = (
            decimal(&it, &keyslot["area"], "offset")?,
            decimal(&it, &keyslot["area"], "size")?,
        );
        let area_end = offset
            .checked_add(size)
            .filter(|area_end| size > 0 && offset >= start && *area_end <= end);
        let area_end = area_end.ok_or_else(|| {
            format!("{it}: its area of {size} bytes at {offset} is not within the keyslots area {start}..{end}")
        })?;
        areas.push((offset, area_end, id));
    }
    areas.sort();
    for pair in areas.windows(2) {
        ensure(pair[0].1 <= pair[1].0, Malformed, || {
            format!(
                "the areas of keyslots {} and {} overlap",
                pair[0].2, pair[1].2
            )
        })?;
    }
    Ok(areas.iter().map(|area| (area.0, area.1)).collect())
}

/// Returns the start and end in bytes of the keyslots area. The config of the metadata must have
/// been checked.
pub(super) fn keyslots_area(metadata: &Value) -> (u64, u64) {
    let size = |name| decimal("config", &metadata["config"], name).unwrap_or(0);
    let start = 2 * (BINARY_LEN as u64 + size("json_size"));
    (start, start + size("keyslots_size"))
}

/// Returns the objects of a section by their ids.
fn section<'a>(metadata: &'a Value, name: &str) -> Result<&'a Map<String, Value>, HeaderFault> {
    let section = metadata[name]
        .as_object()
        .ok_or_else(|| format!("no object {name:?}"))?;
    for (id, object) in section {
        ensure(is_digits(id), Malformed, || {
            format!("{name}: id {id:?} is not a number")
        })?;
        ensure(object.is_object(), Malformed, || {
            format!("{name}: {id} is not an object")
        })?;
    }
    Ok(section)
}

/// Checks a list of ids, each of which must exist in `section`.
fn references(
    it: &str,
    object: &Value,
    name: &str,
    section: &Map<String, Value>,
) -> Result<(), HeaderFault> {
    let unknown = texts(it, object, name)?
        .into_iter()
        .find(|id| !section.contains_key(*id));
    ensure(unknown.is_none(), Malformed, || {
        format!(
            "{it}: {name} contains {:?}, which does not exist",
            unknown.unwrap_or_default()
        )
    })
}

/// Checks that the object has no members except `known`.
pub(super) fn only(what: &str, object: &Value, known: &[&str]) -> Result<(), HeaderFault> {
    let mut names = object.as_object().into_iter().flat_map(Map::keys);
    match names.find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Foreign(format!("{what}: unknown field `{name}`"))),
    }
}

pub(super) fn texts<'a>(
    it: &str,
    object: &'a Value,
    name: &str,
) -> Result<Vec<&'a str>, HeaderFault> {
    let texts = object[name]
        .as_array()
        .and_then(|items| items.iter().map(Value::as_str).collect());
    texts.ok_or_else(|| Malformed(format!("{it}: {name} is not a list of strings")))
}

pub(super) fn text<'a>(it: &str, object: &'a Value, name: &str) -> Result<&'a str, HeaderFault> {
    let text = object[name].as_str().filter(|text| !text.is_empty());
    text.ok_or_else(|| Malformed(format!("{it}: {name} is not a non-empty string")))
}

/// Returns a 64-bit number, which LUKS2 writes as a decimal string.
pub(super) fn decimal(it: &str, object: &Value, name: &str) -> Result<u64, HeaderFault> {
    let text = text(it, object, name)?;
    let number = text.parse().ok().filter(|_| is_digits(text));
    Ok(number.ok_or_else(|| {
        format!("{it}: {name} is {text:?}, which is not a decimal number of 64 bits")
    })?)
}

pub(super) fn number(it: &str, object: &Value, name: &str) -> Result<u32, HeaderFault> {
    let number = object[name]
        .as_u64()
        .and_then(|number| number.try_into().ok());
    let got = &object[name];
    Ok(number.ok_or_else(|| format!("{it}: {name} is {got}, expected a number of 32 bits"))?)
}

/// Returns 32 bytes, which LUKS2 writes in standard base64: each salt, digest and MAC of a header.
pub(super) fn bytes(it: &str, object: &Value, name: &str) -> Result<[u8; 32], HeaderFault> {
    let bytes = BASE64_STANDARD
        .decode(text(it, object, name)?)
        .map_err(|error| format!("{it}: {name} is not base64: {error}"))?;
    let length = bytes.len();
    let bytes = bytes.try_into();
    bytes.map_err(|_| Foreign(format!("{it}: {name} has {length} bytes, expected 32")))
}

fn integer(it: &str, object: &Value, name: &str) -> Result<(), HeaderFault> {
    let value = &object[name];
    ensure(value.is_i64() || value.is_u64(), Malformed, || {
        format!("{it}: {name} is {value}, expected an integer")
    })
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns `value` as text, with the members of objects in the order in which libcryptsetup and
/// Constellation write them.
pub(super) fn to_text(value: &Value) -> String {
    let mut text = String::new();
    put(value, &mut text);
    text
}

/// The order of members in every kind of object, separated by spaces. Members that are not listed
/// follow in alphabetical order.
const MEMBER_ORDER: &str = "type keyslots diskIsInitialized tokens segments digests config offset size flags iv_tweak \
    encryption sector_size integrity key_size af area kdf journal_encryption journal_integrity \
    stripes time memory cpus hash iterations salt digest json_size";

fn put(value: &Value, text: &mut String) {
    match value {
        Value::Object(members) => {
            text.push('{');
            for (n, (name, member)) in in_order(members).into_iter().enumerate() {
                let comma = if n == 0 { "" } else { "," };
                // Display of Value is compact JSON with quotes and escapes
                let _ = write!(text, "{comma}{}:", Value::from(name));
                put(member, text);
            }
            text.push('}');
        }
        other => {
            let _ = write!(text, "{other}");
        }
    }
}

fn in_order(members: &Map<String, Value>) -> Vec<(&str, &Value)> {
    let mut members: Vec<(&str, &Value)> = members
        .iter()
        .map(|(name, member)| (name.as_str(), member))
        .collect();
    let place = |name: &str| MEMBER_ORDER.split(' ').position(|known| known == name);
    members.sort_by_key(|(name, _)| place(name).unwrap_or(usize::MAX));
    members
}
