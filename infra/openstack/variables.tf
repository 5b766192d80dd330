variable "cluster" {
  type        = string
  description = "ID of the cluster in the cloud. It marks all that belongs to the cluster."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.cluster))
    error_message = "At most 40 small letters, digits and hyphens; the first one is a letter."
  }
}

variable "auth_url" {
  type        = string
  description = "Address of Keystone, for the control planes: `openstack configuration show -f value -c auth.auth_url`. A changed value applies only to machines that are created afterwards."
}

variable "region" {
  type        = string
  description = "Name of the region, for the control planes: `openstack configuration show -f value -c region_name`. A changed value applies only to machines that are created afterwards."
}

variable "image" {
  type        = string
  description = "ID of the registered image (docs/clouds/openstack.md, step 3). A changed value applies only to machines that are created afterwards."
}

variable "flavor" {
  type        = string
  description = "Name of a flavor with four processors and 8 GiB of memory. A changed value applies only to machines that are created afterwards."
}

variable "outside" {
  type        = string
  default     = "public"
  description = "Name of the public network."
}

variable "outside_id" {
  type        = string
  description = "ID of the public network: `openstack network show public -f value -c id`."
}

variable "operators" {
  type        = list(string)
  description = "Networks from which operators reach ports 9000 and 9999 of the load balancer, such as 203.0.113.7/32."
}

variable "init_secret_hash" {
  type        = string
  default     = null
  description = "What `firstlight hash-secret init-secret.txt` prints. After `firstlight init` without a value, so that nobody can initialize another machine."
}

variable "control_planes" {
  type        = number
  default     = 1
  description = "Number of control planes: 1 until `firstlight init` has ended, then 3 or more."

  validation {
    condition     = var.control_planes >= 1
    error_message = "A cluster has at least one control plane."
  }
}

variable "workers" {
  type        = number
  default     = 0
  description = "Number of workers: 0 until `firstlight init` has ended."
}

variable "state_disk_gigabytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk. A changed value applies only to machines that are created afterwards."
}

variable "policies" {
  type        = string
  default     = null
  description = "Folder with openstack-control-plane.json: docs/clouds."
}
