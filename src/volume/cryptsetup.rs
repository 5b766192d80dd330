//! Runs cryptsetup on a volume. Secrets go to its standard input only.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::error::Error;
use base::child_process::{self, Cause};
use base::crypto::{KEY_LEN, Secret};
use base::stop::Stop;
use booted_base::uuid::Uuid;
use serde_json::{Value, json};

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
/// The standard input as a file; an initramfs may lack /dev/stdin.
const STDIN: &str = "/proc/self/fd/0";
/// The exit code of cryptsetup for a wrong key (cryptsetup(8), "RETURN CODES").
const WRONG_KEY: i32 = 2;
/// What `--verbose` prints about the keyslot that a key opens.
const UNLOCKED: (&str, &str) = ("Key slot ", " unlocked.");

/// A device with a LUKS2 header, or for one.
pub struct Luks {
    device: PathBuf,
    stop: Stop,
}

impl Luks {
    /// Uses this device.
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

    /// Makes a new LUKS2 volume with one key. Its content is lost.
    pub fn format(&self, uuid: &Uuid, key: &[u8]) -> Result<(), Error> {
        let words = [
            "luksFormat",
            "--batch-mode",
            "--type",
            "luks2",
            "--uuid",
            uuid.as_str(),
        ];
        let words = [&words[..], &["--key-file", "-"]].concat();
        self.run(&words, &[key], &[])?;
        Ok(())
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

    /// Adds a keyslot for `key`. `present` opens the volume already.
    pub fn add_key(&self, present: &[u8], key: &Secret) -> Result<(), Error> {
        let (old, new) = (present.len().to_string(), KEY_LEN.to_string());
        let words = [
            "luksAddKey",
            "--batch-mode",
            "--key-file",
            "-",
            "--keyfile-size",
            &old,
        ];
        let words = [&words[..], &["--new-keyfile-size", &new], &CHEAP].concat();
        // both are on the standard input, one after the other
        self.run(&words, &[present, key.expose()], &[STDIN])?;
        Ok(())
    }

    /// Returns the metadata of the header. Refuses a header with which the kernel or cryptsetup would
    /// not encrypt: a host can write any header.
    pub fn metadata(&self) -> Result<Value, Error> {
        let said = self.run(&["luksDump", "--dump-json-metadata"], &[], &[])?;
        let metadata: Value = serde_json::from_str(&said).map_err(|error| self.refused(&error))?;
        match weakness(&metadata) {
            Some(why) => Err(self.refused(&why)),
            None => Ok(metadata),
        }
    }

    fn refused(&self, why: &dyn Display) -> Error {
        let place = self.device.display();
        Error::Device(format!("the LUKS2 header of {place} is refused: {why}"))
    }

    /// Writes our token, which names this keyslot, and gives the keyslot the highest priority. Removes
    /// our token of an earlier enrolment.
    pub fn mark(&self, keyslot: u32) -> Result<(), Error> {
        let metadata = self.metadata()?;
        let ours = json!({"type": TOKEN, "keyslots": [keyslot.to_string()]});
        let tokens = metadata["tokens"].as_object().into_iter().flatten();
        let mut is_marked = false;
        for (id, token) in tokens.filter(|(_, token)| token["type"] == TOKEN) {
            match *token == ours {
                true => is_marked = true,
                false => drop(self.run(&["token", "remove", "--token-id", id], &[], &[])?),
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

    /// Runs cryptsetup with these words, the device, and these further operands. Returns its output.
    fn run(
        &self,
        words: &[&str],
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
            cause: Cause::Start(error),
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

/// Returns why a header does not protect the data, if so. With a null cipher in the area of a keyslot,
/// any key opens it, and the host knows the volume key.
fn weakness(metadata: &Value) -> Option<String> {
    let parts = |name: &str| metadata[name].as_object().filter(|parts| !parts.is_empty());
    let (Some(keyslots), Some(segments)) = (parts("keyslots"), parts("segments")) else {
        return Some("it has no keyslot or no segment".into());
    };
    let weak = |encryption: &Value| {
        let cipher = encryption.as_str().unwrap_or_default();
        cipher.is_empty() || cipher.contains("null")
    };
    let keyslot = keyslots
        .iter()
        .find(|(_, keyslot)| keyslot["type"] != "luks2" || weak(&keyslot["area"]["encryption"]));
    let segment = segments
        .iter()
        .find(|(_, segment)| segment["type"] != "crypt" || weak(&segment["encryption"]));
    match (keyslot, segment) {
        (Some((number, _)), _) => Some(format!("keyslot {number} is not encrypted")),
        (_, Some((number, _))) => Some(format!("segment {number} is not encrypted")),
        (None, None) => None,
    }
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
        Cause::Failed(status) => status.code(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const VALID: &str = r#"{"keyslots":{"0":{"type":"luks2","area":{"type":"raw","encryption":"aes-xts-plain64"}}},
        "segments":{"0":{"type":"crypt","encryption":"aes-xts-plain64"}},"tokens":{}}"#;

    #[test]
    fn a_header_that_does_not_encrypt_is_refused() {
        let check = |text: &str| weakness(&serde_json::from_str(text).unwrap());
        assert_eq!(check(VALID), None);
        for (from, to) in [
            (
                r#"raw","encryption":"aes-xts-plain64"#,
                r#"raw","encryption":"cipher_null-ecb"#,
            ),
            (
                r#"crypt","encryption":"aes-xts-plain64"#,
                r#"crypt","encryption":"cipher_null-ecb"#,
            ),
            (
                r#"crypt","encryption":"aes-xts-plain64"#,
                r#"crypt","encryption":"capi:ecb(cipher_null)-plain"#,
            ),
            (r#""type":"crypt""#, r#""type":"linear""#),
            (r#""type":"luks2""#, r#""type":"reencrypt""#),
            (r#"raw","encryption""#, r#"raw","other""#),
            ("segments", "other"),
            ("keyslots", "other"),
        ] {
            let text = VALID.replace(from, to);
            assert_ne!(text, VALID);
            assert!(check(&text).is_some(), "{text}");
        }
        for bytes in mutations(VALID.as_bytes(), 20_000) {
            if let Ok(metadata) = serde_json::from_slice(&bytes) {
                let _ = weakness(&metadata);
            }
        }
    }
}
