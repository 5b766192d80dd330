variable "cluster" {
  type        = string
  description = "ID of the cluster in the cloud. It marks all that belongs to the cluster."

  validation {
    # the names of target groups have at most 32 characters
    condition     = can(regex("^[a-z][a-z0-9-]{0,25}$", var.cluster))
    error_message = "At most 26 small letters, digits and hyphens; the first one is a letter."
  }
}

variable "region" {
  type        = string
  description = "A region that has instances with SEV-SNP."
}

variable "zones" {
  type        = list(string)
  default     = ["a", "b", "c"]
  description = "The zones of the region, without its name."
}

variable "image" {
  type        = string
  description = "ID of the registered image (docs/clouds/aws.md, step 3). A changed value applies only to machines that are created afterwards."
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

variable "max_workers" {
  type        = number
  default     = 10
  description = "The group of workers never has more."
}

variable "instance_type" {
  type        = string
  default     = "m6a.xlarge"
  description = "Type of the instances. A changed value applies only to machines that are created afterwards."
}

variable "sev_snp" {
  type        = bool
  default     = true
  description = "Instances with AMD SEV-SNP (aws-sev-snp). With false, AWS can read their memory (aws-nitro-tpm). A changed value applies only to machines that are created afterwards."
}

variable "state_disk_gigabytes" {
  type        = number
  default     = 50
  description = "Size of a node's state disk. A changed value applies only to machines that are created afterwards."
}

variable "policies" {
  type        = string
  default     = null
  description = "Folder with aws-control-plane.json, aws-worker.json and aws-controller-manager.json: docs/clouds."
}
