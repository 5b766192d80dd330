//! The objects of the Kubernetes API as types, with all the fields that Firstlight reads, and only these.
//!
//! What the API server leaves out, or writes as null (Go does for some empty lists and unknown times), is empty here, and so is a field of
//! another type: it does not validate all that a kubelet writes. These types would lose other fields, so an object is written as a patch, or whole
//! ([`Client::find_whole`](crate::client::Client::find_whole)). A kind whose name another type has ends in `Object`.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use zeroize::{Zeroize, Zeroizing};

use super::resource::*;

/// Makes types of their fields, which Kubernetes' API reference describes. In brackets stand the kinds that are read as the type. A field
/// has its name in Rust, or `= "NAME"`.
macro_rules! objects {
    ($($(#[$of_type:meta])* $name:ident $([$($resource:expr),*])? { $($field:ident $(= $key:literal)?: $type:ty),* $(,)? })*) => {
        $(
            $(#[$of_type])*
            #[allow(missing_docs)]
            #[derive(Debug, Clone, Default, PartialEq)]
            pub struct $name {
                $(pub $field: $type,)*
            }

            impl FromJson for $name {
                fn from_json(value: Value) -> Option<$name> {
                    let Value::Object(mut fields) = value else {
                        return None;
                    };
                    Some($name {
                        $($field: FromJson::from_json(take(&mut fields, key!($field $(= $key)?))).unwrap_or_default(),)*
                    })
                }
            }

            impl<'de> Deserialize<'de> for $name {
                fn deserialize<D: Deserializer<'de>>(object: D) -> Result<$name, D::Error> {
                    let object = $name::from_json(Value::deserialize(object)?);
                    object.ok_or_else(|| D::Error::custom("expected an object"))
                }
            }

            $(impl ObjectKind for $name {
                const RESOURCES: &'static [Resource] = &[$($resource),*];

                fn read(object: Value) -> Option<$name> {
                    $name::from_json(object)
                }
            })?
        )*
    };
}

macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident = $key:literal) => {
        $key
    };
}

/// What is read from JSON. The derived code of serde would be a fifth of a megabyte larger in each service, and refuse an object, and with
/// it the list that it is in, for one field of another type.
trait FromJson: Sized + Default {
    /// Returns the value; `None` if it is null, or of another type.
    fn from_json(value: Value) -> Option<Self>;
}

impl FromJson for String {
    fn from_json(value: Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }
}

impl FromJson for bool {
    fn from_json(value: Value) -> Option<bool> {
        value.as_bool()
    }
}

impl FromJson for i64 {
    fn from_json(value: Value) -> Option<i64> {
        value.as_i64()
    }
}

impl FromJson for Value {
    fn from_json(value: Value) -> Option<Value> {
        (!value.is_null()).then_some(value)
    }
}

/// Something is there, whatever it is.
impl FromJson for IgnoredAny {
    fn from_json(value: Value) -> Option<IgnoredAny> {
        (!value.is_null()).then_some(IgnoredAny)
    }
}

impl<T: FromJson> FromJson for Option<T> {
    fn from_json(value: Value) -> Option<Option<T>> {
        Some(T::from_json(value))
    }
}

impl<T: FromJson> FromJson for Vec<T> {
    fn from_json(value: Value) -> Option<Vec<T>> {
        match value {
            Value::Array(list) => Some(list.into_iter().filter_map(T::from_json).collect()),
            _ => None,
        }
    }
}

impl FromJson for BTreeMap<String, String> {
    fn from_json(value: Value) -> Option<BTreeMap<String, String>> {
        let Value::Object(fields) = value else {
            return None;
        };
        let texts = fields
            .into_iter()
            .filter_map(|(key, value)| Some((key, String::from_json(value)?)));
        Some(texts.collect())
    }
}

/// Takes a field out of an object, by its name in Rust.
fn take(fields: &mut Map<String, Value>, name: &str) -> Value {
    let mut words = name.split('_');
    let mut key = words.next().unwrap_or_default().to_owned();
    for word in words {
        let (first, rest) = word.split_at(1);
        key.extend([&*first.to_ascii_uppercase(), rest]);
    }
    fields.remove(&key).unwrap_or_default()
}

