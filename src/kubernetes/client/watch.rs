//! Follows a collection (Kubernetes' API concepts, "Efficient detection of changes").
//!
//! ```text
//!   list ──► Listed ──► stream of changes ──► ended, cut off: stream again from the last known version
//!    ▲                      │
//!    └── 410, too old ──────┘
//! ```
//!
//! The server ends a stream after a minute. Before that, it sends bookmarks: versions without a change, at which the watch of an
//! unchanged collection can continue. So a dead connection, too, is noticed within a minute.

use std::fmt;
use std::io::{self, BufRead, BufReader};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use super::error::Status;
use super::{
    ApiStatus, Client, Collection, Error, List, ListMeta, ObjectKind, Request, Selector, no_object,
    query,
};
use base::backoff::Backoff;
use base::text::quoted;

/// The duration of a stream.
const ROUND: Duration = Duration::from_secs(60);
/// How late the server may be.
const GRACE: Duration = Duration::from_secs(10);
/// The maximum length of a line. An object has at most 1.5 MiB by etcd's limit, but its JSON may be six times as long as etcd's encoding.
const MAX_LINE: usize = 16 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// An event of a collection.
#[derive(Debug, Clone, PartialEq)]
pub enum CollectionEvent<T = Value> {
    /// All objects: at first, and after changes were missed. An object that is not in the list no longer exists.
    Listed(Vec<T>),
    /// A new object.
    Added(T),
    /// The new state of an object.
    Modified(T),
    /// The last state of a deleted object.
    Deleted(T),
}

/// Follows a collection until its client is stopped: reads each object as `K`, and reduces it to `T`.
pub struct Watch<K = Value, T = K> {
    changes: Changes,
    keep: fn(K) -> T,
}

/// The changes of a collection, as lines of JSON.
struct Changes {
    client: Client,
    collection: Collection,
    selector: Selector,
    round: Duration,
    /// Empty if the watch has to start with a list.
    version: String,
    stream: Option<BufReader<http::BodyReader>>,
    backoff: Backoff,
}

impl Client {
    /// Follows a collection: its objects, and then each change.
    pub fn watch<K: ObjectKind>(&self, collection: &Collection, selector: &Selector) -> Watch<K> {
        collection.resource().check::<K>();
        Watch {
            changes: Changes {
                client: self.clone(),
                collection: collection.clone(),
                selector: selector.clone(),
                round: ROUND,
                version: String::new(),
                stream: None,
                backoff: backoff(),
            },
            keep: |object| object,
        }
    }
}

impl<K: ObjectKind, T> Watch<K, T> {
    /// Starts with the changes after this version, without a list.
    pub fn from_version(mut self, version: &str) -> Watch<K, T> {
        self.changes.version = version.into();
        self
    }

    /// Sets the duration of a stream, in whole seconds.
    pub fn with_round(mut self, round: Duration) -> Watch<K, T> {
        self.changes.round = round.max(Duration::from_secs(1));
        self
    }

    /// Reduces each object by `keep` when it is read, for large collections of large objects.
    pub fn keeping<U>(self, keep: fn(K) -> U) -> Watch<K, U> {
        Watch {
            changes: self.changes,
            keep,
        }
    }

    /// Returns the version up to which all events are known.
    pub fn version(&self) -> &str {
        &self.changes.version
    }

