output "endpoint" {
  value       = google_compute_global_address.cluster.address
  description = "Address of the load balancer: ENDPOINT in docs/clouds/gcp.md."
}

locals {
  first = "${google_compute_instance.control_plane[0].name} --zone ${google_compute_instance.control_plane[0].zone}"
}

output "attestation_key" {
  value       = "gcloud compute instances get-serial-port-output ${local.first} | sed -n 's/.*attestation-key: \\(000b[0-9a-f]*\\).*/\\1/p' | tail -1"
  description = "A command that prints the name of the first control plane's attestation key, from its console."
}

output "tunnel" {
  value       = "gcloud compute start-iap-tunnel ${google_compute_instance.control_plane[0].name} 9000 --local-host-port localhost:9000 --zone ${google_compute_instance.control_plane[0].zone}"
  description = "A command that brings port 9000 of the first control plane to this machine, for `firstlight init`."
}

output "init" {
  value       = <<-END
    firstlight init --endpoint 127.0.0.1:9000 --policy policy.json --attestation-key "$KEY" --init-secret init-secret.txt \
      --kubernetes-version v1.35.4 --components components.json --pod-cidr 10.244.0.0/16 --addons addons.yaml \
      --cloud-provider gcp --image registry.example.com/firstlight:0.2.0
  END
  description = "The command of docs/clouds/gcp.md, step 9."
}
