//! Publishes the results of accepted nodes as signed tokens.
//!
//! ```text
//! Secret join-attestation-keys ─► keys ─┐
//! answer of a node, record, policy ─────┴► token ─► ConfigMap join-attested-NODE ─► GET of a relying party
//! refused, silent, other record: the ConfigMap is deleted
//! ```
//!
//! The replica that asks the nodes writes; each replica answers relying parties ([`ResultIssuer::page`]), from
//! what the API server has at that moment. A token is shown only while the policy by which its node was
//! judged is in force. It is a statement about a node and no credential: everybody may read it.
//!
//! The Secret is encrypted with a key of the control planes ([`wrapping_key`]), so a reader of Secrets
//! cannot sign. Keys in clear, of an earlier version, may have been read: they are replaced.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::server::ServedResponse;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::ear::{self, AcceptedNode};
use super::signing::Keys;
use crate::cluster::Cluster;
use crate::key_service::members::InForce;
use crate::metrics::{Counter, Labelled, Registry};
use base::crypto::Secret;
use base::sync::lock;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::client::{self, CONFIG_MAPS, Client, Object, SECRETS, version_of};
use kubernetes::machine_record::{MachineRecord, name_of_node};
use kubernetes::objects::{ConfigMap, SecretObject};
use kubernetes::wrapping_key;

/// The Secret with the keys.
pub const SECRET: &str = "join-attestation-keys";
/// The name prefix of a ConfigMap with a token.
pub const PREFIX: &str = "join-attested-";
/// How much longer than the interval a token is valid: the next answer comes within a tenth more than
/// the interval, and an answer takes some seconds.
const MARGIN: Duration = Duration::from_secs(60);
/// The longest name of a Node.
const MAX_NAME: usize = 253;
/// Maximum number of tokens that this replica reads from the API server in a second. Tickets use the same
/// connections to the API server, and must not wait for tokens.
const READS: u32 = 50;
/// Maximum number of such reads at the same time.
const RUNNING: u32 = 4;
/// The timeout of such a read, and of calls for the keys.
const READ: Duration = Duration::from_secs(2);
/// Relying parties come through few addresses: those of proxies.
pub const LIMITS: http::server::ServerLimits = http::server::ServerLimits {
    connections: 32,
    of_peer: 16,
    time: Duration::from_secs(5),
};

/// Where results are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The URL of the issuer, without a slash at its end.
    pub url: String,
    /// The address of the HTTP server.
    pub listen: SocketAddr,
}

/// Signs and publishes results.
pub struct ResultIssuer {
    client: Client,
    cluster: Arc<Cluster>,
    /// The directory of the wrapping key.
    wrapping_key: PathBuf,
    url: String,
    life: Duration,
    keys: Mutex<Known>,
    pace: Mutex<Pace>,
    counts: Labelled<Counter, 1>,
}

/// The keys as they were read or written last.
struct Known {
    keys: Arc<Keys>,
    /// The resourceVersion of the Secret that has the keys; empty if there was no Secret.
    version: String,
    /// When the API server returned them.
    at: Instant,
}

/// The reads for relying parties.
struct Pace {
    since: Instant,
    begun: u32,
    running: u32,
}

impl ResultIssuer {
    /// Creates an issuer without keys, whose tokens are valid for a little more than this interval.
    /// `wrapping_key` is the directory of the wrapping key.
    pub fn new(
        url: String,
        interval: Duration,
        wrapping_key: &Path,
        (client, cluster): (&Client, &Arc<Cluster>),
        registry: &Registry,
    ) -> ResultIssuer {
        let pace = Pace {
            since: Instant::now(),
            begun: 0,
            running: 0,
        };
        ResultIssuer {
            client: client.clone(),
            cluster: cluster.clone(),
            wrapping_key: wrapping_key.into(),
            url,
            life: interval * 5 / 4 + MARGIN,
            keys: Mutex::new(Known {
                keys: Arc::new(Keys::none()),
                version: String::new(),
                at: Instant::now(),
            }),
            pace: Mutex::new(pace),
            counts: registry.labelled(
                "firstlight_watch_tokens_total",
                "Number of attestation results of nodes that this replica issued, withdrew, or withheld although the evidence was accepted.",
                ["result"],
            ),
        }
    }

