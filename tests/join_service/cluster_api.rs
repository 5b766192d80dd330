//! Cluster API scales a cluster, with the manifests and commands of docs/day-two/cluster-api.md. Its controllers are real
//! (tools/cluster-api.sh), and so are their management cluster, the join service, the member controller, `firstlight metadata serve` and the `bootstrapper` of
//! each machine. The provider's machines are objects in its memory: the test switches a machine on for each.

mod machine;
mod management;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use ::services::join_service::{Config, JoinService};
use ::services::member_controller::Options;
use ::services::member_controller::deleted_machines::Times;
use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, cluster_id, derive_key};
use base::text::hex;
use bootstrapper::trust::evidence::Attester;
use common::evidence;
use kubernetes::client::{CONFIG_MAPS, LEASES, NODES, PODS, SERVICE_ACCOUNTS, Selector};
use proto::join::{ISSUE_JOIN_TICKET, IssueJoinTicketRequest, IssueJoinTicketResponse};
use rpc::grpc::{Channel, Code};
use serde_json::json;
use support::ROOT;
use tempfile::TempDir;
use verifier::{Issuer, qemu_vtpm};

use crate::client_certificates::bind_as_kubeadm;
use crate::faults::{LONG_AGO, set_issued};
use crate::forger::Forger;
use crate::kube_apiserver::Cluster;
use crate::program::{PATIENCE, Program, built};
use crate::renewal::{Renewals, kubelet};
use crate::setting::Setting;
use crate::setup::*;
use crate::swtpm::{self, PCR_4, Swtpm};
use machine::Machine;
use management::Management;

/// The control plane of the page, which runs the join service.
const PLANE: &str = "control-plane-0";
/// The load balancer of the page.
const LOAD_BALANCER: &str = "10.0.0.100";

/// The blocks of the page: files by name, and commands in their order.
struct Page {
    files: BTreeMap<String, String>,
    commands: Vec<String>,
}

impl Page {
    fn read() -> Page {
        let text = fs::read_to_string(format!("{ROOT}/docs/day-two/cluster-api.md")).unwrap();
        let mut page = Page {
            files: BTreeMap::new(),
            commands: vec![],
        };
        for block in text.split("```").skip(1).step_by(2) {
            let (language, content) = block.split_once('\n').unwrap();
            match language {
                "yaml" => {
                    let name = content.lines().next().unwrap().strip_prefix("# ").unwrap();
                    page.files.insert(name.into(), content.into());
                }
                "sh" => page.commands.push(content.into()),
                other => panic!("a block of {other}"),
            }
        }
        page
    }
}

/// A cluster of Firstlight, and the management cluster that makes its machines.
struct Scene {
    cluster: &'static Cluster,
    management: Management,
    setup: Setup,
    page: Page,
    /// The folder of the operator.
    folder: TempDir,
    /// The maker of the TPMs that the policy accepts.
    authority: TempDir,
    plane: Setting,
    /// `firstlight metadata serve --cluster`, and its address.
    metadata: Option<(Program, SocketAddr)>,
    cluster_id: String,
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    fn new() -> Scene {
        let authority = tempfile::tempdir().unwrap();
        // the authority makes its root with the first TPM
        let plane = Machine::made_by(authority.path());
        let (alone, cluster, setup) = Setup::for_renewals();
        bind_as_kubeadm(&setup.admin);
        let expected = |value: &[u8]| json!({"expected": hex(value), "warnOnly": false});
        let policy = json!({
            "measurements": {"4": expected(&PCR_4), "15": expected(&[0; 32])},
            "endorsementRoots": [swtpm::root_of(authority.path()) + &swtpm::issuer_of(authority.path())],
        });
        fs::write(
            setup.dir.path().join("attestationConfig"),
            policy.to_string(),
        )
        .unwrap();
        let components = CONFIG_MAPS
            .in_namespace("kube-system")
            .named("k8s-components-sha256-1");
        let ours = json!({"data": {"components": machine::components()}});
        setup.admin.merge(&components, &ours).unwrap();

        let secret = Dek::named(MEASUREMENT_SECRET_ID);
        let secret = derive_key(&[0; 32], &[0; 32], secret.info(), KEY_LEN).unwrap();
        let id = cluster_id(&secret, &MEASUREMENT_SALT);
        // the control plane is a member, and proves it
        let tpm: tpm::Location = plane.tpm.location().parse().unwrap();
        let mut open = tpm::Tpm::open(&tpm).unwrap();
        open.measure_cluster_id(&id).unwrap();
        drop(open);
        let issuer = Arc::new(qemu_vtpm::issuer(tpm.clone(), None));
        evidence::give(Attester { issuer, tpm }, &plane.path("evidence"));
        Scene {
            management: Management::start(plane.host(9)),
            cluster,
            setup,
            page: Page::read(),
            folder: tempfile::tempdir().unwrap(),
            authority,
            plane,
            metadata: None,
            cluster_id: hex(&id),
            _alone: alone,
        }
    }

