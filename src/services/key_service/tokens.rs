//! Authenticates callers by the token of their Kubernetes service account. The API server verifies
//! it (TokenReview, `authentication.k8s.io/v1`).
//!
//! The token is a projected token for the audience [`AUDIENCE`]. The API server does not accept it
//! for its own requests, and a pod's token for the API server is not accepted here. A verdict is
//! cached for [`LIFETIME`], so the access of a deleted pod ends after that time.
//!
//! While the API server does not answer, an accepted token stays valid for [`OFFLINE_LIFETIME`].
//! Otherwise a cluster could not restart: control planes need the keys of their disks before etcd
//! has a quorum again, and without a quorum the API server answers no review.
//!
//! Concurrent calls with the same new token wait for one review. The reviews of each address are
//! limited, because each costs the API server a signature check.
//!
//! The token of a pod also names the node of the pod. The API server writes it into the token, and
//! gives a kubelet only tokens of pods of its own node.

use base::sync::{lock, wait_timeout};
use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::metrics::{Counter, Histogram, Labelled, Registry};
use kubernetes::client::{self, Client, TOKEN_REVIEWS};
use kubernetes::objects::TokenReview;
use kubernetes::services::KEY_SERVICE_AUDIENCE as AUDIENCE;
use rpc::grpc::{Code, Metadata, Status};

/// How long a verdict is cached.
pub(super) const LIFETIME: Duration = Duration::from_secs(30);
/// How long an accepted token stays valid while the API server does not answer: 24 hours, to last a
/// night.
pub(super) const OFFLINE_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// When the service reviews a token again after a failed review.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The timeout of one review with its retries. Callers wait for 5 s.
const REVIEW_TIME: Duration = Duration::from_secs(3);
/// The maximum number of cached verdicts. Beyond it, the oldest are removed.
const MAX_VERDICTS: usize = 1024;
/// Maximum number of reviews for one address in one burst, and per second after that.
const BURST: f64 = 10.0;
const PER_SECOND: f64 = 1.0;
/// The maximum number of addresses with a budget. Beyond it, new addresses wait until entries
/// expire.
const MAX_PEERS: usize = 4096;
/// The maximum length of a token. A service account's has about 1000 bytes.
const MAX_TOKEN: usize = 8 << 10;

/// Verifies tokens with the API server, and caches the verdicts.
pub struct Reviewer {
    client: Client,
    state: Mutex<Reviews>,
    /// Notified when a review ends.
    changed: Condvar,
    reviews: Labelled<Counter, 1>,
    seconds: Histogram,
}

/// The reviews of tokens, and how many each address may still cause.
#[derive(Default)]
struct Reviews {
    /// Verdicts by the token's SHA-256.
    verdicts: HashMap<[u8; 32], Entry>,
    /// The remaining reviews of each address, and the time of that count.
    peers: HashMap<IpAddr, (f64, Instant)>,
}

enum Entry {
    /// A review is running.
    Pending,
    Reviewed(Verdict),
}

/// The owner of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenOwner {
    /// The service account, `NAMESPACE/NAME`.
    pub name: String,
    /// The node of the pod, if it is the token of a pod.
    pub node: Option<TokenNode>,
}

/// A node as the token of a pod names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenNode {
    /// The name of the Node object.
    pub name: String,
    /// The UID of the Node object. A later node of the same name has another one.
    pub uid: String,
}

#[derive(Clone)]
struct Verdict {
    /// The service account, or `None` if the token is not accepted.
    account: Option<TokenOwner>,
    reviewed: Instant,
    review_again: Instant,
}

impl Verdict {
    fn new(account: Option<TokenOwner>) -> Verdict {
        let now = Instant::now();
        Verdict {
            account,
            reviewed: now,
            review_again: now + LIFETIME,
        }
    }

    /// Returns whether the verdict stays valid while the API server does not answer.
    fn is_valid_offline(&self) -> bool {
        self.account.is_some() && self.reviewed.elapsed() < OFFLINE_LIFETIME
    }
}

impl Reviewer {
    /// Creates a reviewer. The client needs permission to create TokenReviews.
    pub fn new(client: &Client, registry: &Registry) -> Reviewer {
        Reviewer {
            client: client.within(REVIEW_TIME),
            state: Mutex::default(),
            changed: Condvar::new(),
            reviews: registry.labelled(
                "firstlight_key_token_reviews_total",
                "Number of reviewed tokens: accepted, refused, or failed if the API server did not answer.",
                ["result"],
            ),
            seconds: registry.add(
                "firstlight_key_token_review_seconds",
                "Time in which the API server reviewed a token.",
            ),
        }
    }

