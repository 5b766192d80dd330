//! The CSI drivers of Constellation, as its charts install them.
//!
//! | CSIDriver | DaemonSet in kube-system | its account | network | argument `--kms-addr` |
//! |---|---|---|---|---|
//! | `aws.csi.confidential.cloud` | `ebs-csi-node` | `ebs-csi-node-sa` | pod | none: the program's default |
//! | `azuredisk.csi.confidential.cloud` | `csi-azuredisk-node` | `csi-azuredisk-node-sa` | pod | yes |
//! | `gcp.csi.confidential.cloud` | `csi-gce-pd-node` | `csi-gce-pd-node-sa` | pod | yes |
//! | `cinder.csi.confidential.cloud` | `…-nodeplugin` | `csi-cinder-node-sa` | host | yes |

use serde_json::Value;

use crate::NAMESPACE;
use crate::client::{Client, DAEMON_SETS, Error, Resource, Selector};

/// The objects that name CSI drivers.
pub const CSI_DRIVERS: Resource = Resource::cluster("storage.k8s.io", "v1", "csidrivers");

/// The end of the names of Constellation's drivers.
const SUFFIX: &str = ".csi.confidential.cloud";

/// A CSI driver of Constellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Driver {
    /// The name of its CSIDriver.
    pub name: &'static str,
    /// The service account of its pods on nodes, in kube-system.
    pub account: &'static str,
    /// The last part of its image's name.
    image: &'static str,
}

/// All of them.
pub const DRIVERS: [Driver; 4] = [
    Driver {
        name: "aws.csi.confidential.cloud",
        account: "ebs-csi-node-sa",
        image: "aws-csi-driver",
    },
    Driver {
        name: "azuredisk.csi.confidential.cloud",
        account: "csi-azuredisk-node-sa",
        image: "azure-csi-driver",
    },
    Driver {
        name: "gcp.csi.confidential.cloud",
        account: "csi-gce-pd-node-sa",
        image: "gcp-csi-driver",
    },
    Driver {
        name: "cinder.csi.confidential.cloud",
        account: "csi-cinder-node-sa",
        image: "cinder-csi-plugin",
    },
];

/// Returns the account of a pod with this `spec`, as `NAMESPACE/NAME`; `None` if it has none, as a
/// static pod.
pub fn account(namespace: &str, spec: &Value) -> Option<String> {
    let name = ["serviceAccountName", "serviceAccount"]
        .iter()
        .find_map(|field| spec[*field].as_str())?;
    (!name.is_empty()).then(|| format!("{namespace}/{name}"))
}

/// Returns the driver whose chart gives this account to its pods.
pub fn of_account(account: &str) -> Option<&'static Driver> {
    let (namespace, name) = account.split_once('/')?;
    let mut drivers = DRIVERS.iter();
    drivers.find(|driver| namespace == NAMESPACE && driver.account == name)
}

/// Returns the drivers of Constellation that this cluster has: the DaemonSets, as `NAMESPACE/NAME`,
/// and the CSIDrivers without one that is recognized.
///
/// This is for plans and warnings, so an account, an image or an argument is sufficient. Which client
/// is served is decided by the key service.
pub fn present(client: &Client) -> Result<Vec<String>, Error> {
    let list = |resource: &Resource, reduce: fn(Value) -> Value| {
        let found = client.list_keeping(&resource.all(), &Selector::default(), reduce)?;
        Ok::<_, Error>(found.items)
    };
    let sets = list(&DAEMON_SETS, place_and_driver)?;
    let objects = list(&CSI_DRIVERS, |driver| driver["metadata"]["name"].clone())?;
    let known = |name: &str| sets.iter().any(|set| set[1] == name);
    let unknown = objects.iter().filter_map(Value::as_str);
    let unknown = unknown.filter(|name| name.ends_with(SUFFIX) && !known(name));
    let sets = sets.iter().filter_map(|set| set[0].as_str());
    Ok(sets
        .map(str::to_owned)
        .chain(unknown.map(|name| format!("CSIDriver {name}")))
        .collect())
}

