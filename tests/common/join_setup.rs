//! Sets up a join service and a member controller in a cluster, and the callers of the former.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::kube_apiserver::{Cluster, set_ready_controllers};
use crate::manifests::settings;
use ::services::cluster::keys::{Auth, KeyClient};
use ::services::cluster::secrets::Secrets;
pub use ::services::join_service::CONTROL_PLANE_FILES as PKI;
use ::services::join_service::{Config, JoinService};
use ::services::member_controller::watch::Judging;
use ::services::member_controller::{MemberController, Options};
use base::stop::Stop;
use base::time;
use kubernetes::certificate_request::CertificateRequest;
use kubernetes::client::{
    self, CONFIG_MAPS, Client, EVENTS, LEASES, NODES, Object, Resource, SECRETS, SERVICE_ACCOUNTS,
    Selector,
};
use kubernetes::services;
use kubernetes::services::migration::Migration;
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use rpc::grpc::{CallOptions, Channel, Code, Status};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use support::metadata::MetadataServer;
use support::program::Program;
use support::swtpm::Swtpm;
use tempfile::TempDir;
use verifier::qemu_vtpm;
use verifier::sources::offline;

/// A policy that each TPM of these tests meets, as their firmware measures the same boot into PCR 4
/// ([`support::swtpm::PCR_4`]), as long as its machine has joined no cluster.
pub const POLICY: &str = r#"{"measurements":{"4":{"expected":"7a94ffe8a7729a566d3d3c577fcb4b6b1e671f31540375f80eae6382ab785e35","warnOnly":false},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
/// The machines of the cloud: two control planes, three workers.
pub const PEERS: &str = r#"[
    {"Name":"plane-0","ProviderID":"p0","Role":"ControlPlane","VPCIP":"127.42.1.100"},
    {"Name":"Plane_1","ProviderID":"p1","Role":"ControlPlane","VPCIP":"127.42.1.101"},
    {"Name":"worker-0","ProviderID":"w0","Role":"Worker","VPCIP":"127.42.2.100"},
    {"Name":"worker-1.example","ProviderID":"w1","Role":"Worker","VPCIP":"127.42.2.101"},
    {"Name":"worker-2","ProviderID":"w2","Role":"Worker"}
]"#;
/// The address of a load balancer that hides its callers. No machine of the cloud has it.
pub const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const COMPONENTS: &str = r#"[{"url":"https://example.com/kubelet","hash":"sha256:00","install_path":"/run/state/bin/kubelet"}]"#;
pub const CLUSTER_CONFIGURATION: &str = "apiServer:\n  certSANs:\n  - 127.0.0.1\n  - lb.example\n  - '*.example.org'\ncontrolPlaneEndpoint: 127.42.0.2\n";

/// Locked by each test, because the tests use the same objects.
pub static ALONE: Mutex<()> = Mutex::new(());

pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|error| error.into_inner())
}

pub const MEASUREMENT_SALT: [u8; 32] = [7; 32];

/// The names of the accounts.
pub const JOIN_SERVICE: &str = "join-service";
pub const MEMBER_CONTROLLER: &str = "member-controller";

/// Returns the folder of an account's token.
fn folder_of(account: &str) -> String {
    format!("account-{account}")
}

/// A join service and a member controller in a cluster, and what they need.
pub struct Setup {
    pub service: Option<JoinService>,
    pub controller: Option<MemberController>,
    pub keys: Program,
    pub metadata: MetadataServer,
    pub admin: Client,
    pub dir: TempDir,
    /// The setting of services that are started from now on.
    pub migration: Migration,
}

/// What a test needs alone: a lock that it holds while it runs, the cluster, and what is set up in it.
pub type Shared = (MutexGuard<'static, ()>, &'static Cluster, Setup);

impl Setup {
    /// Sets up the cluster of all tests when no other test uses it.
    pub fn shared() -> Shared {
        let (alone, cluster) = (alone(), Cluster::shared());
        (alone, cluster, Setup::new(cluster))
    }

