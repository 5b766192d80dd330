output "endpoint" {
  value       = azurerm_public_ip.cluster.ip_address
  description = "Address of the load balancer: ENDPOINT in docs/clouds/azure.md."
}

output "start" {
  value       = { for role in ["control-plane", "worker"] : role => "az vmss scale --resource-group ${local.group} --name ${var.cluster}-${role} --no-wait --new-capacity" }
  description = "The commands that start machines; a number follows. First 1 control plane, after `firstlight init` more, and the workers."
}

output "init" {
  value       = <<-END
    firstlight init --endpoint ${azurerm_public_ip.cluster.ip_address} --policy policy.json --attestation-key "$KEY" --init-secret init-secret.txt \
      --kubernetes-version v1.35.4 --components components.json --pod-cidr 10.244.0.0/16 --addons addons.yaml \
      --cloud-provider azure --image registry.example.com/firstlight:0.2.0
  END
  description = "The command of docs/clouds/azure.md, step 9."
}
