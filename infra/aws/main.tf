# A cluster on AWS: what docs/clouds/aws.md makes by commands in its steps 4 to 8 and 10. A test compares both.

locals {
  tags     = { Name = var.cluster, constellation-uid = var.cluster, KubernetesCluster = var.cluster }
  policies = coalesce(var.policies, "${path.module}/../../docs/clouds")
  roles    = ["control-plane", "worker"]
  cpu      = var.sev_snp ? ["enabled"] : []
}

# Network: nodes have private addresses only. They reach the internet through one NAT gateway, and each other directly.

resource "aws_vpc" "cluster" {
  cidr_block           = "10.0.0.0/16"
  enable_dns_hostnames = true
  tags                 = local.tags
}

resource "aws_internet_gateway" "cluster" {
  vpc_id = aws_vpc.cluster.id
  tags   = local.tags
}

resource "aws_subnet" "public" {
  count             = length(var.zones)
  vpc_id            = aws_vpc.cluster.id
  cidr_block        = "10.0.${90 + count.index}.0/24"
  availability_zone = "${var.region}${var.zones[count.index]}"
  tags              = local.tags
}

resource "aws_subnet" "private" {
  count             = length(var.zones)
  vpc_id            = aws_vpc.cluster.id
  cidr_block        = "10.0.${count.index}.0/24"
  availability_zone = "${var.region}${var.zones[count.index]}"
  tags              = local.tags
}

resource "aws_eip" "nat" {
  domain     = "vpc"
  tags       = local.tags
  depends_on = [aws_internet_gateway.cluster]
}

resource "aws_nat_gateway" "cluster" {
  subnet_id     = aws_subnet.public[0].id
  allocation_id = aws_eip.nat.id
  tags          = local.tags
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.cluster.id
  tags   = local.tags
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.cluster.id
}

resource "aws_route_table_association" "public" {
  count          = length(var.zones)
  subnet_id      = aws_subnet.public[count.index].id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.cluster.id
  tags   = local.tags
}

resource "aws_route" "private" {
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.cluster.id
}

resource "aws_route_table_association" "private" {
  count          = length(var.zones)
  subnet_id      = aws_subnet.private[count.index].id
  route_table_id = aws_route_table.private.id
}

# Firewall: the table of ports in docs/clouds.md.

locals {
  groups = ["balancer", "control-planes", "nodes"]
  # group, protocol, first and last port, and who may connect: a group, `operators`, or the nodes by the address of the NAT gateway
  ports = [
    ["balancer", "tcp", 6443, 6443, ["operators", "nat"]],
    ["balancer", "tcp", 30090, 30090, ["operators", "nat"]],
    ["balancer", "tcp", 9000, 9000, ["operators"]],
    ["balancer", "tcp", 9999, 9999, ["operators"]],
    ["control-planes", "tcp", 6443, 6443, ["balancer", "nodes"]],
    ["control-planes", "tcp", 30090, 30090, ["balancer", "nodes"]],
    ["control-planes", "tcp", 9000, 9000, ["balancer"]],
    ["control-planes", "tcp", 9999, 9999, ["balancer"]],
    ["control-planes", "tcp", 2379, 2380, ["control-planes"]],
    ["nodes", "tcp", 10250, 10250, ["nodes"]],
    # the watch of members
    ["nodes", "tcp", 9000, 9000, ["control-planes"]],
    # Cilium: WireGuard, health
    ["nodes", "udp", 51871, 51871, ["nodes"]],
    ["nodes", "tcp", 4240, 4240, ["nodes"]],
    ["nodes", "icmp", -1, -1, ["nodes"]],
  ]
  rules = merge([for rule in local.ports : {
    for from in flatten([for from in rule[4] : from == "operators" ? var.operators : [from]]) :
    "${rule[0]} ${rule[1]} ${rule[2]} from ${from}" => { to = rule[0], protocol = rule[1], first = rule[2], last = rule[3], from = from }
  }]...)
}

resource "aws_security_group" "cluster" {
  for_each    = toset(local.groups)
  name        = "${var.cluster}-${each.key}"
  description = "${var.cluster}: ${each.key}"
  vpc_id      = aws_vpc.cluster.id
  # the controller that makes load balancers for Services changes the group with the second tag
  tags = merge({ Name = "${var.cluster}-${each.key}" }, each.key == "nodes" ? { KubernetesCluster = var.cluster } : {})
}

resource "aws_vpc_security_group_ingress_rule" "cluster" {
  for_each                     = local.rules
  security_group_id            = aws_security_group.cluster[each.value.to].id
  ip_protocol                  = each.value.protocol
  from_port                    = each.value.first
  to_port                      = each.value.last
  referenced_security_group_id = try(aws_security_group.cluster[each.value.from].id, null)
  cidr_ipv4                    = contains(local.groups, each.value.from) ? null : each.value.from == "nat" ? "${aws_eip.nat.public_ip}/32" : each.value.from
}

# The provider takes from a new group the rule with which AWS lets everything out.
resource "aws_vpc_security_group_egress_rule" "cluster" {
  for_each          = toset(local.groups)
  security_group_id = aws_security_group.cluster[each.key].id
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
}

# Roles: a control plane may list instances and load balancers, a worker only load balancers.