    /// Returns the service account of a caller. Fails if the token is missing or not accepted, or
    /// cannot be reviewed now.
    pub fn account(&self, metadata: &Metadata, peer: Option<IpAddr>) -> Result<TokenOwner, Status> {
        let refused = |text: &str| Status::new(Code::Unauthenticated, text);
        let token = bearer(metadata)
            .ok_or_else(|| refused("expected the metadata entry authorization: Bearer TOKEN"))?;
        let verdict = self.verdict(token, peer)?;
        verdict.ok_or_else(|| {
            refused(
                "the token is not accepted: expected the token of a service account for this audience",
            )
        })
    }

    fn verdict(&self, token: &str, peer: Option<IpAddr>) -> Result<Option<TokenOwner>, Status> {
        let hash = sha256(token.as_bytes());
        let until = Instant::now() + REVIEW_TIME;
        let mut state = self.lock();
        let before = loop {
            match state.verdicts.get(&hash) {
                Some(Entry::Reviewed(verdict)) if Instant::now() < verdict.review_again => {
                    return Ok(verdict.account.clone());
                }
                Some(Entry::Pending) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(unavailable());
                    }
                    state = wait_timeout(&self.changed, state, left);
                }
                Some(Entry::Reviewed(verdict)) if verdict.is_valid_offline() => {
                    break Some(verdict.clone());
                }
                _ => break None,
            }
        };
        if before.is_none() {
            state.charge(peer, Instant::now())?;
            state.make_room();
        }
        state.verdicts.insert(hash, Entry::Pending);
        drop(state);
        // The destructor also runs after a panic, so that no call waits for this review for ever.
        let mut pending = Pending {
            reviewer: self,
            hash,
            verdict: None,
        };
        let verdict = match (self.review(token), before) {
            (Ok(account), _) => Verdict::new(account),
            (Err(_), Some(before)) => {
                log::warn!(
                    "cannot review a caller's token again, so it stays accepted (last review {} s ago)",
                    before.reviewed.elapsed().as_secs()
                );
                Verdict {
                    review_again: Instant::now() + RETRY_INTERVAL,
                    ..before
                }
            }
            (Err(status), None) => return Err(status),
        };
        pending.verdict = Some(verdict.clone());
        Ok(verdict.account)
    }

    fn review(&self, token: &str) -> Result<Option<TokenOwner>, Status> {
        let mut review = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        });
        let deadline = Instant::now() + REVIEW_TIME;
        let ask = |time| {
            self.client
                .within(time)
                .create_as(&TOKEN_REVIEWS.all(), &review)
        };
        let answer = self.seconds.time(|| match ask(REVIEW_TIME) {
            // A kept connection may have been broken for a long time. A second review changes
            // nothing.
            Err(error) if error.is_temporary() && Instant::now() < deadline => {
                ask(deadline.saturating_duration_since(Instant::now()))
            }
            answer => answer,
        });
        let result = match &answer {
            Ok(answer) => Ok(account(answer)),
            Err(error) => {
                log::error!("cannot review a caller's token: {error}");
                Err(unavailable())
            }
        };
        let label = match &result {
            Ok(Some(_)) => "accepted",
            Ok(None) => "refused",
            Err(_) => "failed",
        };
        self.reviews.with([label]).inc();
        if let (Ok(None), Ok(answer)) = (&result, &answer) {
            let why = match &*answer.status.error {
                "" => "no reason was given",
                why => why,
            };
            log::info!("the API server rejected a caller's token: {why:.300}");
        }
        client::wipe(&mut review);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Reviews> {
        lock(&self.state)
    }
}

/// A running review. Its end notifies the waiting calls.
struct Pending<'a> {
    reviewer: &'a Reviewer,
    hash: [u8; 32],
    verdict: Option<Verdict>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut state = self.reviewer.lock();
        match self.verdict.take() {
            Some(verdict) => drop(state.verdicts.insert(self.hash, Entry::Reviewed(verdict))),
            // The next call starts a new review.
            None => drop(state.verdicts.remove(&self.hash)),
        }
        self.reviewer.changed.notify_all();
    }
}

