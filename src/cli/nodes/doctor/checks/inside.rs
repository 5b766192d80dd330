//! What keeps those inside of the cluster from the nodes' ports, and from the facts from which Firstlight concludes something.

use kubernetes::kubeadm::DENY_EXTERNAL_IPS;
use kubernetes::rbac::PrivilegedAccount;
use kubernetes::services::ADMISSION_POLICIES;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::Gathered;

/// The ports of nodes that programs of the cluster or its operator connect to: members, recovery, kubelets, API servers, etcd.
const PORTS: [u64; 6] = [9000, 9999, 10250, 6443, 2379, 2380];
/// The port of the join service, if there is no Service that says it.
const JOIN_SERVICE: u64 = 30090;

/// No Service takes connections to the ports of nodes.
pub fn ports(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let join_service = objects.join_port.unwrap_or(JOIN_SERVICE);
    let is_port = |port: &&u64| **port == join_service || PORTS.contains(port);
    let node_of = |address: &String| {
        let mut nodes = facts.view.nodes.iter();
        nodes.find(|node| node.listed.internal.contains(address))
    };
    let mut found = vec![];
    for claim in &objects.claims {
        let nodes = claim.addresses.iter().filter_map(node_of);
        let nodes: Vec<&str> = nodes.map(|node| node.listed.name.as_str()).collect();
        let ports: Vec<String> = claim
            .ports
            .iter()
            .filter(is_port)
            .map(u64::to_string)
            .collect();
        if nodes.is_empty() || ports.is_empty() {
            continue;
        }
        let (namespace, name) = claim.service.split_once('/').unwrap_or_default();
        found.push(Diagnosis::error(
            format!("Service {}", claim.service),
            format!(
                "its pods get the connections to port {} of {}, which are for programs of the node",
                ports.join(", "),
                nodes.join(", ")
            ),
            format!(
                "find out who made it, then: kubectl -n {namespace} delete service {name}; {DENY_EXTERNAL_IPS} and the policies of the chart \
                 refuse such Services (charts/firstlight/README.md#admission)"
            ),
        ));
    }
    found
}

/// The API servers refuse what the policies forbid.
pub fn admission(facts: &Gathered) -> Vec<Diagnosis> {
    let objects = &facts.view.objects;
    let mut found = vec![];
    let missing: Vec<&str> = ADMISSION_POLICIES
        .into_iter()
        .filter(|name| objects.policies.iter().all(|policy| policy != name))
        .collect();
    if !missing.is_empty() && objects.service("join-service").is_some() {
        found.push(Diagnosis::warning(
            "the admission policies",
            format!(
                "not in force: {}; without them, an agent whose token is on every node can change objects that Firstlight trusts",
                missing.join(", ")
            ),
            format!("{} (charts/firstlight/README.md#admission)", facts.apply("")),
        ));
    }
    let servers = objects.control_plane.iter();
    let servers: Vec<&str> = servers
        .filter(|pod| pod.permits_external_ips)
        .map(|pod| pod.node.as_str())
        .collect();
    if !servers.is_empty() {
        found.push(Diagnosis::warning(
            servers.join(", "),
            format!(
                "the API server runs without {DENY_EXTERNAL_IPS}: a tenant's Service can take connections to the addresses of nodes"
            ),
            "the next upgrade adds it (docs/day-two/upgrade.md#the-version-of-kubernetes)",
        ));
    }
    found
}

/// No account whose token is on a node may take over the cluster.
pub fn accounts(facts: &Gathered) -> Vec<Diagnosis> {
    let each = facts.view.objects.powerful.iter();
    let diagnosis = |account: &PrivilegedAccount| {
        let bindings = account.bindings.join(", ");
        let text = format!("it may {}", account.may.join("; "));
        if account.is_of_people {
            let advice = format!("take this away if it is too much: {bindings}");
            return Diagnosis::note(&account.name, text, advice);
        }
        let advice = format!(
            "take this away if it does not need it ({bindings}); else let its pods run on control planes only, because root on their node has \
             their token (docs/day-two/doctor.md#accounts)"
        );
        if account.is_cloud_controller {
            Diagnosis::note(&account.name, text, advice)
        } else {
            Diagnosis::warning(&account.name, text, advice)
        }
    };
    each.map(diagnosis).collect()
}
