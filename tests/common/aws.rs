//! AWS: moto serves the APIs, and checks signatures and permissions. The instance metadata service is a server that follows "Use the
//! Instance Metadata Service to access instance metadata" in the EC2 User Guide.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, SystemTime};

use base::machines::Cloud;
use base::time;
use cloud_api::Service;
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::python;

use crate::cloud_server::{self as server, Answer, Request};

/// A bcrypt hash of an init secret.
pub const HASH: &str = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";
const LATEST: &str = "/latest/";

/// The instance metadata service of one instance.
#[derive(Default)]
pub struct Imds {
    /// Its answer for each path below `/latest/`.
    pub content: Mutex<Vec<(String, String)>>,
    /// The number of the valid token.
    pub token: AtomicU64,
    /// How many tokens and how many credentials it has given.
    pub tokens: AtomicUsize,
    pub credentials: AtomicUsize,
}

impl Imds {
    /// Returns the service of an instance, as `aws.py` describes it, with its URL.
    /// `tags` and `network` are those of the tests' cluster if the description has none.
    pub fn start(machine: &Value, credentials: &Value) -> (Arc<Imds>, String) {
        let imds = Arc::new(Imds::default());
        let role = machine["role"].as_str().unwrap();
        let tags = json!({"constellation-role": role, "constellation-uid": "constell1", "constellation-init-secret-hash": HASH});
        let tags = machine["tags"].as_object().or(tags.as_object()).unwrap();
        for (name, value) in tags {
            let value = value.as_str().unwrap();
            imds.set(&format!("meta-data/tags/instance/{name}"), value);
        }
        let network = machine["network"].as_str().unwrap_or("10.7.0.0/16");
        for (path, content) in [
            ("dynamic/instance-identity/document", machine.to_string()),
            ("meta-data/iam/security-credentials/", role.to_owned()),
            ("meta-data/mac", "02:29:96:8f:6a:2d".into()),
        ] {
            imds.set(path, &content);
        }
        imds.set(
            &format!("meta-data/iam/security-credentials/{role}"),
            &credentials.to_string(),
        );
        imds.set(
            "meta-data/network/interfaces/macs/02:29:96:8f:6a:2d/vpc-ipv4-cidr-blocks",
            &format!("{network}\n"),
        );
        let serving = imds.clone();
        let url = server::start(move |request| serving.answer(request));
        (imds, url)
    }

    /// Sets the answer of a path.
    pub fn set(&self, path: &str, content: &str) {
        let mut all = self.content.lock().unwrap();
        all.retain(|(other, _)| other != path);
        all.push((path.to_owned(), content.to_owned()));
    }

    /// Removes a path.
    pub fn remove(&self, path: &str) {
        self.content
            .lock()
            .unwrap()
            .retain(|(other, _)| other != path);
    }

    fn answer(&self, request: &Request) -> Answer {
        let path = request.path.strip_prefix(LATEST).unwrap_or_default();
        let valid = format!("token-{}==", self.token.load(Ordering::SeqCst));
        if path == "api/token" {
            let ttl = request.field("x-aws-ec2-metadata-token-ttl-seconds");
            let ttl = ttl.and_then(|ttl| ttl.parse().ok());
            if request.method != "PUT" {
                return Answer::text(405, "");
            }
            if request.field("x-forwarded-for").is_some() {
                return Answer::text(403, "");
            }
            if !ttl.is_some_and(|ttl: u32| (1..=21_600).contains(&ttl)) {
                return Answer::text(400, "");
            }
            self.tokens.fetch_add(1, Ordering::SeqCst);
            return Answer::text(200, valid).with("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", 21_600);
        }
        if request.method != "GET" || request.field("x-aws-ec2-metadata-token") != Some(&*valid) {
            return Answer::text(401, "");
        }
        if path.starts_with("meta-data/iam/security-credentials/") && !path.ends_with('/') {
            self.credentials.fetch_add(1, Ordering::SeqCst);
        }
        let content = self.content.lock().unwrap();
        match content.iter().find(|(other, _)| other == path) {
            Some((_, content)) => Answer::text(200, content),
            None => Answer::new(404, "text/html", "<h1>404 - Not Found</h1>"),
        }
    }
}

