# A cluster on Azure: what docs/clouds/azure.md makes by commands in its steps 4 to 8 and 10. A test compares both.

locals {
  group    = var.cluster
  policies = coalesce(var.policies, "${path.module}/../../docs/clouds")
  scope    = "/subscriptions/${var.subscription}/resourceGroups/${local.group}"
  networks = { control-planes = "10.0.0.0/24", workers = "10.0.1.0/24" }
  # what differs between the two scale sets
  nodes = {
    control-plane = {
      subnet = "control-planes"
      tags   = var.init_secret_hash == null ? {} : { constellation-init-secret-hash = var.init_secret_hash }
      pools  = [azurerm_lb_backend_address_pool.control_planes.id]
    }
    worker = { subnet = "workers", tags = {}, pools = [] }
  }
}

# Network: nodes have private addresses only. They reach the internet through a NAT gateway, and each other directly.

resource "azurerm_public_ip" "nat" {
  name                = "${var.cluster}-nat"
  resource_group_name = local.group
  location            = var.region
  sku                 = "Standard"
  allocation_method   = "Static"
  zones               = ["1", "2", "3"]
}

resource "azurerm_nat_gateway" "cluster" {
  name                    = var.cluster
  resource_group_name     = local.group
  location                = var.region
  sku_name                = "Standard"
  idle_timeout_in_minutes = 10
}

resource "azurerm_nat_gateway_public_ip_association" "cluster" {
  nat_gateway_id       = azurerm_nat_gateway.cluster.id
  public_ip_address_id = azurerm_public_ip.nat.id
}

resource "azurerm_virtual_network" "cluster" {
  name                = var.cluster
  resource_group_name = local.group
  location            = var.region
  address_space       = ["10.0.0.0/16"]
}

resource "azurerm_subnet" "cluster" {
  for_each                        = local.networks
  name                            = each.key
  resource_group_name             = local.group
  virtual_network_name            = azurerm_virtual_network.cluster.name
  address_prefixes                = [each.value]
  default_outbound_access_enabled = false
}

resource "azurerm_subnet_nat_gateway_association" "cluster" {
  for_each       = local.networks
  subnet_id      = azurerm_subnet.cluster[each.key].id
  nat_gateway_id = azurerm_nat_gateway.cluster.id
}

resource "azurerm_subnet_network_security_group_association" "cluster" {
  for_each                  = local.networks
  subnet_id                 = azurerm_subnet.cluster[each.key].id
  network_security_group_id = azurerm_network_security_group.cluster.id
}

# Firewall: the table of ports in docs/clouds.md. Azure's load balancer keeps the address of the caller: that of an operator, or of the
# NAT gateway if a node calls.

locals {
  control_planes = local.networks["control-planes"]
  all_nodes      = "10.0.0.0/23"
  # in the order of their priorities
  rules = [
    { name = "services", protocol = "Tcp", ports = ["6443", "30090"], to = local.control_planes,
    from = concat(var.operators, [azurerm_public_ip.nat.ip_address, local.all_nodes]) },
    { name = "operators", protocol = "Tcp", ports = ["9000", "9999"], to = local.all_nodes, from = var.operators },
    { name = "etcd", protocol = "Tcp", ports = ["2379-2380"], to = local.control_planes, from = [local.control_planes] },
    { name = "kubelet", protocol = "Tcp", ports = ["10250"], to = local.all_nodes, from = [local.all_nodes] },
    # the watch of members
    { name = "watch", protocol = "Tcp", ports = ["9000"], to = local.all_nodes, from = [local.control_planes] },
    # Cilium: WireGuard, health
    { name = "cilium", protocol = "Udp", ports = ["51871"], to = local.all_nodes, from = [local.all_nodes] },
    { name = "cilium-health", protocol = "Tcp", ports = ["4240"], to = local.all_nodes, from = [local.all_nodes] },
    { name = "cilium-ping", protocol = "Icmp", ports = ["*"], to = local.all_nodes, from = [local.all_nodes] },
  ]
}

resource "azurerm_network_security_group" "cluster" {
  name                = var.cluster
  resource_group_name = local.group
  location            = var.region
}

resource "azurerm_network_security_rule" "allow" {
  count                       = length(local.rules)
  name                        = local.rules[count.index].name
  resource_group_name         = local.group
  network_security_group_name = azurerm_network_security_group.cluster.name
  priority                    = 100 + 10 * count.index
  access                      = "Allow"
  direction                   = "Inbound"
  protocol                    = local.rules[count.index].protocol
  source_port_range           = "*"
  destination_port_ranges     = local.rules[count.index].ports == ["*"] ? null : local.rules[count.index].ports
  destination_port_range      = local.rules[count.index].ports == ["*"] ? "*" : null
  destination_address_prefix  = local.rules[count.index].to
  source_address_prefixes     = local.rules[count.index].from
}

# otherwise Azure allows everything within the network
resource "azurerm_network_security_rule" "others" {
  name                        = "others"
  resource_group_name         = local.group
  network_security_group_name = azurerm_network_security_group.cluster.name
  priority                    = 4000
  access                      = "Deny"
  direction                   = "Inbound"
  protocol                    = "*"
  source_port_range           = "*"
  destination_port_range      = "*"
  destination_address_prefix  = "*"
  source_address_prefix       = "VirtualNetwork"
}

