//! `firstlight rollout` with a real kube-apiserver, and the real join service, which machines with real (software) TPMs ask for tickets.
//! The test does the work of the kubelets and of the machines: it runs what pods are told to run, and boots what was installed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use base::stop::Stop;
use base::text::hex;
use base::time;
use base::uuid::Uuid;
use common::cloud_server::{self, Answer};
use kubernetes::client::{
    CONFIG_MAPS, Client, DAEMON_SETS, LEASES, NODES, Object, POD_DISRUPTION_BUDGETS, PODS, Selector,
};
use kubernetes::machine_record::MachineRecord;
use kubernetes::services;
use proto::join::{
    ISSUE_JOIN_TICKET, ISSUE_REJOIN_TICKET, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use support::program::{Program, built};
use tempfile::TempDir;

use crate::faults::Mount;
use crate::kube_apiserver::{Cluster, make_default_accounts};
use crate::setup::{
    Setup, alone, channel_from, disk, eventually_within, request, service_program, within,
};
use crate::swtpm::{PCR_4, Swtpm};
use common::manifests::settings;
use common::objects::{list, text};

/// What the boot loader of each image measures.
const OLD: &str = "";
const NEW: &str = "a1";
const BAD: &str = "b2";
/// The program that the nodes of these tests are told to run.
const UPDATE: &str = "/usr/bin/update";
/// By which the rollout waits until a node keeps what `bootstrapper update` has brought.
const TRIAL: &str = "/usr/bin/systemctl start --wait firstlight-trial.service";

/// Returns PCR 4 of machines that boot this image.
fn pcr_4(image: &str) -> String {
    match image {
        OLD => hex(&PCR_4),
        _ => {
            let measured: Vec<u8> = vec![u8::from_str_radix(image, 16).unwrap(); 32];
            hex(digest(&SHA256, &[&PCR_4[..], &measured].concat()).as_ref())
        }
    }
}

fn policy(image: &str, name: &str) -> String {
    let enforced = |value: &str| json!({"expected": value, "warnOnly": false});
    let registers = json!({"4": enforced(&pcr_4(image)), "15": enforced(&"00".repeat(32))});
    json!({"name": name, "measurements": registers}).to_string()
}

/// A machine with two places for an image, as with systemd-sysupdate.
struct Machine {
    tpm: Swtpm,
    number: u8,
    /// What boots next.
    next: &'static str,
    boots: u32,
    /// Whether its kubelet runs.
    is_up: bool,
}

/// All machines, and what they run.
#[derive(Default)]
struct World {
    machines: Mutex<BTreeMap<String, Machine>>,
    /// The logs of containers by their paths at a kubelet.
    logs: Mutex<HashMap<String, String>>,
    /// What the next update installs, and whether it fails.
    offered: Mutex<(&'static str, bool)>,
    /// Every program that a pod was told to run, with its node.
    ran: Mutex<Vec<(String, String)>>,
    /// Whether the trial of a new image fails.
    refuses: Mutex<bool>,
    /// How long an update takes.
    slow: Mutex<Duration>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Rollouts {
    setup: Setup,
    world: Arc<World>,
    service: SocketAddr,
    folder: TempDir,
    port: u16,
    stop: Stop,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Rollouts {
    fn drop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let admin = &self.setup.admin;
        for namespace in ["default", "kube-system"] {
            let pods = PODS.in_namespace(namespace);
            for pod in admin.list(&pods, &Selector::default()).unwrap().items {
                let at = pods.named(text(&pod, "/metadata/name"));
                // one that has ended goes at once
                let ended = json!({"status": {"phase": "Failed"}});
                let _ = admin.merge(&at.subresource("status"), &ended);
                let _ = admin.delete_if_there(&at);
            }
        }
        for name in ["firstlight-rollout", "join-config"] {
            let _ = admin.delete_if_there(&kube_system(name));
        }
        let _ =
            admin.delete_if_there(&LEASES.in_namespace("kube-system").named("firstlight-nodes"));
    }
}

fn kube_system(name: &str) -> Object {
    CONFIG_MAPS.in_namespace("kube-system").named(name)
}

fn address(number: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 42, 9, number))
}

impl Rollouts {
    /// Starts a cluster whose nodes run the old image.
    fn new(planes: u8, workers: u8) -> Rollouts {
        let cluster = Cluster::shared();
        let setup = Setup::new(cluster);
        let admin = &setup.admin;
        make_default_accounts(admin);
        let old = policy(OLD, "image 1");
        for object in services::manifests(&settings(&old)).unwrap() {
            let name = text(&object, "/metadata/name");
            if name == "join-config" || object["kind"] == "DaemonSet" && name == "join-service" {
                admin.apply(&Object::of(&object).unwrap(), &object).unwrap();
            }
        }
        let peers: Vec<Value> = (0..8)
            .map(|number| json!({"Name": format!("worker-{number}"), "ProviderID": format!("w{number}"), "Role": "Worker", "VPCIP": address(100 + number)}))
            .collect();
        setup.metadata.set_peers(&json!(peers).to_string());

        let mount = Mount::new(setup.dir.path().join("config"), &old);
        let (running, service) = service_program(&setup, cluster, &mount.0);
        let world = Arc::new(World::default());
        locked(&world.offered).0 = NEW;
        let logs = world.clone();
        let running = Arc::new(running);
        let of_service = Arc::downgrade(&running);
        let (url, _) = cloud_server::start_tls(move |request| {
            if request.path == "/containerLogs/kube-system/join-service-a/join-service" {
                let said = of_service.upgrade().map(|service| service.output());
                return Answer::text(200, said.unwrap_or_default());
            }
            match locked(&logs.logs).get(&request.path) {
                Some(log) => Answer::text(200, log.as_str()),
                None => Answer::text(404, "no such container"),
            }
        });
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("admin.conf"), cluster.kubeconfig()).unwrap();
        for (name, image) in [("old.json", OLD), ("new.json", NEW)] {
            let name_of_image = if image == OLD { "image 1" } else { "image 2" };
            fs::write(folder.path().join(name), policy(image, name_of_image)).unwrap();
        }
        let stop = Stop::new();
        let mut threads = vec![];
        {
            // the kubelet that mounts the policy into the join service
            let (client, stop) = (cluster.client(&stop), stop.clone());
            let mut present = old;
            let mut version = 1;
            threads.push(thread::spawn(move || {
                while !stop.wait(Duration::from_millis(300)) {
                    let Ok(Some(policy)) = services::present_policy(&client) else {
                        continue;
                    };
                    if policy != present {
                        version += 1;
                        mount.replace(&format!("..{version}"), &policy);
                        present = policy;
                    }
                }
                drop(running);
            }));
        }
        {
            let (client, world, stop) = (cluster.client(&stop), world.clone(), stop.clone());
            threads.push(thread::spawn(move || {
                while !stop.wait(Duration::from_millis(200)) {
                    play_kubelets(&client, &world, service);
                }
            }));
        }
        let rollouts = Rollouts {
            setup,
            world,
            service,
            folder,
            port: url.rsplit(':').next().unwrap().parse().unwrap(),
            stop,
            threads,
        };
        for number in 0..planes {
            rollouts.make_plane(number);
        }
        for number in 0..workers {
            rollouts.join(&format!("worker-{number}"), 100 + number, OLD);
        }
        let set = DAEMON_SETS
            .in_namespace("kube-system")
            .named("join-service");
        let owner = rollouts.owner("apps/v1", "DaemonSet", &set);
        rollouts.pod(
            "join-service-a",
            "kube-system",
            "plane-0",
            json!({"metadata.labels": {"k8s-app": "join-service"}, "metadata.ownerReferences": owner}),
        );
        rollouts
    }

    fn admin(&self) -> &Client {
        &self.setup.admin
    }

    /// Makes a control plane that has been there since before records had images.
    fn make_plane(&self, number: u8) {
        let name = format!("plane-{number}");
        let uuid = Uuid::parse(&disk(number)).unwrap();
        let record = MachineRecord {
            control_plane: true,
            addresses: vec![address(number)],
            ..MachineRecord::of_node(&name, &uuid, None, "", "")
        };
        let maps = CONFIG_MAPS.in_namespace("kube-system");
        self.admin().create(&maps, &record.to_object()).unwrap();
        self.boot(&name, number, OLD);
        self.make_node(&name, number, true);
        let static_pod = json!({
            "metadata.labels": {"component": "etcd", "tier": "control-plane"},
            "metadata.annotations": {"kubernetes.io/config.mirror": "a"},
            "metadata.ownerReferences": self.owner("v1", "Node", &NODES.named(&name)),
        });
        self.pod(&format!("etcd-{name}"), "kube-system", &name, static_pod);
    }

    /// Returns the list of owners with this object.
    fn owner(&self, version: &str, kind: &str, object: &Object) -> Value {
        let owner = self.admin().get(object).unwrap();
        let (name, uid) = (object.name(), &owner["metadata"]["uid"]);
        json!([{"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": true}])
    }

    fn boot(&self, name: &str, number: u8, image: &'static str) {
        let tpm = Swtpm::start();
        measure(&tpm, image);
        let machine = Machine {
            tpm,
            number,
            next: image,
            boots: 1,
            is_up: true,
        };
        locked(&self.world.machines).insert(name.to_owned(), machine);
    }

    /// Lets a new machine join, as an autoscaler's.
    fn join(&self, name: &str, number: u8, image: &'static str) {
        self.boot(name, number, image);
        let machines = locked(&self.world.machines);
        let address = address(number).to_string();
        let asked = request(name, &[&address], number, false);
        let source = address.parse().unwrap();
        let channel = channel_from(source, &machines[name].tpm, self.service);
        let ticket: Result<IssueJoinTicketResponse, _> =
            channel.unary(ISSUE_JOIN_TICKET, &asked, &within(30));
        ticket.unwrap();
        drop(machines);
        self.make_node(name, number, false);
    }

    fn make_node(&self, name: &str, number: u8, is_control_plane: bool) {
        let mut labels = json!({});
        if is_control_plane {
            labels["node-role.kubernetes.io/control-plane"] = "".into();
        }
        let node = json!({"metadata": {"name": name, "labels": labels}});
        self.admin().create(&NODES.all(), &node).unwrap();
        let status = json!({"status": {
            // the API server looks for the kubelet at the first one: the log server of this test
            "addresses": [{"type": "Hostname", "address": "localhost"}, {"type": "InternalIP", "address": address(number).to_string()}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "nodeInfo": node_info("1", "v1.34.4"),
        }});
        let at = NODES.named(name);
        self.admin()
            .merge(&at.subresource("status"), &status)
            .unwrap();
        self.setup.make_ready(name, "True");
        // the node controller, which the test does not have, takes its taints away
        self.admin()
            .merge(&at, &json!({"spec": {"taints": null}}))
            .unwrap();
        let lease = json!({"metadata": {"name": name}, "spec": {"holderIdentity": name, "leaseDurationSeconds": 40}});
        let leases = LEASES.in_namespace("kube-node-lease");
        self.admin().delete_if_there(&leases.named(name)).unwrap();
        self.admin().create(&leases, &lease).unwrap();
        self.pod(&format!("proxy-{name}"), "kube-system", name, json!({}));
    }

    /// Makes a pod of a ReplicaSet on a node, and waits until it runs.
    fn pod(&self, name: &str, namespace: &str, node: &str, more: Value) {
        let mut pod = json!({
            "metadata": {
                "name": name, "labels": {"app": name},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "a", "uid": "1", "controller": true}],
            },
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{"name": "join-service", "image": "registry.example/a:1"}]},
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            let (part, key) = key.split_once('.').unwrap();
            pod[part][key] = value.clone();
        }
        if let Some(app) = more["metadata.labels"]["k8s-app"].as_str() {
            pod["spec"]["serviceAccountName"] = app.into();
        }
        if namespace == "kube-system" && more["metadata.ownerReferences"].is_null() {
            pod["metadata"]["ownerReferences"][0]["kind"] = "DaemonSet".into();
        }
        let pods = PODS.in_namespace(namespace);
        self.admin().create(&pods, &pod).unwrap();
        eventually_within(60, "the pod runs", || {
            self.admin().get(&pods.named(name)).unwrap()["status"]["phase"] == "Running"
        });
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(built("firstlight"));
        command
            .args(["rollout", arguments[0], "--kubeconfig", "admin.conf"])
            .args(&arguments[1..])
            .current_dir(self.folder.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let output = self.command(arguments).output().unwrap();
        println!("{arguments:?}: {}", said(&output));
        output
    }

    fn does(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}");
        said(&output)
    }

    fn fails(&self, arguments: &[&str], reasons: &[&str]) {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        for reason in reasons {
            assert!(said(&output).contains(reason), "no {reason:?}");
        }
    }

    fn status(&self) -> Value {
        let output = self.run(&["status", "--output", "json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the first digits of PCR 4 of the images that the policy accepts.
    fn accepted(&self) -> BTreeSet<String> {
        let policy = services::present_policy(self.admin()).unwrap().unwrap();
        let policy: Value = serde_json::from_str(&policy).unwrap();
        let further = list(&policy, "/alsoAccepted").iter();
        let value = |image: &Value| text(image, "/measurements/4/expected").to_owned();
        further.chain([&policy]).map(value).collect()
    }

    fn cordoned(&self) -> Vec<String> {
        let nodes = self.admin().list(&NODES.all(), &Selector::default());
        let nodes = nodes.unwrap().items;
        let cordoned = nodes
            .iter()
            .filter(|it| it["spec"]["unschedulable"] == true);
        cordoned
            .map(|it| text(it, "/metadata/name").to_owned())
            .collect()
    }

    fn record_of(&self, node: &str) -> MachineRecord {
        let map = self
            .admin()
            .get_as(&kube_system(&format!("join-node-{node}")));
        MachineRecord::read(&map.unwrap()).unwrap()
    }

    /// Returns the nodes that have booted since the beginning, in this order.
    fn rebooted(&self) -> Vec<String> {
        let ran = locked(&self.world.ran);
        let reboots = ran.iter().filter(|(_, what)| what.contains("reboot"));
        reboots.map(|(node, _)| node.clone()).collect()
    }

    /// Switches a machine on or off.
    fn switch(&self, node: &str, on: bool) {
        let mut machines = locked(&self.world.machines);
        machines.get_mut(node).unwrap().is_up = on;
    }

    /// Runs an operator's command; when it has evicted a pod from a machine that is off, the kubelet there becomes silent, and `then` runs.
    fn silent_in_the_drain<T: Send>(
        &self,
        node: &str,
        command: impl FnOnce() -> T + Send,
        then: impl FnOnce(),
    ) -> T {
        let grace = json!({"spec.terminationGracePeriodSeconds": 30});
        self.pod("app", "default", node, grace);
        self.switch(node, false);
        thread::scope(|scope| {
            let operator = scope.spawn(command);
            let at = PODS.in_namespace("default").named("app");
            eventually_within(60, "the pod is evicted", || {
                !self.admin().get(&at).unwrap()["metadata"]["deletionTimestamp"].is_null()
            });
            self.setup.make_ready(node, "Unknown");
            then();
            operator.join().unwrap()
        })
    }
}

fn node_info(boot: &str, kubelet: &str) -> Value {
    json!({
        "bootID": boot, "kubeletVersion": kubelet, "machineID": "a", "systemUUID": "a", "kernelVersion": "a", "osImage": "a",
        "containerRuntimeVersion": "a", "kubeProxyVersion": "a", "operatingSystem": "linux", "architecture": "amd64",
    })
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn measure(tpm: &Swtpm, image: &str) {
    if image != OLD {
        tpm.tool(
            "tpm2_pcrextend",
            &[&format!("4:sha256={}", image.repeat(32))],
        );
    }
}

/// Does what the kubelets of the machines that are up do: renew leases, start pods, and run those of the rollout.
fn play_kubelets(client: &Client, world: &World, service: SocketAddr) {
    let up: Vec<String> = (locked(&world.machines).iter())
        .filter(|(_, machine)| machine.is_up)
        .map(|(name, _)| name.clone())
        .collect();
    for name in &up {
        let renewed = json!({"spec": {"renewTime": time::micros(SystemTime::now())}});
        let _ = client.merge(
            &LEASES.in_namespace("kube-node-lease").named(name),
            &renewed,
        );
    }
    let pods = client.list(&PODS.all(), &Selector::default());
    for pod in pods.map(|it| it.items).unwrap_or_default() {
        let node = text(&pod, "/spec/nodeName").to_owned();
        let is_ending = !pod["metadata"]["deletionTimestamp"].is_null();
        if text(&pod, "/status/phase") != "Pending" && !is_ending || !up.contains(&node) {
            continue;
        }
        let at = PODS
            .in_namespace(text(&pod, "/metadata/namespace"))
            .named(text(&pod, "/metadata/name"));
        let status = |status: Value| {
            let _ = client.merge(&at.subresource("status"), &json!({"status": status}));
        };
        if is_ending {
            status(json!({"phase": "Failed"}));
            // a kubelet says that its containers have ended by a grace period of 0, as an eviction can say it, too
            let now = json!({
                "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": at.name()},
                "deleteOptions": {"gracePeriodSeconds": 0},
            });
            let _ = client.create_subresource(&at.subresource("eviction"), &now);
            continue;
        }
        if !at.name().starts_with("firstlight-") {
            let name = text(&pod, "/spec/containers/0/name");
            status(json!({
                "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": name, "image": "a", "imageID": "a", "ready": true, "restartCount": 0,
                    "state": {"running": {"startedAt": time::seconds(SystemTime::now())}}}],
            }));
            continue;
        }
        if at.name().starts_with("firstlight-etcd-") {
            // etcdctl, in place of an etcd with as many members as there are control planes
            let members = etcd(world);
            for (container, log) in ["members", "health"].iter().zip(members) {
                let path = format!("/containerLogs/kube-system/{}/{container}", at.name());
                locked(&world.logs).insert(path, log);
            }
            let ended = |name: &str| {
                json!({"name": name, "image": "a", "imageID": "a", "ready": false, "restartCount": 0,
                    "state": {"terminated": {"exitCode": 0}}})
            };
            status(
                json!({"phase": "Succeeded", "containerStatuses": [ended("members"), ended("health")]}),
            );
            continue;
        }
        // it is there already
        assert_eq!(
            pod["spec"]["containers"][0]["image"],
            "registry.example/a:1"
        );
        let words = list(&pod, "/spec/containers/0/command").iter();
        let words: Vec<_> = words.map(|word| word.as_str().unwrap()).collect();
        let what = words.join(" ");
        locked(&world.ran).push((node.clone(), what.clone()));
        if what == "/usr/bin/systemctl reboot" {
            // the pod goes down with its node, and its kubelet says no more than that
            status(json!({"phase": "Failed", "reason": "Terminated"}));
            reboot(client, world, &node, service);
            let _ = client.delete_if_there(&at);
            continue;
        }
        if what == TRIAL {
            // an API server that reboots with its node deletes no pod
            let name = format!("firstlight-reboot-{node}");
            let left = json!({"metadata": {"name": name}, "spec": {"nodeName": node, "containers": [{"name": "run", "image": "a"}]}});
            let left_at = at.collection().named(&name);
            let _ = client.create(&at.collection(), &left);
            let failed = json!({"status": {"phase": "Failed"}});
            let _ = client.merge(&left_at.subresource("status"), &failed);
        }
        if what == TRIAL && *locked(&world.refuses) {
            locked(&world.machines).get_mut(&node).unwrap().next = OLD;
            reboot(client, world, &node, service);
            // its pod has begun again, and there is no trial any more
            status(json!({"phase": "Succeeded"}));
            continue;
        }
        thread::sleep(*locked(&world.slow));
        let (image, fails) = *locked(&world.offered);
        let mut code = 0;
        if what.contains("bootstrapper upgrade") {
            assert!(
                what.contains(
                    "/pods/$(POD_UID)/volumes/kubernetes.io~configmap/components/components"
                ),
                "{what}"
            );
            assert!(
                text(&pod, "/spec/volumes/5/configMap/name").starts_with("k8s-components-"),
                "{pod:#}"
            );
            let info = json!({"status": {"nodeInfo": node_info("1", "v1.34.5")}});
            let _ = client.merge(&NODES.named(&node).subresource("status"), &info);
        } else if what != TRIAL {
            let own = what.ends_with("-- /usr/bin/bootstrapper update");
            assert!(
                own || what.ends_with(&format!("-- {UPDATE} --now")),
                "{what}"
            );
            if let Some(machine) = locked(&world.machines).get_mut(&node) {
                machine.next = image;
            }
        }
        if fails {
            code = 7;
            let path = format!("/containerLogs/kube-system/{}/run", at.name());
            locked(&world.logs).insert(path, "no space left in partition B\n".into());
        }
        status(json!({
            "phase": if code == 0 { "Succeeded" } else { "Failed" },
            "containerStatuses": [{"name": "run", "image": "a", "imageID": "a", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code}}}],
        }));
    }
}

