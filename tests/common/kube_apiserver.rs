//! A real kube-apiserver with a real etcd on loopback, built by tools/kubernetes.sh. There is no controller and no kubelet, so
//! objects in the API stay as they are.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{ApiAccess, Client, DAEMON_SETS, SERVICE_ACCOUNTS};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};
use support::foreign::fetched;
use tempfile::TempDir;

/// The API server needs about 6 s of processor time to start.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A cluster without nodes. It ends when this is dropped, or with the test's process.
pub struct Cluster {
    dir: TempDir,
    programs: PathBuf,
    ports: [u16; 3],
    ca: (CertificateParams, KeyPair, String),
    /// The etcd of this cluster alone; `None` if it has members of [`Cluster::start_on`].
    etcd: Option<Process>,
    members: Vec<Member>,
    /// The admission plugins that the API server runs beside its default ones.
    plugins: &'static [&'static str],
    api_server: Option<Process>,
}

/// A member of an etcd as kubeadm sets it up: the name and address of a control plane, the usual ports, TLS.
struct Member {
    name: String,
    address: IpAddr,
    process: Option<Process>,
}

/// A program that ends when its standard input closes, so that it ends however the test ends.
pub struct Process(Child);

impl Process {
    fn start(log: &Path, program: &Path, arguments: &[String]) -> Process {
        let log = File::options().append(true).create(true).open(log).unwrap();
        let mut command = Command::new("sh");
        // a background process has /dev/null as standard input; the program's process ID is written to standard output
        command
            .args([
                "-c",
                r#""$@" >&2 & echo $!; cat >/dev/null; kill -9 $!; wait"#,
                "sh",
            ])
            .arg(program)
            .args(arguments);
        let errors = log.try_clone().unwrap();
        let number = log.try_clone().unwrap();
        drop(log);
        Process(
            command
                .stdin(Stdio::piped())
                .stdout(number)
                .stderr(errors)
                .spawn()
                .unwrap(),
        )
    }

    fn signal(&self, signal: &str) {
        for child in self.children() {
            let _ = Command::new("kill").args([signal, &child]).status();
        }
    }

