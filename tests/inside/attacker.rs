//! What an attacker inside the cluster has, and the cluster that it attacks.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;
use common::kube_apiserver::{Cluster, PATIENCE, Process};
use common::manifests;
use common::volumes::add_pod;
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, Error, NAMESPACES, NODES, Object,
    PODS, ROLE_BINDINGS, SERVICE_ACCOUNTS, Selector,
};
use kubernetes::services::{self, Options, ServiceSettings};
use serde_json::{Value, json};

const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;
/// The annotation of kubeadm's static pod of etcd.
pub const ETCD_ENDPOINT: &str = "kubeadm.kubernetes.io/etcd.advertise-client-urls";
/// The namespace and the account of flannel.
pub const FLANNEL: (&str, &str) = ("kube-flannel", "flannel");
/// What a new cluster of `firstlight init` has beside the default admission plugins.
const PLUGINS: &[&str] = &["NodeRestriction", "DenyServiceExternalIPs"];
/// The controllers that the tests need. None of them judges whether a node is alive, because there are no real kubelets.
const CONTROLLERS: &str = "daemonset-controller,endpointslice-controller,endpoints-controller,endpointslice-mirroring-controller,\
     clusterrole-aggregation-controller,serviceaccount-controller,root-ca-certificate-publisher-controller";

/// A cluster as kubeadm, `firstlight apply` and flannel leave it, with real controllers. The test plays kubelets and the scheduler.
pub struct Inside {
    pub cluster: Cluster,
    /// A member of `system:masters`, which passes everything.
    pub admin: Client,
    _controllers: Process,
}

