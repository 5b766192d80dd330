//! The objects of a cluster's API that say how it is: records of machines, settings, certificate
//! requests, pods of the control plane, tokens. Secrets are wiped as they arrive.

use std::time::{Duration, SystemTime};

use base::time;
use kubernetes::client::{
    CERTIFICATE_SIGNING_REQUESTS, CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client,
    Collection, DAEMON_SETS, DEPLOYMENTS, JOINING_NODES, LEASES, ObjectKind, PODS, ROLE_BINDINGS,
    ROLES, SECRETS, SERVICES, Selector, VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use kubernetes::control_planes::{ControlPlane, has_owner};
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::{
    CertificateSigningRequest, ConfigMap, JoiningNode, Lease, Pod, PolicyBinding, RbacBinding,
    RbacRole, SecretObject, ServiceObject, Workload,
};
use kubernetes::rbac::{self, PrivilegedAccount};
use kubernetes::services::COLLATERAL;
use kubernetes::services::kubeadm_bindings::approves_kubelets;
use kubernetes::{KUBELET_LEASES, NAMESPACE, kubeadm, services, yaml};
use serde_json::Value;

use super::listed::{Listed, set_roles};

/// The ConfigMap with the policy and the salt.
const JOIN_CONFIG: &str = "join-config";
/// The ConfigMap with the authorities of the API server's clients.
const AUTHENTICATION: &str = "extension-apiserver-authentication";
/// The Secret with the plain master secret, and the beginning of the names of wrapped ones.
const MASTER_SECRETS: [&str; 2] = ["constellation-mastersecret", "firstlight-mastersecret-"];

/// The Service of the join service.
const JOIN_SERVICE: &str = "kube-system/join-service";
/// The beginning of the names of kubelets' signers.
const KUBELET_SIGNERS: [&str; 2] = [
    "kubernetes.io/kube-apiserver-client-kubelet",
    "kubernetes.io/kubelet-serving",
];
/// The annotations of kubeadm's static pods that have the address of their server.
const ADDRESSES: [&str; 2] = [
    "kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint",
    "kubeadm.kubernetes.io/etcd.advertise-client-urls",
];

/// The taint of a node that no cloud controller has seen yet.
pub const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Lists objects, and notes which lists could not be read.
struct Lister<'a> {
    client: &'a dyn Fn() -> Client,
    unread: Vec<(ObjectList, String)>,
}

impl Lister<'_> {
    /// Lists the objects of a collection, each reduced as it arrives.
    fn list<K: ObjectKind, T>(
        &mut self,
        what: ObjectList,
        collection: Collection,
        selector: &Selector,
        keep: fn(K) -> T,
    ) -> Vec<T> {
        match (self.client)().list_keeping(&collection, selector, keep) {
            Ok(list) => list.items,
            // Constellation's resources exist only where it did
            Err(error) if error.is_not_found() => vec![],
            Err(error) => {
                self.unread.push((what, error.to_string()));
                vec![]
            }
        }
    }

    fn all<K: ObjectKind>(&mut self, what: ObjectList, collection: Collection) -> Vec<K> {
        self.list::<K, K>(what, collection, &Selector::default(), |object| object)
    }
}

/// A list of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectList {
    /// ConfigMaps: records, settings, authorities.
    Maps,
    /// CertificateSigningRequests.
    Requests,
    /// JoiningNodes.
    Joining,
    /// DaemonSets of the services, and others of their namespace.
    DaemonSets,
    /// Deployments of that namespace.
    Deployments,
    /// Pods of the services.
    Pods,
    /// Pods of the control planes.
    ControlPlane,
    /// Leases of the nodes.
    Leases,
    /// Secrets of bootstrap tokens.
    Tokens,
    /// Secrets with the master secret.
    MasterSecrets,
    /// ClusterRoleBindings.
    Bindings,
    /// ClusterRoles, and the Roles and RoleBindings of the services' namespace.
    Roles,
    /// Services of all namespaces.
    Services,
    /// ValidatingAdmissionPolicyBindings.
    Policies,
}

