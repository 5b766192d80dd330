//! The programs and files that a node installs before kubeadm runs: kubelet, kubeadm, kubectl, CNI plugins, crictl, patches.
//!
//! A [`Component`] says where a file comes from, what its SHA-256 is, and where it belongs; [`install`] brings all of them
//! there, several at once, each whole or not at all. What is already in place with the expected hash is left alone, and what
//! the image has is taken from there: neither needs a network. `download` fetches, `archive` unpacks what may be hostile,
//! `place` knows how files come into place.
//!
//! ```text
//! Component::parse ─► in place with this hash? ──yes──► Present
//!                            │no
//!                            ├─ data: URL, file: URL, image ─┐
//!                            └─ http(s): tries, resumes ─────┴─► hash ─► unpack? ─► rename ─► Installed
//! ```

mod archive;
mod download;
mod place;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component as Part, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest;
use ureq::Agent;

use crate::proto::components::Component as Wire;
use crate::stop::Stop;
use download::Download;
use place::Staging;

/// A SHA-256.
pub type Digest = [u8; 32];

/// The directories that components may be installed in, or below: those of the old system's lists.
pub const DIRECTORIES: [&str; 3] = ["/run/state/bin", "/opt/cni/bin", "/opt/kubernetes/patches"];

/// How often a stop is looked for.
const TICK: Duration = Duration::from_millis(50);

/// What a list of components may ask for.
pub struct Policy {
    /// Where they may be installed.
    pub directories: Vec<PathBuf>,
    /// Whether one without a hash is taken. One from a `data:` URL always is: it is in the list itself.
    pub allow_unverified: bool,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { directories: DIRECTORIES.map(PathBuf::from).to_vec(), allow_unverified: false }
    }
}

/// How components are fetched.
pub struct Settings {
    /// For each component, all tries together.
    pub deadline: Duration,
    /// The longest silence of a server in the middle of something.
    pub stall: Duration,
    /// How many at once.
    pub at_once: usize,
    /// The longest component, as it is fetched.
    pub max_len: u64,
    /// Where to look for the PEM certificates that TLS trusts; the first file that is there counts. They are the image's,
    /// which is measured, and where its owner adds one for a mirror; a list in this program would only age.
    pub ca_bundles: Vec<PathBuf>,
    /// A directory of the image with components by the last segment of their URL, taken when the hash fits.
    pub image: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            deadline: Duration::from_secs(20 * 60),
            stall: Duration::from_secs(20),
            at_once: 4,
            max_len: 1 << 30,
            // Debian and Arch, Fedora
            ca_bundles: ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"]
                .map(PathBuf::from)
                .to_vec(),
            image: None,
        }
    }
}

/// A file to install.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    source: Source,
    sha256: Option<Digest>,
    place: PathBuf,
    extract: bool,
    /// Where all of it must stay.
    directory: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// `http:` or `https:`.
    Web(String),
    File(PathBuf),
    Data(Vec<u8>),
}

impl Component {
    /// Checks a component of the wire, without a look at the network or the disk.
    pub fn parse(wire: &Wire, policy: &Policy) -> Result<Component, Error> {
        let refuse = |why: String| Error::Refused { what: shown(&wire.url), why };
        let source = Source::parse(&wire.url).map_err(refuse)?;
        let sha256 = parse_hash(&wire.hash).map_err(refuse)?;
        if sha256.is_none() && !matches!(source, Source::Data(_)) && !policy.allow_unverified {
            return Err(refuse("it has no hash, and unverified components are not allowed".into()));
        }
        let place = PathBuf::from(&wire.install_path);
        let is_plain = |part| matches!(part, Part::RootDir | Part::Normal(_));
        if !place.is_absolute() || !place.components().all(is_plain) || wire.install_path.contains('\0') {
            return Err(refuse(format!("its place {place:?} is no absolute path without `..`")));
        }
        // an archive may fill an allowed directory, a file must not replace it
        let fits = |directory: &&PathBuf| place.starts_with(directory) && (wire.extract || place != **directory);
        let directory = policy.directories.iter().find(fits).cloned().ok_or_else(|| {
            refuse(format!(
                "its place {} is in none of the allowed directories {:?}",
                place.display(),
                policy.directories
            ))
        })?;
        Ok(Component { source, sha256, place, extract: wire.extract, directory })
    }