impl Inside {
    /// Returns the cluster that the tests of this program share. Each of them has nodes and namespaces of its own.
    pub fn shared() -> &'static Inside {
        static SHARED: OnceLock<Inside> = OnceLock::new();
        SHARED.get_or_init(|| Inside::start(&settings()))
    }

    /// Starts a separate cluster with these settings of the services.
    pub fn start(settings: &ServiceSettings) -> Inside {
        Inside::start_on(Cluster::start_with(PLUGINS, &[]), settings)
    }

    /// Makes a separate cluster of this one.
    pub fn start_on(cluster: Cluster, settings: &ServiceSettings) -> Inside {
        let admin = cluster.client(&Stop::new()).within(PATIENCE);
        admin.wait_ready(&mut |_| {}).unwrap();
        let inside = Inside {
            _controllers: cluster.start_restricted_controllers(CONTROLLERS),
            cluster,
            admin,
        };
        inside.bind(
            "kubeadm:cluster-admins",
            "cluster-admin",
            &json!({"kind": "Group", "name": "kubeadm:cluster-admins"}),
        );
        inside.install_flannel();
        inside.apply(settings);
        inside.wait_for_policies();
        inside
    }

    /// Waits until the API server judges by the policies, which takes it seconds: until the last of them holds.
    fn wait_for_policies(&self) {
        let removed = CONFIG_MAPS
            .in_namespace("kube-system")
            .named("join-removed-nodes");
        self.mark_removed("probe");
        let kubelet = self.cluster.client_of("system:node:probe", "system:nodes");
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "probe"}});
        eventually("the policies hold", || {
            let tried = kubelet.try_apply(&NODES.named("probe"), &node);
            tried.is_err_and(|error| error.to_string().contains("was removed"))
        });
        self.admin.delete(&removed).unwrap();
    }

    /// Writes down that this node was removed.
    pub fn mark_removed(&self, node: &str) {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "join-removed-nodes", "namespace": "kube-system"},
            "data": {node: ""},
        });
        let at = Object::of(&map).unwrap();
        self.admin.create_if_absent(&at.collection(), &map).unwrap();
        self.admin.merge(&at, &map).unwrap();
    }

    /// Makes an account with these rules in the whole cluster, as the charts of many agents do, and puts its pod onto a node, whose
    /// root then has the token. Returns the client with this token.
    pub fn agent_on(&self, kubelet: &Kubelet, account: (&str, &str), rules: &Value) -> Client {
        let (namespace, name) = account;
        let role = format!("{namespace}:{name}");
        let at = CLUSTER_ROLES.named(&role);
        if self.admin.find(&at).unwrap().is_none() {
            let object = json!({"metadata": {"name": role}, "rules": rules});
            self.admin.create(&CLUSTER_ROLES.all(), &object).unwrap();
            let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
            self.bind(&role, &role, &subject);
        }
        self.token_on(kubelet, account, &format!("{name}-{}", kubelet.name))
    }

    /// Does what `firstlight apply` does without a wait for pods.
    pub fn apply(&self, settings: &ServiceSettings) {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            skip: &[],
            backups: dir.path(),
            wait: None,
            is_dry_run: false,
            keeps_superseded: false,
            control_planes: &[],
        };
        services::apply(&self.admin, settings, &options, &mut |_| {}).unwrap();
    }

    fn bind(&self, name: &str, role: &str, subject: &Value) {
        let binding = json!({
            "metadata": {"name": name}, "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        });
        self.admin
            .create(&CLUSTER_ROLE_BINDINGS.all(), &binding)
            .unwrap();
    }

    /// Flannel's account with the rights of its chart (rbac.yaml of v0.28.10).
    fn install_flannel(&self) {
        let (namespace, account) = FLANNEL;
        self.namespace(namespace);
        let named = json!({"metadata": {"name": account}});
        self.admin
            .create_if_absent(&SERVICE_ACCOUNTS.in_namespace(namespace), &named)
            .unwrap();
        let role = json!({"metadata": {"name": "flannel"}, "rules": [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        ]});
        self.admin.create(&CLUSTER_ROLES.all(), &role).unwrap();
        let subject = json!({"kind": "ServiceAccount", "name": account, "namespace": namespace});
        self.bind("flannel", "flannel", &subject);
    }

    /// Makes a namespace, unless it is there.
    pub fn namespace(&self, name: &str) {
        self.admin
            .create_if_absent(&NAMESPACES.all(), &json!({"metadata": {"name": name}}))
            .unwrap();
    }

    /// Returns the user of kubeadm's admin.conf, which is bound to cluster-admin and is not in `system:masters`.
    pub fn kubeadm(&self) -> Client {
        self.cluster
            .client_of("kubernetes-admin", "kubeadm:cluster-admins")
    }

    /// Registers a worker, as its kubelet does.
    pub fn worker(&self, name: &str, address: &str) -> Kubelet<'_> {
        let user = format!("system:node:{name}");
        let client = self.cluster.client_of(&user, "system:nodes");
        let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}}});
        let node = client.create(&NODES.all(), &node).unwrap();
        let kubelet = Kubelet {
            inside: self,
            name: name.into(),
            uid: uid(&node),
            address: address.into(),
            client,
        };
        kubelet.report().unwrap();
        kubelet
    }

    /// Registers a control plane, as its kubelet and kubeadm's phase mark-control-plane do.
    pub fn control_plane(&self, name: &str, address: &str) -> Kubelet<'_> {
        let kubelet = self.worker(name, address);
        let mark = json!({
            "metadata": {"labels": {"node-role.kubernetes.io/control-plane": "", "node.kubernetes.io/exclude-from-external-load-balancers": ""}},
            "spec": {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]},
        });
        self.kubeadm().merge(&NODES.named(name), &mark).unwrap();
        kubelet
    }

    /// Makes a namespace with a tenant, a user with the role `edit` there; returns its client.
    pub fn tenant(&self, namespace: &str) -> Client {
        self.namespace(namespace);
        let binding = json!({
            "metadata": {"name": "edit"}, "subjects": [{"kind": "User", "name": namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        });
        self.admin
            .create(&ROLE_BINDINGS.in_namespace(namespace), &binding)
            .unwrap();
        let tenant = self.cluster.client_of(namespace, "");
        // the role gets its rules from other roles by a controller, the account of pods by another one
        eventually("the tenant may make pods", || {
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try", "namespace": namespace},
                "spec": {"containers": [{"name": "a", "image": "a"}]}});
            let at = PODS.in_namespace(namespace).named("try");
            tenant.try_apply(&at, &pod).is_ok()
        });
        tenant
    }

    /// Puts a pod of this account onto the node, as the scheduler does, and returns its token, which the kubelet requests. Root on
    /// the node has this token.
    pub fn token_on(&self, kubelet: &Kubelet, account: (&str, &str), pod: &str) -> Client {
        let uid = add_pod(
            &self.admin,
            account,
            pod,
            &kubelet.name,
            token_volume(&[""]),
        );
        let token = kubelet.eventual_token(account, pod, &uid, &[]);
        self.cluster.client_with(&token)
    }

    /// Returns the nodes for which the DaemonSet controller has made pods of this DaemonSet in kube-system.
    pub fn nodes_of(&self, daemon_set: &str) -> Vec<String> {
        let selector = Selector::labels(&format!("k8s-app={daemon_set}"));
        let pods = PODS.in_namespace("kube-system");
        let pods = self.admin.list(&pods, &selector).unwrap().items;
        let is_of_set = |pod: &&Value| pod["metadata"]["ownerReferences"][0]["kind"] == "DaemonSet";
        // the scheduler puts the pod where this wants it
        let wanted = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchFields/0/values/0";
        let node = |pod: &Value| pod.pointer(wanted).unwrap().as_str().unwrap().to_owned();
        pods.iter().filter(is_of_set).map(node).collect()
    }

    /// Returns a client with the token of flannel's pod on this node.
    pub fn flannel_on(&self, kubelet: &Kubelet) -> Client {
        self.token_on(kubelet, FLANNEL, &format!("kube-flannel-{}", kubelet.name))
    }
}

/// A node's kubelet, with its own client certificate. Root on the node has it.
pub struct Kubelet<'a> {
    inside: &'a Inside,
    pub name: String,
    pub uid: String,
    pub address: String,
    pub client: Client,
}

