//! Accepted members have attestation results, which relying parties verify: one of OpenID Connect (coreos/go-oidc), and project Veraison's
//! reader of EAR.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ::services::member_controller::watch::signing::{BEFORE, Keys, SIGNS};
use ::services::member_controller::watch::{self, Place};
use ::services::member_controller::{MemberController, Options};
use base::crypto::Secret;
use base::stop::Stop;
use base::text::hex;
use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use kubernetes::client::{CONFIG_MAPS, Client, Error, SECRETS, Selector};
use kubernetes::wrapping_key;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use support::foreign::{go_program, rust_program};
use verifier::qemu_vtpm;

use crate::kube_apiserver::Cluster;
use crate::setup::*;
use crate::swtpm::{PCR_4, Swtpm};
use crate::watch::{Member, Node, metric, options, two_workers};

const AUDIENCE: &str = "firstlight-attestation-result";
const SECRET: &str = "join-attestation-keys";

/// Returns an address at which nothing listens.
fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

fn issuing(setup: &Setup, cluster: &Cluster, url: &str, listen: SocketAddr) -> Options {
    let place = Place {
        url: url.into(),
        listen,
    };
    let judging = setup.judging();
    wrapping_key::place(&judging.wrapping_key_dir, &key_of_control_planes()).unwrap();
    let watch = watch::Options {
        issuer: Some(place),
        ..options()
    };
    Options {
        watch: Some((watch, judging)),
        ..setup.options(cluster)
    }
}

fn key_of_control_planes() -> Secret {
    Secret::new(vec![8; 32])
}

/// Returns status line, head and body of an answer.
fn get(address: SocketAddr, target: &str) -> (u16, String, String) {
    ask(
        address,
        &format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n"),
    )
}

fn ask(address: SocketAddr, request: &str) -> (u16, String, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.into(), body.into())
}

/// Returns the token of a node, if it has one.
fn token(address: SocketAddr, node: &Node) -> Option<String> {
    let (status, head, body) = get(address, &format!("/nodes/{}", node.name));
    match status {
        200 => {
            assert!(head.contains("Content-Type: application/eat+jwt"), "{head}");
            Some(body)
        }
        // 503: the service has just started
        404 | 503 => None,
        other => panic!("{other} {body}"),
    }
}

/// Waits for a token with this property.
fn eventually_token(
    address: SocketAddr,
    node: &Node,
    what: &str,
    is_so: impl Fn(&str) -> bool,
) -> String {
    let found = std::cell::RefCell::new(String::new());
    eventually_within(60, &format!("{} has a result {what}", node.name), || {
        let token = token(address, node).filter(|token| is_so(token));
        token.is_some_and(|token| {
            found.replace(token);
            true
        })
    });
    found.into_inner()
}

fn part(token: &str, at: usize) -> Value {
    let part = token.split('.').nth(at).unwrap();
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap()
}

fn kid(token: &str) -> String {
    part(token, 0)["kid"].as_str().unwrap().to_owned()
}

/// The digest of a policy, as a result names it.
fn policy_id(text: &str) -> String {
    format!("sha256:{}", hex(digest(&SHA256, text.as_bytes()).as_ref()))
}

fn policy_of(token: &str) -> String {
    let policies = &part(token, 1)["submods"]["node"]["ear_appraisal_policy_ids"];
    policies[0].as_str().unwrap().to_owned()
}