    /// Sets up a cluster that no machine has joined yet.
    pub fn new(cluster: &Cluster) -> Setup {
        let admin = cluster.client(&Stop::new());
        let dir = tempfile::tempdir().unwrap();
        prepare(cluster, &admin, dir.path());
        let metadata = MetadataServer::start("127.0.0.1:0".parse().unwrap());
        metadata.set_peers(PEERS);
        let (keys, _) = key_service(dir.path(), "127.0.0.1:0");
        let mut setup = Setup {
            service: None,
            controller: None,
            keys,
            metadata,
            admin,
            dir,
            migration: Migration::default(),
        };
        setup.start(cluster);
        setup
    }

    /// Starts or restarts both.
    pub fn start(&mut self, cluster: &Cluster) {
        drop(self.service.take());
        self.service = Some(JoinService::start(self.config(cluster)).unwrap());
        self.start_controller(self.options(cluster));
    }

    /// Starts or restarts the member controller.
    pub fn start_controller(&mut self, options: Options) {
        drop(self.controller.take());
        self.controller = Some(MemberController::start(options).unwrap());
    }

    /// Returns the access that the join service's account has, or that of the member controller.
    pub fn account(&self, cluster: &Cluster, name: &str) -> client::ApiAccess {
        let folder = self.dir.path().join(folder_of(name));
        client::ApiAccess::of_service_account(&cluster.server(), &folder).unwrap()
    }

    /// Returns what the member controller needs. It asks no members.
    pub fn options(&self, cluster: &Cluster) -> Options {
        Options {
            health: None,
            metrics: None,
            kubernetes: self.account(cluster, MEMBER_CONTROLLER),
            metadata: self.config(cluster).metadata,
            migration: self.migration,
            deleted_machines: Default::default(),
            collateral: None,
            watch: None,
        }
    }

    /// Returns what judges members.
    pub fn judging(&self) -> Judging {
        let keys = address(&self.keys.expect("serving data keys")).to_string();
        Judging {
            variant: &qemu_vtpm::VARIANT,
            sources: offline(),
            config_dir: self.dir.path().into(),
            secrets: Secrets::new(KeyClient::new(&keys, Auth::None), self.dir.path().into()),
            wrapping_key_dir: self.dir.path().join("firstlight"),
        }
    }

    pub fn config(&self, cluster: &Cluster) -> Config {
        Config {
            key_service: address(&self.keys.expect("serving data keys")).to_string(),
            metrics: Some("127.0.0.1:0".parse().unwrap()),
            kubernetes: Some(self.account(cluster, JOIN_SERVICE)),
            metadata: Some(
                cloud_api::metadata(
                    base::machines::Cloud::Qemu,
                    Some(&format!("http://{}", self.metadata.address)),
                )
                .unwrap(),
            ),
            pki_dir: self.dir.path().join("pki"),
            wrapping_key_dir: self.dir.path().join("firstlight"),
            migration: self.migration,
            ..lone_config(self.dir.path())
        }
    }

    /// Gives the member controller's account the rights that it has if it watches the nodes' attestation.
    pub fn permit_watch(&self) {
        self.permit_watch_of("");
    }

    /// Gives it those that it has if it also publishes results as this issuer.
    pub fn permit_watch_of(&self, issuer: &str) {
        let settings = services::ServiceSettings {
            watch: Some("600".into()),
            watch_issuer: Some(issuer.into()),
            ..settings(POLICY)
        };
        let objects = services::manifests(&settings).unwrap();
        let kinds = ["Role", "ClusterRole", "ValidatingAdmissionPolicy"];
        let is_one = |object: &&Value| {
            kinds.iter().any(|kind| object["kind"] == *kind)
                && [JOIN_SERVICE, MEMBER_CONTROLLER].contains(&name(object))
        };
        for object in objects.iter().filter(is_one) {
            self.admin
                .apply(&Object::of(object).unwrap(), object)
                .unwrap();
        }
    }

    pub fn service(&self) -> &JoinService {
        self.service.as_ref().unwrap()
    }

    pub fn controller(&self) -> &MemberController {
        self.controller.as_ref().unwrap()
    }

