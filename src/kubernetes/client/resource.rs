//! Paths of the API, such as `/api/v1/namespaces/kube-system/configmaps/join-config` (Kubernetes' API conventions, "Resources").

use std::fmt;

use serde_json::Value;

use super::Error;

/// A kind of object: its API group, version and plural name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resource {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    namespaced: bool,
}

/// Objects as a type, which has the fields that are read ([`objects`](crate::objects)).
pub trait ObjectKind: Sized {
    /// The kinds of the API that it is read from. Empty for any.
    const RESOURCES: &'static [Resource];

    /// Takes the fields out of an object; `None` if the JSON is no object.
    fn read(object: Value) -> Option<Self>;
}

impl ObjectKind for Value {
    const RESOURCES: &'static [Resource] = &[];

    fn read(object: Value) -> Option<Value> {
        Some(object)
    }
}

/// An object, or a subresource of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Object {
    resource: Resource,
    pub(super) namespace: Option<String>,
    name: String,
    subresource: Option<&'static str>,
}

/// The objects of a kind, in one namespace or in all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Collection {
    resource: Resource,
    namespace: Option<String>,
}

/// ConfigMaps.
pub const CONFIG_MAPS: Resource = Resource::namespaced("", "v1", "configmaps");
/// Events of the current API.
pub const EVENTS: Resource = Resource::namespaced("events.k8s.io", "v1", "events");
/// Nodes.
pub const NODES: Resource = Resource::cluster("", "v1", "nodes");
/// Namespaces.
pub const NAMESPACES: Resource = Resource::cluster("", "v1", "namespaces");
/// Pods.
pub const PODS: Resource = Resource::namespaced("", "v1", "pods");
/// Secrets, including bootstrap tokens.
pub const SECRETS: Resource = Resource::namespaced("", "v1", "secrets");
/// ServiceAccounts.
pub const SERVICE_ACCOUNTS: Resource = Resource::namespaced("", "v1", "serviceaccounts");
/// Services.
pub const SERVICES: Resource = Resource::namespaced("", "v1", "services");
/// DaemonSets.
pub const DAEMON_SETS: Resource = Resource::namespaced("apps", "v1", "daemonsets");
/// Deployments.
pub const DEPLOYMENTS: Resource = Resource::namespaced("apps", "v1", "deployments");
/// Jobs.
pub const JOBS: Resource = Resource::namespaced("batch", "v1", "jobs");
/// StatefulSets.
pub const STATEFUL_SETS: Resource = Resource::namespaced("apps", "v1", "statefulsets");
/// CertificateSigningRequests, such as those of kubelets.
pub const CERTIFICATE_SIGNING_REQUESTS: Resource =
    Resource::cluster("certificates.k8s.io", "v1", "certificatesigningrequests");
/// SelfSubjectReviews: who the caller is.
pub const SELF_SUBJECT_REVIEWS: Resource =
    Resource::cluster("authentication.k8s.io", "v1", "selfsubjectreviews");
/// TokenReviews: whose a token is.
pub const TOKEN_REVIEWS: Resource =
    Resource::cluster("authentication.k8s.io", "v1", "tokenreviews");
/// The addresses of Services.
pub const ENDPOINT_SLICES: Resource =
    Resource::namespaced("discovery.k8s.io", "v1", "endpointslices");
/// PersistentVolumes.
pub const PERSISTENT_VOLUMES: Resource = Resource::cluster("", "v1", "persistentvolumes");
/// PersistentVolumeClaims.
pub const PERSISTENT_VOLUME_CLAIMS: Resource =
    Resource::namespaced("", "v1", "persistentvolumeclaims");
/// VolumeAttachments: which volume is attached to which node.
pub const VOLUME_ATTACHMENTS: Resource =
    Resource::cluster("storage.k8s.io", "v1", "volumeattachments");
/// CSIDrivers: the objects that name drivers of volumes.
pub const CSI_DRIVERS: Resource = Resource::cluster("storage.k8s.io", "v1", "csidrivers");
/// Leases.
pub const LEASES: Resource = Resource::namespaced("coordination.k8s.io", "v1", "leases");
/// NetworkPolicies.
pub const NETWORK_POLICIES: Resource =
    Resource::namespaced("networking.k8s.io", "v1", "networkpolicies");
/// PodDisruptionBudgets.
pub const POD_DISRUPTION_BUDGETS: Resource =
    Resource::namespaced("policy", "v1", "poddisruptionbudgets");
/// Roles of a namespace.
pub const ROLES: Resource = Resource::namespaced("rbac.authorization.k8s.io", "v1", "roles");
/// RoleBindings.
pub const ROLE_BINDINGS: Resource =
    Resource::namespaced("rbac.authorization.k8s.io", "v1", "rolebindings");
/// ClusterRoles.
pub const CLUSTER_ROLES: Resource =
    Resource::cluster("rbac.authorization.k8s.io", "v1", "clusterroles");