/// A relying party of OpenID Connect, whose clock is `ahead`. Returns the claims, or why it refuses the token.
fn verify(issuer: &str, audience: &str, ahead: u64, token: &str) -> Result<Value, String> {
    let mut party = Command::new(go_program("oidc_go", env!("CARGO_TARGET_TMPDIR")))
        .args([issuer, audience, &ahead.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    party
        .stdin
        .take()
        .unwrap()
        .write_all(token.as_bytes())
        .unwrap();
    let output = party.wait_with_output().unwrap();
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

fn verifies(issuer: &str, token: &str) -> bool {
    verify(issuer, AUDIENCE, 0, token).is_ok()
}

/// Returns what project Veraison's library reads in the claims.
fn read_ear(claims: &Value) -> String {
    let mut reader = Command::new(rust_program("ear_peer", "ear-peer"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = reader.stdin.take().unwrap();
    input.write_all(claims.to_string().as_bytes()).unwrap();
    drop(input);
    let output = reader.wait_with_output().unwrap();
    assert!(output.status.success(), "{claims}");
    String::from_utf8(output.stdout).unwrap()
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// A policy that pins the software, and these TPMs.
fn policy_for(keys: &[&str], name: &str) -> String {
    let zeros = "00".repeat(32);
    json!({
        "name": name, "attestationKeys": keys,
        "measurements": {
            "4": {"expected": hex(&PCR_4), "warnOnly": false}, "15": {"expected": zeros, "warnOnly": false},
        },
    })
    .to_string()
}

fn key_of(tpm: &Swtpm) -> String {
    let key = qemu_vtpm::VARIANT.key_name(&tpm.location().parse().unwrap());
    key.unwrap().unwrap().to_string()
}

/// A cluster with two members, and the file of its policy.
struct Members {
    nodes: [Node; 2],
    keys: [String; 2],
    file: PathBuf,
}

impl Members {
    /// Returns them with the URL and the address of an issuer of their results, which is permitted but does not run yet.
    fn join(setup: &Setup) -> (Members, String, SocketAddr) {
        let listen = free();
        let issuer = format!("http://{listen}");
        setup.permit_watch_of(&issuer);
        let nodes = two_workers(setup);
        let keys = [key_of(&nodes[0].tpm), key_of(&nodes[1].tpm)];
        let file = setup.dir.path().join("attestationConfig");
        (Members { nodes, keys, file }, issuer, listen)
    }

    /// Writes a policy that accepts the first nodes. Returns its text.
    fn accept(&self, count: usize, name: &str) -> String {
        let keys: Vec<&str> = self.keys.iter().take(count).map(String::as_str).collect();
        let policy = policy_for(&keys, name);
        fs::write(&self.file, &policy).unwrap();
        policy
    }
}

/// Waits until a node has no result, neither at the server nor in the cluster.
fn eventually_none(setup: &Setup, address: SocketAddr, node: &Node) {
    let at = CONFIG_MAPS
        .in_namespace("kube-system")
        .named(&format!("join-attested-{}", node.name));
    eventually_within(60, &format!("{} has no result", node.name), || {
        setup.admin.find(&at).unwrap().is_none()
    });
    assert_eq!(get(address, &format!("/nodes/{}", node.name)).0, 404);
}

fn stored_keys(setup: &Setup) -> Vec<Value> {
    let secret = SECRETS.in_namespace("kube-system").named(SECRET);
    let secret = setup.admin.get(&secret).unwrap();
    let text = secret["data"]["keys"].as_str().unwrap();
    let text = BASE64_STANDARD.decode(text).unwrap();
    // a reader of the Secret has no keys
    assert!(Keys::parse(&text).is_err());
    let key = wrapping_key::for_attestation_keys(&key_of_control_planes());
    serde_json::from_slice(&wrapping_key::decrypt(&text, &key).unwrap()).unwrap()
}

fn store(setup: &Setup, text: &str) {
    let secret = SECRETS.in_namespace("kube-system").named(SECRET);
    let change = json!({"data": {"keys": BASE64_STANDARD.encode(text)}});
    setup.admin.merge(&secret, &change).unwrap();
}

/// Replaces the times at which the keys begin to sign.
fn set_times(setup: &Setup, times: &[u64]) {
    let mut keys = stored_keys(setup);
    assert_eq!(keys.len(), times.len());
    for (key, from) in keys.iter_mut().zip(times) {
        key["from"] = (*from).into();
    }
    let key = wrapping_key::for_attestation_keys(&key_of_control_planes());
    let text = Value::from(keys).to_string();
    store(
        setup,
        &wrapping_key::encrypt(text.as_bytes(), &key).unwrap(),
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn relying_parties_verify_the_result_of_an_accepted_node_and_no_other_token() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (members, issuer, listen) = Members::join(&setup);
    let [first, second] = &members.nodes;
    let _servers = [first.serve(), second.serve()];
    let policy = members.accept(2, "image 1");
    drop(setup.controller.take());
    let options_of = |url: &str, listen| issuing(&setup, cluster, url, listen);
    let service = MemberController::start(options_of(&issuer, listen)).unwrap();
    assert_eq!(service.results_addr(), Some(listen));
    let result = eventually_token(listen, first, "at all", |_| true);

    // OpenID Connect
    let claims = verify(&issuer, AUDIENCE, 0, &result).unwrap();
    assert_eq!(claims["sub"], first.name);
    let life = claims["exp"].as_f64().unwrap() - claims["iat"].as_f64().unwrap();
    assert_eq!(life, 62.0);
    let node = &claims["submods"]["node"];
    let uid = setup
        .admin
        .get(&kubernetes::client::NODES.named(first.name))
        .unwrap()["metadata"]["uid"]
        .clone();
    assert_eq!(
        node["ear_verifier_claims"],
        json!({
            "variant": "qemu-vtpm", "machine": first.record(&setup).machine, "node-uid": uid,
            "image": node["ear_verifier_claims"]["image"],
        })
    );
    // EAR
    let read = read_ear(&part(&result, 1));
    let build = concat!("member-controller ", env!("CARGO_PKG_VERSION"));
    let expected = format!(
        "tag:ietf.org,2026:rats/ear#04 affirming\n2 3 0\n{}\nFirstlight {build}\n",
        policy_id(&policy)
    );
    assert_eq!(read, expected);

    // what a relying party refuses
    let [head, body, signature] = [0, 1, 2].map(|at| result.split('.').nth(at).unwrap());
    let mut other = part(&result, 1);
    other["sub"] = second.name.into();
    let altered = BASE64_URL_SAFE_NO_PAD.encode(other.to_string());
    let foreign = Keys::none().renewed(now(), 60).unwrap();
    let foreign = foreign.sign(&part(&result, 1), now()).unwrap();
    let none = BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#);
    for (audience, ahead, token, expected) in [
        (AUDIENCE, 3600, result.clone(), "expired"),
        ("sts.example.com", 0, result.clone(), "expected audience"),
        (
            AUDIENCE,
            0,
            format!("{head}.{altered}.{signature}"),
            "failed to verify",
        ),
        (AUDIENCE, 0, foreign, "failed to verify"),
        (AUDIENCE, 0, format!("{none}.{body}."), "malformed"),
    ] {
        let why = verify(&issuer, audience, ahead, &token).unwrap_err();
        assert!(why.contains(expected), "{expected}: {why}");
    }

    // another replica answers the same
    let elsewhere = free();
    let replica = MemberController::start(options_of(&issuer, elsewhere)).unwrap();
    eventually("the replica knows the keys", || {
        get(elsewhere, "/keys").2 == get(listen, "/keys").2
    });
    let known = eventually_token(elsewhere, second, "at the replica", |_| true);
    assert!(verifies(&issuer, &known));
    assert_eq!(metric(&replica, "firstlight_watch_leader"), Some(0.0));
    drop(replica);

    // nothing else is at this port, and no secret
    let (status, head, keys) = get(listen, "/keys");
    assert!(status == 200 && head.contains("application/json"), "{head}");
    let key: Value = serde_json::from_str(&keys).unwrap();
    let members_of_key = key["keys"][0].as_object().unwrap();
    assert!(!members_of_key.contains_key("d"), "{keys}");
    for target in [
        "/",
        "/metrics",
        "/nodes/",
        "/nodes/worker-9",
        "/nodes/../keys",
    ] {
        assert_eq!(get(listen, target).0, 404, "{target}");
    }
    assert_eq!(ask(listen, "POST /keys HTTP/1.1\r\nHost: x\r\n\r\n").0, 405);
    drop(service);

    // the account uses only its own Secret
    let account = Client::new(setup.account(cluster, MEMBER_CONTROLLER), &Stop::new());
    let secrets = SECRETS.in_namespace("kube-system");
    let code = |answer: Result<(), Error>| answer.err().and_then(|error| error.code());
    let own = secrets.named(SECRET);
    assert_eq!(code(account.get(&own).map(drop)), None);
    assert_eq!(code(account.delete(&own)), Some(403));
    let list = account.list(&secrets, &Selector::default());
    assert_eq!(code(list.map(drop)), Some(403));
    setup
        .admin
        .create(&secrets, &json!({"metadata": {"name": "somebody-s"}}))
        .unwrap();
    assert_eq!(
        code(account.get(&secrets.named("somebody-s")).map(drop)),
        Some(403)
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn tokens_verify_before_and_after_the_keys_are_rotated() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (members, issuer, listen) = Members::join(&setup);
    let first = &members.nodes[0];
    let _server = first.serve();
    members.accept(2, "image 1");
    drop(setup.controller.take());
    let _service = MemberController::start(issuing(&setup, cluster, &issuer, listen)).unwrap();
    let old = eventually_token(listen, first, "at all", |_| true);
    let count = || {
        let keys: Value = serde_json::from_str(&get(listen, "/keys").2).unwrap();
        keys["keys"].as_array().unwrap().len()
    };
    assert_eq!(count(), 1);

    // a day before its end, the next key is published, and does not sign
    set_times(&setup, &[now() - SIGNS + BEFORE]);
    eventually("the next key is published", || count() == 2);
    let same = eventually_token(listen, first, "again", |token| token != old);
    assert_eq!(kid(&same), kid(&old));
    assert!(verifies(&issuer, &old) && verifies(&issuer, &same));
    // it signs, and tokens of the key before are still verified
    set_times(&setup, &[now() - SIGNS, now()]);
    let new = eventually_token(listen, first, "by the new key", |token| {
        kid(token) != kid(&old)
    });
    assert!(verifies(&issuer, &same) && verifies(&issuer, &new));
    assert_eq!(count(), 2);
    // until they have expired
    set_times(&setup, &[now() - SIGNS - 3600, now() - 3600]);
    eventually("the old key is removed", || count() == 1);
    assert!(!verifies(&issuer, &same) && verifies(&issuer, &new));

    // the operator replaces a key that has leaked at once
    let secret = SECRETS.in_namespace("kube-system").named(SECRET);
    setup.admin.delete(&secret).unwrap();
    let replaced = eventually_token(listen, first, "by a new key", |token| {
        kid(token) != kid(&new)
    });
    assert!(verifies(&issuer, &replaced) && !verifies(&issuer, &new));
    // keys in clear, of an earlier version, may have been read
    store(&setup, &Value::from(stored_keys(&setup)).to_string());
    let encrypted = eventually_token(listen, first, "by an encrypted key", |token| {
        kid(token) != kid(&replaced)
    });
    assert!(verifies(&issuer, &encrypted) && !verifies(&issuer, &replaced));
    assert_eq!(stored_keys(&setup).len(), 1);
    // a Secret that nobody can read stops the tokens, and not the watch
    store(&setup, "x");
    eventually("no keys are published", || get(listen, "/keys").0 == 503);
    let node = format!("/nodes/{}", first.name);
    assert_eq!(get(listen, &node).0, 503);
    first.eventually(&setup, "True Accepted");
    setup.admin.delete(&secret).unwrap();
    let repaired = eventually_token(listen, first, "by a new key", |_| true);
    assert!(verifies(&issuer, &repaired));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_that_is_refused_or_judged_by_another_policy_has_no_result() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (members, issuer, listen) = Members::join(&setup);
    let [first, second] = &members.nodes;
    let (_other, mut server) = (first.serve(), Some(second.serve()));
    let mut policies = BTreeMap::new();
    let policy = members.accept(2, "image 1");
    policies.insert(1, policy_id(&policy));
    setup.start_controller(issuing(&setup, cluster, &issuer, listen));
    for node in &members.nodes {
        let result = eventually_token(listen, node, "at all", |_| true);
        assert_eq!(policy_of(&result), policies[&1]);
    }

    // from the moment at which the policy changes, no result by the old one is shown
    policies.insert(2, policy_id(&members.accept(2, "image 2")));
    for node in &members.nodes {
        for _ in 0..20 {
            let shown = token(listen, node);
            assert!(shown.is_none_or(|shown| policy_of(&shown) == policies[&2]));
        }
        eventually_token(listen, node, "by the new policy", |shown| {
            policy_of(shown) == policies[&2]
        });
    }

    // a node that the policy refuses
    members.accept(1, "image 3");
    second.eventually(&setup, "False");
    eventually_none(&setup, listen, second);
    eventually_token(listen, first, "still", |_| true);
    members.accept(2, "image 4");
    let mut last = eventually_token(listen, second, "again", |_| true);

    // an older copy of its disk
    let generations = second.root.path().join("firstlight/generations");
    let recorded = || second.record(&setup).generation;
    eventually("its generation is recorded", || {
        recorded().starts_with("1-")
    });
    let copy = fs::read(&generations).unwrap();
    server.take();
    server = Some(second.serve());
    eventually("the next one is recorded", || recorded().starts_with("2-"));
    last = eventually_token(listen, second, "of the second boot", |token| *token != last);
    assert!(verifies(&issuer, &last));
    server.take();
    fs::write(&generations, copy).unwrap();
    server = Some(second.serve());
    second.eventually(&setup, "False OldDisk");
    eventually_none(&setup, listen, second);
    let accepted = json!({"data": {"generation": null}});
    setup.admin.merge(&second.record_at(), &accepted).unwrap();
    eventually_token(listen, second, "after the operator accepts it", |_| true);

    // a node that is silent
    server.take();
    second.eventually(&setup, "Unknown Unreachable");
    eventually_none(&setup, listen, second);
    server = Some(second.serve());
    eventually_token(listen, second, "when it answers again", |_| true);

    // a record without its machine: anybody could answer
    let nameless = json!({"data": {"machine": ""}});
    setup.admin.merge(&second.record_at(), &nameless).unwrap();
    second.eventually(&setup, "Unknown NoRecord");
    eventually_none(&setup, listen, second);

    // policies that pin nothing: they accept the node, but it gets no result
    let zeros = "00".repeat(32);
    let any_tpm = crate::watch::policy(&hex(&PCR_4));
    let any_image = json!({
        "attestationKeys": members.keys, "exceptions": ["any-image"], "measurements": {"15": {"expected": zeros, "warnOnly": false}},
    });
    for (open, name) in [(any_tpm, "image 5"), (any_image.to_string(), "image 6")] {
        fs::write(&members.file, open).unwrap();
        eventually_none(&setup, listen, first);
        assert!(first.condition(&setup).starts_with("True Accepted"));
        members.accept(2, name);
        eventually_token(listen, first, "by a policy that pins it", |_| true);
    }
    let count = |result: &str| {
        let line = format!("firstlight_watch_tokens_total{{result=\"{result}\"}}");
        metric(setup.controller(), &line).unwrap_or(0.0)
    };
    assert!(count("issued") > 5.0 && count("withdrawn") >= 6.0 && count("withheld") >= 2.0);

    // with its Node, the garbage collector of a cluster removes the result: it names its owner
    let map = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("join-attested-worker-0");
    let map = setup.admin.get(&map).unwrap();
    let owner = &map["metadata"]["ownerReferences"][0];
    let node = setup
        .admin
        .get(&kubernetes::client::NODES.named(first.name))
        .unwrap();
    assert_eq!(owner["uid"], node["metadata"]["uid"]);
    assert_eq!(owner["kind"], "Node");
    drop(server);
}

/// Passes connections to a member on, one at a time, when it may: a network between the member controller and a member.
struct Gate {
    at: Ipv4Addr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    is_open: AtomicBool,
    /// Whether a connection waits.
    waits: AtomicBool,
    is_over: AtomicBool,
}

impl Gate {
    /// Listens where a node should answer, and connects to its member elsewhere.
    fn start(at: Ipv4Addr, member: Ipv4Addr) -> Gate {
        let listener = TcpListener::bind((at, 9000)).unwrap();
        let state = Arc::new(State::default());
        let passing = state.clone();
        let thread = thread::spawn(move || {
            for near in listener.incoming().map(Result::unwrap) {
                while !passing.is_open.load(Ordering::SeqCst) {
                    passing.waits.store(true, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(10));
                }
                passing.waits.store(false, Ordering::SeqCst);
                if passing.is_over.load(Ordering::SeqCst) {
                    return;
                }
                pass(&near, &TcpStream::connect((member, 9000)).unwrap());
            }
        });
        Gate {
            at,
            state,
            thread: Some(thread),
        }
    }

    /// Lets a question wait, makes a change, and lets the question go on.
    fn change_while_it_asks(&self, change: impl FnOnce()) {
        self.state.is_open.store(false, Ordering::SeqCst);
        eventually("a question waits", || {
            self.state.waits.load(Ordering::SeqCst)
        });
        change();
        self.state.is_open.store(true, Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        self.state.is_open.store(true, Ordering::SeqCst);
        // the thread waits for a connection
        let _ = TcpStream::connect((self.at, 9000));
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))));
    }
}

/// Passes bytes on in both directions until both peers have ended.
fn pass(near: &TcpStream, far: &TcpStream) {
    let copy = |mut from: &TcpStream, mut to: &TcpStream| {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    };
    thread::scope(|scope| {
        scope.spawn(|| copy(near, far));
        copy(far, near);
    });
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn no_result_is_issued_if_policy_or_record_change_while_the_node_is_asked() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (members, issuer, listen) = Members::join(&setup);
    let first = &members.nodes[0];
    let elsewhere = Ipv4Addr::new(127, 42, 2, 150);
    let _server = Member::start(&first.tpm, elsewhere, first.root.path());
    let gate = Gate::start(first.address, elsewhere);
    members.accept(2, "image 1");
    drop(setup.controller.take());
    let service = MemberController::start(issuing(&setup, cluster, &issuer, listen)).unwrap();
    let count = |result: &str| {
        let line = format!("firstlight_watch_tokens_total{{result=\"{result}\"}}");
        metric(&service, &line).unwrap_or(0.0)
    };
    // both policies accept the node
    let mut policy = String::new();
    gate.change_while_it_asks(|| policy = members.accept(2, "image 2"));
    eventually("the result is withheld", || count("withheld") > 0.0);
    let result = eventually_token(listen, first, "by the new policy", |_| true);
    assert_eq!(policy_of(&result), policy_id(&policy));

    // so do both records
    let before = count("withheld");
    gate.change_while_it_asks(|| {
        let other = json!({"data": {"disk": disk(7)}});
        setup.admin.merge(&first.record_at(), &other).unwrap();
    });
    eventually("the result is withheld and withdrawn", || {
        count("withheld") > before && count("withdrawn") == 1.0
    });
    eventually_token(listen, first, "by the new record", |_| true);
}
