variable "cluster" {
  type        = string
  description = "ID of the cluster in the cloud. It marks all that belongs to the cluster."

  validation {
    # the names of service accounts have at most 30 characters
    condition     = can(regex("^[a-z][a-z0-9-]{3,27}$", var.cluster))
    error_message = "4 to 28 small letters, digits and hyphens; the first one is a letter."
  }
}

variable "project" {
  type        = string
  description = "ID of the project."
}

variable "region" {
  type        = string
  description = "A region that has machines with SEV-SNP."
}

variable "zones" {
  type        = list(string)
  default     = ["a", "b", "c"]
  description = "The zones of the region, without its name."
}

variable "image" {
  type        = string
  default     = null
  description = "Name of the registered image (docs/clouds/gcp.md, step 3). By default that of the cluster. A changed value applies only to machines that are created afterwards."
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

variable "machine_type" {
  type        = string
  default     = "n2d-standard-4"
  description = "Type of the machines. A changed value applies only to machines that are created afterwards."
}

variable "min_cpu_platform" {
  type        = string
  default     = "AMD Milan"
  description = "The oldest processor that the machines may get. A changed value applies only to machines that are created afterwards."
}

variable "confidential_type" {
  type        = string
  default     = "SEV_SNP"
  description = "SEV_SNP (gcp-sev-snp), SEV (gcp-sev-es), or TDX (gcp-tdx; with machine_type c3-standard-4 and min_cpu_platform null). A changed value applies only to machines that are created afterwards."
}

variable "state_disk_gigabytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk. A changed value applies only to machines that are created afterwards."
}

variable "policies" {
  type        = string
  default     = null
  description = "Folder with gcp-control-plane.yaml and gcp-worker.yaml: docs/clouds."
}