/// Reduces a DaemonSet to its place and the name of its driver, if it has one of Constellation.
fn place_and_driver(set: Value) -> Value {
    let name = |field: &str| set["metadata"][field].as_str().unwrap_or_default();
    let spec = &set["spec"]["template"]["spec"];
    let place = format!("{}/{}", name("namespace"), name("name"));
    match driver(name("namespace"), spec) {
        Some(driver) => serde_json::json!([place, driver.name]),
        None if asks_a_key_service(spec) => serde_json::json!([place, null]),
        None => Value::Null,
    }
}

/// Returns which driver the pods with this `spec` probably are.
fn driver(namespace: &str, spec: &Value) -> Option<&'static Driver> {
    let account = account(namespace, spec);
    if let Some(driver) = account.as_deref().and_then(of_account) {
        return Some(driver);
    }
    let containers = spec["containers"].as_array();
    let mut images = containers
        .into_iter()
        .flatten()
        .filter_map(|it| it["image"].as_str());
    images.find_map(|image| {
        let image = image.split('@').next().unwrap_or_default();
        let mut path = image.rsplit('/');
        let name = path.next()?.split(':').next()?;
        let is_of_constellation = path.next() == Some("constellation");
        let mut drivers = DRIVERS.iter();
        drivers.find(|driver| is_of_constellation && driver.image == name)
    })
}

/// Returns whether an argument of a pod with this `spec` names a key service.
fn asks_a_key_service(spec: &Value) -> bool {
    let containers = spec["containers"].as_array();
    let mut arguments = containers.into_iter().flatten().flat_map(|container| {
        ["command", "args"]
            .into_iter()
            .filter_map(|field| container[field].as_array())
            .flatten()
    });
    arguments.any(|word| {
        let word = word.as_str().unwrap_or_default().trim_start_matches('-');
        word.starts_with("kms-addr")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_driver_is_recognized_without_an_argument() {
        let set = |namespace: &str, account: &str, image: &str, arguments: &[&str]| {
            let container = json!({"image": image, "args": arguments});
            let pod =
                json!({"serviceAccountName": account, "containers": [{"image": "a"}, container]});
            place_and_driver(
                json!({"metadata": {"namespace": namespace, "name": "n"}, "spec": {"template": {"spec": pod}}}),
            )
        };
        let image = "ghcr.io/edgelesssys/constellation/aws-csi-driver:v1.2.0@sha256:00";
        let aws = "aws.csi.confidential.cloud";
        let node = ["node", "--endpoint=$(CSI_ENDPOINT)"];
        for (found, expected) in [
            (
                set("kube-system", "ebs-csi-node-sa", "mirror/a:1", &node),
                json!(["kube-system/n", aws]),
            ),
            (set("csi", "other", image, &node), json!(["csi/n", aws])),
            (
                set("csi", "other", "a", &["--kms-addr=k:9000"]),
                json!(["csi/n", null]),
            ),
            (set("csi", "ebs-csi-node-sa", "a", &node), Value::Null),
            (
                set("kube-system", "default", "aws-csi-driver:1", &node),
                Value::Null,
            ),
        ] {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn an_account_is_that_of_a_driver_in_kube_system_only() {
        let name = |account| of_account(account).map(|driver| driver.name);
        assert_eq!(
            name("kube-system/csi-cinder-node-sa"),
            Some("cinder.csi.confidential.cloud")
        );
        for other in [
            "tenant/csi-cinder-node-sa",
            "kube-system/default",
            "kube-system/",
            "csi-cinder-node-sa",
            "",
        ] {
            assert_eq!(name(other), None, "{other}");
        }
        assert!(DRIVERS.iter().all(|driver| driver.name.ends_with(SUFFIX)));
        // the chart of Cinder's driver uses the older field
        let spec = json!({"serviceAccount": "csi-cinder-node-sa"});
        assert_eq!(
            account("kube-system", &spec).as_deref(),
            Some("kube-system/csi-cinder-node-sa")
        );
        assert_eq!(account("a", &json!({"serviceAccountName": ""})), None);
    }
}
