//! The values of the chart with which Helm, an earlier run or Constellation installed the services
//! of a cluster. If an installation does not name a value, the present value is kept.
//!
//! Values that the chart only adds to an object, such as annotations and environment variables, stay
//! without this: a server-side apply does not remove fields of another manager. Resources and the pull
//! policy come from the chart that `firstlight apply` installs ([`from_chart`]), because a new version
//! may need more memory.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::super::NAMESPACE;
use super::super::client::{
    self, CLUSTER_ROLE_BINDINGS, Client, DAEMON_SETS, DEPLOYMENTS, NETWORK_POLICIES, SERVICES,
    Selector, VALIDATING_ADMISSION_POLICIES,
};
use super::render;
use crate::constellation::drivers;
use crate::objects::{
    AnyObject, Container, IngressRule, NetworkPolicy, ObjectMeta, PodSpec, ServiceObject, Workload,
};
use base::machines::Cloud;

/// Values of the chart by their names, as in Helm's `--set`.
pub type ChartValues = BTreeMap<&'static str, Value>;

pub const CLOUD: &str = "cloudProvider";
pub const METADATA: &str = "joinService.metadata";
pub const MIGRATE_UNTIL: &str = "joinService.migrateUntil";
pub const OLD_CLIENTS_UNTIL: &str = "keyService.oldClientsUntil";
pub const GRANTS: &str = "keyService.grants";
pub const NODE_PORT: &str = "joinService.nodePort";
pub const REQUIRE: &str = "joinService.require";
pub const WATCH: &str = "joinService.watch";
pub const WATCH_ACTION: &str = "joinService.watchAction";
pub const WATCH_ISSUER: &str = "joinService.watchIssuer";
/// The options of the join service that the operator's values set.
const OPTIONS: [(&str, &str); 12] = [
    ("--cloud-provider", CLOUD),
    ("--metadata", METADATA),
    ("--migrate-until", MIGRATE_UNTIL),
    ("--require", REQUIRE),
    ("--evidence", "joinService.evidence"),
    ("--collateral", "joinService.collateral"),
    ("--verification", "joinService.verification"),
    ("--verification-http", "joinService.verificationHttp"),
    ("--kds", "joinService.kds"),
    ("--pcs", "joinService.pcs"),
    ("--tcb-update", "joinService.tcbUpdate"),
    ("--log-format", "logFormat"),
];
/// Those of the member controller. Join services of earlier versions have them.
const WATCH_OPTIONS: [(&str, &str); 6] = [
    ("--watch", WATCH),
    ("--watch-action", WATCH_ACTION),
    ("--watch-silence", "joinService.watchSilence"),
    ("--watch-share", "joinService.watchShare"),
    ("--watch-close-disks", "joinService.watchCloseDisks"),
    ("--watch-issuer", WATCH_ISSUER),
];
/// Those of the key service.
const KEY_OPTIONS: [(&str, &str); 2] = [
    ("--grant", GRANTS),
    ("--old-clients-until", OLD_CLIENTS_UNTIL),
];
/// The fields of the join service's pods that have the names of their values. The key service's pods have the same.
const POD_FIELDS: [&str; 4] = [
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
];
/// The ports in the NetworkPolicies, and which value has the clients that may connect there.
const CLIENTS: [(&str, u16, &str); 5] = [
    ("join-service", 9092, "joinService.metricsClients"),
    // of an earlier version
    ("join-service", 9095, "joinService.watchClients"),
    ("member-controller", 9095, "joinService.watchClients"),
    ("key-service", 9000, "keyService.clients"),
    ("key-service", 9092, "keyService.metricsClients"),
];
/// The annotation of the join service's limits that tells whether the chart made no policies of admission.yaml.
const ADMISSION: &str = "firstlight/admission";
/// The ClusterRoleBindings whose subjects are a value.
const SUBJECTS: [(&str, &str); 2] = [
    ("firstlight-addresses", "admission.cloudControllers"),
    ("firstlight-own-addresses", "admission.cloudNodeManagers"),
];
/// Fields of each service's container that come from the chart.
const OF_CHART: [&str; 2] = ["resources", "imagePullPolicy"];

/// The objects that have the values. Those that do not exist are empty.
#[derive(Default)]
struct Present {
    join_service: Workload,
    /// The whole `spec` of its pods.
    join_service_pod: Value,
    key_service: Workload,
    member_controller: Workload,
    service: ServiceObject,
    policies: Vec<NetworkPolicy>,
    /// The subjects of those of [`SUBJECTS`] that exist, by their values.
    subjects: ChartValues,
    /// The limits of the join service's account.
    limits: AnyObject,
}

