//! Requests to one server over HTTPS (RFC 9110): no redirect, no proxy, an answer of limited size and known type, a deadline, and
//! pauses when the server demands them or is away.

use std::fmt;
use std::io::Read;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use base::backoff::Backoff;
use base::text;
use ureq::Agent;
use ureq::http::{HeaderMap, Uri};
use ureq::tls::RootCerts;

/// Time limit of a connection. A lost SYN is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum number of requests at once to a server. A new cluster of many hosts must not look like an attack.
const MAX_AT_ONCE: usize = 8;
/// Pause of a request that finds [`MAX_AT_ONCE`] others.
const BUSY: Duration = Duration::from_millis(250);
/// The first and the longest pause after a failure without `Retry-After`.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// The longest pause that a server can demand: a wrong value must not stop validations for days.
const LONGEST_DEMANDED: Duration = Duration::from_secs(3600);

/// Maximum length of what is shown of a refusal.
const SHOWN: usize = 200;

/// A server that this program may ask.
pub struct Server {
    agent: Agent,
    /// `https://HOST[:PORT][/PATH]`, without a slash at the end.
    base: String,
    /// `HOST[:PORT]`, for texts.
    name: String,
    state: Mutex<State>,
}

struct State {
    /// Until when no request is sent, and why.
    pause: Option<(Instant, String)>,
    backoff: Backoff,
    running: usize,
    limit: Option<Limit>,
}

/// A limit of requests: some at once, and one more after each pause.
pub struct Limit {
    at_once: u32,
    pause: Duration,
    /// When as many as at the start may be sent again.
    full: Instant,
}

impl Limit {
    /// Makes a limit that allows as many as it ever does.
    pub fn new(at_once: u32, pause: Duration, now: Instant) -> Limit {
        Limit {
            at_once,
            pause,
            full: now,
        }
    }

    /// Returns whether as many may be sent as at the start.
    pub fn is_full(&self, now: Instant) -> bool {
        self.full <= now
    }

    /// Takes one request back, which was not answered.
    pub fn give_back(&mut self) {
        self.full = self.full.checked_sub(self.pause).unwrap_or(self.full);
    }

    /// Counts one request, or returns when the next one may be sent.
    pub fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let full = self.full.max(now) + self.pause;
        match full.duration_since(now) <= self.pause * self.at_once {
            true => {
                self.full = full;
                Ok(())
            }
            false => Err(full - self.pause * self.at_once),
        }
    }
}

/// What is requested.
pub struct Request<'a> {
    /// Path and query, from the slash on.
    pub path: &'a str,
    /// The media types that the answer may have.
    pub types: &'a [&'a str],
    /// Maximum size of the answer in bytes.
    pub limit: usize,
    /// The JSON of a POST; without it the request is a GET.
    pub content: Option<&'a str>,
}

/// A successful answer.
#[derive(Debug)]
pub struct Answer {
    /// The header fields.
    pub headers: HeaderMap,
    /// The content.
    pub body: Vec<u8>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The server does not know what is asked for (status 404).
    Unknown(String),
    /// The next attempt may succeed after this time.
    Later(String, Instant),
    /// This program sends no more such requests for now. It is no use to wait for it: others wait already.
    Full(String, Instant),
    /// The answer is not usable.
    Bad(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Unknown(why)
        | Failure::Later(why, _)
        | Failure::Full(why, _)
        | Failure::Bad(why)) = self;
        f.write_str(why)
    }
}

/// Sends again after each pause that ends before the deadline.
pub fn retried<T>(deadline: Instant, send: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
    loop {
        match send() {
            Err(Failure::Later(_, until)) if until < deadline => {
                thread::sleep(until.saturating_duration_since(Instant::now()));
            }
            outcome => return outcome,
        }
    }
}

impl Server {
    /// Makes a client of the server at `url`, `https://HOST[:PORT][/PATH]`, whose certificate leads to one of the roots.
    pub fn new(url: &str, roots: &RootCerts) -> Result<Server, String> {
        let base = url.trim_end_matches('/').to_owned();
        const FORM: &str = "expected https://HOST[:PORT][/PATH]";
        if url.contains('@') {
            // it may have a password
            return Err(format!("the URL has a user: {FORM}"));
        }
        let fault = |why| format!("the URL {} {why}: {FORM}", text::quoted(url, SHOWN));
        let uri: Uri = base.parse().map_err(|_| fault("is malformed"))?;
        if uri.scheme_str() != Some("https") {
            return Err(fault("does not begin with https://"));
        }
        let name = uri.authority().map(|authority| authority.as_str());
        let name = name.ok_or_else(|| fault("has no host"))?.to_owned();
        if uri.query().is_some() || url.contains('#') {
            return Err(fault("has a query or a fragment"));
        }
        let config = Agent::config_builder()
            .tls_config(web_tls::config(roots.clone()).build())
            .https_only(true)
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")));
        Ok(Server {
            agent: config.build().into(),
            base,
            name,
            state: Mutex::new(State {
                pause: None,
                backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
                running: 0,
                limit: None,
            }),
        })
    }