impl Reviews {
    /// Takes one review from the budget of an address. Fails if the budget is used up.
    fn charge(&mut self, peer: Option<IpAddr>, now: Instant) -> Result<(), Status> {
        let full = |(left, at): &(f64, Instant)| {
            left + now.duration_since(*at).as_secs_f64() * PER_SECOND >= BURST
        };
        let busy = || {
            Status::new(
                Code::ResourceExhausted,
                "too many different tokens: try again later",
            )
        };
        let peer = peer.ok_or_else(busy)?;
        if self.peers.len() >= MAX_PEERS {
            self.peers.retain(|_, budget| !full(budget));
        }
        let is_full = self.peers.len() >= MAX_PEERS;
        let (left, at) = match self.peers.get(&peer) {
            Some(budget) => *budget,
            None if is_full => return Err(busy()),
            None => (BURST, now),
        };
        let left = (left + now.duration_since(at).as_secs_f64() * PER_SECOND).min(BURST);
        if left < 1.0 {
            return Err(busy());
        }
        self.peers.insert(peer, (left - 1.0, now));
        Ok(())
    }

    /// Removes expired verdicts. If there are still too many, removes the oldest, refusals first,
    /// because a stranger can cause those at no cost.
    fn make_room(&mut self) {
        if self.verdicts.len() < MAX_VERDICTS {
            return;
        }
        self.verdicts.retain(|_, verdict| match verdict {
            Entry::Pending => true,
            Entry::Reviewed(verdict) => {
                verdict.is_valid_offline() || Instant::now() < verdict.review_again
            }
        });
        while self.verdicts.len() >= MAX_VERDICTS {
            let verdict = self
                .verdicts
                .iter()
                .filter_map(|(hash, verdict)| match verdict {
                    Entry::Reviewed(verdict) => {
                        Some((verdict.account.is_some(), verdict.reviewed, *hash))
                    }
                    Entry::Pending => None,
                });
            // The number of pending reviews is limited by the number of handlers.
            let Some((.., first)) = verdict.min() else {
                return;
            };
            self.verdicts.remove(&first);
        }
    }
}

fn unavailable() -> Status {
    Status::new(
        Code::Unavailable,
        "tokens cannot be reviewed at the moment: try again",
    )
}

/// Returns the token of an `authorization` entry (RFC 6750 §2.1). The scheme is case-insensitive
/// (RFC 9110 §11.1).
fn bearer(metadata: &Metadata) -> Option<&str> {
    let (scheme, token) = metadata.get("authorization")?.split_once(' ')?;
    let token = token.trim();
    let is_token = !token.is_empty()
        && token.len() <= MAX_TOKEN
        && token.bytes().all(|byte| byte.is_ascii_graphic());
    (scheme.eq_ignore_ascii_case("bearer") && is_token).then_some(token)
}

/// Returns the service account in a review, if the token is valid for this audience.
fn account(review: &TokenReview) -> Option<TokenOwner> {
    let status = &review.status;
    let is_for_us = status.audiences.iter().any(|it| it == AUDIENCE);
    if !status.authenticated || !is_for_us {
        return None;
    }
    let account = status.user.username.strip_prefix("system:serviceaccount:");
    let (namespace, name) = account?.split_once(':')?;
    let node = || {
        let extra = &status.user.extra;
        Some(TokenNode {
            name: extra.node_name.first()?.clone(),
            uid: extra.node_uid.first()?.clone(),
        })
    };
    Some(TokenOwner {
        name: format!("{namespace}/{name}"),
        node: node(),
    })
}

/// Returns the node of this pod, as its own token names it. `None` outside of a pod, and for tokens
/// of a Kubernetes before v1.30.
pub fn own_node() -> Option<String> {
    let file = Path::new(client::SERVICE_ACCOUNT).join("token");
    node_in(&Zeroizing::new(fs::read_to_string(file).ok()?))
}