/// Returns the values of the present services that differ from those of the chart; none if there
/// are no services.
pub fn present(client: &Client) -> Result<ChartValues, client::Error> {
    let set = |name: &str| {
        let set = client.find_whole(&DAEMON_SETS.in_namespace(NAMESPACE).named(name))?;
        Ok::<(Workload, Value), client::Error>(set.unwrap_or_default())
    };
    let (join_service, whole) = set("join-service")?;
    let mut present = Present {
        join_service,
        join_service_pod: pod_of(&whole),
        key_service: set("key-service")?.0,
        member_controller: set("member-controller")?.0,
        limits: match client.find_as(&VALIDATING_ADMISSION_POLICIES.named("join-service")) {
            // `apply` leaves out what it may not read
            Err(error) if error.code() == Some(403) => AnyObject::default(),
            found => found?.unwrap_or_default(),
        },
        ..Present::default()
    };
    let service = SERVICES.in_namespace(NAMESPACE).named("join-service");
    present.service = client.find_as(&service)?.unwrap_or_default();
    for name in ["join-service", "key-service", "member-controller"] {
        let policy = NETWORK_POLICIES.in_namespace(NAMESPACE).named(name);
        let policy: Option<NetworkPolicy> = client.find_as(&policy)?;
        present.policies.extend(policy);
    }
    for (name, value) in SUBJECTS {
        let binding = client.find(&CLUSTER_ROLE_BINDINGS.named(name))?;
        let subjects = binding.map(|binding| (value, subjects_of(&binding)));
        present.subjects.extend(subjects);
    }
    let defaults = render::defaults().unwrap_or_default();
    let mut values = of(&present, &defaults);
    values.retain(|name, value| defaults.pointer(&pointer(name)) != Some(value));
    Ok(values)
}

/// Returns a sentence for each field of a service's container that the installation sets to the chart's value,
/// from the object before it and after it.
pub fn from_chart(before: &Value, after: &Value) -> Vec<String> {
    let container = |set: &Value| pod_of(set)["containers"][0].clone();
    let (before, after) = (container(before), container(after));
    let changed = OF_CHART
        .iter()
        .filter(|field| !before[**field].is_null() && before[**field] != after[**field]);
    changed
        .map(|field| {
            format!(
                "{}: {field} becomes {}, the chart's, and was {}",
                after["name"].as_str().unwrap_or_default(),
                after[*field],
                before[*field]
            )
        })
        .collect()
}

/// Returns the last day on which the present key service serves clients without a token, if its
/// command line has one.
pub fn old_clients_until(client: &Client) -> Result<Option<String>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("key-service");
    let set = client.find_as(&at)?.unwrap_or_default();
    Ok(option_of(&set, "--old-clients-until"))
}

/// The clients of Constellation's key service that get no key from one of Firstlight, each as `NAMESPACE/NAME`.
#[derive(Debug, Default)]
pub struct RefusedOldClients {
    /// The CSI drivers.
    pub drivers: Vec<String>,
    /// The S3 proxies.
    pub s3_proxies: Vec<String>,
    /// The service accounts of their pods, each as `NAMESPACE/NAME`.
    pub s3_accounts: Vec<String>,
    /// Deployments elsewhere that look like an S3 proxy: each user with the role `edit` in a namespace can make one there.
    pub maybe_s3_proxies: Vec<String>,
}

/// The namespaces in which Constellation's documentation and its Helm repository install the S3 proxy. Its pods have no account or
/// label of their own, so only the namespace tells who installed it.
const S3_PROXY_NAMESPACES: [&str; 3] = ["default", "s3proxy", NAMESPACE];

/// Returns the clients that lose access to their keys when this cluster's key service is replaced. There are none if it is
/// one of Firstlight.
pub fn old_clients(client: &Client) -> Result<RefusedOldClients, client::Error> {
    if maker(client)? != Some(Maker::Constellation) {
        return Ok(RefusedOldClients::default());
    }
    all_old_clients(client)
}

