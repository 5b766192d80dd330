//! Measures one join service with a real kube-apiserver when many nodes arrive at the same time.
//!
//!     make storm                                  1, 10, 100, 1 000 and 10 000 nodes; prints the table of docs/benchmarks.md
//!     cargo bench --bench storm -- 100 1000       these numbers of nodes
//!     cargo bench --bench storm -- replicas 10000 the same with three replicas of the service behind one address
//!     cargo bench --bench storm -- faults 500     API server and etcd fail all the time (see `faults`)
//!
//! ```text
//!   two threads of nodes ── attested TLS, IssueJoinTicket ──► join-service ──► key-service, kube-apiserver ──► etcd
//!      │ refused: waits for the time in the refusal, or for a pause that doubles from 1 to 30 s
//!      └ ticket: creates a Node object like its kubelet; then its token must be deleted
//! ```
//!
//! The services are the shipped programs. They and the nodes share one machine, so the bench also
//! prints who uses its processors. It ends with a verdict within [`LIMIT`] in all cases:
//!
//! | verdict | exit code |
//! |---|---|
//! | passed: each node has its ticket and its record, the service stayed within its memory limit, no token is left | 0 |
//! | failed: one of these conditions is not met | 1 |
//! | undecided: the time is over, and other programs used the processors | 2 |
//!
//! - `crowd`: the nodes, a loop over their sockets; each calls from an address of its own, 127.64.0.1 and so on
//! - `faults`: faults of the API server and of etcd
//! - `tpm`: a node's TPM in software
//! - `watch`: another measurement, of nodes that have joined: `cargo bench --bench storm -- watch 10000 300`

mod crowd;
mod faults;
use common::kube_apiserver;
use common::manifests::settings;
use support::metadata;
mod tpm;
mod watch;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, thread};

use base::stop::Stop;
use crowd::{Joined, JoiningNode};
use faults::Line;
use kube_apiserver::Cluster;
use kubernetes::client::{CONFIG_MAPS, Client, Collection, NODES, Object, SECRETS, Selector};
use kubernetes::services;
use metadata::MetadataServer;
use serde_json::json;
use sys::process;
use tempfile::TempDir;
use tpm::Tpm;

/// The programs that are measured.
const JOIN_SERVICE: &str = "join-service";
const MEMBER_CONTROLLER: &str = "member-controller";
/// Number of replicas with the word `replicas`.
const REPLICAS: usize = 3;
const SIZES: [usize; 5] = [1, 10, 100, 1000, 10_000];
/// Number of threads that run nodes. There are two, so that a node that signs a quote does not delay all others.
const THREADS: usize = 2;
/// Number of API clients that create Node objects.
const KUBELETS: usize = 4;
/// Time limit for all storms together. Two idle processors need three minutes.
const LIMIT: Duration = Duration::from_secs(900);
/// Maximum time after the creation of a ticket's Node until a bootstrap token is deleted.
const CLEANING: Duration = Duration::from_secs(60);
/// Pause between two attempts of a kubelet to create its Node.
const PAUSE: Duration = Duration::from_secs(1);
/// Memory limit of the service in MiB, independent of the number of waiting nodes.
const MOST_MIB: u64 = 256;
/// If other programs use more than this share of the processors and a storm does not end, the verdict is "undecided".
const MOST_OTHERS: f64 = 0.25;
const COMPONENTS: &str = r#"[{"url":"https://dl.k8s.io/v1.34.4/bin/linux/amd64/kubelet","hash":"sha256:0000000000000000000000000000000000000000000000000000000000000000","install_path":"/run/state/bin/kubelet"}]"#;

fn main() -> ExitCode {
    let has = |expected: &str| env::args().any(|word| word == expected);
    let replicas = if has("replicas") { REPLICAS } else { 1 };
    let sizes: Vec<usize> = env::args()
        .skip(1)
        .filter_map(|size| size.parse().ok())
        .collect();
    let sizes = if sizes.is_empty() {
        SIZES.to_vec()
    } else {
        sizes
    };
    let verdict = panic::catch_unwind(|| {
        if has("watch") {
            watched(&sizes)
        } else {
            storms(&sizes, replicas, has("faults"))
        }
    });
    let verdict = verdict.unwrap_or_else(|_| {
        Verdict::Failed("the storm could not start; the reason is above".into())
    });
    println!("\nverdict: {verdict}");
    verdict.exit_code()
}

/// The result of all storms.
enum Verdict {
    Passed,
    Failed(String),
    Undecided(String),
}