# Roles: a control plane may list the machines of scale sets and load balancers, a worker only load balancers.

resource "azurerm_role_definition" "node" {
  for_each          = local.nodes
  name              = jsondecode(file("${local.policies}/azure-${each.key}.json")).Name
  description       = jsondecode(file("${local.policies}/azure-${each.key}.json")).Description
  scope             = local.scope
  assignable_scopes = [local.scope]

  permissions {
    actions = jsondecode(file("${local.policies}/azure-${each.key}.json")).Actions
  }
}

resource "azurerm_user_assigned_identity" "node" {
  for_each            = local.nodes
  name                = "${var.cluster}-${each.key}"
  resource_group_name = local.group
  location            = var.region
}

resource "azurerm_role_assignment" "node" {
  for_each           = local.nodes
  scope              = local.scope
  role_definition_id = azurerm_role_definition.node[each.key].role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.node[each.key].principal_id
  principal_type     = "ServicePrincipal"
}

# Load balancer. Its address must be public: one with a private address does not route a connection back to the machine from which it
# comes, so a control plane could not reach itself.

locals {
  balanced = toset(["6443", "30090", "9000", "9999"])
}

resource "azurerm_public_ip" "cluster" {
  name                = var.cluster
  resource_group_name = local.group
  location            = var.region
  sku                 = "Standard"
  allocation_method   = "Static"
  zones               = ["1", "2", "3"]
}

resource "azurerm_lb" "cluster" {
  name                = var.cluster
  resource_group_name = local.group
  location            = var.region
  sku                 = "Standard"
  tags                = { constellation-uid = var.cluster }

  frontend_ip_configuration {
    name                 = "public"
    public_ip_address_id = azurerm_public_ip.cluster.id
  }
}

resource "azurerm_lb_backend_address_pool" "control_planes" {
  name            = "control-planes"
  loadbalancer_id = azurerm_lb.cluster.id
}

resource "azurerm_lb_probe" "cluster" {
  for_each            = local.balanced
  name                = "port-${each.key}"
  loadbalancer_id     = azurerm_lb.cluster.id
  protocol            = "Tcp"
  port                = tonumber(each.key)
  interval_in_seconds = 5
}

resource "azurerm_lb_rule" "cluster" {
  for_each                       = local.balanced
  name                           = "port-${each.key}"
  loadbalancer_id                = azurerm_lb.cluster.id
  protocol                       = "Tcp"
  frontend_ip_configuration_name = "public"
  frontend_port                  = tonumber(each.key)
  backend_port                   = tonumber(each.key)
  backend_address_pool_ids       = [azurerm_lb_backend_address_pool.control_planes.id]
  probe_id                       = azurerm_lb_probe.cluster[each.key].id
  idle_timeout_in_minutes        = 30
  tcp_reset_enabled              = true
  disable_outbound_snat          = true
}

# Control planes and workers: two scale sets without machines. `az vmss scale --no-wait` starts the machines. The provider would wait
# until Azure takes them for ready, which no program of the image reports.

resource "azurerm_linux_virtual_machine_scale_set" "node" {
  for_each             = local.nodes
  name                 = "${var.cluster}-${each.key}"
  resource_group_name  = local.group
  location             = var.region
  sku                  = var.size
  instances            = 0
  source_image_id      = var.image
  secure_boot_enabled  = false
  vtpm_enabled         = true
  overprovision        = false
  upgrade_mode         = "Manual"
  computer_name_prefix = "${each.key}-"
  admin_username       = "unused"
  tags                 = merge({ constellation-uid = var.cluster, constellation-role = each.key }, each.value.tags)

  admin_ssh_key {
    username   = "unused"
    public_key = var.unused_key
  }

  os_disk {
    caching                  = "ReadWrite"
    storage_account_type     = "Premium_LRS"
    security_encryption_type = var.confidential ? "VMGuestStateOnly" : null
  }

  # the node finds its state disk by this number
  data_disk {
    lun                  = 0
    caching              = "None"
    create_option        = "Empty"
    disk_size_gb         = var.state_disk_gigabytes
    storage_account_type = "Premium_LRS"
  }

  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.node[each.key].id]
  }

  # the console, which has the name of the machine's attestation key
  boot_diagnostics {}

  network_interface {
    name    = "${var.cluster}-${each.key}"
    primary = true

    ip_configuration {
      name                                   = "primary"
      primary                                = true
      subnet_id                              = azurerm_subnet.cluster[each.value.subnet].id
      load_balancer_backend_address_pool_ids = each.value.pools
    }
  }

  # the rules and the way to the internet come first
  depends_on = [
    azurerm_lb_rule.cluster,
    azurerm_nat_gateway_public_ip_association.cluster,
    azurerm_network_security_rule.allow,
    azurerm_network_security_rule.others,
    azurerm_role_assignment.node,
    azurerm_subnet_nat_gateway_association.cluster,
    azurerm_subnet_network_security_group_association.cluster,
  ]

  lifecycle {
    ignore_changes = [instances]
  }
}