/// ClusterRoleBindings.
pub const CLUSTER_ROLE_BINDINGS: Resource =
    Resource::cluster("rbac.authorization.k8s.io", "v1", "clusterrolebindings");
/// ValidatingAdmissionPolicies.
pub const VALIDATING_ADMISSION_POLICIES: Resource = Resource::cluster(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicies",
);
/// ValidatingAdmissionPolicyBindings.
pub const VALIDATING_ADMISSION_POLICY_BINDINGS: Resource = Resource::cluster(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicybindings",
);
/// JoiningNodes of Constellation.
pub const JOINING_NODES: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "joiningnodes");
/// NodeVersions of Constellation.
pub const NODE_VERSIONS: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "nodeversions");

/// PendingNodes of Constellation.
pub const PENDING_NODES: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "pendingnodes");
/// CiliumNodes: what Cilium knows of each node.
pub const CILIUM_NODES: Resource = Resource::cluster("cilium.io", "v2", "ciliumnodes");
/// ScalingGroups of Constellation.
pub const SCALING_GROUPS: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "scalinggroups");

/// The kinds that a manifest may contain, for [`Object::of`].
static KINDS: [(&str, Resource); 18] = [
    ("ClusterRole", CLUSTER_ROLES),
    ("ClusterRoleBinding", CLUSTER_ROLE_BINDINGS),
    ("ConfigMap", CONFIG_MAPS),
    ("DaemonSet", DAEMON_SETS),
    ("Deployment", DEPLOYMENTS),
    ("Lease", LEASES),
    ("Namespace", NAMESPACES),
    ("NetworkPolicy", NETWORK_POLICIES),
    ("Pod", PODS),
    ("PodDisruptionBudget", POD_DISRUPTION_BUDGETS),
    ("Role", ROLES),
    ("RoleBinding", ROLE_BINDINGS),
    ("Secret", SECRETS),
    ("Service", SERVICES),
    ("ServiceAccount", SERVICE_ACCOUNTS),
    ("StatefulSet", STATEFUL_SETS),
    ("ValidatingAdmissionPolicy", VALIDATING_ADMISSION_POLICIES),
    (
        "ValidatingAdmissionPolicyBinding",
        VALIDATING_ADMISSION_POLICY_BINDINGS,
    ),
];

impl Resource {
    /// Creates a resource whose objects are in namespaces. The core group is empty.
    pub const fn namespaced(
        group: &'static str,
        version: &'static str,
        plural: &'static str,
    ) -> Resource {
        Resource::new(group, version, plural, true)
    }

    /// Creates a resource whose objects are not in namespaces.
    pub const fn cluster(
        group: &'static str,
        version: &'static str,
        plural: &'static str,
    ) -> Resource {
        Resource::new(group, version, plural, false)
    }

    const fn new(
        group: &'static str,
        version: &'static str,
        plural: &'static str,
        namespaced: bool,
    ) -> Resource {
        Resource {
            group,
            version,
            plural,
            namespaced,
        }
    }

    /// Returns the object of this name, of a resource without namespaces.
    pub fn named(&self, name: &str) -> Object {
        debug_assert!(!self.namespaced, "{} are in namespaces", self.plural);
        Object {
            resource: *self,
            namespace: None,
            name: name.into(),
            subresource: None,
        }
    }

    /// Panics in a test if a program reads such objects as another type.
    pub(super) fn check<K: ObjectKind>(&self) {
        debug_assert!(
            K::RESOURCES.is_empty() || K::RESOURCES.contains(self),
            "{self} are not read as {}",
            std::any::type_name::<K>()
        );
    }

    /// Returns the objects of all namespaces.
    pub fn all(&self) -> Collection {
        Collection {
            resource: *self,
            namespace: None,
        }
    }

    /// Returns the objects of one namespace.
    pub fn in_namespace(&self, namespace: &str) -> Collection {
        debug_assert!(self.namespaced, "{} are in no namespace", self.plural);
        Collection {
            resource: *self,
            namespace: Some(namespace.into()),
        }
    }

    /// Returns the `apiVersion` of its objects, such as `v1` or `apps/v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_string()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    fn path(&self, namespace: Option<&str>) -> String {
        let mut path = if self.group.is_empty() {
            "/api".to_owned()
        } else {
            format!("/apis/{}", escaped(self.group))
        };
        path += &format!("/{}", escaped(self.version));
        if let Some(namespace) = namespace {
            path += &format!("/namespaces/{}", escaped(namespace));
        }
        path + &format!("/{}", escaped(self.plural))
    }
}

impl fmt::Display for Resource {
    /// Returns the name as in RBAC rules and kubectl, such as `configmaps` or `deployments.apps`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            "" => f.write_str(self.plural),
            group => write!(f, "{}.{group}", self.plural),
        }
    }
}

