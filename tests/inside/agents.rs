//! The accounts of agents, with the rights of their published manifests (`tests/data/agents`). Root on a node gets the token of each
//! pod there, so of each of these accounts. With it, root can write no fact by which the services decide ([`attempts`]), while the
//! agents go on ([`work`]).

mod attempts;
mod work;

use std::cell::OnceCell;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use common::volumes::add_pod;
use kubernetes::client::{CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, NODES, ROLE_BINDINGS, ROLES};
use kubernetes::yaml;
use serde_json::{Value, json};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::attacker::{Inside, Kubelet, eventually, settings, token_volume};

const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const JSON_PATCH: &str = "application/json-patch+json";
const APPLY: &str = "application/apply-patch+yaml";
const WHOLE: &str = "application/json";
const KUBE_SYSTEM: &str = "/api/v1/namespaces/kube-system";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// A request to the API server.
struct Call {
    method: &'static str,
    path: String,
    kind: &'static str,
    body: Value,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// The account has no right to it.
    NoRight,
    /// Admission refuses it.
    Refused,
    /// The API server has done it.
    Done,
}

fn patch(kind: &'static str, path: &str, body: Value) -> Call {
    Call {
        method: "PATCH",
        path: path.into(),
        kind,
        body,
    }
}

fn send(method: &'static str, path: &str, body: Value) -> Call {
    Call {
        method,
        path: path.into(),
        kind: WHOLE,
        body,
    }
}

/// An account of an agent, by the token of a pod on a node.
struct Account {
    /// The agent.
    name: String,
    token: String,
    server: String,
    agent: ureq::Agent,
}

impl Account {
    /// Puts a pod of this agent onto the node, and takes its token.
    fn on(inside: &Inside, agent: &str, kubelet: &Kubelet) -> Account {
        let (namespace, name) = install(inside, agent);
        let account = (&*namespace, &*name);
        let pod = format!("{agent}-{}", kubelet.name);
        let uid = add_pod(
            &inside.admin,
            account,
            &pod,
            &kubelet.name,
            token_volume(&[""]),
        );
        let roots = Certificate::from_pem(inside.cluster.ca().0.as_bytes()).unwrap();
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::from(vec![roots]))
            .unversioned_rustls_crypto_provider(tls::provider());
        let config = ureq::Agent::config_builder()
            .tls_config(tls.build())
            .proxy(None)
            .http_status_as_error(false);
        Account {
            name: agent.into(),
            token: token(kubelet, account, &pod, &uid),
            server: inside.cluster.server(),
            agent: config.build().into(),
        }
    }

    /// Sends a request. Returns the status and the answer.
    fn send(&self, call: &Call) -> (u16, String) {
        let query = match call.kind {
            APPLY => "?fieldManager=agent&force=true",
            _ => "",
        };
        let request = ureq::http::Request::builder()
            .method(call.method)
            .uri(format!("{}{}{query}", self.server, call.path))
            .header("Authorization", format!("Bearer {}", self.token))
            .header("Content-Type", call.kind);
        let request = request.body(call.body.to_string()).unwrap();
        let mut answer = self.agent.run(request).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), text)
    }

    /// Tries a request that should be refused.
    fn attempt(&self, call: &Call) -> Outcome {
        let (status, text) = self.send(call);
        match status {
            200..=299 => Outcome::Done,
            403 if text.contains(" cannot ") => Outcome::NoRight,
            403 if text.contains("denied ") => Outcome::Refused,
            _ => panic!("{} {}: {status} {text}", call.method, call.path),
        }
    }

    /// Sends a request that the agent makes.
    fn goes_on(&self, call: &Call) {
        let (status, text) = self.send(call);
        let (name, method, path) = (&self.name, call.method, &call.path);
        assert!(
            (200..300).contains(&status),
            "{name}: {method} {path}: {status} {text}"
        );
    }
}

/// Requests the token of a pod. The API server learns a moment later that the pod is on this node.
fn token(kubelet: &Kubelet, account: (&str, &str), pod: &str, uid: &str) -> String {
    let token = OnceCell::new();
    eventually("the token of a pod", || {
        let got = kubelet.token(account, pod, uid, &[]);
        got.is_ok_and(|got| token.set(got).is_ok())
    });
    token.into_inner().unwrap()
}

/// Returns the names of the agents.
pub fn agents() -> Vec<String> {
    let names = fs::read_dir(folder())
        .unwrap()
        .map(|it| it.unwrap().file_name());
    let names = names.filter_map(|it| Some(it.to_str()?.strip_suffix(".yaml")?.to_owned()));
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/data/agents"))
}

/// Gives the account of an agent its rights, unless it has them; returns its namespace and its name.
pub fn install(inside: &Inside, agent: &str) -> (String, String) {
    let text = fs::read_to_string(folder().join(format!("{agent}.yaml"))).unwrap();
    let documents = yaml::documents(&text).unwrap();
    let text = |of: &Value, field: &str| of["metadata"][field].as_str().unwrap().to_owned();
    let account = (
        text(&documents[0], "namespace"),
        text(&documents[0], "name"),
    );
    let subject = json!({"kind": "ServiceAccount", "namespace": account.0, "name": account.1});
    for role in &documents[1..] {
        let name = text(role, "name");
        let binding = |kind: &str| {
            json!({"metadata": {"name": name}, "subjects": [subject],
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}})
        };
        let (roles, bindings, kind) = match role["metadata"]["namespace"].as_str() {
            None => (
                CLUSTER_ROLES.all(),
                CLUSTER_ROLE_BINDINGS.all(),
                "ClusterRole",
            ),
            Some(at) => (
                ROLES.in_namespace(at),
                ROLE_BINDINGS.in_namespace(at),
                "Role",
            ),
        };
        inside.admin.create_if_absent(&roles, role).unwrap();
        inside
            .admin
            .create_if_absent(&bindings, &binding(kind))
            .unwrap();
    }
    account
}

/// Returns the cluster of these tests. In that of the others, such accounts may have further rights.
fn inside() -> &'static Inside {
    static CLUSTER: OnceLock<Inside> = OnceLock::new();
    CLUSTER.get_or_init(|| Inside::start(&settings()))
}

/// Returns a new worker with an address of its own.
fn worker<'a>(inside: &'a Inside, name: &str) -> Kubelet<'a> {
    static LAST: AtomicU16 = AtomicU16::new(0);
    let [high, low] = LAST.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    inside.worker(name, &format!("10.9.{high}.{low}"))
}

/// An agent that may write some of these facts: it writes them for each node, and it runs on control planes.
const CLOUD: &str = "cloud-controller-manager";

fn node_of(inside: &Inside, name: &str) -> Value {
    inside.admin.get(&NODES.named(name)).unwrap()
}
