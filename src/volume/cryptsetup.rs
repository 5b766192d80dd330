//! Runs cryptsetup on a volume. Secrets go to its standard input only.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::error::Error;
use super::header::{CIPHERS, decimal, weakness};
use base::child_process::{self, ChildFailure};
use base::crypto::{KEY_LEN, Secret};
use base::stop::Stop;
use base::uuid::Uuid;
use disk::device_mapper::{FORMATTED, SUPERBLOCK_LEN, other_byte};
use serde_json::{Value, json};
use sys::block::PageBuffer;

/// The type of our token in the header.
pub const TOKEN: &str = "firstlight-volume";
/// What is read at each end of a device that must be blank: 16 MiB, in blocks.
const BLOCKS: u64 = 16;
const BLOCK: usize = 1 << 20;
/// The time limit of one run. The slowest step is argon2 for a keyslot of an administrator.
const LIMIT: Duration = Duration::from_secs(300);
/// The key derivation of our keyslot: the cheapest that cryptsetup accepts, because its key is
/// random and has 256 bits.
const CHEAP: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
/// The size of a new volume key, and of the key of an area, in bits and bytes: AES-256 in the mode XTS has two keys.
const KEY_BITS: &str = "512";
const VOLUME_KEY: usize = 64;
/// The standard input as a file; an initramfs may lack /dev/stdin.
const STDIN: &str = "/proc/self/fd/0";
/// The place of the length of the tags in dm-integrity's superblock.
const TAG_LEN: Range<usize> = 10..12;
/// Sectors of a bit of its bitmap, as a power of two (DEFAULT_SECTORS_PER_BITMAP_BIT).
const BITMAP_BIT: u8 = 15;
/// The exit code of cryptsetup for a wrong key (cryptsetup(8), "RETURN CODES").
const WRONG_KEY: i32 = 2;
/// What `--verbose` prints about the keyslot that a key opens.
const UNLOCKED: (&str, &str) = ("Key slot ", " unlocked.");

/// A device with a LUKS2 header, or for one, or a copy of a header.
pub struct Luks {
    device: PathBuf,
    stop: Stop,
}