    /// Requests a ticket from the source address that the machine claims.
    pub fn join(
        &self,
        tpm: &Swtpm,
        request: &IssueJoinTicketRequest,
    ) -> Result<IssueJoinTicketResponse, Status> {
        let certificate = CertificateRequest::parse(&request.certificate_request).ok();
        let own = certificate.and_then(|certificate| certificate.addresses.first().copied());
        self.join_from(own.unwrap_or(ELSEWHERE), tpm, request)
    }

    pub fn join_from(
        &self,
        source: IpAddr,
        tpm: &Swtpm,
        request: &IssueJoinTicketRequest,
    ) -> Result<IssueJoinTicketResponse, Status> {
        channel_from(source, tpm, self.service().local_addr()).unary(
            ISSUE_JOIN_TICKET,
            request,
            &within(30),
        )
    }

    /// Requests a ticket again, as a node does that did not receive its ticket.
    pub fn join_again(
        &self,
        tpm: &Swtpm,
        request: &IssueJoinTicketRequest,
    ) -> IssueJoinTicketResponse {
        let status = match self.join(tpm, request) {
            Ok(ticket) => return ticket,
            Err(status) => status,
        };
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(status.message().contains("a moment ago"), "{status}");
        thread::sleep(status.retry_after().unwrap());
        self.join(tpm, request).unwrap()
    }

    pub fn rejoin(&self, tpm: &Swtpm, disk: &str) -> Result<IssueRejoinTicketResponse, Status> {
        let request = IssueRejoinTicketRequest {
            disk_uuid: disk.into(),
        };
        channel(tpm, self.service().local_addr()).unary(ISSUE_REJOIN_TICKET, &request, &within(30))
    }

    /// Returns how often this reason occurred.
    pub fn count(&self, request: &str, reason: &str) -> u64 {
        let (request, reason) = (
            format!("request=\"{request}\""),
            format!("reason=\"{reason}\""),
        );
        let metrics = self.service().metrics().render();
        let lines = metrics
            .lines()
            .filter(|line| line.starts_with("firstlight_join_tickets_total{"));
        // one line for each form of attested TLS
        let counts = lines.filter(|line| line.contains(&request) && line.contains(&reason));
        let count = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
        counts.map(count).sum()
    }

    /// Returns how many tokens wait for their nodes.
    pub fn waiting(&self) -> String {
        let metrics = self.service().metrics().render();
        metrics
            .lines()
            .find_map(|line| line.strip_prefix("firstlight_join_tokens "))
            .unwrap()
            .to_owned()
    }

    /// Returns the identifiers of bootstrap tokens.
    pub fn tokens(&self) -> Vec<String> {
        let secrets = self
            .admin
            .list(&SECRETS.in_namespace("kube-system"), &Selector::default())
            .unwrap()
            .items;
        let ids = secrets
            .iter()
            .filter_map(|secret| name(secret).strip_prefix("bootstrap-token-"));
        ids.map(str::to_owned).collect()
    }

    pub fn records(&self) -> Vec<String> {
        let maps = self.admin.list(
            &CONFIG_MAPS.in_namespace("kube-system"),
            &Selector::labels("firstlight/record"),
        );
        maps.unwrap()
            .items
            .iter()
            .map(|map| name(map).to_owned())
            .collect()
    }

    /// Creates the record with which an operator accepts a disk of Constellation, without a
    /// machine. Returns its name.
    pub fn record_disk(&self, number: u8) -> String {
        let name = format!("join-disk-{}", disk(number));
        let record = json!({"metadata": {"name": name}, "data": {"disk": disk(number)}});
        self.admin
            .create(&CONFIG_MAPS.in_namespace("kube-system"), &record)
            .unwrap();
        name
    }

    /// Waits for an event about worker 0.
    pub fn eventually_event(&self, reason: &str) {
        let events = EVENTS.in_namespace("default");
        eventually("there is an event", || {
            let events = self.admin.list(&events, &Selector::default());
            events
                .unwrap()
                .items
                .iter()
                .any(|event| event["reason"] == reason && event["regarding"]["name"] == "worker-0")
        });
    }

