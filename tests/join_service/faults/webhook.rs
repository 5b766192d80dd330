//! An admission webhook in the test. The API server calls it before each write of the join
//! service's account, so that a test can act at exactly that step. It answers over HTTP/1.1, with
//! one request for each connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{Client, Resource};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

const CONFIGURATIONS: Resource = Resource::cluster(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
);
const NAME: &str = "join-service-writes";
/// The message in the API server's log for a write that a test refuses.
const REFUSED: &str = "not in this test";

/// Decides on a write (an AdmissionRequest): returns whether it is permitted.
type Judge = Box<dyn FnMut(&Value) -> bool + Send>;

/// The webhook. It is removed from the API server when dropped.
pub struct Webhook {
    admin: Client,
    judge: Arc<Mutex<Judge>>,
}

impl Webhook {
    /// Permits everything until [`Webhook::set`].
    pub fn start(admin: &Client) -> Webhook {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![certificate.der().clone()], key)
                .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let judge: Arc<Mutex<Judge>> = Arc::new(Mutex::new(Box::new(|_| true)));
        let judging = judge.clone();
        let config = Arc::new(config);
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (config, judge) = (config.clone(), judging.clone());
                thread::spawn(move || {
                    let connection = ServerConnection::new(config).unwrap();
                    answer(StreamOwned::new(connection, socket), &judge)
                });
            }
        });
        let webhook = Webhook {
            admin: admin.clone(),
            judge,
        };
        webhook.register(address, &certificate.pem());
        webhook
    }

    fn register(&self, address: SocketAddr, ca: &str) {
        let rule = |group: &str, resource: &str| json!({"apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": ["*"]});
        let account =
            "request.userInfo.username == 'system:serviceaccount:kube-system:join-service'";
        let webhook = json!({
            "name": "writes.join-service.test",
            "clientConfig": {"url": format!("https://{address}/"), "caBundle": BASE64_STANDARD.encode(ca)},
            "rules": [rule("", "configmaps"), rule("", "secrets"), rule("coordination.k8s.io", "leases")],
            "matchConditions": [{"name": "by-the-join-service", "expression": account}],
            // A failed test must not block others.
            "failurePolicy": "Ignore", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 30,
        });
        self.admin
            .delete_if_there(&CONFIGURATIONS.named(NAME))
            .unwrap();
        self.admin
            .create(
                &CONFIGURATIONS.all(),
                &json!({"metadata": {"name": NAME}, "webhooks": [webhook]}),
            )
            .unwrap();
    }

    /// Calls this for each write from now on.
    pub fn set(&self, judge: impl FnMut(&Value) -> bool + Send + 'static) {
        *self.judge.lock().unwrap() = Box::new(judge);
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.admin.delete_if_there(&CONFIGURATIONS.named(NAME));
    }
}

fn answer(mut stream: impl Read + Write, judge: &Mutex<Judge>) {
    let mut text = Vec::new();
    let body = loop {
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer) {
            Ok(len @ 1..) => text.extend(&buffer[..len]),
            _ => return,
        }
        if let Some(end) = text.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = str::from_utf8(&text[..end]).unwrap().to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .unwrap();
            if text.len() >= end + 4 + length.parse::<usize>().unwrap() {
                break serde_json::from_slice::<Value>(&text[end + 4..]).unwrap();
            }
        }
    };
    let request = &body["request"];
    let allowed = judge.lock().unwrap()(request);
    let mut response = json!({"uid": request["uid"], "allowed": allowed});
    if !allowed {
        response["status"] = json!({"code": 403, "message": REFUSED});
    }
    let review =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}).to_string();
    let length = review.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let _ = stream
        .write_all((head + &review).as_bytes())
        .and_then(|()| stream.flush());
}
