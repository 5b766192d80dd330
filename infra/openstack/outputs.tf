output "endpoint" {
  value       = openstack_networking_floatingip_v2.cluster.address
  description = "Address of the load balancer: ENDPOINT in docs/clouds/openstack.md."
}

output "console" {
  value       = "openstack console log show ${openstack_compute_instance_v2.control_plane[0].name}"
  description = "A command that prints the first control plane's console, which has the name of its attestation key."
}

output "init" {
  value       = <<-END
    firstlight init --endpoint ${openstack_networking_floatingip_v2.cluster.address} --policy policy.json --init-secret init-secret.txt \
      --kubernetes-version v1.35.4 --components components.json --pod-cidr 10.244.0.0/16 --addons addons.yaml \
      --cloud-provider openstack --image registry.example.com/firstlight:0.2.0
  END
  description = "The command of docs/clouds/openstack.md, step 9."
}
