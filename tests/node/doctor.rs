//! `firstlight doctor` in a cluster with a real API server, the chart's services and one real member: it names the faults that the test
//! makes, and changes nothing.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base::uuid::Uuid;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::kube_apiserver::{Cluster, PATIENCE, play_controller};
use common::manifests;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client,
    Collection, DAEMON_SETS, NODES, PODS, SECRETS, SERVICE_ACCOUNTS, Selector,
};
use kubernetes::machine_record::MachineRecord;
use kubernetes::services::{self, Options, ServiceSettings};
use rcgen::{CertificateParams, KeyPair};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};

use crate::init::init;
use crate::json::assert_documented;
use crate::program::Program;
use crate::setting::{INIT_SECRET, Setting, wait_for_port};

/// The findings of a run: each check with its severity.
type Found = BTreeSet<(String, String)>;

fn in_system(resource: &kubernetes::client::Resource) -> Collection {
    resource.in_namespace("kube-system")
}

/// Installs the services as `firstlight apply` does.
fn install(client: &Client, setting: &Setting, changed: impl FnOnce(&mut ServiceSettings)) {
    let state: Value =
        serde_json::from_slice(&fs::read(setting.path("firstlight-state.json")).unwrap()).unwrap();
    let salt = BASE64_STANDARD.decode(state["measurementSalt"].as_str().unwrap());
    let mut settings = ServiceSettings {
        image: "example.com/a:1".into(),
        measurement_salt: salt.unwrap(),
        kms: MasterSecret::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        ..manifests::settings(&fs::read_to_string(setting.policy()).unwrap())
    };
    changed(&mut settings);
    let options = Options {
        skip: &[],
        backups: &setting.path("backups"),
        wait: Some(PATIENCE),
        is_dry_run: false,
        keeps_superseded: false,
        control_planes: &[],
    };
    services::apply(client, &settings, &options, &mut |_| {}).unwrap();
}

/// Adds a Node, as its kubelet would.
pub fn add_node(client: &Client, name: &str, address: &str, kubelet: u16, is_good: bool) {
    let version = if is_good {
        client.version().unwrap()
    } else {
        "v1.33.0".into()
    };
    let (status, message) = if is_good {
        ("True", "kubelet is posting ready status")
    } else {
        (
            "False",
            "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady",
        )
    };
    let labels = if is_good {
        json!({"node-role.kubernetes.io/control-plane": ""})
    } else {
        json!({})
    };
    let taints = if is_good {
        json!([])
    } else {
        json!([{"key": "node.cloudprovider.kubernetes.io/uninitialized", "effect": "NoSchedule"}])
    };
    let node = json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}],
            "conditions": [{"type": "Ready", "status": status, "reason": "r", "message": message}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet}},
            "nodeInfo": {
                "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
                "kubeletVersion": version, "machineID": "", "operatingSystem": "linux", "osImage": "", "systemUUID": "",
            },
        },
    });
    client.create(&NODES.all(), &node).unwrap();
}

/// Adds what kubeadm and a join would have made for the control plane.
pub fn add_control_plane(client: &Client, cluster: &Cluster, address: &str) {
    let endpoint = format!("127.0.0.1:{}", cluster.port());
    let version = client.version().unwrap();
    let configuration = format!("kubernetesVersion: {version}\ncontrolPlaneEndpoint: {endpoint}\n");
    let map = json!({"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": configuration}});
    client.create(&in_system(&CONFIG_MAPS), &map).unwrap();
    let disk = Uuid::parse("00000000-0000-0000-0000-000000000001").unwrap();
    let mut record = MachineRecord::of_node("cp-0", &disk, None, "", "");
    (record.control_plane, record.addresses) = (true, vec![address.parse().unwrap()]);
    client
        .create(&in_system(&CONFIG_MAPS), &record.to_object())
        .unwrap();
    let account = json!({"metadata": {"name": "default"}});
    client
        .create_if_absent(&in_system(&SERVICE_ACCOUNTS), &account)
        .unwrap();
    let node = client.get(&NODES.named("cp-0")).unwrap();
    for (component, annotation, image) in [
        (
            "kube-apiserver",
            "kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint",
            &*version,
        ),
        (
            "etcd",
            "kubeadm.kubernetes.io/etcd.advertise-client-urls",
            "3.6.6-0",
        ),
    ] {
        let name = format!("{component}-cp-0");
        let pod = json!({
            "metadata": {
                "name": name, "labels": {"component": component, "tier": "control-plane"},
                "annotations": {annotation: endpoint, "kubernetes.io/config.mirror": "a"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "cp-0", "uid": node["metadata"]["uid"]}],
            },
            "spec": {"nodeName": "cp-0", "containers": [{"name": "a", "image": format!("registry.k8s.io/{component}:{image}")}]},
        });
        client.create(&in_system(&PODS), &pod).unwrap();
        let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let status = in_system(&PODS).named(&name).subresource("status");
        client.merge(&status, &ready).unwrap();
    }
}