    /// Limits the requests: this many at once, and one more after each pause.
    pub fn with_limit(self, at_once: u32, pause: Duration) -> Server {
        self.state().limit = Some(Limit::new(at_once, pause, Instant::now()));
        self
    }

    /// Sends one request.
    pub fn send(&self, request: &Request<'_>, deadline: Instant) -> Result<Answer, Failure> {
        let _place = self.enter()?;
        let answer = self.exchange(request, deadline);
        let mut state = self.state();
        match &answer {
            Ok(_) | Err(Attempt::Unknown(_) | Attempt::Bad(_)) => {
                state.pause = None;
                state.backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
            }
            Err(Attempt::Later(why, demanded)) => {
                let pause = state.backoff.pause();
                let pause = demanded
                    .unwrap_or_default()
                    .min(LONGEST_DEMANDED)
                    .max(pause);
                let until = Instant::now() + pause;
                if state.pause.as_ref().is_none_or(|(old, _)| *old < until) {
                    state.pause = Some((until, why.clone()));
                }
            }
        }
        let until = state.pause.as_ref().map(|(until, _)| *until);
        answer.map_err(|attempt| match attempt {
            Attempt::Unknown(why) => Failure::Unknown(why),
            Attempt::Bad(why) => Failure::Bad(why),
            Attempt::Later(why, _) => Failure::Later(why, until.unwrap_or_else(Instant::now)),
        })
    }

    /// Takes one of the places for requests.
    fn enter(&self) -> Result<Place<'_>, Failure> {
        let mut state = self.state();
        let now = Instant::now();
        if let Some((until, why)) = state.pause.as_ref().filter(|(until, _)| *until > now) {
            let seconds = (*until - now).as_secs() + 1;
            let why = format!("{why}; it is asked again in {seconds} s");
            return Err(Failure::Later(why, *until));
        }
        if state.running >= MAX_AT_ONCE {
            let why = format!("{}: {MAX_AT_ONCE} requests are running", self.name);
            return Err(Failure::Later(why, now + BUSY));
        }
        if let Some(limit) = &mut state.limit
            && let Err(until) = limit.take(now)
        {
            let (pause, seconds) = (limit.pause.as_secs(), (until - now).as_secs() + 1);
            let why = format!(
                "{}: so many were asked for that only one request in {pause} s is sent: try again in {seconds} s",
                self.name
            );
            return Err(Failure::Full(why, until));
        }
        state.running += 1;
        Ok(Place(self))
    }

    fn exchange(&self, request: &Request<'_>, deadline: Instant) -> Result<Answer, Attempt> {
        let name = &self.name;
        let left = deadline.saturating_duration_since(Instant::now());
        let away = |error: ureq::Error| Attempt::Later(format!("{name}: {error}"), None);
        let url = format!("{}{}", self.base, request.path);
        let (types, timeout) = (
            request.types.join(", "),
            Some(left.max(Duration::from_millis(1))),
        );
        let response = match request.content {
            None => {
                let get = self.agent.get(url).header("Accept", types);
                get.config().timeout_global(timeout).build().call()
            }
            Some(json) => {
                let post = self.agent.post(url).header("Accept", types);
                let post = post.header("Content-Type", "application/json");
                post.config().timeout_global(timeout).build().send(json)
            }
        };
        let response = response.map_err(away)?;
        let headers = response.headers().clone();
        let bad = |why: String| Attempt::Bad(format!("{name}{}: {why}", request.path));
        match response.status().as_u16() {
            200 => {}
            404 => {
                let why = format!("{name} does not know {} (status 404)", request.path);
                return Err(Attempt::Unknown(why));
            }
            status @ (408 | 425 | 429 | 500 | 502 | 503 | 504) => {
                let demanded = headers
                    .get("Retry-After")
                    .and_then(|value| retry_after(value.to_str().ok()?, SystemTime::now()));
                return Err(Attempt::Later(
                    format!("{name} answered with status {status}"),
                    demanded,
                ));
            }
            status @ 300..400 => {
                return Err(bad(format!(
                    "it redirects (status {status}), which is not followed"
                )));
            }
            // a POST is refused for what it has, and the answer says why
            status if request.content.is_some() => {
                let mut said = Vec::new();
                let body = response.into_body().into_reader();
                let _ = body.take(SHOWN as u64).read_to_end(&mut said);
                let said = text::quoted(String::from_utf8_lossy(&said), SHOWN);
                return Err(bad(format!("status {status}: {said}")));
            }
            status => return Err(bad(format!("status {status}"))),
        }
        let media = headers.get("Content-Type").map(|value| value.as_bytes());
        if let Some(media) = media.filter(|media| !is_one_of(media, request.types)) {
            let media: String = String::from_utf8_lossy(media).chars().take(60).collect();
            return Err(bad(format!(
                "the answer has the type {media:?}, expected {}",
                request.types.join(" or ")
            )));
        }
        let mut body = Vec::new();
        let limit = request.limit as u64 + 1;
        let read = response
            .into_body()
            .into_reader()
            .take(limit)
            .read_to_end(&mut body);
        read.map_err(|error| {
            Attempt::Later(format!("{name}: the answer is cut off: {error}"), None)
        })?;
        match body.len() <= request.limit {
            true => Ok(Answer { headers, body }),
            false => Err(bad(format!(
                "the answer has more than {} bytes",
                request.limit
            ))),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How one attempt failed; a pause is what the server demands.
enum Attempt {
    Unknown(String),
    Later(String, Option<Duration>),
    Bad(String),
}

/// One of the places for requests, until it is dropped.
struct Place<'a>(&'a Server);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.state().running -= 1;
    }
}

