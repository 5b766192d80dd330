terraform {
  required_version = ">= 1.8"

  required_providers {
    openstack = {
      source  = "terraform-provider-openstack/openstack"
      version = ">= 3.4, < 4.0"
    }
  }
}

# The credentials come from OS_CLOUD, or from the file that Horizon offers.
provider "openstack" {}