/// What the API server has. What could not be read is empty, and named in `unread`.
#[derive(Debug, Default)]
pub struct Objects {
    /// The records of nodes and disks.
    pub records: Vec<MachineRecord>,
    /// The content of the ConfigMap join-config: the policy in force, and the measurement salt in
    /// base64.
    pub policy: Option<String>,
    /// See [`Objects::policy`].
    pub salt: Option<String>,
    /// kubeadm's ClusterConfiguration; null if there is none.
    pub cluster_configuration: Value,
    /// When the oldest part of the collateral was fetched.
    pub collateral: Vec<(String, SystemTime)>,
    /// The authorities of the API server's clients: what it is, and its certificates in PEM.
    pub authorities: Vec<(&'static str, String)>,
    /// The requests of kubelets for certificates.
    pub requests: Vec<SigningRequest>,
    /// Machines that Constellation's join service admitted, and that have not joined yet.
    pub joining: Vec<Joining>,
    /// The DaemonSets of the services that exist.
    pub services: Vec<Workload>,
    /// The other DaemonSets and Deployments of their namespace, with their status.
    pub workloads: Vec<Workload>,
    /// What the kubelets say about pods of the services that do not run.
    pub pods: Vec<Pod>,
    /// The pods of the control planes.
    pub control_plane: Vec<ControlPlanePod>,
    /// When each kubelet said by its own clock that it is alive.
    pub heartbeats: Vec<(String, SystemTime)>,
    /// The bootstrap tokens.
    pub tokens: Vec<WaitingToken>,
    /// The Secrets with the master secret: the name, and whether it is immutable.
    pub master_secrets: Vec<(String, bool)>,
    /// The names of ClusterRoleBindings that let kube-controller-manager approve certificates of kubelets.
    pub approving: Vec<String>,
    /// The accounts that may take over the cluster.
    pub powerful: Vec<PrivilegedAccount>,
    /// The Services that have addresses outside of the cluster's own.
    pub claims: Vec<Claim>,
    /// The port of the join service on each control plane, if its Service is there.
    pub join_port: Option<u64>,
    /// The admission policies in force.
    pub policies: Vec<String>,
    /// Which lists could not be read, and why. They are empty.
    pub unread: Vec<(ObjectList, String)>,
}

/// A CertificateSigningRequest.
#[derive(Debug, Clone, Default)]
pub struct SigningRequest {
    /// Its name.
    pub name: String,
    /// Who asks.
    pub user: String,
    /// Whether it is for the kubelet's server, and not for its client.
    pub is_serving: bool,
    /// When it was made.
    pub made: Option<SystemTime>,
    /// What became of it.
    pub fate: Fate,
}

/// What became of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fate {
    /// Nobody has decided.
    #[default]
    Pending,
    /// It was approved, and nobody has signed.
    Unsigned,
    /// The certificate was issued.
    Issued,
    /// It was denied, or the signer failed, for this reason.
    Refused(String),
}

/// The addresses that a Service takes connections to, besides the cluster's own.
#[derive(Debug, Clone, Default)]
pub struct Claim {
    /// The Service, `NAMESPACE/NAME`.
    pub service: String,
    /// Its `externalIPs`, and the addresses of its load balancer.
    pub addresses: Vec<String>,
    /// Its ports at these addresses.
    pub ports: Vec<u64>,
}

/// A JoiningNode.
#[derive(Debug, Clone, Default)]
pub struct Joining {
    /// The name of the node.
    pub node: String,
    /// When its admission ends.
    pub deadline: Option<SystemTime>,
}

/// A static pod of a control plane.
#[derive(Debug, Clone, Default)]
pub struct ControlPlanePod {
    /// The program: etcd, kube-apiserver, ..
    pub component: String,
    /// The node.
    pub node: String,
    /// The tag of its image.
    pub version: String,
    /// Whether it is ready.
    pub is_ready: bool,
    /// The address of its server, `HOST:PORT`, if it names one.
    pub address: Option<String>,
    /// Whether it is an API server whose command line names the plugin `DenyServiceExternalIPs` neither to enable nor to disable it.
    pub permits_external_ips: bool,
}

/// Until when a bootstrap token is valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Expiration {
    /// For ever: it has no such field.
    #[default]
    Never,
    /// Until this time.
    At(SystemTime),
    /// The field is not a time. Then the API server does not accept the token.
    Unreadable,
}

