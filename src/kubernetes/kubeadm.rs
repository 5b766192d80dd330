//! Kubeadm's configuration files as types: kubeadm.k8s.io/v1beta4, which every supported version
//! (from 1.31) reads, and kubelet.config.k8s.io/v1beta1. The files are JSON, which is valid YAML
//! 1.2, with `---` between documents.
//!
//! A missing field has kubeadm's default. Constellation's files are of v1beta3. They differ in
//! these points: here the API server advertises the node's own address instead of that of the
//! default route; an empty `cloud-provider` is omitted; and there is no cipher suite with RSA key
//! exchange, which has no forward secrecy (RFC 9325 §4.1).

use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Map, Value, json};
use zeroize::Zeroizing;

use super::NAMESPACE;
use super::client::{self, CONFIG_MAPS, Client};
use super::parameters::{Invalid, KubernetesVersion, Networks, NodeName, Subnet};
use super::yaml;

/// The port of the API server on each control plane.
pub const API_SERVER_PORT: u16 = 6443;
/// The path of [`AUDIT_POLICY`], a file with mode 0644.
pub const AUDIT_POLICY_PATH: &str = "/etc/kubernetes/audit-policy.yaml";
/// Logs the metadata of each request, but no contents.
pub const AUDIT_POLICY: &str = r#"{"apiVersion":"audit.k8s.io/v1","kind":"Policy","metadata":{},"rules":[{"level":"Metadata"}]}
"#;
/// The directory of patches for kubeadm's manifests. They are installed as components. Kubeadm
/// requires that the directory exists.
pub const PATCHES: &str = "/opt/kubernetes/patches";
/// The ConfigMap in kube-system with kubeadm's ClusterConfiguration.
pub const CONFIG_MAP: &str = "kubeadm-config";
/// The directory of the control plane's static pod manifests.
pub const MANIFESTS: &str = "/etc/kubernetes/manifests";
/// The audit log of the API server on a control plane.
pub const AUDIT_LOG: &str = "/var/log/kubernetes/audit/audit.log";
/// The certificate of the cluster's CA, at kubeadm's path.
pub const CA_CERTIFICATE: &str = "/etc/kubernetes/pki/ca.crt";
/// The key of the cluster's CA, on control planes only.
pub const CA_KEY: &str = "/etc/kubernetes/pki/ca.key";
/// The paths of a kubelet's first serving certificate and its key. At the first pair, a kubelet
/// looks for the certificate that it renews (k8s.io/client-go, util/certificate: `kubelet-server`
/// in its certificate directory). It must not be configured as `tlsCertFile`: before 1.36, a
/// kubelet serves that file to clients that connect by address, such as the API server, even after
/// a renewal. The second pair has Constellation's names, which contain the word client. The
/// configuration of Constellation's clusters names it, also for our nodes.
pub const KUBELET_CERTIFICATES: [(&str, &str); 2] = [
    (
        "/var/lib/kubelet/pki/kubelet-server.crt",
        "/var/lib/kubelet/pki/kubelet-server.key",
    ),
    (
        "/run/state/kubelet/pki/kubelet-client-crt.pem",
        "/run/state/kubelet/pki/kubelet-client-key.pem",
    ),
];

/// The link to a kubelet's client certificate with its key. A kubelet that has one requests none by a bootstrap token.
pub const KUBELET_CLIENT_CERTIFICATE: &str = "/var/lib/kubelet/pki/kubelet-client-current.pem";

/// The admission plugin without which a Service with `externalIPs`, which each tenant may make, receives connections to the control
/// planes' ports. It is off by default.
pub const DENY_EXTERNAL_IPS: &str = "DenyServiceExternalIPs";
/// The plugin that kubeadm itself gives the API server; an argument of ours replaces kubeadm's.
const NODE_RESTRICTION: &str = "NodeRestriction";
/// The API server's arguments with admission plugins.
const ENABLE_PLUGINS: &str = "enable-admission-plugins";
const DISABLE_PLUGINS: &str = "disable-admission-plugins";

const KUBEADM_API: &str = "kubeadm.k8s.io/v1beta4";
/// The socket of containerd.
pub const CONTAINERD: &str = "unix:///run/containerd/containerd.sock";
/// The minor version from which the feature gate ControlPlaneKubeletLocalMode is on by default. It
/// is locked from 1.35 on.
const KUBELET_LOCAL_MODE_DEFAULT: u32 = 33;
/// AEAD cipher suites with forward secrecy, in Constellation's order.
const CIPHER_SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
];

/// The present machine as a Kubernetes node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The name of the Node object.
    pub name: NodeName,
    /// The address in the cluster's network.
    pub ip: IpAddr,
    /// The provider ID by which a cloud controller manager or Cluster API knows the machine,
    /// validated by [`provider_id`](super::parameters::provider_id). May be empty.
    pub provider_id: String,
    /// Whether a cloud controller manager will run. It removes the node's taint when it has
    /// initialized the node.
    pub external_cloud_provider: bool,
    /// How long kubeadm waits for the kubelet, for each component of the control plane, for the API
    /// and for etcd. If `None`, kubeadm's own limits: 4 minutes, for the API 1 minute, for etcd 2
    /// minutes.
    pub kubeadm_timeout: Option<Duration>,
}

