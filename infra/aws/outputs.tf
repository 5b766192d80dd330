output "endpoint" {
  value       = aws_lb.cluster.dns_name
  description = "Name of the load balancer: ENDPOINT in docs/clouds/aws.md."
}

output "first_control_plane" {
  value       = aws_instance.control_plane[0].id
  description = "The instance that `firstlight init` initializes: FIRST in docs/clouds/aws.md."
}

output "attestation_key" {
  value       = "aws ec2 get-console-output --region ${var.region} --instance-id ${aws_instance.control_plane[0].id} --latest --query Output --output text | sed -n 's/.*attestation-key: \\(000b[0-9a-f]*\\).*/\\1/p' | tail -1"
  description = "A command that prints the name of the first control plane's attestation key, from its console."
}

output "init" {
  value       = <<-END
    firstlight init --endpoint ${aws_lb.cluster.dns_name} --policy policy.json --attestation-key "$KEY" --init-secret init-secret.txt \
      --kubernetes-version v1.35.4 --components components.json --pod-cidr 10.244.0.0/16 --addons addons.yaml \
      --cloud-provider aws --image registry.example.com/firstlight:0.2.0
  END
  description = "The command of docs/clouds/aws.md, step 9."
}
