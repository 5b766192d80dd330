"""Serves the APIs of AWS with moto, for the commands of docs/clouds/aws.md.

Prints a line of JSON with its address. For each line on its standard input it prints a line that describes what there is, and ends with
its standard input. After the line "permissions" each request must have the signature of an instance's role, whose policies moto applies.
"""

import base64
import json
import logging
import sys

import boto3
from moto import settings
from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ebs.models import ebs_backends
from moto.ec2.responses.amis import AmisResponse
from moto.ec2.responses.general import General
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import Base64EncodedString
from moto.server import ThreadedMotoServer

REGION = "us-east-2"
ACCOUNT = "123456789012"
KEY = "000b" + "5a" * 32

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
_, port = server.get_host_and_port()
url = f"http://127.0.0.1:{port}"
# what moto does not keep: these parameters of requests
seen = {"register_image": [], "run_instances": []}


def watch(responses, action, names):
    original = getattr(responses, action)

    def watched(self):
        seen[action].append({name: self._get_param(name) for name in names})
        return original(self)

    setattr(responses, action, watched)


watch(AmisResponse, "register_image", ["BootMode", "TpmSupport"])
watch(InstanceResponse, "run_instances", ["CpuOptions"])


def console(self):
    """Returns the end of a node's console in place of moto's fixed text."""
    lines = [
        "firstlight[unlock]   12.279s mounted: /run/state",
        f"firstlight[run]   18.949s attestation-key: {KEY}",
        "firstlight[run]   18.987s ready: waiting for the operator's init on [::]:9000",
    ]
    instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
    text = Base64EncodedString.from_raw_string("\r\n".join(lines))
    return ActionResult({"InstanceId": instance.id, "Timestamp": utcnow(), "Output": text})


General.get_console_output = console


def client(service):
    return boto3.client(service, region_name=REGION, endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b")


ec2, elb, iam, sts, scaling = (client(service) for service in ("ec2", "elbv2", "iam", "sts", "autoscaling"))
before = {image["ImageId"] for image in ec2.describe_images(Owners=["self"])["Images"]}
standard = {network["VpcId"] for network in ec2.describe_vpcs()["Vpcs"]}


def machine(instance):
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    volumes = {volume["DeviceName"] for volume in instance["BlockDeviceMappings"]}
    # moto ignores these parts of a template
    template = tags.get("aws:ec2launchtemplate:id")
    version = template and ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"][-1]
    given = version["LaunchTemplateData"] if version else {}
    options = {**instance["MetadataOptions"], **given.get("MetadataOptions", {})}
    profile = given["IamInstanceProfile"]["Name"] if given else instance["IamInstanceProfile"]["Arn"].split("/")[-1]
    return {
        "instanceId": instance["InstanceId"],
        "imageId": instance["ImageId"],
        "availabilityZone": instance["Placement"]["AvailabilityZone"],
        "privateIp": instance["PrivateIpAddress"],
        "region": REGION,
        "role": tags.get("constellation-role", ""),
        "tags": tags,
        "network": "10.0.0.0/16",
        "options": options,
        "cpu": given["CpuOptions"] if given else seen["run_instances"][0]["CpuOptions"],
        "disks": sorted(volumes),
        "public": instance.get("PublicIpAddress"),
        "profile": profile,
        "groups": [group["GroupId"] for group in instance["SecurityGroups"]],
    }


def rules(group):
    return [
        {
            "protocol": rule["IpProtocol"],
            "from": rule.get("FromPort"),
            "to": rule.get("ToPort"),
            "sources": [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] + [source["CidrIp"] for source in rule["IpRanges"]],
        }
        for rule in group["IpPermissions"]
    ]


def target(group):
    arn = group["TargetGroupArn"]
    attributes = elb.describe_target_group_attributes(TargetGroupArn=arn)["Attributes"]
    return {
        "port": group["Port"],
        "attributes": {attribute["Key"]: attribute["Value"] for attribute in attributes},
        "targets": sorted(one["Target"]["Id"] for one in elb.describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]),
    }


def describe():
    reservations = ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])["Reservations"]
    groups = ec2.describe_security_groups()["SecurityGroups"]
    balancers = elb.describe_load_balancers()["LoadBalancers"]
    snapshots = ebs_backends[ACCOUNT][REGION].snapshots.values()
    there = {one["SnapshotId"] for one in ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]}
    return {
        "machines": [machine(one) for reservation in reservations for one in reservation["Instances"]],
        "images": [one["ImageId"] for one in ec2.describe_images(Owners=["self"])["Images"] if one["ImageId"] not in before],
        "snapshots": [
            {
                "status": one.status,
                "gibibytes": one.volume_size,
                "blocks": {number: base64.b64encode(block.block_data).decode() for number, block in one.blocks.items()},
            }
            for one in snapshots
            if one.snapshot_id in there
        ],
        "networks": [one["VpcId"] for one in ec2.describe_vpcs()["Vpcs"] if one["VpcId"] not in standard],
        "groups": {group["GroupName"]: {"id": group["GroupId"], "rules": rules(group)} for group in groups if group["VpcId"] not in standard},
        "balancers": [{"name": one["DNSName"], "groups": one.get("SecurityGroups", [])} for one in balancers],
        "targets": [target(group) for group in elb.describe_target_groups()["TargetGroups"]],
        "roles": [role["RoleName"] for role in iam.list_roles()["Roles"]],
        "templates": [one["LaunchTemplateName"] for one in ec2.describe_launch_templates()["LaunchTemplates"]],
        "scaling": [one["AutoScalingGroupName"] for one in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]],
        "addresses": [one["AllocationId"] for one in ec2.describe_addresses()["Addresses"]],
        "gateways": [one["NatGatewayId"] for one in ec2.describe_nat_gateways()["NatGateways"] if one["State"] != "deleted"],
        "seen": seen,
    }


def permissions():
    """Returns the credentials of each role, and lets moto check permissions from now on."""
    credentials = {}
    for role in iam.list_roles()["Roles"]:
        name = role["RoleName"]
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
            document = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
            for statement in document["Statement"]:
                # moto takes the first part of an action from the service's name in the signature, which differs only for tags
                statement["Action"] += [it.replace("tag:", "tagging:") for it in statement["Action"] if it.startswith("tag:")]
            iam.put_role_policy(RoleName=name, PolicyName=policy, PolicyDocument=json.dumps(document))
        given = sts.assume_role(RoleArn=role["Arn"], RoleSessionName="test")["Credentials"]
        credentials[name] = {
            "Code": "Success",
            "AccessKeyId": given["AccessKeyId"],
            "SecretAccessKey": given["SecretAccessKey"],
            "Token": given["SessionToken"],
            "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    return credentials


print(json.dumps({"url": url, "key": KEY}), flush=True)
for line in sys.stdin:
    match line.strip():
        case "describe":
            print(json.dumps(describe()), flush=True)
        case "permissions":
            print(json.dumps(permissions()), flush=True)
        case "free":
            settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
            print("{}", flush=True)
server.stop()
