//! Tests of the key service with clients that authenticate by a token of their service account. A
//! real kube-apiserver verifies it (`make kubernetes-api`).

use common::kube_apiserver;
use common::manifests;
use common::volumes::{
    self, AWS, CINDER, DRIVER, add_client, add_csi_driver, add_driver, attach_to,
};
use support::foreign::{fetched, go_program};
use support::program;

use std::fs;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ::services::cluster::keys::{Auth, Error, KeyClient};
use ::services::key_service::{Clients, KeyServiceConfig};
use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base::uuid::Uuid;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{
    CONFIG_MAPS, Client, NAMESPACES, NODES, Object, PODS, Resource, SERVICE_ACCOUNTS, Selector,
};
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::services::{self, ServiceSettings};
use kubernetes::wrapping_key;
use kubernetes::yaml;
use program::Program;
use proto::kms::GET_DATA_KEY;
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{CallOptions, Channel, Code, Metadata, Status};
use serde_json::json;
use socket2::{Domain, Socket, Type};
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
    let settings = ServiceSettings {
        image: "x".into(),
        measurement_salt: vec![1; 32],
        kms: MasterSecret::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        ..manifests::settings("{}")
    };
    for object in services::manifests(&settings).unwrap() {
        if object["kind"].as_str().unwrap().contains("Role")
            || object["metadata"]["name"] == "key-service-ca"
        {
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

/// Writes the record of a control plane, as its join ticket does.
fn record_control_plane(client: &Client, node: &str) {
    let disk = Uuid::parse("00000000-0000-0000-0000-0000000000aa").unwrap();
    let record = MachineRecord {
        control_plane: true,
        ..MachineRecord::of_node(node, &disk, Some("machine"), "", "")
    };
    machine_record::write_if_absent(client, &record).unwrap();
}

/// Writes the record of a worker with this state disk.
fn record_worker(client: &Client, node: &str, disk: &str) {
    let disk = Uuid::parse(disk).unwrap();
    let record = MachineRecord::of_node(node, &disk, Some("machine"), "", "");
    machine_record::write_if_absent(client, &record).unwrap();
}

/// Returns the authorization of a pod of the join service on this node.
fn join_service_on(client: &Client, node: &str) -> String {
    let account = ("kube-system", "join-service");
    let name = format!("join-service-{node}");
    let uid = volumes::add_pod(client, account, &name, node, json!([]));
    let token = volumes::token_of_pod(client, account, &name, &uid, "key-service");
    format!("Bearer {token}")
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
    key_service_with(kubeconfig, clients, grants, &[])
}

fn key_service_with(kubeconfig: &str, clients: &str, grants: &str, more: &[&str]) -> KeyService {
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
        .args(more)
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
    let address = address_in(&program.expect("serving data keys"));
    KeyService {
        program,
        address,
        metrics,
        _dir: dir,
    }
}

fn address_in(line: &str) -> SocketAddr {
    line.split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.parse().ok())
        .unwrap()
}

fn ask(address: SocketAddr, id: &str, authorization: Option<&str>) -> Result<Vec<u8>, Status> {
    let socket = TcpStream::connect(address).unwrap();
    let channel = Channel::new(transport::plain::transport(socket).unwrap(), "x").unwrap();
    let request = GetDataKeyRequest {
        data_key_id: id.into(),
        length: 32,
        ..GetDataKeyRequest::default()
    };
    call(&channel, &request, authorization)
}

fn call(
    channel: &Channel,
    request: &GetDataKeyRequest,
    authorization: Option<&str>,
) -> Result<Vec<u8>, Status> {
    let mut metadata = Metadata::new();
    if let Some(value) = authorization {
        metadata.insert("authorization", value).unwrap();
    }
    let options = CallOptions {
        timeout: Some(Duration::from_secs(20)),
        metadata,
    };
    channel
        .unary(GET_DATA_KEY, request, &options)
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
    let status = ask(service.address, UUID, Some(&join)).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(!status.message().contains("127.0.0.1"), "{status}");
    service.program.expect("cannot review a caller's token");
    assert!(metrics(&service).contains("firstlight_key_token_reviews_total{result=\"failed\"} 1"));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_join_service_shows_the_token_that_is_in_its_file_now() {
    let client = client();
    let service = key_service(&own_kubeconfig(&client));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let keys = KeyClient::new(
        &service.address.to_string(),
        Auth::Token {
            file: file.clone(),
            wrapping_key: None,
        },
    );
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
fn the_join_service_sends_its_token_only_to_a_server_with_the_wrapping_key() {
    let client = client();
    let tls = &["--listen-tls", "127.0.0.1:0"];
    let service = key_service_with(&own_kubeconfig(&client), "token", GRANTS, tls);
    let address = address_in(&service.program.expect("TLS on"));
    let dir = tempfile::tempdir().unwrap();
    let (file, directory) = (dir.path().join("token"), dir.path().join("firstlight"));
    let token = token(&client, "kube-system", "join-service", "key-service");
    fs::write(&file, &token).unwrap();
    let auth = Auth::Token {
        file,
        wrapping_key: Some(directory.clone()),
    };
    let get = |address: SocketAddr| {
        KeyClient::new(&address.to_string(), auth.clone()).data_key(UUID, 32, None)
    };
    let without = get(address).unwrap_err();
    assert!(
        matches!(&without, Error::Temporary(text) if text.contains("has no wrapping key yet")),
        "{without:?}"
    );
    let secret = |byte| Secret::new(vec![byte; 32]);
    let own = MasterSecret::new(secret(0), secret(0)).unwrap();
    wrapping_key::place(&directory, &wrapping_key::of(&own)).unwrap();
    assert_eq!(hex(get(address).unwrap().expose()), DISK_KEY);

    // a key service of another cluster, at the address to which the network leads
    let other = tempfile::tempdir().unwrap();
    let of_other = MasterSecret::new(secret(1), secret(0)).unwrap();
    let other = Auth::Token {
        file: dir.path().join("token"),
        wrapping_key: Some(other.path().into()),
    };
    let Auth::Token {
        wrapping_key: Some(directory),
        ..
    } = &other
    else {
        unreachable!()
    };
    wrapping_key::place(directory, &wrapping_key::of(&of_other)).unwrap();
    let refused = KeyClient::new(&address.to_string(), other.clone()).data_key(UUID, 32, None);
    assert!(matches!(refused, Err(Error::Temporary(_))), "{refused:?}");
    // a thief without TLS
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let thief = listener.local_addr().unwrap();
    let seen = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut seen = vec![0; 16 << 10];
        let len = socket.read(&mut seen).unwrap();
        seen.truncate(len);
        seen
    });
    assert!(get(thief).is_err());
    let seen = seen.join().unwrap();
    assert!(!seen.is_empty() && !seen.windows(20).any(|it| it == &token.as_bytes()[..20]));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_client_of_volumes_gets_no_key_of_a_state_disk() {
    const VOLUME: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";
    const OF_NODE: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc23";
    const OF_OPERATOR: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc24";
    let (mut cluster, client) = Cluster::started();
    let service = key_service(&own_kubeconfig_of(&cluster, &client));
    volumes::add_node(&client, "node", "192.0.2.1");
    for id in [VOLUME, OF_NODE, OF_OPERATOR] {
        volumes::add_volume(&client, id);
        volumes::attach(&client, id, "node", true);
        let named = [("firstlight/luks-uuid", id)];
        client
            .annotate(&volumes::VOLUMES.named(id), &named)
            .unwrap();
    }
    let of = |namespace, account| {
        let uid = volumes::add_pod(&client, (namespace, account), account, "node", json!([]));
        let token =
            volumes::token_of_pod(&client, (namespace, account), account, &uid, "key-service");
        format!("Bearer {token}")
    };
    record_control_plane(&client, "node");
    let (join, csi, old_csi) = (
        of("kube-system", "join-service"),
        of("default", "csi"),
        of("default", "old-csi"),
    );
    let ask = |address: SocketAddr, id: &str, token: Option<&str>| {
        let socket = TcpStream::connect(address).unwrap();
        let channel = Channel::new(transport::plain::transport(socket).unwrap(), "x").unwrap();
        call(&channel, &of_volume(&id.to_lowercase(), id), token)
    };
    for caller in [&join, &csi, &old_csi] {
        for id in [VOLUME, OF_NODE, OF_OPERATOR] {
            assert!(
                ask(service.address, id, Some(caller)).is_ok(),
                "{id}: nothing is recorded yet"
            );
        }
    }

    let maps = CONFIG_MAPS.in_namespace("kube-system");
    record_worker(&client, "node-1", OF_NODE);
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
    assert_eq!(
        ask(service.address, VOLUME, Some(&csi)).unwrap_err().code(),
        Code::Unavailable
    );
    assert!(
        ask(service.address, OF_NODE, Some(&join)).is_ok(),
        "nodes that boot again do not wait for it"
    );
    cluster.start_api_server();
    client.within(PATIENCE).wait_ready(&mut |_| {}).unwrap();
    assert!(ask(service.address, VOLUME, Some(&csi)).is_ok());
}

/// Connects as a pod on another node does, with the certificate in the ConfigMap.
fn tls_channel(
    client: &Client,
    address: SocketAddr,
    name: &'static str,
) -> Result<Channel, String> {
    let at = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("key-service-ca");
    let published = || {
        let map = client.get(&at).unwrap();
        Some(map["data"]["ca.crt"].as_str()?.to_owned())
    };
    let until = Instant::now() + Duration::from_secs(30);
    let pem = loop {
        match published() {
            Some(pem) => break pem,
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(100)),
            None => panic!("no certificate was published"),
        }
    };
    let body: String = pem.lines().filter(|line| !line.starts_with("--")).collect();
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(BASE64_STANDARD.decode(body).unwrap().into())
        .unwrap();
    let config = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut connection =
        rustls::ClientConnection::new(Arc::new(config), name.try_into().unwrap()).unwrap();
    let mut socket = TcpStream::connect(address).unwrap();
    while connection.is_handshaking() {
        connection
            .complete_io(&mut socket)
            .map_err(|error| error.to_string())?;
    }
    Ok(Channel::new(atls::split(connection.into(), socket).unwrap(), name).unwrap())
}

fn of_volume(name: &str, id: &str) -> GetDataKeyRequest {
    GetDataKeyRequest {
        data_key_id: id.into(),
        length: 32,
        csi_driver: DRIVER.into(),
        volume_handle: format!("volumes/{name}"),
    }
}

/// Returns the code and the text of a refusal.
fn refusal(answer: Result<Vec<u8>, Status>) -> (Code, String) {
    let status = answer.unwrap_err();
    (status.code(), status.message().to_owned())
}

const SERVICE: &str = "key-service.kube-system.svc";
const CSI: (&str, &str) = ("storage", "csi-node");

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_driver_gets_the_keys_of_the_volumes_of_its_node_and_no_others() {
    const OLD: &str = "2f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";
    let (cluster, client) = Cluster::started();
    let service = key_service_with(
        &own_kubeconfig_of(&cluster, &client),
        "token",
        "kube-system/join-service=disk,ssh,measurement;storage/csi-node=volume",
        &["--listen-tls", "127.0.0.1:0"],
    );
    let address = address_in(&service.program.expect("TLS on "));
    let uids = ["a", "b"].map(|node| {
        volumes::add_node(&client, node, "192.0.2.1");
        volumes::add_pod(&client, CSI, &format!("csi-{node}"), node, json!([]))
    });
    let of = |node: usize, audience: &str| {
        let name = ["csi-a", "csi-b"][node];
        let token = volumes::token_of_pod(&client, CSI, name, &uids[node], audience);
        format!("Bearer {token}")
    };
    let (a, b) = (of(0, "key-service"), of(1, "key-service"));
    for name in ["one", "two", "three", "old"] {
        volumes::add_volume(&client, name);
    }
    volumes::attach(&client, "one", "a", true);
    volumes::attach(&client, "three", "a", false);
    volumes::attach(&client, "old", "a", true);

    assert!(tls_channel(&client, address, "join-service.kube-system.svc").is_err());
    let channel = tls_channel(&client, address, SERVICE).unwrap();
    let get = |request: &GetDataKeyRequest, token: &str| call(&channel, request, Some(token));
    let key = get(&of_volume("one", ""), &a).unwrap();
    assert_eq!(key.len(), 32);

    let (code, why) = refusal(get(&of_volume("one", ""), &b));
    assert_eq!(code, Code::PermissionDenied);
    let expected = format!(
        "the volume \"volumes/one\" of {DRIVER} is not attached to the node b: expected the attached VolumeAttachment {}",
        volumes::attachment("one", "b")
    );
    assert_eq!(why, expected);
    // anybody can compute the id of another volume's key
    let two = ::services::key_service::volumes::CsiVolume {
        driver: DRIVER,
        handle: "volumes/two",
    };
    let id_of_two = two.key_id();
    for (name, id, token, code, text) in [
        (
            "two",
            "",
            &a,
            Code::PermissionDenied,
            "is not attached to the node a",
        ),
        (
            "three",
            "",
            &a,
            Code::PermissionDenied,
            "is not attached to the node a",
        ),
        (
            "none",
            "",
            &a,
            Code::PermissionDenied,
            "is not attached to the node a",
        ),
        // An id of another volume, or of another class.
        (
            "one",
            OLD,
            &a,
            Code::PermissionDenied,
            "kubectl annotate pv one firstlight/luks-uuid=",
        ),
        (
            "one",
            &id_of_two,
            &a,
            Code::InvalidArgument,
            "expected no id, or the LUKS UUID",
        ),
        (
            "one",
            "measurementSecret",
            &a,
            Code::PermissionDenied,
            "has no grant for keys of the class measurement",
        ),
        (
            "one",
            "",
            &of(0, "vault"),
            Code::Unauthenticated,
            "the token is not accepted",
        ),
        (
            "one",
            "",
            &of(0, "https://kubernetes.default.svc"),
            Code::Unauthenticated,
            "the token is not accepted",
        ),
    ] {
        let (found, why) = refusal(get(&of_volume(name, id), token));
        assert!(
            found == code && why.contains(text),
            "{name} {id}: {found:?} {why}"
        );
    }
    let mut nameless = of_volume("one", OLD);
    nameless.csi_driver.clear();
    assert_eq!(refusal(get(&nameless, &a)).0, Code::InvalidArgument);
    let unbound = format!("Bearer {}", token(&client, CSI.0, CSI.1, "key-service"));
    let (code, why) = refusal(get(&of_volume("one", ""), &unbound));
    assert!(
        code == Code::PermissionDenied && why.contains("names no node"),
        "{why}"
    );

    // A volume of Constellation has the key of its LUKS UUID, which the administrator has recorded.
    let old = of_volume("old", OLD);
    assert_eq!(refusal(get(&old, &a)).0, Code::PermissionDenied);
    client
        .annotate(
            &volumes::VOLUMES.named("old"),
            &[("firstlight/luks-uuid", OLD)],
        )
        .unwrap();
    let kms = MasterSecret::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap();
    let expected = kms.dek(&base::crypto::Dek::named(OLD), 32).unwrap();
    assert_eq!(get(&old, &a).unwrap(), expected.expose());
    assert_eq!(refusal(get(&old, &b)).0, Code::PermissionDenied);
    record_worker(&client, "node-9", OLD);
    let (code, why) = refusal(get(&old, &a));
    assert!(
        code == Code::PermissionDenied && why.contains("belongs to a state disk"),
        "{why}"
    );

    // The volume moves to the other node: there it has the same key.
    let moved = volumes::ATTACHMENTS.named(&volumes::attachment("one", "a"));
    client.delete(&moved).unwrap();
    volumes::attach(&client, "one", "b", true);
    assert_eq!(
        refusal(get(&of_volume("one", ""), &a)).0,
        Code::PermissionDenied
    );
    assert_eq!(get(&of_volume("one", ""), &b).unwrap(), key);

    // The token of a node that was deleted, also if another one has its name. No controller has deleted its pods yet.
    client.delete(&NODES.named("b")).unwrap();
    for _ in 0..2 {
        let (code, why) = refusal(get(&of_volume("one", ""), &b));
        assert!(
            code == Code::PermissionDenied && why.contains("the node b of the token was deleted"),
            "{why}"
        );
        client
            .create_if_absent(&NODES.all(), &json!({"metadata": {"name": "b"}}))
            .unwrap();
    }
    let said = service.program.output();
    let line = "caller=storage/csi-node class=volume";
    assert!(
        said.contains(line) && said.contains("volume=\"volumes/one\" node=\"b\""),
        "{said}"
    );
}

/// A driver of disks that are in their node, for example, attaches nothing.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_attachments_the_pods_of_a_node_decide() {
    let (cluster, client) = Cluster::started();
    let service = key_service_for(
        &own_kubeconfig_of(&cluster, &client),
        "token",
        "storage/csi-node=volume",
    );
    let tokens = ["a", "b"].map(|node| {
        volumes::add_node(&client, node, "192.0.2.1");
        let name = format!("csi-{node}");
        let uid = volumes::add_pod(&client, CSI, &name, node, json!([]));
        let token = volumes::token_of_pod(&client, CSI, &name, &uid, "key-service");
        format!("Bearer {token}")
    });
    volumes::add_volume(&client, "local");
    let socket = TcpStream::connect(service.address).unwrap();
    let channel = Channel::new(transport::plain::transport(socket).unwrap(), "x").unwrap();
    let get = |node: usize| call(&channel, &of_volume("local", ""), Some(&tokens[node]));

    let claim = json!({"metadata": {"name": "own-app-data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "local",
        "resources": {"requests": {"storage": "64Mi"}},
    }});
    let claim = client
        .create(&volumes::CLAIMS.in_namespace("default"), &claim)
        .unwrap();
    let uses = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "own-app-data"}}]);
    volumes::add_pod(&client, ("default", "app"), "app", "a", uses);
    assert!(
        refusal(get(0)).1.contains("is not attached to the node a"),
        "the driver may attach"
    );
    let driver = json!({"metadata": {"name": DRIVER}, "spec": {"attachRequired": false}});
    client.create(&volumes::CSI_DRIVERS.all(), &driver).unwrap();
    // Anybody can write the name of a volume into a claim, so the volume must name the claim, too.
    assert!(
        refusal(get(0))
            .1
            .contains("no pod on the node a uses the volume")
    );
    let bound = json!({"spec": {"claimRef": {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": "own-app-data", "uid": claim["metadata"]["uid"],
    }}});
    client
        .merge(&volumes::VOLUMES.named("local"), &bound)
        .unwrap();
    assert!(get(0).is_ok());
    let (code, why) = refusal(get(1));
    assert!(
        code == Code::PermissionDenied && why.contains("no pod on the node b uses the volume"),
        "{why}"
    );

    // A kubelet creates the mirror pods of its node by itself.
    let mirror = json!({
        "metadata": {"name": "mirror", "annotations": {"kubernetes.io/config.mirror": "x"}},
        "spec": {"nodeName": "b", "containers": [{"name": "a", "image": "a"}], "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "own-app-data"}},
        ]},
    });
    client
        .create(&PODS.in_namespace("default"), &mirror)
        .unwrap();
    assert_eq!(refusal(get(1)).0, Code::PermissionDenied);
    // The claim of an ephemeral volume has the names of pod and volume; it counts if the pod owns it.
    let template = json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}});
    let ephemeral = json!([{"name": "app-data", "ephemeral": {"volumeClaimTemplate": template}}]);
    let uid = volumes::add_pod(&client, ("default", "app"), "own", "b", ephemeral);
    assert_eq!(refusal(get(1)).0, Code::PermissionDenied);
    let owned = json!({"metadata": {"ownerReferences": [
        {"apiVersion": "v1", "kind": "Pod", "name": "own", "uid": uid, "controller": true},
    ]}});
    let claim = volumes::CLAIMS
        .in_namespace("default")
        .named("own-app-data");
    client.merge(&claim, &owned).unwrap();
    assert!(get(1).is_ok());
}