    /// What errors call it.
    fn name(&self) -> String {
        match &self.source {
            Source::Web(url) => shown(url),
            Source::File(path) => format!("file://{}", path.display()),
            Source::Data(_) => format!("data: for {}", self.place.display()),
        }
    }

    /// The directory that the new files are made in.
    fn parent(&self) -> &Path {
        if self.extract { &self.place } else { self.place.parent().unwrap_or(&self.place) }
    }

    fn is_present(&self) -> bool {
        let sha256 = match (&self.source, self.sha256) {
            (Source::Data(bytes), None) => Some(digest_of(bytes)),
            (_, sha256) => sha256,
        };
        sha256.is_some_and(|sha256| match self.extract {
            true => place::is_unpacked(&self.place, &sha256),
            false => place::is_file(&self.place, &sha256),
        })
    }
}

impl Source {
    fn parse(url: &str) -> Result<Source, String> {
        let (scheme, rest) = url.split_once(':').ok_or("its URL has no scheme")?;
        match scheme.to_ascii_lowercase().as_str() {
            "http" | "https" => Ok(Source::Web(url.to_owned())),
            "file" => match rest.strip_prefix("//").map(|rest| rest.strip_prefix("localhost").unwrap_or(rest)) {
                Some(path) if path.starts_with('/') => Ok(Source::File(OsString::from_vec(unescape(path)?).into())),
                _ => Err("its file: URL is not file:///path".into()),
            },
            "data" => parse_data(rest).map(Source::Data),
            _ => Err(format!("its scheme {scheme:?} is none of http, https, file, data")),
        }
    }
}

/// What follows `data:` (RFC 2397): `[media type][;base64],data`.
fn parse_data(rest: &str) -> Result<Vec<u8>, String> {
    let (head, data) = rest.split_once(',').ok_or("its data: URL has no comma")?;
    let data = unescape(data)?;
    match head.ends_with(";base64") {
        true => STANDARD.decode(data).map_err(|error| format!("its data: URL is no base64: {error}")),
        false => Ok(data),
    }
}

/// Percent-decoding (RFC 3986 §2.1).
fn unescape(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let (byte, after) = match (first, after) {
            (b'%', [high, low, after @ ..]) => match (char::from(*high).to_digit(16), char::from(*low).to_digit(16)) {
                (Some(high), Some(low)) => ((high << 4 | low) as u8, after),
                _ => return Err("its URL has a % that is no escape".into()),
            },
            (b'%', _) => return Err("its URL ends within an escape".into()),
            plain => plain,
        };
        bytes.push(byte);
        rest = after;
    }
    Ok(bytes)
}

/// `sha256:` and 64 hex digits, or nothing.
fn parse_hash(text: &str) -> Result<Option<Digest>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let malformed = || format!("its hash {text:?} is not sha256: and 64 hex digits");
    let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 64).ok_or_else(malformed)?;
    let mut digest = Digest::default();
    for (byte, pair) in digest.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let digit = |index: usize| char::from(pair[index]).to_digit(16).ok_or_else(malformed);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Ok(Some(digest))
}

/// What happens to one component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It was in place already.
    Present,
    /// So much of it has come.
    Received {
        /// Bytes so far.
        bytes: u64,
        /// Bytes in all, when the server says.
        total: Option<u64>,
    },
    /// It will be tried again.
    Retrying {
        /// What went wrong, a clause.
        why: String,
        /// For how long nothing is tried.
        pause: Duration,
    },
    /// It is in place now.
    Installed,
}

