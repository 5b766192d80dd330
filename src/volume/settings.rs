//! The settings of a volume: options of `enroll`, and the file that `serve` reads, with a line
//! `name=value` for each.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use attest::{AttesterVariant, Issuer, variant};
use base::options::{Opt, Table, put, take};
use base::program::{Failure, parsed, text};
use base::uuid::Uuid;
use cloud::peers::parse_hosts;
use lexopt::{Arg, Parser};

use super::error::Error;
use node::service_trust::{ClusterId, TrustSettings};

/// The folder of the files of volumes.
pub const FOLDER: &str = "/etc/firstlight/volumes";
/// The folder of the copies of headers. It is in memory.
pub const HEADERS: &str = "/run/firstlight/headers";
/// The maximum size of such a file.
const MAX_LEN: u64 = 64 << 10;
/// The maximum length of the name of a volume: that of a mapping of device-mapper.
const MAX_NAME: usize = 127;

/// Where this program has its files.
pub struct Folders {
    /// The settings of volumes.
    pub volumes: PathBuf,
    /// The checked copies of headers.
    pub headers: PathBuf,
}

impl Folders {
    /// Returns the file with the copy of the header of a volume.
    pub fn header(&self, name: &str) -> PathBuf {
        self.headers.join(name)
    }

    /// Returns the option of crypttab(5) that names this file.
    pub fn header_option(&self, name: &str) -> String {
        format!("header={}", self.header(name).display())
    }
}

/// The settings of a volume.
#[derive(Debug, Clone, Default)]
pub struct Volume {
    /// The LUKS UUID, which the key belongs to.
    pub uuid: Option<Uuid>,
    /// The keyslot of the key broker.
    pub keyslot: Option<u32>,
    /// The device, if it is not found by its UUID.
    pub device: Option<PathBuf>,
    /// The hosts of the key broker.
    pub brokers: Vec<String>,
    /// The ID of the key broker.
    pub cluster: Option<ClusterId>,
    /// The attestation variant of this machine.
    pub variant: Option<String>,
    /// The TPM, if it is not the variant's.
    pub tpm: Option<tpm::Location>,
    /// How long to wait for the key; `None`: without end.
    pub timeout: Option<Duration>,
}

/// The options about a volume, which are also the names in its file.
pub const OPTIONS: &Table<Volume> = &[
    (
        Opt::value(
            "broker",
            "HOST[,HOST..]",
            "the key broker: its names or addresses, all asked at once; TCP port 30090",
        ),
        |it, name, value| {
            put(
                &mut it.brokers,
                parse_hosts(&text(value)?)
                    .map_err(|why| Failure::Usage(format!("--{name}: {why}"))),
            )
        },
    ),
    (
        Opt::value(
            "cluster-id",
            "HEX",
            "the ID of the key broker, which `key-service --print-cluster-id` prints there; keys of another broker are refused",
        ),
        |it, name, value| put(&mut it.cluster, parsed(name, value).map(Some)),
    ),
    (
        Opt::value(
            "device",
            "PATH",
            "the device of the volume [/dev/disk/by-uuid/UUID]",
        ),
        |it, _, value| put(&mut it.device, Ok(Some(value.into()))),
    ),
    (
        Opt::value("uuid", "UUID", "the LUKS UUID; `enroll` finds or makes it"),
        |it, name, value| put(&mut it.uuid, uuid(name, &text(value)?).map(Some)),
    ),
    (
        Opt::value("keyslot", "NUMBER", "the keyslot of the key broker; `enroll` makes it"),
        |it, name, value| put(&mut it.keyslot, parsed(name, value).map(Some)),
    ),
    (
        Opt::value(
            "attestation-variant",
            "NAME",
            "the attestation variant of this machine",
        )
        .one_of(&variant::NAMES)
        .or(variant::DEFAULT),
        |it, _, value| put(&mut it.variant, text(value).map(Some)),
    ),
    (
        Opt::value(
            "tpm",
            "LOCATION",
            "the TPM: device:PATH, swtpm:host=ADDRESS,port=PORT, tdx:FOLDER or snp:FILE [/dev/tpmrm0, else /dev/tpm0]",
        ),
        |it, name, value| put(&mut it.tpm, parsed(name, value).map(Some)),
    ),
    (
        Opt::value(
            "timeout",
            "SECONDS",
            "how long to wait for the key; 0: forever. `enroll` does not save it in the volume's settings",
        )
        .or("0"),
        |it, name, value| {
            put(
                &mut it.timeout,
                parsed(name, value)
                    .map(|seconds: u64| (seconds > 0).then(|| Duration::from_secs(seconds))),
            )
        },
    ),
];