    /// Returns the URL of the issuer.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns how long a token is valid after the question.
    pub fn life(&self) -> Duration {
        self.life
    }

    /// Returns the keys; none if the API server has not returned them for as long as a token is valid:
    /// an operator may have deleted a key that leaked.
    fn keys(&self) -> Arc<Keys> {
        let known = lock(&self.keys);
        if known.at.elapsed() < self.life {
            known.keys.clone()
        } else {
            Arc::new(Keys::none())
        }
    }

    /// Reads the keys. If this replica leads, makes those that are missing, and removes old ones. Returns
    /// whether none of them was known before, so that all nodes need new tokens.
    pub fn refresh(&self, leads: bool) -> Result<bool, Unpublished> {
        // the thread that renews the Lease waits for it
        let client = self.client.within(READ);
        let began = Instant::now();
        let (version, keys) = match self.read(&client) {
            Ok(read) => read,
            Err(Unpublished::Api(error)) => return Err(error.into()),
            Err(error) => {
                // nobody knows which keys the operator wants
                self.note(String::new(), Arc::new(Keys::none()), began);
                return Err(error);
            }
        };
        let now = ear::seconds(SystemTime::now());
        let renewed = leads.then(|| keys.renewed(now, self.life.as_secs()));
        let Some(renewed) = renewed.flatten() else {
            return Ok(self.note(version, keys, began));
        };
        match self.write(&client, &renewed, &version) {
            Ok(version) => {
                log::info!("renewed the keys that sign attestation results");
                Ok(self.note(version, Arc::new(renewed), began))
            }
            // the next call reads what another one has written
            Err(Unpublished::Api(error)) if error.is_conflict() || error.is_already_exists() => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads the Secret. Returns its version too.
    fn read(&self, client: &Client) -> Result<(String, Arc<Keys>), Unpublished> {
        let Some(found) = client.find_as::<SecretObject>(&secret())? else {
            return Ok((String::new(), Arc::new(Keys::none())));
        };
        let known = lock(&self.keys);
        let same = known.version == found.metadata.resource_version && !known.version.is_empty();
        let same = same.then(|| known.keys.clone());
        drop(known);
        let keys = match same {
            Some(keys) => keys,
            None => Arc::new(self.decrypted(&found)?),
        };
        Ok((found.metadata.resource_version, keys))
    }

    /// Reads the keys in this Secret; none if they are in clear.
    fn decrypted(&self, secret: &SecretObject) -> Result<Keys, Unpublished> {
        let text = STANDARD.decode(secret.data.text("keys"));
        let text = Zeroizing::new(text.map_err(|error| {
            Unpublished::Keys(format!("its field `keys` is not base64: {error}"))
        })?);
        if Keys::parse(&text).is_ok() {
            return Ok(Keys::none());
        }
        let text = wrapping_key::decrypt(&text, &self.key()?);
        let text = text.map_err(|error| Unpublished::Keys(error.to_string()))?;
        Keys::parse(&text).map_err(|error| Unpublished::Keys(error.to_string()))
    }

    /// Returns the key with which the Secret is encrypted.
    fn key(&self) -> Result<Secret, Unpublished> {
        let key = match wrapping_key::read(&self.wrapping_key) {
            Ok(Some(key)) => key,
            Ok(None) => return Err(Unpublished::NoWrappingKey("there is none".into())),
            Err(error) => return Err(Unpublished::NoWrappingKey(error.to_string())),
        };
        Ok(wrapping_key::for_attestation_keys(&key))
    }

    /// Writes the Secret over this version of it. Returns the new version.
    fn write(&self, client: &Client, keys: &Keys, version: &str) -> Result<String, Unpublished> {
        let text = wrapping_key::encrypt(keys.to_json().expose(), &self.key()?);
        let text = text.map_err(|error| Unpublished::Keys(error.to_string()))?;
        let mut object = json!({
            "metadata": {"name": SECRET, "labels": {"app.kubernetes.io/part-of": "firstlight"}},
            "type": "Opaque", "data": {"keys": STANDARD.encode(text)},
        });
        let written = if version.is_empty() {
            client.create(&SECRETS.in_namespace(NAMESPACE), &object)?
        } else {
            object["metadata"]["resourceVersion"] = version.into();
            client.update(&secret(), &object)?
        };
        Ok(version_of(&written).to_owned())
    }

    /// Notes the keys. Returns whether none of them was known before.
    fn note(&self, version: String, keys: Arc<Keys>, at: Instant) -> bool {
        let mut known = lock(&self.keys);
        let are_others = keys.are_others_than(&known.keys);
        *known = Known { keys, version, at };
        are_others
    }

    /// Signs the result of a node, and publishes it. The caller has checked all but `may`, whether this
    /// replica may write. Fails if the result was published or withdrawn meanwhile.
    pub fn publish(
        &self,
        accepted: &AcceptedNode<'_>,
        may: impl Fn() -> bool,
    ) -> Result<(), Unpublished> {
        let keys = self.keys();
        let now = ear::seconds(SystemTime::now());
        let key = keys.signer_id(now).ok_or(Unpublished::NoKey)?;
        let token = keys.sign(&accepted.claims(), now);
        let token = token.ok_or(Unpublished::NoKey)?;
        let expires = SystemTime::UNIX_EPOCH + Duration::from_secs(accepted.expires());
        let name = format!("{PREFIX}{}", accepted.node);
        // it is deleted with its Node
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": accepted.node, "uid": accepted.uid}]);
        let mut map = json!({
            "metadata": {
                "name": name, "ownerReferences": owner,
                "labels": {"app.kubernetes.io/part-of": "firstlight", "firstlight/result": "attestation"},
            },
            "data": {
                "token": token, "policy": accepted.policy_id(), "expires": time::seconds(expires),
                "machine": accepted.machine, "key": key,
            },
        });
        let at = map_of(accepted.node);
        let before = self.client.find_as::<ConfigMap>(&at)?;
        // the times of the Lease leave room for one write; another leader may have withdrawn the result
        if !may() {
            return Ok(());
        }
        match before {
            None => self
                .client
                .create(&CONFIG_MAPS.in_namespace(NAMESPACE), &map)?,
            Some(before) => {
                map["metadata"]["resourceVersion"] = before.metadata.resource_version.into();
                self.client.update(&at, &map)?
            }
        };
        self.counts.with(["issued"]).inc();
        Ok(())
    }

    /// Ends the publication of a node's result.
    pub fn withdraw(&self, node: &str) -> Result<(), client::Error> {
        if self.client.delete_if_there(&map_of(node))? {
            self.counts.with(["withdrawn"]).inc();
        }
        Ok(())
    }

    /// Withdraws the result of a node that was accepted, but gets none.
    pub fn withhold(&self, node: &str) -> Result<(), client::Error> {
        self.counts.with(["withheld"]).inc();
        self.withdraw(node)
    }

    /// Answers the `GET` of a target.
    pub fn page(
        &self,
        target: &str,
        in_force: impl Fn() -> Option<Arc<InForce>>,
    ) -> ServedResponse {
        let keys = self.keys();
        match page_of(&self.url, target) {
            Page::Configuration => json_of(&configuration(&self.url)),
            // a relying party would remember that there are none
            Page::Keys if keys.is_empty() => ServedResponse::status(UNAVAILABLE),
            Page::Keys => json_of(&keys.public()),
            Page::Node(_) if keys.is_empty() || !self.cluster.is_known_within(Duration::ZERO) => {
                ServedResponse::status(UNAVAILABLE)
            }
            Page::Node(name) => match self.cluster.node(name) {
                Some(node) => self.token(name, &node.uid, &keys, in_force),
                None => ServedResponse::status(NOT_FOUND),
            },
            Page::None => ServedResponse::status(NOT_FOUND),
        }
    }

    fn token(
        &self,
        node: &str,
        uid: &str,
        keys: &Keys,
        in_force: impl Fn() -> Option<Arc<InForce>>,
    ) -> ServedResponse {
        let Some(_running) = Running::begin(&self.pace, Instant::now()) else {
            return ServedResponse::status(UNAVAILABLE);
        };
        let found = self.client.within(READ).find_as(&map_of(node));
        // after the read: a policy that is in force now was so when the token was read, or is newer
        match (found, in_force()) {
            (Ok(Some(map)), Some(policy)) => {
                let record = self.cluster.record(&name_of_node(node));
                let present = Present {
                    uid,
                    record: record.as_deref(),
                    policy: &policy,
                    has_key: |key: &str| keys.has(key),
                };
                let token = current(&map, &present, SystemTime::now());
                token.map_or(ServedResponse::status(NOT_FOUND), |token| {
                    ServedResponse::ok("application/eat+jwt", token.to_owned())
                })
            }
            (Ok(None), Some(_)) => ServedResponse::status(NOT_FOUND),
            _ => ServedResponse::status(UNAVAILABLE),
        }
    }
}

const NOT_FOUND: &str = "404 Not Found";
const UNAVAILABLE: &str = "503 Service Unavailable";

impl Pace {
    fn begin(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            (self.since, self.begun) = (now, 0);
        }
        let may = self.begun < READS && self.running < RUNNING;
        if may {
            self.begun += 1;
            self.running += 1;
        }
        may
    }
}

/// A read that is counted while it runs.
struct Running<'a>(&'a Mutex<Pace>);

