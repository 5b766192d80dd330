variable "uri" {
  type        = string
  default     = "qemu:///system"
  description = "Address of libvirt."
}

variable "image" {
  type        = string
  default     = "firstlight.raw"
  description = "Path of the image (docs/clouds/libvirt.md, step 1). A changed value applies only to machines that are created afterwards."
}

variable "init_secret_hash" {
  type        = string
  default     = null
  description = "What `firstlight hash-secret init-secret.txt` prints. After `firstlight init` without a value, so that nobody can initialize another machine."
}

variable "control_planes" {
  type        = number
  default     = 1
  description = "Number of control planes, at most 10: 1 until `firstlight init` has ended, then 3 or more."

  validation {
    condition     = var.control_planes >= 1 && var.control_planes <= 10
    error_message = "A number from 1 to 10."
  }
}

variable "workers" {
  type        = number
  default     = 0
  description = "Number of workers, at most 80: 0 until `firstlight init` has ended."

  validation {
    condition     = var.workers >= 0 && var.workers <= 80
    error_message = "A number from 0 to 80."
  }
}

variable "memory" {
  type        = number
  default     = 8192
  description = "Memory of a machine, in MiB. A changed value applies only to machines that are created afterwards."
}

variable "state_disk_gibibytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk. A changed value applies only to machines that are created afterwards."
}

variable "hypervisor" {
  type        = string
  default     = "kvm"
  description = "kvm, or qemu for emulation, which is slow. A changed value applies only to machines that are created afterwards."
}

variable "folder" {
  type        = string
  default     = "/var/lib/libvirt/images/firstlight-machines"
  description = "Folder for the disks, which libvirt makes. A changed value has no effect on a cluster that exists."
}

variable "consoles" {
  type        = string
  default     = "/var/log/libvirt/qemu"
  description = "Folder for the consoles of the machines, NAME-console.log. A changed value applies only to machines that are created afterwards."
}

variable "variables" {
  type        = string
  default     = "/var/lib/libvirt/qemu/nvram"
  description = "Folder for the variables of the firmware. A changed value applies only to machines that are created afterwards."
}
