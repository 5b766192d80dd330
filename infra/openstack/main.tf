# A cluster on OpenStack: what docs/clouds/openstack.md makes by commands in its steps 4 to 8 and 10. A test compares both.

locals {
  policies = coalesce(var.policies, "${path.module}/../../docs/clouds")
  subnet   = "10.0.0.0/24"
  tag      = "constellation-uid-${var.cluster}"
}

# Network. Network and subnet have the cluster's tag: only addresses in this subnet are those of peers.

resource "openstack_networking_network_v2" "cluster" {
  name = var.cluster
  tags = [local.tag]
}

resource "openstack_networking_subnet_v2" "cluster" {
  name            = var.cluster
  network_id      = openstack_networking_network_v2.cluster.id
  cidr            = local.subnet
  dns_nameservers = ["9.9.9.9"]
  tags            = [local.tag]
}

resource "openstack_networking_router_v2" "cluster" {
  name                = var.cluster
  external_network_id = var.outside_id
}

resource "openstack_networking_router_interface_v2" "cluster" {
  router_id = openstack_networking_router_v2.cluster.id
  subnet_id = openstack_networking_subnet_v2.cluster.id
}

# Firewall: the table of ports in docs/clouds.md. Octavia connects from the subnet.

locals {
  # group, protocol, first and last port, and who may connect: a group, or the subnet
  ports = [
    ["control-planes", "tcp", 6443, 6443, "subnet"],
    ["control-planes", "tcp", 30090, 30090, "subnet"],
    ["control-planes", "tcp", 9000, 9000, "subnet"],
    ["control-planes", "tcp", 9999, 9999, "subnet"],
    ["control-planes", "tcp", 2379, 2380, "control-planes"],
    ["nodes", "tcp", 10250, 10250, "nodes"],
    # the watch of members
    ["nodes", "tcp", 9000, 9000, "control-planes"],
    # Cilium: WireGuard, health
    ["nodes", "udp", 51871, 51871, "nodes"],
    ["nodes", "tcp", 4240, 4240, "nodes"],
    ["nodes", "icmp", null, null, "nodes"],
  ]
}

resource "openstack_networking_secgroup_v2" "cluster" {
  for_each = toset(["control-planes", "nodes"])
  name     = "${var.cluster}-${each.key}"
}

resource "openstack_networking_secgroup_rule_v2" "cluster" {
  for_each          = { for rule in local.ports : "${rule[0]} ${rule[1]} ${rule[2] == null ? "all" : rule[2]}" => rule }
  security_group_id = openstack_networking_secgroup_v2.cluster[each.value[0]].id
  direction         = "ingress"
  ethertype         = "IPv4"
  protocol          = each.value[1]
  port_range_min    = each.value[2]
  port_range_max    = each.value[3]
  remote_ip_prefix  = each.value[4] == "subnet" ? local.subnet : null
  remote_group_id   = each.value[4] == "subnet" ? null : openstack_networking_secgroup_v2.cluster[each.value[4]].id
}

# Load balancer. Octavia connects from an address of its own, so a control plane reaches itself through it, too. Only operators reach
# 9000 and 9999.

locals {
  balanced = ["6443", "30090", "9000", "9999"]
}

resource "openstack_lb_loadbalancer_v2" "cluster" {
  name          = var.cluster
  vip_subnet_id = openstack_networking_subnet_v2.cluster.id
  tags          = [local.tag]
}

resource "openstack_lb_listener_v2" "cluster" {
  for_each            = toset(local.balanced)
  name                = "${var.cluster}-${each.key}"
  loadbalancer_id     = openstack_lb_loadbalancer_v2.cluster.id
  protocol            = "TCP"
  protocol_port       = tonumber(each.key)
  allowed_cidrs       = startswith(each.key, "9") ? var.operators : null
  timeout_client_data = 3600000
  timeout_member_data = 3600000
}

resource "openstack_lb_pool_v2" "cluster" {
  for_each    = toset(local.balanced)
  name        = "${var.cluster}-${each.key}"
  listener_id = openstack_lb_listener_v2.cluster[each.key].id
  protocol    = "TCP"
  lb_method   = "ROUND_ROBIN"
}

resource "openstack_lb_monitor_v2" "cluster" {
  for_each    = toset(local.balanced)
  name        = "${var.cluster}-${each.key}"
  pool_id     = openstack_lb_pool_v2.cluster[each.key].id
  type        = "TCP"
  delay       = 5
  timeout     = 3
  max_retries = 2
}

