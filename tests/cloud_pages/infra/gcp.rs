//! docs/clouds/gcp.md and infra/gcp.

use serde_json::{Value, json};

use super::super::work::Work;
use super::{Call, Facts, Line, Module, Plan, compare, init_of_page, referred, texts};

const PAGE: &[Line] = &[
    ("compute networks create", "network {} {subnet-mode}"),
    (
        "compute networks subnets create",
        "subnet {} of {network}: {range} private {enable-private-ip-google-access}",
    ),
    ("compute routers create", "router {} of {network}"),
    (
        "compute routers nats create",
        "nat {} of {router}: {auto-allocate-nat-external-ips} {nat-all-subnet-ip-ranges}",
    ),
    (
        "compute firewall-rules create",
        "rule {} to {target-tags} of {network}: {*allow} from {*source-ranges}",
    ),
    (
        "compute firewall-rules create",
        "rule {} to {target-tags} of {network}: {*allow} from {*source-tags}",
    ),
    ("iam roles create", "role {}: {*permissions}"),
    ("iam service-accounts create", "account {} {display-name}"),
    (
        "projects add-iam-policy-binding",
        "{member} is {role} in {}",
    ),
    ("compute addresses create", "address {}"),
    (
        "compute instance-groups unmanaged create",
        "group {} in {zone}",
    ),
    (
        "compute instance-groups set-named-ports",
        "group {} in {zone}: {named-ports}",
    ),
    (
        "compute instance-groups unmanaged add-instances",
        "group {} in {zone}: {*instances}",
    ),
    (
        "compute health-checks create tcp",
        "check {} {port} every {check-interval} timeout {timeout}",
    ),
    (
        "compute backend-services create",
        "backend {} {load-balancing-scheme} {protocol} {port-name} check {health-checks} timeout {timeout}",
    ),
    (
        "compute backend-services add-backend",
        "backend {} has {instance-group} {balancing-mode} {max-connections-per-instance}",
    ),
    (
        "compute target-tcp-proxies create",
        "proxy {} to {backend-service} {proxy-header}",
    ),
    (
        "compute forwarding-rules create",
        "forward {} {load-balancing-scheme} at {address} to {target-tcp-proxy} {ports}",
    ),
    (
        "compute forwarding-rules update",
        "forward {} labels {*update-labels}",
    ),
    (
        "compute instances create",
        "machine {} in {zone}: {machine-type} {min-cpu-platform} {confidential-compute-type} image {image}",
    ),
    (
        "compute instances create",
        "machine {} {maintenance-policy} shielded {shielded}",
    ),
    (
        "compute instances create",
        "machine {} labels {labels} metadata {metadata}",
    ),
    (
        "compute instances create",
        "machine {} network {network-interface} tags {tags} account {service-account} {scopes}",
    ),
    ("compute instances create", "machine {} disk {create-disk}"),
    (
        "compute instance-templates create",
        "template: {machine-type} {min-cpu-platform} {confidential-compute-type} image {image}",
    ),
    (
        "compute instance-templates create",
        "template: {maintenance-policy} shielded {shielded}",
    ),
    (
        "compute instance-templates create",
        "template: labels {labels} metadata {metadata}",
    ),
    (
        "compute instance-templates create",
        "template: network {network-interface} tags {tags} account {service-account} {scopes}",
    ),
    (
        "compute instance-templates create",
        "template: disk {create-disk}",
    ),
    (
        "compute instance-groups managed create",
        "workers {} in {region}: {size}",
    ),
];

