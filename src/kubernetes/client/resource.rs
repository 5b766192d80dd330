//! Where things are in the API: `/api/v1/namespaces/kube-system/configmaps/join-config` and the like
//! (Kubernetes' API conventions, "Resources").

use std::fmt;

use serde_json::Value;

use super::Error;

/// A kind of object: the API's group, version and plural name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resource {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    namespaced: bool,
}

/// One object, or a subresource of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Object {
    resource: Resource,
    namespace: Option<String>,
    name: String,
    subresource: Option<&'static str>,
}

/// Objects of a kind: those of a namespace, or all.
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
/// Secrets, bootstrap tokens among them.
pub const SECRETS: Resource = Resource::namespaced("", "v1", "secrets");
/// ServiceAccounts.
pub const SERVICE_ACCOUNTS: Resource = Resource::namespaced("", "v1", "serviceaccounts");
/// Services.
pub const SERVICES: Resource = Resource::namespaced("", "v1", "services");
/// DaemonSets.
pub const DAEMON_SETS: Resource = Resource::namespaced("apps", "v1", "daemonsets");
/// Deployments.
pub const DEPLOYMENTS: Resource = Resource::namespaced("apps", "v1", "deployments");
/// What kubelets want signed.
pub const CERTIFICATE_SIGNING_REQUESTS: Resource =
    Resource::cluster("certificates.k8s.io", "v1", "certificatesigningrequests");
/// Whether we may do something.
pub const SELF_SUBJECT_ACCESS_REVIEWS: Resource =
    Resource::cluster("authorization.k8s.io", "v1", "selfsubjectaccessreviews");
/// Leases, for one-at-a-time.
pub const LEASES: Resource = Resource::namespaced("coordination.k8s.io", "v1", "leases");
/// Who may talk to whom.
pub const NETWORK_POLICIES: Resource =
    Resource::namespaced("networking.k8s.io", "v1", "networkpolicies");
/// How many pods an eviction leaves.
pub const POD_DISRUPTION_BUDGETS: Resource =
    Resource::namespaced("policy", "v1", "poddisruptionbudgets");
/// Roles of a namespace.
pub const ROLES: Resource = Resource::namespaced("rbac.authorization.k8s.io", "v1", "roles");
/// Who has them.
pub const ROLE_BINDINGS: Resource =
    Resource::namespaced("rbac.authorization.k8s.io", "v1", "rolebindings");
/// Roles of the cluster.
pub const CLUSTER_ROLES: Resource =
    Resource::cluster("rbac.authorization.k8s.io", "v1", "clusterroles");
/// Who has them.
pub const CLUSTER_ROLE_BINDINGS: Resource =
    Resource::cluster("rbac.authorization.k8s.io", "v1", "clusterrolebindings");
/// What the API server refuses beside what roles do not allow.
pub const VALIDATING_ADMISSION_POLICIES: Resource = Resource::cluster(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicies",
);
/// Where they are in force.
pub const VALIDATING_ADMISSION_POLICY_BINDINGS: Resource = Resource::cluster(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicybindings",
);
/// The old system's, for who is about to join.
pub const JOINING_NODES: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "joiningnodes");
/// The old system's, for what nodes are to run.
pub const NODE_VERSIONS: Resource =
    Resource::cluster("update.edgeless.systems", "v1alpha1", "nodeversions");

/// The kinds that a manifest may have: what [`Object::of`] knows.
static KINDS: [(&str, Resource); 17] = [
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
    ("ValidatingAdmissionPolicy", VALIDATING_ADMISSION_POLICIES),
    (
        "ValidatingAdmissionPolicyBinding",
        VALIDATING_ADMISSION_POLICY_BINDINGS,
    ),
];

impl Resource {
    /// Objects that are in namespaces. The core group is the empty one.
    pub const fn namespaced(
        group: &'static str,
        version: &'static str,
        plural: &'static str,
    ) -> Resource {
        Resource::new(group, version, plural, true)
    }

    /// Objects that are not.
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

    /// The object of this name, of a resource that is not in namespaces.
    pub fn named(&self, name: &str) -> Object {
        debug_assert!(!self.namespaced, "{} are in namespaces", self.plural);
        Object {
            resource: *self,
            namespace: None,
            name: name.into(),
            subresource: None,
        }
    }

    /// All objects, of every namespace.
    pub fn all(&self) -> Collection {
        Collection {
            resource: *self,
            namespace: None,
        }
    }

    /// The objects of one namespace.
    pub fn in_namespace(&self, namespace: &str) -> Collection {
        debug_assert!(self.namespaced, "{} are in no namespace", self.plural);
        Collection {
            resource: *self,
            namespace: Some(namespace.into()),
        }
    }

    /// `v1`, `apps/v1`: the `apiVersion` of its objects.
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
    /// As in RBAC rules and kubectl: `configmaps`, `deployments.apps`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            "" => f.write_str(self.plural),
            group => write!(f, "{}.{group}", self.plural),
        }
    }
}

impl Collection {
    /// One of them.
    pub fn named(&self, name: &str) -> Object {
        Object {
            resource: self.resource,
            namespace: self.namespace.clone(),
            name: name.into(),
            subresource: None,
        }
    }

    /// What they are.
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
    /// Where an object of the kinds that services are made of belongs, by its `apiVersion`, `kind` and `metadata`. One of a
    /// namespaced kind that names no namespace is refused: there is no default that could be meant.
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
        let (_, resource) =
            known.ok_or_else(|| problem("an object of this kind is not known here".into()))?;
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

    /// `status`, `approval`, `token`, `eviction`, .. of it.
    pub fn subresource(&self, subresource: &'static str) -> Object {
        Object {
            subresource: Some(subresource),
            ..self.clone()
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
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

    /// Where it is: what [`Client::create`](super::Client::create) wants.
    pub fn collection(&self) -> Collection {
        Collection {
            resource: self.resource,
            namespace: self.namespace.clone(),
        }
    }
}

impl fmt::Display for Object {
    /// `configmaps kube-system/join-config`, `nodes/status node-1`.
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

/// One segment of a path, or one value of a query: all but the unreserved characters are escaped (RFC 3986 §2.3). A segment
/// of dots alone, which a path would resolve, is escaped too.
pub(super) fn escaped(text: &str) -> String {
    let only_dots = text.bytes().all(|byte| byte == b'.');
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'.' if only_dots => out.push_str("%2E"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte as char)
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
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
                .contains("not known")
        );
        assert!(of(json!(1)).is_err());
    }
}
