//! Parses a component of the wire protocol, and checks that it may be installed.

use http::shown;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component as Part, Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value, json};

use super::digest::{Digest, digest_of};
use super::error::Error;
use super::place;
use crate::parameters::KubernetesVersion;
use base::text::hex;
use proto::components::Component as Wire;

/// The default directories for components, as in Constellation's lists. Their subdirectories are permitted too.
pub const DIRECTORIES: [&str; 3] = ["/run/state/bin", "/opt/cni/bin", "/opt/kubernetes/patches"];

/// What a list of components may contain.
pub struct ComponentPolicy {
    /// The directories where components may be installed.
    pub directories: Vec<PathBuf>,
    /// Whether components without a hash are permitted. One from a `data:` URL always is, because its data is in the list.
    pub allow_unverified: bool,
}

impl Default for ComponentPolicy {
    fn default() -> ComponentPolicy {
        ComponentPolicy {
            directories: DIRECTORIES.map(PathBuf::from).to_vec(),
            allow_unverified: false,
        }
    }
}

/// A file or archive to install.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesComponent {
    pub(super) source: ComponentSource,
    pub(super) sha256: Option<Digest>,
    pub(super) place: PathBuf,
    pub(super) extract: bool,
    /// The directory that the component must stay in.
    pub(super) directory: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ComponentSource {
    /// A URL with the scheme `http` or `https`.
    Web(String),
    File(PathBuf),
    Data(Vec<u8>),
}

/// What is wrong with the text of a component. The text is a clause.
enum Malformed {
    NoScheme,
    Scheme(String),
    FileUrl,
    NoComma,
    Base64(base64::DecodeError),
    Percent,
    PercentEnd,
    Hash(String),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::NoScheme => f.write_str("its URL has no scheme"),
            Malformed::Scheme(scheme) => write!(
                f,
                "its scheme is {scheme:?}, expected http, https, file or data"
            ),
            Malformed::FileUrl => f.write_str("its file: URL is not file:///path"),
            Malformed::NoComma => f.write_str("its data: URL has no comma"),
            Malformed::Base64(error) => write!(f, "its data: URL is not base64: {error}"),
            Malformed::Percent => f.write_str("its URL has an invalid percent-encoding"),
            Malformed::PercentEnd => f.write_str("its URL ends within a percent-encoding"),
            Malformed::Hash(text) => {
                write!(f, "its hash {text:?} is not sha256: and 64 hex digits")
            }
        }
    }
}

impl KubernetesComponent {
    /// Validates a component of the wire protocol, without access to the network or the disk.
    pub fn parse(wire: &Wire, policy: &ComponentPolicy) -> Result<KubernetesComponent, Error> {
        let refuse = |why: String| Error::Refused {
            what: shown(&wire.url),
            why,
        };
        let malformed = |error: Malformed| refuse(error.to_string());
        let source = ComponentSource::parse(&wire.url).map_err(malformed)?;
        let sha256 = parse_hash(&wire.hash).map_err(malformed)?;
        if sha256.is_none()
            && !matches!(source, ComponentSource::Data(_))
            && !policy.allow_unverified
        {
            return Err(refuse(
                "it has no hash, and unverified components are not allowed".into(),
            ));
        }
        let place = PathBuf::from(&wire.install_path);
        let is_plain = |part| matches!(part, Part::RootDir | Part::Normal(_));
        if !place.is_absolute()
            || !place.components().all(is_plain)
            || wire.install_path.contains('\0')
        {
            return Err(refuse(format!(
                "its install path {place:?} is not an absolute path without `..`"
            )));
        }
        // An archive may fill an allowed directory, but a file must not replace it.
        let fits = |directory: &&PathBuf| {
            place.starts_with(directory) && (wire.extract || place != **directory)
        };
        let directory = policy
            .directories
            .iter()
            .find(fits)
            .cloned()
            .ok_or_else(|| {
                refuse(format!(
                    "its install path {} is not in an allowed directory: {:?}",
                    place.display(),
                    policy.directories
                ))
            })?;
        Ok(KubernetesComponent {
            source,
            sha256,
            place,
            extract: wire.extract,
            directory,
        })
    }

    /// Returns the component's name in errors.
    pub fn name(&self) -> String {
        match &self.source {
            ComponentSource::Web(url) => shown(url),
            ComponentSource::File(path) => format!("file://{}", path.display()),
            ComponentSource::Data(_) => format!("data: for {}", self.place.display()),
        }
    }

    /// Returns the directory in which the new files are created.
    pub(super) fn parent(&self) -> &Path {
        if self.extract {
            &self.place
        } else {
            self.place.parent().unwrap_or(&self.place)
        }
    }

    /// Returns the path of the installed file, or of the directory of an archive.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Returns whether the component is in place with its hash.
    pub fn is_present(&self) -> bool {
        let sha256 = match (&self.source, self.sha256) {
            (ComponentSource::Data(bytes), None) => Some(digest_of(bytes)),
            (_, sha256) => sha256,
        };
        sha256.is_some_and(|sha256| {
            if self.extract {
                place::is_unpacked(&self.place, &sha256)
            } else {
                place::is_file(&self.place, &sha256)
            }
        })
    }
}