/// A label puts a pod of the join service onto a worker, whose kubelet requests its token.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_join_service_on_a_worker_gets_no_key() {
    let (mut cluster, client) = Cluster::started();
    let service = key_service(&own_kubeconfig_of(&cluster, &client));
    for (node, address) in [("plane", "192.0.2.1"), ("worker", "192.0.2.2")] {
        volumes::add_node(&client, node, address);
    }
    let role = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
    client.merge(&NODES.named("worker"), &role).unwrap();
    let (plane, worker) = (
        join_service_on(&client, "plane"),
        join_service_on(&client, "worker"),
    );
    record_control_plane(&client, "plane");
    record_worker(&client, "worker", "00000000-0000-0000-0000-0000000000ab");

    for id in [UUID, "measurementSecret", "ca_emergency_ssh_host"] {
        assert!(ask(service.address, id, Some(&plane)).is_ok(), "{id}");
        let (code, why) = refusal(ask(service.address, id, Some(&worker)));
        assert_eq!(code, Code::PermissionDenied, "{id}: {why}");
        assert!(
            why.contains("no record says that worker is a control plane: firstlight apply"),
            "{why}"
        );
    }
    service
        .program
        .expect("caller=kube-system/join-service class=none id=\"ca_emergency_ssh_host\" length=32 node=\"worker\"");

    // control planes that restart need keys before the API server answers
    cluster.kill_api_server();
    thread::sleep(Duration::from_secs(31));
    assert!(ask(service.address, UUID, Some(&plane)).is_ok());
    let (code, why) = refusal(ask(service.address, UUID, Some(&worker)));
    assert_eq!(code, Code::Unavailable, "{why}");
}