resource "aws_iam_role" "node" {
  for_each = toset(local.roles)
  name     = "${var.cluster}-${each.key}"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "ec2.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy" "node" {
  for_each = toset(local.roles)
  name     = "firstlight"
  role     = aws_iam_role.node[each.key].name
  policy   = file("${local.policies}/aws-${each.key}.json")
}

# for AWS's own controller (docs/clouds/controller-manager.md)
resource "aws_iam_role_policy" "controller_manager" {
  name   = "controller-manager"
  role   = aws_iam_role.node["control-plane"].name
  policy = file("${local.policies}/aws-controller-manager.json")
}

resource "aws_iam_instance_profile" "node" {
  for_each = toset(local.roles)
  name     = "${var.cluster}-${each.key}"
  role     = aws_iam_role.node[each.key].name
}

# Load balancer: all nodes reach the control planes by its name, a control plane also itself. A target that connects to itself would drop
# the packet with its own address as source, so the load balancer's own address is the source.

locals {
  balanced = ["6443", "30090", "9000", "9999"]
}

resource "aws_lb" "cluster" {
  name                             = var.cluster
  load_balancer_type               = "network"
  internal                         = false
  subnets                          = aws_subnet.public[*].id
  security_groups                  = [aws_security_group.cluster["balancer"].id]
  enable_cross_zone_load_balancing = true
  tags                             = { constellation-uid = var.cluster }
}

resource "aws_lb_target_group" "cluster" {
  for_each             = toset(local.balanced)
  name                 = "${var.cluster}-${each.key}"
  protocol             = "TCP"
  port                 = tonumber(each.key)
  vpc_id               = aws_vpc.cluster.id
  target_type          = "instance"
  preserve_client_ip   = false
  deregistration_delay = 30

  health_check {
    protocol            = "TCP"
    interval            = 10
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }
}

resource "aws_lb_listener" "cluster" {
  for_each          = toset(local.balanced)
  load_balancer_arn = aws_lb.cluster.arn
  protocol          = "TCP"
  port              = tonumber(each.key)

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.cluster[each.key].arn
  }
}

resource "aws_lb_target_group_attachment" "control_plane" {
  for_each         = { for pair in setproduct(range(var.control_planes), local.balanced) : "${pair[0]} ${pair[1]}" => pair }
  target_group_arn = aws_lb_target_group.cluster[each.value[1]].arn
  target_id        = aws_instance.control_plane[each.value[0]].id
}

# Control planes. The first one has the hash of the init secret, so `firstlight init` can initialize it, and no other.

resource "aws_instance" "control_plane" {
  count                  = var.control_planes
  ami                    = var.image
  instance_type          = var.instance_type
  subnet_id              = aws_subnet.private[count.index % length(var.zones)].id
  vpc_security_group_ids = [aws_security_group.cluster["control-planes"].id, aws_security_group.cluster["nodes"].id]
  iam_instance_profile   = aws_iam_instance_profile.node["control-plane"].name
  tags = merge(
    { Name = "${var.cluster}-control-plane", constellation-uid = var.cluster, constellation-role = "control-plane", KubernetesCluster = var.cluster },
    count.index == 0 && var.init_secret_hash != null ? { constellation-init-secret-hash = var.init_secret_hash } : {},
  )

  dynamic "cpu_options" {
    for_each = local.cpu
    content {
      amd_sev_snp = cpu_options.value
    }
  }

  ebs_block_device {
    device_name           = "/dev/sdb"
    volume_size           = var.state_disk_gigabytes
    volume_type           = "gp3"
    delete_on_termination = true
  }

  # version 1 of the metadata service is off. The services ask from pods, which is one hop more
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
    instance_metadata_tags      = "enabled"
  }

  # network and permissions must be complete before the machine asks for its peers
  depends_on = [aws_iam_role_policy.node, aws_route.private, aws_route_table_association.private]

  lifecycle {
    # A change of these must not replace or stop all control planes at once: infra/README.md. The provider also takes a volume that the
    # CSI driver has attached for a change of ebs_block_device.
    ignore_changes = [ami, cpu_options, ebs_block_device, instance_type]
  }
}

# Workers. The group replaces machines that fail.

resource "aws_launch_template" "worker" {
  name                   = "${var.cluster}-worker"
  image_id               = var.image
  instance_type          = var.instance_type
  vpc_security_group_ids = [aws_security_group.cluster["nodes"].id]

  iam_instance_profile {
    name = aws_iam_instance_profile.node["worker"].name
  }

  dynamic "cpu_options" {
    for_each = local.cpu
    content {
      amd_sev_snp = cpu_options.value
    }
  }

  block_device_mappings {
    device_name = "/dev/sdb"
    ebs {
      volume_size           = var.state_disk_gigabytes
      volume_type           = "gp3"
      delete_on_termination = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { constellation-uid = var.cluster, constellation-role = "worker", KubernetesCluster = var.cluster }
  }
}

resource "aws_autoscaling_group" "worker" {
  name                = "${var.cluster}-worker"
  min_size            = 0
  max_size            = var.max_workers
  desired_capacity    = var.workers
  vpc_zone_identifier = aws_subnet.private[*].id
  depends_on          = [aws_iam_role_policy.node, aws_route.private, aws_route_table_association.private]

  launch_template {
    id      = aws_launch_template.worker.id
    version = "$Latest"
  }

  tag {
    key                 = "Name"
    value               = "${var.cluster}-worker"
    propagate_at_launch = true
  }
}