/// The same, whoever made the key service.
pub fn all_old_clients(client: &Client) -> Result<RefusedOldClients, client::Error> {
    let proxies = client.list_keeping(&DEPLOYMENTS.all(), &Selector::default(), s3_proxy)?;
    let proxies = proxies.items.into_iter().flatten();
    let (known, others): (Vec<_>, Vec<_>) = proxies.partition(|proxy| proxy.is_known);
    let texts = |proxies: &[S3Proxy], text: fn(&S3Proxy) -> &String| {
        let texts: BTreeSet<_> = proxies.iter().map(text).cloned().collect();
        texts.into_iter().collect()
    };
    Ok(RefusedOldClients {
        drivers: drivers::present(client)?,
        s3_proxies: texts(&known, |proxy| &proxy.place),
        s3_accounts: texts(&known, |proxy| &proxy.account),
        maybe_s3_proxies: texts(&others, |proxy| &proxy.place),
    })
}

/// Which system a key service is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Maker {
    /// Constellation.
    Constellation,
    /// Firstlight.
    Firstlight,
}

/// Returns which system the present key service is of; `None` if there is none.
pub fn maker(client: &Client) -> Result<Option<Maker>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("key-service");
    let set = client.find_as(&at)?.unwrap_or_default();
    let words = words(&set);
    Ok(match words.contains(&"--clients") {
        _ if words.is_empty() => None,
        true => Some(Maker::Firstlight),
        false => Some(Maker::Constellation),
    })
}

/// A Deployment of an S3 proxy.
#[derive(Debug, PartialEq)]
struct S3Proxy {
    place: String,
    /// The account of its pods.
    account: String,
    /// Whether Constellation installs one in its namespace.
    is_known: bool,
}

fn s3_proxy(set: Workload) -> Option<S3Proxy> {
    let (namespace, spec) = (&set.metadata.namespace, &set.spec.template.spec);
    let account = drivers::account(namespace, spec);
    is_s3_proxy(spec).then(|| S3Proxy {
        place: set.metadata.place(),
        // the chart names none
        account: account.unwrap_or_else(|| format!("{namespace}/default")),
        is_known: S3_PROXY_NAMESPACES.contains(&namespace.as_str()),
    })
}

/// Returns whether the pods with this `spec` look like Constellation's S3 proxy. Its chart names no key service, because its program
/// knows the address, so the image tells, or the name of the port if the image has another name.
fn is_s3_proxy(spec: &PodSpec) -> bool {
    spec.containers.iter().any(|container| {
        let image = container.image.split('@').next().unwrap_or_default();
        let mut path = image.rsplit('/');
        let name = path.next().unwrap_or_default().split(':').next();
        let is_its_image = name == Some("s3proxy") && path.next() == Some("constellation");
        is_its_image
            || container
                .ports
                .iter()
                .any(|port| port.name == "s3proxy-port")
    })
}

/// Returns the attestation variant of the present services; `None` if there are none.
pub fn variant(client: &Client) -> Result<Option<String>, client::Error> {
    let at = DAEMON_SETS.in_namespace(NAMESPACE).named("join-service");
    let set = client.find_as(&at)?.unwrap_or_default();
    Ok(option_of(&set, "--attestation-variant"))
}

/// Returns the value of an option of a service, from its DaemonSet.
pub fn option_of(set: &Workload, option: &str) -> Option<String> {
    value_of(&words(set), option).map(str::to_owned)
}

/// Returns the command line of a service, from its DaemonSet.
pub fn words(set: &Workload) -> Vec<&str> {
    set.container()
        .into_iter()
        .flat_map(Container::words)
        .collect()
}

