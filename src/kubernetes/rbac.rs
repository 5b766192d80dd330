//! Which accounts may take over the cluster by the roles that are bound to them, or what Firstlight keeps from them. Nothing of this is
//! wrong by itself: some agents need it. But the token of a service account lies on each node where one of its pods runs, so root
//! there has these rights, too.

use std::collections::{BTreeMap, BTreeSet};

use super::NAMESPACE;
use super::objects::{ObjectMeta, PolicyRule, RbacBinding, RbacRole, RbacSubject};

/// A right that gives more than it says.
#[derive(Debug)]
struct Right {
    group: &'static str,
    resources: &'static [&'static str],
    verbs: &'static [&'static str],
    /// Whether a role in the namespace of the services is enough.
    in_namespace: bool,
    /// What the account may do, and what this gives.
    gives: &'static str,
}

const WRITE: &[&str] = &["create", "update", "patch", "delete", "deletecollection"];
const CONNECT: &[&str] = &["create", "get"];
const EVERYTHING: &str = "do everything";

const RIGHTS: [Right; 12] = [
    Right {
        group: "",
        resources: &["serviceaccounts/token"],
        verbs: &["create"],
        in_namespace: true,
        gives: "request tokens of the accounts of kube-system, so act as each of them",
    },
    Right {
        group: "",
        resources: &["users", "groups", "serviceaccounts"],
        verbs: &["impersonate"],
        in_namespace: true,
        gives: "act as others (impersonate)",
    },
    Right {
        group: "rbac.authorization.k8s.io",
        resources: &["roles", "clusterroles"],
        verbs: &["escalate", "bind"],
        in_namespace: true,
        gives: "give itself roles (bind, escalate)",
    },
    Right {
        group: "certificates.k8s.io",
        resources: &["signers"],
        verbs: &["approve", "sign"],
        in_namespace: false,
        gives: "approve certificates of clients, so become any user",
    },
    Right {
        group: "",
        resources: &["nodes/proxy"],
        verbs: CONNECT,
        in_namespace: false,
        gives: "run commands in all pods through the kubelets (nodes/proxy)",
    },
    Right {
        group: "",
        resources: &["pods/exec", "pods/attach"],
        verbs: CONNECT,
        in_namespace: true,
        gives: "run commands in pods of kube-system",
    },
    Right {
        group: "",
        resources: &["pods", "replicationcontrollers"],
        verbs: &["create"],
        in_namespace: true,
        gives: "make pods in kube-system, with any account there and the files of any node",
    },
    Right {
        group: "apps",
        resources: &["daemonsets", "deployments", "statefulsets", "replicasets"],
        verbs: &["create", "update", "patch"],
        in_namespace: true,
        gives: "make pods in kube-system, with any account there and the files of any node",
    },
    Right {
        group: "",
        resources: &["secrets"],
        verbs: &["get", "list", "watch"],
        in_namespace: true,
        gives: "read the Secrets of kube-system, such as the tokens of machines that join",
    },
    Right {
        group: "admissionregistration.k8s.io",
        resources: &[
            "validatingadmissionpolicies",
            "validatingadmissionpolicybindings",
        ],
        verbs: WRITE,
        in_namespace: false,
        gives: "take the admission policies of Firstlight away",
    },
    Right {
        group: "admissionregistration.k8s.io",
        resources: &[
            "mutatingwebhookconfigurations",
            "validatingwebhookconfigurations",
            "mutatingadmissionpolicies",
            "mutatingadmissionpolicybindings",
        ],
        verbs: &["create", "update", "patch"],
        in_namespace: false,
        gives: "see and change what others write (webhooks)",
    },
    Right {
        group: "firstlight",
        resources: &["*"],
        verbs: &["assign"],
        in_namespace: true,
        gives: "pass admission policies of Firstlight (assign)",
    },
];

/// A rule that is limited to objects of other names than these gives nothing of the above. Some are beginnings.
const NAMES: [&str; 8] = [
    "join-",
    "key-service",
    "firstlight-",
    "constellation-mastersecret",
    "bootstrap-token-",
    "cluster-admin",
    "system:masters",
    "kubernetes.io/kube-apiserver-client",
];
/// The roles of those who write addresses, by the operator's own settings of the chart.
const OF_ADDRESSES: [&str; 2] = ["firstlight-addresses", "firstlight-own-addresses"];
/// The accounts of Firstlight.
const OWN: [&str; 3] = ["join-service", "key-service", "member-controller"];
/// Administrators, programs of control planes with a certificate of their own, and a controller whose role does not have the name of one.
const EXPECTED: [&str; 5] = [
    "kube-system/taint-eviction-controller",
    "group system:masters",
    "group kubeadm:cluster-admins",
    "user system:kube-controller-manager",
    "user system:kube-scheduler",
];
/// The beginning of the names of the roles, and of their bindings, of the controllers of kube-controller-manager.
const CONTROLLER: &str = "system:controller:";

/// An account that may do more than its node should.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrivilegedAccount {
    /// `NAMESPACE/NAME` of a service account, `user NAME` or `group NAME`.
    pub name: String,
    /// Whether it is of people, whose credentials are on no node.
    pub is_of_people: bool,
    /// Whether the operator has told the chart that it is a cloud controller.
    pub is_cloud_controller: bool,
    /// What it may do.
    pub may: Vec<&'static str>,
    /// The bindings that say so.
    pub bindings: Vec<String>,
}

