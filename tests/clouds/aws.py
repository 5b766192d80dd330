"""Serves the APIs of AWS with moto, with a cluster in it: aws.py FOLDER. The folder has the policies of the instances' roles.

Prints one line of JSON that describes the cluster. Then each request must have the signature of one of the roles, whose policies moto
applies. Reads changes of the cloud from standard input, answers each with a line, and ends with its standard input:

    terminate INSTANCE          an administrator deletes a machine
    address INSTANCE ADDRESS    its public address is now this one
"""

import json
import logging
import pathlib
import sys

import boto3
from moto import settings
from moto.ec2 import ec2_backends
from moto.server import ThreadedMotoServer

REGION = "eu-central-1"
UID = "constell1"
ACCOUNT = "123456789012"

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
_, port = server.get_host_and_port()
url = f"http://127.0.0.1:{port}"


def client(service):
    return boto3.client(service, region_name=REGION, endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b")


ec2, elb, iam, sts = (client(service) for service in ("ec2", "elbv2", "iam", "sts"))
image = ec2.describe_images()["Images"][0]["ImageId"]
network = ec2.create_vpc(CidrBlock="10.7.0.0/16", AmazonProvidedIpv6CidrBlock=True)["Vpc"]
ipv6 = network["Ipv6CidrBlockAssociationSet"][0]["Ipv6CidrBlock"].removesuffix("00::/56")
network = network["VpcId"]
zones = [zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]]
subnets = [
    ec2.create_subnet(
        VpcId=network, CidrBlock=f"10.7.{number}.0/24", Ipv6CidrBlock=f"{ipv6}0{number}::/64", AvailabilityZone=zone
    )["Subnet"]["SubnetId"]
    for number, zone in enumerate(zones[:2])
]


def tags(uid, **more):
    # by the second tag, AWS's cloud controller manager knows the resources of its cluster
    all = {"constellation-uid": uid, "KubernetesCluster": uid, **more}
    return [{"Key": key, "Value": value} for key, value in all.items()]


def run(number, role, uid=UID):
    instance = ec2.run_instances(
        ImageId=image,
        MinCount=1,
        MaxCount=1,
        NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": subnets[number % 2], "AssociatePublicIpAddress": True}],
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags(uid, **{"constellation-role": role})}],
    )["Instances"][0]
    interface = instance["NetworkInterfaces"][0]["NetworkInterfaceId"]
    addresses = ec2.assign_ipv6_addresses(NetworkInterfaceId=interface, Ipv6AddressCount=2)["AssignedIpv6Addresses"]
    instance = ec2.describe_instances(InstanceIds=[instance["InstanceId"]])["Reservations"][0]["Instances"][0]
    return {
        "instanceId": instance["InstanceId"],
        "availabilityZone": instance["Placement"]["AvailabilityZone"],
        "privateIp": instance["PrivateIpAddress"],
        "publicIp": instance["PublicIpAddress"],
        "privateDnsName": instance["PrivateDnsName"],
        "publicDnsName": instance["PublicDnsName"],
        "ipv6": addresses[0],
        "secondIpv6": addresses[1],
        "region": REGION,
        "role": role,
    }


machines = [run(0, "control-plane"), run(1, "worker"), run(2, "worker")]
run(3, "worker", uid="another")
deleted = run(4, "worker")
ec2.terminate_instances(InstanceIds=[deleted["instanceId"]])
stopped = run(5, "worker", uid="another")
resting = run(6, "worker")
ec2.stop_instances(InstanceIds=[stopped["instanceId"], resting["instanceId"]])
# another customer's machine, of the same image
other = sts.assume_role(RoleArn="arn:aws:iam::210987654321:role/other", RoleSessionName="test")["Credentials"]
other = boto3.client(
    "ec2",
    region_name=REGION,
    endpoint_url=url,
    aws_access_key_id=other["AccessKeyId"],
    aws_secret_access_key=other["SecretAccessKey"],
    aws_session_token=other["SessionToken"],
)
foreign = other.run_instances(ImageId=image, MinCount=1, MaxCount=1)
assert foreign["OwnerId"] == "210987654321", foreign["OwnerId"]
for name, uid in (("other", "another"), ("cluster", UID)):
    balancer = elb.create_load_balancer(Name=name, Subnets=subnets, Type="network", Tags=tags(uid))["LoadBalancers"][0]

credentials = {}
# a control plane on which AWS's cloud controller manager may run has two policies
ROLES = {name: [name] for name in ("control-plane", "worker", "verifier")}
ROLES["controller"] = ["control-plane", "controller-manager"]
for role, names in ROLES.items():
    documents = [json.loads(pathlib.Path(sys.argv[1], f"aws-{name}.json").read_text()) for name in names]
    policy = {"Version": "2012-10-17", "Statement": [one for document in documents for one in document["Statement"]]}
    for statement in policy["Statement"]:
        # moto does not have this request; without the permission, the controller does not ask again
        statement["Action"] = [action for action in statement["Action"] if action != "ec2:DescribeInstanceTopology"]
        # moto takes the first part of an action from the service's name in the signature, which differs only for tags
        statement["Action"] += [action.replace("tag:", "tagging:") for action in statement["Action"] if action.startswith("tag:")]
    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
    arn = iam.create_role(RoleName=role, AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]
    iam.put_role_policy(RoleName=role, PolicyName="firstlight", PolicyDocument=json.dumps(policy))
    given = sts.assume_role(RoleArn=arn, RoleSessionName="test")["Credentials"]
    credentials[role] = {
        "Code": "Success",
        "AccessKeyId": given["AccessKeyId"],
        "SecretAccessKey": given["SecretAccessKey"],
        "Token": given["SessionToken"],
        "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
found = {
    "url": url,
    "image": image,
    "machines": machines,
    "stopped": stopped["instanceId"],
    "resting": resting["instanceId"],
    "deleted": deleted["instanceId"],
    "foreign": foreign["Instances"][0]["InstanceId"],
    "balancer": balancer["DNSName"],
    "credentials": credentials,
}
print(json.dumps(found), flush=True)
backend = ec2_backends[ACCOUNT][REGION]
for line in sys.stdin:
    match line.split():
        case ["terminate", instance]:
            backend.terminate_instances([instance])
        case ["address", instance, address]:
            allocated = backend.allocate_address("vpc", address)
            backend.associate_address(instance=backend.get_instance(instance), allocation_id=allocated.allocation_id)
    print("done", flush=True)
server.stop()
