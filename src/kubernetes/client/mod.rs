//! A blocking client of the Kubernetes API: HTTP/1.1 over TLS, JSON, objects as [`serde_json::Value`].
//!
//! [`Config`] says how to reach a cluster, [`Resource`] and [`Object`] where things are in its API, [`Client`] has the verbs,
//! [`Watch`] follows a collection.
//!
//! Every call has a time ([`Client::within`]) and ends at once when the client's [`Stop`] comes. Within its time it is made
//! again where that can do no harm:
//!
//! ```text
//!                                             get list apply patch delete   create update
//! 429: the server did nothing                 after Retry-After             after Retry-After
//! never reached the server                    with back-off                 with back-off
//! 502 503 504, or cut off: who knows          with back-off                 no: the caller looks first
//! 500: etcd's trouble, or a nonsensical patch a few times                   no: the caller looks first
//! 401 with a token from a file                once, where the file has another one by now
//! ```
//!
//! There is no proxy and no redirect: both would carry credentials elsewhere.

mod config;
mod error;
mod resource;
mod watch;

use std::fmt;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::{self, Method};
use ureq::tls::TlsConfig;
use zeroize::{Zeroize, Zeroizing};

use base::backoff::Backoff;
use base::stop::{OnStop, Stop};

pub use config::{Config, Credentials, SERVICE_ACCOUNT};
pub use error::{Error, Refused};
pub use resource::*;
pub use watch::{Event, Watch};

use config::TokenFile;
use error::Status;
use resource::escaped;

/// Who owns the fields that we apply.
pub const FIELD_MANAGER: &str = "firstlight";

/// For a call where nothing else is said; the API server itself ends one after 60 s.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A SYN that is lost is sent again after 1 and after 3 seconds (RFC 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Pauses between tries.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// One object has at most 1.5 MiB, by etcd's limit; a page of a list has [`PAGE`] of them, and seldom large ones, or, where an
/// answer is too long, [`SMALL_PAGE`].
const MAX_ANSWER: u64 = 32 << 20;
/// No answer with a secret in it has more: a bootstrap token's, or a review of a service account's token.
const SECRET_ANSWER: usize = 32 << 10;
/// Objects in one answer to a list.
const PAGE: usize = 250;
const SMALL_PAGE: usize = 20;
/// How often a change is tried on top of somebody else's.
const CONFLICTS: usize = 20;
/// How often a 500 is asked for: the time of an election in etcd.
const TRIES_OF_500: usize = 5;
/// How often a list begins anew since the instant of its first page is no longer kept.
const LISTS: usize = 3;
/// Threads of one program that call at the same time.
const CONNECTIONS: usize = 32;

/// A client of one cluster. Clones share its connections.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    time: Duration,
}

struct Inner {
    agent: Agent,
    server: String,
    token: Option<Mutex<TokenFile>>,
    stop: Stop,
    _end: OnStop,
}

/// Which objects of a collection: label and field selectors in Kubernetes' own notation; empty for all.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    /// `app=a,tier!=b`
    pub labels: String,
    /// `metadata.name=a`
    pub fields: String,
}

/// The objects of a collection at one instant.
#[derive(Debug)]
pub struct List {
    /// The objects. Those of a list lack `kind` and `apiVersion`.
    pub items: Vec<Value>,
    /// The instant: where a [`Watch`] can go on.
    pub resource_version: String,
}

/// Wipes every text in an object that had a secret in it.
pub fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(items) => items.iter_mut().for_each(wipe),
        Value::Object(fields) => fields.values_mut().for_each(wipe),
        _ => {}
    }
}

/// One exchange with the server, repeated or not.
struct Request<'a> {
    verb: &'static str,
    what: &'a dyn fmt::Display,
    method: Method,
    path: String,
    body: Option<(&'static str, &'a Value)>,
    /// Whether twice is the same as once.
    idempotent: bool,
}

impl Request<'_> {
    fn name(&self) -> String {
        format!("{} {}", self.verb, self.what)
    }
}