/// Returns whether a `Content-Type` is one of these media types. Its parameters do not matter.
fn is_one_of(media: &[u8], types: &[&str]) -> bool {
    let media = media.split(|byte| *byte == b';').next().unwrap_or_default();
    let media = media.trim_ascii();
    types
        .iter()
        .any(|expected| media.eq_ignore_ascii_case(expected.as_bytes()))
}

/// Returns the time of a `Retry-After`: seconds, or a date (RFC 9110 §10.2.3).
pub fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // more digits than the type holds are as long as the longest pause
        let seconds = value.parse().unwrap_or(LONGEST_DEMANDED.as_secs());
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use support::mutation::mutations;

    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        for (value, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("99999999999999999999999", Some(3600)),
            // one minute after, and one before: the example of RFC 9110
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
        ] {
            let expected = seconds.map(Duration::from_secs);
            assert_eq!(retry_after(value, now), expected, "{value}");
        }
        for seed in [&b"Sun, 06 Nov 1994 08:49:37 GMT"[..], b"120"] {
            for value in mutations(seed, 5000) {
                let _ = retry_after(&String::from_utf8_lossy(&value), now);
            }
        }
    }

    #[test]
    fn requests_beyond_the_limit_are_sent_one_by_one() {
        let (now, pause) = (Instant::now(), Duration::from_secs(2));
        let mut limit = Limit::new(3, pause, now);
        for _ in 0..3 {
            assert_eq!(limit.take(now), Ok(()));
        }
        for _ in 0..2 {
            assert_eq!(limit.take(now + pause / 2), Err(now + pause));
        }
        assert_eq!(limit.take(now + pause), Ok(()));
        assert_eq!(limit.take(now + pause), Err(now + pause * 2));
        // after a long time it is as at the start
        let later = now + pause * 100;
        for _ in 0..3 {
            assert_eq!(limit.take(later), Ok(()));
        }
        assert!(limit.take(later).is_err());
        limit.give_back();
        assert_eq!(limit.take(later), Ok(()));
    }

    #[test]
    fn only_urls_of_https_without_secrets_are_servers() {
        let roots = RootCerts::from(vec![]);
        for good in ["https://a", "https://a:8081/x/", "https://[::1]:8081"] {
            assert!(Server::new(good, &roots).is_ok(), "{good}");
        }
        for bad in [
            "",
            "a",
            "http://a",
            "https://",
            "https://u:p@a",
            "https://a?b",
            "https://a/#b",
            "file:///a",
        ] {
            let error = Server::new(bad, &roots).err().unwrap();
            assert!(!error.contains("u:p"), "{bad}: {error}");
        }
    }

    #[test]
    fn media_types_are_compared_without_parameters() {
        assert!(is_one_of(
            b"Application/JSON; charset=utf-8",
            &["application/json"]
        ));
        for other in [
            &b""[..],
            b"application/jsonx",
            b"text/html",
            b"; application/json",
        ] {
            assert!(!is_one_of(other, &["application/json"]));
        }
    }
}