/// Installs all `components`, and tells the calling thread's `report` of each step with the component's index. The first
/// error ends it and is returned, as does `stop`, at once but for a connection that is being made (4 s at most).
pub fn install(
    components: &[Component],
    settings: &Settings,
    stop: &Stop,
    report: &mut dyn FnMut(usize, Step),
) -> Result<(), Error> {
    let is_tls = |component: &Component| matches!(&component.source, Source::Web(url) if url.starts_with("https"));
    let agent = download::agent(settings, components.iter().any(is_tls))?;
    // what ends the threads: the stop from outside, or the first error
    let end = Stop::new();
    let next = AtomicUsize::new(0);
    let (steps, arriving) = mpsc::channel();
    let work = |steps: mpsc::Sender<(usize, Result<Step, Error>)>| {
        while let Some((number, component)) = take(components, &next)
            && !end.is_stopped()
        {
            // the receiver outlives the threads
            let tell = |step: Result<Step, Error>| drop(steps.send((number, step)));
            let one = One { number, component, agent: &agent, settings, stop: &end };
            tell(one.install(&|step| tell(Ok(step))));
        }
    };
    thread::scope(|scope| {
        let mut outcome = Ok(());
        for number in 0..settings.at_once.clamp(1, components.len().max(1)) {
            let (steps, work) = (steps.clone(), &work);
            let thread = thread::Builder::new().name(format!("component-{number}"));
            if let Err(error) = thread.spawn_scoped(scope, move || work(steps)) {
                outcome = outcome.and(Err(Error::io("start a thread for", Path::new("components"), error)));
                end.stop();
            }
        }
        drop(steps);
        loop {
            if outcome.is_ok() && stop.is_stopped() {
                outcome = Err(Error::Stopped);
            }
            if outcome.is_err() && !end.is_stopped() {
                end.stop();
                agent.clone().shutdown();
            }
            match arriving.recv_timeout(TICK) {
                Ok((number, Ok(step))) => report(number, step),
                Ok((_, Err(error))) => outcome = outcome.and(Err(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

fn take<'a>(components: &'a [Component], next: &AtomicUsize) -> Option<(usize, &'a Component)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    Some((number, components.get(number)?))
}

/// The installation of one component.
struct One<'a> {
    number: usize,
    component: &'a Component,
    agent: &'a Agent,
    settings: &'a Settings,
    stop: &'a Stop,
}

impl One<'_> {
    /// The last step is returned.
    fn install(&self, report: &dyn Fn(Step)) -> Result<Step, Error> {
        let component = self.component;
        if component.is_present() {
            return Ok(Step::Present);
        }
        self.check_place()?;
        let staging = Staging::new(component.parent(), self.number)?;
        self.fetch(&staging.download(), report)?;
        if component.extract {
            let tree = staging.tree()?;
            let path = staging.download();
            let archive = File::open(&path).map_err(|error| Error::io("read", &path, error))?;
            let unpacked = archive::unpack(archive, &tree, self.stop).map_err(|error| match error {
                archive::Error::Refused(why) => Error::Archive { what: component.name(), why },
                archive::Error::Io(path, error) => Error::io("write", &path, error),
                archive::Error::Stopped => Error::Stopped,
            })?;
            staging.publish_tree(&unpacked, &component.place, component.sha256.as_ref())?;
        } else {
            staging.publish_file(&component.place)?;
        }
        Ok(Step::Installed)
    }

    /// No link on the way to the place leads out of the allowed directory, which itself may be reached by links.
    fn check_place(&self) -> Result<(), Error> {
        let parent = self.component.parent();
        fs::create_dir_all(&self.component.directory)
            .map_err(|error| Error::io("make", &self.component.directory, error))?;
        // what is not there yet is made as directories: only what is there can be a link
        let there = parent.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(parent);
        let real = |path: &Path| path.canonicalize().map_err(|error| Error::io("follow", path, error));
        let allowed = real(&self.component.directory)?;
        match real(there)?.starts_with(&allowed) {
            true => Ok(()),
            false => Err(Error::Refused {
                what: self.component.name(),
                why: format!("its place {} leads out of {} by a link", parent.display(), allowed.display()),
            }),
        }
    }

    /// The component's bytes, with the right hash, in a new file at `path`.
    fn fetch(&self, path: &Path, report: &dyn Fn(Step)) -> Result<(), Error> {
        let expected = self.component.sha256.as_ref();
        match &self.component.source {
            Source::Data(bytes) => {
                fs::write(path, bytes).map_err(|error| Error::io("write", path, error))?;
                self.check(digest_of(bytes))
            }
            Source::File(file) => self.check(copy(file, path, self.settings.max_len)?),
            Source::Web(url) => {
                if let Some(file) = self.in_image(url) {
                    return self.check(copy(&file, path, self.settings.max_len)?);
                }
                let (settings, stop) = (self.settings, self.stop);
                Download { agent: self.agent, url, expected, settings, stop, report }.to(path)
            }
        }
    }

    fn check(&self, got: Digest) -> Result<(), Error> {
        match self.component.sha256 {
            Some(expected) if expected != got => Err(Error::Hash { what: self.component.name(), expected, got }),
            _ => Ok(()),
        }
    }

    /// The image's copy of what this URL names, if it has the right hash.
    fn in_image(&self, url: &str) -> Option<PathBuf> {
        let name = url.split(['?', '#']).next()?.rsplit('/').next()?;
        let file = self.settings.image.as_ref()?.join(name);
        place::is_file(&file, self.component.sha256.as_ref()?).then_some(file)
    }
}

/// Copies a local file, and hashes what it copied.
fn copy(from: &Path, to: &Path, limit: u64) -> Result<Digest, Error> {
    use io::Read;
    let open = |path: &Path| File::open(path).map_err(|error| Error::io("read", path, error));
    let source = open(from)?;
    let mut target = File::create_new(to).map_err(|error| Error::io("make", to, error))?;
    let len = io::copy(&mut source.take(limit.saturating_add(1)), &mut target)
        .map_err(|error| Error::io("write", to, error))?;
    match len > limit {
        true => Err(Error::TooLong { what: from.display().to_string(), limit }),
        false => place::digest(to).map_err(|error| Error::io("read", to, error)),
    }
}

fn digest_of(bytes: &[u8]) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    digest
}

fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A URL for people: without what may be secret in it, user and query, and without a data: URL's data.
fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or(host))
        }
        None => url.split(',').next().unwrap_or_default().chars().take(100).collect(),
    }
}