/// A bootstrap token.
#[derive(Debug, Clone, Default)]
pub struct WaitingToken {
    /// The public half.
    pub id: String,
    /// The groups of a client with this token.
    pub groups: String,
    /// Until when it is valid.
    pub expires: Expiration,
    /// Whether a client can authenticate itself by it.
    pub authenticates: bool,
}

impl Objects {
    /// Reads the objects, Secrets only if `secrets`, and sets the roles of the nodes. Each list that cannot be read is named.
    pub fn read(client: &dyn Fn() -> Client, nodes: &mut [Listed], secrets: bool) -> Objects {
        let unread = vec![];
        let mut lists = Lister { client, unread };
        let mut objects = Objects::default();
        let maps = CONFIG_MAPS.in_namespace(NAMESPACE);
        let maps = lists.list(ObjectList::Maps, maps, &Selector::default(), wanted_map);
        let maps: Vec<_> = maps.into_iter().flatten().collect();
        let requests = lists.all(ObjectList::Requests, CERTIFICATE_SIGNING_REQUESTS.all());
        objects.requests = requests.iter().filter_map(SigningRequest::read).collect();
        let joining = lists.all(ObjectList::Joining, JOINING_NODES.all());
        objects.joining = joining.iter().map(Joining::read).collect();
        let sets = lists.all(ObjectList::DaemonSets, DAEMON_SETS.in_namespace(NAMESPACE));
        let sets = sets.into_iter().map(|set| of_kind("DaemonSet", set));
        (objects.services, objects.workloads) = sets.partition(is_service);
        let deployments = DEPLOYMENTS.in_namespace(NAMESPACE);
        let deployments = lists.all(ObjectList::Deployments, deployments).into_iter();
        let deployments = deployments.map(|set| of_kind("Deployment", set));
        objects.workloads.extend(deployments);
        let pods_with = |selector| (PODS.in_namespace(NAMESPACE), Selector::labels(selector));
        let of_services = "k8s-app in (join-service,key-service,member-controller)";
        let (pods, selector) = pods_with(of_services);
        objects.pods = lists.list(ObjectList::Pods, pods, &selector, |pod: Pod| pod);
        let (pods, selector) = pods_with("tier=control-plane");
        let pods = lists.list(ObjectList::ControlPlane, pods, &selector, |pod: Pod| pod);
        let leases = LEASES.in_namespace(KUBELET_LEASES);
        let leases = lists.all(ObjectList::Leases, leases);
        objects.heartbeats = leases.iter().filter_map(heartbeat).collect();
        objects.take_roles(&mut lists);
        objects.take_outside(&mut lists);
        if secrets {
            objects.take_secrets(&mut lists);
        }
        objects.unread = lists.unread;
        objects.take_maps(&maps);
        set_roles(nodes, &objects.records);
        objects.take_pods(&pods, nodes);
        objects
    }

    /// Takes the static pods of control planes, and keeps the pods that the DaemonSets of the services own. Any kubelet may write their labels
    /// into a pod of its own node.
    fn take_pods(&mut self, pods: &[Pod], nodes: &[Listed]) {
        let pods = pods.iter().filter(|pod| is_static(pod, nodes));
        self.control_plane = pods.map(ControlPlanePod::read).collect();
        let is_owned = |pod: &Pod| self.services.iter().any(|set| is_of_set(pod, set));
        self.pods.retain(is_owned);
    }

    /// Takes who may take over the cluster, and what lets Kubernetes approve certificates.
    fn take_roles(&mut self, lists: &mut Lister<'_>) {
        let what = ObjectList::Roles;
        let mut bindings: Vec<RbacBinding> =
            lists.all(ObjectList::Bindings, CLUSTER_ROLE_BINDINGS.all());
        let approving = bindings.iter().filter(|it| approves_kubelets(it));
        self.approving = approving.map(|it| it.metadata.name.clone()).collect();
        let mut roles: Vec<RbacRole> = lists.all(what, CLUSTER_ROLES.all());
        roles.append(&mut lists.all(what, ROLES.in_namespace(NAMESPACE)));
        bindings.append(&mut lists.all(what, ROLE_BINDINGS.in_namespace(NAMESPACE)));
        self.powerful = rbac::powerful(&roles, &bindings);
    }