impl Collection {
    /// Returns the object of this name.
    pub fn named(&self, name: &str) -> Object {
        Object {
            resource: self.resource,
            namespace: self.namespace.clone(),
            name: name.into(),
            subresource: None,
        }
    }

    /// Returns the kind of its objects.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    pub(super) fn path(&self) -> String {
        self.resource.path(self.namespace.as_deref())
    }
}

impl fmt::Display for Collection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} in {namespace}", self.resource),
            None => write!(f, "{}", self.resource),
        }
    }
}

impl Object {
    /// Returns the path of a manifest's object by its `apiVersion`, `kind` and `metadata`. Fails for an unknown kind, and for an
    /// object without the required namespace, because there is no default.
    pub fn of(object: &Value) -> Result<Object, Error> {
        let text = |pointer: &str| {
            object
                .pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let (kind, api_version) = (text("/kind"), text("/apiVersion"));
        let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
        let problem =
            |problem: String| Error::Object(format!("{api_version} {kind} {name:?}: {problem}"));
        let known = KINDS
            .iter()
            .find(|(known, resource)| *known == kind && resource.api_version() == api_version);
        let (_, resource) = known.ok_or_else(|| problem("the kind is not supported".into()))?;
        match (name.is_empty(), namespace.is_empty(), resource.namespaced) {
            (true, _, _) => Err(problem("metadata.name is missing".into())),
            (_, true, true) => Err(problem("metadata.namespace is missing".into())),
            (_, false, false) => Err(problem(format!(
                "is in no namespace, but metadata.namespace is {namespace:?}"
            ))),
            (_, false, true) => Ok(resource.in_namespace(namespace).named(name)),
            (_, true, false) => Ok(resource.named(name)),
        }
    }

    /// Returns a subresource of the object: `status`, `approval`, `token`, `eviction`, ...
    pub fn subresource(&self, subresource: &'static str) -> Object {
        Object {
            subresource: Some(subresource),
            ..self.clone()
        }
    }

    /// Returns the object's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the object's kind.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    pub(super) fn path(&self) -> String {
        let path = format!(
            "{}/{}",
            self.resource.path(self.namespace.as_deref()),
            escaped(&self.name)
        );
        self.subresource
            .map_or(path.clone(), |subresource| format!("{path}/{subresource}"))
    }

    /// Returns the collection of the object, the argument of [`Client::create`](super::Client::create).
    pub fn collection(&self) -> Collection {
        Collection {
            resource: self.resource,
            namespace: self.namespace.clone(),
        }
    }
}

impl fmt::Display for Object {
    /// Formats as `configmaps kube-system/join-config` or `nodes/status node-1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " {namespace}/{}", self.name),
            None => write!(f, " {}", self.name),
        }
    }
}

/// Escapes one segment of a path, or one value of a query: all but the unreserved characters (RFC 3986 §2.3). A segment that
/// consists of dots is escaped too, because it would change the path.
pub(super) fn escaped(text: &str) -> String {
    if text.bytes().all(|byte| byte == b'.') {
        "%2E".repeat(text.len())
    } else {
        http::encoded(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        let join_config = CONFIG_MAPS.in_namespace("kube-system").named("join-config");
        assert_eq!(
            join_config.path(),
            "/api/v1/namespaces/kube-system/configmaps/join-config"
        );
        assert_eq!(
            join_config.to_string(),
            "configmaps kube-system/join-config"
        );
        let status = NODES.named("n").subresource("status");
        assert_eq!(
            (status.path().as_str(), status.to_string().as_str()),
            ("/api/v1/nodes/n/status", "nodes/status n")
        );
        assert_eq!(DAEMON_SETS.all().path(), "/apis/apps/v1/daemonsets");
        assert_eq!(
            DAEMON_SETS.in_namespace("a").to_string(),
            "daemonsets.apps in a"
        );
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        let path = |name: &str| NODES.named(name).path();
        assert_eq!(path("a/b?c#d%"), "/api/v1/nodes/a%2Fb%3Fc%23d%25");
        assert_eq!(path(".."), "/api/v1/nodes/%2E%2E");
        assert_eq!(path("system:node"), "/api/v1/nodes/system%3Anode");
    }

    #[test]
    fn an_object_says_where_it_belongs() {
        let of = |value| {
            Object::of(&value)
                .map(|at| at.to_string())
                .map_err(|error| error.to_string())
        };
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "a"}});
        assert_eq!(
            of(role).unwrap(),
            "clusterroles.rbac.authorization.k8s.io a"
        );
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "b"}});
        assert_eq!(of(map).unwrap(), "configmaps b/a");
        let nowhere = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
        assert!(
            of(nowhere)
                .unwrap_err()
                .contains("metadata.namespace is missing")
        );
        assert!(
            of(json!({"apiVersion": "v2", "kind": "ConfigMap"}))
                .unwrap_err()
                .contains("not supported")
        );
        assert!(of(json!(1)).is_err());
    }
}