impl<'a> Running<'a> {
    /// Begins a read; `None` if there are too many.
    fn begin(pace: &'a Mutex<Pace>, now: Instant) -> Option<Running<'a>> {
        // a read that does not begin must not be made: to drop it takes this lock
        lock(pace).begin(now).then(|| Running(pace))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(self.0).running -= 1;
    }
}

fn secret() -> Object {
    SECRETS.in_namespace(NAMESPACE).named(SECRET)
}

fn map_of(node: &str) -> Object {
    let name = format!("{PREFIX}{node}");
    CONFIG_MAPS.in_namespace(NAMESPACE).named(&name)
}

/// What a token must fit.
struct Present<'a, F> {
    /// The UID of the Node.
    uid: &'a str,
    record: Option<&'a MachineRecord>,
    policy: &'a InForce,
    /// Whether a key is published.
    has_key: F,
}

/// Returns the token in a ConfigMap, if it fits and has not expired.
fn current<'a>(
    map: &'a ConfigMap,
    present: &Present<'_, impl Fn(&str) -> bool>,
    now: SystemTime,
) -> Option<&'a str> {
    let text = |field: &str| map.data.get(field).map(String::as_str);
    let (policy, record) = (present.policy, present.record?);
    let expires = text("expires").and_then(time::parse)?;
    let is_of_policy = text("policy")?.strip_prefix("sha256:")? == &*policy.digest;
    let owner = map.metadata.owner_references.first();
    let is_of_node = owner.is_some_and(|owner| owner.uid == present.uid);
    let is_of_machine = text("machine")? == record.machine && record.refused.is_none();
    let is_current = is_of_policy
        && is_of_node
        && is_of_machine
        && (present.has_key)(text("key")?)
        && policy.open.is_none()
        && now < expires;
    text("token").filter(|_| is_current)
}