/// The other work of a join service needs no key: it approves and signs.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_join_service_starts_only_on_a_control_plane() {
    let (cluster, client) = Cluster::started();
    let kubeconfig = own_kubeconfig_of(&cluster, &client);
    assert!(!kubeconfig.is_empty(), "it has written the roles");
    volumes::add_node(&client, "new", "192.0.2.1");
    let account = ("kube-system", "join-service");
    let uid = volumes::add_pod(&client, account, "join-service-0", "new", json!([]));
    let audience = "https://kubernetes.default.svc";
    let token = volumes::token_of_pod(&client, account, "join-service-0", &uid, audience);
    let (program, _dir) = in_pod(
        &cluster,
        "join-service",
        &token,
        &["--key-service", "127.0.0.1:1", "--config", "."],
    );
    program.expect("there is no ConfigMap kube-system/join-node-new: firstlight apply writes");
    record_worker(&client, "new", "00000000-0000-0000-0000-0000000000ab");
    program.expect("the ConfigMap kube-system/join-node-new, is that of a worker");
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    client.delete(&maps.named("join-node-new")).unwrap();
    record_control_plane(&client, "new");
    program.expect("the record of the node new says that it is a control plane");
}

/// Starts the key service in a pod whose own token is this one.
fn key_service_of_pod(cluster: &Cluster, token: &str) -> (Program, TempDir) {
    let arguments = [
        "--clients",
        "token",
        "--grant",
        GRANTS,
        "--listen",
        "127.0.0.1:0",
        "--master-secret",
        "mastersecret",
        "--salt=salt",
    ];
    in_pod(cluster, "key-service", token, &arguments)
}