/// Why a component is not installed. Nothing of it is in place then.
#[derive(Debug)]
pub enum Error {
    /// It asks for what it may not have; a clause.
    Refused {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
    /// The server's last word.
    Status {
        /// What was asked, and where.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// Not fetched in its time, or never to be.
    Unreachable {
        /// What was asked, and where.
        url: String,
        /// What happened last, a clause.
        why: String,
        /// For how long it was tried.
        after: Duration,
    },
    /// More bytes than any component has.
    TooLong {
        /// Which.
        what: String,
        /// How many are taken.
        limit: u64,
    },
    /// Other bytes than expected.
    Hash {
        /// Which.
        what: String,
        /// SHA-256 as the list has it.
        expected: Digest,
        /// SHA-256 of what came.
        got: Digest,
    },
    /// An archive that cannot be, or must not be unpacked; a clause.
    Archive {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
    /// None of these files has a certificate to trust.
    NoRoots(Vec<PathBuf>),
    /// The system's answer.
    Io {
        /// A verb.
        action: &'static str,
        /// What it was done to.
        path: PathBuf,
        /// The answer.
        error: io::Error,
    },
    /// Stopped from outside.
    Stopped,
}

impl Error {
    fn io(action: &'static str, path: &Path, error: io::Error) -> Error {
        Error::Io { action, path: path.to_owned(), error }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Refused { what, why } => write!(f, "component {what} is refused: {why}"),
            Error::Status { url, status } => {
                write!(f, "component {url}: expected status 200, got {status}; check the URL in the list of components")
            }
            Error::Unreachable { url, why, after } if after.is_zero() => write!(f, "component {url}: {why}"),
            Error::Unreachable { url, why, after } => {
                write!(f, "component {url} was tried for {} s in vain, at last: {why}", after.as_secs())
            }
            Error::TooLong { what, limit } => write!(f, "component {what} has more than {limit} bytes"),
            Error::Hash { what, expected, got } => {
                write!(f, "component {what}: expected SHA-256 {}, got {}; not installed", hex(expected), hex(got))
            }
            Error::Archive { what, why } => write!(f, "component {what} is not unpacked: {why}"),
            Error::NoRoots(paths) => write!(
                f,
                "components: no certificate to trust in any of {paths:?}; install ca-certificates in the image, or take \
                 the components from http: or file: URLs (their hash is checked all the same)"
            ),
            Error::Io { action, path, error } => {
                write!(f, "components: cannot {action} {}: {error}", path.display())?;
                match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        f.write_str("; give that file system more space")
                    }
                    _ => Ok(()),
                }
            }
            Error::Stopped => f.write_str("components: stopped before all were installed"),
        }
    }
}

impl std::error::Error for Error {}
