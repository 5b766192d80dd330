//! Tests of the key service with clients that authenticate by a token of their service account. A
//! real kube-apiserver verifies it (`make kubernetes-api`).

use common::kube_apiserver;
use support::program;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ::services::join_service::keys::{Auth, Error, KeyClient};
use base::crypto::Secret;
use base::stop::Stop;
use booted_base::uuid::Uuid;
use booted_proto::kms::GET_DATA_KEY;
use booted_proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use kms::ClusterKms;
use kube_apiserver::Cluster;
use kubernetes::client::{CONFIG_MAPS, Client, NAMESPACES, Object, SERVICE_ACCOUNTS};
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::services::master_secret::Keeping;
use kubernetes::services::{self, Settings};
use program::Program;
use rpc::grpc::{CallOptions, Channel, Code, Metadata, Status};
use serde_json::json;
use tempfile::TempDir;

const UUID: &str = "00000000-0000-0000-0000-000000000000";
/// The key of [`UUID`] with a master secret and a salt of 32 zeros each.
const DISK_KEY: &str = "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665";
const GRANTS: &str = "kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek;\
                      default/csi=volume;default/old-csi=disk";

fn client() -> Client {
    Cluster::shared().client(&Stop::new())
}

/// Creates a service account's token.
fn token(client: &Client, namespace: &str, account: &str, audience: &str) -> String {
    client
        .create_if_absent(&NAMESPACES.all(), &json!({"metadata": {"name": namespace}}))
        .unwrap();
    let accounts = SERVICE_ACCOUNTS.in_namespace(namespace);
    client
        .create_if_absent(&accounts, &json!({"metadata": {"name": account}}))
        .unwrap();
    let request = json!({"spec": {"audiences": [audience], "expirationSeconds": 600}});
    let answer = client
        .create_subresource(&accounts.named(account).subresource("token"), &request)
        .unwrap();
    answer["status"]["token"].as_str().unwrap().to_owned()
}

/// Writes a kubeconfig with the token of the key service's own account, which has the permissions
/// of the chart.
fn own_kubeconfig(client: &Client) -> String {
    own_kubeconfig_of(Cluster::shared(), client)
}

fn own_kubeconfig_of(cluster: &Cluster, client: &Client) -> String {
    let settings = Settings {
        image: "x".into(),
        variant: "qemu-vtpm".into(),
        policy: "{}".into(),
        measurement_salt: vec![1; 32],
        kms: ClusterKms::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        keeping: Keeping::default(),
        node_port: None,
        migrate_until: None,
        metadata: None,
        require_strong: None,
    };
    for object in services::manifests(&settings).unwrap() {
        if object["kind"].as_str().unwrap().contains("Role") {
            client
                .apply(&Object::of(&object).unwrap(), &object)
                .unwrap();
        }
    }
    let admin = cluster.kubeconfig();
    let own = token(
        client,
        "kube-system",
        "key-service",
        "https://kubernetes.default.svc",
    );
    // It replaces the administrator's certificate.
    let kept: Vec<_> = admin
        .lines()
        .filter(|line| !line.contains("client-certificate") && !line.contains("client-key"))
        .collect();
    format!("{}\n    token: {own}\n", kept.join("\n"))
}

struct KeyService {
    program: Program,
    address: SocketAddr,
    metrics: SocketAddr,
    _dir: TempDir,
}

fn key_service(kubeconfig: &str) -> KeyService {
    key_service_for(kubeconfig, "token", GRANTS)
}

fn key_service_for(kubeconfig: &str, clients: &str, grants: &str) -> KeyService {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mastersecret"), [0; 32]).unwrap();
    fs::write(dir.path().join("salt"), [0; 32]).unwrap();
    fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
    let mut command = Command::new(support::program::built("key-service"));
    command.args([
        "--clients",
        clients,
        "--kubeconfig",
        "kubeconfig",
        "--grant",
        grants,
    ]);
    command.args([
        "--listen",
        "127.0.0.1:0",
        "--master-secret",
        "mastersecret",
        "--salt=salt",
    ]);
    command
        .args(["--metrics", "127.0.0.1:0"])
        .current_dir(dir.path());
    let program = Program::start(&mut command);
    let metrics = program.expect("metrics on http://");
    let metrics = metrics
        .split("http://")
        .nth(1)
        .unwrap()
        .strip_suffix("/metrics")
        .unwrap()
        .parse()
        .unwrap();
    let line = program.expect("serving data keys");
    let address = line
        .split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.parse().ok())
        .unwrap();
    KeyService {
        program,
        address,
        metrics,
        _dir: dir,
    }
}