    pub fn holder(&self) -> String {
        let lease = self.admin.find(&lease()).unwrap().unwrap_or_default();
        lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// Does what a kubelet does when it starts.
    pub fn make_node(&self, name: &str) {
        self.admin
            .create(&NODES.all(), &json!({"metadata": {"name": name}}))
            .unwrap();
    }

    pub fn make_ready(&self, name: &str, status: &str) {
        let conditions = json!([{
            "type": "Ready", "status": status, "reason": "Test",
            "lastTransitionTime": time::seconds(SystemTime::now()), "lastHeartbeatTime": time::seconds(SystemTime::now()),
        }]);
        let status = NODES.named(name).subresource("status");
        self.admin
            .merge(&status, &json!({"status": {"conditions": conditions}}))
            .unwrap();
    }
}

pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

pub fn lease() -> Object {
    LEASES
        .in_namespace("kube-system")
        .named("join-control-plane")
}

/// Waits until the condition holds, because the watches of the service need a moment.
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    eventually_within(45, what, is_so);
}

/// Waits for at most this number of seconds.
pub fn eventually_within(seconds: u64, what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(seconds);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The kinds of the chart's objects that give no rights.
pub const OTHERS: [&str; 5] = [
    "NetworkPolicy",
    "Secret",
    "ConfigMap",
    "Service",
    "DaemonSet",
];

/// Creates the objects of init and of the chart without earlier leftovers, and a control plane's
/// files.
pub fn prepare(cluster: &Cluster, admin: &Client, dir: &Path) {
    for object in services::manifests(&settings(POLICY))
        .unwrap()
        .iter()
        .filter(|one| !OTHERS.iter().any(|kind| one["kind"] == *kind))
    {
        admin.apply(&Object::of(object).unwrap(), object).unwrap();
    }
    for node in admin
        .list(&NODES.all(), &Selector::default())
        .unwrap()
        .items
    {
        admin.delete(&NODES.named(name(&node))).unwrap();
    }
    set_ready_controllers(admin, 1);
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    for map in admin.list(&maps, &Selector::default()).unwrap().items {
        if ["join-", "k8s-components-", "kubeadm-config"]
            .iter()
            .any(|prefix| name(&map).starts_with(prefix))
        {
            admin.delete(&maps.named(name(&map))).unwrap();
        }
    }
    for secret in admin
        .list(&SECRETS.in_namespace("kube-system"), &Selector::default())
        .unwrap()
        .items
    {
        admin
            .delete(&SECRETS.in_namespace("kube-system").named(name(&secret)))
            .unwrap();
    }
    for name in ["join-control-plane", "join-watch"] {
        let lease = LEASES.in_namespace("kube-system").named(name);
        admin.delete_if_there(&lease).unwrap();
    }
    let map = |name: &str, data: Value| {
        admin
            .create(&maps, &json!({"metadata": {"name": name}, "data": data}))
            .unwrap()
    };
    map(
        "kubeadm-config",
        json!({"ClusterConfiguration": CLUSTER_CONFIGURATION}),
    );
    map(
        "k8s-components-sha256-1",
        json!({"components": COMPONENTS, "cluster-version": "v1.34.4"}),
    );

    let (certificate, key) = cluster.ca();
    for account in [JOIN_SERVICE, MEMBER_CONTROLLER] {
        let folder = dir.join(folder_of(account));
        fs::create_dir(&folder).unwrap();
        let token = SERVICE_ACCOUNTS
            .in_namespace("kube-system")
            .named(account)
            .subresource("token");
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let token = admin.create_subresource(&token, &request).unwrap();
        let token = token["status"]["token"].as_str().unwrap();
        fs::write(folder.join("token"), token).unwrap();
        fs::write(folder.join("ca.crt"), &certificate).unwrap();
    }

    fs::create_dir_all(dir.join("pki/etcd")).unwrap();
    for file in PKI {
        fs::write(dir.join("pki").join(file), format!("content of {file}\n")).unwrap();
    }
    fs::write(dir.join("pki/ca.crt"), certificate).unwrap();
    fs::write(dir.join("pki/ca.key"), key).unwrap();
    fs::write(dir.join("attestationConfig"), POLICY).unwrap();
    fs::write(dir.join("measurementSalt"), MEASUREMENT_SALT).unwrap();
}

/// Starts the program with a master secret of zeros.
pub fn key_service(dir: &Path, listen: &str) -> (Program, SocketAddr) {
    fs::write(dir.join("mastersecret"), [0; 32]).unwrap();
    fs::write(dir.join("salt"), [0; 32]).unwrap();
    let mut command = Command::new(support::program::built("key-service"));
    command
        .args([
            "--listen",
            listen,
            "--master-secret",
            "mastersecret",
            "--salt=salt",
            "--clients=any",
        ])
        .current_dir(dir);
    let program = Program::start(&mut command);
    let address = address(&program.expect("serving data keys"));
    (program, address)
}

/// Starts the program in this cluster with the files of this directory. Returns the address of its
/// service.
pub fn service_program(setup: &Setup, cluster: &Cluster, config: &Path) -> (Program, SocketAddr) {
    service_program_at("127.0.0.1:0", setup, cluster, config)
}

/// The same at this address.
pub fn service_program_at(
    listen: &str,
    setup: &Setup,
    cluster: &Cluster,
    config: &Path,
) -> (Program, SocketAddr) {
    let account = setup.dir.path().join(folder_of(JOIN_SERVICE));
    let kubeconfig = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {{server: '{}', certificate-authority: {}}}\n\
         users:\n- name: u\n  user: {{tokenFile: {}}}\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\n\
         current-context: x\n",
        cluster.server(),
        account.join("ca.crt").display(),
        account.join("token").display()
    );
    fs::write(setup.dir.path().join("kubeconfig"), kubeconfig).unwrap();
    let mut command = Command::new(support::program::built("join-service"));
    command
        .args([
            "--key-service",
            &address(&setup.keys.expect("serving data keys")).to_string(),
        ])
        .args([
            "--key-service-auth=none",
            "--listen",
            listen,
            "--metrics=127.0.0.1:0",
            "--cloud-provider=qemu",
        ])
        .args(["--metadata", &format!("http://{}", setup.metadata.address)])
        .args(["--kubeconfig=kubeconfig", "--pki=pki", "--config"])
        .arg(config)
        .current_dir(setup.dir.path());
    let program = Program::start(&mut command);
    let address = address(&program.expect("serving join requests on"));
    (program, address)
}

