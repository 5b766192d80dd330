//! docs/clouds/openstack.md and infra/openstack.

use serde_json::{Value, json};

use super::super::work::Work;
use super::{Call, Facts, Line, Module, compare, init_of_page, texts};

const PAGE: &[Line] = &[
    ("network create", "network {} tags {tag}"),
    (
        "subnet create",
        "subnet {} of {network}: {subnet-range} servers {dns-nameserver} tags {tag}",
    ),
    ("router create", "router {} to {external-gateway}"),
    ("security group create", "group {}"),
    (
        "security group rule create",
        "to {}: {protocol} {dst-port} from {remote-group}{remote-ip}",
    ),
    (
        "loadbalancer create",
        "balancer {name} in {vip-subnet-id} tags {tag}",
    ),
    (
        "loadbalancer listener create",
        "listener {name} of {wait}: {protocol} {protocol-port} for {allowed-cidr} timeouts {timeout-client-data} {timeout-member-data}",
    ),
    (
        "loadbalancer pool create",
        "pool {name} of {listener}: {protocol} {lb-algorithm}",
    ),
    (
        "loadbalancer healthmonitor create",
        "monitor {name} of {wait}: {type} {delay} {timeout} {max-retries}",
    ),
    (
        "loadbalancer member create",
        "member {name} of {wait}: {protocol-port}",
    ),
    ("floating ip create", "floating address of {}"),
    ("application credential create", "credential {} role {role}"),
    (
        "server create",
        "server {} image {image} flavor {flavor} network {network} groups {security-group} data {user-data}",
    ),
    (
        "server create",
        "server {} properties {property} tags {tag}",
    ),
    ("server create", "server {} state disk {block-device}"),
];

const MODULE: &[Line] = &[
    (
        "openstack_networking_network_v2",
        "network {name} tags {tags}",
    ),
    (
        "openstack_networking_subnet_v2",
        "subnet {name} of {>network_id}: {cidr} servers {dns_nameservers} tags {tags}",
    ),
    (
        "openstack_networking_router_v2",
        "router {name} to {external_network_id}",
    ),
    (
        "openstack_networking_router_interface_v2",
        "router {>router_id} in {>subnet_id}",
    ),
    ("openstack_networking_secgroup_v2", "group {name}"),
    (
        "openstack_networking_secgroup_rule_v2",
        "to {>security_group_id}: {protocol} {ports} from {from}",
    ),
    (
        "openstack_lb_loadbalancer_v2",
        "balancer {name} in {>vip_subnet_id} tags {tags}",
    ),
    (
        "openstack_lb_listener_v2",
        "listener {name} of {>loadbalancer_id}: {protocol} {protocol_port} for {allowed_cidrs} timeouts {timeout_client_data} \
         {timeout_member_data}",
    ),
    (
        "openstack_lb_pool_v2",
        "pool {name} of {>listener_id}: {protocol} {lb_method}",
    ),
    (
        "openstack_lb_monitor_v2",
        "monitor {name} of {>pool_id}: {type} {delay} {timeout} {max_retries}",
    ),
    (
        "openstack_lb_member_v2",
        "member {name} of {>pool_id}: {protocol_port}",
    ),
    (
        "openstack_networking_floatingip_v2",
        "floating address of {pool}",
    ),
    (
        "openstack_identity_application_credential_v3",
        "credential {name} role {roles}",
    ),
    (
        "openstack_identity_application_credential_v3",
        "{name} may {*rules}",
    ),
    (
        "openstack_compute_instance_v2",
        "server {name} image {image_id} flavor {flavor_name} network {>network.0.uuid} groups {security_groups} \
         data {metadata.constellation-role}.json",
    ),
    (
        "openstack_compute_instance_v2",
        "server {name} properties {metadata} tags {tags}",
    ),
    (
        "openstack_compute_instance_v2",
        "server {name} state disk {block_device.1}",
    ),
    (
        "openstack_compute_instance_v2",
        "{metadata.constellation-role}.json: {*data}",
    ),
];

const OTHERS: &[&str] = &["image create", "router add subnet"];

