//! docs/clouds/azure.md and infra/azure.

use serde_json::{Value, json};

use super::super::work::Work;
use super::{Call, Facts, Line, Module, compare, init_of_page, texts};

const PAGE: &[Line] = &[
    ("network public-ip create", "address {name} {sku} {zone}"),
    (
        "network nat gateway create",
        "nat {name} idle {idle-timeout}",
    ),
    (
        "network nat gateway create",
        "nat {name} at {public-ip-addresses}",
    ),
    ("network nsg create", "group {name}"),
    ("network vnet create", "network {name} {address-prefixes}"),
    (
        "network vnet subnet create",
        "subnet {name} of {vnet-name}: {address-prefixes} outbound {default-outbound-access}",
    ),
    (
        "network vnet subnet create",
        "nat {nat-gateway} of subnet {name}",
    ),
    (
        "network vnet subnet create",
        "group {network-security-group} of subnet {name}",
    ),
    (
        "network nsg rule create",
        "rule {priority} {name} of {nsg-name}: {access} {direction} {protocol} {*destination-port-ranges} to {destination-address-prefixes} \
         from {*source-address-prefixes}",
    ),
    ("identity create", "identity {name}"),
    (
        "role assignment create",
        "{assignee-object-id} is {role} in {scope} as {assignee-principal-type}",
    ),
    (
        "network lb create",
        "balancer {name} {sku} {frontend-ip-name} at {public-ip-address} tags {tags}",
    ),
    ("network lb create", "pool {backend-pool-name} of {name}"),
    (
        "network lb probe create",
        "probe {name} of {lb-name}: {protocol} {port} every {interval}",
    ),
    (
        "network lb rule create",
        "listener {name} of {lb-name}: {protocol} {frontend-ip-name} {frontend-port} to {backend-pool-name} {backend-port} probe {probe-name} \
         idle {idle-timeout} reset {enable-tcp-reset} no-snat {disable-outbound-snat}",
    ),
    (
        "vmss create",
        "set {name}: {vm-sku} image {image} vtpm {enable-vtpm} secure-boot {enable-secure-boot} disk {os-disk-security-encryption-type} \
         tags {tags}",
    ),
    (
        "vmss create",
        "set {name}: state disk {data-disk-sizes-gb} GB storage {storage-sku}",
    ),
    (
        "vmss create",
        "set {name}: {assign-identity} subnet {subnet} pool {backend-pool-name}",
    ),
    (
        "vmss create",
        "set {name}: upgrade {upgrade-policy-mode} prefix {computer-name-prefix} user {admin-username}",
    ),
    (
        "vmss create",
        "set {name}: no overprovision {disable-overprovision}",
    ),
    ("vmss update", "set {name}: {set}"),
];

const MODULE: &[Line] = &[
    ("azurerm_public_ip", "address {name} {sku} {zones}"),
    (
        "azurerm_nat_gateway",
        "nat {name} idle {idle_timeout_in_minutes}",
    ),
    (
        "azurerm_nat_gateway_public_ip_association",
        "nat {>nat_gateway_id} at {>public_ip_address_id}",
    ),
    ("azurerm_network_security_group", "group {name}"),
    ("azurerm_virtual_network", "network {name} {address_space}"),
    (
        "azurerm_subnet",
        "subnet {name} of {virtual_network_name}: {address_prefixes} outbound {default_outbound_access_enabled}",
    ),
    (
        "azurerm_subnet_nat_gateway_association",
        "nat {>nat_gateway_id} of subnet {>subnet_id}",
    ),
    (
        "azurerm_subnet_network_security_group_association",
        "group {>network_security_group_id} of subnet {>subnet_id}",
    ),
    (
        "azurerm_network_security_rule",
        "rule {priority} {name} of {network_security_group_name}: {access} {direction} {protocol} {*ports} to {destination_address_prefix} \
         from {*sources}",
    ),
    (
        "azurerm_role_definition",
        "role {name} in {assignable_scopes}: {*permissions.0.actions}",
    ),
    ("azurerm_user_assigned_identity", "identity {name}"),
    (
        "azurerm_role_assignment",
        "identity-{>principal_id} is {>role_definition_id} in {scope} as {principal_type}",
    ),
    (
        "azurerm_lb",
        "balancer {name} {sku} {frontend_ip_configuration.0.name} at {>frontend_ip_configuration.0.public_ip_address_id} tags {tags}",
    ),
    (
        "azurerm_lb_backend_address_pool",
        "pool {name} of {>loadbalancer_id}",
    ),
    (
        "azurerm_lb_probe",
        "probe {name} of {>loadbalancer_id}: {protocol} {port} every {interval_in_seconds}",
    ),
    (
        "azurerm_lb_rule",
        "listener {name} of {>loadbalancer_id}: {protocol} {frontend_ip_configuration_name} {frontend_port} to {>backend_address_pool_ids} \
         {backend_port} probe {>probe_id} idle {idle_timeout_in_minutes} reset {tcp_reset_enabled} no-snat {disable_outbound_snat}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: {sku} image {source_image_id} vtpm {vtpm_enabled} secure-boot {secure_boot_enabled} \
         disk {os_disk.0.security_encryption_type} tags {tags}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: state disk {data_disk.0.disk_size_gb} GB storage {data_disk.0.lun}={data_disk.0.storage_account_type},\
         os={os_disk.0.storage_account_type}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: identity-{>identity.0.identity_ids} subnet {>network_interface.0.ip_configuration.0.subnet_id} \
         pool {>network_interface.0.ip_configuration.0.load_balancer_backend_address_pool_ids}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: upgrade {upgrade_mode} prefix {computer_name_prefix} user {admin_username}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: no overprovision {no_overprovision}",
    ),
    (
        "azurerm_linux_virtual_machine_scale_set",
        "set {name}: {console}",
    ),
];