/// Starts a service in a pod whose own token is this one.
fn in_pod(cluster: &Cluster, service: &str, token: &str, arguments: &[&str]) -> (Program, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("mastersecret", &[0; 32][..]),
        ("salt", &[0; 32]),
        ("token", token.as_bytes()),
        ("ca.crt", cluster.ca().0.as_bytes()),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
    }
    let account = "/run/secrets/kubernetes.io/serviceaccount";
    let pod = format!(
        "mount -t tmpfs none /run && mkdir -p {account} && cp token ca.crt {account} && exec \"$@\""
    );
    let server = cluster.server();
    let (host, port) = (server.strip_prefix("https://").unwrap().rsplit_once(':')).unwrap();
    let mut command = Command::new("unshare");
    command
        .args(["--map-root-user", "--mount", "sh", "-c", &pod, "sh"])
        .arg(support::program::built(service))
        .args(arguments)
        .env("KUBERNETES_SERVICE_HOST", host)
        .env("KUBERNETES_SERVICE_PORT", port)
        .current_dir(dir.path());
    (Program::start(&mut command), dir)
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_pod_whose_token_names_no_node_warns_that_it_serves_all_nodes() {
    const ACCOUNT: (&str, &str) = ("kube-system", "key-service");
    let (cluster, client) = Cluster::started();
    volumes::add_node(&client, "plane", "192.0.2.1");
    let uid = volumes::add_pod(&client, ACCOUNT, "key-service-0", "plane", json!([]));
    let audience = "https://kubernetes.default.svc";
    let bound = volumes::token_of_pod(&client, ACCOUNT, "key-service-0", &uid, audience);
    let unbound = token(&client, ACCOUNT.0, ACCOUNT.1, audience);
    for (token, warns) in [(bound, false), (unbound, true)] {
        let (program, _dir) = key_service_of_pod(&cluster, &token);
        program.expect("serving data keys");
        let said = program.output();
        assert_eq!(
            said.contains("PODS OF EVERY NODE GET KEYS IN PLAINTEXT"),
            warns,
            "{said}"
        );
    }
}