/// Returns the node in a token (RFC 7519), without a check of its signature.
fn node_in(token: &str) -> Option<String> {
    let claims = Zeroizing::new(
        BASE64_URL_SAFE_NO_PAD
            .decode(token.split('.').nth(1)?)
            .ok()?,
    );
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    Some(claims["kubernetes.io"]["node"]["name"].as_str()?.to_owned())
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref());
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn review(status: Value) -> Option<TokenOwner> {
        let review = json!({"kind": "TokenReview", "spec": {}, "status": status});
        account(&serde_json::from_value(review).unwrap())
    }

    #[test]
    fn only_an_authenticated_service_account_for_our_audience_counts() {
        let mut user = json!({"username": "system:serviceaccount:kube-system:join-service"});
        let accepted = |user: &Value| {
            review(json!({"authenticated": true, "audiences": ["a", AUDIENCE], "user": user}))
                .unwrap()
        };
        let mut expected = TokenOwner {
            name: "kube-system/join-service".into(),
            node: None,
        };
        assert_eq!(accepted(&user), expected);
        user["extra"] = json!({"authentication.kubernetes.io/node-name": ["node-1"]});
        assert_eq!(accepted(&user), expected);
        user["extra"]["authentication.kubernetes.io/node-uid"] = json!(["1-2"]);
        expected.node = Some(TokenNode {
            name: "node-1".into(),
            uid: "1-2".into(),
        });
        assert_eq!(accepted(&user), expected);
        for status in [
            json!({"authenticated": false, "audiences": [AUDIENCE], "user": user}),
            json!({"audiences": [AUDIENCE], "user": user}),
            // A server that does not support audiences returns none.
            json!({"authenticated": true, "user": user}),
            json!({"authenticated": true, "audiences": [], "user": user}),
            json!({"authenticated": true, "audiences": ["https://kubernetes.default.svc"], "user": user}),
            json!({"authenticated": true, "audiences": [AUDIENCE], "user": {"username": "system:node:a"}}),
            json!({"authenticated": true, "audiences": [AUDIENCE], "user": {"username": "system:serviceaccount:x"}}),
            json!({"authenticated": true, "audiences": [AUDIENCE]}),
            json!({}),
        ] {
            assert_eq!(review(status.clone()), None, "{status}");
        }
    }

    #[test]
    fn a_pod_learns_its_node_from_its_token() {
        let of = |claims: &str| {
            node_in(&format!(
                "e30.{}.c2ln",
                BASE64_URL_SAFE_NO_PAD.encode(claims)
            ))
        };
        let claims = r#"{"aud":["a"],"kubernetes.io":{"node":{"name":"node-1","uid":"1"},"pod":{"name":"p"}}}"#;
        assert_eq!(of(claims).as_deref(), Some("node-1"));
        for other in [
            r#"{"kubernetes.io":{"pod":{}}}"#,
            r#"{"kubernetes.io":{"node":{"name":1}}}"#,
            "[]",
            "",
        ] {
            assert_eq!(of(other), None);
        }
        for token in ["", "a", "a.b.c", "a.\u{fc}.c"] {
            assert_eq!(node_in(token), None);
        }
    }

    #[test]
    fn a_token_is_had_of_a_bearer_authorization_and_of_nothing_else() {
        let of = |value: &str| {
            let mut metadata = Metadata::new();
            metadata.insert("authorization", value).unwrap();
            bearer(&metadata).map(str::to_owned)
        };
        assert_eq!(of("Bearer abc.def").unwrap(), "abc.def");
        assert_eq!(of("bearer  abc").unwrap(), "abc");
        for value in [
            "abc",
            "Basic abc",
            "Bearer",
            "Bearer a b",
            &format!("Bearer {}", "x".repeat(MAX_TOKEN + 1)),
        ] {
            assert_eq!(of(value), None, "{value:.40}");
        }
        assert_eq!(bearer(&Metadata::new()), None);
    }

    #[test]
    fn an_address_that_sends_many_tokens_is_slowed_down_and_others_are_not() {
        let (mut state, now) = (Reviews::default(), Instant::now());
        let (hostile, other) = (Some([10, 0, 0, 1].into()), Some([10, 0, 0, 2].into()));
        for _ in 0..BURST as usize {
            state.charge(hostile, now).unwrap();
        }
        assert_eq!(
            state.charge(hostile, now).unwrap_err().code(),
            Code::ResourceExhausted
        );
        state.charge(other, now).unwrap();
        let later = now + Duration::from_secs(2);
        state.charge(hostile, later).unwrap();
        state.charge(hostile, later).unwrap();
        assert!(state.charge(hostile, later).is_err());
    }

    #[test]
    fn the_cache_of_verdicts_is_bounded() {
        let (mut state, now) = (Reviews::default(), Instant::now());
        for number in 0..2 * MAX_PEERS as u32 {
            let _ = state.charge(Some(IpAddr::from(number.to_be_bytes())), now);
            state.make_room();
            let account = (number == 0).then(|| TokenOwner {
                name: "a/b".into(),
                node: None,
            });
            state.verdicts.insert(
                sha256(&number.to_be_bytes()),
                Entry::Reviewed(Verdict::new(account)),
            );
        }
        assert!(
            state.verdicts.contains_key(&sha256(&[0; 4])),
            "accepted tokens are kept the longest"
        );
        assert!(state.peers.len() <= MAX_PEERS && state.verdicts.len() <= MAX_VERDICTS);
        state
            .charge(Some([255; 4].into()), now + Duration::from_secs(20))
            .unwrap();
        assert!(state.peers.len() < MAX_PEERS);
    }
}