/// Returns the accounts that these bindings give such rights, by their names. `roles` are ClusterRoles and the Roles of kube-system;
/// `bindings` are ClusterRoleBindings and the RoleBindings of kube-system.
pub fn powerful(roles: &[RbacRole], bindings: &[RbacBinding]) -> Vec<PrivilegedAccount> {
    let known = roles.iter().map(|role| (place(&role.metadata), role));
    let known: BTreeMap<_, _> = known.collect();
    let controllers: BTreeSet<_> = bindings.iter().filter_map(controller).collect();
    let mut found: BTreeMap<String, PrivilegedAccount> = BTreeMap::new();
    let mut cloud_controllers = BTreeSet::new();
    for binding in bindings {
        let role = binding.role_ref.name.as_str();
        let subjects = binding.subjects.iter().map(subject);
        let subjects = subjects.filter(|it| !is_expected(it) && !controllers.contains(it));
        if OF_ADDRESSES.contains(&role) {
            cloud_controllers.extend(subjects);
            continue;
        }
        let own = binding.metadata.namespace.as_str();
        let namespace = if binding.role_ref.kind == "Role" {
            own
        } else {
            ""
        };
        let in_cluster = own.is_empty();
        let role = known.get(&(namespace, role));
        let given = role.map_or(vec![], |role| given(role, in_cluster));
        if given.is_empty() {
            continue;
        }
        for name in subjects {
            let account = found.entry(name.clone()).or_default();
            account.is_of_people = !name.contains('/') && !name.contains(" system:");
            account.name = name;
            account.may.extend(&given);
            account.bindings.push(title(binding));
        }
    }
    let accounts = found.into_values().map(|mut account| {
        account.is_cloud_controller = cloud_controllers.contains(&account.name);
        account.may = shortest(account.may);
        account
    });
    accounts.collect()
}

/// Returns the namespace, empty if it has none, and the name.
fn place(metadata: &ObjectMeta) -> (&str, &str) {
    (&metadata.namespace, &metadata.name)
}

fn title(binding: &RbacBinding) -> String {
    match place(&binding.metadata) {
        ("", name) => format!("ClusterRoleBinding {name}"),
        (namespace, name) => format!("RoleBinding {namespace}/{name}"),
    }
}

fn subject(subject: &RbacSubject) -> String {
    let name = &subject.name;
    let account = name.strip_prefix("system:serviceaccount:");
    match (&*subject.kind, account) {
        ("ServiceAccount", _) => format!("{}/{name}", subject.namespace),
        ("User", Some(account)) => account.replacen(':', "/", 1),
        ("User", None) => format!("user {name}"),
        _ => format!("group {name}"),
    }
}

fn is_expected(subject: &String) -> bool {
    let own = |name: &&str| *subject == format!("{NAMESPACE}/{name}");
    EXPECTED.contains(&subject.as_str()) || OWN.iter().any(own)
}

/// Returns the controller's account if this is the binding that the API server makes for it.
fn controller(binding: &RbacBinding) -> Option<String> {
    let name = &binding.metadata.name;
    let account = format!("kube-system/{}", name.strip_prefix(CONTROLLER)?);
    let subjects = binding.subjects.iter().map(subject);
    let is_one = binding.role_ref.name == *name && subjects.eq([account.clone()]);
    is_one.then_some(account)
}

/// Returns what a role gives.
fn given(role: &RbacRole, in_cluster: bool) -> Vec<&'static str> {
    let rules = role.rules.iter().flatten();
    rules
        .flat_map(|rule| {
            if in_cluster && is_everything(rule) {
                return vec![EVERYTHING];
            }
            let rights = RIGHTS.iter().filter(|it| in_cluster || it.in_namespace);
            let rights = rights.filter(|right| gives(rule, right));
            rights.map(|right| right.gives).collect()
        })
        .collect()
}

fn is_everything(rule: &PolicyRule) -> bool {
    let mut each = [&rule.api_groups, &rule.resources, &rule.verbs].into_iter();
    each.all(|words| words.iter().any(|it| it == "*"))
}

fn gives(rule: &PolicyRule, right: &Right) -> bool {
    let any = |words: &[String], is_it: &dyn Fn(&str) -> bool| {
        words.iter().any(|it| it == "*" || is_it(it))
    };
    let is_of_group = any(&rule.api_groups, &|it| it == right.group);
    let is_of_verb = any(&rule.verbs, &|it| right.verbs.contains(&it));
    let is_of_resource = any(&rule.resources, &|it| {
        let all_of = it.strip_prefix("*/");
        let of_all = |of: &&str| all_of.is_some_and(|it| of.split('/').nth(1) == Some(it));
        right.resources == ["*"]
            || right.resources.contains(&it)
            || right.resources.iter().any(of_all)
    });
    let names = &rule.resource_names;
    let is_own =
        |it: &String| it == "kubernetes.io/*" || NAMES.iter().any(|own| it.starts_with(own));
    let is_of_name = names.is_empty() || names.iter().any(is_own);
    is_of_group && is_of_verb && is_of_resource && is_of_name
}

/// Returns each once, in the order of the table; nothing else beside everything.
fn shortest(may: Vec<&'static str>) -> Vec<&'static str> {
    if may.contains(&EVERYTHING) {
        return vec![EVERYTHING];
    }
    let mut all: Vec<_> = RIGHTS.iter().map(|right| right.gives).collect();
    all.dedup();
    all.retain(|it| may.contains(it));
    all
}