    /// Returns the process IDs of the program and of `cat`. The signals do no harm to `cat`.
    fn children(&self) -> Vec<String> {
        let children =
            fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.0.id())).unwrap();
        children.split_whitespace().map(str::to_owned).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Cluster {
    /// Returns the cluster that all tests of a program share; it is ready.
    #[allow(dead_code)] // not used by every test
    pub fn shared() -> &'static Cluster {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(|| Cluster::started().0)
    }

    /// Starts a separate cluster. Returns it with an administrator's client as soon as it is ready.
    pub fn started() -> (Cluster, Client) {
        let cluster = Cluster::start();
        let client = cluster.client(&Stop::new());
        client.within(PATIENCE).wait_ready(&mut |_| {}).unwrap();
        (cluster, client)
    }

    /// Starts a separate cluster, which is not ready yet.
    pub fn start() -> Cluster {
        Cluster::start_on(&[])
    }

    /// Starts a separate cluster with an etcd of these members, at addresses of loopback that no other test uses: names and
    /// addresses of control planes. The files of a control plane are below `pki`.
    pub fn start_on(members: &[(&str, IpAddr)]) -> Cluster {
        Cluster::start_with(&[], members)
    }

    /// Starts a separate cluster like [`Cluster::start_on`], whose API server runs these admission plugins too.
    pub fn start_with(plugins: &'static [&'static str], members: &[(&str, IpAddr)]) -> Cluster {
        let programs = programs();
        let dir = TempDir::new().unwrap();
        let ports = free_ports();
        let mut ca = CertificateParams::default();
        ca.distinguished_name.push(DnType::CommonName, "kubernetes");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate().unwrap();
        let pem = ca.self_signed(&key).unwrap().pem();
        let etcd = members
            .is_empty()
            .then(|| start_etcd(dir.path(), &programs, ports));
        let mut cluster = Cluster {
            dir,
            programs,
            ports,
            ca: (ca, key, pem),
            etcd,
            members: vec![],
            plugins,
            api_server: None,
        };
        cluster.write_pki();
        if !members.is_empty() {
            cluster.start_members(members);
        }
        cluster.start_api_server();
        cluster
    }

    /// Stops etcd and the API server, lets `make` make another folder of etcd's data, and starts both again.
    #[allow(dead_code)] // not used by every test
    pub fn replace_etcd(&mut self, make: impl FnOnce(&Path)) {
        self.api_server = None;
        // its port is free again when it has ended
        self.etcd.as_ref().unwrap().signal("-KILL");
        let folder = self.path("etcd");
        fs::rename(&folder, self.path("etcd-before")).unwrap();
        make(&folder);
        self.etcd = None;
        self.etcd = Some(start_etcd(self.dir.path(), &self.programs, self.ports));
        self.start_api_server();
    }

    /// Starts the members, and writes the files of a control plane that their clients need.
    fn start_members(&mut self, members: &[(&str, IpAddr)]) {
        fs::create_dir_all(self.path("pki/etcd")).unwrap();
        let addresses = members.iter().map(|(_, address)| address.to_string());
        // etcd wants the source address of another member in its certificate
        let addresses = addresses.chain(["127.0.0.1".to_owned()]);
        let (certificate, key) = self.certificate_of("etcd", None, addresses.collect(), true);
        let (client, client_key) = self.certificate("kube-apiserver-etcd-client", None, false);
        for (name, content) in [
            ("etcd/ca.crt", &self.ca.2),
            ("etcd/server.crt", &certificate),
            ("etcd/server.key", &key),
            ("apiserver-etcd-client.crt", &client),
            ("apiserver-etcd-client.key", &client_key),
        ] {
            fs::write(self.path("pki").join(name), content).unwrap();
        }
        let all = members
            .iter()
            .map(|(name, address)| format!("{name}=https://{address}:2380"));
        let all = all.collect::<Vec<_>>().join(",");
        let file = |name: &str| self.path("pki/etcd").join(name).display().to_string();
        let start = |(name, address): &(&str, IpAddr)| {
            let (clients, peers) = (
                format!("https://{address}:2379"),
                format!("https://{address}:2380"),
            );
            let [ca, certificate, key] = ["ca.crt", "server.crt", "server.key"].map(file);
            let arguments = [
                ("name", *name),
                ("data-dir", &self.path(name).display().to_string()),
                ("listen-client-urls", &clients),
                ("advertise-client-urls", &clients),
                ("listen-peer-urls", &peers),
                ("initial-advertise-peer-urls", &peers),
                ("initial-cluster", &all),
                ("client-cert-auth", "true"),
                ("trusted-ca-file", &ca),
                ("cert-file", &certificate),
                ("key-file", &key),
                ("peer-client-cert-auth", "true"),
                ("peer-trusted-ca-file", &ca),
                ("peer-cert-file", &certificate),
                ("peer-key-file", &key),
                ("unsafe-no-fsync", "true"),
            ]
            .map(|(name, value)| format!("--{name}={value}"));
            Member {
                name: (*name).to_owned(),
                address: *address,
                process: Some(Process::start(
                    &self.path(&format!("{name}.log")),
                    &self.programs.join("etcd"),
                    &arguments,
                )),
            }
        };
        self.members = members.iter().map(start).collect();
    }

    /// Kills a member of etcd, as if its machine had lost power.
    #[allow(dead_code)] // not used by every test
    pub fn kill_member(&mut self, name: &str) {
        let member = self.members.iter_mut().find(|it| it.name == name);
        member.unwrap().process = None;
    }

    /// Runs etcdctl at a member of etcd; returns what it prints.
    #[allow(dead_code)] // not used by every test
    pub fn etcdctl(&self, member: &str, arguments: &[&str]) -> String {
        let member = self.members.iter().find(|it| it.name == member).unwrap();
        let file = |name: &str| self.path("pki/etcd").join(name);
        let output = Command::new(fetched("etcd-tools.sh").join("etcdctl"))
            .arg(format!("--endpoints=https://{}:2379", member.address))
            .arg("--cacert")
            .arg(file("ca.crt"))
            .arg("--cert")
            .arg(file("server.crt"))
            .arg("--key")
            .arg(file("server.key"))
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the names of etcd's members, as this one knows them; one that never started has no name.
    #[allow(dead_code)] // not used by every test
    pub fn members(&self, asked: &str) -> Vec<String> {
        let list = self.etcdctl(asked, &["member", "list"]);
        let name = |line: &str| line.split(", ").nth(2).unwrap().to_owned();
        let mut names: Vec<_> = list.lines().map(name).collect();
        names.sort();
        names
    }

    /// Returns etcd's addresses for clients and for other members.
    #[allow(dead_code)] // not used by every test
    pub fn etcd_urls(&self) -> [String; 2] {
        [self.ports[0], self.ports[1]].map(|port| format!("http://127.0.0.1:{port}"))
    }

    fn write_pki(&self) {
        let (certificate, key) = self.certificate("kube-apiserver", None, true);
        let accounts = KeyPair::generate().unwrap();
        for (name, content) in [
            ("ca.crt", &self.ca.2),
            ("apiserver.crt", &certificate),
            ("apiserver.key", &key),
            ("sa.key", &accounts.serialize_pem()),
            ("sa.pub", &accounts.public_key_pem()),
        ] {
            fs::write(self.path(name), content).unwrap();
        }
    }

    pub fn start_api_server(&mut self) {
        let path = |name: &str| self.path(name).display().to_string();
        let [etcd, _, port] = self.ports;
        let urls = self
            .members
            .iter()
            .map(|it| format!("https://{}:2379", it.address));
        let urls = urls.collect::<Vec<_>>().join(",");
        let of_etcd = if urls.is_empty() {
            vec![format!("--etcd-servers=http://127.0.0.1:{etcd}")]
        } else {
            vec![
                format!("--etcd-servers={urls}"),
                format!("--etcd-cafile={}", path("pki/etcd/ca.crt")),
                format!("--etcd-certfile={}", path("pki/apiserver-etcd-client.crt")),
                format!("--etcd-keyfile={}", path("pki/apiserver-etcd-client.key")),
            ]
        };
        let arguments = [
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            // no node has to find the server, and a loopback address is not valid for an endpoint
            "--endpoint-reconciler-type=none".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            format!("--tls-cert-file={}", path("apiserver.crt")),
            format!("--tls-private-key-file={}", path("apiserver.key")),
            format!("--client-ca-file={}", path("ca.crt")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", path("sa.pub")),
            format!("--service-account-signing-key-file={}", path("sa.key")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-bootstrap-token-auth".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            "--allow-privileged".to_owned(),
        ];
        let plugins = self.plugins.join(",");
        let plugins = if plugins.is_empty() {
            vec![]
        } else {
            vec![format!("--enable-admission-plugins={plugins}")]
        };
        let log = self.path("kube-apiserver.log");
        self.api_server = Some(Process::start(
            &log,
            &self.programs.join("kube-apiserver"),
            &[&arguments[..], &of_etcd, &plugins].concat(),
        ));
    }

    /// Starts the controllers that sign approved certificate requests, and approve some of them. Builds the controllers if they are
    /// missing. They end when the returned value is dropped.
    #[allow(dead_code)] // not used by every test
    pub fn start_signer(&self) -> Process {
        let controllers = "certificatesigningrequest-signing-controller,certificatesigningrequest-approving-controller";
        self.start_controllers(controllers)
    }

    /// Starts these controllers of the controller manager, as [`Cluster::start_signer`] does. They have all rights.
    #[allow(dead_code)] // not used by every test
    pub fn start_controllers(&self, names: &str) -> Process {
        self.start_controllers_as(&self.kubeconfig(), names, &[])
    }

    /// Starts these controllers with the rights that they have in a cluster of kubeadm: each uses a service account of its own.
    #[allow(dead_code)] // not used by every test
    pub fn start_restricted_controllers(&self, names: &str) -> Process {
        let user = self.kubeconfig_of("system:kube-controller-manager", "", &self.ca.2);
        self.start_controllers_as(&user, names, &["--use-service-account-credentials"])
    }

    fn start_controllers_as(&self, kubeconfig: &str, names: &str, more: &[&str]) -> Process {
        build(&["kube-controller-manager"]);
        for (name, content) in [
            ("ca.key", self.ca.1.serialize_pem()),
            ("signer.conf", kubeconfig.to_owned()),
        ] {
            fs::write(self.path(name), content).unwrap();
        }
        let path = |name: &str| self.path(name).display().to_string();
        let arguments = [
            format!("--kubeconfig={}", path("signer.conf")),
            format!("--controllers={names}"),
            format!("--cluster-signing-cert-file={}", path("ca.crt")),
            format!("--cluster-signing-key-file={}", path("ca.key")),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ];
        let more: Vec<_> = more.iter().map(|it| (*it).to_owned()).collect();
        Process::start(
            &self.path("signer.log"),
            &self.programs.join("kube-controller-manager"),
            &[&arguments[..], &more].concat(),
        )
    }

    /// Starts a program; its log is NAME.log.
    #[allow(dead_code)] // not used by every test
    pub fn start_program(&self, name: &str, program: &Path, arguments: &[String]) -> Process {
        Process::start(&self.path(&format!("{name}.log")), program, arguments)
    }

    /// Kills the API server, as if its machine had lost power.
    #[allow(dead_code)] // not used by every test
    pub fn kill_api_server(&mut self) {
        self.api_server = None;
    }

    /// Freezes the API server, which keeps its connections and does not answer; or continues it.
    #[allow(dead_code)] // not used by every test
    pub fn freeze_api_server(&self, frozen: bool) {
        self.api_server
            .as_ref()
            .unwrap()
            .signal(if frozen { "-STOP" } else { "-CONT" });
    }

    /// Freezes etcd, while the API server continues; or continues it.
    #[allow(dead_code)] // not used by every test
    pub fn freeze_etcd(&self, frozen: bool) {
        self.etcd
            .as_ref()
            .unwrap()
            .signal(if frozen { "-STOP" } else { "-CONT" });
    }

    /// Removes all versions except the present one (etcd's Compact).
    #[allow(dead_code)] // not used by every test
    pub fn forget_history(&self) {
        let call = |method: &str, body: String| -> Value {
            let url = format!("http://127.0.0.1:{}/v3/kv/{method}", self.ports[0]);
            let answer = ureq::post(url)
                .send(body)
                .unwrap()
                .body_mut()
                .read_to_string()
                .unwrap();
            serde_json::from_str(&answer).unwrap()
        };
        // any key is good enough, because the answer's header has the revision; bytes are in base64
        let present = call("range", json!({"key": "YQ=="}).to_string());
        call(
            "compaction",
            json!({"revision": present["header"]["revision"], "physical": true}).to_string(),
        );
    }

    /// Returns the process IDs of the API server and of etcd.
    #[allow(dead_code)] // not used by every test
    pub fn processes(&self) -> Vec<String> {
        self.api_server
            .iter()
            .chain(&self.etcd)
            .flat_map(Process::children)
            .collect()
    }

    #[allow(dead_code)] // not used by every test
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port())
    }

    /// Returns the API server's port on loopback.
    pub fn port(&self) -> u16 {
        self.ports[2]
    }

    /// Returns the folder of the logs and the keys.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the administrator's kubeconfig, as kubeadm writes it.
    pub fn kubeconfig(&self) -> String {
        self.kubeconfig_of("kubernetes-admin", "system:masters", &self.ca.2)
    }

    /// Returns the kubeconfig of a user of this group, or of none if it is empty, with this CA's certificate.
    pub fn kubeconfig_of(&self, user: &str, group: &str, ca: &str) -> String {
        let group = Some(group).filter(|group| !group.is_empty());
        let (certificate, key) = self.certificate(user, group, false);
        let [ca, certificate, key] =
            [ca, &certificate, &key].map(|pem| BASE64_STANDARD.encode(pem));
        format!(
            "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: {ca}\n    server: {}\n  name: \
             kubernetes\ncontexts:\n- context:\n    cluster: kubernetes\n    user: {user}\n  name: \
             {user}@kubernetes\ncurrent-context: {user}@kubernetes\nkind: Config\nusers:\n- name: {user}\n  user:\n    \
             client-certificate-data: {certificate}\n    client-key-data: {key}\n",
            self.server()
        )
    }

    /// Returns the CA's certificate and key.
    #[allow(dead_code)] // not used by every test
    pub fn ca(&self) -> (String, String) {
        (self.ca.2.clone(), self.ca.1.serialize_pem())
    }

    /// Returns the administrator's client.
    pub fn client(&self, stop: &Stop) -> Client {
        Client::new(config(&self.kubeconfig()), stop)
    }

    /// Returns the client of a user of this group, or of none if it is empty.
    #[allow(dead_code)] // not used by every test
    pub fn client_of(&self, user: &str, group: &str) -> Client {
        let kubeconfig = self.kubeconfig_of(user, group, &self.ca.2);
        Client::new(config(&kubeconfig), &Stop::new())
    }

    /// Returns a client with this token.
    #[allow(dead_code)] // not used by every test
    pub fn client_with(&self, token: &str) -> Client {
        let ca = BASE64_STANDARD.encode(&self.ca.2);
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {{server: '{}', certificate-authority-data: {ca}}}\n\
             users:\n- name: u\n  user: {{token: {token}}}\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\n\
             current-context: x\n",
            self.server(),
        );
        Client::new(config(&kubeconfig), &Stop::new())
    }

    /// Issues the certificate of a kubelet's server at this address that has ended; returns it with its key.
    #[allow(dead_code)] // not used by every test
    pub fn ended_certificate(&self, address: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec![address.to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2025, 1, 1);
        params.not_after = rcgen::date_time_ymd(2026, 1, 1);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&self.ca.0, &self.ca.1);
        let certificate = params.signed_by(&key, &issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// Issues a certificate; returns it with its key.
    fn certificate(&self, name: &str, group: Option<&str>, server: bool) -> (String, String) {
        let names = if server {
            ["127.0.0.1", "localhost", "kubernetes"]
                .map(str::to_owned)
                .to_vec()
        } else {
            Vec::new()
        };
        self.certificate_of(name, group, names, server)
    }

    /// Issues a certificate with these names and addresses. That of a server is good for a client, too, as etcd needs it.
    fn certificate_of(
        &self,
        name: &str,
        group: Option<&str>,
        names: Vec<String>,
        server: bool,
    ) -> (String, String) {
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if server {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&self.ca.0, &self.ca.1);
        (
            params.signed_by(&key, &issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    }
}

fn start_etcd(folder: &Path, programs: &Path, [client, peer, _]: [u16; 3]) -> Process {
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    Process::start(
        &folder.join("etcd.log"),
        &programs.join("etcd"),
        &[
            format!("--data-dir={}", folder.join("etcd").display()),
            format!("--listen-client-urls={}", url(client)),
            format!("--advertise-client-urls={}", url(client)),
            format!("--listen-peer-urls={}", url(peer)),
            format!("--initial-advertise-peer-urls={}", url(peer)),
            format!("--initial-cluster=default={}", url(peer)),
            "--unsafe-no-fsync".to_owned(),
        ],
    )
}

pub fn config(kubeconfig: &str) -> ApiAccess {
    ApiAccess::from_kubeconfig(kubeconfig, "admin.conf", Path::new("/nowhere")).unwrap()
}

fn programs() -> PathBuf {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS
        .get_or_init(|| build(&["kube-apiserver", "etcd"]))
        .clone()
}

/// Builds missing programs, which takes minutes; returns their folder.
pub fn build(programs: &[&str]) -> PathBuf {
    let tool = Path::new(support::ROOT).join("tools/kubernetes.sh");
    let output = Command::new(tool)
        .args(programs)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "tools/kubernetes.sh has not built {programs:?}"
    );
    Path::new(String::from_utf8(output.stdout).unwrap().trim()).join("bin")
}

fn free_ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Makes the account of pods that name none, as a controller manager would.
pub fn make_default_accounts(client: &Client) {
    for namespace in ["default", "kube-system"] {
        let account = json!({"metadata": {"name": "default"}});
        let accounts = SERVICE_ACCOUNTS.in_namespace(namespace);
        client.create_if_absent(&accounts, &account).unwrap();
    }
}

/// Creates the DaemonSet of the member controller if it is missing, with this number of ready pods, as a controller manager and the
/// kubelets of a cluster would.
pub fn set_ready_controllers(client: &Client, ready: usize) {
    let sets = DAEMON_SETS.in_namespace("kube-system");
    let at = sets.named("member-controller");
    let labels = json!({"k8s-app": "member-controller"});
    let object = json!({
        "metadata": {"name": "member-controller"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "one", "image": "example.com/one:1"}]}},
        },
    });
    let found = client.find(&at).unwrap();
    let found = found.unwrap_or_else(|| client.create(&sets, &object).unwrap());
    let at = at.subresource("status");
    client.merge(&at, &status(&found, ready)).unwrap();
}

fn status(set: &Value, ready: usize) -> Value {
    json!({"status": {
        "observedGeneration": set["metadata"]["generation"], "desiredNumberScheduled": 1, "currentNumberScheduled": 1,
        "updatedNumberScheduled": 1, "numberReady": ready, "numberAvailable": ready, "numberMisscheduled": 0,
    }})
}

/// Sets the status of a DaemonSet after each change of its spec, as a controller manager and the kubelets of a cluster with one
/// control plane would.
pub fn play_controller(client: &Client, stop: &Stop) {
    let set = |name: &str| DAEMON_SETS.in_namespace("kube-system").named(name);
    while !stop.wait(Duration::from_millis(100)) {
        for name in ["join-service", "key-service", "member-controller"] {
            let Ok(Some(current)) = client.find(&set(name)) else {
                continue;
            };
            let _ = client.merge(&set(name).subresource("status"), &status(&current, 1));
        }
    }
}
