variable "uri" {
  type        = string
  default     = "qemu:///system"
  description = "Address of libvirt."
}

variable "image" {
  type        = string
  default     = "firstlight.raw"
  description = "Path of the image (docs/clouds/libvirt.md, step 1)."
}

variable "init_secret_hash" {
  type        = string
  description = "What `firstlight hash-secret init-secret.txt` prints."
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
  description = "Memory of a machine, in MiB."
}

variable "state_disk_gibibytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk."
}

variable "hypervisor" {
  type        = string
  default     = "kvm"
  description = "kvm, or qemu for emulation, which is slow."
}

variable "folder" {
  type        = string
  default     = "/var/lib/libvirt/images/firstlight-machines"
  description = "Folder for the disks, which libvirt makes."
}

variable "consoles" {
  type        = string
  default     = "/var/log/libvirt/qemu"
  description = "Folder for the consoles of the machines, NAME-console.log."
}

variable "variables" {
  type        = string
  default     = "/var/lib/libvirt/qemu/nvram"
  description = "Folder for the variables of the firmware."
}