/// Checks that the module plans what the page's commands make.
pub fn check(work: &Work) {
    let mut calls = Call::all(&work.path("calls.jsonl"));
    let mut names = calls
        .iter()
        .filter_map(|call| call.words.strip_prefix("image create "));
    let cluster = names.next().unwrap();
    let properties = calls.iter().flat_map(|call| call.values("property"));
    let mut hash = properties.filter_map(|it| it.strip_prefix("constellation-init-secret-hash="));
    // the page gives names where the module wants IDs
    let variables = json!({"cluster": cluster, "auth_url": "u", "region": "r", "image": cluster, "flavor": "m1.large",
        "outside_id": "public", "operators": ["203.0.113.7/32"], "init_secret_hash": hash.next_back().unwrap(), "control_planes": 3,
        "workers": 2});
    let plan = Module::new("openstack").plan_with_names(&variables);

    let mut page = Facts::from([init_of_page("openstack")]);
    for role in ["control-plane", "worker"] {
        let data: Value = serde_json::from_str(&work.read(&format!("{role}.json"))).unwrap();
        page.extend(
            keys(&data)
                .into_iter()
                .map(|key| format!("{role}.json: {key}")),
        );
    }
    for call in &mut calls {
        for port in call.options.get_mut("dst-port").into_iter().flatten() {
            *port = port.replace(':', "-");
        }
        page.extend(call.facts(PAGE, OTHERS));
        if let Some(name) = call.words.strip_prefix("router add subnet ") {
            page.insert(format!("router {}", name.replace(' ', " in ")));
        }
        if let [rules] = call.values("access-rules") {
            let name = call.words.rsplit(' ').next().unwrap();
            let rules = access(&serde_json::from_str(rules).unwrap());
            page.extend(rules.into_iter().map(|rule| format!("{name} may {rule}")));
        }
    }
    compare("openstack", &page, &module(plan).facts(MODULE));
}

/// Returns the keys of a server's user data: a worker gets no credentials.
fn keys(data: &Value) -> Vec<String> {
    data.as_object().unwrap().keys().cloned().collect()
}

fn access(rules: &Value) -> Vec<String> {
    let rules = rules.as_array().unwrap().iter();
    rules
        .map(|rule| {
            ["service", "method", "path"]
                .map(|part| rule[part].as_str().unwrap())
                .join(" ")
        })
        .collect()
}

/// Gives the plan's values the form of the page.
fn module(mut plan: super::Plan) -> super::Plan {
    plan.edit("openstack_networking_secgroup_rule_v2", |rule| {
        assert_eq!(rule["direction"], "ingress");
        let ends = [&rule["port_range_min"], &rule["port_range_max"]].map(Value::as_u64);
        rule["ports"] = match ends {
            [Some(first), Some(last)] if first == last => json!(first.to_string()),
            [Some(first), Some(last)] => json!(format!("{first}-{last}")),
            _ => Value::Null,
        };
        let network = texts(&rule["remote_ip_prefix"])
            .pop()
            .filter(|it| !it.contains('|'));
        let group = texts(&rule["remote_group_id"]).pop().unwrap_or_default();
        rule["from"] = json!(network.unwrap_or_else(|| super::referred(&group).to_owned()));
    });
    plan.edit("openstack_networking_floatingip_v2", |address| {
        let port = texts(&address["port_id"]).join("");
        assert!(port.starts_with("openstack_lb_loadbalancer_v2|"), "{port}");
    });
    plan.edit(
        "openstack_identity_application_credential_v3",
        |credential| {
            credential["rules"] = json!(access(&credential["access_rules"]));
        },
    );
    plan.edit("openstack_compute_instance_v2", |server| {
        let image = &server["block_device"][0];
        assert_eq!(
            (&image["uuid"], &image["source_type"]),
            (&server["image_id"], &json!("image"))
        );
        let data: Value = serde_json::from_str(server["user_data"].as_str().unwrap()).unwrap();
        let endpoint = data["openstack-load-balancer-endpoint"].as_str().unwrap();
        assert!(
            endpoint.starts_with("openstack_networking_floatingip_v2|"),
            "{endpoint}"
        );
        server["data"] = json!(keys(&data));
    });
    plan
}