impl Client {
    /// Connects when it is first used. When `stop` comes, every call and every watch of it ends.
    pub fn new(config: Config, stop: &Stop) -> Client {
        let mut tls = TlsConfig::builder()
            .root_certs(config.root_certs())
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let mut token = None;
        match config.credentials {
            Credentials::Anonymous => {}
            Credentials::Certificate(certificate) => tls = tls.client_cert(Some(certificate)),
            Credentials::Token(text) => token = Some(TokenFile::fixed(text)),
            Credentials::TokenFile(path) => token = Some(TokenFile::new(path)),
        }
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .https_only(true)
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .max_idle_connections(CONNECTIONS)
            .max_idle_connections_per_host(CONNECTIONS)
            .user_agent(concat!("firstlight/", env!("CARGO_PKG_VERSION")));
        let agent: Agent = agent.build().into();
        let end = stop.on_stop({
            let agent = agent.clone();
            move || agent.shutdown()
        });
        let token = token.map(Mutex::new);
        let inner = Inner {
            agent,
            server: config.server,
            token,
            stop: stop.clone(),
            _end: end,
        };
        Client {
            inner: Arc::new(inner),
            time: TIMEOUT,
        }
    }

    /// The same client with another time for each call, retries included.
    pub fn within(&self, time: Duration) -> Client {
        Client {
            inner: self.inner.clone(),
            time,
        }
    }

    /// `https://HOST:PORT`.
    pub fn server(&self) -> &str {
        &self.inner.server
    }

    /// An object.
    pub fn get(&self, object: &Object) -> Result<Value, Error> {
        self.json(&Request::new("get", object, Method::GET, object.path()))
    }

