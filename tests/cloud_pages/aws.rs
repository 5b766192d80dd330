//! docs/clouds/aws.md: the real `aws` against moto; then the programs of a node read from moto what the page has made.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use base::machines::{Cloud, Role};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cloud_api::Service;
use common::aws::{Imds, place};
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::python;

use super::page::Page;
use super::work::Work;

/// moto. It ends when its standard input closes.
struct Moto {
    _process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Its address, and the key on the consoles of its machines.
    found: Value,
}

impl Moto {
    fn start() -> Moto {
        let mut process = python()
            .arg(format!("{ROOT}/tests/cloud_pages/aws.py"))
            .arg(format!("{ROOT}/docs/clouds/aws-operator.json"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut moto = Moto {
            input: process.stdin.take().unwrap(),
            output: BufReader::new(process.stdout.take().unwrap()),
            _process: process,
            found: Value::Null,
        };
        moto.found = moto.answer();
        moto
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        // moto prints lines of its own
        while !line.starts_with('{') {
            line.clear();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "moto has ended"
            );
        }
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, question: &str) -> Value {
        writeln!(self.input, "{question}").unwrap();
        self.answer()
    }

    fn url(&self) -> &str {
        self.found["url"].as_str().unwrap()
    }
}

/// Returns the client of a machine, which knows what EC2 gives to this machine.
fn metadata(machine: &Value, credentials: &Value, moto: &str) -> Arc<dyn Service> {
    assert_eq!(machine["options"]["HttpTokens"], "required");
    // without this option the instance's tags are not in its metadata
    assert_eq!(machine["options"]["InstanceMetadataTags"], "enabled");
    let (_, url) = Imds::start(machine, credentials);
    cloud_api::metadata(Cloud::named("aws").unwrap(), Some(&place(&url, moto))).unwrap()
}

fn of_role<'a>(found: &'a Value, role: &str) -> Vec<&'a Value> {
    let machines = found["machines"].as_array().unwrap().iter();
    machines.filter(|machine| machine["role"] == role).collect()
}

fn check_image(found: &Value, work: &Work) {
    let registered = &found["seen"]["register_image"][0];
    assert_eq!(registered["BootMode"], "uefi");
    assert_eq!(registered["TpmSupport"], "v2.0");
    assert_eq!(found["images"].as_array().unwrap().len(), 1);
    let snapshot = &found["snapshots"][0];
    assert_eq!(snapshot["status"], "completed");
    // the blocks are the image
    let mut image = fs::read(work.path("firstlight.raw")).unwrap();
    image.resize(image.len().next_multiple_of(1 << 19), 0);
    for (number, block) in image.chunks(1 << 19).enumerate() {
        match snapshot["blocks"][number.to_string()].as_str() {
            Some(sent) => assert!(STANDARD.decode(sent).unwrap() == block, "block {number}"),
            None => assert!(block.iter().all(|byte| *byte == 0), "block {number}"),
        }
    }
}

fn check_network(found: &Value, control_planes: &[&Value]) {
    let mut ids: Vec<_> = (control_planes.iter().map(|one| &one["instanceId"])).collect();
    ids.sort_by_key(|id| id.as_str());
    let targets = found["targets"].as_array().unwrap();
    for target in targets {
        let registered: Vec<_> = target["targets"].as_array().unwrap().iter().collect();
        assert_eq!(registered, ids, "{target}");
        assert_eq!(target["attributes"]["preserve_client_ip.enabled"], "false");
    }
    let mut ports: Vec<_> = (targets.iter()).map(|it| it["port"].as_u64()).collect();
    ports.sort();
    assert_eq!(ports, [6443, 9000, 9999, 30090].map(Some));
    // nothing but the load balancer is open to another network
    for (name, group) in found["groups"].as_object().unwrap() {
        for rule in group["rules"].as_array().unwrap() {
            for source in rule["sources"].as_array().unwrap() {
                let source = source.as_str().unwrap();
                let is_open = !source.starts_with("sg-");
                assert!(!is_open || name.ends_with("-balancer"), "{name}: {rule}");
                assert_ne!(source, "0.0.0.0/0", "{name}: {rule}");
            }
        }
    }
    for machine in found["machines"].as_array().unwrap() {
        assert_eq!(machine["public"], Value::Null, "{machine}");
    }
}