    /// Takes who else may have connections to nodes, and the policies that limit this.
    fn take_outside(&mut self, lists: &mut Lister<'_>) {
        let services: Vec<ServiceObject> = lists.all(ObjectList::Services, SERVICES.all());
        self.claims = services.iter().filter_map(Claim::read).collect();
        let mut services = services.iter();
        let join_service = services.find(|it| it.metadata.place() == JOIN_SERVICE);
        let port = join_service.and_then(|it| it.spec.ports.first()?.node_port);
        self.join_port = port.and_then(|port| port.try_into().ok());
        let bindings = VALIDATING_ADMISSION_POLICY_BINDINGS.all();
        let bindings = lists.all(ObjectList::Policies, bindings);
        self.policies = bindings.into_iter().filter_map(policy_in_force).collect();
    }

    /// Takes the fields of Secrets that are not secret.
    fn take_secrets(&mut self, lists: &mut Lister<'_>) {
        let secrets = || SECRETS.in_namespace(NAMESPACE);
        let tokens = Selector::fields("type=bootstrap.kubernetes.io/token");
        self.tokens = lists.list(ObjectList::Tokens, secrets(), &tokens, WaitingToken::read);
        let plain = Selector::fields(&format!("metadata.name={}", MASTER_SECRETS[0]));
        let ours = Selector::labels("app.kubernetes.io/part-of=firstlight");
        for selector in [plain, ours] {
            let what = ObjectList::MasterSecrets;
            let found = lists.list(what, secrets(), &selector, master_secret);
            self.master_secrets.extend(found.into_iter().flatten());
        }
        self.master_secrets.sort();
        self.master_secrets.dedup();
    }

    /// Takes what the ConfigMaps have.
    fn take_maps(&mut self, maps: &[ConfigMap]) {
        self.records = maps.iter().filter_map(MachineRecord::read).collect();
        let find = |name: &str| maps.iter().find(|map| map.metadata.name == name);
        let text = |name: &str, key: &str| find(name)?.data.get(key);
        self.policy = text(JOIN_CONFIG, "attestationConfig").cloned();
        let config = find(JOIN_CONFIG);
        self.salt = config.and_then(|map| map.binary_data.get("measurementSalt").cloned());
        if let Some(text) = text(kubeadm::CONFIG_MAP, "ClusterConfiguration") {
            match yaml::document(text) {
                Ok(value) => self.cluster_configuration = value,
                Err(error) => {
                    let name = kubeadm::CONFIG_MAP;
                    let why = format!("ConfigMap {NAMESPACE}/{name}: {error}");
                    self.unread.push((ObjectList::ControlPlane, why));
                }
            }
        }
        let times = text(COLLATERAL, "fetched");
        self.collateral = times.map_or_else(Vec::new, |times| fetched(times));
        for (what, key) in [
            ("authority of clients", "client-ca-file"),
            (
                "authority of the front proxy",
                "requestheader-client-ca-file",
            ),
        ] {
            let pem = text(AUTHENTICATION, key).cloned();
            self.authorities.extend(pem.map(|pem| (what, pem)));
        }
    }

    /// Returns whether a list was read.
    pub fn has(&self, list: ObjectList) -> bool {
        self.unread.iter().all(|(unread, _)| *unread != list)
    }

    /// Returns the version that kubeadm has recorded for the control planes.
    pub fn version(&self) -> Option<&str> {
        self.cluster_configuration["kubernetesVersion"].as_str()
    }

    /// Returns the DaemonSet of a service, if it exists.
    pub fn service(&self, name: &str) -> Option<&Workload> {
        let mut sets = self.services.iter();
        sets.find(|set| set.metadata.name == name)
    }

    /// Returns the value of an option of a service, if its command line has one that is not empty.
    pub fn option_of(&self, service: &str, option: &str) -> Option<String> {
        let value = services::option_of(self.service(service)?, option);
        value.filter(|value| !value.is_empty())
    }

