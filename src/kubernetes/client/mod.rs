//! A blocking client of the Kubernetes API: HTTP/1.1 over TLS, JSON. Objects are read as types ([`ObjectKind`]), or whole as
//! [`serde_json::Value`].
//!
//! [`ApiAccess`] describes how to reach a cluster, [`Resource`] and [`Object`] are paths in its API,
//! [`Client`] has the verbs, and [`Watch`] follows a collection.
//!
//! Every call has a timeout ([`Client::within`]) and ends at once when the client's [`Stop`] is
//! set. Within its timeout, a failed request is repeated if that is safe:
//!
//! ```text
//!                                             get list apply patch delete   create update
//! 429: the server did nothing                 after Retry-After             after Retry-After
//! the server was not reached                  with backoff                  with backoff
//! 502 503 504, or cut off: outcome unknown    with backoff                  no: the caller checks first
//! 500: an error of etcd, or an invalid patch  a few times                   no: the caller checks first
//! 401 with a token from a file                once, if the file has another token now
//! ```
//!
//! Redirects are not followed, because they would send credentials to another server. A proxy gets none: it only passes TLS on.

mod config;
mod error;
pub mod objects;
mod resource;
mod watch;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use base::backoff::Backoff;
use base::stop::{OnStop, Stop};
use base::sync::lock;
use base::time::seconds;
use base::x509::Certificate;
use http::{ClientPolicy, ErrorKind, Proxy, StreamedResponse};
use transport::dial;

pub use config::{ApiAccess, SERVICE_ACCOUNT};
pub use error::{ApiStatus, Distrust, Error};
pub use objects::wipe;
pub use resource::*;
pub use watch::{CollectionEvent, Watch};

use config::{Credentials, TokenFile};
use error::Status;
use objects::ObjectMeta;
use resource::escaped;

/// The field manager of the fields that Firstlight applies.
pub const FIELD_MANAGER: &str = "firstlight";

/// The default timeout of a call. The API server itself ends a call after 60 s.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The first and the longest pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The maximum size of an answer. One object has at most 1.5 MiB by etcd's limit, and six times as much in JSON if its texts are control
/// characters: an account that may only create objects must not stop those that list them.
const MAX_ANSWER: u64 = 32 << 20;
/// The maximum size of a page with several objects, because some of our programs have only 64 MiB of memory. A longer page is asked for again
/// with fewer objects, down to one.
const MAX_PAGE: u64 = 8 << 20;
/// The number of objects in one page of a list.
const PAGE: usize = 250;
/// By how much a page that is too long becomes smaller.
const SHRINK: usize = 8;
/// How often a change is tried again after a conflict.
const CONFLICTS: usize = 20;
/// How often a request is repeated after status 500. The repetitions take longer than an election in etcd.
const TRIES_OF_500: usize = 5;
/// How often a list starts again if the version of its first page is no longer available.
const LISTS: usize = 3;
/// The number of threads that may call at the same time.
const CONNECTIONS: usize = 32;

/// A client of one cluster. Clones share its connections.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
    time: Duration,
}

struct Inner {
    client: http::Client,
    server: String,
    /// The URL of the proxy.
    proxy: Option<String>,
    /// When the client's certificate ends, in seconds since 1970.
    certificate_end: Option<u64>,
    token: Option<Mutex<TokenFile>>,
    stop: Stop,
    _end: OnStop,
}

/// Selects objects of a collection, by label and field selectors in Kubernetes' notation. Empty for all.
#[derive(Debug, Clone, Default)]
pub struct Selector {
    /// Labels, such as `app=a,tier!=b`.
    pub labels: String,
    /// Fields, such as `metadata.name=a`.
    pub fields: String,
}

/// The objects of a collection at one version.
#[derive(Debug)]
pub struct List<T = Value> {
    /// The objects. Objects in a list have no `kind` and `apiVersion`.
    pub items: Vec<T>,
    /// The version at which a [`Watch`] can continue.
    pub resource_version: String,
}

/// A page of a list, with the marker of the next one.
#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: ListMeta,
    // Go encodes an empty list as null, but never leaves it out
    #[serde(deserialize_with = "Option::deserialize")]
    items: Option<Vec<Value>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue")]
    go_on: String,
}