fn uuid(name: &str, text: &str) -> Result<Uuid, Failure> {
    let uuid = Uuid::parse(text);
    uuid.ok_or_else(|| Failure::Usage(format!("--{name} {text:?}: expected a UUID")))
}

impl Volume {
    /// Reads the settings of a volume. Fails if a line is wrong, or a needed one is missing.
    pub fn read(folder: &Path, name: &str) -> Result<Volume, Error> {
        check_name(name)?;
        let path = folder.join(name);
        let read = || {
            let mut text = String::new();
            File::open(&path)?
                .take(MAX_LEN + 1)
                .read_to_string(&mut text)?;
            if text.len() as u64 > MAX_LEN {
                Err(io::Error::other("the file is too long"))
            } else {
                Ok(text)
            }
        };
        let text = read().map_err(|error| Error::File(path.clone(), error))?;
        Volume::parse(&text).map_err(|error| Error::Line(path, Box::new(error)))
    }

    /// Reads the settings of a volume; `None` if there are none.
    pub fn find(folder: &Path, name: &str) -> Result<Option<Volume>, Error> {
        match Volume::read(folder, name) {
            Err(Error::File(_, error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Parses the content of the file.
    pub fn parse(text: &str) -> Result<Volume, Error> {
        // editors of Windows write a byte order mark
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut volume = Volume::default();
        for line in lines {
            let mut args = Parser::from_args([format!("--{line}")]);
            let known = match args.next() {
                Ok(Some(Arg::Long(name))) => {
                    let name = format!("--{name}");
                    take(OPTIONS, &name, &mut args, &mut volume).map_err(reason)?
                }
                _ => None,
            };
            if known.is_none() || !matches!(args.next(), Ok(None)) {
                let text = format!("{line:?}: expected a line NAME=VALUE");
                return Err(Error::Setting(text));
            }
        }
        volume.check()?;
        Ok(volume)
    }

    /// Fails if a needed setting is missing.
    pub fn check(&self) -> Result<(), Error> {
        let missing = |name| Err(Error::Setting(format!("{name} is missing")));
        match self {
            _ if self.brokers.is_empty() => missing("broker"),
            _ if self.cluster.is_none() => missing("cluster-id"),
            _ if self.uuid.is_none() => missing("uuid"),
            _ => Ok(()),
        }
    }

    /// Writes the file of the volume.
    pub fn write(&self, folder: &Path, name: &str) -> Result<(), Error> {
        check_name(name)?;
        let path = folder.join(name);
        let written = fs::create_dir_all(folder)
            .and_then(|()| base::file::replace(&path, self.lines().as_bytes(), 0o644));
        written.map_err(|error| Error::File(path, error))
    }

    fn lines(&self) -> String {
        let mut lines = String::new();
        let mut add = |name: &str, value: String| lines += &format!("{name}={value}\n");
        if let Some(uuid) = &self.uuid {
            add("uuid", uuid.to_string());
        }
        if let Some(keyslot) = self.keyslot {
            add("keyslot", keyslot.to_string());
        }
        if let Some(device) = &self.device {
            add("device", device.display().to_string());
        }
        add("broker", self.brokers.join(","));
        if let Some(id) = &self.cluster {
            add("cluster-id", base::text::hex(&id.0));
        }
        if let Some(variant) = &self.variant {
            add("attestation-variant", variant.clone());
        }
        if let Some(tpm) = &self.tpm {
            add("tpm", tpm.to_string());
        }
        if let Some(timeout) = self.timeout {
            add("timeout", timeout.as_secs().to_string());
        }
        lines
    }

    /// Returns the device with the LUKS header.
    pub fn header(&self) -> PathBuf {
        let by_uuid = || {
            let uuid = self.uuid.as_ref().map(Uuid::as_str).unwrap_or_default();
            Path::new("/dev/disk/by-uuid").join(uuid)
        };
        self.device.clone().unwrap_or_else(by_uuid)
    }

    /// Returns the issuer that attests this machine.
    pub fn issuer(&self) -> Result<Arc<dyn Issuer>, Error> {
        let name = self.variant.as_deref().unwrap_or(variant::DEFAULT);
        let variant = AttesterVariant::named(name);
        let variant = variant.map_err(|error| Error::Attestation(error.to_string()))?;
        let location = match &self.tpm {
            Some(location) => location.clone(),
            None => (variant.location)().map_err(|error| Error::Attestation(error.to_string()))?,
        };
        Ok((variant.issuer)(&location))
    }

    /// Returns what this machine requires of a key broker.
    pub fn demands(&self) -> TrustSettings {
        TrustSettings {
            cluster: self.cluster,
            require_strong: true,
        }
    }
}

/// Returns the error for a value that its option does not accept.
fn reason(failure: Failure) -> Error {
    Error::Setting(match failure {
        Failure::Usage(text) | Failure::Failed(_, text) => text,
        Failure::Help | Failure::Version => "unexpected option".into(),
    })
}

/// Refuses a name that cannot be that of a volume. It becomes the name of a file.
pub fn check_name(name: &str) -> Result<(), Error> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.+".contains(&byte);
    let is_name = (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name.bytes().all(fits);
    if is_name {
        Ok(())
    } else {
        Err(Error::Setting(format!(
            "{name:.200?} cannot be the name of a volume: expected 1 to {MAX_NAME} letters, digits, '_', '-', '.' and '+', the first \
             neither '.' nor '-'"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const VALID: &str = "# comment\nuuid=0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22\nbroker=10.0.0.5,keys.example\n\
        keyslot=1\n\
        cluster-id=00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\ntpm=swtpm:host=127.0.0.1,port=7\ntimeout=30\n";

    #[test]
    fn the_file_of_a_volume_comes_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let volume = Volume::parse(VALID).unwrap();
        assert_eq!(volume.brokers, ["10.0.0.5", "keys.example"]);
        let marked = Volume::parse(&format!("\u{feff}{VALID}")).unwrap();
        assert_eq!(marked.lines(), volume.lines());
        assert_eq!(volume.timeout, Some(Duration::from_secs(30)));
        volume.write(dir.path(), "data").unwrap();
        let read = Volume::read(dir.path(), "data").unwrap();
        assert_eq!(read.lines(), volume.lines());
        assert_eq!(
            read.header(),
            Path::new("/dev/disk/by-uuid/0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22")
        );
    }

    #[test]
    fn a_wrong_file_is_refused_with_its_fault() {
        for (text, expected) in [
            ("", "broker is missing"),
            ("broker=a b_c", "neither an IP address nor a DNS name"),
            ("broker=a", "cluster-id is missing"),
            ("cluster-id=12", "expected 64 hexadecimal digits"),
            ("nonsense=1", "expected a line NAME=VALUE"),
            ("word", "expected a line NAME=VALUE"),
            ("help", "expected a line NAME=VALUE"),
            ("uuid=1", "expected a UUID"),
        ] {
            let why = Volume::parse(text).unwrap_err().to_string();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }

    #[test]
    fn the_name_of_a_volume_leads_to_no_other_folder() {
        for name in ["data", "a.b+c_d-e", &"a".repeat(127)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "-a",
            "a\0",
            "ä",
            &"a".repeat(128),
        ] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_hostile_file_never_panics() {
        for bytes in mutations(VALID.as_bytes(), 20_000) {
            let _ = Volume::parse(&String::from_utf8_lossy(&bytes));
        }
    }
}
