//! Our implementation of LUKS2 and the real `cryptsetup`, on plain files: each reads the headers of the other.
//!
//! The tests use no device mapper, so they map no disk, and `cryptsetup` cannot format with integrity. It makes 96-byte keyslots
//! when it adds and changes keys in our headers.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use base::crypto::Secret;
use bootstrapper::state::peers_token;
use disk::luks::{self, ClusterToken, DiskState, Error, Header, Integrity, Probe};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

const OLD: &[u8] = b"\x00\x01binary\nold passphrase\xff";
const NEW: &[u8] = b"\xfe\x00\nnew passphrase";
/// The options for argon2id with about the cost of Constellation's first keyslot.
const OLD_SYSTEM_COST: [&str; 6] = [
    "--pbkdf-force-iterations",
    "4",
    "--pbkdf-memory",
    "65536",
    "--pbkdf-parallel",
    "2",
];
const CHEAPEST: [&str; 6] = [
    "--pbkdf-force-iterations",
    "4",
    "--pbkdf-memory",
    "32",
    "--pbkdf-parallel",
    "1",
];
/// The options with which Constellation formats, except integrity.
const PARAMETERS: [&str; 8] = [
    "--type",
    "luks2",
    "--cipher",
    "aes-xts-plain64",
    "--key-size",
    "512",
    "--sector-size",
    "4096",
];

/// A disk image and key files in their own directory.
struct Fixture {
    dir: tempfile::TempDir,
    disk: File,
}

impl Fixture {
    fn blank() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("old"), OLD).unwrap();
        std::fs::write(dir.path().join("new"), NEW).unwrap();
        let disk = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("disk"))
            .unwrap();
        disk.set_len(32 << 20).unwrap();
        Fixture { dir, disk }
    }

    /// Creates a disk that we formatted with the old passphrase.
    fn ours() -> Self {
        let mut it = Self::blank();
        luks::format(&mut it.disk, &volume_key(), &Secret::new(OLD.into())).unwrap();
        it
    }

    /// Creates a disk that cryptsetup formatted with the old passphrase.
    fn theirs(options: &[&[&str]]) -> Self {
        let it = Self::blank();
        it.ok("luksFormat", &options.concat(), &["disk", "old"]);
        it
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the volume key that a disk's header has for a passphrase, according to cryptsetup.
    fn volume_key(&self, disk: &str, passphrase: &str) -> Secret {
        let options = ["--dump-volume-key", "--key-file", passphrase];
        let dump = self.ok("luksDump", &options, &[disk]);
        // "MK dump:" or "Volume key dump:", then hexadecimal bytes on several lines
        let (_, hex) = dump.split_once("dump:").unwrap();
        let bytes = hex.split_whitespace();
        let key: Vec<u8> = bytes
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        Secret::new(key)
    }

    /// Runs `cryptsetup ACTION OPTIONS FILES`. The files are relative to the directory.
    fn cryptsetup(&self, action: &str, options: &[&str], files: &[&str]) -> Output {
        let mut command = Command::new("cryptsetup");
        command
            .args(["--batch-mode", action])
            .args(options)
            .args(files)
            .current_dir(self.dir.path());
        // cryptsetup must not wait for a passphrase from a terminal
        command
            .stdin(Stdio::null())
            .output()
            .expect("cryptsetup is installed (make setup)")
    }

    /// Runs cryptsetup, which must succeed, and returns its output.
    fn ok(&self, action: &str, options: &[&str], files: &[&str]) -> String {
        let output = self.cryptsetup(action, options, files);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "cryptsetup {action} {options:?}: {errors}"
        );
        String::from_utf8_lossy(&output.stdout).into_owned() + &errors
    }

    /// Returns whether cryptsetup opens the disk with this key file.
    fn opens(&self, key: &str) -> bool {
        let output = self.cryptsetup("open", &["--test-passphrase", "--key-file", key], &["disk"]);
        match output.status.code() {
            Some(0) => true,
            // exit code 2: "no permission (bad passphrase)"
            Some(2) => false,
            _ => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        }
    }

    fn header(&mut self) -> Header {
        match luks::probe(&mut self.disk).unwrap() {
            Probe::Luks(header) => header,
            other => panic!("{other:?}"),
        }
    }

    /// Returns why [`Header::check_ours`] refuses the disk.
    fn refused(&mut self) -> String {
        match self.header().check_ours(Integrity::Optional) {
            Err(Error::NotOurs(why)) => why.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn unlock(&mut self, key: &[u8]) -> Result<Secret, Error> {
        self.header()
            .unlock(&mut self.disk, &Secret::new(key.into()))
    }

    fn commit(&mut self) {
        let mut header = self.header();
        let volume_key = self.unlock(OLD).unwrap();
        header
            .replace_passphrase_and_mark(
                &mut self.disk,
                &volume_key,
                &Secret::new(NEW.into()),
                &cluster(),
            )
            .unwrap();
    }

    fn damage(&mut self, at: u64) {
        self.disk.seek(SeekFrom::Start(at)).unwrap();
        self.disk.write_all(&[0xff; 16]).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path("disk")).unwrap()
    }
}

fn cluster() -> ClusterToken {
    ClusterToken::new(
        "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11",
        &Secret::new(vec![1; 32]),
        [2; 32],
    )
}

fn volume_key() -> Secret {
    Secret::new((100..196).collect())
}

#[test]
fn cryptsetup_reads_all_fields_of_our_header() {
    let mut it = Fixture::ours();
    let header = it.header();
    let json: Value =
        serde_json::from_str(&it.ok("luksDump", &["--dump-json-metadata"], &["disk"])).unwrap();
    assert_eq!(json, *header.metadata());
    let dump = it.ok("luksDump", &[], &["disk"]);
    let lines: Vec<String> = dump
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for line in [
        "Version: 2",
        "Metadata area: 16384 [bytes]",
        "Keyslots area: 16744448 [bytes]",
        &format!("UUID: {}", header.uuid()),
        "offset: 16777216 [bytes]",
        "length: (whole device)",
        "cipher: aes-xts-plain64",
        "sector: 4096 [bytes]",
        "integrity: hmac(sha256)",
        "Key: 768 bits",
        "Cipher key: 512 bits",
        "PBKDF: argon2id",
        "Time cost: 4",
        "Memory: 32",
        "Threads: 1",
        "AF stripes: 4000",
        "AF hash: sha256",
        "Area offset:32768 [bytes]",
        "Area length:385024 [bytes]",
        "0: constellation-state-disk",
        "Iterations: 1000",
    ] {
        assert!(
            lines.iter().any(|l| l == line),
            "no line {line:?} in {dump}"
        );
    }
}