objects! {
    /// The metadata of an object. The namespace is empty for a kind that has none.
    ObjectMeta {
        name: String, namespace: String, uid: String, resource_version: String, generation: i64,
        labels: BTreeMap<String, String>, annotations: BTreeMap<String, String>,
        owner_references: Vec<OwnerReference>, finalizers: Vec<String>,
        creation_timestamp: Option<String>, deletion_timestamp: Option<String>,
    }
    OwnerReference { api_version: String, kind: String, name: String, uid: String, controller: bool }
    /// What is so at an object, as its controller sees it.
    Condition {
        kind = "type": String, status: String, reason: String, message: String,
        last_transition_time: Option<String>, last_heartbeat_time: Option<String>,
    }
    /// An object of any kind.
    AnyObject [] { metadata: ObjectMeta }

    ConfigMap [CONFIG_MAPS] {
        metadata: ObjectMeta, data: BTreeMap<String, String>, binary_data: BTreeMap<String, String>,
    }
    /// What is not secret of a Secret.
    SecretMeta { name: String, resource_version: String }

    NodeObject [NODES] { metadata: ObjectMeta, spec: NodeSpec, status: NodeReport }
    NodeSpec { taints: Vec<Taint>, unschedulable: bool }
    Taint { key: String, value: String }
    /// What the kubelet of a Node says.
    NodeReport {
        conditions: Vec<Condition>, addresses: Vec<NodeAddress>, node_info: NodeInfo, daemon_endpoints: DaemonEndpoints,
    }
    NodeAddress { kind = "type": String, address: String }
    NodeInfo { boot_id = "bootID": String, kubelet_version: String }
    DaemonEndpoints { kubelet_endpoint: DaemonEndpoint }
    DaemonEndpoint { port = "Port": i64 }

    Lease [LEASES] { metadata: ObjectMeta, spec: LeaseSpec }
    LeaseSpec { holder_identity: String, acquire_time: String, renew_time: String, lease_transitions: i64 }

    ServiceObject [SERVICES] { metadata: ObjectMeta, spec: ServiceSpec, status: ServiceStatus }
    ServiceSpec { external_ips = "externalIPs": Vec<String>, ports: Vec<ServicePort> }
    ServicePort { port: i64, node_port: Option<i64> }
    ServiceStatus { load_balancer: BalancerStatus }
    BalancerStatus { ingress: Vec<BalancerIngress> }
    /// An address of a load balancer; empty if it has a name.
    BalancerIngress { ip: String }
    EndpointSlice [ENDPOINT_SLICES] { endpoints: Option<Vec<SliceEndpoint>> }
    SliceEndpoint { addresses: Vec<String> }

    Pod [PODS] { metadata: ObjectMeta, spec: PodSpec, status: PodStatus }
    /// What runs in a Pod. Old objects name the account in the second of its fields.
    PodSpec {
        node_name: String, host_network: bool, host_pid = "hostPID": bool,
        service_account_name: String, service_account: String, containers: Vec<Container>, volumes: Vec<PodVolume>,
    }
    Container {
        name: String, image: String, command: Vec<String>, args: Vec<String>, ports: Vec<ContainerPort>,
        security_context: SecurityContext,
    }
    ContainerPort { name: String }
    SecurityContext { privileged: bool }
    /// A volume of a Pod: one of these.
    PodVolume {
        name: String, host_path: HostPath, empty_dir: Option<IgnoredAny>, secret: SecretSource,
        persistent_volume_claim: ClaimSource, ephemeral: Option<IgnoredAny>,
    }
    HostPath { path: String }
    SecretSource { secret_name: String }
    ClaimSource { claim_name: String }
    /// What the kubelet says of a Pod.
    PodStatus {
        phase: String, reason: String, message: String, conditions: Vec<Condition>,
        init_container_statuses: Vec<ContainerStatus>, container_statuses: Vec<ContainerStatus>,
    }
    ContainerStatus { name: String, state: ContainerState, last_state: ContainerState }
    /// The state of a container: one of these.
    ContainerState {
        waiting: Option<WaitingContainer>, running: Option<IgnoredAny>, terminated: Option<EndedContainer>,
    }
    WaitingContainer { reason: String, message: String }
    EndedContainer { exit_code: i64, message: String }

    /// A DaemonSet, a Deployment or a StatefulSet. In a list, none has its kind.
    Workload [DAEMON_SETS, DEPLOYMENTS, STATEFUL_SETS] {
        kind: String, metadata: ObjectMeta, spec: WorkloadSpec, status: WorkloadStatus,
    }
    WorkloadSpec {
        replicas: Option<i64>, selector: LabelSelector, update_strategy: UpdateStrategy, template: PodTemplate,
    }
    LabelSelector { match_labels: BTreeMap<String, String> }
    UpdateStrategy { kind = "type": String, rolling_update: RollingUpdate }
    /// Which Pods of a StatefulSet stay: those with a lower number.
    RollingUpdate { partition: i64 }
    PodTemplate { spec: PodSpec }
    /// What the controller of a workload says: of a DaemonSet numbers of nodes, else of replicas; of a StatefulSet its revisions, too.
    WorkloadStatus {
        observed_generation: i64, replicas: i64, updated_replicas: i64, available_replicas: i64, ready_replicas: i64,
        desired_number_scheduled: i64, updated_number_scheduled: i64, number_available: i64,
        current_revision: String, update_revision: String, conditions: Vec<Condition>,
    }

    NetworkPolicy [NETWORK_POLICIES] { metadata: ObjectMeta, spec: NetworkPolicySpec }
    NetworkPolicySpec { ingress: Vec<IngressRule>, egress: Vec<EgressRule> }
    /// Who may connect to which ports; everybody if nobody is named.
    IngressRule { ports: Vec<PolicyPort>, from: Option<Value> }
    EgressRule { ports: Value }
    /// A port, or its name.
    PolicyPort { port: Value }

    /// A Role or a ClusterRole.
    RbacRole [ROLES, CLUSTER_ROLES] { metadata: ObjectMeta, rules: Option<Vec<PolicyRule>> }
    /// A rule of a role. `*` stands for all, and so do no names.
    PolicyRule { api_groups: Vec<String>, resources: Vec<String>, resource_names: Vec<String>, verbs: Vec<String> }
    /// A RoleBinding or a ClusterRoleBinding.
    RbacBinding [ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS] {
        metadata: ObjectMeta, role_ref: RoleRef, subjects: Vec<RbacSubject>,
    }
    RoleRef { kind: String, name: String }
    RbacSubject { kind: String, name: String, namespace: String }
    /// A ValidatingAdmissionPolicyBinding.
    PolicyBinding [VALIDATING_ADMISSION_POLICY_BINDINGS] { spec: PolicyBindingSpec }
    PolicyBindingSpec { policy_name: String, validation_actions: Vec<String> }

    /// A TokenReview, without the token.
    TokenReview [TOKEN_REVIEWS] { status: TokenStatus }
    TokenStatus { authenticated: bool, audiences: Vec<String>, user: TokenUser, error: String }
    TokenUser { username: String, extra: TokenExtra }
    /// The node of the Pod whose token it is.
    TokenExtra {
        node_name = "authentication.kubernetes.io/node-name": Vec<String>,
        node_uid = "authentication.kubernetes.io/node-uid": Vec<String>,
    }
    SelfSubjectReview [SELF_SUBJECT_REVIEWS] { status: SelfSubjectStatus }
    SelfSubjectStatus { user_info: TokenUser }

    CertificateSigningRequest [CERTIFICATE_SIGNING_REQUESTS] {
        metadata: ObjectMeta, spec: SigningSpec, status: SigningStatus,
    }
    /// What a request asks for, in PEM in base64, and who asks, as the API server has authenticated them.
    SigningSpec {
        signer_name: String, username: String, groups: Vec<String>, usages: Vec<String>, request: String,
    }
    SigningStatus { conditions: Vec<Condition>, certificate: String }

    VolumeAttachment [VOLUME_ATTACHMENTS] { metadata: ObjectMeta, spec: AttachmentSpec, status: AttachmentStatus }
    AttachmentSpec { attacher: String, node_name: String, source: AttachmentSource }
    AttachmentSource { persistent_volume_name: Option<String> }
    AttachmentStatus { attached: bool }
    PersistentVolume [PERSISTENT_VOLUMES] { metadata: ObjectMeta, spec: PersistentVolumeSpec }
    PersistentVolumeSpec { csi: CsiSource, claim_ref: ClaimRef }
    CsiSource { driver: String, volume_handle: String }
    ClaimRef { uid: String }
    PersistentVolumeClaim [PERSISTENT_VOLUME_CLAIMS] { metadata: ObjectMeta, spec: ClaimSpec }
    ClaimSpec { volume_name: String }
    CsiDriver [CSI_DRIVERS] { metadata: ObjectMeta, spec: CsiDriverSpec }
    /// Volumes are attached before they are mounted if the driver does not say otherwise.
    CsiDriverSpec { attach_required: Option<bool> }

    // of Constellation
    JoiningNode [JOINING_NODES] { metadata: ObjectMeta, spec: JoiningSpec }
    JoiningSpec { name: String, deadline: Option<String> }
    NodeVersionObject [NODE_VERSIONS] { spec: NodeVersionSpec }
    NodeVersionSpec { kubernetes_components_reference: String }
    ScalingGroup [SCALING_GROUPS] { spec: ScalingSpec, status: ScalingStatus }
    ScalingSpec { group_id: String }
    ScalingStatus { image_reference: String }

    /// What Cilium knows of a Node, which has the same name.
    CiliumNode [CILIUM_NODES] { metadata: ObjectMeta, spec: CiliumSpec }
    CiliumSpec { addresses: Vec<CiliumAddress> }
    CiliumAddress { kind = "type": String, ip: String }
}