/// One request to the server.
struct Request<'a> {
    verb: &'static str,
    what: &'a dyn fmt::Display,
    method: &'static str,
    path: String,
    body: Option<(&'static str, &'a Value)>,
    /// Whether repeating the request is safe.
    idempotent: bool,
    /// The maximum size of the answer.
    limit: u64,
}

impl Request<'_> {
    fn name(&self) -> String {
        format!("{} {}", self.verb, self.what)
    }
}

impl Client {
    /// Creates a client. It connects at the first call. When `stop` is set, all its calls and watches end.
    pub fn new(config: ApiAccess, stop: &Stop) -> Client {
        let certificate_end = config.certificate().and_then(|der| {
            let certificate = Certificate::parse(der).ok()?;
            certificate.validity().ok().map(|(_, end)| end)
        });
        let Credentials { certificate, token } = config.credentials;
        let policy = ClientPolicy {
            identity: certificate,
            connections: CONNECTIONS,
            proxy: config.proxy.clone().map_or(Proxy::None, Proxy::At),
            ..ClientPolicy::new(config.roots)
        };
        let client = http::Client::new(policy, TIMEOUT);
        let end = stop.on_stop({
            let client = client.clone();
            move || client.shutdown()
        });
        let token = token.map(Mutex::new);
        let inner = Inner {
            client,
            server: config.server,
            proxy: config.proxy,
            certificate_end,
            token,
            stop: stop.clone(),
            _end: end,
        };
        Client {
            inner: Arc::new(inner),
            time: TIMEOUT,
        }
    }

    /// Returns the same client with another timeout for each call, including repetitions.
    pub fn within(&self, time: Duration) -> Client {
        Client {
            inner: self.inner.clone(),
            time,
        }
    }

    /// Returns the server as `https://HOST:PORT`.
    pub fn server(&self) -> &str {
        &self.inner.server
    }

    /// Reads an object.
    pub fn get(&self, object: &Object) -> Result<Value, Error> {
        self.get_as(object)
    }

    /// Reads an object; `None` if it does not exist.
    pub fn find(&self, object: &Object) -> Result<Option<Value>, Error> {
        self.find_as(object)
    }

    /// Reads an object as its type.
    pub fn get_as<K: ObjectKind>(&self, object: &Object) -> Result<K, Error> {
        object.resource().check::<K>();
        let request = Request::new("get", object, "GET", object.path());
        read(&request, self.json(&request)?)
    }

    /// Reads an object as its type; `None` if it does not exist.
    pub fn find_as<K: ObjectKind>(&self, object: &Object) -> Result<Option<K>, Error> {
        found(self.get_as(object))
    }

    /// Reads an object as its type, and whole, so that it can be written back with the fields that the type does not have.
    pub fn find_whole<K: ObjectKind>(&self, object: &Object) -> Result<Option<(K, Value)>, Error> {
        found(self.get_whole(object))
    }

    fn get_whole<K: ObjectKind>(&self, object: &Object) -> Result<(K, Value), Error> {
        object.resource().check::<K>();
        let request = Request::new("get", object, "GET", object.path());
        let whole: Value = self.json(&request)?;
        Ok((read(&request, whole.clone())?, whole))
    }

    /// Lists the objects of a collection. They are fetched in pages, but all of the same version.
    pub fn list(&self, collection: &Collection, selector: &Selector) -> Result<List, Error> {
        self.list_as(collection, selector)
    }

    /// Lists the objects of a collection as their type.
    pub fn list_as<K: ObjectKind>(
        &self,
        collection: &Collection,
        selector: &Selector,
    ) -> Result<List<K>, Error> {
        self.list_keeping::<K, K>(collection, selector, |object| object)
    }

    /// Lists the objects as [`Client::list_as`] does, and reduces each by `keep`, so that a large
    /// collection is never completely in memory.
    pub fn list_keeping<K: ObjectKind, U>(
        &self,
        collection: &Collection,
        selector: &Selector,
        keep: fn(K) -> U,
    ) -> Result<List<U>, Error> {
        collection.resource().check::<K>();
        let mut items = Vec::new();
        let resource_version = self.pages(collection, selector, &mut |page, is_first| {
            let page: Page = serde_json::from_slice(page)?;
            if is_first {
                items.clear();
            }
            for item in page.items.into_iter().flatten() {
                items.push(keep(K::read(item).ok_or_else(no_object)?));
            }
            Ok(page.metadata)
        })?;
        Ok(List {
            items,
            resource_version,
        })
    }