/// The client of Constellation's CSI drivers: grpc-go, in plaintext, without a token.
fn old_driver(address: SocketAddr, id: &str) -> Result<String, String> {
    let program = go_program("csi_driver", env!("CARGO_TARGET_TMPDIR"));
    let output = Command::new(program)
        .args(["old", &address.to_string(), id])
        .output()
        .unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap().trim().into())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Defines Cilium's objects about nodes by its own definition.
fn define_cilium_nodes(client: &Client) -> Resource {
    let file = "../../../pkg/k8s/apis/cilium.io/client/crds/v2/ciliumnodes.yaml";
    let file = fetched("cilium-chart.sh").join(file);
    let definition = yaml::document(&fs::read_to_string(file).unwrap()).unwrap();
    let definitions = Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions");
    client.create(&definitions.all(), &definition).unwrap();
    let nodes = Resource::cluster("cilium.io", "v2", "ciliumnodes");
    let end = Instant::now() + PATIENCE;
    // the server serves a new resource only some time after it accepted its definition
    while let Err(error) = client.list(&nodes.all(), &Selector::default()) {
        assert!(Instant::now() < end, "{error}");
        thread::sleep(Duration::from_millis(200));
    }
    nodes
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_driver_of_constellation_is_served_before_and_through_a_day_and_refused_afterwards() {
    const STATE_DISK: &str = "3f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";
    let (cluster, client) = Cluster::started();
    let kubeconfig = own_kubeconfig_of(&cluster, &client);
    // As Constellation's key service, which gives every key to everybody.
    let before = key_service_for(&kubeconfig, "any", "anyone=disk,ssh,measurement");
    assert_eq!(old_driver(before.address, UUID).unwrap(), DISK_KEY);

    let grants = format!("{GRANTS};anyone=id:s3proxy-kek");
    let through = |day| {
        // `::` is for IPv4, too.
        let more = ["--old-clients-until", day, "--listen-old", "[::]:0"];
        let service = key_service_with(&kubeconfig, "token", &grants, &more);
        let port = address_in(&service.program.expect("CLIENTS WITHOUT A TOKEN")).port();
        (service, SocketAddr::from(([127, 0, 0, 1], port)))
    };
    let (during, address) = through("2099-12-31");
    let refused = |id: &str, why: &str| {
        let error = old_driver(address, id).unwrap_err();
        assert!(
            error.contains("PermissionDenied") && error.contains(why),
            "{error}"
        );
    };
    // what keeps packets from outside of the cluster away, which could have the address of a node
    let cilium = define_cilium_nodes(&client);
    refused(UUID, "there is no ConfigMap kube-system/cilium-config");
    let config = |replaces: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cilium-config"}, "data": {"kube-proxy-replacement": replaces, "enable-bpf-masquerade": "true",
            "enable-wireguard": "true", "encrypt-node": "true"}})
    };
    let at = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("cilium-config");
    client.apply(&at, &config("false")).unwrap();
    refused(UUID, "kube-proxy-replacement is \"false\"");
    client.apply(&at, &config("strict")).unwrap();
    refused(UUID, "127.0.0.1 is not the address of one node");
    volumes::add_node(&client, "worker", "127.0.0.1");
    refused(UUID, "no pod on the node worker is no driver");
    let kube_proxy = ("kube-system", "kube-proxy");
    volumes::add_pod(&client, kube_proxy, "no-proxy", "worker", json!([]));
    let pods = PODS.in_namespace("kube-system");
    let labels = json!({"metadata": {"labels": {"k8s-app": "kube-proxy"}}});
    client.merge(&pods.named("no-proxy"), &labels).unwrap();
    refused(UUID, "no pod on the node worker is no driver");
    // a kubelet writes mirror pods with labels of its choice, but without this account
    let other = ("kube-system", "other");
    add_client(&client, other, "mirror", "worker", None, None, &[]);
    client.merge(&pods.named("mirror"), &labels).unwrap();
    refused(UUID, "is no driver");
    let pod = json!({"metadata": {"name": "kube-proxy-x", "labels": {"k8s-app": "kube-proxy"}}, "spec": {
        "nodeName": "worker", "serviceAccountName": "kube-proxy", "automountServiceAccountToken": false, "hostNetwork": true,
        "containers": [{"name": "a", "image": "a"}],
    }});
    client.create(&pods, &pod).unwrap();
    refused(
        UUID,
        "kube-proxy runs beside Cilium, as the pod kube-proxy-x",
    );
    let unlabelled = json!({"metadata": {"labels": {"k8s-app": null}}});
    client
        .merge(&pods.named("kube-proxy-x"), &unlabelled)
        .unwrap();
    refused(
        UUID,
        "kube-system/kube-proxy-x, kube-system/mirror on the node worker is no driver",
    );
    // the driver of OpenStack is on the network of its host
    add_driver(&client, CINDER, "worker", None);
    refused(UUID, "is no driver");
    volumes::add_volume(&client, "other");
    volumes::attach(&client, "other", "worker", true);
    add_csi_driver(&client, CINDER);
    let nothing = "no volume of this driver is attached to the node worker";
    refused(UUID, nothing);
    attach_to(&client, CINDER, "one", "worker", false);
    refused(UUID, nothing);
    let status = json!({"status": {"attached": true}});
    let attachment = volumes::ATTACHMENTS.named("one-worker");
    client
        .merge(&attachment.subresource("status"), &status)
        .unwrap();
    assert_eq!(old_driver(address, UUID).unwrap(), DISK_KEY);
    during.program.expect("audit result=given WITHOUT A TOKEN");
    let said = during.program.output();
    assert!(
        said.contains("class=old-volume")
            && said.contains(
                "node=\"worker\" pods=[\"kube-system/csi-cinder-node-sa-worker\", \"kube-system/kube-proxy-x\", \"kube-system/mirror\"] attached=[\"one\"]"
            ),
        "{said}"
    );
    // From another address.
    let error = old_driver(
        SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], address.port())),
        UUID,
    )
    .unwrap_err();
    assert!(
        error.contains("::1 is not the address of one node"),
        "{error}"
    );
    // A pod with this address, which is not on the network of its host.
    volumes::add_pod(&client, CSI, "csi-other", "other", json!([]));
    let pod = PODS.in_namespace(CSI.0).named("csi-other");
    let give = |ip: &str| {
        let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}]}});
        client.merge(&pod.subresource("status"), &status).unwrap()
    };
    give("127.0.0.1");
    refused(UUID, "storage/csi-other on the node other is no driver");
    give("192.0.2.9");

    // in a tunnel of Cilium, the host of the driver has the address of its interface cilium_host
    let address_of = |name: &str, kind: &str, ip: &str| {
        let addresses = json!({"status": {"addresses": [{"type": kind, "address": ip}]}});
        let at = NODES.named(name).subresource("status");
        client.merge(&at, &addresses).unwrap();
    };
    address_of("worker", "InternalIP", "192.0.2.1");
    refused(UUID, "127.0.0.1 is not the address of one node");
    volumes::add_node(&client, "third", "192.0.2.3");
    let addresses = |ip: &str| json!([{"type": "InternalIP", "ip": "127.0.0.1"}, {"type": "CiliumInternalIP", "ip": ip}]);
    for (name, ip) in [("worker", "127.0.0.1"), ("third", "127.0.0.3")] {
        let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
            "spec": {"addresses": addresses(ip)}});
        client.create(&cilium.all(), &node).unwrap();
    }
    assert_eq!(old_driver(address, UUID).unwrap(), DISK_KEY);
    // two nodes with the same address
    let same = json!({"spec": {"addresses": addresses("127.0.0.1")}});
    client.merge(&cilium.named("third"), &same).unwrap();
    refused(UUID, "127.0.0.1 is not the address of one node");
    client.delete(&cilium.named("third")).unwrap();

    let disk = Uuid::parse(STATE_DISK).unwrap();
    machine_record::write_if_absent(
        &client,
        &MachineRecord::of_node("n", &disk, Some("m"), "", ""),
    )
    .unwrap();
    refused(STATE_DISK, "belongs to a state disk");
    for id in [
        "measurementSecret",
        "ca_emergency_ssh",
        "ca_emergency_ssh_host",
        "other",
    ] {
        refused(id, "has no grant");
    }
    assert!(old_driver(address, "s3proxy-kek").is_ok(), "it is granted");
    let text = metrics(&during);
    for line in [
        "firstlight_key_old_clients 1",
        "firstlight_key_requests_total{class=\"old-volume\",result=\"given\"} 2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
    }

    let (after, address) = through("2026-01-31");
    let error = old_driver(address, UUID).unwrap_err();
    assert!(error.contains("since 2026-01-31 is over"), "{error}");
    assert!(metrics(&after).contains("firstlight_key_old_clients 0"));
    // The port for tokens gives nothing without one.
    let error = old_driver(after.address, UUID).unwrap_err();
    assert!(error.contains("Unauthenticated"), "{error}");
}

