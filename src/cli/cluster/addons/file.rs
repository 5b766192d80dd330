//! Reads the list of add-ons: a YAML file that names charts and manifests with their digests.
//!
//! ```yaml
//! addons:
//! - name: cilium
//!   namespace: kube-system
//!   chart: cilium-1.19.0.tgz      # or a folder
//!   sha256: 9c1a...
//!   before-services: true
//!   values:
//!     operator: {replicas: 1}
//! - name: cloud-controller
//!   namespace: kube-system
//!   manifests: cloud-controller.yaml
//!   sha256: 07be...
//! ```
//!
//! Paths are relative to the file. Each chart and manifest is read once, into memory, so the verified bytes are also the installed ones.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base::text::{hex, quoted};
use kubernetes::yaml;
use ring::digest::{SHA256, digest};
use serde_json::{Map, Value, json};

use crate::shell::files;

/// Maximum bytes of a chart or of manifests; the largest public charts have less than 2 MiB.
const MAX_LEN: u64 = 32 << 20;
/// Maximum number of files in a chart that is a folder.
const MAX_FILES: usize = 10_000;
/// Maximum length of a release's name, by Helm.
const MAX_NAME: usize = 53;
/// Maximum length of a namespace's name (RFC 1123 label).
const MAX_NAMESPACE: usize = 63;

/// One verified add-on.
#[derive(Debug)]
pub struct Addon {
    /// The name of its release.
    pub name: String,
    /// The namespace of its release, and of its objects that name none.
    pub namespace: String,
    /// Whether it is installed before the join service and the key service, as their network plugin.
    pub before_services: bool,
    /// What is installed.
    pub content: Content,
    /// The values of the chart.
    pub values: Value,
    /// SHA-256 of content and values, hexadecimal: the same for an add-on that did not change.
    pub digest: String,
}

/// What an add-on installs.
#[derive(Debug)]
pub enum Content {
    /// A chart as Helm packs it (`.tgz`).
    Archive(Vec<u8>),
    /// The files of a chart, by their paths in its folder, sorted.
    Folder(Vec<(PathBuf, Vec<u8>)>),
    /// Manifests of Kubernetes.
    Manifests(Vec<u8>),
}

/// Why the list cannot be used.
#[derive(Debug)]
pub enum Error {
    /// The list cannot be read.
    File(files::FileError),
    /// The list is not YAML, or not a list of add-ons.
    Malformed(PathBuf, String),
    /// A field of an add-on is missing, unknown or wrong.
    Field {
        /// The list.
        path: PathBuf,
        /// The add-on: its name, or its place in the list.
        addon: String,
        /// What is wrong.
        problem: String,
    },
    /// A chart or manifests cannot be read.
    Content(String, PathBuf, io::Error),
    /// A chart or manifests have another digest than the one in the list.
    Digest {
        /// The add-on.
        addon: String,
        /// The chart or the manifests.
        path: PathBuf,
        /// The digest of the list; `None` if it has none.
        expected: Option<String>,
        /// The digest of the files.
        got: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::File(error) => error.fmt(f),
            Error::Malformed(path, problem) => write!(f, "{}: {problem}", path.display()),
            Error::Field {
                path,
                addon,
                problem,
            } => write!(f, "{}: add-on {addon}: {problem}", path.display()),
            Error::Content(addon, path, error) => {
                write!(f, "add-on {addon}: cannot read {}: {error}", path.display())
            }
            Error::Digest {
                addon,
                path,
                expected: Some(expected),
                got,
            } => write!(
                f,
                "add-on {addon}: {} has the SHA-256 {got}, expected {expected}: it is not the file that the list was written for",
                path.display()
            ),
            Error::Digest {
                addon, path, got, ..
            } => write!(
                f,
                "add-on {addon}: sha256 is missing; {} has {got}: compare it with its publisher's, then add it to the list",
                path.display()
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Reads the list, and verifies its charts and manifests.
pub fn read(path: &Path) -> Result<Vec<Addon>, Error> {
    let malformed = |problem: String| Error::Malformed(path.into(), problem);
    let text = files::read(path).map_err(Error::File)?;
    let text = str::from_utf8(&text).map_err(|_| malformed("it is not UTF-8".into()))?;
    let mut list = yaml::document(text).map_err(|error| malformed(error.to_string()))?;
    let entries = list.get_mut("addons").map(Value::take);
    let entries = match (entries, list.as_object().map(Map::len)) {
        (Some(Value::Array(entries)), Some(1)) => entries,
        _ => {
            return Err(malformed(
                "it is not a list of add-ons: expected `addons:` with a list, and nothing else"
                    .into(),
            ));
        }
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut addons: Vec<Addon> = Vec::new();
    for (number, entry) in entries.into_iter().enumerate() {
        let addon = Entry {
            path,
            name: entry["name"]
                .as_str()
                .map_or(format!("{} of the list", number + 1), |name| {
                    quoted(name, MAX_NAME)
                }),
            fields: entry,
        }
        .read(folder)?;
        if addons
            .iter()
            .any(|other| (&other.name, &other.namespace) == (&addon.name, &addon.namespace))
        {
            return Err(malformed(format!(
                "add-on {}: the list has it twice in the namespace {}",
                addon.name, addon.namespace
            )));
        }
        addons.push(addon);
    }
    Ok(addons)
}

/// An add-on of the list that is being read.
struct Entry<'a> {
    path: &'a Path,
    name: String,
    fields: Value,
}

impl Entry<'_> {
    fn read(mut self, folder: &Path) -> Result<Addon, Error> {
        const FIELDS: [&str; 7] = [
            "name",
            "namespace",
            "chart",
            "manifests",
            "sha256",
            "values",
            "before-services",
        ];
        let Some(fields) = self.fields.as_object() else {
            return Err(self.wrong("it is not a mapping".into()));
        };
        if let Some(unknown) = fields.keys().find(|key| !FIELDS.contains(&key.as_str())) {
            let problem = format!(
                "unknown field {}, expected one of {}",
                quoted(unknown, 40),
                FIELDS.join(", ")
            );
            return Err(self.wrong(problem));
        }
        let name = self.label("name", MAX_NAME)?;
        let namespace = self.label("namespace", MAX_NAMESPACE)?;
        let before_services = match self.fields["before-services"].take() {
            Value::Null => false,
            Value::Bool(before) => before,
            _ => return Err(self.wrong("before-services: expected true or false".into())),
        };
        let values = match self.fields["values"].take() {
            Value::Null => json!({}),
            values @ Value::Object(_) => values,
            _ => return Err(self.wrong("values: expected a mapping".into())),
        };
        let (path, is_chart) = match (self.text("chart")?, self.text("manifests")?) {
            (Some(chart), None) => (folder.join(chart), true),
            (None, Some(_)) if values != json!({}) => {
                return Err(self.wrong("values: only a chart has values".into()));
            }
            (None, Some(manifests)) => (folder.join(manifests), false),
            _ => return Err(self.wrong("expected either chart or manifests".into())),
        };
        let unreadable = |error| Error::Content(name.clone(), path.clone(), error);
        let content = match is_chart {
            true if path.is_dir() => Content::Folder(read_folder(&path).map_err(unreadable)?),
            true => Content::Archive(read_file(&path).map_err(unreadable)?),
            false => Content::Manifests(read_file(&path).map_err(unreadable)?),
        };
        let got = content.sha256();
        let expected = self.text("sha256")?.map(str::to_lowercase);
        if expected.as_ref() != Some(&got) {
            return Err(Error::Digest {
                addon: name,
                path,
                expected,
                got,
            });
        }
        let digest = sha256(format!("{got} {values}").as_bytes());
        Ok(Addon {
            name,
            namespace,
            before_services,
            content,
            values,
            digest,
        })
    }

    fn wrong(&self, problem: String) -> Error {
        Error::Field {
            path: self.path.into(),
            addon: self.name.clone(),
            problem,
        }
    }

    /// Returns a field that is text, or `None` if it is missing.
    fn text(&self, field: &str) -> Result<Option<&str>, Error> {
        match &self.fields[field] {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text)),
            _ => Err(self.wrong(format!("{field}: expected a text"))),
        }
    }

