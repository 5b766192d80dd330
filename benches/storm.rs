//! Nodes that arrive all at once, at one join service with a real kube-apiserver behind it.
//!
//!     make storm                                  1, 10, 100, 1 000 and 10 000 nodes; prints the table of docs/benchmarks.md
//!     cargo bench --bench storm -- 100 1000       as many
//!
//! ```text
//!   a thread a node ── attested TLS, IssueJoinTicket ──► join-service ──► key-service, kube-apiserver ──► etcd
//!      │ refused: waits as it is told, or a pause that doubles from 1 to 30 s
//!      └ ticket: becomes a Node object, as by its kubelet; then its token has to go
//! ```
//!
//! The services are the shipped programs. The nodes are threads of this one, so that it and they share the machine: what it
//! takes to be ten thousand machines is printed too. A node's TPM is software: its attestation key is a public area of its
//! own, by which the service tells machines apart, but the RSA key in it is one of few, since ten thousand take minutes to make.

#[path = "../tests/common/kube_apiserver.rs"]
mod kube_apiserver;
#[allow(dead_code)] // not all of it is needed here
#[path = "../tests/common/metadata.rs"]
mod metadata;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{env, thread};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use firstlight::attestation::{IssueError, Issuer, Oid};
use firstlight::backoff::Backoff;
use firstlight::crypto::Secret;
use firstlight::grpc::{CallOptions, Channel, Code, Status};
use firstlight::join_service::ISSUE_JOIN_TICKET;
use firstlight::kms::ClusterKms;
use firstlight::kubernetes::client::{CONFIG_MAPS, Client, NODES, Object, SECRETS, Selector};
use firstlight::kubernetes::kubelet_request::KubeletRequest;
use firstlight::kubernetes::parameters::NodeName;
use firstlight::kubernetes::services::{self, NODE_PORT, Settings};
use firstlight::proto::join::{IssueJoinTicketRequest, IssueJoinTicketResponse};
use firstlight::stop::Stop;
use firstlight::{atls, attestation};
use kube_apiserver::Cluster;
use metadata::MetadataServer;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tempfile::TempDir;

const SIZES: [usize; 5] = [1, 10, 100, 1000, 10_000];
/// Distinct RSA keys.
const KEYS: usize = 8;
/// Clients of the API that make Node objects.
const KUBELETS: usize = 4;
/// Of a thread that is a node; a handshake needs some of it.
const STACK: usize = 256 << 10;
/// A node's own limits, as the JoinClient has them.
const CONNECT: Duration = Duration::from_secs(20);
const CALL: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Nobody waits longer.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Of the service, however many wait.
const MOST_MIB: u64 = 256;
const COMPONENTS: &str = r#"[{"url":"https://dl.k8s.io/v1.34.4/bin/linux/amd64/kubelet","hash":"sha256:0000000000000000000000000000000000000000000000000000000000000000","install_path":"/run/state/bin/kubelet"}]"#;

