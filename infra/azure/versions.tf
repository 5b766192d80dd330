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

  features {}
}