impl Verdict {
    fn exit_code(&self) -> ExitCode {
        match self {
            Verdict::Passed => ExitCode::SUCCESS,
            Verdict::Failed(_) => ExitCode::FAILURE,
            Verdict::Undecided(_) => ExitCode::from(2),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Passed => f.write_str("passed"),
            Verdict::Failed(why) => write!(f, "failed: {why}"),
            Verdict::Undecided(why) => write!(f, "undecided: {why}"),
        }
    }
}

/// Measures the watch of this number of nodes at an interval of this number of seconds.
fn watched(given: &[usize]) -> Verdict {
    let [nodes, seconds] = given else {
        return Verdict::Failed(
            "expected the number of nodes and the seconds: watch 10000 300".into(),
        );
    };
    let option = format!("--watch={seconds}");
    let more = [&*option, "--metrics=127.0.0.1:0"];
    let setting = Setting::new(Cluster::shared(), 1, (MEMBER_CONTROLLER, 1), None, &more);
    watch::run(&setting, *nodes, *seconds as u64, Instant::now() + LIMIT)
}

/// Runs the storms in order until one does not pass.
fn storms(sizes: &[usize], replicas: usize, has_faults: bool) -> Verdict {
    // If this is not allowed, the nodes without a socket try again later.
    let _ = process::raise_descriptor_limit();
    let cluster = Cluster::shared();
    let line = has_faults.then(|| Line::to(([127, 0, 0, 1], cluster.port()).into()));
    let more = ["--listen=127.0.0.1:0"];
    let setting = Setting::new(
        cluster,
        sizes.iter().sum(),
        (JOIN_SERVICE, replicas),
        line,
        &more,
    );
    println!(
        "| nodes | tickets/s | tries a ticket | wait p50 | p99 | longest | longest/mean | service CPU ms/ticket | peak MiB \
         | etcd writes/ticket | tokens left | processors: service | nodes | API server, etcd | others |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    let end = Instant::now() + LIMIT;
    let mut first = 0;
    let mut last = None;
    for &size in sizes {
        match setting.storm(first, size, end) {
            Ok(cost) => last = Some(cost),
            Err(verdict) => return verdict,
        }
        first += size;
    }
    if let Some(cost) = last {
        println!("\n{}", cost.outlook(replicas as f64));
    }
    Verdict::Passed
}

/// The cost of a storm, from which a larger one can be estimated.
struct Cost {
    tickets_a_second: f64,
    /// CPU time of the join service per ticket.
    cpu_ms: f64,
    /// Number of writes to etcd per ticket.
    writes: f64,
}

impl Cost {
    fn outlook(&self, replicas: f64) -> String {
        let minutes = |factor: f64| 100_000.0 / self.tickets_a_second / factor / 60.0;
        format!(
            "At the last row's rate 100 000 nodes take {:.0} minutes with {replicas:.0} replicas on this machine, and {:.0} with three \
             times as much of everything, which would ask {:.0} writes a second of etcd. A core of a replica that does nothing else is \
             good for {:.0} tickets a second.",
            minutes(1.0),
            minutes(3.0),
            3.0 * self.tickets_a_second * self.writes,
            1000.0 / self.cpu_ms,
        )
    }
}

/// Join services, or a member controller, and their environment.
struct Setting {
    cluster: &'static Cluster,
    services: Vec<Service>,
    /// The addresses of the join services.
    addresses: Vec<SocketAddr>,
    /// The proxy between the join service and the API server, if the run has faults: it cuts connections.
    line: Option<Line>,
    _keys: Service,
    _metadata: MetadataServer,
    admin: Client,
    _dir: TempDir,
}

impl Setting {
    /// Starts this program this number of times, with these further options.
    fn new(
        cluster: &'static Cluster,
        nodes: usize,
        (program, replicas): (&str, usize),
        line: Option<Line>,
        more: &[&str],
    ) -> Setting {
        let dir = tempfile::tempdir().unwrap();
        let admin = cluster.client(&Stop::new());
        prepare(cluster, &admin, dir.path(), program, line.as_ref());
        let metadata = MetadataServer::start("127.0.0.1:0".parse().unwrap());
        let machine = |number| json!({"Name": name(number), "ProviderID": "", "Role": "Worker", "VPCIP": address(number)});
        metadata.set_peers(&json!((0..nodes).map(machine).collect::<Vec<_>>()).to_string());
        let at = |name: &str| dir.path().join(name).display().to_string();
        let keys = Service::start(
            "key-service",
            dir.path().join("keys.log"),
            &[
                "--clients=any",
                "--listen=127.0.0.1:0",
                "--master-secret",
                &at("mastersecret"),
                "--salt",
                &at("salt"),
            ],
        );
        let pki = ["--pki".to_owned(), at("pki")];
        let pki = pki.iter().map(String::as_str);
        let of_join: Vec<&str> = pki.filter(|_| program == JOIN_SERVICE).collect();
        let start = |number| {
            Service::start(
                program,
                dir.path().join(format!("{program}{number}.log")),
                &[
                    more,
                    &of_join,
                    &[
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
                    ],
                ]
                .concat(),
            )
        };
        let services: Vec<Service> = (0..replicas).map(start).collect();
        let joins = services.iter().filter(|_| program == JOIN_SERVICE);
        let address = |it: &Service| it.address("serving join requests on");
        Setting {
            cluster,
            addresses: joins.map(address).collect(),
            services,
            line,
            _keys: keys,
            _metadata: metadata,
            admin,
            _dir: dir,
        }
    }

    /// Runs a storm of `size` nodes at once and prints its result, also if its time ran out.
    fn storm(&self, first: usize, size: usize, end: Instant) -> Result<Cost, Verdict> {
        let mut nodes: Vec<JoiningNode> = (first..first + size).map(Setting::node).collect();
        let (joined, arrivals) = mpsc::channel();
        let arrivals = Mutex::new(arrivals);
        self.services.iter().for_each(Service::reset_peak);
        let (revision, before) = (self.revision(), self.processors());
        let begun = Instant::now();
        let share = size.div_ceil(THREADS);
        let over = Stop::new();
        let asked: Result<Vec<Joined>, String> = thread::scope(|scope| {
            (0..KUBELETS).for_each(|_| _ = scope.spawn(|| self.be_kubelet(&arrivals, end)));
            let faults = (self.line.as_ref())
                .map(|line| scope.spawn(|| faults::inject(self.cluster, line, &over, end)));
            let storm = |nodes, joined| move || crowd::storm(nodes, &self.addresses, end, &joined);
            let threads: Vec<_> = nodes
                .chunks_mut(share)
                .map(|nodes| scope.spawn(storm(nodes, joined.clone())))
                .collect();
            drop(joined);
            let all: Result<Vec<Vec<Joined>>, String> = threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect();
            over.stop();
            if let Some(faults) = faults {
                let [cut, gone, api, etcd] = faults.join().unwrap();
                println!(
                    "faults: {cut} times all connections to the API server were cut, {gone} times it was gone for 2 s; frozen for 1 s \
                     (once 12 s) were {api} times the API server, {etcd} times etcd"
                );
                faults::wait_until_well(self.cluster, end);
            }
            all.map(|all| all.into_iter().flatten().collect())
        });
        let took = begun.elapsed();
        let used = self.processors().since(&before);
        let all = asked.map_err(Verdict::Failed)?;
        if all.is_empty() {
            return Err(too_late(
                &format!(
                    "none of {size} nodes has a ticket after {:.0} s",
                    took.as_secs_f64()
                ),
                &used,
            ));
        }
        let is_complete = all.len() == size;
        let left = self.tokens_left(end);
        let orphans = self.orphans();
        // Each node created one object itself.
        let writes = (self.revision() - revision) as f64 / all.len() as f64 - 1.0;

        let mut waits: Vec<f64> = all.iter().map(|one| one.wait.as_secs_f64()).collect();
        waits.sort_by(f64::total_cmp);
        let count = waits.len();
        let mean = waits.iter().sum::<f64>() / count as f64;
        let longest = waits[count - 1];
        let of = |share: f64| waits[((count as f64 * share) as usize).min(count - 1)];
        let tries = all.iter().map(|one| one.tries).sum::<usize>() as f64 / count as f64;
        let tickets_a_second = count as f64 / took.as_secs_f64();
        let cpu_ms = used.service.as_secs_f64() * 1000.0 / count as f64;
        let peaks = self.services.iter().map(Service::peak_mib);
        let peak = peaks.max().unwrap();
        println!(
            "| {count} | {tickets_a_second:.0} | {tries:.1} | {:.2} s | {:.2} s | {longest:.2} s | {:.1} | {cpu_ms:.1} | {peak} \
             | {writes:.1} | {left} | {used} |",
            of(0.5),
            of(0.99),
            longest / mean,
        );
        if !is_complete {
            let missing = size - count;
            return Err(too_late(
                &format!("{missing} of {size} nodes have no ticket when the time is over"),
                &used,
            ));
        }
        if left > 0 && Instant::now() > end {
            return Err(too_late(
                &format!("{left} bootstrap tokens are there when the time is over"),
                &used,
            ));
        }
        if left > 0 {
            return Err(Verdict::Failed(format!(
                "{left} bootstrap tokens are left over, none went for {CLEANING:?}"
            )));
        }
        if !orphans.is_empty() {
            return Err(Verdict::Failed(format!(
                "these nodes have a record without a Node, or a Node without a record: {orphans:?}"
            )));
        }
        if peak >= MOST_MIB {
            return Err(Verdict::Failed(format!(
                "the service has {peak} MiB resident, {MOST_MIB} or more"
            )));
        }
        Ok(Cost {
            tickets_a_second,
            cpu_ms,
            writes,
        })
    }

    fn node(number: usize) -> JoiningNode {
        JoiningNode::new(number, &name(number), address(number), Arc::new(Tpm::new()))
    }

    /// Creates the Node objects of nodes that have a ticket, until there are none left or the time is over.
    fn be_kubelet(&self, arrivals: &Mutex<Receiver<usize>>, end: Instant) {
        loop {
            let Ok(number) = arrivals.lock().unwrap().recv() else {
                return;
            };
            let node = json!({"metadata": {"name": name(number)}});
            while Instant::now() < end {
                match self.admin.create(&NODES.all(), &node) {
                    Err(error) if !error.is_already_exists() => thread::sleep(PAUSE),
                    _ => break,
                }
            }
        }
    }

    /// Returns the processor time that each party has used until now.
    fn processors(&self) -> Processors {
        let (all, idle) = machine_time();
        let cluster = self.cluster.processes();
        Processors {
            all,
            idle,
            service: self.services.iter().map(Service::cpu).sum(),
            nodes: cpu_of(Path::new("/proc/self")),
            cluster: cluster
                .iter()
                .map(|number| cpu_of(&Path::new("/proc").join(number)))
                .sum(),
        }
    }

    /// Returns the names of nodes that have only a record, or only a Node.
    fn orphans(&self) -> Vec<String> {
        let names = |kind: &Collection, prefix: &str| -> BTreeSet<String> {
            let list = self.admin.list(kind, &Selector::default()).unwrap();
            let names = list
                .items
                .iter()
                .filter_map(|it| it["metadata"]["name"].as_str());
            names
                .filter_map(|name| name.strip_prefix(prefix))
                .map(str::to_owned)
                .collect()
        };
        let records = names(&CONFIG_MAPS.in_namespace("kube-system"), "join-node-");
        let nodes = names(&NODES.all(), "");
        records.symmetric_difference(&nodes).cloned().collect()
    }

    /// Returns etcd's revision, which grows by one with each write.
    fn revision(&self) -> u64 {
        let list = self
            .admin
            .list(
                &CONFIG_MAPS.in_namespace("kube-public"),
                &Selector::default(),
            )
            .unwrap();
        list.resource_version.parse().unwrap()
    }

    /// Returns the number of bootstrap tokens left when none was deleted for [`CLEANING`], or at `end`.
    fn tokens_left(&self, end: Instant) -> usize {
        let (mut least, mut last_gone) = (usize::MAX, Instant::now());
        loop {
            let secrets = self
                .admin
                .list(&SECRETS.in_namespace("kube-system"), &Selector::default())
                .unwrap()
                .items;
            let is_token = |secret: &&serde_json::Value| {
                secret["metadata"]["name"]
                    .as_str()
                    .is_some_and(|name| name.starts_with("bootstrap-token-"))
            };
            let left = secrets.iter().filter(is_token).count();
            if left < least {
                (least, last_gone) = (left, Instant::now());
            }
            if left == 0 || last_gone.elapsed() > CLEANING || Instant::now() > end {
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

/// Creates the objects of init and of the chart, and the files of a control plane.
fn prepare(cluster: &Cluster, admin: &Client, dir: &Path, program: &str, line: Option<&Line>) {
    let settings = services::ServiceSettings {
        watch: Some("600".into()),
        ..settings(tpm::POLICY)
    };
    let manifests = services::manifests(&settings).unwrap();
    for object in manifests.iter().filter(|object| {
        object["kind"]
            .as_str()
            .is_some_and(|kind| ["Role", "Admission"].iter().any(|part| kind.contains(part)))
    }) {
        admin.apply(&Object::of(object).unwrap(), object).unwrap();
    }
    kube_apiserver::set_ready_controllers(admin, 1);
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    for (name, data) in [
        (
            "kubeadm-config",
            json!({"ClusterConfiguration": "controlPlaneEndpoint: 10.63.0.1\n"}),
        ),
        (
            "k8s-components-sha256-1",
            json!({"components": COMPONENTS, "cluster-version": "v1.34.4"}),
        ),
    ] {
        admin
            .create(&maps, &json!({"metadata": {"name": name}, "data": data}))
            .unwrap();
    }
    let (certificate, key) = cluster.ca();
    let account = format!("system:serviceaccount:kube-system:{program}");
    let mut kubeconfig = cluster.kubeconfig_of(&account, "system:serviceaccounts", &certificate);
    if let Some(line) = line {
        kubeconfig = kubeconfig.replace(&cluster.server(), &format!("https://{}", line.address));
    }
    fs::create_dir(dir.join("pki")).unwrap();
    let files: [(&str, &[u8]); 7] = [
        ("kubeconfig", kubeconfig.as_bytes()),
        ("pki/ca.crt", certificate.as_bytes()),
        ("pki/ca.key", key.as_bytes()),
        ("attestationConfig", tpm::POLICY.as_bytes()),
        ("measurementSalt", &[7; 32]),
        ("mastersecret", &[0; 32]),
        ("salt", &[0; 32]),
    ];
    for (name, content) in files {
        fs::write(dir.join(name), content).unwrap();
    }
}

/// One of the shipped programs.
struct Service {
    child: Child,
    log: PathBuf,
}

impl Service {
    fn start(program: &str, log: PathBuf, arguments: &[&str]) -> Service {
        let out = File::create(&log).unwrap();
        let mut command = Command::new(support::program::built(program));
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(out);
        Service {
            child: command.spawn().unwrap(),
            log,
        }
    }

    /// Returns the first address in the log line that contains this text.
    fn address(&self, text: &str) -> SocketAddr {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let log = fs::read_to_string(&self.log).unwrap();
            if let Some(line) = log.lines().find(|line| line.contains(text)) {
                let words = line.split(|c: char| c.is_whitespace() || [',', '/'].contains(&c));
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

    /// Returns the peak of resident memory since [`Service::reset_peak`].
    fn peak_mib(&self) -> u64 {
        let status = fs::read_to_string(self.proc().join("status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
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

/// Returns the verdict when the time is over.
fn too_late(what: &str, used: &Processors) -> Verdict {
    let others = used.share(used.others());
    if others > MOST_OTHERS {
        Verdict::Undecided(format!(
            "{what}, and other programs took {:.0} % of the processors",
            100.0 * others
        ))
    } else {
        Verdict::Failed(what.to_owned())
    }
}

/// Processor time, summed over all processors.
struct Processors {
    all: Duration,
    idle: Duration,
    service: Duration,
    nodes: Duration,
    /// Processor time of API server and etcd.
    cluster: Duration,
}

impl Processors {
    fn since(&self, before: &Processors) -> Processors {
        Processors {
            all: self.all.saturating_sub(before.all),
            idle: self.idle.saturating_sub(before.idle),
            service: self.service.saturating_sub(before.service),
            nodes: self.nodes.saturating_sub(before.nodes),
            cluster: self.cluster.saturating_sub(before.cluster),
        }
    }

    fn others(&self) -> Duration {
        [self.idle, self.service, self.nodes, self.cluster]
            .into_iter()
            .fold(self.all, Duration::saturating_sub)
    }

    fn share(&self, time: Duration) -> f64 {
        time.as_secs_f64() / self.all.as_secs_f64().max(0.01)
    }
}

/// Four columns with the share of each party, in percent of all processors.
impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = [self.service, self.nodes, self.cluster, self.others()]
            .map(|time| 100.0 * self.share(time));
        let [service, nodes, cluster, others] = shares;
        write!(
            f,
            "{service:.0} % | {nodes:.0} % | {cluster:.0} % | {others:.0} %"
        )
    }
}

/// Returns the total and the idle time of the whole machine (proc(5), first line of stat: user,
/// nice, system, idle, iowait, irq, softirq, steal; in hundredths of a second).
fn machine_time() -> (Duration, Duration) {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .unwrap()
        .split_whitespace()
        .skip(1)
        .take(8)
        .map(|ticks| ticks.parse().unwrap())
        .collect();
    let time = |ticks: u64| Duration::from_millis(10 * ticks);
    (time(ticks.iter().sum()), time(ticks[3] + ticks[4]))
}

/// Returns the processor time of a process (proc(5): fields 14 and 15 of stat, in hundredths of a second).
fn cpu_of(proc: &Path) -> Duration {
    let stat = fs::read_to_string(proc.join("stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    Duration::from_millis(
        10 * fields[11..13]
            .iter()
            .map(|ticks| ticks.parse::<u64>().unwrap())
            .sum::<u64>(),
    )
}