fn main() {
    let sizes: Vec<usize> = env::args().skip(1).filter_map(|size| size.parse().ok()).collect();
    let sizes = if sizes.is_empty() { SIZES.to_vec() } else { sizes };
    let cluster = Cluster::shared();
    let setting = Setting::new(cluster, sizes.iter().sum());
    println!(
        "| nodes | tickets/s | tries a ticket | wait p50 | p99 | longest | longest/mean | service CPU ms/ticket | peak MiB | etcd writes/ticket | tokens left | nodes' CPU ms/ticket |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    let mut first = 0;
    let mut last = None;
    for size in sizes {
        last = Some(setting.storm(first, size));
        first += size;
    }
    let Some(Cost { tickets_a_second, cpu_ms, writes }) = last else { return };
    let minutes = |replicas: f64| 100_000.0 / tickets_a_second / replicas / 60.0;
    println!();
    println!(
        "At the last row's rate 100 000 nodes take {:.0} minutes with one replica, and {:.0} with three on machines of their own, \
         which would ask {:.0} writes a second of etcd. A core of a replica that does nothing else is good for {:.0} tickets a \
         second.",
        minutes(1.0),
        minutes(3.0),
        3.0 * tickets_a_second * writes,
        1000.0 / cpu_ms,
    );
}

/// What a storm says about a larger one.
struct Cost {
    tickets_a_second: f64,
    /// Of the join service, for a ticket.
    cpu_ms: f64,
    /// Of etcd, for a ticket.
    writes: f64,
}

/// A join service and what is around it.
struct Setting {
    service: Service,
    address: SocketAddr,
    _keys: Service,
    _metadata: MetadataServer,
    admin: Client,
    tpms: Vec<Arc<Key>>,
    _dir: TempDir,
}

/// A node's time from arriving to its ticket, and how often it asked.
struct Joined {
    wait: Duration,
    tries: usize,
}

impl Setting {
    fn new(cluster: &Cluster, nodes: usize) -> Setting {
        let dir = tempfile::tempdir().unwrap();
        let admin = cluster.client(&Stop::new());
        prepare(cluster, &admin, dir.path());
        let metadata = MetadataServer::start("127.0.0.1:0".parse().unwrap());
        let machine =
            |number| json!({"Name": name(number), "ProviderID": "", "Role": "Worker", "VPCIP": address(number)});
        metadata.set_peers(&json!((0..nodes).map(machine).collect::<Vec<_>>()).to_string());
        let at = |name: &str| dir.path().join(name).display().to_string();
        let keys = Service::start(
            env!("CARGO_BIN_EXE_key-service"),
            dir.path().join("keys.log"),
            &["--clients=any", "--listen=127.0.0.1:0", "--master-secret", &at("mastersecret"), "--salt", &at("salt")],
        );
        let service = Service::start(
            env!("CARGO_BIN_EXE_join-service"),
            dir.path().join("join.log"),
            &[
                "--listen=127.0.0.1:0",
                "--key-service",
                &keys.address("serving data keys").to_string(),
                "--key-service-auth=none",
                "--config",
                &at(""),
                "--cloud-provider=qemu",
                "--metadata",
                &format!("http://{}", metadata.address),
                "--kubeconfig",
                &at("kubeconfig"),
                "--pki",
                &at("pki"),
            ],
        );
        let address = service.address("letting nodes in on");
        let tpms = (0..KEYS).map(|_| Arc::new(Key::new())).collect();
        Setting { service, address, _keys: keys, _metadata: metadata, admin, tpms, _dir: dir }
    }

    /// `size` nodes at once; prints what came of it.
    fn storm(&self, first: usize, size: usize) -> Cost {
        let (joined, arrivals) = mpsc::channel::<String>();
        let arrivals = Arc::new(Mutex::new(arrivals));
        let (revision, cpu, own_cpu) = (self.revision(), self.service.cpu(), cpu_of(Path::new("/proc/self")));
        self.service.reset_peak();
        let start = Barrier::new(size);
        let begun = Mutex::new(None::<Instant>);
        let all: Vec<Joined> = thread::scope(|scope| {
            for _ in 0..KUBELETS.min(size) {
                let (arrivals, admin) = (arrivals.clone(), &self.admin);
                scope.spawn(move || {
                    loop {
                        let Ok(name) = arrivals.lock().unwrap().recv() else { return };
                        admin.create(&NODES.all(), &json!({"metadata": {"name": name}})).unwrap();
                    }
                });
            }
            let (start, begun) = (&start, &begun);
            let nodes: Vec<_> = (first..first + size)
                .map(|number| {
                    let joined = joined.clone();
                    let node = Node::new(number, self.tpms[number % KEYS].clone());
                    let run = move || {
                        start.wait();
                        begun.lock().unwrap().get_or_insert_with(Instant::now);
                        let outcome = node.join(self.address);
                        joined.send(name(number)).unwrap();
                        outcome
                    };
                    thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run).unwrap()
                })
                .collect();
            drop(joined);
            nodes.into_iter().map(|node| node.join().unwrap()).collect()
        });
        let took = begun.lock().unwrap().unwrap().elapsed();
        let (cpu, own_cpu) = (self.service.cpu() - cpu, cpu_of(Path::new("/proc/self")) - own_cpu);
        let left = self.tokens_left();
        // each node made one object itself
        let writes = (self.revision() - revision) as f64 / size as f64 - 1.0;

        let mut waits: Vec<f64> = all.iter().map(|one| one.wait.as_secs_f64()).collect();
        waits.sort_by(f64::total_cmp);
        let mean = waits.iter().sum::<f64>() / size as f64;
        let longest = waits[size - 1];
        let of = |share: f64| waits[((size as f64 * share) as usize).min(size - 1)];
        let tries = all.iter().map(|one| one.tries).sum::<usize>() as f64 / size as f64;
        let per_ticket = |time: Duration| time.as_secs_f64() * 1000.0 / size as f64;
        let tickets_a_second = size as f64 / took.as_secs_f64();
        println!(
            "| {size} | {tickets_a_second:.0} | {tries:.1} | {:.2} s | {:.2} s | {longest:.2} s | {:.1} | {:.1} | {} | {writes:.1} | {left} | {:.1} |",
            of(0.5),
            of(0.99),
            longest / mean,
            per_ticket(cpu),
            self.service.peak_mib(),
            per_ticket(own_cpu),
        );
        assert_eq!(left, 0, "bootstrap tokens are left over");
        assert!(self.service.peak_mib() < MOST_MIB, "the service takes {MOST_MIB} MiB or more");
        Cost { tickets_a_second, cpu_ms: per_ticket(cpu), writes }
    }

    /// etcd's: it grows by one with each write.
    fn revision(&self) -> u64 {
        let list = self.admin.list(&CONFIG_MAPS.in_namespace("kube-public"), &Selector::default()).unwrap();
        list.resource_version.parse().unwrap()
    }

    /// Bootstrap tokens that are still there, after the service has had time to see the last Node.
    fn tokens_left(&self) -> usize {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let secrets = self.admin.list(&SECRETS.in_namespace("kube-system"), &Selector::default()).unwrap().items;
            let is_token = |secret: &&serde_json::Value| {
                secret["metadata"]["name"].as_str().is_some_and(|name| name.starts_with("bootstrap-token-"))
            };
            let left = secrets.iter().filter(is_token).count();
            if left == 0 || Instant::now() > end {
                return left;
            }
            thread::sleep(Duration::from_millis(200));
        }
    }
}