    /// Reads the pages of a list. Returns its version. Each page goes to `take`, with whether the list begins with it, also again.
    fn pages(
        &self,
        collection: &Collection,
        selector: &Selector,
        take: &mut dyn FnMut(&[u8], bool) -> serde_json::Result<ListMeta>,
    ) -> Result<String, Error> {
        let mut go_on = String::new();
        let (mut lists, mut limit) = (1, PAGE);
        loop {
            let path = format!(
                "{}?limit={limit}{}{}",
                collection.path(),
                selector.query(),
                query("continue", &go_on)
            );
            let request = Request {
                limit: if limit > 1 { MAX_PAGE } else { MAX_ANSWER },
                ..Request::new("list", collection, "GET", path)
            };
            let page = self.bytes(&request).and_then(|page| {
                let taken = take(&page, go_on.is_empty());
                taken.map_err(|error| unreadable(&request, &page, &error))
            });
            let page = match page {
                Err(error) if error.is_expired() && lists < LISTS => {
                    lists += 1;
                    go_on.clear();
                    continue;
                }
                Err(Error::Answer { .. }) if limit > 1 => {
                    limit = limit.div_ceil(SHRINK);
                    continue;
                }
                page => page?,
            };
            limit = PAGE.min(2 * limit);
            go_on = page.go_on;
            if go_on.is_empty() {
                return Ok(page.resource_version);
            }
        }
    }

    /// Creates an object, which contains its name. [`Client::create_subresource`] creates subresources (`pods/eviction`).
    pub fn create(&self, collection: &Collection, object: &Value) -> Result<Value, Error> {
        self.create_as(collection, object)
    }