resource "openstack_lb_member_v2" "control_plane" {
  for_each      = { for pair in setproduct(range(var.control_planes), local.balanced) : "${pair[0]}-${pair[1]}" => pair }
  name          = "${var.cluster}-${each.key}"
  pool_id       = openstack_lb_pool_v2.cluster[each.value[1]].id
  address       = openstack_compute_instance_v2.control_plane[each.value[0]].access_ip_v4
  protocol_port = tonumber(each.value[1])
}

resource "openstack_networking_floatingip_v2" "cluster" {
  pool       = var.outside
  port_id    = openstack_lb_loadbalancer_v2.cluster.vip_port_id
  depends_on = [openstack_networking_router_interface_v2.cluster]
}

# User data. Control planes get an application credential that can only read four lists. Workers get user data without credentials: any
# program on a server can read its user data.

resource "openstack_identity_application_credential_v3" "control_plane" {
  name  = var.cluster
  roles = ["reader"]

  dynamic "access_rules" {
    for_each = jsondecode(file("${local.policies}/openstack-control-plane.json"))
    content {
      service = access_rules.value.service
      method  = access_rules.value.method
      path    = access_rules.value.path
    }
  }
}

locals {
  init_secret = var.init_secret_hash == null ? {} : { constellation-init-secret-hash = var.init_secret_hash }
  worker_data = { openstack-load-balancer-endpoint = openstack_networking_floatingip_v2.cluster.address }
  control_plane_data = merge(local.worker_data, {
    openstack-auth-url                      = var.auth_url
    openstack-region-name                   = var.region
    openstack-application-credential-id     = openstack_identity_application_credential_v3.control_plane.id
    openstack-application-credential-secret = openstack_identity_application_credential_v3.control_plane.secret
  })
}

# Servers have properties, by which they know themselves, and tags, by which the others find them. The second disk is a blank volume. The
# first control plane has the hash of the init secret, so `firstlight init` can initialize it, and no other.

resource "openstack_compute_instance_v2" "control_plane" {
  count           = var.control_planes
  name            = "${var.cluster}-control-plane-${count.index}"
  image_id        = var.image
  flavor_name     = var.flavor
  security_groups = [for group in ["nodes", "control-planes"] : openstack_networking_secgroup_v2.cluster[group].name]
  user_data       = jsonencode(local.control_plane_data)
  tags            = [local.tag, "constellation-role-control-plane"]
  metadata = merge(
    { constellation-uid = var.cluster, constellation-role = "control-plane" },
    count.index == 0 ? local.init_secret : {},
  )
  depends_on = [openstack_networking_router_interface_v2.cluster]

  network {
    uuid = openstack_networking_network_v2.cluster.id
  }

  block_device {
    uuid                  = var.image
    source_type           = "image"
    destination_type      = "local"
    boot_index            = 0
    delete_on_termination = true
  }

  block_device {
    source_type           = "blank"
    destination_type      = "volume"
    volume_size           = var.state_disk_gigabytes
    disk_bus              = "virtio"
    boot_index            = -1
    delete_on_termination = true
  }

  lifecycle {
    # A change of these must not replace or stop all control planes at once: infra/README.md. The provider replaces a server for another
    # image, block device or user data, and resizes it for another flavor.
    ignore_changes = [image_id, block_device, user_data, flavor_name]
  }
}

resource "openstack_compute_instance_v2" "worker" {
  count           = var.workers
  name            = "${var.cluster}-worker-${count.index}"
  image_id        = var.image
  flavor_name     = var.flavor
  security_groups = [openstack_networking_secgroup_v2.cluster["nodes"].name]
  user_data       = jsonencode(local.worker_data)
  tags            = [local.tag, "constellation-role-worker"]
  metadata        = { constellation-uid = var.cluster, constellation-role = "worker" }
  depends_on      = [openstack_networking_router_interface_v2.cluster]

  network {
    uuid = openstack_networking_network_v2.cluster.id
  }

  block_device {
    uuid                  = var.image
    source_type           = "image"
    destination_type      = "local"
    boot_index            = 0
    delete_on_termination = true
  }

  block_device {
    source_type           = "blank"
    destination_type      = "volume"
    volume_size           = var.state_disk_gigabytes
    disk_bus              = "virtio"
    boot_index            = -1
    delete_on_termination = true
  }

  lifecycle {
    ignore_changes = [image_id, block_device, user_data, flavor_name]
  }
}