fn name(number: usize) -> String {
    format!("worker-{number}")
}

fn address(number: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(0x0a40_0001 + number as u32))
}

/// The objects of init and of the chart, and the files of a control plane.
fn prepare(cluster: &Cluster, admin: &Client, dir: &Path) {
    let policy = json!({"measurements": {"15": {"expected": "00".repeat(32), "warnOnly": false}}}).to_string();
    let settings = Settings {
        image: "example.com/firstlight:1".into(),
        variant: "qemu-vtpm".into(),
        policy: policy.clone(),
        measurement_salt: vec![7; 32],
        kms: ClusterKms::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap(),
        node_port: NODE_PORT,
        metadata: services::MetadataService::default(),
    };
    let manifests = services::manifests(&settings).unwrap();
    for object in manifests.iter().filter(|object| {
        object["kind"].as_str().is_some_and(|kind| ["Role", "Admission"].iter().any(|part| kind.contains(part)))
    }) {
        admin.apply(&Object::of(object).unwrap(), object).unwrap();
    }
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    for (name, data) in [
        ("kubeadm-config", json!({"ClusterConfiguration": "controlPlaneEndpoint: 10.63.0.1\n"})),
        ("k8s-components-sha256-1", json!({"components": COMPONENTS, "cluster-version": "v1.34.4"})),
    ] {
        admin.create(&maps, &json!({"metadata": {"name": name}, "data": data})).unwrap();
    }
    let (certificate, key) = cluster.ca();
    let account = "system:serviceaccount:kube-system:join-service";
    let kubeconfig = cluster.kubeconfig_of(account, "system:serviceaccounts", &certificate);
    fs::create_dir(dir.join("pki")).unwrap();
    let files: [(&str, &[u8]); 7] = [
        ("kubeconfig", kubeconfig.as_bytes()),
        ("pki/ca.crt", certificate.as_bytes()),
        ("pki/ca.key", key.as_bytes()),
        ("attestationConfig", policy.as_bytes()),
        ("measurementSalt", &[7; 32]),
        ("mastersecret", &[0; 32]),
        ("salt", &[0; 32]),
    ];
    for (name, content) in files {
        fs::write(dir.join(name), content).unwrap();
    }
}