    /// Creates an object as [`Client::create`] does, and returns it as its type.
    pub fn create_as<K: ObjectKind>(
        &self,
        collection: &Collection,
        object: &Value,
    ) -> Result<K, Error> {
        collection.resource().check::<K>();
        let name = object
            .pointer("/metadata/name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let what = collection.named(name);
        let path = format!("{}?fieldManager={FIELD_MANAGER}", collection.path());
        let request = Request {
            body: Some(("application/json", object)),
            ..Request::once("create", &what, "POST", path)
        };
        read(&request, self.json(&request)?)
    }

    /// Creates an object unless one with its name exists, whatever that one contains. Returns whether it was created. The result is
    /// correct even if an answer was lost.
    pub fn create_if_absent(&self, collection: &Collection, object: &Value) -> Result<bool, Error> {
        let deadline = Instant::now() + self.time;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            match self.until(deadline).create(collection, object) {
                Ok(_) => return Ok(true),
                Err(error) if error.is_already_exists() => return Ok(false),
                Err(error) if error.is_temporary() => {
                    self.pause(error, backoff.pause(), deadline)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Posts to a subresource: `eviction` of a pod, `token` of a service account.
    pub fn create_subresource(&self, object: &Object, body: &Value) -> Result<Value, Error> {
        let request = Request::once("create", object, "POST", object.path());
        self.json(&Request {
            body: Some(("application/json", body)),
            ..request
        })
    }

    /// Evicts a pod. Returns the server's message if it does not evict the pod now, for example because a PodDisruptionBudget
    /// forbids it. Sends the request only once, so that the caller can go on with other pods.
    pub fn evict(&self, pod: &Object, uid: &str) -> Result<Option<String>, Error> {
        let eviction = pod.subresource("eviction");
        let body = json!({
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name(), "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let request = Request {
            body: Some(("application/json", &body)),
            ..Request::once("create", &eviction, "POST", eviction.path())
        };
        match self.once(&request, Instant::now() + self.time) {
            Ok(_) => Ok(None),
            Err(Error::Refused(refused)) if refused.code == 429 => Ok(Some(refused.message)),
            Err(error) => Err(error),
        }
    }

    /// Returns the log of a container of a pod, from its kubelet.
    pub fn pod_log(&self, pod: &Object, container: &str) -> Result<String, Error> {
        let log = pod.subresource("log");
        let path = format!("{}?container={}", log.path(), escaped(container));
        let answer = self.bytes(&Request::new("get", &log, "GET", path))?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Asks the kubelet of a node for its health, through the API server and only once.
    pub fn ask_kubelet(&self, node: &str) -> Result<(), Error> {
        let proxy = NODES.named(node).subresource("proxy");
        let path = format!("{}/healthz", proxy.path());
        let request = Request::new("get", &proxy, "GET", path);
        self.once(&request, Instant::now() + self.time).map(drop)
    }

    /// Opens a file below `/var/log` of a node, which its kubelet serves, through the API server. The caller limits how much it reads.
    pub fn node_file(&self, node: &str, path: &str) -> Result<StreamedResponse, Error> {
        let proxy = NODES.named(node).subresource("proxy");
        let path = format!("{}/logs/{path}", proxy.path());
        let request = Request::new("get", &proxy, "GET", path);
        let token = self.token()?;
        self.send(&request, token.as_deref(), Instant::now() + self.time)
    }

    /// Replaces an object. Fails with a conflict if `metadata.resourceVersion` of `new` is not the present one.
    pub fn update(&self, object: &Object, new: &Value) -> Result<Value, Error> {
        let path = format!("{}?fieldManager={FIELD_MANAGER}", object.path());
        let request = Request::once("update", object, "PUT", path);
        self.json(&Request {
            body: Some(("application/json", new)),
            ..request
        })
    }

    /// Asks the server whether it would accept [`Client::update`], and changes nothing. Returns the object as it would be.
    pub fn try_update(&self, object: &Object, new: &Value) -> Result<Value, Error> {
        let path = format!("{}?fieldManager={FIELD_MANAGER}&dryRun=All", object.path());
        let request = Request::new("update", object, "PUT", path);
        self.json(&Request {
            body: Some(("application/json", new)),
            ..request
        })
    }

    /// Reads an object, changes it and writes it back. Starts again after a conflict. `change`
    /// returns whether there is anything to write.
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

    /// Reads an object, merges fields into it, and writes it back. Starts again after a conflict. `change` gets what was read, also whole,
    /// and returns the fields as in [`Client::merge`]; `None` if there is nothing to write.
    pub fn modify_as<K: ObjectKind>(
        &self,
        object: &Object,
        mut change: impl FnMut(K, &Value) -> Option<Value>,
    ) -> Result<(), Error> {
        let client = self.until(Instant::now() + self.time);
        let mut conflicts = 0;
        loop {
            let (read, whole) = client.get_whole(object)?;
            let Some(fields) = change(read, &whole) else {
                return Ok(());
            };
            match client.write(object, Some(whole), fields) {
                Err(error) if error.is_conflict() && conflicts < CONFLICTS => conflicts += 1,
                outcome => return outcome.map(drop),
            }
        }
    }

    /// Merges fields into an object as it was read, and writes it back; creates it if there was none. Fails with a conflict if it was
    /// changed meanwhile.
    pub fn write(
        &self,
        object: &Object,
        read: Option<Value>,
        fields: Value,
    ) -> Result<Value, Error> {
        match read {
            Some(mut whole) => {
                merge(&mut whole, fields);
                self.update(object, &whole)
            }
            None => {
                let mut new = json!({"metadata": {"name": object.name()}});
                merge(&mut new, fields);
                self.create(&object.collection(), &new)
            }
        }
    }

    /// Merges fields into an object; null removes a field (RFC 7396).
    pub fn merge(&self, object: &Object, patch: &Value) -> Result<Value, Error> {
        self.patch(
            object,
            "application/merge-patch+json",
            &format!("?fieldManager={FIELD_MANAGER}"),
            patch,
        )
    }

    /// Applies an object (server-side apply, forced). Our field manager then owns its fields. The server removes fields that we
    /// applied earlier and that are missing now.
    pub fn apply(&self, object: &Object, fields: &Value) -> Result<Value, Error> {
        self.server_side_apply(object, "", fields)
    }

    /// Runs [`Client::apply`] as a dry run: the same answer without a change.
    pub fn try_apply(&self, object: &Object, fields: &Value) -> Result<Value, Error> {
        self.server_side_apply(object, "&dryRun=All", fields)
    }

    /// Runs [`Client::apply`] with another field manager, for fields that other programs apply too.
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
        // JSON is valid YAML.
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
            "PATCH",
            format!("{}{query}", object.path()),
        );
        self.json(&Request {
            body: Some((kind, patch)),
            ..request
        })
    }

    /// Deletes an object, and in the background its dependents.
    pub fn delete(&self, object: &Object) -> Result<(), Error> {
        let path = format!("{}?propagationPolicy=Background", object.path());
        self.json::<Value>(&Request::new("delete", object, "DELETE", path))
            .map(drop)
    }

    /// Deletes an object if it exists. Returns whether it did.
    pub fn delete_if_there(&self, object: &Object) -> Result<bool, Error> {
        match self.delete(object) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object if it is unchanged since it was read. Returns whether it was.
    pub fn delete_as(&self, object: &Object, read: &ObjectMeta) -> Result<bool, Error> {
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background",
            "preconditions": {"uid": read.uid, "resourceVersion": read.resource_version},
        });
        let request = Request::new("delete", object, "DELETE", object.path());
        match self.json::<Value>(&Request {
            body: Some(("application/json", &options)),
            ..request
        }) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sets annotations of an object.
    pub fn annotate(&self, object: &Object, annotations: &[(&str, &str)]) -> Result<Value, Error> {
        let annotations: serde_json::Map<_, _> = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).into()))
            .collect();
        self.merge(object, &json!({"metadata": {"annotations": annotations}}))
    }

    /// Returns the server's version, such as `v1.34.4`.
    pub fn version(&self) -> Result<String, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Version {
            git_version: String,
        }
        let request = Request::new("get", &"/version", "GET", "/version".into());
        let version: Version = self.json(&request)?;
        Ok(version.git_version)
    }