    /// Waits for the next event and returns it. Temporary errors are logged and waited out. Permanent errors and [`Error::Stopped`]
    /// are returned. After an error, this may be called again.
    #[allow(clippy::should_implement_trait)] // never ends by itself, so it is not an iterator
    pub fn next(&mut self) -> Result<CollectionEvent<T>, Error> {
        loop {
            match self.step(None) {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits up to `time` for the next event; `None` if there is none.
    pub fn next_within(&mut self, time: Duration) -> Result<Option<CollectionEvent<T>>, Error> {
        let deadline = Instant::now() + time;
        // A stream that is open already was opened for a whole round.
        self.changes.stream = None;
        while Instant::now() < deadline {
            if let Some(event) = self.step(Some(deadline))? {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Does one step: a list, the opening of a stream, or one line of it.
    fn step(&mut self, deadline: Option<Instant>) -> Result<Option<CollectionEvent<T>>, Error> {
        if self.changes.client.is_stopped() {
            return Err(Error::Stopped);
        }
        let outcome = if self.changes.version.is_empty() {
            self.list().map(Some)
        } else if self.changes.stream.is_none() {
            self.changes.open(deadline).map(|()| None)
        } else {
            match self.changes.next_change() {
                Ok(Some((change, line))) => self.event(change, &line).map(Some),
                other => other.map(|_| None),
            }
        };
        match outcome {
            Ok(event) => {
                if event.is_some() {
                    self.changes.backoff = backoff();
                }
                Ok(event)
            }
            Err(error) => self.changes.failed(error, deadline).map(|()| None),
        }
    }

    fn list(&mut self) -> Result<CollectionEvent<T>, Error> {
        let changes = &mut self.changes;
        let List {
            items,
            resource_version,
        } = changes
            .client
            .list_keeping(&changes.collection, &changes.selector, self.keep)?;
        changes.version = resource_version;
        Ok(CollectionEvent::Listed(items))
    }

    fn event(&self, change: Change, line: &[u8]) -> Result<CollectionEvent<T>, Error> {
        let event: WatchEvent<Value> = serde_json::from_slice(line)
            .map_err(|error| self.changes.invalid(NoEvent::Json(error)))?;
        let object = K::read(event.object)
            .ok_or_else(|| self.changes.invalid(NoEvent::Json(no_object())))?;
        let object = (self.keep)(object);
        Ok(match change {
            Change::Added => CollectionEvent::Added(object),
            Change::Modified => CollectionEvent::Modified(object),
            Change::Deleted => CollectionEvent::Deleted(object),
        })
    }
}

impl Changes {
    fn open(&mut self, deadline: Option<Instant>) -> Result<(), Error> {
        let round = format!("&timeoutSeconds={}", self.round.as_secs());
        let path = format!(
            "{}?watch=1&allowWatchBookmarks=true{round}{}{}",
            self.collection.path(),
            self.selector.query(),
            query("resourceVersion", &self.version)
        );
        let request = Request::new("watch", &self.collection, "GET", path);
        let end = Instant::now() + self.round + GRACE;
        let end = deadline.map_or(end, |deadline| deadline.min(end));
        let token = self.client.token()?;
        let response = match self.client.send(&request, token.as_deref(), end) {
            Err(error)
                if error.code() == Some(401)
                    && self.client.token_was_replaced(token.as_deref()) =>
            {
                self.client
                    .send(&request, self.client.token()?.as_deref(), end)?
            }
            response => response?,
        };
        self.stream = Some(BufReader::new(response.into_reader()));
        Ok(())
    }

    fn request(&self) -> String {
        format!("watch {}", self.collection)
    }

    fn invalid(&self, problem: NoEvent) -> Error {
        Error::Answer {
            request: self.request(),
            problem: problem.to_string(),
        }
    }

    /// Reads a line. Returns what happened, and the line, which has the object; `None` if nothing did.
    fn next_change(&mut self) -> Result<Option<(Change, Vec<u8>)>, Error> {
        let Some(stream) = &mut self.stream else {
            return Ok(None);
        };
        let mut line = Vec::new();
        match read_line(stream, &mut line) {
            Ok(true) => {}
            // The round or the connection has ended. The next stream continues at the last version.
            Ok(false) => {
                self.stream = None;
                return Ok(None);
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(Error::Answer {
                    request: self.request(),
                    problem: error.to_string(),
                });
            }
            Err(error) => {
                log::debug!("{}: {error}", self.request());
                self.stream = None;
                return Ok(None);
            }
        }
        match parse(&line).map_err(|problem| self.invalid(problem))? {
            Frame::Change(change, version) => {
                self.version = version;
                Ok(Some((change, line)))
            }
            Frame::Bookmark(version) => {
                self.version = version;
                Ok(None)
            }
            Frame::Error(status) => {
                let code = status.code;
                Err(Error::Refused(Box::new(ApiStatus::new(
                    self.request(),
                    code,
                    status,
                    None,
                ))))
            }
        }
    }

    /// Waits after a temporary error. Returns other errors.
    fn failed(&mut self, error: Error, deadline: Option<Instant>) -> Result<(), Error> {
        self.stream = None;
        if self.client.is_stopped() {
            return Err(Error::Stopped);
        }
        if error.is_expired() {
            log::debug!("{error}: listing again");
            self.version = String::new();
            return Ok(());
        }
        // After an invalid answer, the watch cannot continue at its version, but the next list may be valid.
        let passing = error.is_temporary();
        if matches!(error, Error::Answer { .. }) {
            self.version = String::new();
        }
        if !passing {
            return Err(error);
        }
        let pause = match &error {
            Error::Refused(refused) => refused
                .retry_after
                .unwrap_or_default()
                .max(self.backoff.pause()),
            _ => self.backoff.pause(),
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_none() {
            log::warn!("{error}");
        }
        let stopped = self
            .client
            .inner
            .stop
            .wait(left.map_or(pause, |left| left.min(pause)));
        if stopped { Err(Error::Stopped) } else { Ok(()) }
    }
}

fn backoff() -> Backoff {
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE)
}

/// Reads one line without its end. Returns false at the end of the stream. An incomplete last line is dropped.
fn read_line(stream: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let part = match stream.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            part => part?,
        };
        if part.is_empty() {
            return Ok(false);
        }
        let end = part.iter().position(|byte| *byte == b'\n');
        let taken = end.unwrap_or(part.len());
        if line.len() + taken > MAX_LINE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a line of more than {MAX_LINE} bytes"),
            ));
        }
        line.extend_from_slice(&part[..taken]);
        stream.consume(taken + usize::from(end.is_some()));
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// A line of a stream (meta/v1 WatchEvent).
#[derive(Deserialize)]
struct WatchEvent<T> {
    r#type: String,
    object: T,
}

/// The version of any object.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    metadata: ListMeta,
}

/// What a line says.
enum Frame {
    /// A change, and the version after it.
    Change(Change, String),
    Bookmark(String),
    Error(Status),
}

#[derive(Debug, PartialEq)]
enum Change {
    Added,
    Modified,
    Deleted,
}

/// Why a line is not an event.
#[derive(Debug)]
enum NoEvent {
    Json(serde_json::Error),
    NoVersion(String),
    Type(String),
}

impl fmt::Display for NoEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoEvent::Json(error) => error.fmt(f),
            NoEvent::NoVersion(kind) => write!(
                f,
                "an event {} of an object without resourceVersion",
                quoted(kind, 20)
            ),
            NoEvent::Type(kind) => write!(f, "an event {}", quoted(kind, 20)),
        }
    }
}

