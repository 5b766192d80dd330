"""Serves the APIs of AWS with moto, for the commands of docs/clouds/aws.md.

Prints a line of JSON with its address. For each line on its standard input it prints a line that describes what there is, and ends with
its standard input. After the lines "operator" and "permissions" each request must have the signature of the operator or of an instance's
role, whose policies moto applies, until the line "free".
"""

import base64
import json
import logging
import sys

import boto3
from moto import settings
from moto.core.exceptions import AccessDeniedError
from moto.core.responses import ActionResult, BaseResponse
from moto.core.utils import utcnow
from moto.ebs.models import ebs_backends
from moto.ec2.responses.amis import AmisResponse
from moto.ec2.responses.general import General
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import Base64EncodedString
from moto.iam.access_control import IAMRequest
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


# each action, in order, and those that are refused once
calls, refused = [], []
authorize = BaseResponse._authenticate_and_authorize_normal_action


def recorded(self, resource="*"):
    action = self._get_action()
    if action in refused:
        refused.remove(action)
        calls.append(f"refused {action}")
        raise AccessDeniedError(f"arn:aws:iam::{ACCOUNT}:user/operator", action)
    calls.append(action)
    authorize(self, resource)


BaseResponse._authenticate_and_authorize_normal_action = recorded
check_signature = IAMRequest.check_signature


def check_known_signature(self):
    # moto computes another signature for this request than the client of AWS
    if self._action != "ebs:CompleteSnapshot":
        check_signature(self)


IAMRequest.check_signature = check_known_signature


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


def several(values):
    return ",".join(sorted(str(value).lower() if isinstance(value, bool) else str(value) for value in values))


def words(tags):
    return several(f"{tag['Key']}={tag['Value']}" for tag in tags if not tag["Key"].startswith("aws:"))


def metadata_options(options):
    return several(options[name] for name in ("HttpTokens", "HttpPutResponseHopLimit", "InstanceMetadataTags"))


def network_facts():
    for one in ec2.describe_vpcs()["Vpcs"]:
        if one["VpcId"] not in standard:
            has_names = ec2.describe_vpc_attribute(VpcId=one["VpcId"], Attribute="enableDnsHostnames")["EnableDnsHostnames"]["Value"]
            yield f"network {one['CidrBlock']} names {several([has_names])} tags {words(one['Tags'])}"
    for kind, found in {
        "internet gateway": ec2.describe_internet_gateways()["InternetGateways"],
        "nat gateway": ec2.describe_nat_gateways()["NatGateways"],
        "address": ec2.describe_addresses()["Addresses"],
    }.items():
        yield from (f"{kind} {words(one['Tags'])}" for one in found if one.get("Tags"))
    subnets = {one["SubnetId"]: one for one in ec2.describe_subnets()["Subnets"] if one["VpcId"] not in standard}
    yield from (f"subnet {one['CidrBlock']} in {one['AvailabilityZone']} tags {words(one['Tags'])}" for one in subnets.values())
    for table in ec2.describe_route_tables()["RouteTables"]:
        for route in table["Routes"]:
            if table["VpcId"] not in standard and route["DestinationCidrBlock"] == "0.0.0.0/0":
                name, way = ("private", "nat") if "NatGatewayId" in route else ("public", "internet")
                yield f"table {name} tags {words(table['Tags'])}"
                yield f"table {name} leads to 0.0.0.0/0 by {way}"
                found = (one["SubnetId"] for one in table["Associations"] if "SubnetId" in one)
                yield from (f"table {name} of subnet {subnets[one]['CidrBlock']}" for one in found)


def firewall_facts(groups):
    addresses = {f"{one['PublicIp']}/32": "nat" for one in ec2.describe_addresses()["Addresses"]}
    for group in ec2.describe_security_groups()["SecurityGroups"]:
        if group["GroupId"] in groups:
            name = group["GroupName"]
            yield f"group {name} tags {words(group['Tags'])}"
            for rule in rules(group):
                sources = [groups.get(source) or addresses.get(source, source) for source in rule["sources"]]
                yield from (f"to {name}: {rule['protocol']} {rule['from']} {rule['to']} from {source}" for source in sources)
            for rule in group["IpPermissionsEgress"]:
                yield from (f"out of {name}: {rule['IpProtocol']} {one['CidrIp']}" for one in rule["IpRanges"])


def role_facts():
    for role in iam.list_roles()["Roles"]:
        name = role["RoleName"]
        yield f"role {name} for {several(one['Principal']['Service'] for one in role['AssumeRolePolicyDocument']['Statement'])}"
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
            for statement in iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]["Statement"]:
                yield from (f"role {name} by {policy}: {action} {statement['Resource']}" for action in statement["Action"])
    for profile in iam.list_instance_profiles()["InstanceProfiles"]:
        yield f"profile {profile['InstanceProfileName']} of {profile['Roles'][0]['RoleName']}"