    /// Resolves the server's name, for commands that a person runs: a name without an address is an error at once, because the
    /// person may have mistyped it. Nodes do not call this: their name service may start later.
    pub fn resolve(&self) -> Result<(), Error> {
        if self.inner.proxy.is_some() {
            // the proxy resolves it
            return Ok(());
        }
        let server = self.inner.server.clone();
        let deadline = Instant::now() + self.time;
        dial::check(http::name(&server), deadline).map_err(|error| Error::NoAddress {
            server,
            why: error.why,
        })
    }

    /// Waits until the API server reports that it is ready. Calls `report` each time the reason for the wait changes.
    pub fn wait_ready(&self, report: &mut dyn FnMut(&str)) -> Result<(), Error> {
        let started = Instant::now();
        self.until_ready(report, started + self.time)
            .map_err(|error| error.tried_for(started.elapsed()))
    }

    fn until_ready(&self, report: &mut dyn FnMut(&str), deadline: Instant) -> Result<(), Error> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut said = String::new();
        // `verbose` makes the server list the checks that fail.
        let request = Request::new("get", &"/readyz", "GET", "/readyz?verbose".into());
        loop {
            // A request without an answer is repeated.
            let error = match self.once(&request, deadline.min(Instant::now() + LONGEST_PAUSE * 2))
            {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            // The roles that permit this request are created while the server starts.
            let passing = error.is_temporary() || error.code() == Some(403);
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

    /// Returns whether the [`Stop`] was set.
    pub fn is_stopped(&self) -> bool {
        self.inner.stop.is_stopped()
    }

    /// Waits for `time` or until the stop. Returns true after a stop.
    pub fn stopped_within(&self, time: Duration) -> bool {
        self.inner.stop.wait(time)
    }

    /// Returns the same client. The timeout of its calls is the time until `deadline`.
    fn until(&self, deadline: Instant) -> Client {
        self.within(deadline.saturating_duration_since(Instant::now()))
    }

    /// Sends a request, repeats it according to the module's table, and returns the answer.
    fn json<T: DeserializeOwned>(&self, request: &Request) -> Result<T, Error> {
        parsed(request, &self.bytes(request)?)
    }

    fn bytes(&self, request: &Request) -> Result<Zeroizing<Vec<u8>>, Error> {
        let started = Instant::now();
        self.repeated(request, started + self.time)
            .map_err(|error| error.tried_for(started.elapsed()))
    }

    fn repeated(&self, request: &Request, deadline: Instant) -> Result<Zeroizing<Vec<u8>>, Error> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut tries_of_500 = TRIES_OF_500;
        loop {
            let error = match self.once(request, deadline) {
                Err(error)
                    if error.nothing_happened() || request.idempotent && error.is_temporary() =>
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
            log::debug!("retrying: {error}");
        }
    }

    /// Waits before the next attempt, as long as the server demands. Returns the error if the timeout would pass before.
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

    /// Sends a request once, and a second time if the token was replaced meanwhile.
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
        let answer = self.send(request, token, deadline)?;
        answer.read().map_err(|error| match error.kind {
            ErrorKind::TooLong => Error::Answer {
                request: request.name(),
                problem: error.to_string(),
            },
            _ => self.unreachable(request, &error, started),
        })
    }

    /// Sends a request. Returns the successful answer before its body.
    fn send(
        &self,
        request: &Request,
        token: Option<&String>,
        deadline: Instant,
    ) -> Result<StreamedResponse, Error> {
        let started = Instant::now();
        // The request may contain a Secret.
        let body = request.body;
        let body = body.map(|(_, body)| Zeroizing::new(body.to_string().into_bytes()));
        let bearer = token.map(|token| Zeroizing::new(format!("Bearer {}", token.as_str())));
        // a kubelet says nothing about the type of its files
        let mut fields = vec![("Accept", "application/json, */*")];
        fields.extend(
            bearer
                .iter()
                .map(|bearer| ("Authorization", bearer.as_str())),
        );
        fields.extend(request.body.map(|(kind, _)| ("Content-Type", kind)));
        let sent = base::network::request::Request {
            method: request.method,
            url: &format!("{}{}", self.inner.server, request.path),
            fields: &fields,
            body: body.as_deref().map(Vec::as_slice),
            limit: request.limit,
        };
        let left = deadline.saturating_duration_since(started);
        let answer = self.inner.client.open(&sent, left);
        let answer = answer.map_err(|error| self.unreachable(request, &error, started))?;
        match answer.status() {
            200..300 => Ok(answer),
            _ => Err(self.with_end(refused(request, answer))),
        }
    }

    /// Adds to an error since when the server cannot accept the client's certificate.
    fn with_end(&self, mut error: Error) -> Error {
        if let (Error::Refused(refused), Some(end)) = (&mut error, self.inner.certificate_end) {
            let end = UNIX_EPOCH + Duration::from_secs(end);
            refused.ended = (end < SystemTime::now()).then(|| seconds(end));
        }
        error
    }

    fn unreachable(&self, request: &Request, error: &http::Error, started: Instant) -> Error {
        if self.inner.stop.is_stopped() {
            return Error::Stopped;
        }
        let (server, mut why) = (self.inner.server.clone(), error.to_string());
        if let Some(proxy) = &self.inner.proxy {
            why = format!(
                "{why}; the environment names the proxy {}",
                http::shown(proxy)
            );
        }
        let sent = match error.kind {
            ErrorKind::Name if self.inner.proxy.is_none() => {
                return Error::NoAddress { server, why };
            }
            ErrorKind::Invalid => return Error::Object(format!("{}: {why}", request.name())),
            ErrorKind::Name
            | ErrorKind::Connection
            | ErrorKind::Certificate
            | ErrorKind::CertificateTime
            | ErrorKind::Tls => false,
            ErrorKind::Timeout | ErrorKind::Cut | ErrorKind::TooLong | ErrorKind::Type => true,
        };
        Error::Unreachable {
            request: request.name(),
            server,
            why,
            sent,
            // The server's certificate is not from the cluster's CA: another attempt would fail too.
            untrusted: match error.kind {
                ErrorKind::Certificate => Some(Distrust::Authority),
                ErrorKind::CertificateTime => Some(Distrust::Time),
                _ => None,
            },
            after: started.elapsed(),
        }
    }

    fn token(&self) -> Result<Option<Zeroizing<String>>, Error> {
        let Some(token) = &self.inner.token else {
            return Ok(None);
        };
        lock(token).token().map(Some)
    }

    fn token_was_replaced(&self, used: Option<&String>) -> bool {
        let (Some(token), Some(used)) = (&self.inner.token, used) else {
            return false;
        };
        lock(token).refused(used)
    }
}

impl<'a> Request<'a> {
    /// Creates a request that may be repeated safely.
    fn new(
        verb: &'static str,
        what: &'a dyn fmt::Display,
        method: &'static str,
        path: String,
    ) -> Request<'a> {
        Request {
            verb,
            what,
            method,
            path,
            body: None,
            idempotent: true,
            limit: MAX_ANSWER,
        }
    }