    /// Runs commands of the page in the operator's folder.
    fn run(&self, commands: &str) {
        let kubectl = management::kubectl();
        let path = std::env::var("PATH").unwrap();
        let output = Command::new("bash")
            .args(["-euc", commands])
            .env(
                "PATH",
                format!("{}:{path}", kubectl.parent().unwrap().display()),
            )
            .current_dir(self.folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{commands}\n{said}");
    }

    /// The operator makes the Cluster, the first control plane, and the kubeconfig.
    fn make_cluster(&mut self) {
        let address = self.plane.host(2);
        for (name, content) in &self.page.files {
            let content = content.replace(LOAD_BALANCER, &address.to_string());
            fs::write(self.folder.path().join(name), content).unwrap();
        }
        let administrators = [
            ("firstlight-admin.conf", self.cluster),
            ("management.conf", &self.management.cluster),
        ];
        for (name, cluster) in administrators {
            fs::write(self.folder.path().join(name), cluster.kubeconfig()).unwrap();
        }
        let machines = self.folder.path().join("machines.yaml");
        let apply = ["apply", "--filename", &machines.display().to_string()];
        self.management.kubectl(&apply);
        self.management.address(PLANE, address);
        // what `firstlight init` has made
        let spec = json!({"providerID": format!("in-memory://{PLANE}")});
        machine::register(&kubelet(self.cluster, PLANE), PLANE, &spec);
        self.run(&self.page.commands[0]);
        let (kubeconfig_of, _) = self.page.commands[0].split_once("\n}\n").unwrap();
        let (reader, serve) = self.page.commands[2].rsplit_once("firstlight ").unwrap();
        self.run(&format!("{kubeconfig_of}\n}}\n{reader}"));
        let serve = serve.trim().replace("10.42.0.1:8080", "127.0.0.1:0");
        let server = Program::start(
            Command::new(built("firstlight"))
                .args(serve.split(' '))
                .current_dir(self.folder.path()),
        );
        let line = server.expect("the metadata of the Cluster default/example is on");
        let address = line.rsplit_once("http://").unwrap().1.parse().unwrap();
        self.metadata = Some((server, address));
        self.start_join_service();
    }

    /// Starts the join service and the member controller of the control plane, which ask `firstlight metadata serve` for the machines.
    fn start_join_service(&mut self) {
        let source = self.plane.host(2);
        let url = format!(
            "http://{}",
            machine::forward(source, self.metadata_server())
        );
        drop(self.setup.service.take());
        let metadata = cloud_api::metadata(base::machines::Cloud::Qemu, Some(&url)).unwrap();
        let config = Config {
            listen: SocketAddr::new(source, 30090),
            evidence: Some(self.plane.path("evidence")),
            metadata: Some(metadata.clone()),
            ..self.setup.config(self.cluster)
        };
        self.setup.service = Some(JoinService::start(config).unwrap());
        self.setup.start_controller(Options {
            metadata: Some(metadata),
            // the program waits for five minutes and an hour
            deleted_machines: Times {
                pause: Duration::from_secs(2),
                grace: Duration::from_secs(10),
            },
            ..self.setup.options(self.cluster)
        });
    }

    fn metadata_server(&self) -> SocketAddr {
        self.metadata.as_ref().unwrap().1
    }

    /// Waits until Cluster API has this number of workers. Switches on those that are new, and adds them.
    fn scale(&self, workers: &mut Vec<Machine>, number: usize) {
        let mut names = vec![];
        eventually_so("Cluster API makes the Machines", || {
            names = self.management.workers();
            names.len() == number
        });
        names.retain(|name| !workers.iter().any(|machine| machine.name == *name));
        let new: Vec<_> = names
            .iter()
            .map(|name| {
                let setting = Machine::made_by(self.authority.path());
                self.management.address(name, setting.host(2));
                Machine::start(name, setting, self.metadata_server(), &self.cluster_id)
            })
            .collect();
        for machine in new {
            let token = machine.joined();
            machine.register(&self.setup, self.cluster, &token);
            workers.push(machine);
        }
        for machine in workers.iter() {
            eventually("Cluster API finds the Node of the Machine", || {
                self.management.machine(&machine.name)["status"]["nodeRef"]["name"] == *machine.name
            });
        }
        eventually("no bootstrap token is left", || {
            self.setup.tokens().is_empty()
        });
        assert_no_secret(&self.management.all_objects());
    }

    /// Runs a pod on a node, until it is evicted.
    fn run_pod(&self, node: &str) {
        let account = SERVICE_ACCOUNTS.in_namespace("default");
        let admin = &self.setup.admin;
        admin
            .create_if_absent(&account, &json!({"metadata": {"name": "default"}}))
            .unwrap();
        let spec = json!({
            "nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{"name": "main", "image": "example.com/main"}],
        });
        let pod = json!({"metadata": {"name": node}, "spec": spec});
        admin.create(&PODS.in_namespace("default"), &pod).unwrap();
    }
}

/// Returns how often the service refused evidence for a reason of this kind.
fn refused_evidence(setup: &Setup, kind: &str) -> u64 {
    let metrics = setup.service().metrics().render();
    let name = format!("firstlight_join_refused_evidence_total{{kind=\"{kind}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&*name));
    count.map_or(0, |count| count.parse().unwrap())
}

/// Waits until the condition holds.
fn eventually_so(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Checks that a text contains neither a bootstrap token nor a private key.
fn assert_no_secret(text: &str) {
    assert_eq!(bootstrap_token(text), None);
    assert!(!text.contains("PRIVATE KEY"), "a private key");
}

/// Returns the first bootstrap token in a text (k8s.io/cluster-bootstrap BootstrapTokenPattern).
fn bootstrap_token(text: &str) -> Option<&str> {
    let is_word = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let mut words = text.split(|c: char| !is_word(&c));
    words.find(|word| {
        word.split_once('.').is_some_and(|(id, secret)| {
            let is_small = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            id.len() == 6 && secret.len() == 16 && id.chars().chain(secret.chars()).all(is_small)
        })
    })
}

#[test]
fn a_bootstrap_token_is_found_in_user_data() {
    let token = "abcdef.0123456789abcdef";
    for text in [
        &format!("kubeadm join --token {token} 10.0.0.1:6443"),
        &format!("{{\"value\":\"token: {token}\\n\"}}"),
        token,
    ] {
        assert_eq!(bootstrap_token(text), Some(token), "{text}");
    }
    for text in [
        "infrastructure.cluster.x-k8s.io",
        "abcdef.0123456789abcdefg",
        "",
    ] {
        assert_eq!(bootstrap_token(text), None);
    }
}

#[test]
#[ignore = "needs a kube-apiserver and Cluster API: make test-cluster-api"]
fn a_machine_deployment_goes_from_one_to_five_and_back_without_a_token_in_user_data() {
    let mut scene = Scene::new();
    scene.make_cluster();
    let _controllers = scene.cluster.start_controllers(
        "certificatesigningrequest-signing-controller,garbage-collector-controller",
    );
    let mut workers = vec![];
    scene.scale(&mut workers, 1);
    scene.run(&scene.page.commands[1]);
    scene.scale(&mut workers, 5);
    nothing_joins_with_what_the_management_cluster_has(&scene, &workers[0]);

    let mut gone = workers.split_off(1);
    for machine in &gone {
        scene.management.choose(&machine.name);
        scene.run_pod(&machine.name);
        // a record stays as long as the token of its ticket is valid
        set_issued(&scene.setup, &machine.name, LONG_AGO);
    }
    scene.run(&scene.page.commands[1].replace("--replicas 5", "--replicas 1"));
    scene.scale(&mut workers, 1);
    let admin = &scene.setup.admin;
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let leases = LEASES.in_namespace("kube-node-lease");
    let pods = PODS.in_namespace("default");
    for machine in &mut gone {
        let name = &machine.name;
        let record = maps.named(&format!("join-node-{name}"));
        for (kind, object) in [
            ("Node", NODES.named(name)),
            ("pod", pods.named(name)),
            ("lease", leases.named(name)),
            ("record", record),
        ] {
            eventually_within(120, &format!("the {kind} of {name} is gone"), || {
                admin.find(&object).unwrap().is_none()
            });
        }
        // the machine was not deleted after all, and boots again
        let disk = machine.disk.clone();
        let refused = scene.setup.rejoin(machine.reboot(), &disk);
        let refused = refused.err().expect("the disk stays closed");
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    }
    let nodes = admin
        .list(&NODES.all(), &Selector::default())
        .unwrap()
        .items;
    let mut left: Vec<_> = nodes.iter().map(name).collect();
    left.sort();
    assert_eq!(left, [PLANE, &workers[0].name]);
    // the records of the deleted machines' disks say that these belong to no machine
    let closed = gone.iter().map(|one| format!("join-disk-{}", one.disk));
    let node = format!("join-node-{}", workers[0].name);
    let expected: BTreeSet<_> = closed.chain([node]).collect();
    assert_eq!(BTreeSet::from_iter(scene.setup.records()), expected);
}

/// A thief has every object of the management cluster: user data, addresses, names, provider IDs, the cluster's ID.
fn nothing_joins_with_what_the_management_cluster_has(scene: &Scene, worker: &Machine) {
    let setup = &scene.setup;
    let objects = |setup: &Setup| {
        let nodes = setup.admin.list(&NODES.all(), &Selector::default());
        (setup.records(), nodes.unwrap().items.len())
    };
    let before = objects(setup);
    let of_worker = request(&worker.name, &[&worker.address().to_string()], 77, false);
    let ask = |issuer, request: &_| {
        let answer = ask(setup.service().local_addr(), issuer, request);
        answer.err().expect("no ticket")
    };
    // a refused machine does not learn the reason; the service counts it
    let refused = |issuer, kind: &str| {
        let counted = refused_evidence(setup, kind);
        let why = ask(issuer, &of_worker);
        eventually(&format!("refused as {kind}: {why}"), || {
            refused_evidence(setup, kind) > counted
        });
    };
    let proving = |tpm: &Swtpm| -> Option<Arc<dyn Issuer>> {
        let location = tpm.location().parse().unwrap();
        Some(Arc::new(qemu_vtpm::issuer(location, None)))
    };

    // programs without a TPM
    refused(None, "unproven");
    refused(Some(Arc::new(Forger::new())), "unproven");
    // the right image, with the TPM of another maker
    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = Machine::made_by(elsewhere.path());
    refused(proving(&foreign.tpm), "signature");
    // another image
    let modified = Machine::made_by(scene.authority.path());
    let digest = format!("4:sha256={}", "ab".repeat(32));
    modified.tpm.tool("tpm2_pcrextend", &[&digest]);
    refused(proving(&modified.tpm), "measurement");
    // all is right, but it is no machine of the Cluster
    let genuine = Machine::made_by(scene.authority.path());
    let stranger = request("workers-thief", &[], 78, false);
    let why = ask(proving(&genuine.tpm), &stranger);
    assert!(
        why.contains("knows no machine of this cluster named workers-thief"),
        "{why}"
    );
    // it takes the name of a worker, or its disk
    let why = ask(proving(&genuine.tpm), &of_worker);
    assert!(
        why.contains("a node of this name is another machine"),
        "{why}"
    );
    let why = setup.rejoin(&genuine.tpm, &worker.disk).err().unwrap();
    assert!(
        why.message()
            .contains("this disk belongs to another machine"),
        "{why}"
    );

    // the program of a node in another image, with all settings; the thief has made it trust the join service
    let plane = scene.plane.host(2);
    let listed = json!({"Name": PLANE, "ProviderID": format!("in-memory://{PLANE}"), "Role": "ControlPlane", "VPCIP": plane});
    modified.metadata.set_peers(&json!([listed]).to_string());
    modified.metadata.set_endpoint(&plane.to_string());
    let counted = refused_evidence(setup, "measurement");
    let disk = modified.new_disk();
    let policy = modified.path("service-policy");
    let of_service = json!({"measurements": {"4": {"expected": hex(&PCR_4), "warnOnly": false}}});
    fs::write(&policy, of_service.to_string()).unwrap();
    let mut command = modified.joining(&disk, "Worker");
    command.args(["--cluster-id", &scene.cluster_id]);
    let node = Program::start(command.arg("--service-policy").arg(&policy));
    eventually_within(180, "the node is refused", || {
        refused_evidence(setup, "measurement") > counted
    });
    assert!(!node.output().contains("ticket:"), "{}", node.output());

    assert_eq!(objects(setup), before);
    assert_eq!(setup.tokens(), [""; 0]);
}

/// Requests a ticket through the load balancer. Returns why there is none.
fn ask(
    service: SocketAddr,
    issuer: Option<Arc<dyn Issuer>>,
    request: &IssueJoinTicketRequest,
) -> Result<IssueJoinTicketResponse, String> {
    let socket = TcpStream::connect(service).unwrap();
    let transport = atls::Client::new(issuer, None)
        .connect(socket, Instant::now() + PATIENCE)
        .map_err(|error| error.to_string())?;
    let channel = Channel::new(transport, "x").map_err(|error| error.to_string())?;
    channel
        .unary(ISSUE_JOIN_TICKET, request, &within(30))
        .map_err(|status| status.to_string())
}
