//! The values of the chart with which Helm, an earlier run or Constellation installed the services
//! of a cluster. If an installation does not name a value, the present value is kept.
//!
//! Only values that the operator of a cluster chooses are kept. What the chart itself decides, such
//! as resources and paths, comes from the chart that `firstlight apply` installs.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::NAMESPACE;
use super::super::client::{self, Client, DAEMON_SETS, Resource, SERVICES, Selector};
use super::render;
use machines::Cloud;

/// Values of the chart by their names, as in Helm's `--set`.
pub type Values = BTreeMap<&'static str, Value>;

pub const CLOUD: &str = "cloudProvider";
pub const METADATA: &str = "joinService.metadata";
pub const MIGRATE_UNTIL: &str = "joinService.migrateUntil";
pub const OLD_CLIENTS_UNTIL: &str = "keyService.oldClientsUntil";
pub const NODE_PORT: &str = "joinService.nodePort";
pub const REQUIRE: &str = "joinService.require";
/// The options of the join service that the operator's values set.
const OPTIONS: [(&str, &str); 10] = [
    ("--cloud-provider", CLOUD),
    ("--metadata", METADATA),
    ("--migrate-until", MIGRATE_UNTIL),
    ("--require", REQUIRE),
    ("--verification", "joinService.verification"),
    ("--verification-http", "joinService.verificationHttp"),
    ("--kds", "joinService.kds"),
    ("--pcs", "joinService.pcs"),
    ("--tcb-update", "joinService.tcbUpdate"),
    ("--log-format", "logFormat"),
];

/// Returns the values of the present services that differ from those of the chart; none if there
/// are no services.
pub fn present(client: &Client) -> Result<Values, client::Error> {
    let find =
        |resource: &Resource| client.find(&resource.in_namespace(NAMESPACE).named("join-service"));
    let Some(set) = find(&DAEMON_SETS)? else {
        return Ok(Values::new());
    };
    let service = find(&SERVICES)?.unwrap_or_default();
    let defaults = render::defaults().unwrap_or_default();
    let mut values = of(&set, &service);
    let until = old_clients_until(client)?;
    values.extend(until.map(|until| (OLD_CLIENTS_UNTIL, until.into())));
    values.retain(|name, value| defaults.pointer(&pointer(name)) != Some(value));
    Ok(values)
}

/// Returns the last day on which the present key service serves clients without a token, if its
/// command line has one.
pub fn old_clients_until(client: &Client) -> Result<Option<String>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("key-service");
    let set = client.find(&at)?.unwrap_or_default();
    Ok(value_of(&words(&set), "--old-clients-until").map(str::to_owned))
}

/// Returns the CSI drivers of Constellation that lose access to the keys of their volumes when this
/// cluster's key service is replaced. There are none if it is one of Firstlight.
pub fn old_drivers(client: &Client) -> Result<Vec<String>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("key-service");
    let set = client.find(&at)?.unwrap_or_default();
    let words = words(&set);
    if words.is_empty() || words.contains(&"--clients") {
        return Ok(Vec::new());
    }
    let found = client.list_keeping(&DAEMON_SETS.all(), &Selector::default(), driver)?;
    Ok(found
        .items
        .iter()
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect())
}

/// Returns whether a pod with this `spec` asks a key service, as the drivers of Constellation do.
pub fn asks_a_key_service(spec: &Value) -> bool {
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

/// Returns the name of a DaemonSet if its pods ask a key service.
fn driver(set: Value) -> Value {
    let asks = asks_a_key_service(&set["spec"]["template"]["spec"]);
    let name = |field: &str| set["metadata"][field].as_str().unwrap_or_default();
    match asks {
        true => format!("{}/{}", name("namespace"), name("name")).into(),
        false => Value::Null,
    }
}

/// Returns the attestation variant of the present services; `None` if there are none.
pub fn variant(client: &Client) -> Result<Option<String>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("join-service");
    let set = client.find(&at)?.unwrap_or_default();
    Ok(value_of(&words(&set), "--attestation-variant").map(str::to_owned))
}

/// Returns the command line of a service.
fn words(set: &Value) -> Vec<&str> {
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    [&container["command"], &container["args"]]
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Returns the chart values that produce these objects.
fn of(set: &Value, service: &Value) -> Values {
    let pod = &set["spec"]["template"]["spec"];
    let words = words(set);
    let mut values = Values::new();
    for (option, name) in OPTIONS {
        if let Some(value) = value_of(&words, option) {
            values.insert(name, value.into());
        }
    }
    // Constellation does not always write a cloud's name in lower case
    if let Some(Value::String(name)) = values.get_mut(CLOUD) {
        name.make_ascii_lowercase();
        if !name.is_empty() && Cloud::named(name).is_err() {
            values.remove(CLOUD);
        }
    }
    let port = service.pointer("/spec/ports/0/nodePort");
    values.extend(port.map(|port| (NODE_PORT, port.clone())));
    let secrets = pod.get("imagePullSecrets");
    values.extend(secrets.map(|secrets| ("imagePullSecrets", secrets.clone())));
    values
}

/// Returns the value of an option in one of its two forms: `--name value` or `--name=value`.
fn value_of<'a>(words: &[&'a str], option: &str) -> Option<&'a str> {
    let at = |word: &&str| {
        word.strip_prefix(option)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    };
    let index = words.iter().position(at)?;
    match words[index].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(index + 1).copied(),
    }
}

/// Returns these values in the form that the chart accepts.
pub fn nested(values: &Values) -> Value {
    let mut all = json!({});
    for (name, value) in values {
        let mut at = &mut all;
        for part in name.split('.') {
            at = &mut at[part];
        }
        *at = value.clone();
    }
    all
}

fn pointer(name: &str) -> String {
    format!("/{}", name.replace('.', "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_a_cluster_are_those_of_its_objects() {
        let given = json!({
            "cloudProvider": "aws", "logFormat": "json", "imagePullSecrets": [{"name": "registry"}],
            "joinService": {"nodePort": 30091, "require": "strong", "migrateUntil": "2027-01-31", "kds": "http://k",
                "metadata": "http://m", "pcs": "https://p", "tcbUpdate": "standard", "verification": "a", "verificationHttp": "b"},
        });
        let mut all = given.clone();
        all["image"] = "i".into();
        let objects = render::objects(all).unwrap();
        let named = |kind: &str| {
            let is_it = |object: &&Value| {
                object["kind"] == kind && object["metadata"]["name"] == "join-service"
            };
            objects.iter().find(is_it).unwrap()
        };
        let values = of(named("DaemonSet"), named("Service"));
        assert_eq!(nested(&values), given);
    }

    #[test]
    fn the_cloud_of_the_old_system_is_kept() {
        let of = |name: &str| {
            let words = ["--cloud-provider=x", "--key-service-endpoint=y"]
                .map(|word| word.replace('x', name));
            let container = json!({"name": "join-service", "args": words});
            of(
                &json!({"spec": {"template": {"spec": {"containers": [container]}}}}),
                &json!({}),
            )
        };
        assert_eq!(nested(&of("GCP")), json!({"cloudProvider": "gcp"}));
        assert_eq!(nested(&of("home")), json!({}));
    }
}