/// Returns what etcdctl says of the members, and of their health.
fn etcd(world: &World) -> [String; 2] {
    let machines = locked(&world.machines);
    let planes: Vec<_> = machines
        .iter()
        .filter(|(name, _)| name.starts_with("plane-"))
        .collect();
    let url = |number: u8, port: u16| format!("https://{}:{port}", address(number));
    let members = planes.iter().map(|(name, machine)| {
        json!({"ID": u64::from(machine.number) + 1, "name": name, "peerURLs": [url(machine.number, 2380)],
            "clientURLs": [url(machine.number, 2379)]})
    });
    let health = planes.iter().map(|(_, machine)| {
        json!({"endpoint": url(machine.number, 2379), "health": machine.is_up, "took": "1ms", "error": ""})
    });
    let members: Vec<_> = members.collect();
    let health: Vec<_> = health.collect();
    [
        json!({"header": {}, "members": members}).to_string(),
        json!(health).to_string(),
    ]
}

/// Reboots a machine: its initramfs asks the join service for the key of its disk. Without a key it stays there.
fn reboot(client: &Client, world: &World, name: &str, service: SocketAddr) {
    let mut machines = locked(&world.machines);
    let machine = machines.get_mut(name).unwrap();
    machine.tpm.reboot();
    measure(&machine.tpm, machine.next);
    machine.boots += 1;
    machine.is_up = opens_its_disk(machine, service);
    println!(
        "{name} boots {:?}, and opens its disk: {}",
        machine.next, machine.is_up
    );
    let ready = if machine.is_up { "True" } else { "Unknown" };
    let mut status = json!({"conditions": [{"type": "Ready", "status": ready, "reason": "Test",
        "lastTransitionTime": time::seconds(SystemTime::now()), "lastHeartbeatTime": time::seconds(SystemTime::now())}]});
    if machine.is_up {
        status["nodeInfo"] = node_info(&machine.boots.to_string(), "v1.34.4");
    }
    let _ = client.merge(
        &NODES.named(name).subresource("status"),
        &json!({"status": status}),
    );
}