impl Kubelet<'_> {
    /// Writes the node's status, as the kubelet does every few minutes. It keeps the conditions of others.
    pub fn report(&self) -> Result<Value, Error> {
        let mut conditions = self.node()["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions.retain(|condition| condition["type"] != "Ready");
        conditions.push(json!({"type": "Ready", "status": "True", "reason": "KubeletReady"}));
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}],
            "conditions": conditions,
        }});
        self.client
            .merge(&NODES.named(&self.name).subresource("status"), &status)
    }

    /// Requests a token of this pod. Without an audience it is for the API server; a kubelet gets no audience but those of the
    /// volumes of the pod.
    pub fn token(
        &self,
        account: (&str, &str),
        pod: &str,
        pod_uid: &str,
        audiences: &[&str],
    ) -> Result<String, Error> {
        let request = json!({"spec": {
            "audiences": audiences, "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": pod_uid},
        }});
        let (namespace, account) = account;
        let at = SERVICE_ACCOUNTS
            .in_namespace(namespace)
            .named(account)
            .subresource("token");
        let answer = self.client.create_subresource(&at, &request)?;
        Ok(answer["status"]["token"].as_str().unwrap().to_owned())
    }

    /// Returns a token like [`Kubelet::token`], as soon as the API server knows that the pod is on this node.
    pub fn eventual_token(
        &self,
        account: (&str, &str),
        pod: &str,
        pod_uid: &str,
        audiences: &[&str],
    ) -> String {
        let start = Instant::now();
        loop {
            match self.token(account, pod, pod_uid, audiences) {
                Err(error) if error.to_string().contains("no relationship found") => {
                    assert!(start.elapsed() < PATIENCE, "{error}");
                    thread::sleep(Duration::from_millis(100));
                }
                token => return token.unwrap(),
            }
        }
    }

    /// Returns the node as it is.
    pub fn node(&self) -> Value {
        self.inside.admin.get(&NODES.named(&self.name)).unwrap()
    }

    /// Makes a mirror pod on the host's network, as kubelets do for static pods, and reports it as ready.
    pub fn mirror(&self, namespace: &str, name: &str, labels: &Value) -> Result<Value, Error> {
        self.mirror_with(namespace, name, labels, &json!({}))
    }

    /// The same with other annotations; null for none.
    pub fn mirror_with(
        &self,
        namespace: &str,
        name: &str,
        labels: &Value,
        annotations: &Value,
    ) -> Result<Value, Error> {
        let pods = PODS.in_namespace(namespace);
        let mut pod = self.mirror_pod(name, labels);
        for (key, value) in annotations.as_object().unwrap() {
            pod["metadata"]["annotations"][key] = value.clone();
            if value.is_null() {
                let annotations = pod["metadata"]["annotations"].as_object_mut();
                annotations.unwrap().remove(key);
            }
        }
        let made = self.client.create(&pods, &pod)?;
        let status = json!({"status": {
            "phase": "Running", "podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": self.address,
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}],
        }});
        self.client
            .merge(&pods.named(name).subresource("status"), &status)?;
        Ok(made)
    }

    fn mirror_pod(&self, name: &str, labels: &Value) -> Value {
        json!({
            "metadata": {
                "name": name, "labels": labels,
                "annotations": {
                    "kubernetes.io/config.mirror": "a", "kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "a",
                    ETCD_ENDPOINT: format!("https://{}:2379", self.address),
                },
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": self.uid, "controller": true}],
            },
            "spec": {"nodeName": self.name, "hostNetwork": true, "containers": [{"name": "a", "image": "a"}]},
        })
    }
}

/// The volume of a pod with tokens for these audiences; the empty one is the API server.
pub fn token_volume(audiences: &[&str]) -> Value {
    let source = |audience: &&str| {
        if audience.is_empty() {
            json!({"serviceAccountToken": {"path": "token"}})
        } else {
            json!({"serviceAccountToken": {"path": audience, "audience": audience}})
        }
    };
    let sources: Vec<_> = audiences.iter().map(source).collect();
    json!([{"name": "tokens", "projected": {"sources": sources}}])
}

/// The services with everything on that gives them rights.
pub fn settings() -> ServiceSettings {
    ServiceSettings {
        watch: Some("60".into()),
        watch_action: Some("taint".into()),
        watch_issuer: Some("https://results.example.com".into()),
        ..manifests::settings(POLICY)
    }
}

pub fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Waits until something is so.
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(
            start.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

/// Checks that the API server forbids something, and that its message has this part.
pub fn forbidden(result: Result<Value, Error>, part: &str) {
    match result {
        Ok(object) => panic!("accepted, but expected {part}: {object}"),
        Err(error) => {
            assert_eq!(error.code(), Some(403), "{error}");
            assert!(error.to_string().contains(part), "expected {part}: {error}");
        }
    }
}

/// Returns the definition of a kind in this group, whose objects have no namespace and any fields.
pub fn definition(group: &str, version: &str, kind: &str) -> Value {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version = json!({"name": version, "served": true, "storage": true, "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema}});
    let singular = kind.to_lowercase();
    let plural = format!("{singular}s");
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {"group": group, "scope": "Cluster", "versions": [version],
            "names": {"kind": kind, "plural": plural, "singular": singular}}})
}
