//! Hostile and foreign bytes. The tests with the real cryptsetup and with power loss are in
//! tests/luks_*.rs.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use super::header::{self, Binary, Copy};
use super::layout::{HDR_SIZE, MARKER, MARKER_OFFSET};
use super::*;
use base::crypto::Secret;
use support::random::Random;

const DISK_SIZE: u64 = 64 << 20;

/// A read-only disk. Only its start is stored; the rest contains zeros.
struct Sparse {
    head: Vec<u8>,
    size: u64,
    at: u64,
    /// Bytes that cannot be read.
    bad: Vec<std::ops::Range<u64>>,
}

impl Sparse {
    fn of(head: Vec<u8>) -> Self {
        Sparse {
            head,
            size: DISK_SIZE,
            at: 0,
            bad: vec![],
        }
    }

    fn probe(&mut self) -> Probe {
        probe(self).unwrap()
    }
}

impl Read for Sparse {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len().min((self.size - self.at.min(self.size)) as usize);
        let read = self.at..self.at + len as u64;
        if self
            .bad
            .iter()
            .any(|bad| bad.start < read.end && read.start < bad.end)
        {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let stored = self.head.get(self.at as usize..).unwrap_or_default();
        let copied = len.min(stored.len());
        buf[..copied].copy_from_slice(&stored[..copied]);
        buf[copied..len].fill(0);
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for Sparse {
    fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
        self.at = match pos {
            SeekFrom::Start(at) => at,
            SeekFrom::End(by) => self.size.saturating_add_signed(by),
            SeekFrom::Current(by) => self.at.saturating_add_signed(by),
        };
        Ok(self.at)
    }
}

/// Returns the start of a formatted image: headers and the first keyslot area. It is made once,
/// because the splitter is slow.
fn formatted() -> &'static (Vec<u8>, Header) {
    static FORMATTED: OnceLock<(Vec<u8>, Header)> = OnceLock::new();
    FORMATTED.get_or_init(|| {
        struct Ram(Cursor<Vec<u8>>);
        impl Read for Ram {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                self.0.read(buf)
            }
        }
        impl Write for Ram {
            fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                self.0.write(buf)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        impl Seek for Ram {
            fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
                self.0.seek(pos)
            }
        }
        impl Device for Ram {
            fn sync(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut ram = Ram(Cursor::new(vec![0; MIN_DEVICE_SIZE as usize]));
        let header = format(&mut ram, &volume_key(), &passphrase()).unwrap();
        let mut head = ram.0.into_inner();
        head.truncate(420 << 10);
        (head, header)
    })
}

fn volume_key() -> Secret {
    Secret::new((0..96).collect())
}

fn passphrase() -> Secret {
    Secret::new(b"a passphrase".to_vec())
}

/// Returns the formatted disk with other JSON and valid checksums in both copies.
fn disk_with(json: &str) -> Option<Sparse> {
    let (head, header) = formatted();
    let mut head = head.clone();
    let size = HDR_SIZE as usize;
    head[..size].copy_from_slice(&header.binary.encode(Copy::Primary, json)?);
    head[size..2 * size].copy_from_slice(&header.binary.encode(Copy::Secondary, json)?);
    Some(Sparse::of(head))
}

/// Changes the metadata of the formatted disk, and returns why it is refused then.
fn refusal(change: impl FnOnce(&mut Value)) -> String {
    let mut metadata = formatted().1.metadata.clone();
    change(&mut metadata);
    let metadata = match json::parse(&json_area(&json::to_text(&metadata))) {
        Ok(metadata) => metadata,
        Err(why) => return why.to_string(),
    };
    let header = Header {
        metadata,
        ..formatted().1.clone()
    };
    match header.check_ours(Integrity::Required) {
        Err(Error::NotOurs(why)) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Returns a JSON area that starts with `text`.
fn json_area(text: &str) -> Vec<u8> {
    let mut area = text.as_bytes().to_vec();
    area.resize((HDR_SIZE as usize - 4096).max(text.len() + 1), 0);
    area
}

/// Adds a keyslot with its area at `offset`.
fn add_keyslot(metadata: &mut Value, id: &str, offset: u64) {
    let mut slot = metadata["keyslots"]["0"].clone();
    slot["area"]["offset"] = json!(offset.to_string());
    metadata["keyslots"][id] = slot;
    metadata["digests"]["0"]["keyslots"]
        .as_array_mut()
        .unwrap()
        .push(json!(id));
}

#[test]
fn each_acceptance_rule_refuses_and_names_what_breaks_it() {
    let cases = [
        (
            "/keyslots",
            json!({}),
            "digest 0: keyslots contains \"0\", which does not exist",
        ),
        (
            "/keyslots/0/type",
            json!("luks3"),
            "keyslot 0: type is \"luks3\"",
        ),
        (
            "/keyslots/0/key_size",
            json!(64),
            "keyslot 0: key_size is 64",
        ),
        (
            "/keyslots/0/key_size",
            json!(-1),
            "keyslot 0: key_size is -1",
        ),
        (
            "/keyslots/0/af/type",
            json!("luks2"),
            "keyslot 0: af: its type",
        ),
        (
            "/keyslots/0/af/stripes",
            json!(1),
            "af: stripes is 1, expected 4000",
        ),
        ("/keyslots/0/af/hash", json!("sha1"), "af hash"),
        (
            "/keyslots/0/area/type",
            json!("journal"),
            "keyslot 0: area: its type",
        ),
        (
            "/keyslots/0/area/offset",
            json!("0"),
            "not within the keyslots area",
        ),
        (
            "/keyslots/0/area/offset",
            json!("32767"),
            "not within the keyslots area",
        ),
        (
            "/keyslots/0/area/offset",
            json!("16777215"),
            "not within the keyslots area",
        ),
        (
            "/keyslots/0/area/offset",
            json!("18446744073709551615"),
            "not within the keyslots area",
        ),
        (
            "/keyslots/0/area/offset",
            json!("18446744073709551616"),
            "not a decimal number",
        ),
        (
            "/keyslots/0/area/offset",
            json!("+32768"),
            "not a decimal number",
        ),
        (
            "/keyslots/0/area/offset",
            json!(32768),
            "offset is not a non-empty string",
        ),
        (
            "/keyslots/0/area/size",
            json!("18446744073709551615"),
            "not within the keyslots area",
        ),
        (
            "/keyslots/0/area/size",
            json!("383999"),
            "expected at least 384000",
        ),
        (
            "/keyslots/0/area/encryption",
            json!("cipher_null-ecb"),
            "area encryption",
        ),
        ("/keyslots/0/area/key_size", json!(32), "area key_size"),
        (
            "/keyslots/0/kdf/type",
            json!("argon2i"),
            "kdf type is \"argon2i\"",
        ),
        ("/keyslots/0/kdf/time", json!(0), "kdf: time is 0"),
        (
            "/keyslots/0/kdf/time",
            json!(4_294_967_295u32),
            "one try of a key would cost 137438954440",
        ),
        ("/keyslots/0/kdf/memory", json!(0), "kdf: memory is 0"),
        (
            "/keyslots/0/kdf/memory",
            json!(7),
            "kdf: memory is 7, expected 8",
        ),
        (
            "/keyslots/0/kdf/memory",
            json!(1_048_577),
            "kdf: memory is 1048577",
        ),
        ("/keyslots/0/kdf/cpus", json!(0), "kdf: cpus is 0"),
        ("/keyslots/0/kdf/cpus", json!(5), "kdf: cpus is 5"),
        (
            "/keyslots/0/kdf/salt",
            json!(""),
            "keyslot 0: kdf: salt is not a non-empty string",
        ),
        (
            "/keyslots/0/kdf/salt",
            json!("AAAA"),
            "kdf: salt has 3 bytes, expected 32",
        ),
        (
            "/keyslots/0/kdf/salt",
            json!("?"),
            "kdf: salt is not base64",
        ),
        (
            "/segments",
            json!({}),
            "digest 0: segments contains \"0\", which does not exist",
        ),
        ("/segments/0/type", json!("linear"), "segment 0: type"),
        (
            "/segments/0/offset",
            json!("32768"),
            "within the keyslots area",
        ),
        ("/segments/0/offset", json!("16777217"), "not multiples of"),
        ("/segments/0/offset", json!("0"), r#"offset is "0""#),
        (
            "/segments/0/offset",
            json!("16781312"),
            r#"offset is "16781312", expected "16777216""#,
        ),
        ("/segments/0/size", json!("4096"), "segment 0: size"),
        (
            "/segments/0/flags",
            json!(["backup-final"]),
            "segment 0: flags",
        ),
        ("/segments/0/iv_tweak", json!("8"), "iv_tweak"),
        (
            "/segments/0/encryption",
            json!("cipher_null-ecb"),
            "segment 0: encryption",
        ),
        ("/segments/0/sector_size", json!(512), "sector_size"),
        (
            "/segments/0/integrity",
            Value::Null,
            "segment 0: integrity: type is not a non-empty string",
        ),
        (
            "/segments/0/integrity/type",
            json!("none"),
            "segment 0: integrity: type",
        ),
        (
            "/segments/0/integrity/journal_encryption",
            json!("x"),
            "journal_encryption",
        ),
        (
            "/segments/0/integrity/journal_integrity",
            json!("x"),
            "journal_integrity",
        ),
        ("/digests", json!({}), "segment 0: no digest refers to it"),
        ("/digests/0/type", json!("plain"), "digest 0: type"),
        ("/digests/0/hash", json!("sha1"), "digest 0: hash"),
        (
            "/digests/0/keyslots",
            json!([]),
            "keyslot 0: 0 digests refer to it, expected 1",
        ),
        (
            "/digests/0/segments",
            json!([]),
            "segment 0: no digest refers to it",
        ),
        ("/digests/0/iterations", json!(0), "iterations is 0"),
        (
            "/digests/0/iterations",
            json!(4_294_967_295u32),
            "one try of a key would cost 4294967423",
        ),
        (
            "/digests/0/salt",
            json!(""),
            "digest 0: salt is not a non-empty string",
        ),
        (
            "/digests/0/digest",
            json!(""),
            "digest 0: digest is not a non-empty string",
        ),
        (
            "/config/json_size",
            json!("16384"),
            "json_size is 16384, expected 12288",
        ),
        (
            "/config/keyslots_size",
            json!("18446744073709551615"),
            "keyslots_size",
        ),
        (
            "/config/keyslots_size",
            json!("16744449"),
            "keyslots_size is 16744449",
        ),
        (
            "/config/keyslots_size",
            json!("4096"),
            "not within the keyslots area",
        ),
        ("/tokens/0/type", json!("other"), "token 0: type"),
        (
            "/tokens/0/diskIsInitialized",
            json!("true"),
            "diskIsInitialized is \"true\", expected a boolean",
        ),
    ];
    for (pointer, value, expected) in cases {
        let why = refusal(|metadata| match metadata.pointer_mut(pointer) {
            Some(place) => *place = value.clone(),
            // our own headers do not have this field
            None => metadata["segments"]["0"]["flags"] = value.clone(),
        });
        assert!(why.contains(expected), "{pointer} = {value}: {why}");
    }
}

#[test]
fn an_unknown_field_is_refused_by_name_at_every_typed_level() {
    for level in [
        "",
        "/keyslots/0",
        "/keyslots/0/af",
        "/keyslots/0/area",
        "/keyslots/0/kdf",
        "/segments/0",
        "/segments/0/integrity",
        "/digests/0",
        "/config",
    ] {
        let why = refusal(|metadata| metadata.pointer_mut(level).unwrap()["surprise"] = json!({}));
        assert!(why.contains("surprise"), "{level}: {why}");
    }
}

/// No tool adds these to a header of ours, but newer ones write them.
#[test]
fn what_other_tools_began_or_changed_is_refused_by_the_name_of_the_option() {
    for (place, name, value, expected) in [
        (
            "/config",
            "requirements",
            json!({"mandatory": ["online-reencrypt-v2"]}),
            r#"the requirements are ["online-reencrypt-v2"], expected none: finish or undo"#,
        ),
        (
            "/config",
            "requirements",
            json!({"mandatory": ["opal"]}),
            r#"the requirements are ["opal"], expected none: no node formats a disk with them"#,
        ),
        (
            "/config",
            "requirements",
            json!({"mandatory": ["inline-hw-tags"]}),
            "attach the right disk",
        ),
        (
            "/config",
            "flags",
            json!(["allow-discards"]),
            r#"the flags are ["allow-discards"], expected none"#,
        ),
        (
            "/config",
            "flags",
            json!(["no-journal", "future"]),
            "the flags are",
        ),
        (
            "/segments/0/integrity",
            "key_size",
            json!(64),
            "key_size (luksFormat --integrity-key-size) is 64, expected 32",
        ),
    ] {
        let why = refusal(|metadata| {
            metadata.pointer_mut(place).unwrap()[name] = value.clone();
        });
        assert!(why.contains(expected), "{place}: {why}");
    }
    let mut metadata = formatted().1.metadata.clone();
    metadata["segments"]["0"]["integrity"]["key_size"] = json!(32);
    metadata["config"]["requirements"] = json!({"mandatory": []});
    let Probe::Luks(header) = disk_with(&json::to_text(&metadata)).unwrap().probe() else {
        panic!("no header")
    };
    header.check_ours(Integrity::Required).unwrap();
}

/// A keyslot of another tool is neither tried nor counted, however much it asks for, and its area
/// is not used.
#[test]
fn keyslots_of_other_tools_cost_nothing_and_keep_their_areas() {
    for (place, value) in [
        ("/kdf/type", json!("argon2i")),
        ("/af/hash", json!("sha512")),
        ("/area/encryption", json!("aes-cbc-essiv:sha256")),
        ("/area/key_size", json!(32)),
    ] {
        let (result, work, _) = try_a_wrong_key(3, |metadata| {
            let slot = &mut metadata["keyslots"]["1"];
            slot["kdf"]["time"] = json!(u32::MAX);
            *slot.pointer_mut(place).unwrap() = value.clone();
        });
        assert!(
            matches!(result, Err(Error::WrongPassphrase { keyslots: 2 })),
            "{place}: {result:?}"
        );
        assert_eq!(work, 2 * (8 + 10));
    }
    let header = |metadata: &Value| match disk_with(&json::to_text(metadata)).unwrap().probe() {
        Probe::Luks(header) => header,
        other => panic!("{other:?}"),
    };
    let mut metadata = formatted().1.metadata.clone();
    add_keyslot(&mut metadata, "1", (32 << 10) + 385_024);
    metadata["keyslots"]["1"]["af"]["hash"] = json!("sha512");
    let checked = header(&metadata).checked(Integrity::Required).unwrap();
    assert_eq!(checked.free_area(96), Some((32 << 10) + 2 * 385_024));
    // keyslot 0 must be the node's: without it no other keyslot opens the disk
    metadata["keyslots"].as_object_mut().unwrap().remove("0");
    metadata["digests"]["0"]["keyslots"] = json!(["1"]);
    let why = header(&metadata).check_ours(Integrity::Required);
    let why = why.unwrap_err().to_string();
    assert!(
        why.contains("no keyslot has the parameters of a node"),
        "{why}"
    );
    assert!(!header(&metadata).is_keyless());
}

#[test]
fn areas_that_overlap_and_costs_that_add_up_are_refused() {
    let why = refusal(|metadata| add_keyslot(metadata, "1", 36864));
    assert!(
        why.contains("the areas of keyslots 0 and 1 overlap"),
        "{why}"
    );
    let why = refusal(|metadata| {
        add_keyslot(metadata, "1", 1 << 20);
        for slot in ["0", "1"] {
            metadata["keyslots"][slot]["kdf"]["memory"] = json!(1 << 20);
            metadata["keyslots"][slot]["kdf"]["time"] = json!(8);
        }
    });
    // two keyslots are within the limit; the digest of their keys, with 1000 iterations each,
    // exceeds it
    assert!(
        why.contains("one try of a key would cost 16779216 KiB"),
        "{why}"
    );
}

/// A disk in memory that counts the bytes that are read.
struct Counting(Sparse, u64);

impl Read for Counting {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.1 += buf.len() as u64;
        self.0.read(buf)
    }
}

impl Seek for Counting {
    fn seek(&mut self, pos: SeekFrom) -> io::Result<u64> {
        self.0.seek(pos)
    }
}

/// Opens the formatted disk, with `count` keyslots whose costs `change` sets, with a wrong key.
fn try_a_wrong_key(count: u64, change: impl Fn(&mut Value)) -> (Result<Secret, Error>, u64, u64) {
    let mut metadata = formatted().1.metadata.clone();
    for id in 1..count {
        add_keyslot(&mut metadata, &id.to_string(), (32 << 10) + id * 385_024);
    }
    for slot in metadata["keyslots"].as_object_mut().unwrap().values_mut() {
        slot["kdf"]["memory"] = json!(8);
        slot["kdf"]["time"] = json!(1);
    }
    metadata["digests"]["0"]["iterations"] = json!(10);
    change(&mut metadata);
    let mut disk = disk_with(&json::to_text(&metadata)).unwrap();
    let Probe::Luks(header) = disk.probe() else {
        panic!("no header")
    };
    let mut disk = Counting(disk, 0);
    keyslot::work::take();
    let result = header.unlock(&mut disk, &Secret::new(b"a wrong passphrase".to_vec()));
    (result, keyslot::work::take(), disk.1)
}

#[test]
fn a_try_costs_what_the_header_says_and_the_digest_once_for_each_keyslot() {
    let (result, work, _) = try_a_wrong_key(32, |_| ());
    assert!(
        matches!(result, Err(Error::WrongPassphrase { keyslots: 32 })),
        "{result:?}"
    );
    assert_eq!(work, 32 * (8 + 10));
    let (result, work, _) = try_a_wrong_key(2, |metadata| {
        metadata["keyslots"]["1"]["kdf"]["time"] = json!(5);
        metadata["digests"]["0"]["iterations"] = json!(700);
    });
    assert!(
        matches!(result, Err(Error::WrongPassphrase { keyslots: 2 })),
        "{result:?}"
    );
    assert_eq!(work, 8 + 5 * 8 + 2 * 700);
}

#[test]
fn a_header_that_asks_for_more_than_the_bound_is_refused_before_any_work() {
    let too_much: [(u64, &str, Value); 4] = [
        // without the digest in the limit, a try took 122 s
        (32, "/digests/0/iterations", json!(16_000_000)),
        (1, "/digests/0/iterations", json!(u32::MAX)),
        (1, "/keyslots/0/kdf/time", json!(u32::MAX)),
        (2, "/digests/0/iterations", json!(metadata::MAX_WORK / 2)),
    ];
    for (keyslots, place, value) in too_much {
        let (result, work, read) = try_a_wrong_key(keyslots, |metadata| {
            *metadata.pointer_mut(place).unwrap() = value.clone();
        });
        let why = result.map(drop).unwrap_err().to_string();
        assert!(
            why.contains("one try of a key would cost") && why.contains("luksConvertKey"),
            "{place}: {why}"
        );
        assert_eq!((work, read), (0, 0), "{place}");
    }
}

/// One try of a key: 16 passes of argon2 over 1 GiB, PBKDF2 for the digest included.
#[test]
fn the_bound_of_a_try_is_the_promised_one() {
    let (time, memory) = (16, 1 << 20);
    let with_iterations = |iterations: u64| {
        let mut metadata = formatted().1.metadata.clone();
        metadata["keyslots"]["0"]["kdf"]["time"] = json!(time);
        metadata["keyslots"]["0"]["kdf"]["memory"] = json!(memory - 1);
        metadata["digests"]["0"]["iterations"] = json!(iterations);
        let Probe::Luks(header) = disk_with(&json::to_text(&metadata)).unwrap().probe() else {
            panic!("no header")
        };
        header.check_ours(Integrity::Required)
    };
    with_iterations(16).unwrap();
    let refused = with_iterations(17);
    assert!(
        matches!(refused, Err(Error::NotOurs(HeaderFault::Costly(_)))),
        "{refused:?}"
    );
}

#[test]
fn ids_that_are_not_plain_numbers_are_refused() {
    for id in ["x", "-1", "01", "+1", "", "4294967296"] {
        let why = refusal(|metadata| add_keyslot(metadata, id, 1 << 20));
        assert!(why.contains("id"), "{id}: {why}");
        let why = refusal(|metadata| metadata["tokens"][id] = json!({"type": "x", "keyslots": []}));
        assert!(why.contains("id"), "{id}: {why}");
    }
    let why = refusal(|metadata| {
        (1..40).for_each(|id| {
            metadata["tokens"][id.to_string()] = json!({"type": "x", "keyslots": []})
        });
    });
    assert_eq!(why, "40 tokens, expected at most 32");
}

#[test]
fn a_segment_without_integrity_is_refused_for_a_state_disk() {
    let why = refusal(|metadata| {
        drop(
            metadata["segments"]["0"]
                .as_object_mut()
                .unwrap()
                .remove("integrity"),
        )
    });
    assert!(why.contains("segment 0: integrity is missing"), "{why}");
}

#[test]
fn an_invalid_uuid_is_refused() {
    for uuid in [
        "",
        "measurementSecret",
        "00000000-0000-0000-0000-00000000000",
        "0000000000000-0000-0000-0000-0000000000",
    ] {
        let mut header = formatted().1.clone();
        header.binary.uuid = [0; 40];
        header.binary.uuid[..uuid.len()].copy_from_slice(uuid.as_bytes());
        let why = header
            .check_ours(Integrity::Required)
            .unwrap_err()
            .to_string();
        assert!(why.contains("UUID"), "{uuid}: {why}");
    }
    assert!(header::is_uuid(&header::random_uuid()));
    assert_eq!(header::random_uuid().as_bytes()[14], b'4');
}

#[test]
fn the_geometry_has_the_parameters_of_the_mapping() {
    let header = &formatted().1;
    let uuid = header.uuid();
    let geometry = header.geometry().unwrap();
    let expected = Geometry {
        uuid,
        has_integrity: true,
        key_size: 96,
        digest_id: 0,
    };
    assert_eq!(geometry, expected);
}

/// Counts the requested unlocks. An unlock is slow, so one in sixteen is executed.
static UNLOCKS: AtomicU32 = AtomicU32::new(0);

/// Probes a disk and uses the header. No step may panic, take long, or return a wrong key. Returns
/// whether the disk is accepted.
fn exercise(disk: &mut Sparse) -> bool {
    let Probe::Luks(header) = disk.probe() else {
        return false;
    };
    let _ = (header.uuid(), header.state(), std::format!("{header:?}"));
    if header.check_ours(Integrity::Required).is_err() {
        assert!(
            header.unlock(disk, &passphrase()).is_err()
                || header.check_ours(Integrity::Optional).is_ok()
        );
        return false;
    }
    let geometry = header.geometry().unwrap();
    assert_eq!((geometry.has_integrity, geometry.key_size), (true, 96));
    let cost = |keyslot: &Value| {
        keyslot["kdf"]["time"].as_u64().unwrap() * keyslot["kdf"]["memory"].as_u64().unwrap()
    };
    let digest = &header.metadata["digests"][geometry.digest_id.to_string()];
    let iterations = digest["iterations"].as_u64().unwrap();
    let work: u64 = header.metadata["keyslots"]
        .as_object()
        .unwrap()
        .values()
        .map(|slot| cost(slot) + iterations)
        .sum();
    assert!(work <= metadata::MAX_WORK);
    // a higher cost is within the limits, but too slow for thousands of unlocks in a test
    let cheap = work < 9000;
    if cheap && UNLOCKS.fetch_add(1, Ordering::Relaxed).is_multiple_of(16) {
        match header.unlock(disk, &passphrase()) {
            Ok(key) => assert_eq!(key, volume_key()),
            Err(Error::WrongPassphrase { .. } | Error::Io { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
    true
}

#[test]
fn mutated_json_with_a_valid_checksum_never_panics_and_its_costs_are_limited() {
    let mut random = Random::new(0x1095_0001);
    let text = json::to_text(&formatted().1.metadata).into_bytes();
    let mut passed = 0;
    for _ in 0..6000 {
        let mut bytes = text.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len());
            match random.below(6) {
                0 => bytes[at] ^= 1 << random.below(7),
                1 => bytes[at] = b"0123456789\"{}[],:-.e\0"[random.below(21)],
                2 => drop(bytes.drain(at..(at + random.below(9)).min(bytes.len()))),
                3 => bytes.splice(at..at, *b"9999999999").for_each(drop),
                4 => bytes.splice(at..at, *b"{\"0\":[[").for_each(drop),
                _ => {
                    let piece = bytes[at..(at + random.below(40)).min(bytes.len())].to_vec();
                    let to = random.below(bytes.len());
                    bytes.splice(to..to, piece).for_each(drop);
                }
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        let json = String::from_utf8_lossy(&bytes);
        if let Some(mut disk) = disk_with(&json) {
            passed += usize::from(exercise(&mut disk));
        }
    }
    // some mutations break no rule, for example in base64: the last steps are tested, too
    assert!(passed > 10, "{passed}");
}

#[test]
fn hostile_values_in_every_place_of_the_metadata_never_panic_and_their_costs_are_limited() {
    let values = [
        Value::Null,
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(1e300),
        json!("0"),
        json!("18446744073709551615"),
        json!("18446744073709547520"),
        json!("dynamic"),
        json!(""),
        json!("\u{0}\u{fffd}"),
        json!([]),
        json!({}),
        json!(["0", "0", "7"]),
        json!({"0": {"0": {}}}),
    ];
    let metadata = &formatted().1.metadata;
    let mut pointers = Vec::new();
    places(metadata, String::new(), &mut pointers);
    assert!(pointers.len() > 40);
    for pointer in &pointers {
        for value in &values {
            let mut metadata = metadata.clone();
            let before = std::mem::replace(metadata.pointer_mut(pointer).unwrap(), value.clone());
            let is_accepted = exercise(&mut disk_with(&json::to_text(&metadata)).unwrap());
            let is_free = before == *value || FREE.iter().any(|free| pointer.starts_with(free));
            assert!(is_free || !is_accepted, "{pointer}: {value}");
        }
    }
    let mut random = Random::new(0x1095_0002);
    for _ in 0..2000 {
        let mut metadata = metadata.clone();
        for _ in 0..2 + random.below(3) {
            let pointer = &pointers[random.below(pointers.len())];
            if let Some(place) = metadata.pointer_mut(pointer) {
                *place = values[random.below(values.len())].clone();
            }
        }
        exercise(&mut disk_with(&json::to_text(&metadata)).unwrap());
    }
}

/// What differs between disks of nodes: places and costs of keys, salts, tokens, and the room for keyslots.
const FREE: [&str; 10] = [
    "/keyslots/0/kdf/time",
    "/keyslots/0/kdf/memory",
    "/keyslots/0/kdf/cpus",
    "/keyslots/0/kdf/salt",
    "/keyslots/0/area/offset",
    "/keyslots/0/area/size",
    "/digests/0/iterations",
    "/digests/0/salt",
    "/tokens",
    "/config/keyslots_size",
];

/// Collects the JSON pointers of all values below `value`.
fn places(value: &Value, at: String, out: &mut Vec<String>) {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(members) => members
            .iter()
            .map(|(name, member)| (name.clone(), member))
            .collect(),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(n, item)| (n.to_string(), item))
            .collect(),
        _ => vec![],
    };
    for (name, value) in below {
        places(value, std::format!("{at}/{name}"), out);
        out.push(std::format!("{at}/{name}"));
    }
}

#[test]
fn mutated_binary_headers_never_panic() {
    let mut random = Random::new(0x1095_0003);
    let mut passed = 0;
    for round in 0..6000 {
        let mut head = formatted().0.clone();
        for _ in 0..1 + random.below(4) {
            let copy = random.below(2) * HDR_SIZE as usize;
            let at = copy
                + if random.below(4) == 0 {
                    random.below(HDR_SIZE as usize)
                } else {
                    random.below(512)
                };
            head[at] = match random.below(3) {
                0 => head[at] ^ 1 << random.below(8),
                1 => 0xff,
                _ => random.next() as u8,
            };
        }
        if round % 2 == 0 {
            for copy in [0, HDR_SIZE as usize] {
                reseal(&mut head[copy..copy + HDR_SIZE as usize]);
            }
        }
        passed += usize::from(exercise(&mut Sparse::of(head)));
    }
    assert!(passed > 1000, "{passed}");
}

/// Computes the checksum of a header copy again.
fn reseal(whole: &mut [u8]) {
    whole[448..512].fill(0);
    let sum = ring::digest::digest(&ring::digest::SHA256, whole);
    whole[448..480].copy_from_slice(sum.as_ref());
}

#[test]
fn a_copy_that_cannot_be_read_is_damaged_and_the_other_one_is_used() {
    const COPY: u64 = HDR_SIZE;
    let sector = |at: u64| at..at + 512;
    let probed = |bad: &[std::ops::Range<u64>], change: &dyn Fn(&mut Vec<u8>)| {
        let mut disk = Sparse::of(formatted().0.clone());
        change(&mut disk.head);
        disk.bad = bad.to_vec();
        probe(&mut disk)
    };
    let same = |_: &mut Vec<u8>| ();
    for (bad, good) in [
        (sector(0), [false, true]),
        (sector(8192), [false, true]),
        (sector(COPY), [true, false]),
        (sector(2 * COPY - 512), [true, false]),
    ] {
        let Probe::Luks(header) = probed(std::slice::from_ref(&bad), &same).unwrap() else {
            panic!("no header: {bad:?}")
        };
        assert_eq!(header.good, good, "{bad:?}");
        assert_eq!(header.fingerprint(), formatted().1.fingerprint(), "{bad:?}");
        header.check_ours(Integrity::Required).unwrap();
    }
    let both = probed(&[sector(0), sector(COPY)], &same).unwrap_err();
    assert!(both.to_string().contains("cannot read the disk"), "{both}");
    // no LUKS is at its start: what the disk holds now cannot be read
    let other = |head: &mut Vec<u8>| head[..6].fill(0);
    assert!(probed(&[sector(8192)], &other).is_err());
}

#[test]
fn random_bytes_and_short_devices_never_panic() {
    let mut random = Random::new(0x1095_0004);
    let (head, _) = formatted();
    for size in [
        0, 1, 5, 6, 511, 512, 4095, 4096, 4097, 16383, 16384, 20479, 20480, 32767, 32768, 40000,
        300_000,
    ] {
        let mut disk = Sparse {
            head: vec![],
            size,
            at: 0,
            bad: vec![],
        };
        assert!(matches!(disk.probe(), Probe::Blank), "{size}");
        let mut disk = Sparse {
            head: head[..size as usize].to_vec(),
            size,
            at: 0,
            bad: vec![],
        };
        exercise(&mut disk);
        let noise = (0..size).map(|_| random.next() as u8).collect();
        assert!(!exercise(&mut Sparse {
            head: noise,
            size,
            at: 0,
            bad: vec![],
        }));
    }
}

#[test]
fn a_json_area_must_end_and_have_nothing_after_its_end() {
    let valid = json::to_text(&formatted().1.metadata);
    let says = |area: &[u8]| json::parse(area).unwrap_err().to_string();
    assert!(json::parse(&json_area(&valid)).is_ok());
    assert!(json::parse(&json_area(&std::format!("{valid} \n"))).is_ok());
    assert!(says(valid.as_bytes()).contains("no end"));
    let mut after = json_area(&valid);
    after[12_000] = b'x';
    assert!(says(&after).contains("after its end"));
    assert!(says(&json_area(&std::format!("{valid}{{}}"))).contains("trailing"));
    for start in [" ", "\n", "[", "\u{feff}"] {
        assert!(
            says(&json_area(&std::format!("{start}{valid}"))).contains("does not begin with '{'")
        );
    }
    assert!(says(&json_area("")).contains("does not begin"));
    assert!(says(&json_area("{}")).contains("no object \"keyslots\""));
    assert!(
        says(&json_area(&std::format!("{{\"a\":{}", "[".repeat(12_000))))
            .contains("recursion limit")
    );
    // a number does not become a float when it is written back
    let number = r#"{"a":18446744073709551615}"#;
    assert_eq!(
        json::to_text(&serde_json::from_str(number).unwrap()),
        number
    );
}

#[test]
fn json_of_more_than_32_levels_is_refused() {
    let nested = |levels: usize| {
        // three levels: the object, the tokens, the token
        let inner = std::format!("{}{}", "[".repeat(levels - 3), "]".repeat(levels - 3));
        let mut metadata = formatted().1.metadata.clone();
        metadata["tokens"]["1"] =
            serde_json::from_str(&std::format!(r#"{{"type":"x","keyslots":[],"d":{inner}}}"#))
                .unwrap();
        json::parse(&json_area(&json::to_text(&metadata)))
    };
    nested(32).unwrap();
    for levels in [33, 34, 100, 127] {
        assert_eq!(
            nested(levels).unwrap_err().to_string(),
            std::format!("the JSON area: {levels} levels deep, expected at most 32")
        );
    }
}

#[test]
fn headers_with_other_sizes_versions_or_places_say_so() {
    let says = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut head = formatted().0[..2 * HDR_SIZE as usize].to_vec();
        change(&mut head);
        // without a second copy
        head[HDR_SIZE as usize..].fill(0);
        reseal(&mut head[..HDR_SIZE as usize]);
        match Sparse::of(head).probe() {
            Probe::Unknown(what) => what,
            other => panic!("{other:?}"),
        }
    };
    assert!(says(&|head| head[7] = 3).contains("LUKS version 3, expected 2"));
    assert!(says(&|head| head[7] = 1).contains("LUKS1"));
    assert!(says(&|head| head[8] = 0xff).contains("header size 18374686479671640064"));
    assert!(says(&|head| head[14] = 0x50).contains("header size 20480"));
    assert!(says(&|head| head[262] = 1).contains("header offset 256"));
    assert!(says(&|head| head[72] = b'x').contains("checksum algorithm"));
}

#[test]
fn signatures_of_other_formats_are_named() {
    let cases: [(usize, &[u8], &str); 12] = [
        (512, b"EFI PART", "GPT"),
        (510, b"\x55\xaa", "MBR"),
        (0, b"XFSB", "XFS"),
        (1080, b"\x53\xef", "ext4"),
        (0x10040, b"_BHRfS_M", "btrfs"),
        (512, b"LABELONE", "LVM"),
        (4096, b"\xfc\x4e\x2b\xa9", "RAID"),
        (4086, b"SWAPSPACE2", "swap"),
        (131_072 + 8192, b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
        (0, b"integrt\x00", "dm-integrity"),
        (100, b"x", "byte 100"),
        (16 << 20, b"x", "byte 16777216"),
    ];
    for (at, bytes, expected) in cases {
        let mut head = vec![0; at + bytes.len()];
        head[at..].copy_from_slice(bytes);
        match Sparse::of(head.clone()).probe() {
            Probe::Unknown(what) => assert!(what.contains(expected), "{what}"),
            other => panic!("{expected}: {other:?}"),
        }
        // an interrupted format explains only its own writes: torn headers, a keyslot area of
        // random bytes
        head.resize(head.len().max(DATA_OFFSET as usize), 0);
        head[MARKER_OFFSET as usize..][..MARKER.len()].copy_from_slice(&MARKER);
        match Sparse::of(head).probe() {
            Probe::Unknown(_) => {}
            Probe::Unfinished => assert!(
                at == 100 || (32 << 10..(32 << 10) + 385_024).contains(&at),
                "{expected}"
            ),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn data_at_the_end_of_the_disk_is_found() {
    let mut head = vec![0; DISK_SIZE as usize];
    head[DISK_SIZE as usize - 512] = 1;
    assert!(matches!(Sparse::of(head).probe(), Probe::Unknown(what) if what.contains("67108352")));
}

#[test]
fn metadata_is_written_in_the_order_of_libcryptsetup() {
    let mut metadata = formatted().1.metadata.clone();
    for random in [
        "/keyslots/0/kdf/salt",
        "/digests/0/salt",
        "/digests/0/digest",
    ] {
        *metadata.pointer_mut(random).unwrap() = json!("…");
    }
    // the output of `cryptsetup luksDump --dump-json-metadata` without white space
    let expected = concat!(
        r#"{"keyslots":{"0":{"type":"luks2","key_size":96,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},"#,
        r#""area":{"type":"raw","offset":"32768","size":"385024","encryption":"aes-xts-plain64","key_size":64},"#,
        r#""kdf":{"type":"argon2id","time":4,"memory":32,"cpus":1,"salt":"…"}}},"#,
        r#""tokens":{"0":{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":false}},"#,
        r#""segments":{"0":{"type":"crypt","offset":"16777216","size":"dynamic","iv_tweak":"0","#,
        r#""encryption":"aes-xts-plain64","sector_size":4096,"#,
        r#""integrity":{"type":"hmac(sha256)","journal_encryption":"none","journal_integrity":"none"}}},"#,
        r#""digests":{"0":{"type":"pbkdf2","keyslots":["0"],"segments":["0"],"hash":"sha256","iterations":1000,"#,
        r#""salt":"…","digest":"…"}},"#,
        r#""config":{"json_size":"12288","keyslots_size":"16744448"}}"#,
    );
    assert_eq!(json::to_text(&metadata), expected);
    let text = json::to_text(&formatted().1.metadata);
    assert_eq!(
        serde_json::from_str::<Value>(&text).unwrap(),
        formatted().1.metadata
    );
}

#[test]
fn metadata_that_does_not_fit_is_refused_before_anything_is_written() {
    let binary = &formatted().1.binary;
    let room = HDR_SIZE as usize - 4096;
    assert!(Binary::encode(binary, Copy::Primary, &"x".repeat(room - 1)).is_some());
    assert!(Binary::encode(binary, Copy::Primary, &"x".repeat(room)).is_none());
}

#[test]
fn errors_say_what_failed_and_what_to_do() {
    let text = Error::WouldOverwrite("an XFS file system".into()).to_string();
    assert!(
        text.contains("an XFS file system") && text.contains("first 17 MiB"),
        "{text}"
    );
    assert_eq!(
        Error::WrongPassphrase { keyslots: 2 }.to_string(),
        "the key opens none of the 2 keyslots of the LUKS2 header"
    );
}