/// moto, with the resources of a cluster.
pub struct Moto {
    /// The output of `aws.py`.
    pub cluster: Value,
    _process: Child,
    /// Standard input and output of the process. When the input closes, moto ends.
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Moto {
    /// Returns the instance that all tests share. It ends when its standard input closes, so it ends with this process.
    pub fn get() -> &'static Moto {
        static MOTO: LazyLock<Moto> = LazyLock::new(Moto::start);
        &MOTO
    }

    /// Starts an instance for a test that changes the cloud.
    pub fn start() -> Moto {
        let mut process = python()
            .arg(format!("{ROOT}/tests/clouds/aws.py"))
            .arg(format!("{ROOT}/docs/clouds"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        // moto prints its address before our line
        while !line.starts_with('{') {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "moto has ended");
        }
        Moto {
            pipes: Mutex::new((process.stdin.take().unwrap(), output)),
            cluster: serde_json::from_str(&line).unwrap(),
            _process: process,
        }
    }

    /// Returns the client of this machine, and its metadata service.
    pub fn machine(&self, number: usize) -> (Arc<dyn Service>, Arc<Imds>) {
        let (place, imds) = self.place(number);
        (
            cloud_api::metadata(Cloud::named("aws").unwrap(), Some(&place)).unwrap(),
            imds,
        )
    }

    /// Changes the cloud, by a line that `aws.py` lists.
    pub fn change(&self, line: &str) {
        let (input, output) = &mut *self.pipes.lock().unwrap();
        writeln!(input, "{line}").unwrap();
        let mut answer = String::new();
        while answer != "done\n" {
            answer.clear();
            assert!(output.read_line(&mut answer).unwrap() > 0, "moto has ended");
        }
    }

    /// Returns the metadata service of this control plane as AWS's cloud controller manager needs it, which may run there.
    pub fn controller(&self, number: usize) -> (Arc<Imds>, String) {
        let machine = &self.cluster["machines"][number];
        let (imds, url) = Imds::start(machine, &self.cluster["credentials"]["controller"]);
        imds.set(
            "meta-data/instance-id",
            machine["instanceId"].as_str().unwrap(),
        );
        (imds, url)
    }

    /// Returns the argument of `--metadata` for this machine, and its metadata service.
    pub fn place(&self, number: usize) -> (String, Arc<Imds>) {
        let machine = &self.cluster["machines"][number];
        let role = machine["role"].as_str().unwrap();
        let (imds, url) = Imds::start(machine, &self.cluster["credentials"][role]);
        let moto = self.cluster["url"].as_str().unwrap();
        (place(&url, moto), imds)
    }
}

/// Returns the addresses of the services, as an argument of `--metadata`.
pub fn place(imds: &str, api: &str) -> String {
    format!("{imds},ec2={api},elb={api},tagging={api}")
}

/// Starts the metadata service of an instance outside of moto. Returns it with its URL.
pub fn lone_instance() -> (Arc<Imds>, String) {
    let machine = json!({
        "instanceId": "i-00000000000000000",
        "availabilityZone": "eu-central-1a",
        "privateIp": "10.7.0.10",
        "region": "eu-central-1",
        "role": "control-plane",
    });
    Imds::start(&machine, &credentials("ASIAFIRST", 6 * 3600))
}

/// Returns credentials that end in this number of seconds.
pub fn credentials(id: &str, seconds: u64) -> Value {
    let end = SystemTime::now() + Duration::from_secs(seconds);
    json!({
        "Code": "Success",
        "AccessKeyId": id,
        "SecretAccessKey": "secret",
        "Token": "session",
        "Expiration": time::seconds(end),
    })
}