/// The cluster to create.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    /// The Kubernetes version of the control plane.
    pub version: KubernetesVersion,
    /// The cluster's name, validated by [`cluster_name`](super::parameters::cluster_name).
    pub name: String,
    /// The host of the load balancer, validated by [`host`](super::parameters::host).
    pub endpoint: String,
    /// Further names of the API server, each validated by
    /// [`alternative_name`](super::parameters::alternative_name).
    pub alternative_names: Vec<String>,
    /// The networks of services and pods.
    pub networks: Networks,
}

/// Returns the files for `kubeadm init`: InitConfiguration, ClusterConfiguration,
/// KubeletConfiguration, KubeProxyConfiguration.
pub fn init(cluster: &ClusterSettings, node: &NodeSettings) -> String {
    let init = InitConfiguration {
        local_api_endpoint: ApiEndpoint::of(node),
        node_registration: NodeRegistration::of(node),
        patches: Patches { directory: PATCHES },
        bootstrap_tokens: [ShortLived { ttl: "1m0s" }],
        timeouts: node.kubeadm_timeout.map(timeouts),
    };
    let mut alternative_names = vec!["127.0.0.1".to_owned(), node.ip.to_string()];
    alternative_names.extend(cluster.alternative_names.iter().cloned());
    let local_mode = (cluster.version.minor < KUBELET_LOCAL_MODE_DEFAULT).then_some(FeatureGates {
        control_plane_kubelet_local_mode: true,
    });
    let configuration = ClusterConfiguration {
        kubernetes_version: cluster.version.to_string(),
        cluster_name: &cluster.name,
        control_plane_endpoint: &cluster.endpoint,
        networking: Networking {
            service_subnet: join(&cluster.networks.services),
            pod_subnet: join(&cluster.networks.pods),
        },
        api_server: ApiServer::new(alternative_names, node),
        controller_manager: ControlPlaneComponent {
            extra_args: controller_manager_arguments(node),
        },
        scheduler: ControlPlaneComponent {
            extra_args: [vec![argument("profiling", "false")], slow_leader(node)].concat(),
        },
        feature_gates: local_mode,
    };
    [
        document(KUBEADM_API, "InitConfiguration", &init),
        document(KUBEADM_API, "ClusterConfiguration", &configuration),
        document(
            "kubelet.config.k8s.io/v1beta1",
            "KubeletConfiguration",
            &KubeletConfiguration::new(),
        ),
        document(
            "kubeproxy.config.k8s.io/v1alpha1",
            "KubeProxyConfiguration",
            &KubeProxyConfiguration::new(),
        ),
    ]
    .join("---\n")
}

/// The data of a join ticket for kubeadm.
pub struct JoinSettings {
    /// The API server, `host:port`.
    pub api_server: String,
    /// The bootstrap token.
    pub token: Zeroizing<String>,
    /// How the node authenticates the API server.
    pub trust: Trust,
    /// Whether the node becomes a control plane. Its certificates must be in place.
    pub control_plane: bool,
    /// The phase with which kubeadm begins.
    pub start: JoinStart,
}

/// The first phase of a `kubeadm join`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinStart {
    /// The preflight checks.
    Beginning,
    /// The join of etcd, after a try that has started the kubelet. kubeadm goes on with the member that it has
    /// announced, whether that votes already or not.
    AtEtcd,
}

/// How a joining node authenticates the cluster's API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// By the CA certificate, PEM, in the file [`DISCOVERY`].
    Authority(String),
    /// By token discovery with `sha256:` and the hash of the CA's public key.
    Hash(String),
}

/// The path of the kubeconfig of [`discovery`].
pub const DISCOVERY: &str = "/run/firstlight/cluster.conf";

/// Returns the kubeconfig with which a joining node authenticates the API server at `api_server` by
/// the CA `authority`. It contains no secret.
pub fn discovery(api_server: &str, authority: &str) -> String {
    let cluster = json!({
        "server": format!("https://{api_server}"),
        "certificate-authority-data": STANDARD.encode(authority),
    });
    let content = json!({
        "clusters": [{"name": "joined", "cluster": cluster}],
        // Kubeadm requires a user in the context. This user has no credentials.
        "users": [{"name": "joining", "user": {}}],
        "contexts": [{"name": "joining", "context": {"cluster": "joined", "user": "joining"}}],
        "current-context": "joining",
    });
    document("v1", "Config", &content)
}

/// Returns the file for `kubeadm join`: JoinConfiguration. It contains the token.
pub fn join_configuration(ticket: &JoinSettings, node: &NodeSettings) -> Zeroizing<String> {
    let configuration = JoinConfiguration {
        discovery: match &ticket.trust {
            Trust::Authority(_) => Discovery::File {
                file: DiscoveryFile {
                    kube_config_path: DISCOVERY,
                },
                tls_bootstrap_token: &ticket.token,
            },
            Trust::Hash(hash) => Discovery::Token {
                bootstrap_token: BootstrapToken {
                    api_server_endpoint: &ticket.api_server,
                    token: &ticket.token,
                    ca_cert_hashes: [hash],
                },
            },
        },
        node_registration: NodeRegistration::of(node),
        patches: Patches { directory: PATCHES },
        control_plane: ticket.control_plane.then(|| JoinControlPlane {
            local_api_endpoint: ApiEndpoint::of(node),
        }),
        skip_phases: match ticket.start {
            JoinStart::AtEtcd => &[
                "preflight",
                "control-plane-prepare",
                "check-etcd",
                "kubelet-start",
            ],
            JoinStart::Beginning if ticket.control_plane => {
                &["control-plane-prepare/download-certs"]
            }
            JoinStart::Beginning => &[],
        },
        timeouts: node.kubeadm_timeout.map(timeouts_of_join),
    };
    Zeroizing::new(document(KUBEADM_API, "JoinConfiguration", &configuration))
}