#[test]
fn cryptsetup_opens_what_we_format_and_gets_our_volume_key() {
    let it = Fixture::ours();
    assert!(it.opens("old"));
    assert!(!it.opens("new"));
    assert_eq!(it.volume_key("disk", "old"), volume_key());
}

/// docs/day-two/secrets.md: why another master secret does not protect a disk whose key is known to others.
#[test]
fn another_passphrase_does_not_protect_a_disk_whose_header_was_copied() {
    let mut it = Fixture::ours();
    std::fs::copy(it.path("disk"), it.path("copy")).unwrap();
    it.commit();
    assert!(it.opens("new") && !it.opens("old"));
    assert_eq!(it.volume_key("disk", "new"), it.volume_key("copy", "old"));

    // and the data of a disk with integrity protection cannot be encrypted again with another volume key
    let before = it.bytes();
    let options = ["--init-only", "--key-file", "new", "--pbkdf-memory", "32"];
    let output = it.cryptsetup("reencrypt", &options, &["disk"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("integrity profile is not supported"),
        "{said}"
    );
    assert!(it.bytes() == before);
}

#[test]
fn cryptsetup_finds_nothing_to_repair_and_changes_no_byte() {
    let mut it = Fixture::ours();
    for _ in 0..2 {
        let before = it.bytes();
        let said = it.ok("repair", &[], &["disk"]);
        assert_eq!(said, "");
        // cryptsetup reads both copies, and rewrites a copy that it considers invalid
        it.ok("luksDump", &[], &["disk"]);
        assert!(it.bytes() == before, "cryptsetup changed our header");
        if it.header().state() != DiskState::Initialized {
            it.commit();
        }
    }
}

#[test]
fn token_0_is_the_text_that_constellation_writes() {
    let mut it = Fixture::ours();
    let token = |it: &Fixture| it.ok("token", &["--token-id", "0"], &["export", "disk"]);
    let text = |initialized: bool| {
        format!(
            r#"{{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":{initialized}}}"#
        )
    };
    assert_eq!(token(&it).trim(), text(false));
    assert_eq!(it.header().state(), DiskState::Uninitialized);
    it.commit();
    assert_eq!(token(&it).trim(), text(true));
    assert!(it.header().state() == DiskState::Initialized);
    let mut header = it.header();
    header.mark_for_reset(&mut it.disk).unwrap();
    assert_eq!(token(&it).trim(), text(false));
    assert_eq!(it.header().state(), DiskState::Uninitialized);
    let dump = it.ok("luksDump", &[], &["disk"]);
    assert!(!dump.contains("firstlight-cluster"), "{dump}");
}

#[test]
fn a_disk_that_names_its_cluster_is_initialized_whatever_token_0_says() {
    let mut it = Fixture::ours();
    it.commit();
    it.ok("token", &["--token-id", "0"], &["remove", "disk"]);
    for marker in [None, Some(false)] {
        if marker.is_some() {
            let text =
                r#"{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":false}"#;
            std::fs::write(it.path("token"), text).unwrap();
            let at = ["--token-id", "0", "--json-file", "token"];
            it.ok("token", &at, &["import", "disk"]);
        }
        let header = it.header();
        assert!(header.state() == DiskState::Initialized && !header.is_marked());
        let error = luks::format(&mut it.disk, &volume_key(), &Secret::new(OLD.into()));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("an initialized state disk"), "{error}");
        assert!(it.opens("new"));
    }
    // the operator's way to give its content up
    it.ok("token", &["--token-id", "1"], &["remove", "disk"]);
    assert_eq!(it.header().state(), DiskState::Uninitialized);
    luks::format(&mut it.disk, &volume_key(), &Secret::new(OLD.into())).unwrap();
}

#[test]
fn cryptsetup_accepts_the_token_with_the_peers_and_preserves_it() {
    let mut it = Fixture::ours();
    let peers = luks::Peers {
        load_balancer: Some("cluster.example".into()),
        control_planes: vec![[10, 0, 0, 11].into()],
    };
    let mut header = it.header();
    assert!(peers_token::set(&mut header, &mut it.disk, &peers).unwrap());
    it.commit();
    let dump = it.ok("luksDump", &[], &["disk"]);
    assert!(
        dump.contains("1: firstlight-cluster") && dump.contains("2: firstlight-peers"),
        "{dump}"
    );
    it.ok(
        "luksChangeKey",
        &[&["--key-file", "new"], &CHEAPEST[..]].concat(),
        &["disk", "old"],
    );
    assert_eq!(it.header().peers().unwrap(), Some(peers));
}

