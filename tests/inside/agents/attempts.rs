//! What no agent's account can write: the facts of the table in docs/threat-model.md.

use std::collections::BTreeSet;

use common::volumes::{VOLUMES, add_volume};
use kubernetes::client::{LEASES, NODES, PODS, SERVICES};
use serde_json::{Value, json};

use super::{
    APPLY, Account, CLOUD, Call, DEFINITIONS, JSON_PATCH, KUBE_SYSTEM, MERGE, Outcome, STRATEGIC,
    agents, inside, node_of, patch, send, worker,
};
use crate::attacker::{Inside, definition};

/// What an attacker wants: the name of the test, and what shows that it has it, for a node that the attacker does not own.
struct Goal {
    name: &'static str,
    calls: fn(&Inside, &str) -> Vec<Call>,
    is_reached: fn(&Inside, &str) -> bool,
}

impl Goal {
    /// Tries all requests with each agent's account, against a new node for each. Returns the agents that only admission stops.
    fn refused(&self) -> Vec<String> {
        self.refused_but(&[])
    }

    /// The same without these agents, which may do it.
    fn refused_but(&self, may: &[&str]) -> Vec<String> {
        let inside = inside();
        let own = worker(inside, &format!("{}-own", self.name));
        let (mut refused, mut reached) = (BTreeSet::new(), BTreeSet::new());
        for agent in agents().iter().filter(|it| !may.contains(&&***it)) {
            let victim = worker(inside, &format!("{}-{agent}", self.name));
            let account = Account::on(inside, agent, &own);
            for call in (self.calls)(inside, &victim.name) {
                match account.attempt(&call) {
                    Outcome::NoRight => {}
                    Outcome::Refused => drop(refused.insert(agent.clone())),
                    // a request may be done without its effect: the status of a Node has no spec
                    Outcome::Done if !(self.is_reached)(inside, &victim.name) => {}
                    Outcome::Done => {
                        let Call {
                            method, path, kind, ..
                        } = call;
                        reached.insert(format!("{agent}: {method} {path} {kind}"));
                        break;
                    }
                }
            }
        }
        assert!(reached.is_empty(), "{}: {reached:#?}", self.name);
        refused.into_iter().collect()
    }
}

/// Lets an update replace any version of an object: a request before it may have changed something else.
fn forget_version(object: &mut Value) {
    let metadata = object["metadata"].as_object_mut().unwrap();
    metadata.remove("resourceVersion");
}

/// Returns the ways to give a Node these fields, which `change` sets in a whole Node.
fn of_node(inside: &Inside, node: &str, fields: &Value, change: fn(&mut Value)) -> Vec<Call> {
    let at = format!("/api/v1/nodes/{node}");
    let status = format!("{at}/status");
    let mut whole = node_of(inside, node);
    change(&mut whole);
    forget_version(&mut whole);
    let mut applied = fields.clone();
    (applied["apiVersion"], applied["kind"]) = ("v1".into(), "Node".into());
    applied["metadata"]["name"] = node.into();
    let of = |at: &str| {
        let kinds = [(MERGE, fields), (STRATEGIC, fields), (APPLY, &applied)];
        let patches = kinds.map(|(kind, body)| patch(kind, at, body.clone()));
        patches.into_iter().chain([send("PUT", at, whole.clone())])
    };
    of(&at).chain(of(&status)).collect()
}

/// The agents that may change all of a Node but its status.
const NODES_BUT_STATUS: [&str; 8] = [
    "azure-cloud-node-manager",
    "azuredisk-csi-node",
    "cilium-operator",
    CLOUD,
    "cluster-autoscaler",
    "ebs-csi-node",
    "gce-pd-csi-controller",
    "karpenter",
];
/// The agents that may change the status of Nodes, and with it labels and annotations.
const STATUS_OF_NODES: [&str; 5] = [
    "azure-cloud-node-manager",
    "cilium",
    "cilium-operator",
    CLOUD,
    "flannel",
];