    /// Returns the record of a node, if it has one.
    pub fn record_of(&self, node: &str) -> Option<&MachineRecord> {
        self.records.iter().find(|record| record.node == node)
    }

    /// Returns the address of the server of a node's static pod.
    pub fn address_of(&self, component: &str, node: &str) -> Option<&str> {
        let mut pods = self.control_plane.iter();
        let pod = pods.find(|pod| pod.component == component && pod.node == node)?;
        pod.address.as_deref()
    }
}

/// Keeps the ConfigMaps that [`Objects::take_maps`] reads, without what it does not read.
fn wanted_map(mut map: ConfigMap) -> Option<ConfigMap> {
    let name = map.metadata.name.as_str();
    let known = [JOIN_CONFIG, AUTHENTICATION, COLLATERAL, kubeadm::CONFIG_MAP];
    let is_wanted = MachineRecord::is_name(name) || known.contains(&name);
    if name == COLLATERAL {
        map.binary_data.clear();
    }
    is_wanted.then_some(map)
}

/// Returns whether a pod is a static pod of one of the control planes among these nodes.
fn is_static(pod: &Pod, nodes: &[Listed]) -> bool {
    let program = component(pod);
    let mut planes = nodes.iter().filter(|node| node.is_control_plane);
    planes.any(|node| {
        let plane = ControlPlane {
            name: node.name.clone(),
            uid: node.uid.clone(),
            ..ControlPlane::default()
        };
        plane.has_static_pod(program, pod)
    })
}

/// Returns the program of a pod of the control plane, by its label.
fn component(pod: &Pod) -> &str {
    pod.metadata.label("component").unwrap_or_default()
}

/// Returns whether a DaemonSet owns a pod.
pub fn is_of_set(pod: &Pod, set: &Workload) -> bool {
    has_owner(pod, "DaemonSet", &set.metadata.name, &set.metadata.uid)
}

/// Objects in a list have no kind.
fn of_kind(kind: &str, mut set: Workload) -> Workload {
    set.kind = kind.into();
    set
}

fn is_service(set: &Workload) -> bool {
    let names = ["join-service", "key-service", "member-controller"];
    names.contains(&set.metadata.name.as_str())
}

/// Parses a time with or without an offset, as people write it into a token (RFC 3339).
fn rfc3339(text: &str) -> Option<SystemTime> {
    let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (sign, offset) = offset.split_at_checked(1)?;
    let (hours, minutes) = match sign {
        "+" | "-" => offset.split_once(':')?,
        _ => return time::parse(text),
    };
    let number = |digits: &str, below: u64| {
        let is_number = digits.len() == 2 && digits.bytes().all(|it| it.is_ascii_digit());
        let number: u64 = is_number.then(|| digits.parse().ok())??;
        (number < below).then_some(number)
    };
    let offset = Duration::from_secs(number(hours, 24)? * 3600 + number(minutes, 60)? * 60);
    let local = time::parse(&format!("{local}Z"))?;
    match sign {
        "+" => local.checked_sub(offset),
        _ => local.checked_add(offset),
    }
}

fn heartbeat(lease: &Lease) -> Option<(String, SystemTime)> {
    let renewed = time::parse(&lease.spec.renew_time)?;
    Some((lease.metadata.name.clone(), renewed))
}

/// Returns the policy of a binding that denies what the policy forbids.
fn policy_in_force(binding: PolicyBinding) -> Option<String> {
    let denies = binding
        .spec
        .validation_actions
        .iter()
        .any(|it| it == "Deny");
    denies.then_some(binding.spec.policy_name)
}

fn master_secret(secret: SecretObject) -> Option<(String, bool)> {
    let name = secret.metadata.name;
    let is_one = MASTER_SECRETS[0] == name || name.starts_with(MASTER_SECRETS[1]);
    is_one.then_some((name, secret.immutable))
}

/// Parses when each part of the collateral was fetched: seconds since 1970.
fn fetched(times: &str) -> Vec<(String, SystemTime)> {
    let times: Value = serde_json::from_str(times).unwrap_or_default();
    let times = times.as_object().into_iter().flatten();
    let at = |seconds: &Value| {
        let since = Duration::from_secs(seconds.as_u64()?);
        SystemTime::UNIX_EPOCH.checked_add(since)
    };
    times
        .filter_map(|(name, seconds)| Some((name.clone(), at(seconds)?)))
        .collect()
}