/// A Secret. Its annotations, which may have a copy of the data, are not read.
#[derive(Default)]
pub struct SecretObject {
    /// The metadata.
    pub metadata: SecretMeta,
    /// Whether the data never change.
    pub immutable: bool,
    /// The data.
    pub data: SecretData,
}

impl ObjectKind for SecretObject {
    const RESOURCES: &'static [Resource] = &[SECRETS];

    fn read(object: Value) -> Option<SecretObject> {
        let Value::Object(mut fields) = object else {
            return None;
        };
        let mut metadata = take(&mut fields, "metadata");
        let of = |name: &str| metadata[name].as_str().unwrap_or_default().to_owned();
        let read = SecretMeta {
            name: of("name"),
            resource_version: of("resourceVersion"),
        };
        let data = BTreeMap::from_json(take(&mut fields, "data"));
        let secret = SecretObject {
            metadata: read,
            immutable: take(&mut fields, "immutable") == true,
            data: SecretData(data.unwrap_or_default()),
        };
        wipe(&mut metadata);
        wipe(&mut Value::Object(fields));
        Some(secret)
    }
}

/// Wipes every text in an object that contains a secret.
pub fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(items) => items.iter_mut().for_each(wipe),
        Value::Object(fields) => fields.values_mut().for_each(wipe),
        _ => {}
    }
}

