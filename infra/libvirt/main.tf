# A cluster of virtual machines on one host: what docs/clouds/libvirt.md makes by commands in its steps 3 to 6 and 9. A test compares both.

locals {
  nodes = concat(
    [for number in range(var.control_planes) : { name = "control-plane-${number}", role = "control-plane", last = 10 + number }],
    [for number in range(var.workers) : { name = "worker-${number}", role = "worker", last = 20 + number }],
  )
  machines = { for node in local.nodes : node.name => merge(node, { address = "10.77.0.${node.last}", mac = "52:54:00:77:00:${node.last}" }) }
}

# Network: each machine gets its address by that of its network card, and no other machine gets one.

resource "libvirt_network" "firstlight" {
  name      = "firstlight"
  mode      = "nat"
  bridge    = "firstlight0"
  addresses = ["10.77.0.0/24"]
  autostart = true

  dhcp {
    enabled = true
  }

  xml {
    xslt = file("${path.module}/network.xslt")
  }

  lifecycle {
    # another version of the file must not replace the network
    ignore_changes = [xml]
  }
}

# Disks: the image, and a blank state disk.

resource "libvirt_pool" "firstlight" {
  name = "firstlight"
  type = "dir"

  target {
    path = var.folder
  }

  lifecycle {
    ignore_changes = [target]
  }
}

resource "libvirt_volume" "image" {
  for_each = local.machines
  name     = "${each.key}.raw"
  pool     = libvirt_pool.firstlight.name
  source   = var.image
  format   = "raw"

  lifecycle {
    # another image must not replace all disks at once: infra/README.md
    ignore_changes = [source]
  }
}

resource "libvirt_volume" "state" {
  for_each = local.machines
  name     = "${each.key}-state.raw"
  pool     = libvirt_pool.firstlight.name
  format   = "raw"
  size     = var.state_disk_gibibytes * 1024 * 1024 * 1024

  xml {
    xslt = file("${path.module}/volume.xslt")
  }

  lifecycle {
    ignore_changes = [size, xml]
  }
}

# Machines: UEFI without Secure Boot, a TPM 2.0, no graphics. machine.xslt adds settings that the provider does not support.

resource "libvirt_domain" "machine" {
  for_each = local.machines
  name     = each.key
  type     = var.hypervisor
  machine  = "q35"
  memory   = var.memory
  vcpu     = 4
  firmware = "/usr/share/OVMF/OVMF_CODE_4M.fd"

  nvram {
    file     = "${var.variables}/${each.key}_VARS.fd"
    template = "/usr/share/OVMF/OVMF_VARS_4M.fd"
  }

  cpu {
    mode = var.hypervisor == "kvm" ? "host-passthrough" : "maximum"
  }

  disk {
    volume_id = libvirt_volume.image[each.key].id
  }

  disk {
    volume_id = libvirt_volume.state[each.key].id
  }

  network_interface {
    network_id = libvirt_network.firstlight.id
    hostname   = each.key
    mac        = each.value.mac
    addresses  = [each.value.address]
  }

  tpm {
    backend_type    = "emulator"
    backend_version = "2.0"
  }

  console {
    type        = "pty"
    target_type = "serial"
    target_port = "0"
  }

  xml {
    xslt = templatefile("${path.module}/machine.xslt", { log = "${var.consoles}/${each.key}-console.log" })
  }

  lifecycle {
    ignore_changes = [
      # the provider reads them from the leases, and a machine that is off has none
      network_interface[0].addresses,
      # a change of these must not replace all machines at once: infra/README.md
      cpu,
      firmware,
      memory,
      nvram,
      type,
      vcpu,
      xml,
    ]
  }
}