    /// An object, or that there is none.
    pub fn find(&self, object: &Object) -> Result<Option<Value>, Error> {
        match self.get(object) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The objects of a collection, fetched page by page but all of one instant.
    pub fn list(&self, collection: &Collection, selector: &Selector) -> Result<List, Error> {
        self.list_keeping(collection, selector, |object| object)
    }

    /// As [`Client::list`], but what `keep` leaves of each, so that a large collection of large objects is never whole in memory.
    pub fn list_keeping(
        &self,
        collection: &Collection,
        selector: &Selector,
        keep: fn(Value) -> Value,
    ) -> Result<List, Error> {
        let mut items = Vec::new();
        let mut go_on = String::new();
        let (mut lists, mut limit) = (1, PAGE);
        loop {
            let path = format!(
                "{}?limit={limit}{}{}",
                collection.path(),
                selector.query(),
                query("continue", &go_on)
            );
            let request = Request::new("list", collection, Method::GET, path);
            let mut page = match self.json(&request) {
                Err(error) if error.is_expired() && lists < LISTS => {
                    lists += 1;
                    items.clear();
                    go_on.clear();
                    continue;
                }
                Err(Error::Answer { .. }) if limit > SMALL_PAGE => {
                    limit = SMALL_PAGE;
                    continue;
                }
                page => page?,
            };
            let Some(Value::Array(more)) = page.get_mut("items").map(Value::take) else {
                // Go writes an empty list as null
                return match page.get("items") {
                    Some(Value::Null) => Ok(List {
                        items,
                        resource_version: version(&page),
                    }),
                    _ => Err(Error::Answer {
                        request: request.name(),
                        problem: "it has no items".into(),
                    }),
                };
            };
            items.extend(more.into_iter().map(keep));
            go_on = page
                .pointer("/metadata/continue")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned();
            if go_on.is_empty() {
                return Ok(List {
                    items,
                    resource_version: version(&page),
                });
            }
        }
    }

    /// Makes an object, which has its name in it. Subresources of an object (`pods/eviction`) are made by
    /// [`Client::create_subresource`].
    pub fn create(&self, collection: &Collection, object: &Value) -> Result<Value, Error> {
        let name = object
            .pointer("/metadata/name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let what = collection.named(name);
        let path = format!("{}?fieldManager={FIELD_MANAGER}", collection.path());
        self.json(&Request {
            body: Some(("application/json", object)),
            ..Request::once("create", &what, Method::POST, path)
        })
    }

    /// Makes an object unless there is one of its name, whatever that has in it; whether it was made. The outcome is
    /// certain, also where an answer got lost.
    pub fn create_if_absent(&self, collection: &Collection, object: &Value) -> Result<bool, Error> {
        let deadline = Instant::now() + self.time;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            match self.until(deadline).create(collection, object) {
                Ok(_) => return Ok(true),
                Err(error) if error.is_already_exists() => return Ok(false),
                Err(error) if error.is_passing() => {
                    self.pause(error, backoff.pause(), deadline)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Posts to a subresource: `eviction` of a pod, `token` of a service account.
    pub fn create_subresource(&self, object: &Object, body: &Value) -> Result<Value, Error> {
        let request = Request::once("create", object, Method::POST, object.path());
        self.json(&Request {
            body: Some(("application/json", body)),
            ..request
        })
    }

    /// Replaces an object. Where `new` has a `metadata.resourceVersion` that is not the present one this is a conflict.
    pub fn update(&self, object: &Object, new: &Value) -> Result<Value, Error> {
        let path = format!("{}?fieldManager={FIELD_MANAGER}", object.path());
        let request = Request::once("update", object, Method::PUT, path);
        self.json(&Request {
            body: Some(("application/json", new)),
            ..request
        })
    }

    /// Reads an object, changes it, writes it back, and does so again when somebody else was faster. `change` returns
    /// whether there is anything to write.
    pub fn modify(
        &self,
        object: &Object,
        mut change: impl FnMut(&mut Value) -> bool,
    ) -> Result<Value, Error> {
        let client = self.until(Instant::now() + self.time);
        let mut conflicts = 0;
        loop {
            let mut value = client.get(object)?;
            if !change(&mut value) {
                return Ok(value);
            }
            match client.update(object, &value) {
                Err(error) if error.is_conflict() && conflicts < CONFLICTS => conflicts += 1,
                outcome => return outcome,
            }
        }
    }

    /// Merges fields into an object; null removes one (RFC 7396).
    pub fn merge(&self, object: &Object, patch: &Value) -> Result<Value, Error> {
        self.patch(
            object,
            "application/merge-patch+json",
            &format!("?fieldManager={FIELD_MANAGER}"),
            patch,
        )
    }

    /// Makes an object have these fields, which are ours from now on, and no longer those that we applied before and left out
    /// now (server-side apply, forced: we are right).
    pub fn apply(&self, object: &Object, fields: &Value) -> Result<Value, Error> {
        self.server_side_apply(object, "", fields)
    }

    /// What [`Client::apply`] would say and make, without doing it.
    pub fn try_apply(&self, object: &Object, fields: &Value) -> Result<Value, Error> {
        self.server_side_apply(object, "&dryRun=All", fields)
    }

    /// [`Client::apply`] under another name, for fields that other programs apply too.
    pub fn apply_as(
        &self,
        manager: &'static str,
        object: &Object,
        fields: &Value,
    ) -> Result<Value, Error> {
        let query = format!("?fieldManager={}&force=true", escaped(manager));
        self.patch(object, "application/apply-patch+yaml", &query, fields)
    }

    fn server_side_apply(
        &self,
        object: &Object,
        more: &str,
        fields: &Value,
    ) -> Result<Value, Error> {
        // JSON is YAML
        let query = format!("?fieldManager={FIELD_MANAGER}&force=true{more}");
        self.patch(object, "application/apply-patch+yaml", &query, fields)
    }

    fn patch(
        &self,
        object: &Object,
        kind: &'static str,
        query: &str,
        patch: &Value,
    ) -> Result<Value, Error> {
        let request = Request::new(
            "patch",
            object,
            Method::PATCH,
            format!("{}{query}", object.path()),
        );
        self.json(&Request {
            body: Some((kind, patch)),
            ..request
        })
    }

    /// Deletes an object, and in the background what it owns.
    pub fn delete(&self, object: &Object) -> Result<(), Error> {
        let path = format!("{}?propagationPolicy=Background", object.path());
        self.json(&Request::new("delete", object, Method::DELETE, path))
            .map(|_| ())
    }

    /// Deletes an object if there is one; whether there was.
    pub fn delete_if_there(&self, object: &Object) -> Result<bool, Error> {
        match self.delete(object) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object if it is still as it was read; whether it was.
    pub fn delete_as(&self, object: &Object, read: &Value) -> Result<bool, Error> {
        let of = |field: &str| read.pointer(field).cloned().unwrap_or_default();
        let preconditions =
            json!({"uid": of("/metadata/uid"), "resourceVersion": of("/metadata/resourceVersion")});
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", "preconditions": preconditions,
        });
        let request = Request::new("delete", object, Method::DELETE, object.path());
        match self.json(&Request {
            body: Some(("application/json", &options)),
            ..request
        }) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Follows a collection: what is there, and then each change.
    pub fn watch(&self, collection: &Collection, selector: &Selector) -> Watch {
        Watch::new(self, collection, selector)
    }

    /// Sets annotations of an object.
    pub fn annotate(&self, object: &Object, annotations: &[(&str, &str)]) -> Result<Value, Error> {
        let annotations: serde_json::Map<_, _> = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).into()))
            .collect();
        self.merge(object, &json!({"metadata": {"annotations": annotations}}))
    }

    /// The server's version: `v1.34.4`.
    pub fn version(&self) -> Result<String, Error> {
        let version = self.json(&Request::new(
            "get",
            &"/version",
            Method::GET,
            "/version".into(),
        ))?;
        let text = version.get("gitVersion").and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| Error::Answer {
            request: "get /version".into(),
            problem: "it has no gitVersion".into(),
        })
    }

    /// Waits until the API server says that it is ready. `report` hears what it waits for, each time that this changes.
    pub fn wait_ready(&self, report: &mut dyn FnMut(&str)) -> Result<(), Error> {
        let deadline = Instant::now() + self.time;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut said = String::new();
        // `verbose` names the checks that fail
        let request = Request::new("get", &"/readyz", Method::GET, "/readyz?verbose".into());
        loop {
            // one that hangs is asked again
            let error = match self.once(&request, deadline.min(Instant::now() + LONGEST_PAUSE * 2))
            {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            // the roles that let somebody ask are made while it starts
            let passing = error.is_passing() || error.code() == Some(403);
            let why = waits_for(&error);
            if passing && why != said {
                report(&why);
                said = why;
            }
            if !passing {
                return Err(error);
            }
            self.pause(error, backoff.pause(), deadline)?;
        }
    }

    /// Whether [`Stop`] came.
    pub fn is_stopped(&self) -> bool {
        self.inner.stop.is_stopped()
    }

    /// Waits for `time` or for the stop, whichever is first; true when stopped.
    pub fn stopped_within(&self, time: Duration) -> bool {
        self.inner.stop.wait(time)
    }

    /// The same, with what is left until `deadline` for each call.
    fn until(&self, deadline: Instant) -> Client {
        self.within(deadline.saturating_duration_since(Instant::now()))
    }

    /// The answer to a request, which is made again as the module's table says.
    fn json(&self, request: &Request) -> Result<Value, Error> {
        let deadline = Instant::now() + self.time;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut tries_of_500 = TRIES_OF_500;
        loop {
            let answer = self.once(request, deadline).and_then(|answer| {
                serde_json::from_slice(&answer).map_err(|error| Error::Answer {
                    request: request.name(),
                    problem: error.to_string(),
                })
            });
            let error = match answer {
                Err(error)
                    if error.nothing_happened() || request.idempotent && error.is_passing() =>
                {
                    error
                }
                answer => return answer,
            };
            if error.code() == Some(500) {
                tries_of_500 -= 1;
                if tries_of_500 == 0 {
                    return Err(error);
                }
            }
            let error = self.pause(error, backoff.pause(), deadline)?;
            log::debug!("{error}: again");
        }
    }

    /// Waits before the next try, as long as the server said. Where there is none because the time is up, the error is.
    fn pause(&self, error: Error, pause: Duration, deadline: Instant) -> Result<Error, Error> {
        let asked = match &error {
            Error::Refused(refused) => refused.retry_after,
            _ => None,
        };
        let pause = asked.unwrap_or_default().max(pause);
        if Instant::now() + pause >= deadline {
            return Err(error);
        }
        if self.inner.stop.wait(pause) {
            Err(Error::Stopped)
        } else {
            Ok(error)
        }
    }

    /// One exchange, and a second one where the token was replaced meanwhile.
    fn once(&self, request: &Request, deadline: Instant) -> Result<Zeroizing<Vec<u8>>, Error> {
        let token = self.token()?;
        match self.exchange(request, token.as_deref(), deadline) {
            Err(error)
                if error.code() == Some(401) && self.token_was_replaced(token.as_deref()) =>
            {
                self.exchange(request, self.token()?.as_deref(), deadline)
            }
            answer => answer,
        }
    }

    fn exchange(
        &self,
        request: &Request,
        token: Option<&String>,
        deadline: Instant,
    ) -> Result<Zeroizing<Vec<u8>>, Error> {
        let started = Instant::now();
        let response = self.send(request, token, deadline)?;
        // a Secret may be in it, which is not left behind in buffers that were too small
        let mut answer = Zeroizing::new(Vec::with_capacity(SECRET_ANSWER));
        let read = response
            .into_body()
            .into_reader()
            .take(MAX_ANSWER + 1)
            .read_to_end(&mut answer);
        read.map_err(|error| self.unreachable(request, &ureq::Error::from(error), started))?;
        if answer.len() as u64 > MAX_ANSWER {
            let problem = format!("it has more than {MAX_ANSWER} bytes");
            return Err(Error::Answer {
                request: request.name(),
                problem,
            });
        }
        Ok(answer)
    }

    /// Sends a request; returns what comes with a status of success, before its body.
    fn send(
        &self,
        request: &Request,
        token: Option<&String>,
        deadline: Instant,
    ) -> Result<http::Response<ureq::Body>, Error> {
        let started = Instant::now();
        let left = deadline
            .saturating_duration_since(started)
            .max(Duration::from_millis(1));
        let url = format!("{}{}", self.inner.server, request.path);
        let mut head = http::Request::builder()
            .method(&request.method)
            .uri(url)
            .header("Accept", "application/json");
        if let Some(token) = token {
            let mut header = http::HeaderValue::try_from(
                Zeroizing::new(format!("Bearer {}", token.as_str())).as_str(),
            )
            .map_err(|error| Error::Config("the token".into(), error.to_string()))?;
            header.set_sensitive(true);
            head = head.header("Authorization", header);
        }
        if let Some((kind, _)) = request.body {
            head = head.header("Content-Type", kind);
        }
        let bad = |error: http::Error| Error::Object(format!("{}: {error}", request.name()));
        let agent = &self.inner.agent;
        let answer = match request.body {
            // a Secret's bytes may be in it
            Some((_, body)) => {
                let body = Zeroizing::new(body.to_string().into_bytes());
                let whole = head.body(body.as_slice()).map_err(bad)?;
                agent.run(
                    agent
                        .configure_request(whole)
                        .timeout_global(Some(left))
                        .build(),
                )
            }
            None => {
                let whole = head.body(()).map_err(bad)?;
                agent.run(
                    agent
                        .configure_request(whole)
                        .timeout_global(Some(left))
                        .build(),
                )
            }
        };
        let response = answer.map_err(|error| self.unreachable(request, &error, started))?;
        if response.status().is_success() {
            Ok(response)
        } else {
            Err(refused(request, response))
        }
    }

    fn unreachable(&self, request: &Request, error: &ureq::Error, started: Instant) -> Error {
        if self.inner.stop.is_stopped() {
            return Error::Stopped;
        }
        let (why, sent, untrusted) = match error {
            ureq::Error::HostNotFound => ("its name has no address".into(), false, false),
            ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
                ("no connection in the time given".into(), false, false)
            }
            ureq::Error::Timeout(_) => ("the time is up".into(), true, false),
            ureq::Error::Rustls(error) => (error.to_string(), false, is_untrusted(error)),
            ureq::Error::Io(error) => {
                let tls = error
                    .get_ref()
                    .and_then(|error| error.downcast_ref::<rustls::Error>());
                (
                    error.to_string(),
                    !was_never_sent(error) && tls.is_none(),
                    tls.is_some_and(is_untrusted),
                )
            }
            error => (error.to_string(), true, false),
        };
        let server = self.inner.server.clone();
        Error::Unreachable {
            request: request.name(),
            server,
            why,
            sent,
            untrusted,
            after: started.elapsed(),
        }
    }

    fn token(&self) -> Result<Option<Zeroizing<String>>, Error> {
        let Some(token) = &self.inner.token else {
            return Ok(None);
        };
        token
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .token()
            .map(Some)
    }

    fn token_was_replaced(&self, used: Option<&String>) -> bool {
        let (Some(token), Some(used)) = (&self.inner.token, used) else {
            return false;
        };
        token
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .refused(used)
    }
}

impl<'a> Request<'a> {
    /// One that may be made again.
    fn new(
        verb: &'static str,
        what: &'a dyn fmt::Display,
        method: Method,
        path: String,
    ) -> Request<'a> {
        Request {
            verb,
            what,
            method,
            path,
            body: None,
            idempotent: true,
        }
    }