/// Returns the agents that may change labels and annotations of Nodes.
fn metadata_of_nodes() -> Vec<&'static str> {
    let all = NODES_BUT_STATUS.iter().chain(&STATUS_OF_NODES).copied();
    all.collect::<BTreeSet<_>>().into_iter().collect()
}

const ROLE: &str = "node-role.kubernetes.io/control-plane";
const ATTESTED: &str = "firstlight.node-restriction.kubernetes.io/attested";
const TAINT: &str = "firstlight/attestation";
const CORDONED: &str = "firstlight/cordoned";

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_gives_a_worker_the_role_of_a_control_plane() {
    let goal = Goal {
        name: "role",
        calls: |inside, node| {
            let fields = json!({"metadata": {"labels": {ROLE: ""}}});
            of_node(inside, node, &fields, |it| {
                it["metadata"]["labels"][ROLE] = "".into();
            })
        },
        is_reached: |inside, node| !node_of(inside, node)["metadata"]["labels"][ROLE].is_null(),
    };
    assert_eq!(goal.refused(), metadata_of_nodes());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_takes_the_role_of_a_control_plane_away() {
    let goal = Goal {
        name: "unrole",
        calls: |inside, node| {
            let labels = json!({"metadata": {"labels": {ROLE: ""}}});
            inside.admin.merge(&NODES.named(node), &labels).unwrap();
            let fields = json!({"metadata": {"labels": {ROLE: null}}});
            let mut calls = of_node(inside, node, &fields, |it| {
                it["metadata"]["labels"]
                    .as_object_mut()
                    .unwrap()
                    .remove(ROLE);
            });
            // no value can be applied for this
            calls.retain(|call| call.kind != APPLY);
            calls
        },
        is_reached: |inside, node| node_of(inside, node)["metadata"]["labels"][ROLE].is_null(),
    };
    assert_eq!(goal.refused(), metadata_of_nodes());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_says_that_a_node_is_attested() {
    let goal = Goal {
        name: "attested",
        calls: |inside, node| {
            let fields = json!({"metadata": {"labels": {ATTESTED: "true"}}});
            of_node(inside, node, &fields, |it| {
                it["metadata"]["labels"][ATTESTED] = "true".into();
            })
        },
        is_reached: |inside, node| node_of(inside, node)["metadata"]["labels"][ATTESTED] == "true",
    };
    assert_eq!(goal.refused(), metadata_of_nodes());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_claims_that_the_join_service_has_cordoned_a_node() {
    let goal = Goal {
        name: "cordoned",
        calls: |inside, node| {
            let fields = json!({"metadata": {"annotations": {CORDONED: "attestation"}}});
            of_node(inside, node, &fields, |it| {
                it["metadata"]["annotations"][CORDONED] = "attestation".into();
            })
        },
        is_reached: |inside, node| {
            !node_of(inside, node)["metadata"]["annotations"][CORDONED].is_null()
        },
    };
    assert_eq!(goal.refused(), metadata_of_nodes());
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_removes_the_taint_of_a_refused_node() {
    let goal = Goal {
        name: "taint",
        calls: |inside, node| {
            let taint = json!({"key": TAINT, "value": "refused", "effect": "NoSchedule"});
            let tainted = json!({"spec": {"taints": [taint]}});
            inside.admin.merge(&NODES.named(node), &tainted).unwrap();
            let fields = json!({"spec": {"taints": []}});
            let mut calls = of_node(inside, node, &fields, |it| {
                it["spec"]["taints"] = json!([]);
            });
            let remove = json!([{"op": "remove", "path": "/spec/taints/0"}]);
            calls.push(patch(JSON_PATCH, &format!("/api/v1/nodes/{node}"), remove));
            // an empty list that is merged or applied removes no taint of another program
            calls.retain(|call| ![STRATEGIC, APPLY].contains(&call.kind));
            calls
        },
        is_reached: |inside, node| node_of(inside, node)["spec"]["taints"][0].is_null(),
    };
    assert_eq!(goal.refused(), NODES_BUT_STATUS);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_writes_the_result_of_an_attestation() {
    let goal = Goal {
        name: "condition",
        calls: |inside, node| {
            let result = json!({"type": "Attested", "status": "True", "reason": "Accepted"});
            let fields = json!({"status": {"conditions": [result]}});
            of_node(inside, node, &fields, |it| {
                it["status"]["conditions"] =
                    json!([{"type": "Attested", "status": "True", "reason": "Accepted"}]);
            })
        },
        is_reached: |inside, node| {
            let node = node_of(inside, node);
            let conditions = node["status"]["conditions"].as_array().unwrap();
            conditions.iter().any(|it| it["type"] == "Attested")
        },
    };
    assert_eq!(goal.refused(), STATUS_OF_NODES);
}

fn without_cloud(agents: &[&'static str]) -> Vec<&'static str> {
    let others = agents.iter().copied().filter(|it| *it != CLOUD);
    others.collect()
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_says_which_machine_of_the_cloud_another_node_is() {
    let goal = Goal {
        name: "provider",
        calls: |inside, node| {
            let fields = json!({"spec": {"providerID": "cloud:///other"}});
            of_node(inside, node, &fields, |it| {
                it["spec"]["providerID"] = "cloud:///other".into();
            })
        },
        is_reached: |inside, node| !node_of(inside, node)["spec"]["providerID"].is_null(),
    };
    assert_eq!(goal.refused_but(&[CLOUD]), without_cloud(&NODES_BUT_STATUS));
}

/// An address that no node of these tests has.
const OTHER_ADDRESS: &str = "10.99.0.1";

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_moves_a_node_to_another_address() {
    let goal = Goal {
        name: "address",
        calls: |inside, node| {
            let moved = json!([{"type": "InternalIP", "address": OTHER_ADDRESS}]);
            let fields = json!({"status": {"addresses": moved}});
            let mut calls = of_node(inside, node, &fields, |it| {
                it["status"]["addresses"] =
                    json!([{"type": "InternalIP", "address": OTHER_ADDRESS}]);
            });
            // as cloud controllers replace the list
            let replaced = json!({"status": {"addresses": [
                {"type": "InternalIP", "address": OTHER_ADDRESS}, {"$patch": "replace"}]}});
            calls.push(patch(
                STRATEGIC,
                &format!("/api/v1/nodes/{node}/status"),
                replaced,
            ));
            calls
        },
        is_reached: |inside, node| {
            let addresses = node_of(inside, node)["status"]["addresses"].to_string();
            addresses.contains(OTHER_ADDRESS)
        },
    };
    assert_eq!(goal.refused_but(&[CLOUD]), without_cloud(&STATUS_OF_NODES));
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_makes_another_pod_one_of_our_services() {
    let goal = Goal {
        name: "podlabel",
        calls: |inside, node| {
            let name = format!("foreign-{node}");
            let pods = PODS.in_namespace("kube-system");
            let pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "a", "image": "a"}]}});
            let mut whole = inside.admin.create(&pods, &pod).unwrap();
            whole["metadata"]["labels"] = json!({"k8s-app": "key-service"});
            forget_version(&mut whole);
            let fields = json!({"metadata": {"labels": {"k8s-app": "key-service"}}});
            let at = format!("{KUBE_SYSTEM}/pods/{name}");
            let status = format!("{at}/status");
            let made = json!({"metadata": {"name": format!("new-{node}"), "labels": {"k8s-app": "key-service"}},
                "spec": {"containers": [{"name": "a", "image": "a"}]}});
            vec![
                patch(MERGE, &at, fields.clone()),
                send("PUT", &at, whole.clone()),
                patch(MERGE, &status, fields),
                send("PUT", &status, whole),
                send("POST", &format!("{KUBE_SYSTEM}/pods"), made),
            ]
        },
        is_reached: |inside, node| {
            let pods = PODS.in_namespace("kube-system");
            let all = [format!("foreign-{node}"), format!("new-{node}")];
            all.iter().any(|name| {
                let found = inside.admin.find(&pods.named(name)).unwrap();
                found.is_some_and(|it| it["metadata"]["labels"]["k8s-app"] == "key-service")
            })
        },
    };
    assert_eq!(goal.refused(), ["cluster-autoscaler"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_adds_an_endpoint_to_our_services() {
    let goal = Goal {
        name: "slice",
        calls: |_, node| {
            let slice = json!({
                "metadata": {"name": format!("evil-{node}"), "labels": {"kubernetes.io/service-name": "key-service-local"}},
                "addressType": "IPv4", "endpoints": [{"addresses": ["10.9.9.9"], "conditions": {"ready": true}}],
                "ports": [{"name": "grpc", "port": 9000}],
            });
            vec![send("POST", &slices(), slice)]
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused(), ["cilium-operator"]);
}

fn slices() -> String {
    "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices".into()
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_leads_our_services_to_other_pods() {
    let goal = Goal {
        name: "selector",
        calls: |inside, _| {
            let at = format!("{KUBE_SYSTEM}/services/key-service-local");
            let local = SERVICES
                .in_namespace("kube-system")
                .named("key-service-local");
            let mut whole = inside.admin.get(&local).unwrap();
            whole["spec"]["selector"] = json!({"app": "evil"});
            forget_version(&mut whole);
            let fields = json!({"spec": {"selector": {"k8s-app": null, "app": "evil"}, "internalTrafficPolicy": "Cluster"}});
            vec![
                patch(MERGE, &at, fields.clone()),
                patch(STRATEGIC, &at, fields),
                send("PUT", &at, whole),
            ]
        },
        is_reached: |inside, _| {
            let local = SERVICES
                .in_namespace("kube-system")
                .named("key-service-local");
            inside.admin.get(&local).unwrap()["spec"]["selector"]["app"] == "evil"
        },
    };
    assert_eq!(goal.refused(), ["cilium-operator", CLOUD]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_frees_the_address_of_our_services() {
    let goal = Goal {
        name: "delete",
        calls: |_, _| {
            let at = format!("{KUBE_SYSTEM}/services/key-service-local");
            vec![send("DELETE", &at, json!({}))]
        },
        is_reached: |_, _| true,
    };
    // another Service could have the address, to which the join service sends its token
    assert_eq!(goal.refused(), ["cilium-operator"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_takes_connections_to_nodes_by_a_load_balancer_or_an_external_address() {
    let goal = Goal {
        name: "balancer",
        calls: |inside, node| {
            let service = json!({"metadata": {"name": node}, "spec": {"type": "LoadBalancer", "selector": {"app": "evil"}, "ports": [{"port": 9000}]}});
            let services = SERVICES.in_namespace("default");
            inside.admin.create(&services, &service).unwrap();
            let at = format!("/api/v1/namespaces/default/services/{node}");
            let ingress = json!({"status": {"loadBalancer": {"ingress": [{"ip": "10.9.0.1"}]}}});
            vec![
                patch(MERGE, &at, json!({"spec": {"externalIPs": ["10.9.0.1"]}})),
                patch(MERGE, &format!("{at}/status"), ingress.clone()),
                patch(
                    APPLY,
                    &format!("{at}/status"),
                    json!({"apiVersion": "v1", "kind": "Service",
                    "metadata": {"name": node}, "status": ingress["status"]}),
                ),
            ]
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused_but(&[CLOUD]), ["cilium-operator"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_chooses_the_programs_of_new_nodes_or_writes_a_record() {
    let goal = Goal {
        name: "maps",
        calls: |_, node| {
            let at = format!("{KUBE_SYSTEM}/configmaps");
            let make = |name: String| send("POST", &at, json!({"metadata": {"name": name}}));
            let change = json!({"data": {"a": "b"}});
            vec![
                make(format!("k8s-components-{node}")),
                make(format!("join-node-new-{node}")),
                make("join-disk-6a1f1f2e-6f6b-4a8e-9d4b-3a0d3c1c0a11".into()),
                make("kubeadm-config".into()),
                make(format!("join-attested-{node}")),
                patch(MERGE, &format!("{at}/join-config"), change.clone()),
                patch(MERGE, &format!("{at}/key-service-ca"), change),
            ]
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused(), ["cluster-autoscaler"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_defines_the_kinds_by_which_our_services_know_a_cluster_of_constellation() {
    let goal = Goal {
        name: "kinds",
        calls: |_, _| {
            let kinds = ["NodeVersion", "JoiningNode"];
            let made = kinds.map(|kind| definition("update.edgeless.systems", "v1alpha1", kind));
            made.map(|it| send("POST", DEFINITIONS, it)).into()
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused(), ["cilium-operator"]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_takes_the_leases_of_our_services() {
    let goal = Goal {
        name: "leases",
        calls: |inside, node| {
            let leases = LEASES.in_namespace("kube-system");
            let all = ["join-watch", "join-control-plane", "firstlight-nodes"];
            let calls = all.into_iter().flat_map(|name| {
                let lease = json!({"metadata": {"name": name}, "spec": {"holderIdentity": "own"}});
                inside.admin.create_if_absent(&leases, &lease).unwrap();
                let at =
                    format!("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/{name}");
                let taken = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name, "resourceVersion":
                    inside.admin.get(&leases.named(name)).unwrap()["metadata"]["resourceVersion"]}, "spec": {"holderIdentity": node}});
                [
                    send("PUT", &at, taken.clone()),
                    patch(MERGE, &at, json!({"spec": taken["spec"]})),
                    send("DELETE", &at, json!({})),
                ]
            });
            calls.collect()
        },
        is_reached: |_, _| true,
    };
    let writers = [
        "azuredisk-csi-controller",
        "cilium",
        "cilium-operator",
        CLOUD,
        "ebs-csi-controller",
    ];
    assert_eq!(goal.refused(), writers);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_gets_a_token_of_our_services() {
    let goal = Goal {
        name: "tokens-of",
        calls: |_, _| {
            let token = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                "spec": {"audiences": ["key-service"]}});
            let of = |account: &str| format!("{KUBE_SYSTEM}/serviceaccounts/{account}/token");
            let accounts = ["join-service", "key-service", "member-controller"].map(of);
            let calls = accounts.map(|at| send("POST", &at, token.clone()));
            calls.into()
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused(), [CLOUD]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_writes_our_secrets() {
    let goal = Goal {
        name: "secrets",
        calls: |_, node| {
            let at = format!("{KUBE_SYSTEM}/secrets");
            let make = |name: &str, kind: &str| {
                send(
                    "POST",
                    &at,
                    json!({"metadata": {"name": name}, "type": kind}),
                )
            };
            let token = json!({
                "metadata": {"name": format!("token-{node}"), "annotations": {"kubernetes.io/service-account.name": "join-service"}},
                "type": "kubernetes.io/service-account-token",
            });
            vec![
                make("join-node-files", "Opaque"),
                make("join-attestation-keys", "Opaque"),
                make("bootstrap-token-abcdef", "bootstrap.kubernetes.io/token"),
                send("POST", &at, token),
            ]
        },
        is_reached: |_, _| true,
    };
    assert_eq!(goal.refused(), [CLOUD]);
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn no_agent_names_the_luks_volume_of_a_persistent_volume() {
    let goal = Goal {
        name: "uuid",
        calls: |inside, node| {
            add_volume(&inside.admin, node);
            let at = format!("/api/v1/persistentvolumes/{node}");
            let uuid = "6a1f1f2e-6f6b-4a8e-9d4b-3a0d3c1c0a12";
            let fields = json!({"metadata": {"annotations": {"firstlight/luks-uuid": uuid}}});
            let mut whole = inside.admin.get(&VOLUMES.named(node)).unwrap();
            whole["metadata"]["annotations"] = fields["metadata"]["annotations"].clone();
            forget_version(&mut whole);
            let mut made = whole.clone();
            made["metadata"] = json!({"name": format!("new-{node}"), "annotations": whole["metadata"]["annotations"]});
            vec![
                patch(MERGE, &at, fields),
                send("PUT", &at, whole),
                send("POST", "/api/v1/persistentvolumes", made),
            ]
        },
        is_reached: |_, _| true,
    };
    let writers = [
        "azuredisk-csi-controller",
        CLOUD,
        "ebs-csi-controller",
        "gce-pd-csi-controller",
    ];
    assert_eq!(goal.refused(), writers);
}