fn opens_its_disk(machine: &Machine, service: SocketAddr) -> bool {
    let issuer: Arc<dyn verifier::Issuer> = Arc::new(verifier::qemu_vtpm::issuer(
        machine.tpm.location().parse().unwrap(),
        None,
    ));
    let client = atls::Client::new(Some(issuer), None);
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::new(address(machine.number), 0).into())
        .unwrap();
    socket.connect(&service.into()).unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(20);
    let Ok(transport) = client.connect(socket.into(), end) else {
        return false;
    };
    let asked = IssueRejoinTicketRequest {
        disk_uuid: disk(machine.number),
    };
    let answer: Result<IssueRejoinTicketResponse, _> = rpc::grpc::Channel::new(transport, "x")
        .unwrap()
        .unary(ISSUE_REJOIN_TICKET, &asked, &within(30));
    answer.is_ok()
}

/// The beginning of each rollout of an image in these tests.
const START: [&str; 6] = [
    "start",
    "--policy",
    "new.json",
    "--node-command",
    "/usr/bin/update --now",
    "--yes",
];

/// A rollout by the service of the image, also of the only control plane.
const UNATTENDED: [&str; 5] = [
    "start",
    "--policy",
    "new.json",
    "--yes",
    "--accept-downtime",
];

fn with<'a>(arguments: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [arguments, more].concat()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_image_reaches_all_nodes_by_two_operators_while_an_autoscaler_adds_others() {
    let _alone = alone();
    let cluster = Rollouts::new(3, 2);
    let (old, new) = (pcr_4(OLD), pcr_4(NEW));
    cluster.pod("web", "default", "worker-0", json!({}));

    // the plan changes nothing
    let plan = cluster.does(&with(&["plan"], &START[1..5]));
    for line in [
        "Rollout of the image image 2",
        "at the end no longer image 1",
        "Each node runs `/usr/bin/update --now`, by a pod, and reboots",
        "worker-0  worker         Ready     image 1  1 pods move",
        "plane-2   control-plane  Ready     unknown  0 pods move",
        "Nothing blocks it",
    ] {
        assert!(plan.contains(line), "no {line:?}");
    }
    assert_eq!(cluster.accepted(), [old.clone()].into());
    assert!(
        cluster
            .setup
            .admin
            .find(&kube_system("firstlight-rollout"))
            .unwrap()
            .is_none()
    );
    let asked = cluster.run(&START[..5]);
    assert_eq!(asked.status.code(), Some(2), "nobody can be asked");

    // one operator begins, and another one pauses it; a third one may not begin another rollout
    *locked(&cluster.world.slow) = Duration::from_secs(30);
    let mut first = Program::start(&mut cluster.command(&START));
    first.expect("worker-0: drained");
    assert_eq!(cluster.accepted(), [old.clone(), new.clone()].into());
    cluster.fails(&START, &["is not over"]);
    cluster.fails(
        &["continue", "--yes"],
        &["changes the nodes of this cluster at this moment"],
    );
    assert!(cluster.does(&["status"]).contains("drives it"));
    cluster.does(&["pause"]);
    assert!(first.exit().success(), "{}", first.output());
    first.expect("paused: `firstlight rollout continue` goes on");
    assert_eq!(cluster.rebooted(), ["worker-0"]);
    assert_eq!(cluster.cordoned(), [""; 0]);
    let status = cluster.status();
    assert_eq!(
        (&status["state"], &status["why"]),
        (&json!("paused"), &Value::Null)
    );
    assert_eq!(
        status["order"],
        json!(["worker-1", "plane-0", "plane-1", "plane-2"])
    );
    // the pod went, and the join service has recorded which image the node proved
    assert!(
        cluster
            .admin()
            .find(&PODS.in_namespace("default").named("web"))
            .unwrap()
            .is_none()
    );
    let (of_new, of_old) = (
        cluster.record_of("worker-0").image,
        cluster.record_of("worker-1").image,
    );
    assert_eq!((of_new.len(), of_old.len()), (32, 32));
    assert_ne!(of_new, of_old);

    // an autoscaler adds one machine of each image
    cluster.join("worker-2", 102, OLD);
    cluster.join("worker-3", 103, NEW);
    *locked(&cluster.world.slow) = Duration::ZERO;
    // the operator is cut off in the middle, and another one goes on
    let mut second = Program::start(&mut cluster.command(&["continue", "--yes"]));
    second.expect("worker-1: cordoned");
    let killed = Command::new("kill")
        .args(["-KILL", &second.id().to_string()])
        .status();
    assert!(killed.unwrap().success());
    second.exit();
    let done = cluster.does(&["continue", "--yes"]);
    assert!(
        done.contains("done: every node has the image image 2"),
        "{done}"
    );
    assert_eq!(
        cluster.rebooted(),
        [
            "worker-0", "worker-1", "worker-2", "plane-0", "plane-1", "plane-2"
        ],
        "workers first, each once, and the machine that came with the new image not at all"
    );
    assert_eq!(cluster.accepted(), [new].into());
    assert_eq!(cluster.cordoned(), [""; 0]);
    for node in ["plane-1", "worker-3"] {
        assert_eq!(cluster.record_of(node).image, of_new);
    }
    assert_eq!(cluster.status()["state"], "done");
    let map = cluster.admin().get(&kube_system("join-config")).unwrap();
    assert!(!text(&map, "/data/attestationConfig_backup").is_empty());
    assert!(
        map["binaryData"]["measurementSalt"].is_string(),
        "the salt stays"
    );
    cluster.fails(&["continue", "--yes"], &["no rollout that could go on"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_bad_image_stops_at_the_first_node_and_each_failure_says_why() {
    let _alone = alone();
    let cluster = Rollouts::new(3, 2);
    let _controller = Cluster::shared().start_controllers("disruption-controller");
    let (old, new) = (pcr_4(OLD), pcr_4(NEW));

    // pods that the operator has to permit block it before anything is changed
    cluster.pod(
        "scratch",
        "default",
        "worker-1",
        json!({"spec.volumes": [{"name": "a", "emptyDir": {}}]}),
    );
    cluster.fails(
        &START,
        &[
            "default/scratch",
            "--delete-emptydir-data",
            "Nothing was changed",
        ],
    );
    let start = with(&START, &["--delete-emptydir-data"]);
    assert_eq!(cluster.accepted(), [old.clone()].into());

    // a PodDisruptionBudget
    cluster.pod("guarded", "default", "worker-0", json!({}));
    let budget = json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}});
    let budgets = POD_DISRUPTION_BUDGETS.in_namespace("default");
    cluster.admin().create(&budgets, &budget).unwrap();
    eventually_within(60, "the budget counts", || {
        cluster.admin().get(&budgets.named("b")).unwrap()["status"]["currentHealthy"] == 1
    });
    cluster.fails(
        &with(&start, &["--drain-timeout", "6s"]),
        &["pods are still on worker-0", "disruption budget"],
    );
    assert_eq!(
        cluster.status()["node"],
        json!({"name": "worker-0", "step": "drain"})
    );
    assert!(text(&cluster.status(), "/why").contains("disruption budget"));
    cluster.admin().delete(&budgets.named("b")).unwrap();

    // the update fails on the node
    *locked(&cluster.world.offered) = (OLD, true);
    cluster.fails(
        &["continue", "--yes"],
        &[
            "`/usr/bin/update --now` failed: exit code 7",
            "no space left in partition B",
        ],
    );
    assert_eq!(cluster.rebooted(), [""; 0]);

    // the operator lets pods come back: they are moved again before the next try
    let uncordoned = json!({"spec": {"unschedulable": null}});
    let worker = NODES.named("worker-0");
    cluster.admin().merge(&worker, &uncordoned).unwrap();
    cluster.pod("late", "default", "worker-0", json!({}));

    // an image that is not the one of the policy
    *locked(&cluster.world.offered) = (BAD, false);
    cluster.fails(
        &["continue", "--yes", "--node-timeout", "20s"],
        &[
            "waited 20 s (--node-timeout) for worker-0 to prove the new image",
            "A join service has refused it",
            "127.42.9.100",
            "PCR 4",
        ],
    );
    assert_eq!(cluster.rebooted(), ["worker-0"]);
    let late = PODS.in_namespace("default").named("late");
    assert!(cluster.admin().find(&late).unwrap().is_none());
    assert_eq!(cluster.cordoned(), ["worker-0"]);
    assert_eq!(cluster.accepted(), [old.clone(), new.clone()].into());
    for node in ["worker-1", "plane-0", "plane-1", "plane-2"] {
        let machines = locked(&cluster.world.machines);
        assert_eq!(machines[node].boots, 1, "{node} stays as it is");
    }

    // the machine falls back to the old image, and is changed again, now with the right one
    locked(&cluster.world.machines)
        .get_mut("worker-0")
        .unwrap()
        .next = OLD;
    reboot(cluster.admin(), &cluster.world, "worker-0", cluster.service);
    *locked(&cluster.world.offered) = (OLD, false);
    cluster.fails(
        &["continue", "--yes"],
        &["worker-0 came back without the new image"],
    );
    *locked(&cluster.world.offered) = (NEW, false);
    *locked(&cluster.world.slow) = Duration::from_secs(3);
    let mut on = Program::start(&mut cluster.command(&["continue", "--yes"]));
    on.expect("worker-0: changed");

    // abort, while another operator drives it: worker-0 has the new image, so the policy keeps both
    let aborted = cluster.does(&["abort", "--yes"]);
    assert!(
        aborted.contains("The policy keeps accepting both images"),
        "{aborted}"
    );
    on.exit();
    assert_eq!(cluster.accepted(), [old.clone(), new.clone()].into());
    assert_eq!(cluster.status()["state"], "aborted");
    eventually_within(60, "worker-0 is back", || {
        locked(&cluster.world.machines)["worker-0"].is_up
    });

    // and back, by a rollout of the old image
    *locked(&cluster.world.offered) = (OLD, false);
    *locked(&cluster.world.slow) = Duration::ZERO;
    let mut back = START.to_vec();
    back[2] = "old.json";
    let back = cluster.does(&with(&back, &["--delete-emptydir-data"]));
    assert!(
        back.contains("done: every node has the image image 1"),
        "{back}"
    );
    assert_eq!(cluster.accepted(), [old].into());

    // aborted before a node is changed: the new image leaves the policy
    *locked(&cluster.world.offered) = (NEW, true);
    cluster.fails(&start, &["exit code 7"]);
    let status = cluster.status();
    assert_eq!(status["node"]["step"], "change");
    // a failed change may have changed something, so both stay
    assert!(
        cluster
            .does(&["abort", "--yes"])
            .contains("keeps accepting both")
    );
    assert_eq!(cluster.cordoned(), [""; 0]);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_next_node_is_not_touched_before_one_keeps_its_image() {
    let _alone = alone();
    let cluster = Rollouts::new(1, 2);
    let (old, new) = (pcr_4(OLD), pcr_4(NEW));
    *locked(&cluster.world.refuses) = true;
    cluster.fails(&UNATTENDED, &["worker-0 went back to its old image"]);
    assert_eq!(cluster.rebooted(), ["worker-0"]);
    assert_eq!(cluster.accepted(), [old, new.clone()].into());
    assert_eq!(cluster.cordoned(), ["worker-0"]);

    *locked(&cluster.world.refuses) = false;
    locked(&cluster.world.ran).clear();
    cluster.does(&["continue", "--yes"]);
    assert_eq!(cluster.accepted(), [new].into());
    let ran = locked(&cluster.world.ran);
    let steps: Vec<_> = ran.iter().map(|(node, what)| (&**node, &**what)).collect();
    for (three, node) in steps.chunks(3).zip(["worker-0", "worker-1", "plane-0"]) {
        assert!(three.iter().all(|(at, _)| *at == node), "{three:?}");
        assert!(
            three[1].1.ends_with("reboot") && three[2].1 == TRIAL,
            "{three:?}"
        );
    }
    assert_eq!(steps.len(), 9, "{steps:?}");
    eventually_within(60, "no pod of the rollout is left", || {
        let pods = PODS.in_namespace("kube-system");
        let pods = cluster.admin().list(&pods, &Selector::default()).unwrap();
        let mut names = pods.items.iter().map(|pod| text(pod, "/metadata/name"));
        !names.any(|name| name.starts_with("firstlight-"))
    });
}