impl ComponentSource {
    fn parse(url: &str) -> Result<ComponentSource, Malformed> {
        let (scheme, rest) = url.split_once(':').ok_or(Malformed::NoScheme)?;
        match scheme.to_ascii_lowercase().as_str() {
            "http" | "https" => Ok(ComponentSource::Web(url.to_owned())),
            "file" => match rest
                .strip_prefix("//")
                .map(|rest| rest.strip_prefix("localhost").unwrap_or(rest))
            {
                Some(path) if path.starts_with('/') => Ok(ComponentSource::File(
                    OsString::from_vec(unescape(path)?).into(),
                )),
                _ => Err(Malformed::FileUrl),
            },
            "data" => parse_data(rest).map(ComponentSource::Data),
            _ => Err(Malformed::Scheme(scheme.to_owned())),
        }
    }
}

/// Decodes the part after `data:` (RFC 2397): `[media type][;base64],data`.
fn parse_data(rest: &str) -> Result<Vec<u8>, Malformed> {
    let (head, data) = rest.split_once(',').ok_or(Malformed::NoComma)?;
    let data = unescape(data)?;
    if head.ends_with(";base64") {
        STANDARD.decode(data).map_err(Malformed::Base64)
    } else {
        Ok(data)
    }
}

/// Decodes percent-encoding (RFC 3986 §2.1).
fn unescape(text: &str) -> Result<Vec<u8>, Malformed> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let (byte, after) = match (first, after) {
            (b'%', [high, low, after @ ..]) => match (
                char::from(*high).to_digit(16),
                char::from(*low).to_digit(16),
            ) {
                (Some(high), Some(low)) => ((high << 4 | low) as u8, after),
                _ => return Err(Malformed::Percent),
            },
            (b'%', _) => return Err(Malformed::PercentEnd),
            plain => plain,
        };
        bytes.push(byte);
        rest = after;
    }
    Ok(bytes)
}

/// Parses `sha256:` and 64 hexadecimal digits, or an empty string.
fn parse_hash(text: &str) -> Result<Option<Digest>, Malformed> {
    if text.is_empty() {
        return Ok(None);
    }
    let malformed = || Malformed::Hash(text.to_owned());
    let digits = text
        .strip_prefix("sha256:")
        .filter(|digits| digits.len() == 64)
        .ok_or_else(malformed)?;
    let mut digest = Digest::default();
    for (byte, pair) in digest.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let digit = |index: usize| char::from(pair[index]).to_digit(16).ok_or_else(malformed);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Ok(Some(digest))
}

/// Returns the identifier of a list in the cluster: `sha256:` and the hash of the concatenated hashes. It does not depend on URLs,
/// on the places of files, or on components without a hash (Constellation's patches).
pub fn list_hash(list: &[Wire]) -> String {
    let hashes: String = list
        .iter()
        .map(|component| component.hash.as_str())
        .collect();
    format!("sha256:{}", hex(&digest_of(hashes.as_bytes())))
}

/// Parses the JSON list of components. Each key has the present name. If the value of that key is empty, the key with
/// Constellation's name counts.
pub fn read_list(json: &str) -> Result<Vec<Wire>, Error> {
    let list: Vec<Value> =
        serde_json::from_str(json).map_err(|error| Error::List(error.to_string()))?;
    let component = |value: Value| {
        let text = |key: &str, old: &str| {
            let of = |key: &str| {
                value
                    .get(key)
                    .and_then(Value::as_str)
                    .filter(|text| !text.is_empty())
            };
            of(key).or_else(|| of(old)).unwrap_or_default().to_owned()
        };
        let is_set = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or_default();
        Wire {
            url: text("url", "URL"),
            hash: text("hash", "Hash"),
            install_path: text("install_path", "InstallPath"),
            extract: is_set("extract") || is_set("Extract"),
        }
    };
    let list: Vec<_> = list.into_iter().map(component).collect();
    if list
        .iter()
        .all(|one| !one.url.is_empty() && !one.install_path.is_empty())
    {
        Ok(list)
    } else {
        Err(Error::List("an entry has no url or install_path".into()))
    }
}

/// The beginning of the names of the ConfigMaps with components.
pub const CONFIG_MAP_PREFIX: &str = "k8s-components-";

/// Returns the ConfigMap by which joining nodes install this list. Its name and its form are Constellation's.
pub fn config_map(version: &KubernetesVersion, list: &[Wire]) -> Value {
    let name = format!("{CONFIG_MAP_PREFIX}{}", list_hash(list).replace(':', "-"));
    let data = json!({"components": list_json(list), "cluster-version": version.to_string()});
    json!({"metadata": {"name": name}, "immutable": true, "data": data})
}

/// Returns the version in the URL of kubeadm, as `v1.30.14` of `https://dl.k8s.io/v1.30.14/bin/linux/amd64/kubeadm`. A mirror may
/// have URLs without it.
pub fn version_in(list: &[Wire]) -> Option<&str> {
    list.iter().find_map(|component| {
        let folders = component.url.strip_suffix("/kubeadm")?;
        folders.split('/').find(|folder| {
            folder
                .strip_prefix("v1.")
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    })
}

/// Returns the list as JSON for the cluster's ConfigMap. Empty or false fields are omitted.
pub fn list_json(list: &[Wire]) -> String {
    #[derive(Serialize)]
    struct Json<'a> {
        #[serde(skip_serializing_if = "str::is_empty")]
        url: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        hash: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        install_path: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        extract: Option<bool>,
    }
    let list: Vec<_> = list
        .iter()
        .map(
            |Wire {
                 url,
                 hash,
                 install_path,
                 extract,
             }| Json {
                url,
                hash,
                install_path,
                extract: extract.then_some(true),
            },
        )
        .collect();
    serde_json::to_string(&list).expect("only strings and booleans")
}
