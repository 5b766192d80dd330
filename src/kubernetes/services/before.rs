//! The objects of a cluster before the services replace those of another system, so that they can be restored later.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::client::{self, Client, DAEMON_SETS, Object};
use super::{Change, Error, Report, kubeadm_bindings, wait_ready, without_status};

/// Objects of Constellation that no object of ours replaces: the account of its key service may read every Secret, and
/// without a join service of ours only kubeadm's bindings let kubelets renew their certificates.
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
    pub fn restore(
        &self,
        client: &Client,
        time: Duration,
        report: &mut dyn FnMut(Report),
    ) -> Result<(), Error> {
        let mut sets = Vec::new();
        for object in &self.objects {
            let at = Object::of(object)?;
            report(Report::Phase(format!("restoring {at}")));
            let after = put_back(client, &at, object)?;
            report(Report::Line(format!("{at}: restored")));
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
        for object in self.absent.iter().rev() {
            let at = Object::of(object)?;
            if client.delete_if_there(&at)? {
                report(Report::Line(format!("{at}: deleted")));
            }
        }
        Ok(())
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