/// The kubelet of a machine with little processor time misses its heartbeat.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_kubelet_that_is_silent_for_a_moment_does_not_end_a_rollout() {
    let _alone = alone();
    let cluster = Rollouts::new(1, 2);
    let comes_back = || {
        thread::sleep(Duration::from_secs(5));
        cluster.switch("worker-0", true);
        cluster.setup.make_ready("worker-0", "True");
    };
    let said = cluster.silent_in_the_drain("worker-0", || cluster.does(&UNATTENDED), comes_back);
    assert!(
        said.contains("for the kubelet of worker-0, which is silent"),
        "{said}"
    );
    assert_eq!(cluster.rebooted(), ["worker-0", "worker-1", "plane-0"]);
}

/// Somebody deletes the Node of a machine that is off: no kubelet will say whether the pods have ended.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_that_is_deleted_in_its_drain_ends_a_rollout() {
    let _alone = alone();
    let cluster = Rollouts::new(1, 2);
    let why = "the Node worker-0 was deleted or replaced while its pods were moved away";
    let command = || cluster.fails(&UNATTENDED, &[why]);
    let is_deleted = || cluster.admin().delete(&NODES.named("worker-0")).unwrap();
    cluster.silent_in_the_drain("worker-0", command, is_deleted);
    assert_eq!(cluster.rebooted(), [""; 0]);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn machines_that_are_replaced_are_asked_for_and_awaited() {
    let _alone = alone();
    let cluster = Rollouts::new(1, 2);
    let start = [
        "start",
        "--policy",
        "new.json",
        "--replace-command",
        "touch gone-{node}",
        "--yes",
    ];
    let mut rollout = Program::start(&mut cluster.command(&with(&start, &["--accept-downtime"])));
    for (name, number) in [("worker-0", 104), ("worker-1", 105)] {
        let asked = cluster.folder.path().join(format!("gone-{name}"));
        eventually_within(120, "its replacement is asked for", || asked.exists());
        // another machine with another name, by an autoscaler
        locked(&cluster.world.machines).remove(name);
        cluster.admin().delete(&NODES.named(name)).unwrap();
        let record = kube_system(&format!("join-node-{name}"));
        cluster.admin().delete(&record).unwrap();
        cluster.join(&format!("worker-{}", number - 100), number, NEW);
    }
    // the last member of etcd does not go, whatever is accepted
    assert_eq!(rollout.exit().code(), Some(1), "{}", rollout.output());
    rollout.expect("firstlight node remove plane-0");
    assert!(!cluster.folder.path().join("gone-plane-0").exists());
    assert_eq!(cluster.accepted().len(), 2);
    // what runs on the operator's machine is not for the cluster to choose
    let record = cluster.admin().get(&kube_system("firstlight-rollout"));
    assert!(!record.unwrap().to_string().contains("touch"));
    // the operator gives it the new image, with its disk
    locked(&cluster.world.machines)
        .get_mut("plane-0")
        .unwrap()
        .next = NEW;
    reboot(cluster.admin(), &cluster.world, "plane-0", cluster.service);
    cluster.does(&["continue", "--yes"]);
    assert_eq!(cluster.accepted(), [pcr_4(NEW)].into());
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_version_of_kubernetes_reaches_control_planes_first_by_the_list_in_the_cluster() {
    let _alone = alone();
    let cluster = Rollouts::new(3, 1);
    let configuration = "apiServer: {}\nkubernetesVersion: v1.34.4\n";
    cluster
        .admin()
        .merge(
            &kube_system("kubeadm-config"),
            &json!({"data": {"ClusterConfiguration": configuration}}),
        )
        .unwrap();
    let component = |name: &str| {
        json!({"url": format!("https://dl.k8s.io/v1.34.5/bin/linux/amd64/{name}"), "hash": format!("sha256:{}", "00".repeat(32)),
            "install_path": format!("/run/state/bin/{name}")})
    };
    let list = json!([
        component("kubeadm"),
        component("kubelet"),
        component("kubectl")
    ]);
    fs::write(
        cluster.folder.path().join("components.json"),
        list.to_string(),
    )
    .unwrap();
    let start = [
        "start",
        "--kubernetes",
        "v1.34.5",
        "--components",
        "components.json",
        "--yes",
    ];
    *locked(&cluster.world.offered) = (OLD, false);
    let done = cluster.does(&start);
    assert!(
        done.contains("done: every node has Kubernetes v1.34.5"),
        "{done}"
    );
    let ran: Vec<_> = locked(&cluster.world.ran)
        .iter()
        .map(|(node, _)| node.clone())
        .collect();
    assert_eq!(ran, ["plane-0", "plane-1", "plane-2", "worker-0"]);
    assert_eq!(cluster.accepted().len(), 1);
    assert_eq!(cluster.rebooted(), [""; 0]);
}