    fn once(
        verb: &'static str,
        what: &'a dyn fmt::Display,
        method: Method,
        path: String,
    ) -> Request<'a> {
        Request {
            idempotent: false,
            ..Request::new(verb, what, method, path)
        }
    }
}

impl Selector {
    /// By labels.
    pub fn labels(labels: &str) -> Selector {
        Selector {
            labels: labels.into(),
            fields: String::new(),
        }
    }

    /// By fields.
    pub fn fields(fields: &str) -> Selector {
        Selector {
            labels: String::new(),
            fields: fields.into(),
        }
    }

    fn query(&self) -> String {
        query("labelSelector", &self.labels) + &query("fieldSelector", &self.fields)
    }
}

/// A further part of a query; nothing for nothing.
fn query(key: &str, value: &str) -> String {
    if value.is_empty() {
        String::new()
    } else {
        format!("&{key}={}", escaped(value))
    }
}

fn version(object: &Value) -> String {
    object
        .pointer("/metadata/resourceVersion")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

/// What the server says instead of what was asked for.
fn refused(request: &Request, response: http::Response<ureq::Body>) -> Error {
    /// A Status has a few hundred bytes; `/readyz` a few thousand.
    const MAX_REFUSAL: u64 = 64 << 10;
    let code = response.status().as_u16();
    let header = response
        .headers()
        .get("Retry-After")
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let mut text = Vec::new();
    // what does not come is not said
    let _ = response
        .into_body()
        .into_reader()
        .take(MAX_REFUSAL)
        .read_to_end(&mut text);
    let status = match serde_json::from_slice::<Status>(&text) {
        Ok(status) if status.kind == "Status" => status,
        // of a proxy, or of a server that starts
        _ => Status {
            message: String::from_utf8_lossy(&text).trim().to_owned(),
            ..Status::default()
        },
    };
    let seconds =
        header.or(Some(status.details.retry_after_seconds).filter(|seconds| *seconds > 0));
    Error::Refused(Box::new(Refused::new(
        request.name(),
        code,
        status,
        seconds.map(Duration::from_secs),
    )))
}

/// Of what stands in the way of `/readyz`, the parts that say something.
fn waits_for(error: &Error) -> String {
    match error {
        Error::Refused(refused) => {
            let failing: Vec<_> = refused
                .message
                .lines()
                .filter_map(|line| line.strip_prefix("[-]")?.split(' ').next())
                .collect();
            match failing.is_empty() {
                true => format!("the API server answers {} {}", refused.code, refused.reason)
                    .trim_end()
                    .to_owned(),
                false => format!("the API server is not ready: {}", failing.join(", ")),
            }
        }
        Error::Unreachable { server, why, .. } => {
            format!("the API server {server} does not answer: {why}")
        }
        error => error.to_string(),
    }
}

/// The server's certificate is not the cluster's, which no time heals.
fn is_untrusted(error: &rustls::Error) -> bool {
    matches!(error, rustls::Error::InvalidCertificate(_))
}

/// These come before the first byte of a request.
fn was_never_sent(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        ConnectionRefused | HostUnreachable | NetworkUnreachable | AddrNotAvailable | NotConnected
    )
}
