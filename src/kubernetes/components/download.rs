//! Downloads files over HTTP(S) (RFC 9110). An interrupted download resumes until it is complete or its deadline has passed.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use ring::digest::{Context, SHA256};

use super::digest::Digest;
use super::error::Error;
use super::place;
use super::settings::{InstallSettings, Step};
use base::backoff::Backoff;
use base::network::request::Request;
use base::stop::Stop;
use http::{Client, ClientPolicy, ErrorKind, Proxy, Roots, StreamedResponse, shown};

/// The first and the longest pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Statuses after which the download is tried again, as Constellation does: the server or a proxy is overloaded.
const PASSING: [u16; 6] = [408, 425, 429, 502, 503, 504];

/// The maximum number of redirects that a download follows.
const REDIRECTS: u32 = 10;

/// The HTTP client for all downloads, and whether it has any trusted certificate. Without one, no
/// TLS server can be reached. Its downloads share connections, and `shutdown` ends all of them.
pub fn client(settings: &InstallSettings) -> (Client, bool) {
    let roots = Roots::first(&settings.ca_bundles);
    let has_roots = !roots.is_empty();
    let policy = ClientPolicy {
        only_tls: false,
        redirects: REDIRECTS,
        proxy: Proxy::OfEnvironment,
        silence: Some(settings.stall),
        ..ClientPolicy::new(roots)
    };
    (Client::new(policy, settings.deadline), has_roots)
}

/// One download.
pub struct Download<'a> {
    pub client: &'a Client,
    pub url: &'a str,
    /// The SHA-256 of the whole file.
    pub expected: Option<&'a Digest>,
    pub settings: &'a InstallSettings,
    pub stop: &'a Stop,
    pub report: &'a dyn Fn(Step),
}

/// Why an attempt failed.
enum Failure {
    /// The next attempt may succeed; a clause.
    Temporary(String),
    Final(Error),
}

/// The data received so far.
struct Partial {
    file: File,
    hash: Context,
    len: u64,
    /// The strong ETag of the received data (RFC 9110 §8.8.3).
    etag: Option<String>,
    /// Whether the data was received in several pieces.
    resumed: bool,
}

