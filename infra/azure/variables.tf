variable "cluster" {
  type        = string
  description = "ID of the cluster in the cloud, and the name of its resource group, which docs/clouds/azure.md makes in step 1."

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.cluster))
    error_message = "At most 40 small letters, digits and hyphens; the first one is a letter."
  }
}

variable "subscription" {
  type        = string
  description = "ID of the subscription."
}

variable "region" {
  type        = string
  description = "A region that has machines with SEV-SNP."
}

variable "image" {
  type        = string
  description = "ID of the version of the image in the gallery (docs/clouds/azure.md, step 3). A changed value applies only to machines that are created afterwards."
}

variable "operators" {
  type        = list(string)
  description = "Networks from which operators reach the load balancer, such as 203.0.113.7/32."
}

variable "init_secret_hash" {
  type        = string
  default     = null
  description = "What `firstlight hash-secret init-secret.txt` prints. After `firstlight init` without a value, so that nobody can initialize another machine."
}

variable "size" {
  type        = string
  default     = "Standard_DC4as_v5"
  description = "Size of the machines. A changed value applies only to machines that are created afterwards."
}

variable "confidential" {
  type        = bool
  default     = true
  description = "Machines with AMD SEV-SNP or Intel TDX, by their size. With false, Azure can read their memory (azure-trustedlaunch). A change replaces the scale sets, and deletes all machines."
}

variable "state_disk_gigabytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk. A changed value applies only to machines that are created afterwards."
}

variable "unused_key" {
  type        = string
  description = "A public SSH key. Azure demands one; nothing in the machine reads it."
}

variable "policies" {
  type        = string
  default     = null
  description = "Folder with azure-control-plane.json and azure-worker.json: docs/clouds."
}