/// Reads what a line says, without its object.
fn parse(line: &[u8]) -> Result<Frame, NoEvent> {
    let WatchEvent {
        r#type: kind,
        object: Versioned { metadata },
    } = serde_json::from_slice(line).map_err(NoEvent::Json)?;
    if kind == "ERROR" {
        let event: WatchEvent<Status> = serde_json::from_slice(line).map_err(NoEvent::Json)?;
        return Ok(Frame::Error(event.object));
    }
    let version = metadata.resource_version;
    if version.is_empty() {
        return Err(NoEvent::NoVersion(kind));
    }
    match kind.as_str() {
        "ADDED" => Ok(Frame::Change(Change::Added, version)),
        "MODIFIED" => Ok(Frame::Change(Change::Modified, version)),
        "DELETED" => Ok(Frame::Change(Change::Deleted, version)),
        "BOOKMARK" => Ok(Frame::Bookmark(version)),
        _ => Err(NoEvent::Type(kind)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use support::mutation::mutations;

    const STREAM: &str = concat!(
        r#"{"type":"ADDED","object":{"kind":"ConfigMap","metadata":{"name":"a","resourceVersion":"12"},"data":{"b":"c"}}}"#,
        "\n",
        r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","metadata":{"resourceVersion":"13"}}}"#,
        "\n",
        r#"{"type":"ERROR","object":{"kind":"Status","status":"Failure","reason":"Expired","code":410}}"#,
        "\n"
    );

    fn frames(bytes: &[u8], buffer: usize) -> Vec<Result<Frame, NoEvent>> {
        let mut stream = BufReader::with_capacity(buffer, Cursor::new(bytes));
        let mut frames = Vec::new();
        let mut line = Vec::new();
        while read_line(&mut stream, &mut line).unwrap() {
            frames.push(parse(&line));
            line.clear();
        }
        frames
    }

    #[test]
    fn a_stream_is_cut_into_its_events_wherever_the_buffer_ends() {
        for buffer in 1..200 {
            let frames = frames(STREAM.as_bytes(), buffer);
            assert!(
                matches!(&frames[0], Ok(Frame::Change(Change::Added, version)) if version == "12")
            );
            assert!(matches!(&frames[1], Ok(Frame::Bookmark(version)) if version == "13"));
            assert!(matches!(&frames[2], Ok(Frame::Error(status)) if status.code == 410));
            assert_eq!(frames.len(), 3);
        }
    }

    #[test]
    fn half_a_line_at_the_end_is_no_event() {
        assert!(frames(&STREAM.as_bytes()[..50], 10).is_empty());
    }

    #[test]
    fn an_event_that_cannot_be_gone_on_from_is_refused() {
        assert!(parse(br#"{"type":"ADDED","object":{"metadata":{}}}"#).is_err());
        assert!(
            parse(br#"{"type":"OTHER","object":{"metadata":{"resourceVersion":"1"}}}"#).is_err()
        );
        assert!(parse(b"[]").is_err());
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_fills_the_memory() {
        let mut endless = BufReader::new(io::repeat(b'a'));
        let mut line = Vec::new();
        assert_eq!(
            read_line(&mut endless, &mut line).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert!(line.len() <= MAX_LINE);
    }

    #[test]
    fn no_mutation_of_a_stream_makes_the_parser_panic() {
        for bytes in mutations(STREAM.as_bytes(), 20_000) {
            frames(&bytes, 64);
        }
    }
}