/// Starts the server of a kubelet whose certificate has ended and whose clock is years behind. It refuses a stranger as a kubelet does.
fn start_kubelet(cluster: &Cluster, address: &str) -> u16 {
    let (certificate, key) = cluster.ended_certificate(address);
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let tls = ServerConnection::new(config.clone()).unwrap();
            let mut stream = StreamOwned::new(tls, socket);
            let mut lines = BufReader::new(&mut stream).lines();
            while lines
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            drop(lines);
            let _ = stream.write_all(
                b"HTTP/1.1 401 Unauthorized\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: 0\r\n\r\n",
            );
        }
    });
    port
}

/// Makes one fault of each kind that needs the API server.
fn break_cluster(client: &Client, setting: &Setting) {
    add_node(
        client,
        "worker-a",
        &setting.host(9).to_string(),
        10250,
        false,
    );
    let disk = Uuid::parse("00000000-0000-0000-0000-000000000002").unwrap();
    let mut gone = MachineRecord::of_node("gone", &disk, None, "abcdef", "");
    gone.issued = base::time::parse("2026-01-01T00:00:00Z");
    client
        .create(&in_system(&CONFIG_MAPS), &gone.to_object())
        .unwrap();

    let token = json!({
        "metadata": {"name": "bootstrap-token-abcdef"}, "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
            "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
        },
    });
    client.create(&in_system(&SECRETS), &token).unwrap();

    let role = json!({"metadata": {"name": "agent"}, "rules": [{"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}]});
    client.create(&CLUSTER_ROLES.all(), &role).unwrap();
    let binding = json!({
        "metadata": {"name": "agent"}, "subjects": [{"kind": "ServiceAccount", "namespace": "tenant", "name": "agent"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent"},
    });
    client
        .create(&CLUSTER_ROLE_BINDINGS.all(), &binding)
        .unwrap();

    let params = CertificateParams::new(vec!["worker-a".into()]).unwrap();
    let request = params
        .serialize_request(&KeyPair::generate().unwrap())
        .unwrap();
    let request = json!({
        "metadata": {"name": "csr-a"},
        "spec": {
            "request": BASE64_STANDARD.encode(request.pem().unwrap()), "signerName": "kubernetes.io/kubelet-serving",
            "usages": ["digital signature", "server auth"],
        },
    });
    let mut request = client
        .create(&CERTIFICATE_SIGNING_REQUESTS.all(), &request)
        .unwrap();
    request["status"]["conditions"] = json!([{"type": "Denied", "status": "True", "reason": "address", "message": "another machine's"}]);
    let at = CERTIFICATE_SIGNING_REQUESTS.all().named("csr-a");
    client
        .update(&at.subresource("approval"), &request)
        .unwrap();

    // another policy and another salt than those of the operator's files, and two protections off
    install(client, setting, |settings| {
        settings.policy = settings.policy.replace("0000", "1111");
        settings.measurement_salt = vec![9; 32];
        settings.old_clients_until = Some("2099-12-31".into());
        settings.migrate_until = Some("2099-12-31".into());
    });
    let secrets = client.list(&in_system(&SECRETS), &Selector::default());
    let is_master = |name: &&str| name.starts_with("firstlight-mastersecret-");
    let secrets = secrets.unwrap().items;
    let names = secrets
        .iter()
        .filter_map(|it| it["metadata"]["name"].as_str());
    for name in names.filter(is_master) {
        client.delete(&in_system(&SECRETS).named(name)).unwrap();
    }
}

/// Returns the versions of all objects that the command looks at.
fn versions(client: &Client) -> Vec<String> {
    let collections = [
        NODES.all(),
        CERTIFICATE_SIGNING_REQUESTS.all(),
        in_system(&CONFIG_MAPS),
        in_system(&SECRETS),
        in_system(&PODS),
        in_system(&DAEMON_SETS),
    ];
    let list = |collection| {
        client
            .list(&collection, &Selector::default())
            .unwrap()
            .items
    };
    let objects = collections.into_iter().flat_map(list);
    objects
        .map(|object| object["metadata"].to_string())
        .collect()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn faults_that_were_made_on_purpose_are_named() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let member = Program::start(&mut setting.bootstrapper(&disk));
    wait_for_port(setting.node(9000));
    let policy = setting.policy();
    let mut operator = init(&setting, INIT_SECRET, &policy);
    assert!(operator.exit().success(), "{}", operator.output());
    member.expect("member: `firstlight status` is answered");
    let cluster = Cluster::start();
    let stop = Stop::new();
    let client = cluster.client(&stop).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    let kubeconfig = setting.file("firstlight-admin.conf", cluster.kubeconfig());
    crate::setting::set_private(&kubeconfig);
    thread::scope(|scope| {
        scope.spawn(|| play_controller(&client, &stop));
        judge(&setting, &cluster, &client, &policy);
        stop.stop();
    });
}

fn judge(setting: &Setting, cluster: &Cluster, client: &Client, policy: &Path) {
    let doctor = |more: &[&str]| {
        let policy = policy.display().to_string();
        let args = [&["doctor", "--policy", &policy, "--timeout", "60s"], more].concat();
        let output = setting.firstlight(&args).output().unwrap();
        let [said, errors] =
            [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        (output.status.code().unwrap(), said, errors)
    };
    let found = || -> (Found, Value) {
        let (code, said, errors) = doctor(&["-o", "json"]);
        let report = assert_documented("doctor", &said);
        assert_eq!(code, 9, "{said}{errors}");
        let text = |it: &Value| it.as_str().unwrap().to_owned();
        let findings = report["findings"].as_array().unwrap().iter();
        let all = findings.map(|it| (text(&it["check"]), text(&it["severity"])));
        (all.collect(), report)
    };
    let host = setting.host(2).to_string();
    // nothing listens there
    let closed = TcpListener::bind(SocketAddr::new(setting.host(2), 0)).unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    install(client, setting, |_| {});
    add_node(client, "cp-0", &host, port, true);
    add_control_plane(client, cluster, &host);

    // One member of etcd, a policy of only PCR 15, and perhaps an old Kubernetes: nothing else is wrong here.
    let (healthy, report) = found();
    let is_known = |(check, severity): &&(String, String)| {
        severity == "note"
            // the machine that runs the tests may have no time service
            || ["etcd", "policy", "end-of-life", "clocks"].contains(&check.as_str())
    };
    let unknown: Vec<_> = healthy.iter().filter(|it| !is_known(it)).collect();
    assert!(unknown.is_empty(), "{unknown:?} {report:#}");
    for (check, severity) in [
        ("etcd", "note"),
        ("policy", "error"),
        ("certificates", "note"),
    ] {
        assert!(
            healthy.contains(&(check.into(), severity.into())),
            "{check} {report:#}"
        );
    }

    // evidence of another variant than the command expects says nothing against the node
    let (code, said, errors) = doctor(&["--attestation-variant", "gcp-sev-es"]);
    assert_eq!(code, 9, "{said}{errors}");
    assert!(
        said.contains("warning (attestation): cp-0: it could not be judged: it has no attestation document of an accepted variant"),
        "{said}"
    );
    assert!(
        said.contains("the command expects gcp-sev-es: give --attestation-variant"),
        "{said}"
    );

    break_cluster(client, setting);
    let kubelet = start_kubelet(cluster, &host);
    let ports = json!({"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet}}}});
    client
        .merge(&NODES.named("cp-0").subresource("status"), &ports)
        .unwrap();
    let loose = fs::Permissions::from_mode(0o644);
    fs::set_permissions(setting.path("firstlight-mastersecret.json"), loose).unwrap();
    let before = versions(client);
    let (broken, report) = found();
    for (check, severity) in [
        ("attestation", "error"),
        ("network-plugin", "error"),
        ("cloud-controller", "error"),
        ("versions", "warning"),
        ("records", "warning"),
        ("certificates", "error"),
        ("certificate-requests", "error"),
        ("policy", "warning"),
        ("old-clients", "warning"),
        ("migration", "warning"),
        ("master-secret", "error"),
        ("bootstrap-tokens", "warning"),
        ("accounts", "warning"),
        ("files", "error"),
        ("state", "error"),
    ] {
        let it = (check.to_owned(), severity.to_owned());
        assert!(
            broken.contains(&it) && !healthy.contains(&it),
            "{it:?} {report:#}"
        );
    }
    let (code, said, errors) = doctor(&[]);
    println!("{said}{errors}");
    assert_eq!(code, 9, "{said}{errors}");
    for part in [
        "error (attestation): worker-a: unreachable: ",
        "warning (records): ConfigMap kube-system/join-node-gone: a machine was admitted under this name",
        "warning (records): worker-a: no record says which machine it is",
        "error (certificates): cp-0: the certificate of its kubelet ended on 2026-01-01",
        "error (certificate-requests): certificate request csr-a: kubernetes-admin asks for a serving certificate: it was refused: \
         another machine's",
        "error (master-secret): Secret kube-system/firstlight-mastersecret-",
        ": the key service uses it, and it does not exist",
        "error (state): the state file: its measurement salt is not that of",
        "warning (bootstrap-tokens): Secret kube-system/bootstrap-token-abcdef: with this token a machine joins without attestation",
        "warning (accounts): tenant/agent: it may run commands in all pods through the kubelets (nodes/proxy)",
        " --skip-phases policy,services --addons FILE; or look at the pods of the one that you have",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(!said.contains("0123456789abcdef"), "{said}");
    assert_eq!(
        versions(client),
        before,
        "the command has changed something"
    );

    // errors come first
    let order: Vec<&str> = said
        .lines()
        .filter_map(|line| line.split(" (").next())
        .collect();
    let place = |word: &str| order.iter().position(|it| *it == word).unwrap();
    assert!(
        place("error") < place("warning") && place("warning") < place("note"),
        "{said}"
    );

    // without the nodes, the files are still judged; each reason has its own advice
    let good = cluster.kubeconfig();
    let foreign = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
    let (users, _) = good.split_once("  user:\n    client-certificate").unwrap();
    for (kubeconfig, advice) in [
        (
            good.replace(&cluster.server(), "https://127.0.0.1:9"),
            "check the address in the kubeconfig, the load balancer and the firewall",
        ),
        (
            format!("{users}  user:\n    token: a-wrong-token\n"),
            "the credentials in the kubeconfig have ended, or are of another cluster",
        ),
        (
            cluster.kubeconfig_of("somebody", "people", &cluster.ca().0),
            "the credentials are good, and their user may not do this",
        ),
        (
            cluster.kubeconfig_of("kubernetes-admin", "system:masters", &foreign.cert.pem()),
            "do not use this server before you know why",
        ),
        (
            "[]".to_owned(),
            "give the right file by --kubeconfig, or copy /etc/kubernetes/admin.conf",
        ),
    ] {
        fs::write(setting.path("firstlight-admin.conf"), kubeconfig).unwrap();
        let (code, said, errors) = doctor(&["--timeout", "5s"]);
        assert_eq!(code, 9, "{said}{errors}");
        assert!(
            said.contains("error (api-server): the API server of the kubeconfig: "),
            "{said}"
        );
        assert!(said.contains(advice), "{advice}: {said}");
        assert!(said.contains("error (files): "), "{said}");
        assert!(!said.contains("(attestation)"), "{said}");
    }
}
