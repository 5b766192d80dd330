terraform {
  required_version = ">= 1.8"

  required_providers {
    # from 0.9 on, this provider has other resources
    libvirt = {
      source  = "dmacvicar/libvirt"
      version = ">= 0.8.3, < 0.9"
    }
  }
}

# It also needs the program xsltproc.
provider "libvirt" {
  uri = var.uri
}