/// Returns the settings of a join service without a cluster and without keys, with the policy in this folder.
pub fn lone_config(dir: &Path) -> Config {
    Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        key_service: "127.0.0.1:1".into(),
        key_auth: Auth::None,
        config_dir: dir.into(),
        health: None,
        metrics: None,
        variant: &qemu_vtpm::VARIANT,
        evidence: None,
        verification: None,
        verification_http: None,
        require_strong: false,
        kubernetes: None,
        metadata: None,
        pki_dir: dir.into(),
        wrapping_key_dir: dir.into(),
        node_files_dir: dir.join("node-files"),
        migration: Migration::default(),
        records: None,
        collateral: None,
    }
}

/// Starts the program without a cluster, for the policy in this folder. Returns its address.
pub fn lone_service_program(config: &Path) -> (Program, SocketAddr) {
    let mut command = Command::new(support::program::built("join-service"));
    command
        .args(["--key-service=127.0.0.1:1", "--key-service-auth=none"])
        .args(["--attestation-variant=qemu-vtpm", "--listen=127.0.0.1:0"])
        .arg("--config")
        .arg(config);
    let program = Program::start(&mut command);
    let address = address(&program.expect("serving join requests on"));
    (program, address)
}

/// Returns the first address in a line.
pub fn address(line: &str) -> SocketAddr {
    let words = line.split(|c: char| c.is_whitespace() || c == ',');
    words.filter_map(|word| word.parse().ok()).next().unwrap()
}

pub fn within(seconds: u64) -> CallOptions {
    CallOptions {
        timeout: Some(Duration::from_secs(seconds)),
        ..CallOptions::default()
    }
}

