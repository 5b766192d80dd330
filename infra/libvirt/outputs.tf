output "machines" {
  value = jsonencode(merge(
    {
      endpoint = "10.77.0.1"
      machines = [for node in local.nodes : { name = node.name, role = node.role, address = local.machines[node.name].address }]
    },
    var.init_secret_hash == null ? {} : { initSecretHash = var.init_secret_hash },
  ))
  description = "machines.json of docs/clouds/libvirt.md, step 3."
}

output "haproxy" {
  value = join("\n", concat(
    ["global", "  maxconn 4000", "defaults", "  mode tcp", "  timeout connect 5s", "  timeout client 1h", "  timeout server 1h"],
    flatten([for port in [6443, 30090] : concat(
      ["listen port-${port}", "  bind 10.77.0.1:${port}"],
      [for node in local.nodes : "  server ${node.name} ${local.machines[node.name].address}:${port} check" if node.role == "control-plane"],
    )]),
    [""],
  ))
  description = "haproxy.cfg of docs/clouds/libvirt.md, step 5."
}

output "init" {
  value       = <<-END
    firstlight init --endpoint 10.77.0.10 --policy policy.json --init-secret init-secret.txt \
      --kubernetes-version v1.35.4 --components components.json --pod-cidr 10.244.0.0/16 --addons addons.yaml \
      --cloud-provider qemu --metadata http://10.77.0.1:8080 --image registry.example.com/firstlight:0.2.0
  END
  description = "The command of docs/clouds/libvirt.md, step 8."
}