impl Luks {
    /// Runs cryptsetup on this device.
    pub fn new(device: &Path, stop: &Stop) -> Luks {
        Luks {
            device: device.into(),
            stop: stop.clone(),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Returns the UUID of the LUKS2 header; `None` if the device has none.
    pub fn uuid(&self) -> Result<Option<Uuid>, Error> {
        let is_luks = self.run(&["isLuks", "--type", "luks2"], &[], &[]);
        match is_luks {
            Ok(_) => {}
            Err(error) if code(&error) == Some(1) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let said = self.run(&["luksUUID"], &[], &[])?;
        let uuid = said.lines().find_map(|line| Uuid::parse(line.trim()));
        uuid.map(Some).ok_or_else(|| {
            Error::Device(format!(
                "the UUID of {} cannot be read",
                self.device.display()
            ))
        })
    }

    /// Returns the place of a byte that is not zero at one of the ends of the device, where file systems,
    /// partition tables and encrypted volumes begin or end; `None` if it is blank.
    pub fn content(&self) -> Result<Option<u64>, Error> {
        let failed = |error| Error::File(self.device.clone(), error);
        let mut file = File::open(&self.device).map_err(failed)?;
        let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let mut bytes = vec![0; BLOCK];
        let last = size.saturating_sub(BLOCKS * BLOCK as u64);
        let places = (0..BLOCKS).map(|number| number * BLOCK as u64);
        for place in places.clone().chain(places.map(|place| last + place)) {
            let length = size.saturating_sub(place).min(BLOCK as u64) as usize;
            file.read_exact_at(&mut bytes[..length], place)
                .map_err(failed)?;
            if let Some(at) = bytes[..length].iter().position(|byte| *byte != 0) {
                return Ok(Some(place + at as u64));
            }
        }
        Ok(None)
    }

    /// Copies the header into this file, checks the copy, and returns it. The host can show any other
    /// header afterwards, so only the copy may be used.
    pub fn copy(&self, path: &Path, uuid: &Uuid) -> Result<Luks, Error> {
        let failed = |error| Error::File(path.into(), error);
        let remove = || match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => Ok(()),
        };
        remove()?;
        make_folder(path)?;
        let file = path.as_os_str();
        let words = ["luksHeaderBackup", "--batch-mode", "--header-backup-file"].map(OsStr::new);
        self.run(&[&words[..], &[file]].concat(), &[], &[])?;
        let copy = Luks::new(path, &self.stop);
        let check = || {
            let found = copy.uuid()?;
            if found.as_ref() != Some(uuid) {
                let found = found.as_ref().map_or("none", Uuid::as_str);
                let place = self.device.display();
                let text = format!("{place} has the LUKS2 UUID {found}, expected {uuid}");
                return Err(Error::Device(text));
            }
            self.check_superblock(&copy.metadata()?)
        };
        if let Err(why) = check() {
            remove()?;
            return Err(why);
        }
        Ok(copy)
    }

    /// Makes a new LUKS2 volume with this volume key, and a keyslot for one key. Its content is lost.
    pub fn format(&self, uuid: &Uuid, volume_key: &VolumeKey, key: &[u8]) -> Result<(), Error> {
        let words = ["luksFormat", "--batch-mode", "--type", "luks2", "--uuid"].map(OsStr::new);
        let more = [
            "--cipher",
            CIPHERS[0],
            "--key-size",
            KEY_BITS,
            "--key-file",
            "-",
        ];
        let uuid = OsStr::new(uuid.as_str());
        let words = [
            &words[..],
            &[uuid],
            &more.map(OsStr::new),
            &volume_key.option(),
        ];
        self.run(&words.concat(), &[key], &[])?;
        Ok(())
    }

    /// Writes the volume key, which this key opens, to a file.
    pub fn volume_key(&self, key: &[u8], path: &Path) -> Result<VolumeKey, Error> {
        let file = VolumeKey::at(path)?;
        let words = [
            "luksDump",
            "--batch-mode",
            "--dump-volume-key",
            "--key-file",
            "-",
        ];
        let words = [&words.map(OsStr::new)[..], &file.option()].concat();
        self.run(&words, &[key], &[])?;
        Ok(file)
    }

    /// Returns the keyslot that this key opens, or `None` if it opens none.
    pub fn keyslot(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        let words = [
            "open",
            "--test-passphrase",
            "--verbose",
            "--batch-mode",
            "--key-file",
            "-",
        ];
        let said = match self.run(&words, &[key], &[]) {
            Ok(said) => said,
            Err(error) if code(&error) == Some(WRONG_KEY) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let slot = said.lines().find_map(|line| {
            let (_, rest) = line.split_once(UNLOCKED.0)?;
            rest.strip_suffix(UNLOCKED.1)?.parse().ok()
        });
        slot.map(Some).ok_or_else(|| {
            Error::Device(format!(
                "cryptsetup does not say which keyslot of {} opened: {said}",
                self.device.display()
            ))
        })
    }

    /// Adds a keyslot for `key`. Fails if the header is of another volume key: a host can show a header whose
    /// volume key it knows, and keep the keyslot that it gets.
    pub fn add_key(&self, volume_key: &VolumeKey, key: &Secret) -> Result<(), Error> {
        let new = KEY_LEN.to_string();
        let words = ["luksAddKey", "--batch-mode", "--new-keyfile-size", &new];
        let cipher = [
            "--keyslot-cipher",
            CIPHERS[0],
            "--keyslot-key-size",
            KEY_BITS,
        ];
        let words = [&words[..], &cipher, &CHEAP].concat();
        let words: Vec<&OsStr> = words.into_iter().map(OsStr::new).collect();
        let words = [&words[..], &volume_key.option()].concat();
        self.run(&words, &[key.expose()], &[STDIN])?;
        Ok(())
    }

    /// Returns the metadata of the header. Refuses a header that does not protect the data.
    pub fn metadata(&self) -> Result<Value, Error> {
        let said = self.run(&["luksDump", "--dump-json-metadata"], &[], &[])?;
        let metadata: Value = serde_json::from_str(&said).map_err(|error| self.refused(&error))?;
        match weakness(&metadata) {
            Some(why) => Err(self.refused(&why)),
            None => Ok(metadata),
        }
    }

    /// Refuses a superblock of dm-integrity that cryptsetup does not write: nobody authenticates it, and the
    /// kernel obeys its flags.
    fn check_superblock(&self, metadata: &Value) -> Result<(), Error> {
        let segment = &metadata["segments"]["0"];
        let (Some(offset), Some(sector)) =
            (decimal(segment, "offset"), segment["sector_size"].as_u64())
        else {
            return Err(self.refused(&"segment 0 has no offset or no size of its sectors"));
        };
        if segment["integrity"].is_null() {
            return Ok(());
        }
        let mut page = PageBuffer::new(SUPERBLOCK_LEN);
        let mut options = OpenOptions::new();
        if !self.device.is_file() {
            // as the kernel reads it, not as the page cache may have it
            options.custom_flags(libc::O_DIRECT);
        }
        let file = options.read(true).open(&self.device);
        file.and_then(|file| file.read_exact_at(page.bytes_mut(), offset))
            .map_err(|error| Error::File(self.device.clone(), error))?;
        let superblock = page.bytes().first_chunk().expect("a page");
        match foreign_byte(superblock, sector) {
            None => Ok(()),
            Some(at) => Err(self.refused(&format!(
                "byte {at} of dm-integrity's superblock is {:#04x}, which cryptsetup does not write",
                superblock[at]
            ))),
        }
    }

    fn refused(&self, why: &dyn Display) -> Error {
        let place = self.device.display();
        Error::Device(format!("the LUKS2 header of {place} is refused: {why}"))
    }

    /// Writes our token, which names this keyslot, and gives the keyslot the highest priority. Removes
    /// our token of an earlier enrolment.
    pub fn mark(&self, keyslot: u32) -> Result<(), Error> {
        let ours = json!({"type": TOKEN, "keyslots": [keyslot.to_string()]});
        let mut is_marked = false;
        for (id, token) in tokens(&self.metadata()?) {
            if *token == ours {
                is_marked = true
            } else {
                self.remove_token(id)?
            }
        }
        if !is_marked {
            let words = ["token", "import", "--batch-mode", "--json-file", "-"];
            self.run(&words, &[ours.to_string().as_bytes()], &[])?;
        }
        let number = keyslot.to_string();
        let words = ["config", "--key-slot", &number, "--priority", "prefer"];
        self.run(&words, &[], &[])?;
        Ok(())
    }

    /// Removes our keyslot, which `enroll` has recorded, and our token. A host can write any token, so
    /// this removes nothing if the token names other keyslots. Refuses to remove the last keyslot.
    pub fn unmark(&self, recorded: Option<u32>) -> Result<(), Error> {
        let metadata = self.metadata()?;
        let keyslots = &metadata["keyslots"];
        let mut named: Vec<&str> = keyslots_of(&metadata).collect();
        named.dedup();
        let place = self.device.display();
        if let [ours] = named[..] {
            if keyslots.as_object().is_none_or(|all| all.len() == 1) {
                return Err(Error::Key(format!(
                    "only the key of the key broker opens {place}: first add another one with cryptsetup luksAddKey"
                )));
            }
            let is_recorded = recorded.is_none_or(|number| ours == number.to_string());
            if is_recorded && is_cheap(&keyslots[ours]) {
                self.kill(ours)?;
                named.clear();
            }
        }
        // a remove that was interrupted has left a token without a keyslot
        if !named.is_empty() {
            let expected = recorded.map_or("one".into(), |number| format!("keyslot {number}"));
            let named = named.join(", ");
            return Err(Error::Key(format!(
                "the token {TOKEN} in the header of {place} names the keyslots {named}, expected {expected}, as enroll has made it: the host or \
                 another program has changed the header. Nothing was removed: find the keyslot with cryptsetup luksDump, and remove it with luksKillSlot"
            )));
        }
        for (id, _) in tokens(&metadata) {
            self.remove_token(id)?;
        }
        Ok(())
    }

    /// Removes a keyslot.
    pub fn kill(&self, number: &str) -> Result<(), Error> {
        self.run(&["luksKillSlot", "--batch-mode"], &[], &[number])?;
        Ok(())
    }

    fn remove_token(&self, id: &str) -> Result<(), Error> {
        self.run(&["token", "remove", "--token-id", id], &[], &[])?;
        Ok(())
    }

    /// Runs cryptsetup with these words, the device, and these further operands. Returns its output.
    fn run<W: AsRef<OsStr>>(
        &self,
        words: &[W],
        input: &[&[u8]],
        further: &[&str],
    ) -> Result<String, child_process::Error> {
        let mut command = Command::new("cryptsetup");
        command.args(words).arg(&self.device).args(further);
        self.run_command(command, input)
    }

    fn run_command(
        &self,
        mut command: Command,
        input: &[&[u8]],
    ) -> Result<String, child_process::Error> {
        let stdin = pipe(input).map_err(|error| child_process::Error {
            program: child_process::name(&command),
            cause: ChildFailure::Start(error),
            last_lines: vec![],
        })?;
        let mut said = String::new();
        let mut tell = |line: &str| {
            said += line;
            said.push('\n');
        };
        command.env("LC_ALL", OsStr::new("C"));
        child_process::run(&mut command, stdin, LIMIT, &self.stop, &mut tell)?;
        Ok(said)
    }
}

/// Returns the place of the first byte that no luksFormat writes into the superblock of a segment with
/// sectors of this size and any tags. The kernel compares the length of the tags with its table.
fn foreign_byte(superblock: &[u8; SUPERBLOCK_LEN], sector_size: u64) -> Option<usize> {
    let mut bytes = *superblock;
    bytes[TAG_LEN].copy_from_slice(&FORMATTED[TAG_LEN]);
    // a block has one sector, and a bit of a bitmap 2^15 sectors of 512 bytes
    let log2 = (sector_size / 512).checked_ilog2().unwrap_or_default() as u8;
    let blocks = [log2, BITMAP_BIT.wrapping_sub(log2)];
    match (28..30).find(|at| bytes[*at] != blocks[at - 28]) {
        None => bytes[28..30].copy_from_slice(&FORMATTED[28..30]),
        other => return other,
    }
    other_byte(&bytes)
}

/// Returns whether a keyslot has the key derivation of those that we add.
fn is_cheap(keyslot: &Value) -> bool {
    keyslot["kdf"]["type"] == CHEAP[1]
        && keyslot["kdf"]["iterations"].as_u64() == CHEAP[3].parse().ok()
}

/// Returns the header's tokens of our type, with their numbers.
fn tokens(metadata: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let tokens = metadata["tokens"].as_object().into_iter().flatten();
    tokens.filter(|(_, token)| token["type"] == TOKEN)
}

/// Returns the numbers of the keyslots that our tokens name.
pub fn keyslots_of(metadata: &Value) -> impl Iterator<Item = &str> {
    let keyslots = tokens(metadata).filter_map(|(_, token)| token["keyslots"].as_array());
    keyslots.flatten().filter_map(Value::as_str)
}

/// A file with the key that encrypts a volume. It is in memory, and is overwritten and removed on drop.
pub struct VolumeKey(PathBuf);

impl VolumeKey {
    /// Makes the file with a new key.
    pub fn new(path: &Path) -> Result<VolumeKey, Error> {
        let file = VolumeKey::at(path)?;
        let failed = |error| Error::File(path.into(), error);
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        let mut opened = options.open(path).map_err(failed)?;
        let key = Secret::random(VOLUME_KEY);
        opened.write_all(key.expose()).map_err(failed)?;
        Ok(file)
    }

    /// Takes this path, at which no file is left.
    fn at(path: &Path) -> Result<VolumeKey, Error> {
        make_folder(path)?;
        // that of a run which was interrupted
        drop(VolumeKey(path.into()));
        Ok(VolumeKey(path.into()))
    }

    fn option(&self) -> [&OsStr; 2] {
        [OsStr::new("--volume-key-file"), self.0.as_os_str()]
    }
}

impl Drop for VolumeKey {
    fn drop(&mut self) {
        if let Ok(mut file) = OpenOptions::new().write(true).open(&self.0) {
            // with integrity a key is longer than ours
            let size = file.metadata().map_or(0, |data| data.len());
            let _ = io::copy(&mut io::repeat(0).take(size), &mut file);
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Makes the folder of a file, for root only.
fn make_folder(path: &Path) -> Result<(), Error> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::File(folder.into(), error))
}

/// Returns a standard input with these bytes. They fit into the buffer of a pipe.
fn pipe(parts: &[&[u8]]) -> io::Result<Stdio> {
    let (reader, mut writer) = io::pipe()?;
    for part in parts {
        writer.write_all(part)?;
    }
    Ok(reader.into())
}

/// Returns the exit code of a program that failed.
fn code(error: &child_process::Error) -> Option<i32> {
    match &error.cause {
        ChildFailure::Failed(status) => status.code(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn a_superblock_that_cryptsetup_does_not_write_is_refused() {
        let device = tempfile::NamedTempFile::new().unwrap();
        let luks = Luks::new(device.path(), &Stop::new());
        let segment = |integrity: Value| json!({"segments": {"0": {"offset": "16777216", "sector_size": 4096, "integrity": integrity}}});
        let with = segment(json!({"type": "hmac(sha256)"}));
        assert!(luks.check_superblock(&segment(Value::Null)).is_ok());
        // the device ends before it
        assert!(matches!(luks.check_superblock(&with), Err(Error::File(..))));
        let disk = support::cut_off::disk();
        let write = |at: usize, byte: u8| {
            let mut disk = disk.clone();
            disk[support::cut_off::SUPERBLOCK + at] = byte;
            fs::write(device.path(), disk).unwrap();
        };
        write(0, b'i');
        luks.check_superblock(&with).unwrap();
        for (at, byte) in [(24, 0x0c), (24, 0), (0, 0), (36, 1), (2048, 1)] {
            write(at, byte);
            let why = luks.check_superblock(&with).unwrap_err().to_string();
            let expected = format!("byte {at} of dm-integrity's superblock is {byte:#04x}");
            assert!(why.contains(&expected), "{why}");
        }
    }

    #[test]
    fn a_superblock_of_cryptsetup_with_other_tags_and_sectors_is_accepted() {
        let with = |changes: &[(usize, u8)]| {
            let mut bytes = [0; SUPERBLOCK_LEN];
            bytes[..FORMATTED.len()].copy_from_slice(&FORMATTED);
            changes.iter().for_each(|(at, value)| bytes[*at] = *value);
            bytes
        };
        assert_eq!(foreign_byte(&with(&[]), 4096), None);
        // aegis128 with a random vector, and hmac-sha512
        let small = [(10, 28), (28, 0), (29, 15)];
        assert_eq!(foreign_byte(&with(&small), 512), None);
        assert_eq!(foreign_byte(&with(&[(10, 64)]), 4096), None);
        for (changes, sector_size, at) in [
            (&[(24, 0x0c)][..], 4096, 24),
            (&[(24, 0x0a)], 4096, 24),
            (&[(8, 3)], 4096, 8),
            (&[(29, 15)], 4096, 29),
            (&[(40, 1)], 4096, 40),
            (&[], 512, 28),
            (&[], 0, 28),
        ] {
            let found = foreign_byte(&with(changes), sector_size);
            assert_eq!(found, Some(at), "{changes:?}");
        }
    }

    #[test]
    fn our_tokens_name_our_keyslots() {
        const TOKENS: &str = r#"{"tokens":{"0":{"type":"other","keyslots":["0"]},"1":{"type":"firstlight-volume","keyslots":["1"]}}}"#;
        let metadata = serde_json::from_str(TOKENS).unwrap();
        assert_eq!(keyslots_of(&metadata).collect::<Vec<_>>(), ["1"]);
        for bytes in mutations(TOKENS.as_bytes(), 5_000) {
            if let Ok(metadata) = serde_json::from_slice(&bytes) {
                let _ = keyslots_of(&metadata).count();
            }
        }
    }
}