/// The data of a Secret: values in base64 by their keys. They are wiped when this is dropped.
#[derive(Default)]
pub struct SecretData(BTreeMap<String, String>);

impl SecretData {
    /// Returns a value in base64; empty if there is none.
    pub fn text(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    /// Returns a value; `None` if there is none, or if it is not base64.
    pub fn bytes(&self, key: &str) -> Option<Zeroizing<Vec<u8>>> {
        let bytes = BASE64_STANDARD.decode(self.0.get(key)?).ok()?;
        Some(Zeroizing::new(bytes))
    }
}

impl Drop for SecretData {
    fn drop(&mut self) {
        self.0.values_mut().for_each(Zeroize::zeroize);
    }
}

impl ObjectMeta {
    /// Reads the metadata of a whole object; empty if they are not valid.
    pub fn of(object: &Value) -> ObjectMeta {
        ObjectMeta::from_json(object["metadata"].clone()).unwrap_or_default()
    }

    /// Returns `NAMESPACE/NAME`.
    pub fn place(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns a label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }

    /// Returns an annotation.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.get(name).map(String::as_str)
    }

    /// Returns the controller that made the object.
    pub fn controller(&self) -> Option<&OwnerReference> {
        self.owner_references.iter().find(|owner| owner.controller)
    }

    /// Returns whether somebody has deleted the object.
    pub fn is_ending(&self) -> bool {
        self.deletion_timestamp.is_some()
    }
}

/// Returns a condition by its name.
pub fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.kind == kind)
}

/// Returns whether a condition is there and true.
pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    condition(conditions, kind).is_some_and(|condition| condition.status == "True")
}

impl ConfigMap {
    /// Returns a text; empty if there is none.
    pub fn text(&self, key: &str) -> &str {
        self.data.get(key).map_or("", String::as_str)
    }
}

impl NodeObject {
    /// Returns the addresses of a kind, such as `InternalIP`.
    pub fn addresses(&self, kind: &str) -> impl Iterator<Item = &str> {
        let all = self.status.addresses.iter();
        all.filter(move |address| address.kind == kind)
            .map(|address| address.address.as_str())
    }

    /// Returns whether Kubernetes' node controller has not heard of the kubelet for some time. The machine may run nevertheless, for
    /// example without a network.
    pub fn is_silent(&self) -> bool {
        condition(&self.status.conditions, "Ready").is_some_and(|it| it.status == "Unknown")
    }

    /// Returns whether its kubelet is ready.
    pub fn is_ready(&self) -> bool {
        is_true(&self.status.conditions, "Ready")
    }
}

impl Pod {
    /// Returns whether all of its containers have ended for ever.
    pub fn has_ended(&self) -> bool {
        ["Succeeded", "Failed"].contains(&self.status.phase.as_str())
    }