/// Returns the file for `kubeadm upgrade`: UpgradeConfiguration.
pub fn upgrade_configuration(kubeadm_timeout: Option<Duration>) -> String {
    let patches = format!(r#"{{"patches":{{"directory":"{PATCHES}"}}}}"#);
    let timeouts = Value::from(kubeadm_timeout.map(timeouts));
    format!(
        r#"{{"apiVersion":"{KUBEADM_API}","kind":"UpgradeConfiguration","apply":{patches},"node":{patches},"timeouts":{timeouts}}}"#
    )
}

/// Returns the cluster's version, which kubeadm has recorded in the ConfigMap [`CONFIG_MAP`].
pub fn recorded_version(map: &Value) -> Result<KubernetesVersion, Invalid> {
    let configuration = map["data"]["ClusterConfiguration"].as_str();
    // of a text that is no YAML, the version is missing
    let configuration = yaml::document(configuration.unwrap_or_default()).unwrap_or_default();
    let version = configuration["kubernetesVersion"].as_str();
    version.unwrap_or_default().parse()
}

/// Adds [`DENY_EXTERNAL_IPS`] to the ConfigMap [`CONFIG_MAP`], from which `kubeadm upgrade apply` makes the API server's manifest.
/// Returns whether it was missing.
pub fn deny_external_ips(client: &Client) -> Result<bool, client::Error> {
    let mut is_new = false;
    client.modify(
        &CONFIG_MAPS.in_namespace(NAMESPACE).named(CONFIG_MAP),
        |map| {
            let new = with_admission_plugin(map);
            is_new = new.is_some();
            if let Some(new) = new {
                map["data"]["ClusterConfiguration"] = new.into();
            }
            is_new
        },
    )?;
    Ok(is_new)
}

/// Returns the ClusterConfiguration of the ConfigMap [`CONFIG_MAP`] with [`DENY_EXTERNAL_IPS`], which clusters of an earlier version
/// lack. Returns `None` if it is there, if the operator has named it as one to disable, or if the ConfigMap has no configuration.
fn with_admission_plugin(map: &Value) -> Option<String> {
    let configuration = map["data"]["ClusterConfiguration"].as_str()?;
    let mut configuration = yaml::document(configuration).ok()?;
    let api_server = configuration.as_object_mut()?.entry("apiServer");
    let arguments = api_server
        .or_insert_with(|| json!({}))
        .as_object_mut()?
        .entry("extraArgs")
        .or_insert(Value::Null);
    let has = |plugins: Option<&str>| {
        plugins.is_some_and(|plugins| plugins.split(',').any(|it| it.trim() == DENY_EXTERNAL_IPS))
    };
    let enabled = argument_of(arguments, ENABLE_PLUGINS);
    if has(enabled) || has(argument_of(arguments, DISABLE_PLUGINS)) {
        return None;
    }
    let enabled = format!(
        "{},{DENY_EXTERNAL_IPS}",
        enabled.unwrap_or(NODE_RESTRICTION)
    );
    match arguments {
        // v1beta3
        Value::Object(arguments) => {
            arguments.insert(ENABLE_PLUGINS.into(), enabled.into());
        }
        Value::Array(arguments) => {
            arguments.retain(|argument| argument["name"] != ENABLE_PLUGINS);
            arguments.push(json!({"name": ENABLE_PLUGINS, "value": enabled}));
        }
        none => *none = json!([{"name": ENABLE_PLUGINS, "value": enabled}]),
    }
    Some(format!("{configuration:#}\n"))
}

/// Returns an argument of `extraArgs`: a list since v1beta4, an object before.
fn argument_of<'a>(arguments: &'a Value, name: &str) -> Option<&'a str> {
    match arguments {
        Value::Array(arguments) => {
            let mut arguments = arguments.iter();
            arguments.find(|argument| argument["name"] == name)?["value"].as_str()
        }
        arguments => arguments[name].as_str(),
    }
}

fn document(api_version: &str, kind: &str, content: &impl Serialize) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Document<'a, T> {
        api_version: &'a str,
        kind: &'a str,
        #[serde(flatten)]
        content: &'a T,
    }
    let text = serde_json::to_string_pretty(&Document {
        api_version,
        kind,
        content,
    });
    text.expect("only strings, numbers and lists of them") + "\n"
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InitConfiguration<'a> {
    #[serde(rename = "localAPIEndpoint")]
    local_api_endpoint: ApiEndpoint,
    node_registration: NodeRegistration<'a>,
    patches: Patches,
    bootstrap_tokens: [ShortLived; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    timeouts: Option<Map<String, Value>>,
}

