//! The objects of a cluster before the services replace those of another system, so that they can be restored later.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::client::{self, CONFIG_MAPS, Client, DAEMON_SETS, FIELD_MANAGER, LEASES, Object};
use super::super::machine_record::TURN;
use super::super::{NAMESPACE, removed_nodes};
use super::{
    COLLATERAL, Change, Error, InstallProgress, WATCH, kubeadm_bindings, owned, wait_ready,
    without_status,
};

/// Objects of Constellation that no object of ours replaces: the account of its key service may read every Secret, and
/// without a member controller only kubeadm's bindings let kubelets renew their certificates.
fn left_over() -> Vec<Value> {
    let of_key_service = ["ClusterRoleBinding", "ClusterRole"].map(|kind| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": "key-service"},
        })
    });
    let bindings = kubeadm_bindings::manifests();
    of_key_service.into_iter().chain(bindings).collect()
}

/// Returns the objects that our services and commands make while they run, and that nobody needs without them. The records of
/// machines are not among them.
fn made_by_services() -> [Object; 4] {
    let map = CONFIG_MAPS.in_namespace(NAMESPACE).named(COLLATERAL);
    let [turn, watch] = [TURN, WATCH].map(|name| LEASES.in_namespace(NAMESPACE).named(name));
    [map, removed_nodes::object(), turn, watch]
}

/// The objects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Before {
    /// The objects that existed, without what the server adds.
    pub objects: Vec<Value>,
    /// Kind and name of those that did not exist.
    pub absent: Vec<Value>,
}

impl Before {
    /// Reads the objects that these manifests would replace. Secrets are left out: their data stay.
    pub fn read(client: &Client, manifests: &[Value]) -> Result<Before, Error> {
        let mut before = Before::default();
        let secret = |manifest: &&Value| manifest["kind"] == "Secret";
        for manifest in (manifests.iter().filter(|it| !secret(it))).chain(&left_over()) {
            let at = Object::of(manifest)?;
            match client.find(&at)? {
                Some(object) => {
                    let mut object = without_status(&object);
                    // the server omits them in lists only, but no manifest lacks them
                    for field in ["apiVersion", "kind"] {
                        object[field] = manifest[field].clone();
                    }
                    before.objects.push(object);
                }
                None => before.absent.push(named(manifest)),
            }
        }
        Ok(before)
    }

    /// Deletes the objects of Constellation that no object of ours replaces.
    pub fn remove_left_over(client: &Client) -> Result<Vec<Object>, Error> {
        let mut removed = Vec::new();
        for object in left_over() {
            let at = Object::of(&object)?;
            if client.delete_if_there(&at)? {
                removed.push(at);
            }
        }
        Ok(removed)
    }

    /// Returns the first object that is none of these manifests, and none of Constellation that a move deletes. A Secret never is one.
    pub fn stranger(&self, manifests: &[Value]) -> Option<Value> {
        let known: Vec<_> = (manifests.iter().filter(|it| it["kind"] != "Secret"))
            .chain(&left_over())
            .map(named)
            .collect();
        let mut own = self.objects.iter().map(named).chain(self.absent.clone());
        own.find(|object| !known.contains(object))
    }

    /// Restores the objects, waits until their DaemonSets are ready, and deletes those that did not exist. Can be repeated.
    ///
    /// An earlier version may have read these objects, when the services had fewer: of the present `manifests`, those that it did not
    /// know are deleted, too, if Firstlight applied them.
    pub fn restore(
        &self,
        client: &Client,
        manifests: &[Value],
        time: Duration,
        report: &mut dyn FnMut(InstallProgress),
    ) -> Result<(), Error> {
        let mut sets = Vec::new();
        for object in &self.objects {
            let at = Object::of(object)?;
            report(InstallProgress::Phase(format!("restoring {at}")));
            let after = put_back(client, &at, object)?;
            report(InstallProgress::Line(format!("{at}: restored")));
            if *at.resource() == DAEMON_SETS {
                sets.push(Change {
                    at,
                    wanted: object.clone(),
                    before: None,
                    after,
                    replaces: false,
                });
            }
        }
        // until then, nodes ask the services that are replaced
        wait_ready(client, &sets, time, report)?;
        let absent = self.absent.iter().rev().map(Object::of);
        let mut absent = absent.collect::<Result<Vec<_>, _>>()?;
        absent.splice(0..0, self.added_since(client, manifests)?);
        for at in absent.into_iter().chain(made_by_services()) {
            if client.delete_if_there(&at)? {
                report(InstallProgress::Line(format!("{at}: deleted")));
            }
        }
        Ok(())
    }

    /// Returns the objects of these manifests that Firstlight applied, and that this list does not name: the last one first.
    fn added_since(&self, client: &Client, manifests: &[Value]) -> Result<Vec<Object>, Error> {
        let of_list = self.objects.iter().map(named);
        let known: Vec<_> = of_list.chain(self.absent.iter().cloned()).collect();
        let is_new = |it: &&Value| it["kind"] != "Secret" && !known.contains(&named(it));
        let mut added = vec![];
        for manifest in manifests.iter().rev().filter(is_new) {
            let at = Object::of(manifest)?;
            let present = client.find(&at)?;
            if present.is_some_and(|it| owned(&it, FIELD_MANAGER).is_some()) {
                added.push(at);
            }
        }
        Ok(added)
    }
}

/// Returns kind and name of an object.
fn named(object: &Value) -> Value {
    let metadata = &object["metadata"];
    let mut named = json!({
        "apiVersion": object["apiVersion"],
        "kind": object["kind"],
        "metadata": {"name": metadata["name"]},
    });
    if let Some(namespace) = metadata.get("namespace") {
        named["metadata"]["namespace"] = namespace.clone();
    }
    named
}

/// Writes an object as it was, whatever fields it has now.
fn put_back(client: &Client, at: &Object, object: &Value) -> Result<Value, client::Error> {
    if client.find(at)?.is_none() {
        return client.create(&at.collection(), object);
    }
    let mut whole = object.clone();
    // nobody applied these fields, so the server's record of who did is emptied
    whole["metadata"]["managedFields"] = json!([{}]);
    client.update(at, &whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_objects_of_the_services_are_restored_or_deleted() {
        let object = |kind: &str, name: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "kube-system"}});
        let manifests = [
            object("ConfigMap", "a"),
            object("Secret", "constellation-mastersecret"),
        ];
        let of = |objects: Vec<Value>, absent: Vec<Value>| {
            Before { objects, absent }.stranger(&manifests)
        };
        let mut whole = object("ConfigMap", "a");
        whole["data"] = json!({"x": "y"});
        let absent = left_over().iter().map(named).collect();
        assert_eq!(of(vec![whole], absent), None);
        for stranger in [
            object("ConfigMap", "b"),
            object("Secret", "constellation-mastersecret"),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "cluster-admin"}}),
        ] {
            assert_eq!(of(vec![stranger.clone()], vec![]), Some(stranger.clone()));
            assert_eq!(of(vec![], vec![stranger.clone()]), Some(stranger));
        }
    }
}