/// Connects the machine with this TPM through a load balancer.
pub fn channel(tpm: &Swtpm, address: SocketAddr) -> Channel {
    channel_from(ELSEWHERE, tpm, address)
}

/// Connects it from this address; all addresses are in 127.0.0.0/8.
pub fn channel_from(source: IpAddr, tpm: &Swtpm, address: SocketAddr) -> Channel {
    channel_of(
        source,
        Arc::new(qemu_vtpm::issuer(tpm.location().parse().unwrap(), None)),
        address,
    )
}

/// Connects a client with this attestation.
pub fn channel_of(
    source: IpAddr,
    issuer: Arc<dyn verifier::Issuer>,
    address: SocketAddr,
) -> Channel {
    let client = atls::Client::new(Some(issuer), None);
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(source, 0).into()).unwrap();
    socket.connect(&address.into()).unwrap();
    let socket = TcpStream::from(socket);
    let transport = client
        .connect(socket, Instant::now() + Duration::from_secs(20))
        .unwrap();
    Channel::new(transport, "x").unwrap()
}

pub fn disk(number: u8) -> String {
    format!("0f5b7c1e-93a4-4d2b-8c6d-0000000000{number:02x}")
}

/// Returns the request of a machine of this name, of a version that does not say which key its kubelet will have.
pub fn request(
    machine: &str,
    ips: &[&str],
    disk_number: u8,
    control_plane: bool,
) -> IssueJoinTicketRequest {
    let key = KeyPair::generate().unwrap();
    request_with_key(&key, machine, ips, disk_number, control_plane)
}

/// Returns the PKCS#10 request of a kubelet, DER.
pub fn kubelets_request(
    key: &KeyPair,
    common_name: &str,
    names: &[&str],
    addresses: &[&str],
) -> Vec<u8> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::OrganizationName, "system:nodes");
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    let names = names
        .iter()
        .map(|name| SanType::DnsName((*name).try_into().unwrap()));
    let addresses = addresses
        .iter()
        .map(|address| SanType::IpAddress(address.parse().unwrap()));
    params.subject_alt_names = names.chain(addresses).collect();
    params.serialize_request(key).unwrap().der().to_vec()
}

/// The same with this key in the certificate signing request.
pub fn request_with_key(
    key: &KeyPair,
    machine: &str,
    ips: &[&str],
    disk_number: u8,
    control_plane: bool,
) -> IssueJoinTicketRequest {
    let request = kubelets_request(key, &format!("system:node:{machine}"), &[], ips);
    IssueJoinTicketRequest {
        disk_uuid: disk(disk_number),
        certificate_request: request,
        is_control_plane: control_plane,
        // RFC 4253 §6.6: two strings, each with its length.
        host_public_key: [&[0, 0, 0, 11][..], b"ssh-ed25519", &[0, 0, 0, 32], &[9; 32]].concat(),
        host_certificate_principals: vec!["10.1.2.3".into(), "host-name".into()],
        accepts_cluster_ca: true,
        has_client_key: false,
    }
}

pub fn worker() -> IssueJoinTicketRequest {
    request("worker-0", &["127.42.2.100"], 1, false)
}

/// Returns a client with this token.
pub fn by_token(cluster: &Cluster, token: &str) -> Client {
    cluster.client_with(token)
}

/// Returns the user that the API server identifies by this token; `None` if it is not valid.
pub fn bearer(cluster: &Cluster, token: &str) -> Option<String> {
    let client = by_token(cluster, token);
    let reviews = Resource::cluster("authentication.k8s.io", "v1", "selfsubjectreviews").all();
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    match client.create(&reviews, &review) {
        Ok(answer) => Some(
            answer["status"]["userInfo"]["username"]
                .as_str()
                .unwrap()
                .to_owned(),
        ),
        Err(error) => {
            assert_eq!(error.code(), Some(401), "{error}");
            None
        }
    }
}

pub fn refused(answer: Result<IssueJoinTicketResponse, Status>) -> Status {
    answer.err().expect("a refusal")
}