const OTHERS: &[&str] = &[
    "group create",
    "rest",
    "role definition create",
    "sig ",
    "storage ",
    "vmss scale",
    "vmss update",
];

/// Checks that the module plans what the page's commands make.
pub fn check(work: &Work) {
    let mut calls = Call::all(&work.path("calls.jsonl"));
    let group = calls.iter().find(|call| call.words == "group create");
    let cluster = group.unwrap().values("name")[0].clone();
    let tags = calls.iter().flat_map(|call| call.values("tags"));
    let mut hash = tags.filter_map(|tag| tag.strip_prefix("constellation-init-secret-hash="));
    let variables = json!({"cluster": cluster, "subscription": "az-result", "region": "westeurope", "image": "az-result",
        "operators": ["203.0.113.7/32"], "init_secret_hash": hash.next_back().unwrap(), "unused_key": "ssh-ed25519 AAAA"});

    let mut page = Facts::from([init_of_page("azure")]);
    // the hash is taken away again
    calls.retain(|call| call.words != "vmss update" || call.values("remove").is_empty());
    for call in &mut calls {
        // the rule that refuses the rest has no address
        let to = call
            .options
            .entry("destination-address-prefixes".to_owned())
            .or_default();
        if to.is_empty() {
            to.push("*".to_owned());
        }
        page.extend(call.facts(PAGE, OTHERS));
        if let [file] = call.values("role-definition") {
            page.extend(role(&serde_json::from_str(&work.read(file)).unwrap()));
        }
    }
    let mut plan = Module::new("azure").plan_with_names(&variables);
    plan.edit("azurerm_network_security_rule", |rule| {
        let known = |value: &Value| match &*texts(value) {
            // the page's `az` prints this in place of an address
            [one] if one.contains('|') => {
                json!("network-public-ip-".to_owned() + super::referred(one))
            }
            _ => value.clone(),
        };
        let sources = rule["source_address_prefixes"].as_array();
        rule["sources"] = match sources {
            Some(all) => all.iter().map(known).collect(),
            None => rule["source_address_prefix"].clone(),
        };
        rule["ports"] = if rule["destination_port_ranges"].is_array() {
            rule["destination_port_ranges"].clone()
        } else {
            rule["destination_port_range"].clone()
        };
    });
    plan.edit("azurerm_linux_virtual_machine_scale_set", |set| {
        assert_eq!(set["data_disk"][0]["create_option"], "Empty");
        set["no_overprovision"] = json!(set["overprovision"] == false);
        if set["boot_diagnostics"].as_array().unwrap().len() == 1 {
            set["console"] = json!(
                "virtualMachineProfile.diagnosticsProfile={\"bootDiagnostics\":{\"enabled\":true}}"
            );
        }
    });
    // by default the provider replaces or reimages all machines when the image changes
    let features =
        &plan.0["configuration"]["provider_config"]["azurerm"]["expressions"]["features"];
    let setting = &features[0]["virtual_machine_scale_set"][0];
    for name in ["reimage_on_manual_upgrade", "roll_instances_when_required"] {
        assert_eq!(setting[name]["constant_value"], false, "{name}: {features}");
    }
    compare("azure", &page, &plan.facts(MODULE));
}

fn role(file: &Value) -> Facts {
    let (name, scopes) = (
        texts(&file["Name"]).join(""),
        texts(&file["AssignableScopes"]).join(","),
    );
    let actions = texts(&file["Actions"]).into_iter();
    actions
        .map(|action| format!("role {name} in {scopes}: {action}"))
        .collect()
}