#[test]
fn cryptsetup_accepts_the_cluster_token_and_preserves_it() {
    let mut it = Fixture::ours();
    assert_eq!(it.header().cluster_token().unwrap(), None);
    it.commit();
    assert!(
        it.ok("luksDump", &[], &["disk"])
            .contains("1: firstlight-cluster")
    );
    it.ok(
        "luksChangeKey",
        &[&["--key-file", "new"], &CHEAPEST[..]].concat(),
        &["disk", "old"],
    );
    assert_eq!(it.header().cluster_token().unwrap(), Some(cluster()));
    // a token that is added to an older disk gets a free number
    it.ok("token", &["--token-id", "1"], &["remove", "disk"]);
    std::fs::write(it.path("json"), r#"{"type":"somebody's","keyslots":["0"]}"#).unwrap();
    it.ok(
        "token",
        &["--token-id", "1", "--json-file", "json"],
        &["import", "disk"],
    );
    let mut header = it.header();
    header.add_cluster_token(&mut it.disk, &cluster()).unwrap();
    let dump = it.ok("luksDump", &[], &["disk"]);
    assert!(
        dump.contains("1: somebody's") && dump.contains("2: firstlight-cluster"),
        "{dump}"
    );
    assert_eq!(it.header().cluster_token().unwrap(), Some(cluster()));
}

#[test]
fn after_our_commit_cryptsetup_opens_with_the_new_key_only() {
    let mut it = Fixture::ours();
    it.commit();
    assert!(it.opens("new"));
    assert!(!it.opens("old"));
    assert_eq!(it.unlock(NEW).unwrap(), volume_key());
    assert!(matches!(
        it.unlock(OLD),
        Err(Error::WrongPassphrase { keyslots: 1 })
    ));
}

#[test]
fn we_open_after_cryptsetup_changed_the_key() {
    let mut it = Fixture::ours();
    it.ok(
        "luksChangeKey",
        &[&["--key-file", "old"], &OLD_SYSTEM_COST[..]].concat(),
        &["disk", "new"],
    );
    assert_eq!(it.unlock(NEW).unwrap(), volume_key());
    assert!(matches!(
        it.unlock(OLD),
        Err(Error::WrongPassphrase { keyslots: 1 })
    ));
    it.header().check_ours(Integrity::Required).unwrap();
    let kdf = it.header().metadata()["keyslots"]["0"]["kdf"].clone();
    assert_eq!(
        (kdf["memory"].as_u64(), kdf["cpus"].as_u64()),
        (Some(65536), Some(2))
    );
}

#[test]
fn we_open_with_each_key_after_cryptsetup_added_one_and_our_commit_keeps_the_other_slot() {
    let mut it = Fixture::ours();
    it.ok(
        "luksAddKey",
        &[&["--key-file", "old"], &OLD_SYSTEM_COST[..]].concat(),
        &["disk", "new"],
    );
    std::fs::write(it.path("third"), b"a third key").unwrap();
    assert_eq!(it.unlock(OLD).unwrap(), volume_key());
    assert_eq!(it.unlock(NEW).unwrap(), volume_key());
    assert!(matches!(
        it.unlock(b"a third key"),
        Err(Error::WrongPassphrase { keyslots: 2 })
    ));
    it.header().check_ours(Integrity::Required).unwrap();

    let mut header = it.header();
    header
        .replace_passphrase_and_mark(
            &mut it.disk,
            &volume_key(),
            &Secret::new(b"a third key".to_vec()),
            &cluster(),
        )
        .unwrap();
    assert!(it.opens("third") && it.opens("new") && !it.opens("old"));
}

#[test]
fn our_commits_and_cryptsetups_changes_alternate() {
    let mut it = Fixture::ours();
    for _ in 0..3 {
        it.commit();
        it.ok(
            "luksChangeKey",
            &[&["--key-file", "new"], &CHEAPEST[..]].concat(),
            &["disk", "old"],
        );
        assert_eq!(it.unlock(OLD).unwrap(), volume_key());
        assert!(it.header().state() == DiskState::Initialized);
    }
}

#[test]
fn we_open_what_cryptsetup_formats_at_any_argon2id_cost() {
    for cost in [
        CHEAPEST,
        OLD_SYSTEM_COST,
        [
            "--pbkdf-force-iterations",
            "4",
            "--pbkdf-memory",
            "165892",
            "--pbkdf-parallel",
            "2",
        ],
        [
            "--pbkdf-force-iterations",
            "7",
            "--pbkdf-memory",
            "1000",
            "--pbkdf-parallel",
            "2",
        ],
    ] {
        let mut it = Fixture::theirs(&[&PARAMETERS, &["--pbkdf", "argon2id"], &cost]);
        let header = it.header();
        header.check_ours(Integrity::Optional).unwrap();
        let why = header
            .check_ours(Integrity::Required)
            .unwrap_err()
            .to_string();
        assert!(why.contains("integrity is missing"), "{why}");
        assert_eq!(header.state(), DiskState::Unmarked);
        assert!(matches!(
            it.unlock(NEW),
            Err(Error::WrongPassphrase { keyslots: 1 })
        ));
        assert_eq!(it.unlock(OLD).unwrap().len(), 64);

        let geometry = header.geometry().unwrap();
        let uuid = it.ok("luksUUID", &[], &["disk"]);
        assert_eq!(
            (geometry.uuid.as_str(), geometry.digest_id),
            (uuid.trim(), 0)
        );
        assert_eq!((geometry.key_size, geometry.has_integrity), (64, false));

        it.commit();
        assert!(
            it.opens("new") && !it.opens("old") && it.header().state() == DiskState::Initialized
        );
    }
}

#[test]
fn the_refusal_of_a_header_with_other_parameters_names_the_field() {
    let cases: [(&[&str], &str); 6] = [
        (
            &["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"],
            r#"keyslot 0: kdf type is "pbkdf2""#,
        ),
        (
            &[
                "--pbkdf",
                "argon2i",
                "--pbkdf-force-iterations",
                "4",
                "--pbkdf-memory",
                "32",
            ],
            r#"keyslot 0: kdf type is "argon2i""#,
        ),
        (&["--sector-size", "512"], "segment 0: sector_size is 512"),
        (
            &["--cipher", "aes-cbc-essiv:sha256", "--key-size", "256"],
            r#"segment 0: encryption is "aes-cbc-essiv:sha256""#,
        ),
        (
            &["--hash", "sha512"],
            r#"digest 0: hash is "sha512", expected "sha256""#,
        ),
        (
            &["--luks2-metadata-size", "32k"],
            "the size is 32768, expected 16384",
        ),
    ];
    for (options, expected) in cases {
        let cost: &[&str] = if options.contains(&"--pbkdf") {
            &[]
        } else {
            &CHEAPEST
        };
        let mut it = Fixture::theirs(&[&PARAMETERS, cost, options]);
        let why = it.refused();
        assert!(why.contains(expected), "{options:?}: {why}");
        let before = it.bytes();
        let error =
            luks::format(&mut it.disk, &volume_key(), &Secret::new(NEW.into())).unwrap_err();
        assert!(matches!(error, Error::WouldOverwrite(_)), "{error}");
        assert!(it.bytes() == before);
    }
}

/// Sets flags with which cryptsetup maps the disk (`cryptsetup refresh --persistent`, which needs a mapping), by its library:
/// allow-discards and no-journal.
const PERSISTENT: &str = "
import ctypes
library = ctypes.CDLL('libcryptsetup.so.12')
disk = ctypes.c_void_p()
assert library.crypt_init(ctypes.byref(disk), b'disk') == 0
assert library.crypt_load(disk, b'LUKS2', None) == 0
assert library.crypt_persistent_flags_set(disk, 0, ctypes.c_uint32(1 << 3 | 1 << 12)) == 0
";

/// The changes of a node's disk by other tools, each with the field of the header that shows the change.
#[test]
fn what_other_tools_add_to_a_disk_does_not_lock_a_node_out() {
    let key = ["--key-file", "old"];
    let added = [&key[..], &CHEAPEST].concat();
    let add = |it: &Fixture, options: &[&str]| {
        it.ok("luksAddKey", &[&added, options].concat(), &["disk", "new"]);
    };
    type Use<'a> = &'a dyn Fn(&Fixture);
    let uses: [(&str, &str, Use<'_>); 7] = [
        ("--priority prefer", "/keyslots/0/priority", &|it| {
            let options = ["--priority", "prefer", "--key-slot", "0"];
            it.ok("config", &options, &["disk"]);
        }),
        ("--priority ignore", "/keyslots/0/priority", &|it| {
            let options = ["--priority", "ignore", "--key-slot", "0"];
            it.ok("config", &options, &["disk"]);
        }),
        // an unbound keyslot has a key that is not the volume key
        ("--unbound", "/digests/1", &|it| {
            add(it, &["--unbound", "--key-size", "512"]);
        }),
        ("--unbound, of any size", "/digests/1", &|it| {
            add(it, &["--unbound", "--key-size", "128"]);
        }),
        ("--pbkdf pbkdf2", "/keyslots/1/kdf/iterations", &|it| {
            let options = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
            let options = [&key[..], &options].concat();
            it.ok("luksAddKey", &options, &["disk", "third"]);
        }),
        ("--hash", "/keyslots/1", &|it| {
            add(it, &["--hash", "sha512"]);
        }),
        ("systemd-cryptenroll", "/tokens/1", &|it| {
            let mut enroll = Command::new("systemd-cryptenroll");
            enroll.args(["--unlock-key-file=old", "--recovery-key", "disk"]);
            let output = enroll.current_dir(it.dir.path()).output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{errors}");
        }),
    ];
    let is_key = |key: Secret| key.expose() == volume_key().expose();
    for (name, place, change) in uses {
        let mut it = Fixture::ours();
        std::fs::write(it.path("third"), "third").unwrap();
        change(&it);
        let header = it.header();
        assert!(header.metadata().pointer(place).is_some(), "{name}");
        header.check_ours(Integrity::Required).expect(name);
        assert!(is_key(it.unlock(OLD).expect(name)), "{name}");
        // the permanent key replaces only keyslot 0
        it.commit();
        assert!(is_key(it.unlock(NEW).expect(name)), "{name}");
        assert!(it.unlock(OLD).is_err(), "{name}");
        assert!(it.opens("new"), "{name}");
        if name == "--pbkdf pbkdf2" {
            assert!(it.opens("third"), "{name}");
        }
    }
}

#[test]
fn a_node_whose_own_keyslot_was_converted_is_told_the_command_that_converts_it_back() {
    let conversions: [&[&str]; 2] = [
        &["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"],
        &["--hash", "sha512"],
    ];
    for conversion in conversions {
        let mut it = Fixture::ours();
        let own = ["--key-file", "old", "--key-slot", "0"];
        let cost: &[&str] = match conversion[0] {
            "--pbkdf" => &[],
            _ => &CHEAPEST,
        };
        let options = [&own, cost, conversion].concat();
        it.ok("luksConvertKey", &options, &["disk"]);
        let why = it.refused();
        let (_, command) = why.split_once("cryptsetup luksConvertKey ").expect(&why);
        let (command, _) = command.split_once(" changes").expect(&why);
        let command = command.split_whitespace().chain(["--key-file", "old"]);
        it.ok("luksConvertKey", &command.collect::<Vec<_>>(), &["disk"]);
        it.header().check_ours(Integrity::Required).unwrap();
        assert_eq!(it.unlock(OLD).unwrap().expose(), volume_key().expose());
    }
}

#[test]
fn flags_of_cryptsetups_own_mappings_are_refused_by_their_names() {
    let it = Fixture::ours();
    let mut python = Command::new("python3");
    let set = python.args(["-c", PERSISTENT]).current_dir(it.dir.path());
    assert!(set.status().unwrap().success());
    let why = { it }.refused();
    assert!(
        why.contains(r#"the flags are ["allow-discards","no-journal"]"#),
        "{why}"
    );
}

#[test]
fn a_disk_that_is_being_encrypted_anew_is_refused_by_that_name() {
    let mut it = Fixture::theirs(&[&PARAMETERS, &CHEAPEST]);
    let options = ["--init-only", "--key-file", "old", "--pbkdf-memory", "32"];
    it.ok("reencrypt", &options, &["disk"]);
    let why = it.refused();
    assert!(
        why.contains("online-reencrypt") && why.contains("cryptsetup reencrypt"),
        "{why}"
    );
}

#[test]
fn a_header_whose_keyslots_were_erased_is_refused_but_one_that_never_had_any_is_formatted() {
    let mut it = Fixture::ours();
    it.ok("luksErase", &[], &["disk"]);
    assert!(it.refused().contains("no keyslot"), "{}", it.refused());
    assert!(!it.header().is_keyless());
    assert!(luks::format(&mut it.disk, &volume_key(), &Secret::new(NEW.into())).is_err());

    // the state of a disk if the power fails between Constellation's format and its first keyslot
    it.ok("token", &["--token-id", "0"], &["remove", "disk"]);
    assert!(it.header().is_keyless());
    luks::format(&mut it.disk, &volume_key(), &Secret::new(NEW.into())).unwrap();
    assert!(it.opens("new"));
}

#[test]
fn an_initialized_disk_is_formatted_only_after_a_reset() {
    let mut it = Fixture::ours();
    it.commit();
    let format =
        |it: &mut Fixture| luks::format(&mut it.disk, &volume_key(), &Secret::new(OLD.into()));
    assert!(
        format(&mut it)
            .unwrap_err()
            .to_string()
            .contains("an initialized state disk")
    );
    let mut header = it.header();
    header.mark_for_reset(&mut it.disk).unwrap();
    let formatted = format(&mut it).unwrap();
    assert_ne!(formatted.uuid(), header.uuid());
    // before the reset, the keyslot was in the second area
    assert!(it.bytes()[(32 << 10) + 385_024..].iter().all(|b| *b == 0));
    assert!(it.opens("old") && !it.opens("new"));
}

#[test]
fn labels_and_foreign_tokens_survive_our_writes() {
    let mut it = Fixture::ours();
    it.ok(
        "config",
        &["--label", "a label", "--subsystem", "a subsystem"],
        &["disk"],
    );
    let token = r#"{"type":"someone-elses","keyslots":["0"],"a":{"b":[1,2.5,"\u00e9\n\""]}}"#;
    std::fs::write(it.path("token"), token).unwrap();
    it.ok(
        "token",
        &["--token-id", "3", "--json-file", "token"],
        &["import", "disk"],
    );
    it.header().check_ours(Integrity::Required).unwrap();
    it.commit();
    let dump = it.ok("luksDump", &[], &["disk"]);
    assert!(
        dump.contains("a label") && dump.contains("a subsystem"),
        "{dump}"
    );
    let kept = it.ok("token", &["--token-id", "3"], &["export", "disk"]);
    assert_eq!(
        serde_json::from_str::<Value>(&kept).unwrap(),
        serde_json::from_str::<Value>(token).unwrap()
    );
    assert!(it.opens("new"));
}

#[test]
fn a_token_0_of_another_kind_is_refused() {
    let mut it = Fixture::theirs(&[&PARAMETERS, &CHEAPEST]);
    std::fs::write(
        it.path("token"),
        r#"{"type":"someone-elses","keyslots":[]}"#,
    )
    .unwrap();
    it.ok(
        "token",
        &["--token-id", "0", "--json-file", "token"],
        &["import", "disk"],
    );
    assert!(
        it.refused().contains(r#"token 0: type is "someone-elses""#),
        "{}",
        it.refused()
    );
}

#[test]
fn the_valid_copy_is_used_and_cryptsetup_accepts_our_repair_of_the_other() {
    for (damaged, primary_whole) in [
        (0, false),
        (4096, false),
        (16384, true),
        (16384 + 4100, true),
    ] {
        let mut it = Fixture::ours();
        it.commit();
        let uuid = it.header().uuid();
        it.damage(damaged);
        let mut header = it.header();
        assert!(!header.copies_agree());
        assert_eq!(header.uuid(), uuid);
        assert_eq!(
            it.unlock(NEW).unwrap(),
            volume_key(),
            "damaged at {damaged}"
        );
        header.repair(&mut it.disk).unwrap();
        assert!(it.header().copies_agree());

        let before = it.bytes();
        assert!(it.opens("new"));
        assert!(
            it.bytes() == before,
            "cryptsetup repaired what we had repaired (primary whole: {primary_whole})"
        );
    }
}

#[test]
fn neither_we_nor_cryptsetup_use_a_header_of_which_both_copies_are_damaged() {
    let mut it = Fixture::ours();
    it.damage(4096);
    it.damage(16384 + 4100);
    assert!(!it.cryptsetup("luksDump", &[], &["disk"]).status.success());
    match luks::probe(&mut it.disk).unwrap() {
        Probe::Unknown(why) => assert_eq!(
            why,
            "an unusable LUKS header (primary copy: its checksum is wrong; secondary copy: its checksum is wrong): \
             the data is lost unless you restore the header (cryptsetup luksHeaderRestore)"
        ),
        other => panic!("{other:?}"),
    }
}

#[test]
fn of_two_valid_copies_we_use_the_newer_one_as_cryptsetup_does() {
    // the new primary header with the old secondary header, and the old primary with the new secondary
    for (old_copy_at, len) in [(0u64, 16384usize), (16384, 16384)] {
        let mut it = Fixture::ours();
        let mut old = vec![0; len];
        it.disk.read_exact_at(&mut old, old_copy_at).unwrap();
        it.commit();
        it.disk.write_all_at(&old, old_copy_at).unwrap();
        assert!(it.header().state() == DiskState::Initialized && !it.header().copies_agree());
        assert_eq!(it.unlock(NEW).unwrap(), volume_key());
        let token = it.ok("token", &["--token-id", "0"], &["export", "disk"]);
        assert!(token.contains("true"), "{token}");
        // cryptsetup has rewritten the older copy
        assert!(it.header().copies_agree());
    }
}

#[test]
fn we_repair_a_header_of_cryptsetup_as_cryptsetup_does() {
    let mut it = Fixture::theirs(&[&PARAMETERS, &CHEAPEST]);
    it.damage(16384);
    let mut header = it.header();
    header.repair(&mut it.disk).unwrap();
    let before = it.bytes();
    assert!(it.opens("old"));
    assert!(
        it.bytes() == before,
        "cryptsetup was not content with our repair"
    );
}

#[test]
fn cryptsetups_header_backup_is_a_header_and_restores_ours() {
    let mut it = Fixture::ours();
    it.ok(
        "luksHeaderBackup",
        &["--header-backup-file", "backup"],
        &["disk"],
    );
    it.commit();
    it.ok(
        "luksHeaderRestore",
        &["--header-backup-file", "backup"],
        &["disk"],
    );
    assert_eq!(it.header().state(), DiskState::Uninitialized);
    assert_eq!(it.unlock(OLD).unwrap(), volume_key());
}

#[test]
fn luks1_is_not_supported() {
    let mut it = Fixture::theirs(&[&["--type", "luks1", "--pbkdf-force-iterations", "1000"]]);
    match luks::probe(&mut it.disk).unwrap() {
        Probe::Unknown(why) => assert!(why.contains("LUKS1"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn disks_of_other_tools_are_recognized_and_never_formatted() {
    for (program, args, expected) in [("mke2fs", "-q -F -t ext4", "ext4"), ("mkswap", "", "swap")] {
        // on a blank disk, and on a state disk, whose secondary header remains
        for mut it in [Fixture::blank(), Fixture::ours()] {
            let mut command = Command::new("sh");
            let line = format!("PATH=$PATH:/sbin:/usr/sbin exec {program} {args} disk");
            let output = command
                .args(["-c", &line])
                .current_dir(it.dir.path())
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{program}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            let before = it.bytes();
            match luks::probe(&mut it.disk).unwrap() {
                Probe::Unknown(why) => assert!(why.contains(expected), "{program}: {why}"),
                other => panic!("{program}: {other:?}"),
            }
            let error =
                luks::format(&mut it.disk, &volume_key(), &Secret::new(NEW.into())).unwrap_err();
            assert!(matches!(error, Error::WouldOverwrite(_)), "{error}");
            assert!(it.bytes() == before);
        }
    }
}

/// The size in bytes of one header copy.
const COPY: usize = 16 << 10;
/// The offsets in a copy of the checksum and the JSON area.
const CHECKSUM: usize = 448;
const JSON: usize = 4096;

impl Fixture {
    /// Writes `json` and a label into a header copy, and computes the checksum.
    fn write_json(&self, copy: usize, label: &str, json: &[u8]) {
        let at = (copy * COPY) as u64;
        let mut bytes = vec![0; COPY];
        self.disk.read_exact_at(&mut bytes, at).unwrap();
        bytes[24..72].fill(0);
        bytes[24..24 + label.len()].copy_from_slice(label.as_bytes());
        bytes[JSON..].fill(0);
        bytes[JSON..JSON + json.len()].copy_from_slice(json);
        bytes[CHECKSUM..CHECKSUM + 64].fill(0);
        let sum = digest(&SHA256, &bytes);
        bytes[CHECKSUM..CHECKSUM + 32].copy_from_slice(sum.as_ref());
        self.disk.write_all_at(&bytes, at).unwrap();
    }

    /// Returns whether cryptsetup accepts the header. It may repair a copy when it reads, so we read before.
    fn is_luks(&self) -> bool {
        self.cryptsetup("isLuks", &["--type", "luks2"], &["disk"])
            .status
            .success()
    }

    /// Returns the metadata that cryptsetup uses.
    fn their_metadata(&self) -> Value {
        serde_json::from_str(&self.ok("luksDump", &["--dump-json-metadata"], &["disk"])).unwrap()
    }
}

/// Which program accepts a header.
#[derive(Debug)]
enum Taken {
    /// Both accept it and use the same metadata.
    Both,
    /// Neither accepts it.
    Neither,
    /// Only cryptsetup accepts it; our refusal has this text.
    Theirs(&'static str),
}
use Taken::{Both, Neither, Theirs};

/// Returns the metadata `valid` with another value at one place, or without that value.
fn changed(valid: &Value, pointer: &str, value: Option<Value>) -> Vec<u8> {
    let mut metadata = valid.clone();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = metadata
        .pointer_mut(parent)
        .unwrap()
        .as_object_mut()
        .unwrap();
    match value {
        Some(value) => drop(parent.insert(name.into(), value)),
        None => drop(parent.remove(name)),
    }
    metadata.to_string().into_bytes()
}

/// Returns a token with nested arrays, so that the metadata has `levels` levels.
fn nested_token(levels: usize) -> Value {
    let arrays = (0..levels - 3).fold(json!(1), |inner, level| {
        if level == 0 {
            json!([])
        } else {
            json!([inner])
        }
    });
    json!({"type": "x", "keyslots": [], "nested": arrays})
}

/// Returns changes of valid metadata, one for each rule of LUKS2, and which program accepts the result.
fn changes() -> Vec<(&'static str, Option<Value>, Taken)> {
    let slot = |change: &dyn Fn(&mut Value)| {
        let mut slot = json!({
            "type": "luks2", "key_size": 96, "af": {"type": "luks1", "stripes": 4000, "hash": "sha256"},
            "area": {"type": "raw", "offset": "1048576", "size": "385024", "encryption": "aes-xts-plain64", "key_size": 64},
            "kdf": {"type": "argon2id", "time": 4, "memory": 32, "cpus": 1, "salt": "AAAA"},
        });
        change(&mut slot);
        Some(slot)
    };
    let token = |token: Value| ("/tokens/1", Some(token));
    let tokens = [
        (token(json!({"type": "x", "keyslots": []})), Both),
        (token(json!({"type": "x", "keyslots": ["0"]})), Both),
        (
            token(json!({"type": "x", "keyslots": [], "more": {"a": [1.5, null, true]}})),
            Both,
        ),
        (token(json!({})), Neither),
        (token(json!({"type": "x"})), Neither),
        (token(json!({"keyslots": []})), Neither),
        (token(json!({"type": 1, "keyslots": []})), Neither),
        (token(json!({"type": "", "keyslots": []})), Neither),
        (token(json!({"type": "x", "keyslots": {}})), Neither),
        (token(json!({"type": "x", "keyslots": "0"})), Neither),
        (token(json!({"type": "x", "keyslots": [0]})), Neither),
        (token(json!({"type": "x", "keyslots": ["1"]})), Neither),
        (token(json!([])), Neither),
        (token(json!("x")), Neither),
        (token(nested_token(32)), Both),
        (token(nested_token(33)), Neither),
        (token(nested_token(60)), Neither),
        (token(nested_token(125)), Neither),
    ];
    let ids = ["x", "-1", "1 ", "0x1", "1.0", "+1"]
        .map(|id| (id, Neither))
        .into_iter();
    let ids = ids.chain([
        ("31", Both),
        ("32", Both),
        ("", Theirs("token id")),
        ("01", Theirs("token: id is")),
    ]);
    let others = vec![
        // a section that is missing or not an object
        ("/tokens", None, Neither),
        ("/keyslots", None, Neither),
        ("/segments", None, Neither),
        ("/digests", None, Neither),
        ("/config", None, Neither),
        ("/tokens", Some(json!([])), Neither),
        ("/keyslots", Some(json!({})), Neither),
        ("/segments", Some(json!({})), Neither),
        ("/digests", Some(json!({})), Neither),
        ("/more", Some(json!({})), Theirs("unknown field `more`")),
        // keyslots
        ("/keyslots/x", slot(&|_| ()), Neither),
        ("/keyslots/-1", slot(&|_| ()), Neither),
        ("/keyslots/1", slot(&|_| ()), Neither), // no digest refers to it
        ("/keyslots/0/type", Some(json!("")), Neither),
        ("/keyslots/0/type", Some(json!(2)), Neither),
        (
            "/keyslots/0/type",
            Some(json!("other")),
            Theirs(r#"keyslot 0: type is "other""#),
        ),
        ("/keyslots/0/priority", Some(json!(1)), Both),
        ("/keyslots/0/key_size", None, Neither),
        ("/keyslots/0/key_size", Some(json!("96")), Neither),
        ("/keyslots/0/key_size", Some(json!(-1)), Neither),
        ("/keyslots/0/key_size", Some(json!(96.0)), Neither),
        ("/keyslots/0/key_size", Some(json!(1u64 << 32)), Neither),
        (
            "/keyslots/0/key_size",
            Some(json!(0)),
            Theirs("key_size is 0"),
        ),
        ("/keyslots/0/kdf", None, Neither),
        ("/keyslots/0/kdf/salt", None, Neither),
        ("/keyslots/0/kdf/salt", Some(json!("")), Neither),
        ("/keyslots/0/kdf/type", Some(json!("pbkdf2")), Neither),
        (
            "/keyslots/0/kdf/type",
            Some(json!("argon2i")),
            Theirs(r#"kdf type is "argon2i""#),
        ),
        (
            "/keyslots/0/kdf/type",
            Some(json!("other")),
            Theirs(r#"kdf type is "other""#),
        ),
        ("/keyslots/0/kdf/time", Some(json!(1.5)), Neither),
        (
            "/keyslots/0/kdf/time",
            Some(json!(-1)),
            Theirs("kdf: time is -1, expected a number of 32 bits"),
        ),
        ("/keyslots/0/kdf/memory", None, Neither),
        ("/keyslots/0/kdf/cpus", Some(json!("1")), Neither),
        ("/keyslots/0/af", None, Neither),
        ("/keyslots/0/af/type", Some(json!("luks2")), Neither),
        ("/keyslots/0/af/hash", Some(json!("")), Neither),
        (
            "/keyslots/0/af/hash",
            Some(json!("sha512")),
            Theirs("af hash"),
        ),
        ("/keyslots/0/af/stripes", Some(json!("4000")), Neither),
        ("/keyslots/0/area", None, Neither),
        ("/keyslots/0/area/type", Some(json!("journal")), Neither),
        ("/keyslots/0/area/encryption", Some(json!("")), Neither),
        ("/keyslots/0/area/key_size", Some(json!("64")), Neither),
        ("/keyslots/0/area/offset", Some(json!("0")), Neither),
        ("/keyslots/0/area/offset", Some(json!("16777216")), Neither),
        ("/keyslots/0/area/offset", Some(json!(32768)), Neither),
        ("/keyslots/0/area/offset", Some(json!("0x8000")), Neither),
        (
            "/keyslots/0/area/offset",
            Some(json!("18446744073709551616")),
            Neither,
        ),
        ("/keyslots/0/area/size", Some(json!("0")), Neither),
        ("/keyslots/0/area/size", Some(json!("16744449")), Neither),
        (
            "/keyslots/0/area/size",
            Some(json!("4096")),
            Theirs("its area has 4096 bytes"),
        ),
        // segments
        ("/segments/x", Some(json!({})), Neither),
        ("/segments/0/type", Some(json!("")), Neither),
        (
            "/segments/0/type",
            Some(json!("linear")),
            Theirs("segment 0: type"),
        ),
        ("/segments/0/offset", Some(json!(16777216)), Neither),
        ("/segments/0/offset", Some(json!("16777217")), Neither),
        ("/segments/0/offset", Some(json!("32768")), Neither),
        (
            "/segments/0/offset",
            Some(json!("0")),
            Theirs("segment 0: offset is"),
        ),
        ("/segments/0/size", Some(json!("")), Neither),
        ("/segments/0/size", Some(json!("0")), Neither),
        ("/segments/0/size", Some(json!("512")), Neither),
        ("/segments/0/size", Some(json!("whole")), Neither),
        (
            "/segments/0/size",
            Some(json!("1048576")),
            Theirs("segment 0: size"),
        ),
        ("/segments/0/flags", Some(json!({})), Neither),
        ("/segments/0/flags", Some(json!([1])), Neither),
        ("/segments/0/flags", Some(json!([])), Both),
        (
            "/segments/0/flags",
            Some(json!(["x"])),
            Theirs("segment 0: flags"),
        ),
        ("/segments/0/iv_tweak", Some(json!("")), Neither),
        ("/segments/0/iv_tweak", Some(json!(0)), Neither),
        ("/segments/0/iv_tweak", Some(json!("8")), Theirs("iv_tweak")),
        ("/segments/0/encryption", Some(json!("")), Neither),
        ("/segments/0/sector_size", Some(json!("4096")), Neither),
        ("/segments/0/sector_size", Some(json!(0)), Neither),
        ("/segments/0/sector_size", Some(json!(1000)), Neither),
        (
            "/segments/0/sector_size",
            Some(json!(512)),
            Theirs("sector_size is 512"),
        ),
        (
            "/segments/0/integrity",
            Some(json!("hmac(sha256)")),
            Neither,
        ),
        ("/segments/0/integrity/type", None, Neither),
        (
            "/segments/0/integrity/journal_encryption",
            Some(json!(1)),
            Neither,
        ),
        ("/segments/0/integrity/journal_integrity", None, Neither),
        // digests
        (
            "/digests/x",
            Some(json!({"type": "x", "keyslots": [], "segments": []})),
            Neither,
        ),
        (
            "/digests/1",
            Some(json!({"type": "x", "keyslots": [], "segments": []})),
            Both,
        ),
        (
            "/digests/1",
            Some(json!({"type": "x", "keyslots": ["0"], "segments": []})),
            Neither,
        ),
        ("/digests/0/type", Some(json!("")), Neither),
        ("/digests/0/keyslots", Some(json!([])), Neither),
        ("/digests/0/keyslots", Some(json!(["0", "1"])), Neither),
        ("/digests/0/keyslots", Some(json!([0])), Neither),
        ("/digests/0/segments", Some(json!([])), Neither),
        ("/digests/0/segments", Some(json!(["0", "1"])), Neither),
        ("/digests/0/segments", None, Neither),
        (
            "/digests/0/hash",
            Some(json!("sha512")),
            Theirs("digest 0: hash"),
        ),
        (
            "/digests/0/iterations",
            Some(json!(0)),
            Theirs("digest 0: iterations is 0"),
        ),
        (
            "/digests/0/iterations",
            Some(json!(u32::MAX)),
            Theirs("one try of a key would cost"),
        ),
        // config
        ("/config/json_size", None, Neither),
        ("/config/json_size", Some(json!(12288)), Neither),
        ("/config/json_size", Some(json!("12287")), Neither),
        ("/config/json_size", Some(json!("28672")), Neither),
        ("/config/keyslots_size", Some(json!("")), Neither),
        ("/config/keyslots_size", Some(json!("4096")), Neither),
        ("/config/keyslots_size", Some(json!("16744449")), Neither),
        ("/config/keyslots_size", Some(json!("16748544")), Neither),
        ("/config/keyslots_size", Some(json!("134221824")), Neither),
        ("/config/keyslots_size", Some(json!("8388608")), Both),
        ("/config/flags", Some(json!({})), Neither),
        ("/config/flags", Some(json!([1])), Neither),
        (
            "/config/flags",
            Some(json!(["no-journal"])),
            Theirs("the flags are"),
        ),
        ("/config/requirements", Some(json!([])), Neither),
        (
            "/config/requirements",
            Some(json!({"mandatory": {}})),
            Neither,
        ),
        ("/config/requirements", Some(json!({})), Both),
    ];
    let ids = ids.map(|(id, taken)| {
        let pointer: &'static str = format!("/tokens/{id}").leak();
        (pointer, Some(json!({"type": "x", "keyslots": []})), taken)
    });
    let tokens = tokens
        .into_iter()
        .map(|((pointer, token), taken)| (pointer, token, taken));
    tokens.chain(ids).chain(others).collect()
}

#[test]
fn we_accept_no_header_that_cryptsetup_refuses_and_give_the_reason_if_we_are_stricter() {
    let mut it = Fixture::ours();
    let valid = it.header().metadata().clone();
    let text = valid.to_string();
    let mut cases: Vec<(String, Vec<u8>, Taken)> = changes()
        .into_iter()
        .map(|(place, value, taken)| {
            (
                format!("{place} = {value:?}"),
                changed(&valid, place, value),
                taken,
            )
        })
        .collect();
    // the area does not begin with '{', has bytes after the object, or contains unusual JSON
    for (start, end, taken) in [
        ("", "", Both),
        ("", " \n", Both),
        (" ", "", Neither),
        ("\n", "", Neither),
        ("\u{feff}", "", Neither),
        ("[", "]", Neither),
        ("", "x", Neither),
        ("", "{}", Neither),
        ("", "\0x", Neither),
        ("{", "", Neither),
    ] {
        cases.push((
            format!("{start:?} before and {end:?} after"),
            [start, &text, end].concat().into_bytes(),
            taken,
        ));
    }
    for json in ["", "{}", "[]", "null", "{\"keyslots\":{}"] {
        cases.push((json.into(), json.into(), Neither));
    }
    assert!(cases.len() > 140);
    for (name, json, taken) in cases {
        for copy in [0, 1] {
            it.write_json(copy, "", &json);
        }
        let ours = match luks::probe(&mut it.disk).unwrap() {
            Probe::Luks(header) => header
                .check_ours(Integrity::Required)
                .map(|()| header)
                .map_err(|why| why.to_string()),
            other => Err(format!("{other:?}")),
        };
        assert_eq!(
            it.is_luks(),
            !matches!(taken, Neither),
            "cryptsetup, {name}"
        );
        match (taken, ours) {
            (Both, ours) => assert_eq!(*ours.unwrap().metadata(), it.their_metadata(), "{name}"),
            (Theirs(words), Err(why)) => assert!(why.contains(words), "{name}: {why}"),
            (Neither, Err(why)) => {
                assert!(why.contains("an unusable LUKS header"), "{name}: {why}")
            }
            (taken, Ok(_)) => panic!("{name}: we take it, expected {taken:?}"),
        }
    }
}

#[test]
fn of_two_copies_with_valid_checksums_we_use_the_valid_one_as_cryptsetup_does() {
    let mut it = Fixture::ours();
    let valid = it.header().metadata().clone();
    let text = valid.to_string().into_bytes();
    let bad = [
        changed(
            &valid,
            "/tokens/x",
            Some(json!({"type": "x", "keyslots": []})),
        ),
        changed(&valid, "/tokens/1", Some(json!({"type": "x"}))),
        changed(&valid, "/tokens/1", Some(nested_token(33))),
        changed(&valid, "/segments", None),
        changed(&valid, "/keyslots/0/area/offset", Some(json!("0"))),
        [b" ", &text[..]].concat(),
        b"{".to_vec(),
    ];
    for bad in bad {
        for (copies, counts) in [([&bad, &text], "secondary"), ([&text, &bad], "primary")] {
            it.write_json(0, "primary", copies[0]);
            it.write_json(1, "secondary", copies[1]);
            let mut header = it.header();
            header.check_ours(Integrity::Required).unwrap();
            assert!(!header.copies_agree());
            // cryptsetup repairs the other copy when it reads, so it gets a copy of the disk
            std::fs::copy(it.path("disk"), it.path("theirs")).unwrap();
            let dump = it.ok("luksDump", &[], &["theirs"]);
            let label = dump
                .lines()
                .find_map(|line| line.strip_prefix("Label:"))
                .unwrap()
                .trim();
            assert_eq!(
                label,
                counts,
                "cryptsetup, {}",
                String::from_utf8_lossy(&bad)
            );
            // after our repair, both copies are equal to the one that is used
            header.repair(&mut it.disk).unwrap();
            assert!(it.header().copies_agree());
            let before = it.bytes();
            let dump = it.ok("luksDump", &[], &["disk"]);
            assert!(dump.contains(counts), "{dump}");
            assert!(
                it.bytes() == before,
                "cryptsetup was not content with our repair"
            );
        }
    }
}
