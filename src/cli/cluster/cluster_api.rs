//! The machines of a Cluster of Cluster API (sigs.k8s.io/cluster-api), as a list of machines. Whoever may write Machines in the
//! management cluster decides which machines this list has, and their roles.

use std::fmt;
use std::time::Duration;

use base::stop::Stop;
use cloud::{Machines, Problem};
use cloud_api::listed;
use kubernetes::client::{ApiAccess, Client, Resource, Selector};
use serde_json::{Value, json};

use crate::shell::error::Error;

/// Cluster API v1.11 and later serve this version.
const VERSION: &str = "v1beta2";
const CLUSTERS: Resource = Resource::namespaced(GROUP, VERSION, "clusters");
const MACHINES: Resource = Resource::namespaced(GROUP, VERSION, "machines");
const GROUP: &str = "cluster.x-k8s.io";
/// The label of Machines with the name of their Cluster.
const CLUSTER_LABEL: &str = "cluster.x-k8s.io/cluster-name";
/// The label of Machines that are control planes.
const CONTROL_PLANE_LABEL: &str = "cluster.x-k8s.io/control-plane";
/// Time limit of one request. Machines wait for the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A Cluster in a management cluster.
pub struct ClusterApi {
    client: Client,
    namespace: String,
    name: String,
    init_secret_hash: Option<String>,
}

impl ClusterApi {
    /// Makes a client of the management cluster. `init_secret_hash` is a part of the list.
    pub fn new(
        config: ApiAccess,
        namespace: String,
        name: String,
        init_secret_hash: Option<String>,
    ) -> ClusterApi {
        ClusterApi {
            client: Client::new(config, &Stop::new()).within(TIMEOUT),
            namespace,
            name,
            init_secret_hash,
        }
    }

    /// Returns the machines that exist now.
    pub fn machines(&self) -> Result<Machines, Error> {
        let cluster = CLUSTERS.in_namespace(&self.namespace).named(&self.name);
        let cluster = self.client.get(&cluster)?;
        let selector = Selector::labels(&format!("{CLUSTER_LABEL}={}", self.name));
        let machines = MACHINES.in_namespace(&self.namespace);
        let machines = self.client.list(&machines, &selector)?.items;
        list(&cluster, &machines, self.init_secret_hash.as_deref())
            .map_err(|why| Error::content(format!("the Machines of {self}: {why}")))
    }
}

impl fmt::Display for ClusterApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the Cluster {}/{}", self.namespace, self.name)
    }
}

/// Returns the list of these Machines of this Cluster. A machine without a provider ID or an address is left out: it does not exist
/// yet, and a machine whose provider ID changes would be refused.
fn list(
    cluster: &Value,
    machines: &[Value],
    init_secret_hash: Option<&str>,
) -> Result<Machines, Problem> {
    let listed: Vec<_> = machines.iter().filter_map(machine).collect();
    let endpoint = cluster["spec"]["controlPlaneEndpoint"]["host"].as_str();
    let list = json!({
        "endpoint": endpoint.filter(|host| !host.is_empty()),
        "initSecretHash": init_secret_hash,
        "machines": listed,
    });
    let machines = Machines::parse(list.to_string().as_bytes())?;
    listed::init_secret_hash(&machines)?;
    Ok(machines)
}

fn machine(machine: &Value) -> Option<Value> {
    let addresses = machine["status"]["addresses"].as_array()?;
    let internal = addresses.iter().find(|one| one["type"] == "InternalIP")?;
    let provider_id = machine["spec"]["providerID"].as_str()?;
    let labels = &machine["metadata"]["labels"];
    let role = match labels.get(CONTROL_PLANE_LABEL) {
        Some(_) => "control-plane",
        None => "worker",
    };
    Some(json!({
        "name": machine["metadata"]["name"],
        "role": role,
        "address": internal["address"],
        "providerID": provider_id,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, labels: Value, address: &str) -> Value {
        json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"providerID": format!("in-memory://{name}")},
            "status": {"addresses": [
                {"type": "Hostname", "address": name},
                {"type": "ExternalIP", "address": "192.0.2.1"},
                {"type": "InternalIP", "address": address},
            ]},
        })
    }

    #[test]
    fn machines_with_an_address_and_a_provider_id_are_listed() {
        let mut new = machine("worker-1", json!({}), "10.0.0.22");
        new["spec"] = json!({});
        let mut without_address = machine("worker-2", json!({}), "10.0.0.23");
        without_address["status"] = json!({});
        let all = [
            machine("plane-0", json!({CONTROL_PLANE_LABEL: ""}), "10.0.0.11"),
            machine("worker-0", json!({}), "10.0.0.21"),
            new,
            without_address,
        ];
        let cluster =
            json!({"spec": {"controlPlaneEndpoint": {"host": "10.0.0.100", "port": 6443}}});
        let hash = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";
        let got = list(&cluster, &all, Some(hash)).unwrap();
        let expected = json!({
            "endpoint": "10.0.0.100",
            "initSecretHash": hash,
            "machines": [
                {"name": "plane-0", "role": "control-plane", "address": "10.0.0.11", "providerID": "in-memory://plane-0"},
                {"name": "worker-0", "role": "worker", "address": "10.0.0.21", "providerID": "in-memory://worker-0"},
            ],
        });
        let expected = Machines::parse(expected.to_string().as_bytes()).unwrap();
        assert_eq!(got, expected);
        // without an endpoint in the Cluster, it is the first control plane
        let got = list(&json!({}), &all, None).unwrap();
        assert_eq!(got.endpoint(), "10.0.0.11");
    }

    #[test]
    fn what_no_list_may_contain_is_refused() {
        let plane = machine("plane-0", json!({CONTROL_PLANE_LABEL: ""}), "10.0.0.11");
        for (other, says) in [
            (machine("worker-0", json!({}), "10.0.0.11"), "occurs twice"),
            (machine("a b", json!({}), "10.0.0.12"), "not a name"),
            (machine("worker-0", json!({}), "a b"), "nor a DNS name"),
        ] {
            let error = list(&json!({}), &[plane.clone(), other], None).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
        let worker = machine("worker-0", json!({}), "10.0.0.21");
        let error = list(&json!({}), &[worker], None).unwrap_err();
        assert!(error.to_string().contains("no control plane"), "{error}");
    }
}