def balancer_facts(groups):
    for one in elb.describe_load_balancers()["LoadBalancers"]:
        arn, name = one["LoadBalancerArn"], one["LoadBalancerName"]
        attributes = elb.describe_load_balancer_attributes(LoadBalancerArn=arn)["Attributes"]
        across = [it["Value"] for it in attributes if it["Key"] == "load_balancing.cross_zone.enabled"]
        tags = words(elb.describe_tags(ResourceArns=[arn])["TagDescriptions"][0]["Tags"])
        yield f"balancer {name} {one['Type']} internal {several([one['Scheme'] == 'internal'])} across zones {several(across)} tags {tags}"
        zones = {it["SubnetId"]: it["CidrBlock"] for it in ec2.describe_subnets()["Subnets"]}
        yield f"balancer {name} in {several(zones[it['SubnetId']] for it in one['AvailabilityZones'])}"
        yield f"balancer {name} behind {several(groups[it] for it in one['SecurityGroups'])}"
        for it in elb.describe_listeners(LoadBalancerArn=arn)["Listeners"]:
            action = it["DefaultActions"][0]
            yield f"listener {it['Protocol']} {it['Port']} {action['Type']} {action['TargetGroupArn'].split('/')[-2]}"
    for group in elb.describe_target_groups()["TargetGroups"]:
        found, name = target(group), group["TargetGroupName"]
        attributes = found["attributes"]
        yield f"targets {name} {group['Protocol']} {group['Port']} {group['TargetType']}"
        yield f"targets {name} keep {attributes['preserve_client_ip.enabled']} delay {attributes['deregistration_delay.timeout_seconds']}"
        yield (
            f"targets {name} check {group['HealthCheckProtocol']} every {group['HealthCheckIntervalSeconds']}"
            f" good {group['HealthyThresholdCount']} bad {group['UnhealthyThresholdCount']}"
        )
        yield from (f"targets {name} has control plane {number}" for number in range(len(found["targets"])))


def machine_facts(groups):
    subnets = {one["SubnetId"]: one["CidrBlock"] for one in ec2.describe_subnets()["Subnets"]}
    reservations = ec2.describe_instances(Filters=[{"Name": "tag:constellation-role", "Values": ["control-plane"]}])["Reservations"]
    for one in (it for reservation in reservations for it in reservation["Instances"]):
        what = f"machine in {subnets[one['SubnetId']]}"
        (disk,) = [it["Ebs"] for it in one["BlockDeviceMappings"] if it["DeviceName"] == "/dev/sdb"]
        volume = ec2.describe_volumes(VolumeIds=[disk["VolumeId"]])["Volumes"][0]
        yield f"{what} {one['InstanceType']} image {one['ImageId']} snp {seen['run_instances'][0]['CpuOptions']['AmdSevSnp']}"
        yield f"{what} disk /dev/sdb {volume['Size']} {volume['VolumeType']} delete {several([disk['DeleteOnTermination']])}"
        yield f"{what} profile {machine(one)['profile']} groups {several(groups[it['GroupId']] for it in one['SecurityGroups'])}"
        yield f"{what} metadata {metadata_options(one['MetadataOptions'])} tags {words(one['Tags'])}"
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        what = f"template {template['LaunchTemplateName']}"
        found = ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])["LaunchTemplateVersions"]
        data = found[-1]["LaunchTemplateData"]
        (disk,), (tags,) = data["BlockDeviceMappings"], data["TagSpecifications"]
        volume = disk["Ebs"]
        yield f"{what} {data['InstanceType']} image {data['ImageId']} snp {data['CpuOptions']['AmdSevSnp']}"
        yield f"{what} disk {disk['DeviceName']} {volume['VolumeSize']} {volume['VolumeType']} delete {several([volume['DeleteOnTermination']])}"
        yield f"{what} profile {data['IamInstanceProfile']['Name']} groups {several(groups[it] for it in data['SecurityGroupIds'])}"
        yield f"{what} metadata {metadata_options(data['MetadataOptions'])} tags of {tags['ResourceType']} {words(tags['Tags'])}"
    for group in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        what, template = f"scaling {group['AutoScalingGroupName']}", group["LaunchTemplate"]
        yield f"{what} {group['MinSize']} {group['MaxSize']} {group['DesiredCapacity']}"
        yield f"{what} in {several(subnets[it] for it in group['VPCZoneIdentifier'].split(','))}"
        yield f"{what} template {template['LaunchTemplateName']} {template['Version']}"
        yield from (f"{what} tag {it['Key']}={it['Value']} {several([it['PropagateAtLaunch']])}" for it in group["Tags"])


def facts():
    """Returns what there is, as lines of text. tests/cloud_pages/infra/aws.rs makes the same lines of a plan of infra/aws."""
    found = ec2.describe_security_groups()["SecurityGroups"]
    groups = {one["GroupId"]: one["GroupName"] for one in found if one["VpcId"] not in standard and one["GroupName"] != "default"}
    return [*network_facts(), *firewall_facts(groups), *role_facts(), *balancer_facts(groups), *machine_facts(groups)]


def operator():
    """Returns the keys of a user with the policy of the page, and lets moto check permissions from now on."""
    with open(sys.argv[1]) as policy:
        document = json.load(policy)
    for statement in document["Statement"]:
        # moto compares only actions
        statement["Resource"] = "*"
        statement.pop("Condition", None)
    iam.create_user(UserName="operator")
    iam.put_user_policy(UserName="operator", PolicyName="page", PolicyDocument=json.dumps(document))
    key = iam.create_access_key(UserName="operator")["AccessKey"]
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    return {"id": key["AccessKeyId"], "secret": key["SecretAccessKey"]}


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
        case "operator":
            print(json.dumps(operator()), flush=True)
        case "guard":
            settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
            print("{}", flush=True)
        case "calls":
            print(json.dumps({"calls": calls}), flush=True)
        case "describe":
            print(json.dumps(describe()), flush=True)
        case "facts":
            print(json.dumps({"facts": facts()}), flush=True)
        case "permissions":
            print(json.dumps(permissions()), flush=True)
        case "free":
            settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
            print("{}", flush=True)
        case question:
            refused += question.removeprefix("refuse ").split()
            print("{}", flush=True)
server.stop()