/// The programs of a node read what the page has made, with the permissions of its roles.
fn check_nodes(moto: &mut Moto, found: &Value, hash: &str) {
    let credentials = moto.ask("permissions");
    let url = moto.url().to_owned();
    let client = |machine: &Value| {
        let role = machine["profile"].as_str().unwrap();
        assert!(credentials[role].is_object(), "{role}: {credentials}");
        metadata(machine, &credentials[role], &url)
    };
    let (control_planes, workers) = (of_role(found, "control-plane"), of_role(found, "worker"));
    let balancer = found["balancers"][0]["name"].as_str().unwrap();

    let first = client(control_planes[0]);
    let own = first.own_instance().unwrap();
    assert_eq!(own.name, control_planes[0]["instanceId"].as_str().unwrap());
    assert_eq!(own.role, Role::ControlPlane);
    assert_eq!(first.init_secret_hash().unwrap(), hash);
    assert_eq!(first.load_balancer_endpoint().unwrap(), balancer);
    let mut peers: Vec<_> = (first.peers().unwrap().into_iter())
        .map(|it| it.name)
        .collect();
    let machines = found["machines"].as_array().unwrap().iter();
    let mut all: Vec<_> = machines
        .map(|it| it["instanceId"].as_str().unwrap().to_owned())
        .collect();
    peers.sort();
    all.sort();
    assert_eq!(peers, all);

    // nobody can initialize another control plane
    let error = super::error(client(control_planes[1]).init_secret_hash());
    assert!(error.contains("init-secret-hash"), "{error}");

    let worker = client(workers[0]);
    assert_eq!(worker.own_instance().unwrap().role, Role::Worker);
    assert_eq!(worker.load_balancer_endpoint().unwrap(), balancer);
    let error = super::error(worker.peers());
    assert!(error.contains("ec2:DescribeInstances"), "{error}");
    moto.ask("free");
}

#[test]
#[ignore = "needs clients from the package index, and Helm: make cloud-pages"]
fn the_page_of_aws_makes_a_cluster_in_moto_and_deletes_it() {
    let work = Work::new();
    let mut moto = Moto::start();
    let mut bash = Command::new("bash");
    bash.env("AWS_ENDPOINT_URL", moto.url());
    let key = moto.ask("operator");
    bash.env("AWS_ACCESS_KEY_ID", key["id"].as_str().unwrap());
    bash.env("AWS_SECRET_ACCESS_KEY", key["secret"].as_str().unwrap());
    // the block that asks for the operator's address is not run
    let operators = "OPERATORS=203.0.113.7/32";
    let mut run = work.start("aws", operators, &super::client("aws"), bash);
    run.until_tear_down();

    moto.ask("free");
    let found = moto.ask("describe");
    check_image(&found, &work);
    let (control_planes, workers) = (of_role(&found, "control-plane"), of_role(&found, "worker"));
    assert_eq!((control_planes.len(), workers.len()), (3, 3));
    for machine in [&control_planes[..], &workers].concat() {
        assert_eq!(machine["imageId"], found["images"][0]);
        let disks = machine["disks"].as_array().unwrap();
        assert!(disks.contains(&json!("/dev/sdb")), "{machine}");
        assert_eq!(machine["cpu"]["AmdSevSnp"], "enabled", "{machine}");
    }
    check_network(&found, &control_planes);
    let hash = control_planes[0]["tags"]["constellation-init-secret-hash"].as_str();
    super::infra::aws::check(&moto.ask("facts"), control_planes[0], hash.unwrap());
    check_nodes(&mut moto, &found, hash.unwrap());

    work.check_init(found["balancers"][0]["name"].as_str().unwrap());

    moto.ask("guard");
    run.end();
    moto.ask("free");
    let left = moto.ask("describe");
    for kind in [
        "machines",
        "images",
        "snapshots",
        "networks",
        "balancers",
        "targets",
        "roles",
        "templates",
        "scaling",
        "addresses",
        "gateways",
    ] {
        assert_eq!(left[kind], json!([]), "{kind}");
    }
    assert_eq!(left["groups"], json!({}));
}

/// Runs the blocks of the page up to the first control plane in the shell of a person. AWS refuses three commands once; then the person runs the
/// rest of the block, as steps.md says.
#[test]
#[ignore = "needs clients from the package index, and Helm: make cloud-pages"]
fn after_a_refused_command_the_page_of_aws_asks_for_nothing_until_the_rest_is_run() {
    let work = Work::new();
    let mut moto = Moto::start();
    moto.ask("refuse CreateNatGateway CreateLoadBalancer RunInstances");
    let mut script = ". clouds/stop.sh\nOPERATORS=203.0.113.7/32\n".to_owned();
    let page = Page::read("aws");
    let blocks = page
        .blocks()
        .take_while(|block| !block.section.starts_with("9."));
    for block in blocks.filter(|block| block.is_run) {
        script += &block.text;
        for refused in ["\nNAT=$(", "\nBALANCER=$(", "\nFIRST=$("] {
            if let Some(at) = block.text.find(refused) {
                script += &format!("{{{}", &block.text[at..]);
            }
        }
    }
    fs::write(work.path("person.sh"), script + "echo \"$KEY\" > open\n").unwrap();
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-i"])
        .env("AWS_ENDPOINT_URL", moto.url())
        .env("AWS_ACCESS_KEY_ID", "a")
        .env("AWS_SECRET_ACCESS_KEY", "b")
        .stdin(fs::File::open(work.path("person.sh")).unwrap());
    work.environment(&super::client("aws"), &mut bash);
    let output = bash.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);

    let found = moto.ask("calls");
    let calls: Vec<_> = found["calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it.as_str().unwrap())
        .collect();
    let mut count = 0;
    for pair in calls.windows(2) {
        if let Some(action) = pair[0].strip_prefix("refused ") {
            assert_eq!(pair[1], action, "{said}");
            count += 1;
        }
    }
    assert_eq!(count, 3, "{said}");
    // the shell is open, and has its variables
    assert_eq!(
        work.read("open").trim(),
        moto.found["key"].as_str().unwrap(),
        "{said}"
    );
}