/// Kubeadm always creates a token. No program uses this one, and it expires soon.
#[derive(Serialize)]
struct ShortLived {
    ttl: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ApiEndpoint {
    advertise_address: IpAddr,
    bind_port: u16,
}

impl ApiEndpoint {
    fn of(node: &NodeSettings) -> ApiEndpoint {
        ApiEndpoint {
            advertise_address: node.ip,
            bind_port: API_SERVER_PORT,
        }
    }
}

/// Without `taints`, kubeadm adds its own for a control plane.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeRegistration<'a> {
    name: &'a str,
    cri_socket: &'static str,
    kubelet_extra_args: Vec<Argument>,
}

impl NodeRegistration<'_> {
    fn of(node: &NodeSettings) -> NodeRegistration<'_> {
        let mut kubelet_extra_args = cloud_provider(node);
        kubelet_extra_args.push(argument("node-ip", &node.ip.to_string()));
        if !node.provider_id.is_empty() {
            kubelet_extra_args.push(argument("provider-id", &node.provider_id));
        }
        NodeRegistration {
            name: node.name.as_str(),
            cri_socket: CONTAINERD,
            kubelet_extra_args,
        }
    }
}

#[derive(Serialize, Clone)]
struct Argument {
    name: &'static str,
    value: String,
}

fn argument(name: &'static str, value: &str) -> Argument {
    Argument {
        name,
        value: value.to_owned(),
    }
}

fn cloud_provider(node: &NodeSettings) -> Vec<Argument> {
    if node.external_cloud_provider {
        vec![argument("cloud-provider", "external")]
    } else {
        Vec::new()
    }
}

fn controller_manager_arguments(node: &NodeSettings) -> Vec<Argument> {
    let mut arguments = cloud_provider(node);
    arguments.extend(slow_leader(node));
    arguments.extend([
        argument(
            "flex-volume-plugin-dir",
            "/opt/libexec/kubernetes/kubelet-plugins/volume/exec/",
        ),
        argument("configure-cloud-routes", "false"),
        argument("profiling", "false"),
        argument("terminated-pod-gc-threshold", "1000"),
    ]);
    arguments
}

/// On a slow machine, gives the leader of the controllers longer to renew its lease; otherwise it
/// ends. The values are those of OpenShift, which tolerate a minute without the API.
fn slow_leader(node: &NodeSettings) -> Vec<Argument> {
    if node.kubeadm_timeout.is_none() {
        return Vec::new();
    }
    vec![
        argument("leader-elect-lease-duration", "137s"),
        argument("leader-elect-renew-deadline", "107s"),
        argument("leader-elect-retry-period", "26s"),
    ]
}

#[derive(Serialize)]
struct Patches {
    directory: &'static str,
}

/// How long kubeadm waits at most for each answer of etcd in a join; by default it is two minutes.
const ETCD_JOIN: Duration = Duration::from_secs(300);

/// Returns kubeadm's `timeouts`, all with this value.
fn timeouts(kubeadm_timeout: Duration) -> Map<String, Value> {
    let mut timeouts = Map::new();
    for name in [
        "controlPlaneComponentHealthCheck",
        "kubeletHealthCheck",
        "kubernetesAPICall",
        "etcdAPICall",
        "tlsBootstrap",
        "discovery",
        "upgradeManifests",
    ] {
        let value = format!("{}s", kubeadm_timeout.as_secs());
        timeouts.insert(name.into(), value.into());
    }
    timeouts
}