/// What a target asks for.
#[derive(Debug, PartialEq, Eq)]
enum Page<'a> {
    Configuration,
    Keys,
    Node(&'a str),
    None,
}

/// Reads a target, which may be anything. A proxy may have removed the path of the issuer's URL.
fn page_of<'a>(url: &str, target: &'a str) -> Page<'a> {
    let path = target.split('?').next().unwrap_or_default();
    let host = url.split_once("://").map_or("", |(_, rest)| rest);
    let prefix = host.find('/').map_or("", |at| &host[at..]);
    let path = path.strip_prefix(prefix).unwrap_or(path);
    match path {
        "/.well-known/openid-configuration" => Page::Configuration,
        "/keys" => Page::Keys,
        path => match path.strip_prefix("/nodes/") {
            Some(name) if is_name(name) => Page::Node(name),
            _ => Page::None,
        },
    }
}

/// Returns whether this can be the name of a Node (RFC 1123).
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Returns the metadata of the issuer (OpenID Connect Discovery 1.0 §3). Nobody can log in here, so
/// there is no authorization endpoint.
fn configuration(url: &str) -> Value {
    json!({
        "issuer": url, "jwks_uri": format!("{url}/keys"), "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"], "id_token_signing_alg_values_supported": ["ES256"],
    })
}