fn ask(address: SocketAddr, id: &str, authorization: Option<&str>) -> Result<Vec<u8>, Status> {
    let mut metadata = Metadata::new();
    if let Some(value) = authorization {
        metadata.insert("authorization", value).unwrap();
    }
    let options = CallOptions {
        timeout: Some(Duration::from_secs(20)),
        metadata,
    };
    let channel = Channel::new(
        booted_base::plain::transport(TcpStream::connect(address).unwrap()).unwrap(),
        "x",
    )
    .unwrap();
    let request = GetDataKeyRequest {
        data_key_id: id.into(),
        length: 32,
    };
    channel
        .unary(GET_DATA_KEY, &request, &options)
        .map(|response: GetDataKeyResponse| response.data_key.clone())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn metrics(service: &KeyService) -> String {
    ureq::get(format!("http://{}/metrics", service.metrics))
        .call()
        .unwrap()
        .body_mut()
        .read_to_string()
        .unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_service_account_gets_its_classes_of_keys_and_others_get_none() {
    let client = client();
    let service = key_service(&own_kubeconfig(&client));
    let of = |namespace, account, audience| {
        format!("Bearer {}", token(&client, namespace, account, audience))
    };
    let join = of("kube-system", "join-service", "key-service");
    let proxy = of("default", "s3proxy", "key-service");
    assert_eq!(
        hex(&ask(service.address, UUID, Some(&join)).unwrap()),
        DISK_KEY
    );
    for (id, caller, expected) in [
        ("measurementSecret", &join, None),
        ("ca_emergency_ssh_host", &join, None),
        ("ca_emergency_ssh", &join, Some(Code::PermissionDenied)),
        ("s3proxy-kek", &proxy, None),
        ("s3proxy-kek", &join, Some(Code::PermissionDenied)),
        ("other", &proxy, Some(Code::PermissionDenied)),
        (UUID, &proxy, Some(Code::PermissionDenied)),
        (
            UUID,
            &of("default", "join-service", "key-service"),
            Some(Code::PermissionDenied),
        ),
        // Tokens for the API server or for another audience.
        (
            UUID,
            &of(
                "kube-system",
                "join-service",
                "https://kubernetes.default.svc",
            ),
            Some(Code::Unauthenticated),
        ),
        (
            UUID,
            &of("kube-system", "join-service", "vault"),
            Some(Code::Unauthenticated),
        ),
        (UUID, &format!("{join}x"), Some(Code::Unauthenticated)),
        (
            UUID,
            &"Bearer garbage".to_owned(),
            Some(Code::Unauthenticated),
        ),
        (UUID, &"Basic eDp5".to_owned(), Some(Code::Unauthenticated)),
    ] {
        let answer = ask(service.address, id, Some(caller)).map_err(|status| status.code());
        assert_eq!(answer.err(), expected, "{id} {caller:.60}");
    }
    assert_eq!(
        ask(service.address, UUID, None).unwrap_err().code(),
        Code::Unauthenticated
    );
    let said = service.program.output();
    assert!(
        said.contains("audit result=given")
            && said.contains("caller=kube-system/join-service class=disk"),
        "{said}"
    );
    let secrets = [
        &join["Bearer ".len()..],
        &proxy["Bearer ".len()..],
        &DISK_KEY[..8],
    ];
    assert!(
        !secrets.iter().any(|secret| said.contains(secret)),
        "{said}"
    );

    let text = metrics(&service);
    for line in [
        "firstlight_key_requests_total{class=\"disk\",result=\"given\"} 1",
        "firstlight_key_requests_total{class=\"other\",result=\"denied\"} 2",
        "firstlight_key_requests_total{class=\"none\",result=\"unauthenticated\"} 6",
        // Three valid tokens, one of them of an account without a grant. A reviewed token is not
        // reviewed again.
        "firstlight_key_token_reviews_total{result=\"accepted\"} 3",
        "firstlight_key_token_reviews_total{result=\"refused\"} 4",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_token_of_an_account_that_is_gone_opens_nothing() {
    let client = client();
    let gone = format!(
        "Bearer {}",
        token(&client, "default", "s3proxy", "key-service")
    );
    let kubeconfig = own_kubeconfig(&client);
    assert!(ask(key_service(&kubeconfig).address, "s3proxy-kek", Some(&gone)).is_ok());
    // Another test uses the same account, and creates it if it is missing.
    client
        .create_if_absent(&NAMESPACES.all(), &json!({"metadata": {"name": "short"}}))
        .unwrap();
    let short = format!(
        "Bearer {}",
        token(&client, "short", "s3proxy", "key-service")
    );
    client
        .delete(&SERVICE_ACCOUNTS.in_namespace("short").named("s3proxy"))
        .unwrap();
    let status = ask(
        key_service(&kubeconfig).address,
        "s3proxy-kek",
        Some(&short),
    )
    .unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_token_reviews_a_call_fails_soon_and_temporarily() {
    let join = format!(
        "Bearer {}",
        token(&client(), "kube-system", "join-service", "key-service")
    );
    let server = Cluster::shared().server();
    let nobody = Cluster::shared()
        .kubeconfig()
        .replace(&server, "https://127.0.0.1:1");
    let service = key_service(&nobody);
    let asked = Instant::now();
    let status = ask(service.address, UUID, Some(&join)).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        asked.elapsed() < Duration::from_secs(5) && !status.message().contains("127.0.0.1"),
        "{status}"
    );
    service.program.expect("a token cannot be reviewed");
    assert!(metrics(&service).contains("firstlight_key_token_reviews_total{result=\"failed\"} 1"));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_join_service_shows_the_token_that_is_in_its_file_now() {
    let client = client();
    let service = key_service(&own_kubeconfig(&client));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let keys = KeyClient::new(&service.address.to_string(), Auth::Token(file.clone()));
    let get = || keys.data_key(UUID, 32, None);
    let write = |file: &Path, content: &str| fs::write(file, content).unwrap();
    assert!(
        matches!(get().unwrap_err(), Error::Temporary(text) if text.contains("cannot be read"))
    );
    let good = token(&client, "kube-system", "join-service", "key-service");
    write(&file, &format!("{good}\n"));
    assert_eq!(hex(get().unwrap().expose()), DISK_KEY);
    write(&file, "garbage");
    let refused = get().unwrap_err();
    assert!(
        matches!(&refused, Error::Permanent(text) if !text.contains("garbage")),
        "{refused:?}"
    );
    write(
        &file,
        &token(&client, "kube-system", "join-service", "key-service"),
    );
    assert_eq!(hex(get().unwrap().expose()), DISK_KEY);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_client_of_volumes_gets_no_key_of_a_state_disk() {
    const VOLUME: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";
    const OF_NODE: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc23";
    const OF_OPERATOR: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc24";
    let mut cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    client
        .within(kube_apiserver::PATIENCE)
        .wait_ready(&mut |_| {})
        .unwrap();
    let service = key_service(&own_kubeconfig_of(&cluster, &client));
    let of = |namespace, account| {
        format!(
            "Bearer {}",
            token(&client, namespace, account, "key-service")
        )
    };
    let (join, csi, old_csi) = (
        of("kube-system", "join-service"),
        of("default", "csi"),
        of("default", "old-csi"),
    );
    for caller in [&join, &csi, &old_csi] {
        for id in [VOLUME, OF_NODE, OF_OPERATOR] {
            assert!(
                ask(service.address, id, Some(caller)).is_ok(),
                "{id}: nothing is recorded yet"
            );
        }
    }

    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let record = MachineRecord::of_node(
        "node-1",
        &Uuid::parse(OF_NODE).unwrap(),
        Some("machine"),
        "",
        "",
    );
    machine_record::write_if_absent(&client, &record).unwrap();
    // With the permissions in docs/join.md, and then without them.
    client
        .create(
            &maps,
            &json!({"metadata": {"name": format!("join-disk-{OF_OPERATOR}")}}),
        )
        .unwrap();
    for (caller, id, expected) in [
        (&csi, VOLUME.to_owned(), None),
        (&csi, OF_NODE.to_owned(), Some(Code::PermissionDenied)),
        (&csi, OF_OPERATOR.to_owned(), Some(Code::PermissionDenied)),
        (&old_csi, VOLUME.to_owned(), None),
        (&old_csi, OF_NODE.to_owned(), Some(Code::PermissionDenied)),
        // The id would give another key than the disk's. No key is issued.
        (&csi, OF_NODE.to_uppercase(), Some(Code::InvalidArgument)),
        (&csi, OF_NODE.replace('-', ""), Some(Code::PermissionDenied)),
        (
            &csi,
            "measurementSecret".to_owned(),
            Some(Code::PermissionDenied),
        ),
        (&join, OF_NODE.to_owned(), None),
    ] {
        let answer = ask(service.address, &id, Some(caller)).map_err(|status| status.code());
        assert_eq!(answer.err(), expected, "{id} {caller:.60}");
    }
    let said = service.program.expect("this UUID belongs to a state disk");
    assert!(
        said.contains("class=volume") && said.contains("kube-system/join-node-node-1"),
        "{said}"
    );
    let denied = "firstlight_key_requests_total{class=\"volume\",result=\"denied\"} 3";
    assert!(
        metrics(&service).lines().any(|line| line == denied),
        "{}",
        metrics(&service)
    );

    // The drivers of Constellation do not authenticate.
    let old = key_service_for(
        &own_kubeconfig_of(&cluster, &client),
        "any",
        "anyone=volume",
    );
    assert!(ask(old.address, VOLUME, None).is_ok());
    assert_eq!(
        ask(old.address, OF_NODE, None).unwrap_err().code(),
        Code::PermissionDenied
    );

    // Concurrent requests share lists, and each gets a correct answer.
    std::thread::scope(|scope| {
        for id in [VOLUME, OF_NODE].repeat(10) {
            let (csi, address) = (&csi, service.address);
            scope.spawn(move || assert_eq!(ask(address, id, Some(csi)).is_ok(), id == VOLUME));
        }
    });

    cluster.kill_api_server();
    let asked = Instant::now();
    assert_eq!(
        ask(service.address, VOLUME, Some(&csi)).unwrap_err().code(),
        Code::Unavailable
    );
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
    assert!(
        ask(service.address, OF_NODE, Some(&join)).is_ok(),
        "nodes that boot again do not wait for it"
    );
    cluster.start_api_server();
    client
        .within(kube_apiserver::PATIENCE)
        .wait_ready(&mut |_| {})
        .unwrap();
    assert!(ask(service.address, VOLUME, Some(&csi)).is_ok());
}

/// Control planes that restart need keys before etcd has a quorum. Without a quorum, no token can
/// be reviewed.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn accepted_tokens_stay_valid_while_the_api_server_is_down() {
    let mut cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    client
        .within(kube_apiserver::PATIENCE)
        .wait_ready(&mut |_| {})
        .unwrap();
    let service = key_service(&cluster.kubeconfig());
    let known = token(&client, "kube-system", "join-service", "key-service");
    let stranger = format!(
        "Bearer {}",
        token(&client, "kube-system", "join-service", "key-service")
    );
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), &known).unwrap();
    // No key is needed yet: the presence of the token is sufficient for its review.
    let keys = KeyClient::new(
        &service.address.to_string(),
        Auth::Token(dir.path().join("token")),
    );
    service.program.expect("audit result=given");
    cluster.kill_api_server();
    // Waits until the verdict is no longer cached.
    std::thread::sleep(Duration::from_secs(31));
    let asked = Instant::now();
    assert_eq!(
        hex(keys.data_key(UUID, 32, None).unwrap().expose()),
        DISK_KEY
    );
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
    service.program.expect("because it was accepted 3");
    let asked = Instant::now();
    assert!(keys.data_key(UUID, 32, None).is_ok());
    assert!(
        asked.elapsed() < Duration::from_secs(1),
        "the API server is not asked each time: {:?}",
        asked.elapsed()
    );
    assert_eq!(
        ask(service.address, UUID, Some(&stranger))
            .unwrap_err()
            .code(),
        Code::Unavailable
    );
    cluster.start_api_server();
    client
        .within(kube_apiserver::PATIENCE)
        .wait_ready(&mut |_| {})
        .unwrap();
    assert_eq!(
        hex(&ask(service.address, UUID, Some(&stranger)).unwrap()),
        DISK_KEY
    );
}