    /// Returns whether it is ready.
    pub fn is_ready(&self) -> bool {
        is_true(&self.status.conditions, "Ready")
    }

    /// Returns what the kubelet says of the containers, first of those that run first.
    pub fn containers(&self) -> impl Iterator<Item = &ContainerStatus> {
        let first = self.status.init_container_statuses.iter();
        first.chain(&self.status.container_statuses)
    }
}

impl Container {
    /// Returns its command line.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        let words = self.command.iter().chain(&self.args);
        words.map(String::as_str)
    }
}

impl Workload {
    /// Returns the first container of its Pods.
    pub fn container(&self) -> Option<&Container> {
        self.spec.template.spec.containers.first()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn what_go_leaves_out_or_writes_as_null_is_empty() {
        let bare = json!({"metadata": {"creationTimestamp": null}, "spec": {}, "status": {}});
        for object in [json!({}), bare] {
            let node: NodeObject = from_value(object.clone()).unwrap();
            assert_eq!(node, NodeObject::default());
            assert_eq!(from_value::<Pod>(object).unwrap(), Pod::default());
        }
        let times = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null});
        let pod = json!({"status": {"conditions": [times]}});
        assert!(from_value::<Pod>(pod).unwrap().is_ready());
        let role: RbacRole = from_value(json!({"rules": null})).unwrap();
        let slice: EndpointSlice = from_value(json!({"endpoints": null})).unwrap();
        assert_eq!((role.rules, slice.endpoints), (None, None));
    }

    /// A kubelet can write such numbers and times. One Node must not hide the others of its list.
    #[test]
    fn a_field_of_another_type_is_empty_and_the_others_are_read() {
        let node: NodeObject = from_value(json!({
            "metadata": {"name": "n", "labels": {"a": 1, "b": "c"}, "ownerReferences": [7, {"name": "o"}]},
            "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": -1}}, "conditions": "none", "nodeInfo": []},
        }))
        .unwrap();
        assert_eq!(
            (&*node.metadata.name, node.metadata.label("b")),
            ("n", Some("c"))
        );
        assert_eq!(
            (
                node.metadata.labels.len(),
                node.metadata.owner_references.len()
            ),
            (1, 1)
        );
        let status = &node.status;
        assert_eq!(status.daemon_endpoints.kubelet_endpoint.port, -1);
        assert!(status.conditions.is_empty() && status.node_info == NodeInfo::default());
        let zero =
            json!({"spec": {"holderIdentity": "h", "renewTime": null, "leaseTransitions": "3"}});
        let lease: Lease = from_value(zero).unwrap();
        let spec = (
            &*lease.spec.holder_identity,
            &*lease.spec.renew_time,
            lease.spec.lease_transitions,
        );
        assert_eq!(spec, ("h", "", 0));
        assert!(from_value::<Lease>(json!([])).is_err() && Lease::read(json!(1)).is_none());
    }

    #[test]
    fn fields_have_the_names_of_the_api() {
        let node: NodeObject = from_value(json!({
            "metadata": {"resourceVersion": "7", "ownerReferences": [{"apiVersion": "apps/v1"}]},
            "status": {
                "nodeInfo": {"bootID": "b", "kubeletVersion": "v1"}, "daemonEndpoints": {"kubeletEndpoint": {"Port": 1}},
                "addresses": [{"type": "Hostname", "address": "n"}, {"type": "InternalIP", "address": "10.0.0.1"}],
            },
        }))
        .unwrap();
        let (metadata, status) = (&node.metadata, &node.status);
        assert_eq!(metadata.resource_version, "7");
        assert_eq!(metadata.owner_references[0].api_version, "apps/v1");
        let info = &status.node_info;
        assert_eq!((&*info.boot_id, &*info.kubelet_version), ("b", "v1"));
        assert_eq!(status.daemon_endpoints.kubelet_endpoint.port, 1);
        assert!(node.addresses("InternalIP").eq(["10.0.0.1"]));
    }

    #[test]
    fn of_a_secret_only_the_data_and_the_name_are_read() {
        let secret = json!({"metadata": {"name": "a", "annotations": {"copy": "eA=="}}, "data": {"b": "eA==", "c": "?"}});
        let secret: SecretObject = SecretObject::read(secret).unwrap();
        assert_eq!(
            (&*secret.metadata.name, secret.data.text("b")),
            ("a", "eA==")
        );
        assert_eq!(*secret.data.bytes("b").unwrap(), b"x");
        assert!(secret.data.bytes("c").is_none() && secret.data.bytes("d").is_none());
    }
}