/// Returns the same for a join. If etcd makes the new member a voter, but answers later than kubeadm waits for it (2 s), kubeadm asks for
/// the same until its time is up, so a long time would only be lost: a reset takes the member out, and another try adds it again.
fn timeouts_of_join(kubeadm_timeout: Duration) -> Map<String, Value> {
    let of_etcd = timeouts(kubeadm_timeout.min(ETCD_JOIN)).remove("etcdAPICall");
    let mut all = timeouts(kubeadm_timeout);
    all.extend(of_etcd.map(|value| ("etcdAPICall".to_owned(), value)));
    all
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ClusterConfiguration<'a> {
    kubernetes_version: String,
    cluster_name: &'a str,
    control_plane_endpoint: &'a str,
    networking: Networking,
    api_server: ApiServer,
    controller_manager: ControlPlaneComponent,
    scheduler: ControlPlaneComponent,
    #[serde(skip_serializing_if = "Option::is_none")]
    feature_gates: Option<FeatureGates>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Networking {
    #[serde(skip_serializing_if = "String::is_empty")]
    service_subnet: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pod_subnet: String,
}

fn join(subnets: &[Subnet]) -> String {
    subnets
        .iter()
        .map(Subnet::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ControlPlaneComponent {
    extra_args: Vec<Argument>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ApiServer {
    #[serde(rename = "certSANs")]
    cert_sans: Vec<String>,
    extra_args: Vec<Argument>,
    extra_volumes: [HostPathMount; 2],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HostPathMount {
    name: &'static str,
    host_path: &'static str,
    mount_path: &'static str,
    read_only: bool,
    path_type: &'static str,
}

impl ApiServer {
    fn new(cert_sans: Vec<String>, node: &NodeSettings) -> ApiServer {
        const LOGS: &str = "/var/log/kubernetes/audit/";
        let mut extra_args = vec![
            argument("audit-policy-file", AUDIT_POLICY_PATH),
            argument("audit-log-path", AUDIT_LOG),
            // Days, files, megabytes.
            argument("audit-log-maxage", "30"),
            argument("audit-log-maxbackup", "10"),
            argument("audit-log-maxsize", "100"),
            argument("profiling", "false"),
            argument(
                ENABLE_PLUGINS,
                &format!("{NODE_RESTRICTION},{DENY_EXTERNAL_IPS}"),
            ),
            // Otherwise the API server would send logs and commands to any server at a
            // kubelet's address.
            argument("kubelet-certificate-authority", CA_CERTIFICATE),
        ];
        if node.kubeadm_timeout.is_some() {
            // etcd answers late on a slow machine; by default, an API server that waits two seconds
            // for it counts as dead
            extra_args.extend([
                argument("etcd-healthcheck-timeout", "20s"),
                argument("etcd-readycheck-timeout", "20s"),
            ]);
        }
        ApiServer {
            cert_sans,
            extra_args,
            extra_volumes: [
                HostPathMount {
                    name: "audit-log",
                    host_path: LOGS,
                    mount_path: LOGS,
                    read_only: false,
                    path_type: "DirectoryOrCreate",
                },
                HostPathMount {
                    name: "audit",
                    host_path: AUDIT_POLICY_PATH,
                    mount_path: AUDIT_POLICY_PATH,
                    read_only: true,
                    path_type: "File",
                },
            ],
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct FeatureGates {
    control_plane_kubelet_local_mode: bool,
}

/// Kubeadm uploads this configuration, and every node uses it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct KubeletConfiguration {
    /// The image sets the sysctls that the kubelet needs.
    protect_kernel_defaults: bool,
    static_pod_path: &'static str,
    /// The kubelet requests a new serving certificate after 70 to 90 % of the present one's
    /// validity, or when the Node has an address or name that is not in it. The join service
    /// approves the request.
    #[serde(rename = "serverTLSBootstrap")]
    server_tls_bootstrap: bool,
    tls_cipher_suites: [&'static str; 6],
    register_with_taints: [Taint; 2],
}

#[derive(Serialize)]
struct Taint {
    key: &'static str,
    value: &'static str,
    effect: &'static str,
}

impl KubeletConfiguration {
    fn new() -> KubeletConfiguration {
        let until_seen = |key| Taint {
            key,
            value: "true",
            effect: "PreferNoSchedule",
        };
        KubeletConfiguration {
            protect_kernel_defaults: true,
            static_pod_path: MANIFESTS,
            server_tls_bootstrap: true,
            tls_cipher_suites: CIPHER_SUITES,
            register_with_taints: [
                until_seen("node.cloudprovider.kubernetes.io/uninitialized"),
                until_seen("node.cilium.io/agent-not-ready"),
            ],
        }
    }
}

/// The configuration of kube-proxy, if kubeadm installs it.
#[derive(Serialize)]
struct KubeProxyConfiguration {
    conntrack: Conntrack,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Conntrack {
    max_per_core: u32,
}

impl KubeProxyConfiguration {
    /// 0 keeps nf_conntrack_max as set by the kernel or the image, as with the kubelet's sysctls.
    fn new() -> KubeProxyConfiguration {
        KubeProxyConfiguration {
            conntrack: Conntrack { max_per_core: 0 },
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JoinConfiguration<'a> {
    discovery: Discovery<'a>,
    node_registration: NodeRegistration<'a>,
    patches: Patches,
    #[serde(skip_serializing_if = "Option::is_none")]
    control_plane: Option<JoinControlPlane>,
    skip_phases: &'static [&'static str],
    #[serde(skip_serializing_if = "Option::is_none")]
    timeouts: Option<Map<String, Value>>,
}

#[derive(Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
enum Discovery<'a> {
    File {
        file: DiscoveryFile,
        tls_bootstrap_token: &'a str,
    },
    Token {
        bootstrap_token: BootstrapToken<'a>,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DiscoveryFile {
    kube_config_path: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BootstrapToken<'a> {
    api_server_endpoint: &'a str,
    token: &'a str,
    ca_cert_hashes: [&'a str; 1],
}

#[derive(Serialize)]
struct JoinControlPlane {
    #[serde(rename = "localAPIEndpoint")]
    local_api_endpoint: ApiEndpoint,
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    fn cluster(version: &str) -> ClusterSettings {
        ClusterSettings {
            version: version.parse().unwrap(),
            name: "prod".into(),
            endpoint: "lb.example".into(),
            alternative_names: vec!["*.api.example".into(), "198.51.100.7".into()],
            networks: Networks::parse("10.96.0.0/16", "10.244.0.0/16", None).unwrap(),
        }
    }

    fn node() -> NodeSettings {
        NodeSettings {
            name: NodeName::from_machine("control_plane-0").unwrap(),
            ip: "10.42.1.100".parse().unwrap(),
            provider_id: "qemu:///hostname/control-plane-0".into(),
            external_cloud_provider: false,
            kubeadm_timeout: Some(Duration::from_secs(1200)),
        }
    }

    fn ticket(control_plane: bool) -> JoinSettings {
        JoinSettings {
            api_server: "10.42.1.100:6443".into(),
            token: Zeroizing::new("abcdef.0123456789abcdef".into()),
            trust: Trust::Hash(format!("sha256:{}", "0a".repeat(32))),
            control_plane,
            start: JoinStart::Beginning,
        }
    }

    fn documents(text: &str) -> Vec<Value> {
        text.split("---\n")
            .map(|document| serde_json::from_str(document).unwrap())
            .collect()
    }

    /// Returns the documents of an init.
    fn init_documents() -> Vec<Value> {
        documents(&init(&cluster("v1.34.4"), &node()))
    }

    #[test]
    fn an_init_has_four_configurations() {
        let documents = init_documents();
        let kinds: Vec<_> = documents
            .iter()
            .map(|document| [&document["apiVersion"], &document["kind"]])
            .collect();
        assert_eq!(
            json!(kinds),
            json!([
                ["kubeadm.k8s.io/v1beta4", "InitConfiguration"],
                ["kubeadm.k8s.io/v1beta4", "ClusterConfiguration"],
                ["kubelet.config.k8s.io/v1beta1", "KubeletConfiguration"],
                ["kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"],
            ])
        );
    }

    #[test]
    fn the_init_configuration_has_the_node_s_name_and_addresses() {
        let init = &init_documents()[0];
        assert_eq!(
            init["localAPIEndpoint"],
            json!({"advertiseAddress": "10.42.1.100", "bindPort": 6443})
        );
        assert_eq!(
            init["nodeRegistration"],
            json!({
                "name": "control-plane-0",
                "criSocket": "unix:///run/containerd/containerd.sock",
                "kubeletExtraArgs": [
                    {"name": "node-ip", "value": "10.42.1.100"},
                    {"name": "provider-id", "value": "qemu:///hostname/control-plane-0"},
                ],
            })
        );
        assert_eq!(init["timeouts"]["kubernetesAPICall"], "1200s");
        assert_eq!(init["timeouts"]["etcdAPICall"], "1200s");
    }

    #[test]
    fn a_join_does_not_wait_long_for_an_etcd_whose_answer_was_lost() {
        let text = join_configuration(&ticket(true), &node());
        let join: Value = serde_json::from_str(text.split("---").next().unwrap()).unwrap();
        assert_eq!(join["timeouts"]["kubernetesAPICall"], "1200s");
        assert_eq!(join["timeouts"]["etcdAPICall"], "300s");
    }

    #[test]
    fn the_cluster_configuration_has_the_old_system_s_fields() {
        let cluster = &init_documents()[1];
        assert_eq!(cluster["kubernetesVersion"], "v1.34.4");
        assert_eq!(cluster["controlPlaneEndpoint"], "lb.example");
        assert_eq!(
            cluster["networking"],
            json!({"serviceSubnet": "10.96.0.0/16", "podSubnet": "10.244.0.0/16"})
        );
        assert_eq!(
            cluster["apiServer"]["certSANs"],
            json!(["127.0.0.1", "10.42.1.100", "*.api.example", "198.51.100.7"])
        );
        let arguments = cluster["apiServer"]["extraArgs"].as_array().unwrap();
        assert!(
            arguments.contains(
                &json!({"name": "kubelet-certificate-authority", "value": CA_CERTIFICATE})
            )
        );
        assert!(
            arguments.contains(&json!({"name": "audit-policy-file", "value": AUDIT_POLICY_PATH}))
        );
        let plugins = json!({"name": "enable-admission-plugins", "value": "NodeRestriction,DenyServiceExternalIPs"});
        assert!(arguments.contains(&plugins));
        // this machine is slow
        let late = json!({"name": "etcd-readycheck-timeout", "value": "20s"});
        assert!(arguments.contains(&late));
        let leader = json!({"name": "leader-elect-renew-deadline", "value": "107s"});
        for component in ["controllerManager", "scheduler"] {
            let arguments = cluster[component]["extraArgs"].as_array().unwrap();
            assert!(arguments.contains(&leader), "{component}");
        }
        assert_eq!(cluster["apiServer"]["extraVolumes"][1]["readOnly"], true);
        assert_eq!(
            cluster["controllerManager"]["extraArgs"]
                .as_array()
                .unwrap()
                .len(),
            7
        );
    }

    #[test]
    fn the_kubelet_renews_its_serving_certificate() {
        let kubelet = &init_documents()[2];
        assert_eq!(kubelet["protectKernelDefaults"], true);
        assert!(kubelet.get("tlsCertFile").is_none());
        assert_eq!(kubelet["serverTLSBootstrap"], true);
    }

    #[test]
    fn values_that_are_not_set_are_left_to_kubeadm() {
        let cluster = ClusterSettings {
            networks: Networks::default(),
            ..cluster("v1.34.4")
        };
        let documents = documents(&init(
            &cluster,
            &NodeSettings {
                provider_id: String::new(),
                kubeadm_timeout: None,
                ..node()
            },
        ));
        assert_eq!(documents[0].get("timeouts"), None);
        let text = documents[1].to_string();
        assert!(
            !text.contains("leader-elect") && !text.contains("etcd-"),
            "{text}"
        );
        assert_eq!(
            documents[0]["nodeRegistration"]["kubeletExtraArgs"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert_eq!(documents[1]["networking"], json!({}));
    }

    #[test]
    fn the_cluster_s_version_is_read_from_kubeadm_s_record() {
        let version = |configuration: &str| {
            let map = json!({"data": {"ClusterConfiguration": configuration}});
            recorded_version(&map).map_err(|error| error.to_string())
        };
        let good = "controlPlaneEndpoint: lb.example:6443\nkubernetesVersion: v1.35.4\n";
        assert_eq!(version(good).unwrap().to_string(), "v1.35.4");
        for (bad, says) in [
            ("", "\"\" is not a version"),
            ("kubernetesVersion: 1.35", "is not a version"),
            ("kubernetesVersion: v1.30.1", "not supported"),
            ("a: [", "\"\" is not a version"),
        ] {
            let error = version(bad).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert!(recorded_version(&json!({})).is_err());
    }

    #[test]
    fn a_cluster_of_before_gets_the_plugin_that_denies_external_ips_once() {
        let with = |configuration: &str| {
            let map = json!({"data": {"ClusterConfiguration": configuration}});
            let text = with_admission_plugin(&map)?;
            // nothing is left to do
            assert_eq!(
                with_admission_plugin(&json!({"data": {"ClusterConfiguration": text}})),
                None
            );
            Some(serde_json::from_str::<Value>(&text).unwrap())
        };
        let (ours, more) = (
            "NodeRestriction,DenyServiceExternalIPs",
            "NodeRestriction,PodSecurity,DenyServiceExternalIPs",
        );
        let list = "kubernetesVersion: v1.34.4\napiServer:\n  extraArgs:\n  - name: profiling\n    value: 'false'\n";
        assert_eq!(
            with(list).unwrap(),
            json!({"kubernetesVersion": "v1.34.4", "apiServer": {"extraArgs": [
                {"name": "profiling", "value": "false"}, {"name": ENABLE_PLUGINS, "value": ours}]}})
        );
        let named =
            format!("{list}  - name: {ENABLE_PLUGINS}\n    value: NodeRestriction,PodSecurity\n");
        assert_eq!(
            with(&named).unwrap()["apiServer"]["extraArgs"][1],
            json!({"name": ENABLE_PLUGINS, "value": more})
        );
        let object = "apiServer:\n  extraArgs:\n    profiling: 'false'\n";
        assert_eq!(
            with(object).unwrap()["apiServer"]["extraArgs"],
            json!({"profiling": "false", ENABLE_PLUGINS: ours})
        );
        assert_eq!(
            with("kubernetesVersion: v1.34.4\n").unwrap()["apiServer"]["extraArgs"],
            json!([{"name": ENABLE_PLUGINS, "value": ours}])
        );
        for (name, value) in [
            (ENABLE_PLUGINS, "DenyServiceExternalIPs, NodeRestriction"),
            (DISABLE_PLUGINS, "DenyServiceExternalIPs"),
        ] {
            assert_eq!(
                with(&format!("{list}  - name: {name}\n    value: {value}\n")),
                None
            );
        }
        for broken in ["a: [", "- a", "apiServer: a"] {
            assert_eq!(with(broken), None);
        }
        assert_eq!(with_admission_plugin(&json!({})), None);
    }

    #[test]
    fn local_mode_is_asked_for_only_where_it_is_not_the_default() {
        for (version, gates) in [
            ("v1.31.13", json!({"ControlPlaneKubeletLocalMode": true})),
            ("v1.32.9", json!({"ControlPlaneKubeletLocalMode": true})),
            ("v1.33.0", Value::Null),
            ("v1.37.2", Value::Null),
        ] {
            assert_eq!(
                documents(&init(&cluster(version), &node()))[1]["featureGates"],
                gates,
                "{version}"
            );
        }
    }

    #[test]
    fn an_external_cloud_provider_is_named_to_kubelet_and_controller_manager() {
        let documents = documents(&init(
            &cluster("v1.34.4"),
            &NodeSettings {
                external_cloud_provider: true,
                ..node()
            },
        ));
        let external = json!({"name": "cloud-provider", "value": "external"});
        assert_eq!(
            documents[0]["nodeRegistration"]["kubeletExtraArgs"][0],
            external
        );
        assert_eq!(documents[1]["controllerManager"]["extraArgs"][0], external);
    }

    #[test]
    fn join_tells_a_control_plane_from_a_worker() {
        let control_plane = &documents(&join_configuration(&ticket(true), &node()))[0];
        assert_eq!(
            control_plane["controlPlane"]["localAPIEndpoint"]["bindPort"],
            6443
        );
        assert_eq!(
            control_plane["skipPhases"],
            json!(["control-plane-prepare/download-certs"])
        );
        let worker = &documents(&join_configuration(&ticket(false), &node()))[0];
        assert_eq!(worker.get("controlPlane"), None);
        assert_eq!(
            worker["nodeRegistration"]["kubeletExtraArgs"][1],
            json!({"name": "provider-id", "value": "qemu:///hostname/control-plane-0"})
        );
        assert_eq!(
            worker["discovery"]["bootstrapToken"]["caCertHashes"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            worker["discovery"]["bootstrapToken"]["token"],
            "abcdef.0123456789abcdef"
        );
    }

    #[test]
    fn a_node_that_has_the_clusters_ca_needs_no_signature_by_the_token() {
        let trust = Trust::Authority("PEM".into());
        let join = &documents(&join_configuration(
            &JoinSettings {
                trust,
                ..ticket(false)
            },
            &node(),
        ))[0];
        assert_eq!(
            join["discovery"],
            json!({"file": {"kubeConfigPath": DISCOVERY}, "tlsBootstrapToken": "abcdef.0123456789abcdef"})
        );
        let file: Value = serde_json::from_str(&discovery("[fd00::1]:6443", "PEM")).unwrap();
        let cluster =
            json!({"server": "https://[fd00::1]:6443", "certificate-authority-data": "UEVN"});
        assert_eq!(
            (&file["kind"], &file["clusters"][0]["cluster"]),
            (&json!("Config"), &cluster)
        );
        assert!(!file.to_string().contains("abcdef"));
    }

    /// Returns $FIRSTLIGHT_KUBEADM, the path of a kubeadm of any supported version.
    fn real_kubeadm() -> Option<PathBuf> {
        std::env::var_os("FIRSTLIGHT_KUBEADM").map(PathBuf::from)
    }

    #[test]
    #[ignore = "needs FIRSTLIGHT_KUBEADM, the path of a kubeadm"]
    fn real_kubeadm_accepts_and_refuses_the_same_values() {
        let kubeadm = real_kubeadm().expect("FIRSTLIGHT_KUBEADM must name a kubeadm");
        let output = Command::new(&kubeadm)
            .args(["version", "-o", "short"])
            .output()
            .unwrap();
        let version = String::from_utf8(output.stdout).unwrap();
        let validate = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            let output = Command::new(&kubeadm)
                .args(["config", "validate", "--config"])
                .arg(file.path())
                .output()
                .unwrap();
            (
                output.status.success(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            )
        };
        let good = cluster(version.trim());
        let plain = ClusterSettings {
            networks: Networks::default(),
            ..good.clone()
        };
        let networks = Networks::parse(
            "10.96.0.0/16,fd00:1::/108",
            "10.244.0.0/16,fd00:2::/48",
            None,
        )
        .unwrap();
        let dual = ClusterSettings {
            networks,
            ..good.clone()
        };
        let external = NodeSettings {
            external_cloud_provider: true,
            kubeadm_timeout: None,
            ..node()
        };
        for text in [
            init(&good, &node()),
            init(&plain, &external),
            init(&dual, &node()),
        ] {
            let (accepted, said) = validate(&text);
            // A warning would name an unknown or deprecated field.
            assert!(
                accepted && !said.contains("W1") && !said.to_lowercase().contains("deprecated"),
                "{text}\n{said}"
            );
        }
        // as in a cluster of an earlier version
        let before = documents(&init(&good, &node()))[1].clone();
        let mut before = before.as_object().unwrap().clone();
        before["apiServer"]["extraArgs"]
            .as_array_mut()
            .unwrap()
            .retain(|argument| argument["name"] != ENABLE_PLUGINS);
        let before = Value::from(before).to_string();
        let map = json!({"data": {"ClusterConfiguration": before}});
        let (accepted, said) = validate(&with_admission_plugin(&map).unwrap());
        assert!(accepted && said.is_empty(), "{said}");
        for kubeadm_timeout in [None, Some(Duration::from_secs(1200))] {
            let (accepted, said) = validate(&upgrade_configuration(kubeadm_timeout));
            assert!(accepted && said.is_empty(), "{said}");
        }
        for (control_plane, with_authority) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let mut ticket = ticket(control_plane);
            if with_authority {
                ticket.trust = Trust::Authority("PEM".into());
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), discovery("10.42.1.100:6443", "PEM")).unwrap();
            // Kubeadm checks that the configured file exists.
            let text = join_configuration(&ticket, &node())
                .replace(DISCOVERY, file.path().to_str().unwrap());
            let (accepted, said) = validate(&text);
            assert!(accepted && said.is_empty(), "{text}\n{said}");
            let (accepted, said) = validate(&text.replace("discovery", "discovry"));
            assert!(!accepted || said.contains("unknown field"), "{said}");
        }
        // A join that goes on at etcd skips phases that kubeadm has: without the others too, it does nothing.
        let resumed = JoinSettings {
            start: JoinStart::AtEtcd,
            ..ticket(false)
        };
        let rest = [
            "etcd-join",
            "kubelet-wait-bootstrap",
            "control-plane-join",
            "wait-control-plane",
        ];
        let mut resumed = documents(&join_configuration(&resumed, &node())).remove(0);
        let skipped = resumed["skipPhases"].as_array_mut().unwrap();
        skipped.extend(rest.map(Value::from));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), resumed.to_string()).unwrap();
        let mut join = Command::new(&kubeadm);
        let output = join.args(["join", "--config"]).arg(file.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        // Kubeadm does check the file.
        for (from, to) in [
            ("10.96.0.0/16", "10.0.0.0/8"),
            ("10.96.0.0/16", "10.96.0.0/29"),
            ("control-plane-0", "control_plane-0"),
            ("bindPort", "bindPrt"),
            ("*.api.example", "*api"),
            ("serverTLSBootstrap", "serverTLSBoot"),
        ] {
            let text = init(&good, &node());
            assert!(text.contains(from));
            let (accepted, said) = validate(&text.replace(from, to));
            assert!(
                !accepted || said.contains("unknown field"),
                "{from} as {to} is accepted: {said}"
            );
        }
    }
}