impl SigningRequest {
    /// Reads a request; `None` if it is not one of a kubelet.
    fn read(request: &CertificateSigningRequest) -> Option<SigningRequest> {
        let (metadata, spec, status) = (&request.metadata, &request.spec, &request.status);
        let signer = spec.signer_name.as_str();
        if !KUBELET_SIGNERS.contains(&signer) {
            return None;
        }
        let has = |kind: &str| {
            let mut conditions = status.conditions.iter();
            conditions.find(|it| it.kind == kind && it.status == "True")
        };
        let made = metadata.creation_timestamp.as_deref();
        Some(SigningRequest {
            name: metadata.name.clone(),
            user: spec.username.clone(),
            is_serving: signer == KUBELET_SIGNERS[1],
            made: made.and_then(time::parse),
            fate: match has("Denied").or_else(|| has("Failed")) {
                Some(refused) => Fate::Refused(refused.message.clone()),
                None if !status.certificate.is_empty() => Fate::Issued,
                None if has("Approved").is_some() => Fate::Unsigned,
                None => Fate::Pending,
            },
        })
    }
}

impl Claim {
    /// Reads a Service; `None` if it has only addresses of the cluster.
    fn read(service: &ServiceObject) -> Option<Claim> {
        let external = service.spec.external_ips.iter();
        let balanced = service.status.load_balancer.ingress.iter();
        let balanced = balanced.map(|it| &it.ip).filter(|ip| !ip.is_empty());
        let addresses: Vec<_> = external.chain(balanced).cloned().collect();
        (!addresses.is_empty()).then(|| Claim {
            service: service.metadata.place(),
            addresses,
            ports: service
                .spec
                .ports
                .iter()
                .filter_map(|it| it.port.try_into().ok())
                .collect(),
        })
    }
}

impl Joining {
    fn read(joining: &JoiningNode) -> Joining {
        let deadline = joining.spec.deadline.as_deref();
        Joining {
            node: joining.spec.name.clone(),
            deadline: deadline.and_then(time::parse),
        }
    }
}

impl ControlPlanePod {
    fn read(pod: &Pod) -> ControlPlanePod {
        let container = pod.spec.containers.first().cloned().unwrap_or_default();
        let image = container.image.split('@').next().unwrap_or_default();
        let name = image.rsplit('/').next().unwrap_or_default();
        let mut addresses = ADDRESSES
            .iter()
            .filter_map(|it| pod.metadata.annotation(it));
        let address = addresses.next().map(|it| {
            let first = it.split(',').next().unwrap_or_default();
            first.strip_prefix("https://").unwrap_or(first).to_owned()
        });
        let component = component(pod);
        let is_api_server = component == "kube-apiserver" && !container.command.is_empty();
        ControlPlanePod {
            permits_external_ips: is_api_server
                && !container.words().any(|it| {
                    it.contains("-admission-plugins=") && it.contains(kubeadm::DENY_EXTERNAL_IPS)
                }),
            component: component.into(),
            node: pod.spec.node_name.clone(),
            version: name
                .split_once(':')
                .map_or_else(String::new, |(_, tag)| tag.into()),
            is_ready: pod.is_ready(),
            address,
        }
    }
}

