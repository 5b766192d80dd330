//! Measures what the watch of members costs a member controller: `make watch-load`, or `cargo bench --bench storm -- watch NODES SECONDS`.
//!
//! ```text
//!   NODES Node objects with their records ── kube-apiserver ── member-controller --watch SECONDS
//!   one server with the key of all of them, at NODES addresses of loopback ◄── attested TLS ──┘
//! ```
//!
//! First each node is created and asked for the first time, and its Node gets condition and label. Then nothing changes during one
//! interval, in which each node is asked once more: that is the cost of each day. The figures are processor time of the service, in
//! percent of one processor.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, cluster_id, derive_key};
use kubernetes::client::{CONFIG_MAPS, Client, NODES};
use proto::generation::{GENERATION, GenerationRequest, GenerationResponse};
use rpc::grpc::{Call, Limits, Router, Server};
use serde_json::{Value, json};
use verifier::{Issuer, Registers};

use super::tpm::Tpm;
use super::{KUBELETS, Setting, Verdict};

/// The most that the service may need when nothing changes, in percent of one processor.
const MOST: f64 = 10.0;

/// Runs both parts, and prints their figures.
pub fn run(setting: &Setting, nodes: usize, seconds: u64, end: Instant) -> Verdict {
    let tpm = member();
    let machine = tpm.machine();
    let _server = serve(Arc::new(tpm));
    println!("{nodes} nodes, each asked once in {seconds} s\n");
    println!("| | time | answers | answers/s | service CPU | ms/answer | peak MiB | etcd writes |");
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    let first = Part::begin(setting);
    create(&setting.admin, nodes, &machine);
    while setting.metric("firstlight_watch_nodes{result=\"accepted\"}") < nodes as f64 {
        if Instant::now() > end {
            return Verdict::Failed("not all nodes were accepted when the time was over".into());
        }
        thread::sleep(Duration::from_millis(500));
    }
    first.end("created, asked for the first time");
    // the writes of the last answers
    thread::sleep(Duration::from_secs(5));
    let quiet = Part::begin(setting);
    thread::sleep(Duration::from_secs(seconds));
    let percent = quiet.end("no change");
    println!(
        "\nAt {MOST} % of a processor each node can be asked once in {:.0} s.",
        seconds as f64 * percent / MOST
    );
    if percent < MOST {
        Verdict::Passed
    } else {
        Verdict::Failed(format!("{percent:.1} % of a processor, {MOST} or more"))
    }
}

/// The TPM of a member of the cluster, whose master secret and salt are zeros.
fn member() -> Tpm {
    let info = Dek::named(MEASUREMENT_SECRET_ID);
    let secret: Secret = derive_key(&[0; 32], &[0; 32], info.info(), KEY_LEN).unwrap();
    let register = Registers::Pcrs.after(&cluster_id(&secret, &[7; 32]));
    Tpm::of_member(register.as_ref().try_into().unwrap())
}

/// Answers at each address of loopback, as members do; all callers have the same address, so the limits are others.
fn serve(issuer: Arc<dyn Issuer>) -> Server {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 9000)).unwrap();
    let limits = Limits {
        connections: 1000,
        connections_per_peer: 1000,
        ..Limits::default()
    };
    let tls = Arc::new(atls::Server::new(Some(issuer), None));
    let router = Router::new().unary(GENERATION, |_: &Call, _: GenerationRequest| {
        Ok(GenerationResponse {
            current: "1-0123456789abcdef".into(),
            is_unknown: false,
        })
    });
    Server::start("member", listener, tls, router, limits).unwrap()
}

fn address(number: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(0x7f40_0001 + number as u32))
}

/// Creates the Nodes and their records.
fn create(admin: &Client, nodes: usize, machine: &str) {
    thread::scope(|scope| {
        for part in 0..KUBELETS {
            scope.spawn(move || {
                for number in (part..nodes).step_by(KUBELETS) {
                    let name = super::name(number);
                    admin.create(&NODES.all(), &node(&name, number)).unwrap();
                    let record = json!({
                        "metadata": {"name": format!("join-node-{name}"), "labels": {"firstlight/record": "machine"}},
                        "data": {"node": name, "machine": machine, "disk": format!("0f5b7c1e-93a4-4d2b-8c6d-{number:012x}")},
                    });
                    let maps = CONFIG_MAPS.in_namespace("kube-system");
                    admin.create(&maps, &record).unwrap();
                }
            });
        }
    });
}

/// Returns a Node of the size that they have: 10 KiB, mostly names of images.
fn node(name: &str, number: usize) -> Value {
    let digest = "a1b2c3d4".repeat(8);
    let image = |number: usize| {
        let names = ["", ":v1.2.3"]
            .map(|tag| format!("registry.example.com/team/program-{number}{tag}@sha256:{digest}"));
        json!({"names": names, "sizeBytes": 123_456_789})
    };
    let condition = |kind: &str| {
        json!({
            "type": kind, "status": if kind == "Ready" { "True" } else { "False" }, "reason": "KubeletIsFine", "message": "fine",
            "lastHeartbeatTime": "2026-11-27T00:00:00Z", "lastTransitionTime": "2026-11-27T00:00:00Z",
        })
    };
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(condition);
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address(number)}],
            "conditions": conditions,
            "nodeInfo": {
                "bootID": "b", "machineID": "m", "systemUUID": "s", "kernelVersion": "6", "osImage": "o",
                "containerRuntimeVersion": "c", "kubeletVersion": "v1.34.4", "kubeProxyVersion": "", "operatingSystem": "linux",
                "architecture": "amd64",
            },
            "images": (0..40).map(image).collect::<Vec<_>>(),
        },
    })
}

/// What is measured from one moment to another.
struct Part<'a> {
    setting: &'a Setting,
    begun: Instant,
    cpu: Duration,
    answers: f64,
    revision: u64,
}

impl Part<'_> {
    fn begin(setting: &Setting) -> Part<'_> {
        setting.services[0].reset_peak();
        Part {
            setting,
            begun: Instant::now(),
            cpu: setting.services[0].cpu(),
            answers: setting.answers(),
            revision: setting.revision(),
        }
    }

    /// Prints a row. Returns the percentage of one processor.
    fn end(self, what: &str) -> f64 {
        let time = self.begun.elapsed().as_secs_f64();
        let cpu = (self.setting.services[0].cpu() - self.cpu).as_secs_f64();
        let answers = self.setting.answers() - self.answers;
        println!(
            "| {what} | {time:.0} s | {answers} | {:.1} | {:.1} % | {:.2} | {} | {} |",
            answers / time,
            100.0 * cpu / time,
            1000.0 * cpu / answers,
            self.setting.services[0].peak_mib(),
            self.setting.revision() - self.revision,
        );
        100.0 * cpu / time
    }
}

impl Setting {
    fn answers(&self) -> f64 {
        self.metric("firstlight_watch_answers_total{result=\"accepted\",reason=\"Accepted\"}")
    }

    /// Returns a metric of the service; 0 without it.
    fn metric(&self, name: &str) -> f64 {
        let address: SocketAddr = self.services[0].address("metrics on");
        let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
        let answer = agent.get(format!("http://{address}/metrics")).call();
        let text = answer.unwrap().body_mut().read_to_string().unwrap();
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        found.map_or(0.0, |value| value.trim().parse().unwrap())
    }
}
