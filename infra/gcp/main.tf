# A cluster on Google Cloud: what docs/clouds/gcp.md makes by commands in its steps 4 to 8 and 10. A test compares both.

locals {
  policies = coalesce(var.policies, "${path.module}/../../docs/clouds")
  zones    = [for zone in var.zones : "${var.region}-${zone}"]
  image    = coalesce(var.image, var.cluster)
  roles    = { control-plane = "firstlightControlPlane", worker = "firstlightWorker" }
  labels   = { for role in ["control-plane", "worker"] : role => { constellation-uid = var.cluster, constellation-role = role } }
  # network tags, to which the rules of the firewall belong
  control_plane = "${var.cluster}-control-plane"
  node          = "${var.cluster}-node"
}

# Network: nodes have private addresses only. They reach the internet through Cloud NAT.

resource "google_compute_network" "cluster" {
  name                    = var.cluster
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "cluster" {
  name                     = var.cluster
  network                  = google_compute_network.cluster.id
  ip_cidr_range            = "10.0.0.0/20"
  private_ip_google_access = true
}

resource "google_compute_router" "cluster" {
  name    = var.cluster
  network = google_compute_network.cluster.id
}

resource "google_compute_router_nat" "cluster" {
  name                               = var.cluster
  router                             = google_compute_router.cluster.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

# Firewall: the table of ports in docs/clouds.md. The load balancer and its health checks connect from two networks of Google, and its
# tunnel for operators (IAP) from a third one.

locals {
  rules = {
    balancer = { allow = { tcp = ["6443", "30090"] }, to = local.control_plane, networks = ["35.191.0.0/16", "130.211.0.0/22"], from = null }
    operator = { allow = { tcp = ["9000", "9999"] }, to = local.node, networks = ["35.235.240.0/20"], from = null }
    services = { allow = { tcp = ["6443", "30090"] }, to = local.control_plane, networks = null, from = [local.node] }
    etcd     = { allow = { tcp = ["2379-2380"] }, to = local.control_plane, networks = null, from = [local.control_plane] }
    nodes    = { allow = { tcp = ["10250"] }, to = local.node, networks = null, from = [local.node] }
    # the watch of members
    watch = { allow = { tcp = ["9000"] }, to = local.node, networks = null, from = [local.control_plane] }
    # WireGuard, health
    cilium = { allow = { udp = ["51871"], tcp = ["4240"], icmp = [] }, to = local.node, networks = null, from = [local.node] }
  }
}

resource "google_compute_firewall" "cluster" {
  for_each      = local.rules
  name          = "${var.cluster}-${each.key}"
  network       = google_compute_network.cluster.id
  target_tags   = [each.value.to]
  source_ranges = each.value.networks
  source_tags   = each.value.from

  dynamic "allow" {
    for_each = each.value.allow
    content {
      protocol = allow.key
      ports    = allow.value
    }
  }
}

# Roles: a control plane may list instances and forwarding rules, a worker only forwarding rules.

resource "google_project_iam_custom_role" "node" {
  for_each    = local.roles
  role_id     = each.value
  title       = yamldecode(file("${local.policies}/gcp-${each.key}.yaml")).title
  description = yamldecode(file("${local.policies}/gcp-${each.key}.yaml")).description
  permissions = yamldecode(file("${local.policies}/gcp-${each.key}.yaml")).includedPermissions
}

resource "google_service_account" "node" {
  for_each     = local.roles
  account_id   = "${var.cluster}-${substr(each.key, 0, 1)}"
  display_name = "${var.cluster}: ${each.key}"
}

resource "google_project_iam_member" "node" {
  for_each = local.roles
  project  = var.project
  role     = google_project_iam_custom_role.node[each.key].name
  member   = "serviceAccount:${google_service_account.node[each.key].email}"
}

# Load balancer: a proxy. A control plane reaches itself through it, too. 9000 and 9999 are not behind it.

locals {
  balanced = { kubernetes = 6443, join = 30090 }
}

resource "google_compute_global_address" "cluster" {
  name = var.cluster
}

resource "google_compute_instance_group" "control_planes" {
  count     = length(local.zones)
  name      = var.cluster
  zone      = local.zones[count.index]
  network   = google_compute_network.cluster.id
  instances = [for one in google_compute_instance.control_plane : one.self_link if one.zone == local.zones[count.index]]

  dynamic "named_port" {
    for_each = local.balanced
    content {
      name = named_port.key
      port = named_port.value
    }
  }
}

resource "google_compute_health_check" "cluster" {
  for_each           = local.balanced
  name               = "${var.cluster}-${each.key}"
  check_interval_sec = 5
  timeout_sec        = 5

  tcp_health_check {
    port = each.value
  }
}

resource "google_compute_backend_service" "cluster" {
  for_each              = local.balanced
  name                  = "${var.cluster}-${each.key}"
  load_balancing_scheme = "EXTERNAL_MANAGED"
  protocol              = "TCP"
  port_name             = each.key
  health_checks         = [google_compute_health_check.cluster[each.key].id]
  timeout_sec           = 86400

  dynamic "backend" {
    for_each = range(length(local.zones))
    content {
      group                        = google_compute_instance_group.control_planes[backend.value].id
      balancing_mode               = "CONNECTION"
      max_connections_per_instance = 1000
    }
  }
}

resource "google_compute_target_tcp_proxy" "cluster" {
  for_each        = local.balanced
  name            = "${var.cluster}-${each.key}"
  backend_service = google_compute_backend_service.cluster[each.key].id
  proxy_header    = "NONE"
}

resource "google_compute_global_forwarding_rule" "cluster" {
  for_each              = local.balanced
  name                  = "${var.cluster}-${each.key}"
  load_balancing_scheme = "EXTERNAL_MANAGED"
  ip_address            = google_compute_global_address.cluster.id
  ip_protocol           = "TCP"
  target                = google_compute_target_tcp_proxy.cluster[each.key].id
  port_range            = tostring(each.value)
  # the nodes find the load balancer by these labels
  labels = each.key == "kubernetes" ? { constellation-uid = var.cluster, constellation-use = "kubernetes" } : {}
}

# Control planes. The first one has the hash of the init secret, so `firstlight init` can initialize it, and no other.

resource "google_compute_disk" "state" {
  count = var.control_planes
  name  = "${var.cluster}-control-plane-${count.index}-state"
  zone  = local.zones[count.index % length(local.zones)]
  type  = "pd-balanced"
  size  = var.state_disk_gigabytes

  lifecycle {
    # a smaller size must not replace the disks of all control planes
    ignore_changes = [size]
  }
}

resource "google_compute_instance" "control_plane" {
  count            = var.control_planes
  name             = "${var.cluster}-control-plane-${count.index}"
  zone             = local.zones[count.index % length(local.zones)]
  machine_type     = var.machine_type
  min_cpu_platform = var.min_cpu_platform
  tags             = [local.node, local.control_plane]
  labels           = local.labels["control-plane"]
  metadata         = count.index == 0 && var.init_secret_hash != null ? { constellation-init-secret-hash = var.init_secret_hash } : {}

  boot_disk {
    initialize_params {
      image = local.image
    }
  }

  attached_disk {
    source      = google_compute_disk.state[count.index].self_link
    device_name = "state-disk"
  }

  network_interface {
    subnetwork = google_compute_subnetwork.cluster.id
    nic_type   = "GVNIC"
  }

  confidential_instance_config {
    confidential_instance_type = var.confidential_type
  }

  shielded_instance_config {
    enable_secure_boot          = false
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  scheduling {
    on_host_maintenance = "TERMINATE"
  }

  service_account {
    email  = google_service_account.node["control-plane"].email
    scopes = ["cloud-platform"]
  }

  depends_on = [google_compute_router_nat.cluster, google_project_iam_member.node]

  lifecycle {
    # A change of these must not replace or stop all control planes at once: infra/README.md. The provider also takes a disk that the CSI
    # driver has attached for a change of attached_disk.
    ignore_changes = [
      attached_disk,
      boot_disk[0].initialize_params[0].image,
      confidential_instance_config,
      machine_type,
      min_cpu_platform,
    ]
  }
}

# Workers: a group of machines from a template. A change makes a new template. Google Cloud refuses to delete the old one as long as a
# machine of the group uses it: then `tofu apply` ends with an error, and a later one deletes it.

resource "google_compute_instance_template" "worker" {
  name_prefix      = "${var.cluster}-worker-"
  machine_type     = var.machine_type
  min_cpu_platform = var.min_cpu_platform
  tags             = [local.node]
  labels           = local.labels["worker"]

  disk {
    boot         = true
    source_image = local.image
    auto_delete  = true
  }

  disk {
    device_name  = "state-disk"
    disk_type    = "pd-balanced"
    disk_size_gb = var.state_disk_gigabytes
    type         = "PERSISTENT"
    boot         = false
    auto_delete  = true
  }

  network_interface {
    subnetwork = google_compute_subnetwork.cluster.id
    nic_type   = "GVNIC"
  }

  confidential_instance_config {
    confidential_instance_type = var.confidential_type
  }

  shielded_instance_config {
    enable_secure_boot          = false
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  scheduling {
    on_host_maintenance = "TERMINATE"
  }

  service_account {
    email  = google_service_account.node["worker"].email
    scopes = ["cloud-platform"]
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_region_instance_group_manager" "worker" {
  name               = "${var.cluster}-worker"
  region             = var.region
  base_instance_name = "${var.cluster}-worker"
  target_size        = var.workers
  depends_on         = [google_compute_router_nat.cluster, google_project_iam_member.node]

  version {
    instance_template = google_compute_instance_template.worker.self_link
  }
}