/// A shipped program.
struct Service {
    child: Child,
    log: PathBuf,
}

impl Service {
    fn start(program: &str, log: PathBuf, arguments: &[&str]) -> Service {
        let out = File::create(&log).unwrap();
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(out);
        Service { child: command.spawn().unwrap(), log }
    }

    /// The first address in the line that has this text.
    fn address(&self, text: &str) -> SocketAddr {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let log = fs::read_to_string(&self.log).unwrap();
            if let Some(line) = log.lines().find(|line| line.contains(text)) {
                let words = line.split(|c: char| c.is_whitespace() || c == ',');
                return words.filter_map(|word| word.parse().ok()).next().unwrap();
            }
            assert!(Instant::now() < end, "no {text:?} in {log}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn proc(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}", self.child.id()))
    }

    fn cpu(&self) -> Duration {
        cpu_of(&self.proc())
    }

    /// The most that was resident since [`Service::reset_peak`].
    fn peak_mib(&self) -> u64 {
        let status = fs::read_to_string(self.proc().join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    fn reset_peak(&self) {
        fs::write(self.proc().join("clear_refs"), "5").unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process's processor time (proc(5): fields 14 and 15 of stat, in hundredths of a second).
fn cpu_of(proc: &Path) -> Duration {
    let mut stat = String::new();
    File::open(proc.join("stat")).unwrap().read_to_string(&mut stat).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    Duration::from_millis(10 * fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum::<u64>())
}

/// A machine that wants to join.
struct Node {
    tls: atls::Client,
    request: IssueJoinTicketRequest,
}

impl Node {
    fn new(number: usize, key: Arc<Key>) -> Node {
        let request = KubeletRequest::new(&NodeName::from_machine(&name(number)).unwrap(), address(number)).unwrap();
        let tls = atls::Client::new(Some(Arc::new(Tpm { key, number: number as u32 })), vec![]);
        let request = IssueJoinTicketRequest {
            disk_uuid: format!("0f5b7c1e-93a4-4d2b-8c6d-{number:012x}"),
            certificate_request: request.der().to_vec(),
            is_control_plane: false,
            // RFC 4253 §6.6: two strings, each with its length
            host_public_key: [&[0, 0, 0, 11][..], b"ssh-ed25519", &[0, 0, 0, 32], &[9; 32]].concat(),
            host_certificate_principals: vec![address(number).to_string()],
            accepts_cluster_ca: true,
        };
        Node { tls, request }
    }

    fn join(&self, address: SocketAddr) -> Joined {
        let arrived = Instant::now();
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for tries in 1.. {
            let status = match self.ask(address) {
                Ok(ticket) => {
                    assert!(!ticket.token.is_empty() && !ticket.kubelet_cert.is_empty());
                    return Joined { wait: arrived.elapsed(), tries };
                }
                Err(status) => status,
            };
            let is_passing = matches!(
                status.code(),
                Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded | Code::Cancelled
            );
            assert!(is_passing && arrived.elapsed() < PATIENCE, "after {tries} tries: {status}");
            let pause = backoff.pause();
            thread::sleep(status.retry_after().map_or(pause, |told| told.max(pause)));
        }
        unreachable!("the range has no end")
    }

    fn ask(&self, address: SocketAddr) -> Result<IssueJoinTicketResponse, Status> {
        let unavailable = |error: &dyn std::fmt::Display| Status::new(Code::Unavailable, error.to_string());
        let deadline = Instant::now() + CONNECT;
        let socket = TcpStream::connect_timeout(&address, CONNECT).map_err(|error| unavailable(&error))?;
        let transport = self.tls.connect(socket, deadline).map_err(|error| unavailable(&error))?;
        let channel = Channel::new(transport, "join-service")?;
        channel.unary(ISSUE_JOIN_TICKET, &self.request, &CallOptions { timeout: Some(CALL), ..CallOptions::default() })
    }
}

/// An RSA key.
struct Key {
    pair: RsaKeyPair,
    modulus: Vec<u8>,
}

impl Key {
    fn new() -> Key {
        let options = ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
        let made = Command::new("openssl").args(options).output().unwrap();
        let pem = PrivatePkcs8KeyDer::from_pem_slice(&made.stdout).unwrap();
        let pair = RsaKeyPair::from_pkcs8(pem.secret_pkcs8_der()).unwrap();
        // RSAPublicKey (RFC 8017, appendix A.1.1) of 2048 bits: a header of 4 bytes, one of 4, a zero, the modulus
        let modulus = pair.public().as_ref()[9..][..256].to_vec();
        Key { pair, modulus }
    }
}

/// A machine's TPM, fresh: every PCR is zero.
struct Tpm {
    key: Arc<Key>,
    number: u32,
}

/// TPM2B_..
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn sha256(parts: &[&[u8]]) -> Vec<u8> {
    digest(&SHA256, &parts.concat()).as_ref().to_vec()
}

impl Issuer for Tpm {
    fn oid(&self) -> Oid {
        attestation::qemu_vtpm::OID
    }

    /// TPMS_ATTEST, TPMT_SIGNATURE and TPMT_PUBLIC (TCG, "Trusted Platform Module Library", part 2, §§10.12, 11.3.4, 12.2.4).
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let values = [[0; 32]; 24];
        let mut attest = b"\xffTCG\x80\x18\0\0".to_vec();
        attest.extend(sized(&sha256(&[&sha256(&[user_data, nonce])])));
        attest.extend([0; 17 + 8]);
        attest.extend(b"\0\0\0\x01\0\x0b\x03\xff\xff\xff");
        attest.extend(sized(&sha256(&[values.as_flattened()])));
        let mut signature = vec![0; self.key.pair.public().modulus_len()];
        let random = SystemRandom::new();
        self.key
            .pair
            .sign(&RSA_PKCS1_SHA256, &random, &attest, &mut signature)
            .map_err(|e| IssueError(e.to_string()))?;
        let signature = [&b"\0\x14\0\x0b"[..], &sized(&signature)].concat();
        // an authPolicy makes the public area this machine's alone
        let policy = sized(&sha256(&[&self.number.to_be_bytes()]));
        let parameters = b"\0\x10\0\x14\0\x0b\x08\0\0\0\0\0";
        let public = [b"\0\x01\0\x0b\0\x05\0\x72", &policy[..], parameters, &sized(&self.key.modulus)].concat();
        let base64 = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
        let pcrs: BTreeMap<String, String> =
            values.iter().enumerate().map(|(index, value)| (index.to_string(), base64(value))).collect();
        let document = json!({
            "Attestation": {
                "ak_pub": base64(&public),
                "quotes": [{"quote": base64(&attest), "raw_sig": base64(&signature), "pcrs": {"hash": 11, "pcrs": pcrs}}],
            },
            "InstanceInfo": null,
            "UserData": base64(user_data),
        });
        Ok(document.to_string().into_bytes())
    }
}