impl Download<'_> {
    /// Downloads the file to `path`, which is created.
    pub fn to(&self, path: &Path) -> Result<(), Error> {
        let started = Instant::now();
        let deadline = started + self.settings.deadline;
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let file = file.map_err(|error| Error::io("make", path, error))?;
        let mut partial = Partial {
            file,
            hash: Context::new(&SHA256),
            len: 0,
            etag: None,
            resumed: false,
        };
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let before = partial.len;
            let tried = self
                .fetch(&mut partial, path, deadline)
                .and_then(|()| self.check(&mut partial, path));
            if self.stop.is_stopped() {
                return Err(Error::Stopped);
            }
            let why = match tried {
                Ok(()) => return Ok(()),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Temporary(why)) => why,
            };
            if partial.len > before {
                backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
            }
            let pause = backoff.pause();
            if Instant::now() + pause >= deadline {
                return Err(Error::Unreachable {
                    url: shown(self.url),
                    why,
                    after: started.elapsed(),
                });
            }
            (self.report)(Step::Retrying { why, pause });
            if self.stop.wait(pause) {
                return Err(Error::Stopped);
            }
        }
    }

    /// Sends one request for the whole file or its missing rest.
    fn fetch(&self, partial: &mut Partial, path: &Path, deadline: Instant) -> Result<(), Failure> {
        // Without a hash it would go unnoticed if the pieces were of two versions of the file.
        if self.expected.is_none() && partial.etag.is_none() {
            partial.start_over(path)?;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // Without a hash only TLS authenticates the data, so a redirect must not lead to plain HTTP.
        let only_tls = self.expected.is_none() && is_tls(self.url);
        let range = format!("bytes={}-", partial.len);
        let mut fields = vec![];
        if partial.len > 0 {
            fields.push(("Range", &*range));
            fields.extend(partial.etag.as_deref().map(|etag| ("If-Range", etag)));
        }
        let request = Request {
            method: "GET",
            url: self.url,
            fields: &fields,
            body: None,
            limit: self.settings.max_len,
        };
        let answer = self.client.open_by(&request, left, only_tls);
        let answer = answer.map_err(|error| self.failure(error))?;
        match answer.status() {
            200 => partial.start_over(path)?,
            206 if partial.len > 0 && range_start(&answer) == Some(partial.len) => {
                partial.resumed = true
            }
            // The requested range does not exist: the file has changed.
            206 | 416 => {
                partial.start_over(path)?;
                return Err(Failure::Temporary(
                    "the server does not have the rest of the file".into(),
                ));
            }
            status if PASSING.contains(&status) => {
                return Err(Failure::Temporary(format!("status {status}")));
            }
            status => {
                return Err(Failure::Final(Error::Status {
                    url: shown(self.url),
                    status,
                }));
            }
        }
        let etag = answer.field("ETag").filter(|etag| etag.starts_with('"'));
        partial.etag = etag.map(str::to_owned);
        let total = answer.length();
        let total = total.map(|rest| rest.saturating_add(partial.len));
        self.receive(answer.into_reader(), partial, total, path)
    }

    fn receive(
        &self,
        mut body: impl Read,
        partial: &mut Partial,
        total: Option<u64>,
        path: &Path,
    ) -> Result<(), Failure> {
        if total.unwrap_or(0) > self.settings.max_len {
            return Err(Failure::Final(self.too_long()));
        }
        let mut buffer = vec![0; 64 << 10];
        loop {
            (self.report)(Step::Received {
                bytes: partial.len,
                total,
            });
            let count = body.read(&mut buffer).map_err(|error| {
                Failure::Temporary(format!("cut off after {} bytes: {error}", partial.len))
            })?;
            match count {
                0 if total.is_some_and(|total| total != partial.len) => {
                    return Err(Failure::Temporary(format!(
                        "cut off after {} bytes",
                        partial.len
                    )));
                }
                0 => return Ok(()),
                _ => partial.add(&buffer[..count], path)?,
            }
            if partial.len > self.settings.max_len {
                return Err(Failure::Final(self.too_long()));
            }
            if self.stop.is_stopped() {
                return Err(Failure::Final(Error::Stopped));
            }
        }
    }

    /// Checks the hash. A wrong hash is final, unless the pieces may be of different files.
    fn check(&self, partial: &mut Partial, path: &Path) -> Result<(), Failure> {
        let got = place::finish(partial.hash.clone());
        match self.expected {
            Some(expected) if *expected != got => {
                let was_resumed = partial.resumed;
                partial.start_over(path)?;
                if was_resumed {
                    Err(Failure::Temporary(
                        "its pieces do not have the expected hash".into(),
                    ))
                } else {
                    Err(Failure::Final(Error::Hash {
                        what: shown(self.url),
                        expected: *expected,
                        got,
                    }))
                }
            }
            _ => Ok(()),
        }
    }

    fn too_long(&self) -> Error {
        Error::TooLong {
            what: shown(self.url),
            limit: self.settings.max_len,
        }
    }

    /// Classifies the error of a request. A definite error of the server or the settings is not tried again.
    fn failure(&self, error: http::Error) -> Failure {
        match error.kind {
            ErrorKind::Certificate | ErrorKind::Invalid => Failure::Final(Error::Unreachable {
                url: shown(self.url),
                why: error.to_string(),
                after: Duration::ZERO,
            }),
            _ => Failure::Temporary(error.to_string()),
        }
    }
}

impl Partial {
    fn add(&mut self, bytes: &[u8], path: &Path) -> Result<(), Failure> {
        self.file
            .write_all(bytes)
            .map_err(|error| Failure::Final(Error::io("write", path, error)))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn start_over(&mut self, path: &Path) -> Result<(), Failure> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|error| Failure::Final(Error::io("write", path, error)))?;
        (self.hash, self.len, self.etag, self.resumed) = (Context::new(&SHA256), 0, None, false);
        Ok(())
    }
}

/// Returns whether the URL uses TLS. Schemes are case-insensitive (RFC 3986 §3.1).
pub fn is_tls(url: &str) -> bool {
    url.get(..6)
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
}

/// Returns the first position of a `Content-Range` (RFC 9110 §14.4): 100 of `bytes 100-199/200`.
fn range_start(answer: &StreamedResponse) -> Option<u64> {
    let range = answer.field("Content-Range")?;
    let (start, _) = range.strip_prefix("bytes ")?.split_once('-')?;
    start.trim().parse().ok()
}