/// Starts a key service that serves clients without a token, in a cluster in which this is safe. Returns its address for them.
fn open_for_old_clients(cluster: &Cluster, client: &Client) -> (KeyService, SocketAddr) {
    define_cilium_nodes(client);
    let config = json!({"metadata": {"name": "cilium-config"}, "data": {"kube-proxy-replacement": "strict",
        "enable-bpf-masquerade": "true", "enable-wireguard": "true", "encrypt-node": "true"}});
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    client.create(&maps, &config).unwrap();
    let more = [
        "--old-clients-until",
        "2099-12-31",
        "--listen-old",
        "127.0.0.1:0",
    ];
    let kubeconfig = own_kubeconfig_of(cluster, client);
    let service = key_service_with(&kubeconfig, "token", GRANTS, &more);
    let address = address_in(&service.program.expect("CLIENTS WITHOUT A TOKEN"));
    (service, address)
}

/// Connects from this address.
fn channel_from(own: &str, service: SocketAddr) -> Channel {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let own: SocketAddr = format!("{own}:0").parse().unwrap();
    socket.bind(&own.into()).unwrap();
    socket.connect(&service.into()).unwrap();
    Channel::new(transport::plain::transport(socket.into()).unwrap(), "x").unwrap()
}

fn ask_from(own: &str, service: SocketAddr, id: &str) -> Result<Vec<u8>, Status> {
    let request = GetDataKeyRequest {
        data_key_id: id.into(),
        length: 32,
        ..GetDataKeyRequest::default()
    };
    call(&channel_from(own, service), &request, None)
}