    fn once(
        verb: &'static str,
        what: &'a dyn fmt::Display,
        method: &'static str,
        path: String,
    ) -> Request<'a> {
        Request {
            idempotent: false,
            ..Request::new(verb, what, method, path)
        }
    }
}

impl Selector {
    /// Selects by labels.
    pub fn labels(labels: &str) -> Selector {
        Selector {
            labels: labels.into(),
            fields: String::new(),
        }
    }

    /// Selects by fields.
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

/// Returns a further part of a query; empty for an empty value.
fn query(key: &str, value: &str) -> String {
    if value.is_empty() {
        String::new()
    } else {
        format!("&{key}={}", escaped(value))
    }
}

fn found<T>(read: Result<T, Error>) -> Result<Option<T>, Error> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn read<K: ObjectKind>(request: &Request, object: Value) -> Result<K, Error> {
    K::read(object).ok_or_else(|| unreadable(request, &[], &no_object()))
}

fn no_object() -> serde_json::Error {
    serde::de::Error::custom("expected an object")
}

fn parsed<T: DeserializeOwned>(request: &Request, answer: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(answer).map_err(|error| unreadable(request, answer, &error))
}

fn unreadable(request: &Request, answer: &[u8], error: &serde_json::Error) -> Error {
    Error::Answer {
        request: request.name(),
        problem: if is_page(answer) {
            PAGE_OF_HTML.to_owned()
        } else {
            error.to_string()
        },
    }
}

/// Merges fields into a value; null removes a field (RFC 7396).
pub fn merge(value: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *value = patch;
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (name, part) in patch {
        if part.is_null() {
            value
                .as_object_mut()
                .and_then(|fields| fields.remove(&name));
        } else {
            merge(&mut value[name], part);
        }
    }
}

/// Returns the version of an object as the API server has returned it.
pub fn version_of(object: &Value) -> &str {
    let version = object.pointer("/metadata/resourceVersion");
    version.and_then(Value::as_str).unwrap_or_default()
}

/// What an answer is that no API server sends.
const PAGE_OF_HTML: &str =
    "an HTML page: a proxy, or another program than an API server, answers at this address";

fn is_page(answer: &[u8]) -> bool {
    answer.trim_ascii_start().starts_with(b"<")
}

/// Reads the server's error answer.
fn refused(request: &Request, answer: StreamedResponse) -> Error {
    /// The maximum size: a Status has a few hundred bytes, `/readyz` a few thousand.
    const MAX_REFUSAL: u64 = 64 << 10;
    let (code, demanded) = (answer.status(), answer.pause());
    // An answer that cannot be read counts as empty.
    let text = answer.beginning(MAX_REFUSAL);
    let status = match serde_json::from_slice::<Status>(&text) {
        Ok(status) if status.kind == "Status" => status,
        // This is the answer of a proxy, or of a server that is starting.
        _ => Status {
            message: if is_page(&text) {
                PAGE_OF_HTML.to_owned()
            } else {
                String::from_utf8_lossy(&text).trim().to_owned()
            },
            ..Status::default()
        },
    };
    let seconds = Some(status.details.retry_after_seconds).filter(|seconds| *seconds > 0);
    let pause = demanded.or(seconds.map(Duration::from_secs));
    Error::Refused(Box::new(ApiStatus::new(
        request.name(),
        code,
        status,
        pause,
    )))
}

/// Returns the failing checks in an answer of `/readyz`.
fn waits_for(error: &Error) -> String {
    match error {
        Error::Refused(refused) => {
            let failing: Vec<_> = refused
                .message
                .lines()
                .filter_map(|line| line.strip_prefix("[-]")?.split(' ').next())
                .collect();
            if failing.is_empty() {
                format!("the API server answers {} {}", refused.code, refused.reason)
                    .trim_end()
                    .to_owned()
            } else {
                format!("the API server is not ready: {}", failing.join(", "))
            }
        }
        Error::Unreachable { server, why, .. } => {
            format!("the API server {server} does not answer: {why}")
        }
        error => error.to_string(),
    }
}
