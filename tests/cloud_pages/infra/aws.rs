//! docs/clouds/aws.md and infra/aws. tests/cloud_pages/aws.py has the lines of what the page has made in moto.

use serde_json::{Value, json};

use super::{Facts, Line, Module, Plan, compare, init_of_page, referred, texts};

const MODULE: &[Line] = &[
    (
        "aws_vpc",
        "network {cidr_block} names {enable_dns_hostnames} tags {tags}",
    ),
    ("aws_internet_gateway", "internet gateway {tags}"),
    ("aws_nat_gateway", "nat gateway {tags}"),
    ("aws_eip", "address {tags}"),
    (
        "aws_subnet",
        "subnet {cidr_block} in {availability_zone} tags {tags}",
    ),
    ("aws_route_table", "table {module-name} tags {tags}"),
    (
        "aws_route",
        "table {module-name} leads to {destination_cidr_block} by {way}",
    ),
    (
        "aws_route_table_association",
        "table {module-name} of subnet {>subnet_id}",
    ),
    ("aws_security_group", "group {name} tags {tags}"),
    (
        "aws_vpc_security_group_ingress_rule",
        "to {>security_group_id}: {ip_protocol} {from_port} {to_port} from {from}",
    ),
    (
        "aws_vpc_security_group_egress_rule",
        "out of {>security_group_id}: {ip_protocol} {cidr_ipv4}",
    ),
    ("aws_iam_role", "role {name} for {assume_role_policy}"),
    ("aws_iam_role_policy", "role {role} by {name}: {*policy}"),
    ("aws_iam_instance_profile", "profile {name} of {role}"),
    (
        "aws_lb",
        "balancer {name} {load_balancer_type} internal {internal} across zones {enable_cross_zone_load_balancing} tags {tags}",
    ),
    ("aws_lb", "balancer {name} in {>subnets}"),
    ("aws_lb", "balancer {name} behind {>security_groups}"),
    (
        "aws_lb_listener",
        "listener {protocol} {port} {default_action.0.type} {>default_action.0.target_group_arn}",
    ),
    (
        "aws_lb_target_group",
        "targets {name} {protocol} {port} {target_type}",
    ),
    (
        "aws_lb_target_group",
        "targets {name} keep {preserve_client_ip} delay {deregistration_delay}",
    ),
    (
        "aws_lb_target_group",
        "targets {name} check {health_check.0.protocol} every {health_check.0.interval} good {health_check.0.healthy_threshold} \
         bad {health_check.0.unhealthy_threshold}",
    ),
    (
        "aws_lb_target_group_attachment",
        "targets {>target_group_arn} has control plane {number}",
    ),
    (
        "aws_instance",
        "machine in {>subnet_id} {instance_type} image {ami} snp {cpu_options.0.amd_sev_snp}",
    ),
    (
        "aws_instance",
        "machine in {>subnet_id} disk {ebs_block_device.0.device_name} {ebs_block_device.0.volume_size} \
         {ebs_block_device.0.volume_type} delete {ebs_block_device.0.delete_on_termination}",
    ),
    (
        "aws_instance",
        "machine in {>subnet_id} profile {iam_instance_profile} groups {>vpc_security_group_ids}",
    ),
    (
        "aws_instance",
        "machine in {>subnet_id} metadata {options} tags {tags}",
    ),
    (
        "aws_launch_template",
        "template {name} {instance_type} image {image_id} snp {cpu_options.0.amd_sev_snp}",
    ),
    (
        "aws_launch_template",
        "template {name} disk {block_device_mappings.0.device_name} {block_device_mappings.0.ebs.0.volume_size} \
         {block_device_mappings.0.ebs.0.volume_type} delete {block_device_mappings.0.ebs.0.delete_on_termination}",
    ),
    (
        "aws_launch_template",
        "template {name} profile {iam_instance_profile.0.name} groups {>vpc_security_group_ids}",
    ),
    (
        "aws_launch_template",
        "template {name} metadata {options} tags of {tag_specifications.0.resource_type} {tag_specifications.0.tags}",
    ),
    (
        "aws_autoscaling_group",
        "scaling {name} {min_size} {max_size} {desired_capacity}",
    ),
    (
        "aws_autoscaling_group",
        "scaling {name} in {>vpc_zone_identifier}",
    ),
    (
        "aws_autoscaling_group",
        "scaling {name} template {>launch_template.0.id} {launch_template.0.version}",
    ),
    (
        "aws_autoscaling_group",
        "scaling {name} tag {tag.0.key}={tag.0.value} {tag.0.propagate_at_launch}",
    ),
];

/// Checks that the module plans what the page's commands have made: `found` is moto's answer to "facts", `machine` one of the control
/// planes.
pub fn check(found: &Value, machine: &Value, hash: &str) {
    let mut page = Facts::from([init_of_page("aws")]);
    page.extend(texts(&found["facts"]));
    let variables = json!({"cluster": machine["tags"]["constellation-uid"], "region": "us-east-2", "image": machine["imageId"],
        "operators": ["203.0.113.7/32"], "init_secret_hash": hash, "control_planes": 3, "workers": 3});
    let mut plan = Module::new("aws").plan_with_names(&variables);
    module(&mut plan);
    compare("aws", &page, &plan.facts(MODULE));
}

/// Gives the plan's values the form of the lines.
fn module(plan: &mut Plan) {
    plan.edit("aws_route", |route| {
        let is_internet = texts(&route["gateway_id"])
            .join("")
            .starts_with("aws_internet_gateway|");
        let is_nat = texts(&route["nat_gateway_id"])
            .join("")
            .starts_with("aws_nat_gateway|");
        assert!(is_internet != is_nat);
        route["way"] = json!(if is_nat { "nat" } else { "internet" });
    });
    plan.edit("aws_vpc_security_group_ingress_rule", |rule| {
        let network = texts(&rule["cidr_ipv4"]).join("");
        let group = texts(&rule["referenced_security_group_id"]).join("");
        rule["from"] = match network {
            network if network.starts_with("aws_eip|") => json!("nat"),
            network if !network.contains('|') => json!(network),
            _ => json!(referred(&group)),
        };
    });
    let statements = |document: &Value| {
        let document: Value = serde_json::from_str(document.as_str().unwrap()).unwrap();
        document["Statement"].as_array().unwrap().clone()
    };
    plan.edit("aws_iam_role", |role| {
        let all = statements(&role["assume_role_policy"]);
        role["assume_role_policy"] = all
            .iter()
            .map(|it| it["Principal"]["Service"].clone())
            .collect();
    });
    plan.edit("aws_iam_role_policy", |role| {
        let all = statements(&role["policy"]).into_iter();
        let all = all.flat_map(|it| {
            let resource = texts(&it["Resource"]).join("");
            texts(&it["Action"])
                .into_iter()
                .map(move |action| json!(format!("{action} {resource}")))
        });
        role["policy"] = all.collect();
    });
    plan.edit("aws_lb_target_group_attachment", |one| {
        assert!(
            texts(&one["target_id"])
                .join("")
                .starts_with("aws_instance|")
        );
        one["number"] = json!(one["module-index"].as_str().unwrap().split(' ').next());
    });
    for kind in ["aws_instance", "aws_launch_template"] {
        plan.edit(kind, |one| {
            let options = &one["metadata_options"][0];
            one["options"] = json!([
                options["http_tokens"],
                options["http_put_response_hop_limit"],
                options["instance_metadata_tags"]
            ]);
        });
    }
}