const MODULE: &[Line] = &[
    ("google_compute_network", "network {name} {mode}"),
    (
        "google_compute_subnetwork",
        "subnet {name} of {>network}: {ip_cidr_range} private {private_ip_google_access}",
    ),
    ("google_compute_router", "router {name} of {>network}"),
    (
        "google_compute_router_nat",
        "nat {name} of {router}: {auto} {all}",
    ),
    (
        "google_compute_firewall",
        "rule {name} to {target_tags} of {>network}: {*allowed} from {*source_ranges}",
    ),
    (
        "google_compute_firewall",
        "rule {name} to {target_tags} of {>network}: {*allowed} from {*source_tags}",
    ),
    (
        "google_project_iam_custom_role",
        "role {role_id}: {*permissions}",
    ),
    (
        "google_service_account",
        "account {account_id} {display_name}",
    ),
    (
        "google_project_iam_member",
        "{>member} is {>role} in {project}",
    ),
    ("google_compute_global_address", "address {name}"),
    ("google_compute_instance_group", "group {name} in {zone}"),
    (
        "google_compute_instance_group",
        "group {name} in {zone}: {ports}",
    ),
    (
        "google_compute_instance_group",
        "group {name} in {zone}: {*>instances}",
    ),
    (
        "google_compute_health_check",
        "check {name} {tcp_health_check.0.port} every {check_interval_sec}s timeout {timeout_sec}s",
    ),
    (
        "google_compute_backend_service",
        "backend {name} {load_balancing_scheme} {protocol} {port_name} check {>health_checks} timeout {timeout_sec}s",
    ),
    // the groups of the three zones have one name, and equal blocks are one in a plan
    (
        "google_compute_backend_service",
        "backend {name} has {>backend.0.group} {backend.0.balancing_mode} {backend.0.max_connections_per_instance}",
    ),
    (
        "google_compute_target_tcp_proxy",
        "proxy {name} to {>backend_service} {proxy_header}",
    ),
    (
        "google_compute_global_forwarding_rule",
        "forward {name} {load_balancing_scheme} at {>ip_address} to {>target} {port_range}",
    ),
    (
        "google_compute_global_forwarding_rule",
        "forward {name} labels {*labels}",
    ),
    ("google_compute_disk", "disk {name} in {zone}"),
    (
        "google_compute_instance",
        "machine {name} in {zone}: {machine_type} {min_cpu_platform} {confidential_instance_config.0.confidential_instance_type} \
         image {boot_disk.0.initialize_params.0.image}",
    ),
    (
        "google_compute_instance",
        "machine {name} {scheduling.0.on_host_maintenance} shielded {shielded_instance_config}",
    ),
    (
        "google_compute_instance",
        "machine {name} labels {labels} metadata {metadata}",
    ),
    (
        "google_compute_instance",
        "machine {name} network {card} tags {tags} account {>service_account.0.email} {service_account.0.scopes}",
    ),
    ("google_compute_instance", "machine {name} disk {disk}"),
    (
        "google_compute_instance_template",
        "template: {machine_type} {min_cpu_platform} {confidential_instance_config.0.confidential_instance_type} \
         image {disk.0.source_image}",
    ),
    (
        "google_compute_instance_template",
        "template: {scheduling.0.on_host_maintenance} shielded {shielded_instance_config}",
    ),
    (
        "google_compute_instance_template",
        "template: labels {labels} metadata {metadata}",
    ),
    (
        "google_compute_instance_template",
        "template: network {card} tags {tags} account {>service_account.0.email} {service_account.0.scopes}",
    ),
    ("google_compute_instance_template", "template: disk {state}"),
    (
        "google_compute_region_instance_group_manager",
        "workers {name} in {region}: {target_size}",
    ),
];

const OTHERS: &[&str] = &[
    "compute images create",
    "compute instance-groups managed resize",
    "compute start-iap-tunnel",
    "storage ",
];

/// Checks that the module plans what the page's commands make.
pub fn check(work: &Work) {
    let mut calls = Call::all(&work.path("calls.jsonl"));
    let mut names = calls
        .iter()
        .filter_map(|call| call.words.strip_prefix("compute images create "));
    let cluster = names.next().unwrap();
    let metadata = calls.iter().flat_map(|call| call.values("metadata"));
    let mut hash = metadata.filter_map(|it| it.strip_prefix("constellation-init-secret-hash="));
    let variables = json!({"cluster": cluster, "project": "my-project", "region": "europe-west3",
        "init_secret_hash": hash.next_back().unwrap(), "control_planes": 3, "workers": 2});
    let mut plan = Module::new("gcp").plan_with_names(&variables);
    let mut page = Facts::from([init_of_page("gcp")]);
    for call in &mut calls {
        edit(call, work);
        page.extend(call.facts(PAGE, OTHERS));
        if let Some(name) = call.words.strip_prefix("compute instances create ") {
            // the module's state disk is an object of its own
            page.insert(format!("disk {name}-state in {}", call.values("zone")[0]));
        }
    }
    module(&mut plan);
    compare("gcp", &page, &plan.facts(MODULE));
}