/// A tenant chooses the arguments of its pods, and a namespace's administrator the names of its accounts.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_pod_is_a_driver_of_constellation_by_its_account_and_not_by_its_arguments() {
    let (cluster, client) = Cluster::started();
    let (_service, address) = open_for_old_clients(&cluster, &client);
    add_csi_driver(&client, AWS);
    volumes::add_node(&client, "worker", "192.0.2.7");
    attach_to(&client, AWS, "own", "worker", true);
    let kms = ["--kms-addr=key-service.kube-system:9000"];
    let set = Some("DaemonSet");
    let kube = ("kube-system", AWS.1);
    for (number, account, name, owner) in [
        (2, ("tenant", "default"), "driver", None),
        (3, ("tenant", AWS.1), "ebs-csi-node", set),
        (4, kube, "no-owner", None),
        (5, kube, "of-replicas", Some("ReplicaSet")),
        (6, ("kube-system", CINDER.1), "no-csi-driver", set),
        (7, ("default", "s3proxy"), "proxy", None),
    ] {
        let ip = format!("127.0.0.{number}");
        add_client(&client, account, name, "worker", owner, Some(&ip), &kms);
        let (code, why) = refusal(ask_from(&ip, address, UUID));
        assert_eq!(code, Code::PermissionDenied, "{name}: {why}");
        assert!(why.contains("is no driver of Constellation"), "{why}");
    }
    // the chart for AWS gives its program no argument
    add_driver(&client, AWS, "worker", Some("127.0.0.8"));
    let key = ask_from("127.0.0.8", address, UUID).unwrap();
    assert_eq!(hex(&key), DISK_KEY);
    // an account with a grant, with a volume of any driver
    let granted = ("default", "csi");
    add_client(
        &client,
        granted,
        "own",
        "worker",
        set,
        Some("127.0.0.9"),
        &[],
    );
    assert!(ask_from("127.0.0.9", address, UUID).is_ok());
    // a grant of an id names the proxy by its account
    assert!(ask_from("127.0.0.7", address, "s3proxy-kek").is_ok());
    for (own, id) in [
        ("127.0.0.2", "s3proxy-kek"),
        ("127.0.0.8", "s3proxy-kek"),
        ("127.0.0.7", "other"),
    ] {
        let (code, why) = refusal(ask_from(own, address, id));
        assert_eq!(code, Code::PermissionDenied, "{why}");
    }
    // the address of the join service does not have its keys
    let join = ("kube-system", "join-service");
    add_client(
        &client,
        join,
        "join",
        "worker",
        set,
        Some("127.0.0.10"),
        &[],
    );
    for id in ["measurementSecret", "ca_emergency_ssh_host", UUID] {
        let (code, why) = refusal(ask_from("127.0.0.10", address, id));
        assert_eq!(code, Code::PermissionDenied, "{id}: {why}");
    }
}

