//! Requests to one server over HTTPS (RFC 9110): no redirect, no proxy, an answer of limited size and known type, a deadline, and
//! pauses when the server demands them or cannot be reached.

use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use base::backoff::Backoff;
use base::sync::lock;
use base::text;
use hardware::{Cause, Unavailable};
use http::{Client, ClientPolicy, Roots};

/// Maximum number of concurrent requests to a server. The requests of a new, large cluster must not look like an attack.
const MAX_AT_ONCE: usize = 8;
/// How long a request pauses if [`MAX_AT_ONCE`] others run.
const BUSY: Duration = Duration::from_millis(250);
/// The first and the longest pause after a failure without `Retry-After`.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// The longest pause that a server can demand: a wrong value in its answer must not stop validations for days.
const LONGEST_DEMANDED: Duration = Duration::from_secs(3600);

/// Maximum length of the part of a refusal that an error shows.
const SHOWN: usize = 200;

/// A server.
pub struct CollateralServer {
    client: Client,
    /// `https://HOST[:PORT][/PATH]`, without a slash at the end.
    base: String,
    /// `HOST[:PORT]`, for errors.
    name: String,
    state: Mutex<State>,
}

struct State {
    /// Until when no request is sent, and why.
    pause: Option<(Instant, Unavailable)>,
    backoff: Backoff,
    running: usize,
    limit: Option<Limit>,
}

/// A limit of requests: some at once, and one more after each pause.
pub struct Limit {
    at_once: u32,
    pause: Duration,
    /// When the full number of requests is available again.
    full: Instant,
}

impl Limit {
    /// Makes a limit without any request yet.
    pub fn new(at_once: u32, pause: Duration, now: Instant) -> Limit {
        Limit {
            at_once,
            pause,
            full: now,
        }
    }

    /// Returns whether the full number of requests is available.
    pub fn is_full(&self, now: Instant) -> bool {
        self.full <= now
    }

    /// Gives one request back, because it got no answer.
    pub fn give_back(&mut self) {
        self.full = self.full.checked_sub(self.pause).unwrap_or(self.full);
    }

    /// Counts one request, or returns when the next one may be sent.
    pub fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let full = self.full.max(now) + self.pause;
        if full.duration_since(now) <= self.pause * self.at_once {
            self.full = full;
            Ok(())
        } else {
            Err(full - self.pause * self.at_once)
        }
    }
}

/// A request.
pub struct FetchRequest<'a> {
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
pub struct FetchedAnswer {
    fields: Vec<(String, String)>,
    /// The content.
    pub body: Vec<u8>,
}

impl FetchedAnswer {
    /// Returns the value of the first header field with one of these names, if it is text.
    pub fn field(&self, names: &[&str]) -> Option<&str> {
        let find =
            |name: &&str| (self.fields.iter()).find(|(known, _)| known.eq_ignore_ascii_case(name));
        Some(&names.iter().find_map(find)?.1)
    }
}

/// Why there is no answer, and when the next request may be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchFailure {
    /// The same request gets the same answer.
    Final(Unavailable),
    /// The next attempt may succeed after this time.
    Later(Unavailable, Instant),
    /// This program sends no more such requests for now. Do not wait for it: other callers already wait.
    Full(Unavailable, Instant),
}

impl FetchFailure {
    /// Returns why there is no answer.
    pub fn error(&self) -> &Unavailable {
        let (FetchFailure::Final(error)
        | FetchFailure::Later(error, _)
        | FetchFailure::Full(error, _)) = self;
        error
    }
}

impl From<Unavailable> for FetchFailure {
    fn from(error: Unavailable) -> FetchFailure {
        FetchFailure::Final(error)
    }
}

/// Repeats a request after each pause that ends before the deadline.
pub fn retried<T>(
    deadline: Instant,
    send: impl Fn() -> Result<T, FetchFailure>,
) -> Result<T, FetchFailure> {
    loop {
        match send() {
            Err(FetchFailure::Later(_, until)) if until < deadline => {
                thread::sleep(until.saturating_duration_since(Instant::now()));
            }
            outcome => return outcome,
        }
    }
}

impl CollateralServer {
    /// Makes a client of the server at `url`, `https://HOST[:PORT][/PATH]`, whose certificate one of the roots certifies.
    pub fn new(url: &str, roots: &Roots) -> Result<CollateralServer, Unavailable> {
        http::check(url).map_err(|why| {
            let url = text::quoted(http::shown(url), SHOWN);
            let why = format!("the URL {url}: {why}: expected https://HOST[:PORT][/PATH]");
            Cause::Setting.because(why)
        })?;
        Ok(CollateralServer {
            client: Client::new(ClientPolicy::new(roots.clone()), LONGEST_PAUSE),
            base: url.trim_end_matches('/').to_owned(),
            name: http::host(url).to_owned(),
            state: Mutex::new(State {
                pause: None,
                backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
                running: 0,
                limit: None,
            }),
        })
    }

    /// Limits the requests: this many at once, and one more after each pause.
    pub fn with_limit(self, at_once: u32, pause: Duration) -> CollateralServer {
        self.state().limit = Some(Limit::new(at_once, pause, Instant::now()));
        self
    }