impl WaitingToken {
    fn read(secret: SecretObject) -> WaitingToken {
        let field = |name: &str| {
            let bytes = secret.data.bytes(name).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        WaitingToken {
            id: field("token-id"),
            groups: field("auth-extra-groups"),
            expires: match field("expiration").as_str() {
                "" => Expiration::Never,
                text => rfc3339(text).map_or(Expiration::Unreadable, Expiration::At),
            },
            authenticates: field("usage-bootstrap-authentication") == "true",
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD as STANDARD;
    use serde_json::json;
    use support::mutation::mutations;

    use super::*;

    fn read<K: ObjectKind + Default>(object: &Value) -> K {
        K::read(object.clone()).unwrap_or_default()
    }

    /// Runs every reader on one object, as if the API server had sent it in each list.
    fn read_all(object: &Value) -> Objects {
        let mut objects = Objects::default();
        objects.take_maps(&Vec::from_iter(wanted_map(read(object))));
        objects.requests.extend(SigningRequest::read(&read(object)));
        objects.joining.push(Joining::read(&read(object)));
        objects.claims.extend(Claim::read(&read(object)));
        objects.policies.extend(policy_in_force(read(object)));
        objects.powerful = rbac::powerful(&[read(object)], &[read(object)]);
        let pod = ControlPlanePod::read(&read(object));
        objects.control_plane.push(pod);
        objects.heartbeats.extend(heartbeat(&read(object)));
        objects.tokens.push(WaitingToken::read(read(object)));
        objects.master_secrets.extend(master_secret(read(object)));
        objects.services.push(of_kind("DaemonSet", read(object)));
        objects.workloads.push(of_kind("Deployment", read(object)));
        objects
    }

    /// Returns one object of each kind.
    fn samples() -> Vec<Value> {
        vec![
            json!({"metadata": {"name": "csr-a", "creationTimestamp": "2026-11-26T10:00:00Z"}, "spec": {"signerName": KUBELET_SIGNERS[1],
                "username": "system:node:a"}, "status": {"conditions": [{"type": "Approved", "status": "True"}]}}),
            json!({"metadata": {"labels": {"component": "etcd"}, "annotations": {ADDRESSES[1]: "https://10.0.0.1:2379"}}, "spec": {"nodeName":
                "cp-0", "containers": [{"image": "registry.k8s.io:443/etcd:3.6.6-0@sha256:00"}]}, "status": {"conditions": [{"type": "Ready",
                "status": "True"}]}}),
            json!({"metadata": {"name": "bootstrap-token-a"}, "data": {"token-id": "YWJjZGVm", "auth-extra-groups": "Z3JvdXA=",
                "token-secret": "c2VjcmV0", "expiration": "MjAyNi0xMS0yNlQxMDowMDowMFo="}}),
            json!({"metadata": {"name": JOIN_CONFIG}, "data": {"attestationConfig": "{}"}, "binaryData": {"measurementSalt": "c2FsdA=="}}),
            json!({"metadata": {"name": COLLATERAL}, "data": {"fetched": r#"{"a.crl":1795406400}"#}, "binaryData": {"a.crl": "AA=="}}),
            json!({"metadata": {"name": kubeadm::CONFIG_MAP}, "data": {"ClusterConfiguration": "kubernetesVersion: v1.34.4\n"}}),
            json!({"metadata": {"name": AUTHENTICATION}, "data": {"client-ca-file": "PEM"}}),
            json!({"metadata": {"name": "cp-0"}, "spec": {"renewTime": "2026-11-26T10:00:00.000000Z", "name": "b", "deadline":
                "2026-11-26T10:00:00Z"}}),
            json!({"metadata": {"name": "firstlight-mastersecret-00"}, "immutable": true, "data": {"mastersecret": "AA=="}}),
            json!({"metadata": {"namespace": "tenant", "name": "p"}, "spec": {"externalIPs": ["10.0.0.1"], "ports": [{"port": 30090}]},
                "status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.2"}, {"hostname": "a"}]}}}),
            json!({"spec": {"policyName": "firstlight-nodes", "validationActions": ["Deny"]}}),
            json!({"metadata": {"labels": {"component": "kube-apiserver"}}, "spec": {"containers": [{"command":
                ["kube-apiserver", "--enable-admission-plugins=NodeRestriction"]}]}}),
            json!({"metadata": {"labels": {"component": "kube-apiserver"}}, "spec": {"containers": [{"command":
                ["kube-apiserver", "--enable-admission-plugins=NodeRestriction,DenyServiceExternalIPs"]}]}}),
            json!({"metadata": {"name": "a", "namespace": "kube-system"}, "subjects": [{"kind": "ServiceAccount", "namespace": "n", "name": "a"}],
                "roleRef": {"kind": "Role", "name": "a"}, "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"],
                "resourceNames": ["join-node-files"]}]}),
        ]
    }

    #[test]
    fn each_kind_of_object_is_read() {
        let all: Vec<Objects> = samples().iter().map(read_all).collect();
        let request = &all[0].requests[0];
        assert_eq!(
            (
                request.fate.clone(),
                request.is_serving,
                request.made.is_some()
            ),
            (Fate::Unsigned, true, true)
        );
        let pod = &all[1].control_plane[0];
        assert_eq!(
            (pod.component.as_str(), pod.version.as_str(), pod.is_ready),
            ("etcd", "3.6.6-0", true)
        );
        assert_eq!(pod.address.as_deref(), Some("10.0.0.1:2379"));
        let token = &all[2].tokens[0];
        assert_eq!(
            (token.id.as_str(), token.groups.as_str(), token.expires),
            (
                "abcdef",
                "group",
                Expiration::At(time::parse("2026-11-26T10:00:00Z").unwrap())
            )
        );
        assert_eq!(
            (all[3].policy.as_deref(), all[3].salt.as_deref()),
            (Some("{}"), Some("c2FsdA=="))
        );
        assert_eq!(all[4].collateral.len(), 1);
        assert_eq!(all[5].version(), Some("v1.34.4"));
        assert_eq!(all[6].authorities, [("authority of clients", "PEM".into())]);
        assert_eq!(
            (all[7].heartbeats.len(), all[7].joining[0].node.as_str()),
            (1, "b")
        );
        assert_eq!(
            all[8].master_secrets,
            [("firstlight-mastersecret-00".into(), true)]
        );
        let claim = &all[9].claims[0];
        assert_eq!(
            (claim.service.as_str(), &claim.addresses, &claim.ports),
            (
                "tenant/p",
                &vec!["10.0.0.1".to_owned(), "10.0.0.2".to_owned()],
                &vec![30090]
            )
        );
        assert_eq!(all[10].policies, ["firstlight-nodes"]);
        let permits = |index: usize| {
            let all: &Objects = &all[index];
            all.control_plane[0].permits_external_ips
        };
        assert_eq!([1, 11, 12].map(permits), [false, true, false]);
        assert_eq!(all[13].powerful[0].name, "n/a");
    }

    #[test]
    fn the_end_of_a_token_is_read_as_the_api_server_reads_it() {
        let read = |text: &str| {
            let data = json!({"data": {"expiration": STANDARD.encode(text)}});
            WaitingToken::read(self::read(&data)).expires
        };
        let at = |text: &str| Expiration::At(time::parse(text).unwrap());
        for (text, expected) in [
            ("", Expiration::Never),
            ("2026-11-26T10:00:00Z", at("2026-11-26T10:00:00Z")),
            ("2026-11-26T10:00:00.5Z", at("2026-11-26T10:00:00.5Z")),
            ("2026-11-26T10:00:00+02:00", at("2026-11-26T08:00:00Z")),
            ("2026-11-26T22:30:00-05:30", at("2026-11-27T04:00:00Z")),
            (
                "2026-11-26T10:00:00.25+00:00",
                at("2026-11-26T10:00:00.25Z"),
            ),
            ("2026-11-26", Expiration::Unreadable),
            ("2026-11-26T10:00:00", Expiration::Unreadable),
            ("2026-11-26T10:00:00+2:00", Expiration::Unreadable),
            ("2026-11-26T10:00:00+02:60", Expiration::Unreadable),
            ("2026-11-26T10:00:00Z+02:00", Expiration::Unreadable),
            ("x", Expiration::Unreadable),
            ("\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}", Expiration::Unreadable),
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
        let none = WaitingToken::read(SecretObject::default());
        assert_eq!(none.expires, Expiration::Never);
    }

    #[test]
    fn mutated_objects_are_read_or_left_out() {
        let mut parsed = 0;
        for sample in samples() {
            for bytes in mutations(sample.to_string().as_bytes(), 2000) {
                if let Ok(value) = serde_json::from_slice(&bytes) {
                    read_all(&value);
                    parsed += 1;
                }
            }
        }
        assert!(parsed > 1000, "{parsed}");
        for value in [
            json!(1),
            json!("a"),
            json!(["a"]),
            json!({"data": "a", "metadata": 7}),
            Value::Null,
        ] {
            read_all(&value);
        }
    }
}