/// Gives the options of a command the form of the module.
fn edit(call: &mut Call, work: &Work) {
    for (option, values) in &mut call.options {
        for value in values {
            // a subnet, a role and an account have long names
            *value = match option.as_str() {
                "network-interface" => {
                    value.replace("projects/my-project/regions/europe-west3/subnetworks/", "")
                }
                "role" => value.rsplit('/').next().unwrap().to_owned(),
                "member" | "service-account" => value
                    .split('@')
                    .next()
                    .unwrap()
                    .replace("serviceAccount:", ""),
                "create-disk" => value.replace("50GB", "50"),
                "timeout" => value.replace("24h", "86400s"),
                _ => continue,
            };
        }
    }
    if call.words.starts_with("iam roles create") {
        let file = work.read(&call.values("file")[0]);
        let permissions = file
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- "));
        let permissions = permissions.map(str::to_owned).collect();
        call.options.insert("permissions".to_owned(), permissions);
    }
    let shields = [
        "no-shielded-secure-boot",
        "shielded-integrity-monitoring",
        "shielded-vtpm",
    ];
    if shields.iter().all(|it| call.options.contains_key(*it)) {
        let shields = [
            "enable_integrity_monitoring=true",
            "enable_secure_boot=false",
            "enable_vtpm=true",
        ];
        call.options
            .insert("shielded".to_owned(), shields.map(str::to_owned).into());
    }
}

/// Gives the plan's values the form of the page.
fn module(plan: &mut Plan) {
    plan.edit("google_compute_network", |one| {
        one["mode"] = json!(if one["auto_create_subnetworks"] == false {
            "custom"
        } else {
            "auto"
        });
    });
    plan.edit("google_compute_router_nat", |one| {
        one["auto"] = json!(one["nat_ip_allocate_option"] == "AUTO_ONLY");
        one["all"] =
            json!(one["source_subnetwork_ip_ranges_to_nat"] == "ALL_SUBNETWORKS_ALL_IP_RANGES");
    });
    plan.edit("google_compute_firewall", |one| {
        let allowed = one["allow"].as_array().unwrap().iter().flat_map(|allow| {
            let protocol = allow["protocol"].as_str().unwrap();
            match &*texts(&allow["ports"]) {
                [] => vec![protocol.to_owned()],
                ports => ports
                    .iter()
                    .map(|port| format!("{protocol}:{port}"))
                    .collect(),
            }
        });
        one["allowed"] = json!(Vec::from_iter(allowed));
    });
    plan.edit("google_compute_instance_group", |one| {
        let ports = one["named_port"].as_array().unwrap().iter();
        one["ports"] = ports
            .map(|it| format!("{}:{}", texts(&it["name"]).join(""), it["port"]))
            .collect();
    });
    let disks: Vec<Value> = plan.values("google_compute_disk").cloned().collect();
    for kind in [
        "google_compute_instance",
        "google_compute_instance_template",
    ] {
        plan.edit(kind, |one| {
            let card = &one["network_interface"][0];
            let subnet = referred(card["subnetwork"].as_str().unwrap());
            let mut cards = vec![format!("subnet={subnet}"), format!("nic-type={}", card["nic_type"].as_str().unwrap())];
            if card["access_config"].as_array().is_none_or(Vec::is_empty) {
                cards.push("no-address".to_owned());
            }
            one["card"] = json!(cards);
            let disk = |name: &Value, size: &Value, kind: &Value| {
                json!({"auto-delete": "yes", "device-name": name, "size": size, "type": kind})
            };
            if let Some(attached) = one["attached_disk"].get(0) {
                let source = referred(attached["source"].as_str().unwrap());
                let found = disks.iter().find(|it| it["name"] == source).unwrap();
                one["disk"] = disk(&attached["device_name"], &found["size"], &found["type"]);
            }
            if let Some(state) = one["disk"].get(1) {
                assert_eq!((&state["auto_delete"], &state["type"]), (&json!(true), &json!("PERSISTENT")));
                one["state"] = disk(&state["device_name"], &state["disk_size_gb"], &state["disk_type"]);
            }
        });
    }
}