    /// Sends one request.
    pub fn send(
        &self,
        request: &FetchRequest<'_>,
        deadline: Instant,
    ) -> Result<FetchedAnswer, FetchFailure> {
        let _place = self.enter()?;
        let answer = self.exchange(request, deadline);
        let mut state = self.state();
        match answer {
            Err((error, demanded)) if error.may_pass() => {
                let pause = state.backoff.pause();
                let pause = demanded
                    .unwrap_or_default()
                    .min(LONGEST_DEMANDED)
                    .max(pause);
                let mut until = Instant::now() + pause;
                match &state.pause {
                    Some((longer, _)) if *longer >= until => until = *longer,
                    _ => state.pause = Some((until, error.clone())),
                }
                Err(FetchFailure::Later(error, until))
            }
            answer => {
                state.pause = None;
                state.backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                answer.map_err(|(error, _)| FetchFailure::Final(error))
            }
        }
    }

    /// Takes one of the slots for requests.
    fn enter(&self) -> Result<Place<'_>, FetchFailure> {
        let mut state = self.state();
        let now = Instant::now();
        if let Some((until, why)) = state.pause.as_ref().filter(|(until, _)| *until > now) {
            let seconds = (*until - now).as_secs() + 1;
            let why = why.clone();
            let why = why.and(format!("; asking again in {seconds} s"));
            return Err(FetchFailure::Later(why, *until));
        }
        if state.running >= MAX_AT_ONCE {
            let why = format!(
                "{}: the limit of {MAX_AT_ONCE} running requests is reached",
                self.name
            );
            return Err(FetchFailure::Later(Cause::Limited.because(why), now + BUSY));
        }
        if let Some(limit) = &mut state.limit
            && let Err(until) = limit.take(now)
        {
            let (pause, seconds) = (limit.pause.as_secs(), (until - now).as_secs() + 1);
            let why = format!(
                "{}: too many requests, so now only one is sent every {pause} s: try again in {seconds} s",
                self.name
            );
            return Err(FetchFailure::Full(Cause::Limited.because(why), until));
        }
        state.running += 1;
        Ok(Place(self))
    }

    /// Sends one request. An error has the pause that the server demands.
    fn exchange(
        &self,
        request: &FetchRequest<'_>,
        deadline: Instant,
    ) -> Result<FetchedAnswer, (Unavailable, Option<Duration>)> {
        let (name, post) = (&self.name, request.content);
        let types = request.types.join(", ");
        let mut fields = vec![("Accept", &*types)];
        fields.extend(post.map(|_| ("Content-Type", "application/json")));
        let sent = base::network::request::Request {
            method: if post.is_some() { "POST" } else { "GET" },
            url: &format!("{}{}", self.base, request.path),
            fields: &fields,
            body: post.map(str::as_bytes),
            limit: request.limit as u64,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let answer = self.client.open(&sent, left);
        let failed = |cause: Cause, text: String| (cause.because(text), None);
        let answer =
            answer.map_err(|error| failed(Cause::Unreachable, format!("{name}: {error}")))?;
        let bad = |cause, why: String| failed(cause, format!("{name}{}: {why}", request.path));
        match answer.status() {
            200 => {}
            404 => {
                let why = format!("{name} does not know {} (status 404)", request.path);
                return Err(failed(Cause::Unknown, why));
            }
            status @ (408 | 425 | 429 | 500 | 502 | 503 | 504) => {
                let why = format!("{name} answered with status {status}");
                return Err((Cause::Busy.because(why), answer.pause()));
            }
            status @ 300..400 => {
                let why = format!("it redirects (status {status}), but redirects are not followed");
                return Err(bad(Cause::Refused(status), why));
            }
            // the refusal of a POST is about its content, and the answer says why
            status if post.is_some() => {
                let said = answer.beginning(SHOWN as u64);
                let said = text::quoted(String::from_utf8_lossy(&said), SHOWN);
                return Err(bad(
                    Cause::Refused(status),
                    format!("status {status}: {said}"),
                ));
            }
            status => return Err(bad(Cause::Refused(status), format!("status {status}"))),
        }
        (answer.check_type(request.types))
            .map_err(|error| bad(Cause::Malformed, error.to_string()))?;
        let fields = answer.fields();
        let body = answer.read().map_err(|error| match error.kind {
            http::ErrorKind::TooLong => bad(Cause::TooLarge, error.to_string()),
            _ => failed(
                Cause::Unreachable,
                format!("{name}: the answer is cut off: {error}"),
            ),
        })?;
        Ok(FetchedAnswer {
            fields,
            body: body.to_vec(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// One of the places for requests, until it is dropped.
struct Place<'a>(&'a CollateralServer);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.state().running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // after a long time the full number is available again
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
        let roots = Roots::default();
        for good in ["https://a", "https://a:8081/x/", "https://[::1]:8081"] {
            assert!(CollateralServer::new(good, &roots).is_ok(), "{good}");
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
            let error = CollateralServer::new(bad, &roots).err().unwrap();
            assert!(!error.to_string().contains("u:p"), "{bad}: {error}");
        }
    }
}