    /// Returns a field that is a DNS label (RFC 1123).
    fn label(&self, field: &str, longest: usize) -> Result<String, Error> {
        let text = self.text(field)?.unwrap_or_default();
        let is_inner =
            |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
        let is_label =
            !text.is_empty() && text.len() <= longest && text.as_bytes().iter().all(is_inner);
        if !is_label || text.starts_with('-') || text.ends_with('-') {
            return Err(self.wrong(format!(
                "{field}: expected 1 to {longest} lower-case letters, digits and inner hyphens"
            )));
        }
        Ok(text.into())
    }
}

impl Content {
    /// Returns the SHA-256 of the file; that of a folder is of the lines that `sha256sum` prints for its files, sorted by path.
    fn sha256(&self) -> String {
        match self {
            Content::Archive(bytes) | Content::Manifests(bytes) => sha256(bytes),
            Content::Folder(files) => {
                let line = |(path, bytes): &(PathBuf, Vec<u8>)| {
                    format!("{}  ./{}\n", sha256(bytes), path.display())
                };
                sha256(files.iter().map(line).collect::<String>().as_bytes())
            }
        }
    }
}

fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_LEN + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_LEN {
        return Err(io::Error::other(format!(
            "it has more than {} MiB",
            MAX_LEN >> 20
        )));
    }
    Ok(bytes)
}

/// Returns the files below a folder, sorted by path. Refuses links, which can lead out of it.
fn read_folder(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let (mut files, mut folders, mut bytes) = (Vec::new(), vec![PathBuf::new()], 0);
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(folder.join(&inner))? {
            let entry = entry?;
            let (path, kind) = (inner.join(entry.file_name()), entry.file_type()?);
            // sha256sum escapes such names, and with a line break one file would look like two
            if path
                .to_str()
                .is_none_or(|name| name.contains(|c: char| c.is_control() || c == '\\'))
            {
                return Err(io::Error::other(format!(
                    "{path:?} has a character that no chart needs"
                )));
            }
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let content = read_file(&entry.path())?;
                bytes += content.len() as u64;
                files.push((path, content));
            } else {
                return Err(io::Error::other(format!(
                    "{} is neither a file nor a folder",
                    path.display()
                )));
            }
            if bytes > MAX_LEN || files.len() + folders.len() > MAX_FILES {
                return Err(io::Error::other(format!(
                    "it has more than {} MiB, or than {MAX_FILES} files",
                    MAX_LEN >> 20
                )));
            }
        }
    }
    files.sort_by(|(one, _), (other, _)| one.as_os_str().cmp(other.as_os_str()));
    Ok(files)
}
