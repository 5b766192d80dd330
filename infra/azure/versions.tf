terraform {
  required_version = ">= 1.8"

  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 4.55, < 5.0"
    }
  }
}

provider "azurerm" {
  subscription_id = var.subscription

  features {
    virtual_machine_scale_set {
      # by default the provider replaces or reimages all machines of a scale set at once when the image changes
      reimage_on_manual_upgrade    = false
      roll_instances_when_required = false
    }
  }
}