/// Returns the chart values that produce these objects.
fn of(present: &Present, defaults: &Value) -> ChartValues {
    let mut values = ChartValues::new();
    let mut read = |set: &Workload, options: &[(&str, &'static str)]| {
        let words = words(set);
        for (option, name) in options {
            values.extend(value_of(&words, option).map(|value| (*name, value.into())));
        }
    };
    read(&present.join_service, &OPTIONS);
    for set in [&present.join_service, &present.member_controller] {
        read(set, &WATCH_OPTIONS);
    }
    read(&present.key_service, &KEY_OPTIONS);
    // Constellation does not always write a cloud's name in lower case
    if let Some(Value::String(name)) = values.get_mut(CLOUD) {
        name.make_ascii_lowercase();
        if !name.is_empty() && Cloud::named(name).is_err() {
            values.remove(CLOUD);
        }
    }
    let port = present.service.spec.ports.first();
    let port = port.and_then(|port| port.node_port);
    values.extend(port.map(|port| (NODE_PORT, port.into())));
    let pod = &present.join_service_pod;
    let secrets = pod.get("imagePullSecrets");
    values.extend(secrets.map(|secrets| ("imagePullSecrets", secrets.clone())));
    if is_of_chart(&present.join_service.metadata) {
        // the API server leaves out an empty value
        let value = |name| pod.get(name).cloned().unwrap_or(empty(&defaults[name]));
        values.extend(POD_FIELDS.map(|name| (name, value(name))));
    }
    for (service, port, name) in CLIENTS {
        let mut policies = present.policies.iter().map(|it| (&it.metadata, &it.spec));
        let policy = policies.find(|(it, _)| it.name == service && is_of_chart(it));
        values.extend(policy.and_then(|(_, spec)| Some((name, clients(&spec.ingress, port)?))));
    }
    values.extend(present.subjects.clone());
    if present.limits.metadata.annotation(ADMISSION) == Some("off") {
        values.insert("admission.enabled", false.into());
    }
    values
}

/// Returns the whole `spec` of a workload's pods.
fn pod_of(whole: &Value) -> Value {
    whole["spec"]["template"]["spec"].clone()
}

fn subjects_of(binding: &Value) -> Value {
    binding.get("subjects").cloned().unwrap_or(json!([]))
}

/// Returns whether an object was installed from the chart, and not by Constellation.
pub fn is_of_chart(metadata: &ObjectMeta) -> bool {
    let chart = metadata.label("helm.sh/chart");
    chart.is_some_and(|chart| chart.starts_with("firstlight-"))
}

/// Returns an empty value of this type.
fn empty(like: &Value) -> Value {
    match like {
        Value::Array(_) => json!([]),
        Value::Object(_) => json!({}),
        _ => json!(""),
    }
}

/// Returns the clients that may connect to this port, if the policy limits them.
fn clients(rules: &[IngressRule], port: u16) -> Option<Value> {
    let has_port = |rule: &&IngressRule| rule.ports.iter().any(|one| one.port == port);
    rules.iter().find(has_port)?.from.clone()
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
pub fn nested(values: &ChartValues) -> Value {
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
    use serde_json::from_value;

    use super::*;

    #[test]
    fn the_values_of_a_cluster_are_those_of_its_objects() {
        let clients = |name: &str| json!([{"podSelector": {"matchLabels": {"app": name}}}]);
        let given = json!({
            "cloudProvider": "aws", "logFormat": "json", "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"node-role.kubernetes.io/control-plane": "", "a": "b"}, "affinity": {"nodeAffinity": {}}, "tolerations": [], "priorityClassName": "",
            "joinService": {"nodePort": 30091, "require": "strong", "migrateUntil": "2027-01-31", "kds": "http://k",
                "metadata": "http://m", "pcs": "https://p", "tcbUpdate": "standard", "verification": "a", "verificationHttp": "b",
                "evidence": "", "collateral": "/cache", "metricsClients": clients("a"), "watch": "600",
                "watchAction": "taint", "watchSilence": "3600", "watchShare": "30", "watchCloseDisks": "yes",
                "watchIssuer": "https://results.example", "watchClients": clients("d")},
            "keyService": {"grants": "anyone=id:s3proxy-kek", "oldClientsUntil": "2027-01-31", "clients": clients("b"),
                "metricsClients": clients("c")},
            "admission": {"cloudControllers": [{"kind": "Group", "name": "g", "apiGroup": "rbac.authorization.k8s.io"}],
                "cloudNodeManagers": []},
        });
        let defaults = render::defaults().unwrap();
        let mut all = given.clone();
        all["image"] = "i".into();
        let mut present = objects_of(all);
        assert_eq!(nested(&of(&present, &defaults)), given);
        // the API server leaves out empty values
        let pod = present.join_service_pod.as_object_mut().unwrap();
        for name in ["tolerations", "priorityClassName"] {
            pod.remove(name);
        }
        assert_eq!(nested(&of(&present, &defaults)), given);

        let off = json!({"image": "i", "admission": {"enabled": false}});
        let values = of(&objects_of(off), &defaults);
        assert_eq!(values["admission.enabled"], false);

        // the join service of an earlier version had the watch
        let mut earlier = objects_of(json!({"image": "i", "joinService": {"watch": "600"}}));
        earlier.join_service = std::mem::take(&mut earlier.member_controller);
        assert_eq!(of(&earlier, &defaults)[WATCH], "600");

        // values that nobody has chosen are those of the chart
        let mut values = of(&objects_of(json!({"image": "i"})), &defaults);
        values.retain(|name, value| defaults.pointer(&pointer(name)) != Some(value));
        assert_eq!(values, ChartValues::new());
    }

    fn objects_of(values: Value) -> Present {
        let objects = render::objects(values).unwrap();
        let named = |kind: &str, name: &str| {
            let is_it =
                |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
            objects.iter().find(is_it).cloned()
        };
        let set = |name| named("DaemonSet", name).unwrap();
        let policy =
            |name| -> NetworkPolicy { from_value(named("NetworkPolicy", name).unwrap()).unwrap() };
        let limits = named("ValidatingAdmissionPolicy", "join-service").unwrap();
        let binding = |(name, value)| {
            let binding = named("ClusterRoleBinding", name)?;
            Some((value, subjects_of(&binding)))
        };
        Present {
            join_service: from_value(set("join-service")).unwrap(),
            join_service_pod: pod_of(&set("join-service")),
            key_service: from_value(set("key-service")).unwrap(),
            member_controller: from_value(set("member-controller")).unwrap(),
            service: from_value(named("Service", "join-service").unwrap()).unwrap(),
            policies: ["join-service", "key-service", "member-controller"]
                .map(policy)
                .into(),
            subjects: SUBJECTS.into_iter().filter_map(binding).collect(),
            limits: from_value(limits).unwrap(),
        }
    }

    #[test]
    fn the_s3_proxy_is_known_by_its_image_or_its_port() {
        let spec = |image: &str, port: &str| {
            let container =
                json!({"image": image, "ports": [{"containerPort": 4433, "name": port}]});
            from_value(json!({"containers": [{"image": "other"}, container]})).unwrap()
        };
        for (image, port, is_one) in [
            (
                "ghcr.io/edgelesssys/constellation/s3proxy:v2.16.0",
                "",
                true,
            ),
            (
                "mirror.example:5000/constellation/s3proxy@sha256:00",
                "",
                true,
            ),
            ("mirror.example/own:1", "s3proxy-port", true),
            ("andrewgaul/s3proxy:1", "http", false),
            ("s3proxy", "", false),
        ] {
            assert_eq!(is_s3_proxy(&spec(image, port)), is_one, "{image} {port}");
        }
        assert!(!is_s3_proxy(&PodSpec::default()));
    }

    #[test]
    fn only_where_constellation_installs_one_a_deployment_is_its_s3_proxy() {
        let deployment = |namespace: &str| {
            let pod = json!({"containers": [{"image": "x/constellation/s3proxy:1"}]});
            let set = json!({
                "metadata": {"namespace": namespace, "name": "a"},
                "spec": {"template": {"spec": pod}},
            });
            s3_proxy(from_value(set).unwrap()).unwrap()
        };
        for (namespace, is_known) in [("default", true), ("s3proxy", true), ("tenant", false)] {
            let expected = S3Proxy {
                place: format!("{namespace}/a"),
                account: format!("{namespace}/default"),
                is_known,
            };
            assert_eq!(deployment(namespace), expected);
        }
    }

    #[test]
    fn limits_of_the_chart_are_said_when_they_replace_others() {
        let set = |resources: Value| {
            let container =
                json!({"name": "key-service", "resources": resources, "imagePullPolicy": "Always"});
            json!({"spec": {"template": {"spec": {"containers": [container]}}}})
        };
        let (before, after) = (set(json!({"limits": 1})), set(json!({"limits": 2})));
        assert_eq!(
            from_chart(&before, &after),
            [r#"key-service: resources becomes {"limits":2}, the chart's, and was {"limits":1}"#]
        );
        assert_eq!(from_chart(&after, &after), [""; 0]);
        assert_eq!(from_chart(&Value::Null, &after), [""; 0]);
    }

    #[test]
    fn the_cloud_of_the_old_system_is_kept_and_not_its_tolerations() {
        let of = |name: &str| {
            let words = ["--cloud-provider=x", "--key-service-endpoint=y"]
                .map(|word| word.replace('x', name));
            let container = json!({"name": "join-service", "args": words});
            let pod = json!({"containers": [container], "tolerations": [{"key": "a"}]});
            let present = Present {
                join_service: from_value(json!({"spec": {"template": {"spec": pod}}})).unwrap(),
                join_service_pod: pod,
                ..Present::default()
            };
            of(&present, &render::defaults().unwrap())
        };
        assert_eq!(nested(&of("GCP")), json!({"cloudProvider": "gcp"}));
        assert_eq!(nested(&of("home")), json!({}));
    }
}
