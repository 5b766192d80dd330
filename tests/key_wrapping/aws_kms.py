"""Serves AWS' KMS, S3 and IAM with moto over TLS: aws_kms.py FOLDER CERTIFICATE KEY. The folder has the policies of docs/kms.md.

Prints one line of JSON with the keys and the credentials, and ends with its standard input. Then each request must have the signature of
one of the roles, whose policies moto applies. moto knows neither the keys nor the conditions of policies, but actions.
"""

import base64
import json
import logging
import pathlib
import sys
import threading

import boto3
from moto import settings
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

REGION = "eu-central-1"
# the default of AWS, which moto lacks
USAGE = "ENCRYPT_DECRYPT"
FOLDER, CERTIFICATE, KEY = sys.argv[1:]

logging.getLogger("werkzeug").setLevel(logging.ERROR)
application = DomainDispatcherApplication(create_backend_app)
server = make_server(
    "127.0.0.1", 0, application, True, request_handler=MotoRequestHandler, ssl_context=(CERTIFICATE, KEY)
)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"https://127.0.0.1:{server.server_address[1]}"


def client(service):
    return boto3.client(
        service, region_name=REGION, endpoint_url=url, verify=CERTIFICATE, aws_access_key_id="a", aws_secret_access_key="b"
    )


kms, iam, sts, s3 = (client(service) for service in ("kms", "iam", "sts", "s3"))
s3.create_bucket(Bucket="own", CreateBucketConfiguration={"LocationConstraint": REGION})
keys = [kms.create_key(KeyUsage=USAGE)["KeyMetadata"]["Arn"] for _ in range(2)]
kms.create_alias(AliasName="alias/firstlight", TargetKeyId=keys[0])
signing = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec="RSA_2048")["KeyMetadata"]["Arn"]
disabled = kms.create_key(KeyUsage=USAGE)["KeyMetadata"]["Arn"]
# here moto knows it only by its ID
kms.disable_key(KeyId=disabled.rsplit("/")[-1])


def encrypted(key, context):
    blob = kms.encrypt(KeyId=key, Plaintext=bytes(32), EncryptionContext=context)["CiphertextBlob"]
    return base64.b64encode(blob).decode()


def policy_of(role, service, resource):
    policy = json.loads(pathlib.Path(FOLDER, f"aws-{service}-{role}.json").read_text())
    for statement in policy["Statement"]:
        assert role == "creator" or statement["Resource"] == resource
        statement["Resource"] = "*"
        statement.pop("Condition", None)
    return json.dumps(policy)


credentials = {}
for role in ("operator", "key-service", "creator"):
    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
    arn = iam.create_role(RoleName=role, AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]
    for service, resource in (("kms", "arn:aws:kms:REGION:ACCOUNT:key/ID"), ("s3", "arn:aws:s3:::BUCKET/KEY")):
        if (role, service) == ("creator", "s3"):
            continue
        iam.put_role_policy(RoleName=role, PolicyName=service, PolicyDocument=policy_of(role, service, resource))
    given = sts.assume_role(RoleArn=arn, RoleSessionName="test")["Credentials"]
    credentials[role] = {
        "Code": "Success",
        "AccessKeyId": given["AccessKeyId"],
        "SecretAccessKey": given["SecretAccessKey"],
        "Token": given["SessionToken"],
        "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
found = {
    "url": url,
    "keys": keys,
    "signing": signing,
    "disabled": disabled,
    "ofOtherKey": encrypted(keys[1], {"purpose": "firstlight master secret"}),
    "ofOtherContext": encrypted(keys[0], {"purpose": "another"}),
    "credentials": credentials,
}
settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
print(json.dumps(found), flush=True)
# each further line is the name of an object that is replaced
for line in sys.stdin:
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object("own", line.strip(), b"{}")
    print("replaced", flush=True)
server.shutdown()