/// Each request costs several lists of the API server, so they are answered one at a time.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn one_pod_with_many_connections_does_not_keep_the_drivers_of_other_nodes_away() {
    let (cluster, client) = Cluster::started();
    let (_service, address) = open_for_old_clients(&cluster, &client);
    add_csi_driver(&client, AWS);
    for (node, ip) in [("worker", "192.0.2.7"), ("other", "192.0.2.8")] {
        volumes::add_node(&client, node, ip);
    }
    attach_to(&client, AWS, "own", "worker", true);
    add_driver(&client, AWS, "worker", Some("127.0.0.8"));
    let tenant = ("tenant", "default");
    add_client(&client, tenant, "a", "other", None, Some("127.0.0.2"), &[]);
    let over = AtomicBool::new(false);
    let floods = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    assert!(ask_from("127.0.0.2", address, UUID).is_err());
                    floods.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let answers: Vec<_> = (0..60)
            .map(|_| ask_from("127.0.0.8", address, UUID))
            .collect();
        over.store(true, Ordering::Relaxed);
        for answer in answers {
            assert_eq!(hex(&answer.unwrap()), DISK_KEY);
        }
    });
    assert!(floods.into_inner() > 60, "the pod has asked all the time");
}

/// A network plugin that ignores `internalTrafficPolicy` must not send keys over the network in plaintext.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn in_plaintext_only_pods_of_the_own_node_are_served() {
    let client = client();
    let config = |node: &str| KeyServiceConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        clients: Clients::Token,
        api: Some(Box::new(
            kubernetes::client::ApiAccess::from_kubeconfig(
                &Cluster::shared().kubeconfig(),
                "test",
                Path::new("/"),
            )
            .unwrap(),
        )),
        grants: Some(GRANTS.parse().unwrap()),
        allow_plaintext: false,
        node: Some(node.into()),
        listen_tls: None,
        old_clients: None,
        health: None,
        metrics: None,
    };
    volumes::add_node(&client, "plain", "192.0.2.7");
    record_control_plane(&client, "plain");
    let token = join_service_on(&client, "plain");
    for (node, expected) in [("plain", None), ("other", Some(Code::PermissionDenied))] {
        let service = ::services::key_service::KeyService::start(config(node)).unwrap();
        service
            .provide(MasterSecret::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap())
            .unwrap();
        let answer = ask(service.local_addr(), UUID, Some(&token));
        assert_eq!(
            answer.map_err(|status| status.code()).err(),
            expected,
            "{node}"
        );
    }
}

/// Control planes that restart need keys before etcd has a quorum. Without a quorum, no token can
/// be reviewed.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn accepted_tokens_stay_valid_while_the_api_server_is_down() {
    let (mut cluster, client) = Cluster::started();
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
        Auth::Token {
            file: dir.path().join("token"),
            wrapping_key: None,
        },
    );
    service.program.expect("audit result=given");
    cluster.kill_api_server();
    // Waits until the verdict is no longer cached.
    std::thread::sleep(Duration::from_secs(31));
    assert_eq!(
        hex(keys.data_key(UUID, 32, None).unwrap().expose()),
        DISK_KEY
    );
    service.program.expect("stays accepted (last review 3");
    assert!(keys.data_key(UUID, 32, None).is_ok());
    let asked = service.program.output();
    let asked = asked.matches("stays accepted (last review").count();
    assert_eq!(asked, 1, "the API server is asked again");
    assert_eq!(
        ask(service.address, UUID, Some(&stranger))
            .unwrap_err()
            .code(),
        Code::Unavailable
    );
    cluster.start_api_server();
    client.within(PATIENCE).wait_ready(&mut |_| {}).unwrap();
    assert_eq!(
        hex(&ask(service.address, UUID, Some(&stranger)).unwrap()),
        DISK_KEY
    );
}
