//! The CSI drivers of Constellation, as its charts install them.
//!
//! | CSIDriver | DaemonSet in kube-system | its account | network | argument `--kms-addr` |
//! |---|---|---|---|---|
//! | `aws.csi.confidential.cloud` | `ebs-csi-node` | `ebs-csi-node-sa` | pod | none: the program's default |
//! | `azuredisk.csi.confidential.cloud` | `csi-azuredisk-node` | `csi-azuredisk-node-sa` | pod | yes |
//! | `gcp.csi.confidential.cloud` | `csi-gce-pd-node` | `csi-gce-pd-node-sa` | pod | yes |
//! | `cinder.csi.confidential.cloud` | `…-nodeplugin` | `csi-cinder-node-sa` | host | yes |

use crate::NAMESPACE;
use crate::client::{CSI_DRIVERS, Client, DAEMON_SETS, Error, Selector};
use crate::objects::{Container, CsiDriver, PodSpec, Workload};

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
pub fn account(namespace: &str, spec: &PodSpec) -> Option<String> {
    let names = [&spec.service_account_name, &spec.service_account];
    let name = names.into_iter().find(|name| !name.is_empty())?;
    Some(format!("{namespace}/{name}"))
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
    let all = Selector::default();
    let sets = client.list_keeping(&DAEMON_SETS.all(), &all, place_and_driver)?;
    let sets: Vec<_> = sets.items.into_iter().flatten().collect();
    let name = |driver: CsiDriver| driver.metadata.name;
    let objects = client.list_keeping(&CSI_DRIVERS.all(), &all, name)?;
    let known = |name: &str| sets.iter().any(|(_, driver)| *driver == Some(name));
    let unknown = objects.items.iter();
    let unknown = unknown.filter(|name| name.ends_with(SUFFIX) && !known(name));
    let unknown: Vec<_> = unknown.map(|name| format!("CSIDriver {name}")).collect();
    let sets = sets.into_iter().map(|(place, _)| place);
    Ok(sets.chain(unknown).collect())
}

/// Returns the place of a DaemonSet and the name of its driver, if it is one of Constellation or asks a key service.
fn place_and_driver(set: Workload) -> Option<(String, Option<&'static str>)> {
    let (metadata, spec) = (&set.metadata, &set.spec.template.spec);
    let driver = driver(&metadata.namespace, spec).map(|driver| driver.name);
    (driver.is_some() || asks_a_key_service(spec)).then(|| (metadata.place(), driver))
}

/// Returns which driver the pods with this `spec` probably are.
fn driver(namespace: &str, spec: &PodSpec) -> Option<&'static Driver> {
    let account = account(namespace, spec);
    if let Some(driver) = account.as_deref().and_then(of_account) {
        return Some(driver);
    }
    let mut images = spec.containers.iter().map(|it| &it.image);
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
fn asks_a_key_service(spec: &PodSpec) -> bool {
    let mut words = spec.containers.iter().flat_map(Container::words);
    words.any(|word| word.trim_start_matches('-').starts_with("kms-addr"))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_driver_is_recognized_without_an_argument() {
        let set = |namespace: &str, account: &str, image: &str, arguments: &[&str]| {
            let container = json!({"image": image, "args": arguments});
            let pod =
                json!({"serviceAccountName": account, "containers": [{"image": "a"}, container]});
            let set = json!({"metadata": {"namespace": namespace, "name": "n"}, "spec": {"template": {"spec": pod}}});
            place_and_driver(from_value(set).unwrap())
        };
        let image = "ghcr.io/edgelesssys/constellation/aws-csi-driver:v1.2.0@sha256:00";
        let aws = "aws.csi.confidential.cloud";
        let node = ["node", "--endpoint=$(CSI_ENDPOINT)"];
        for (found, expected) in [
            (
                set("kube-system", "ebs-csi-node-sa", "mirror/a:1", &node),
                Some(("kube-system/n".to_owned(), Some(aws))),
            ),
            (
                set("csi", "other", image, &node),
                Some(("csi/n".to_owned(), Some(aws))),
            ),
            (
                set("csi", "other", "a", &["--kms-addr=k:9000"]),
                Some(("csi/n".to_owned(), None)),
            ),
            (set("csi", "ebs-csi-node-sa", "a", &node), None),
            (
                set("kube-system", "default", "aws-csi-driver:1", &node),
                None,
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
        let spec = PodSpec {
            service_account: "csi-cinder-node-sa".into(),
            ..PodSpec::default()
        };
        assert_eq!(
            account("kube-system", &spec).as_deref(),
            Some("kube-system/csi-cinder-node-sa")
        );
        assert_eq!(account("a", &PodSpec::default()), None);
    }
}