fn json_of(value: &Value) -> ServedResponse {
    ServedResponse::ok("application/json", format!("{value}\n"))
}

/// Why a token is not published.
#[derive(Debug)]
pub enum Unpublished {
    /// The API server.
    Api(client::Error),
    /// The Secret has no keys that can be read; a clause.
    Keys(String),
    /// This control plane has no wrapping key that can be read; a clause.
    NoWrappingKey(String),
    /// There is no key that signs now.
    NoKey,
}

impl From<client::Error> for Unpublished {
    fn from(error: client::Error) -> Unpublished {
        Unpublished::Api(error)
    }
}

impl std::fmt::Display for Unpublished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unpublished::Api(error) => error.fmt(f),
            Unpublished::Keys(why) => write!(
                f,
                "the Secret {NAMESPACE}/{SECRET} has no keys that can be read: {why}; delete it, and the service makes a new one"
            ),
            Unpublished::NoWrappingKey(why) => write!(
                f,
                "this service cannot read the control plane's wrapping key, which decrypts the Secret {NAMESPACE}/{SECRET}: {why}; \
                 `firstlight apply` writes the key"
            ),
            Unpublished::NoKey => write!(
                f,
                "the Secret {NAMESPACE}/{SECRET} has no key yet that may sign now"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;
    use verifier::{
        CredentialChallenge, Evidence, Identified, MachineIdentity, Properties, Refusal, Validator,
        refusal::Kind,
    };

    const URL: &str = "https://results.example/cluster-1";

    /// Accepts nothing.
    struct Nothing;

    impl Validator for Nothing {
        fn properties(&self) -> Properties {
            Properties::of_any_tpm(&[])
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            Ok(None)
        }

        fn judge(&self, _: &Evidence<'_>) -> Result<Identified, Refusal> {
            Err(Kind::Unproven.because("nothing"))
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }
    }

    fn in_force(digest: &str, open: Option<&str>) -> InForce {
        InForce {
            validator: Arc::new(Nothing),
            digest: digest.into(),
            open: open.map(str::to_owned),
        }
    }

    #[test]
    fn a_target_is_a_page_with_and_without_the_path_of_the_issuer() {
        for (target, expected) in [
            ("/.well-known/openid-configuration", Page::Configuration),
            (
                "/cluster-1/.well-known/openid-configuration",
                Page::Configuration,
            ),
            ("/cluster-1/keys", Page::Keys),
            ("/keys?x=y", Page::Keys),
            ("/nodes/worker-0.example", Page::Node("worker-0.example")),
            ("/cluster-1/nodes/worker-0", Page::Node("worker-0")),
            ("/", Page::None),
            ("/cluster-2/keys", Page::None),
            ("/nodes/", Page::None),
            ("/nodes/a/b", Page::None),
            ("/nodes/..%2f..%2fsecrets", Page::None),
            ("/nodes/Worker", Page::None),
            ("keys", Page::None),
        ] {
            assert_eq!(page_of(URL, target), expected, "{target}");
        }
        let long = format!("/nodes/{}", "a".repeat(MAX_NAME + 1));
        assert_eq!(page_of(URL, &long), Page::None);
        for target in mutations(b"/cluster-1/nodes/worker-0?x", 2000) {
            if let Page::Node(name) = page_of(URL, &String::from_utf8_lossy(&target)) {
                assert!(!name.contains('/') && name.is_ascii(), "{name}");
            }
        }
    }

    #[test]
    fn a_token_is_shown_only_while_all_that_it_says_is_so() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let map: ConfigMap = serde_json::from_value(json!({
            "metadata": {"ownerReferences": [{"uid": "u"}]},
            "data": {"token": "t", "policy": "sha256:00ff", "expires": time::seconds(now), "machine": "m", "key": "k"},
        }))
        .unwrap();
        let before = now - Duration::from_secs(1);
        let policy = in_force("00ff", None);
        let record = MachineRecord {
            machine: "m".into(),
            ..MachineRecord::default()
        };
        let right = Present {
            uid: "u",
            record: Some(&record),
            policy: &policy,
            has_key: |key: &str| key == "k",
        };
        assert_eq!(current(&map, &right, before), Some("t"));
        assert_eq!(current(&map, &right, now), None);
        let (older, open) = (in_force("00fe", None), in_force("00ff", Some("any TPM")));
        let other = MachineRecord {
            machine: "n".into(),
            ..MachineRecord::default()
        };
        let refused = MachineRecord {
            refused: Some(before),
            ..record.clone()
        };
        for (uid, record, policy) in [
            ("other", Some(&record), &policy),
            ("u", None, &policy),
            ("u", Some(&other), &policy),
            ("u", Some(&refused), &policy),
            ("u", Some(&record), &older),
            ("u", Some(&record), &open),
        ] {
            let wrong = Present {
                uid,
                record,
                policy,
                ..right
            };
            assert_eq!(current(&map, &wrong, before), None);
        }
        for field in ["token", "policy", "expires", "machine", "key"] {
            let mut broken = map.clone();
            broken.data.remove(field);
            assert_eq!(current(&broken, &right, before), None);
            broken.data.insert(field.into(), "other".into());
            let shown = current(&broken, &right, before);
            assert_eq!(shown, (field == "token").then_some("other"), "{field}");
        }
    }

    #[test]
    fn a_read_that_is_refused_blocks_no_other_and_is_not_counted() {
        let (since, begun, running) = (Instant::now(), 0, 0);
        let pace = Mutex::new(Pace {
            since,
            begun,
            running,
        });
        let all: Vec<_> = (0..RUNNING)
            .filter_map(|_| Running::begin(&pace, since))
            .collect();
        assert_eq!(all.len(), RUNNING as usize);
        assert!(Running::begin(&pace, since).is_none());
        assert_eq!(lock(&pace).running, RUNNING);
        drop(all);
        assert!(Running::begin(&pace, since).is_some());
    }

    #[test]
    fn reads_for_relying_parties_are_limited_at_once_and_in_a_second() {
        let now = Instant::now();
        let mut pace = Pace {
            since: now,
            begun: 0,
            running: 0,
        };
        let count = |pace: &mut Pace, now| (0..100).filter(|_| pace.begin(now)).count();
        assert_eq!(count(&mut pace, now), RUNNING as usize);
        let mut begun = RUNNING;
        while begun < READS {
            pace.running -= 1;
            assert!(pace.begin(now));
            begun += 1;
        }
        pace.running = 0;
        assert!(!pace.begin(now));
        let later = now + Duration::from_secs(1);
        assert_eq!(count(&mut pace, later), RUNNING as usize);
    }
}
