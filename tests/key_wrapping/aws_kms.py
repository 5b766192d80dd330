"""Serves AWS' KMS and IAM with moto over TLS: aws_kms.py FOLDER CERTIFICATE KEY. The folder has the policies of docs/kms.md.

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
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
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


kms, iam, sts = (client(service) for service in ("kms", "iam", "sts"))
keys = [kms.create_key(KeyUsage=USAGE)["KeyMetadata"]["Arn"] for _ in range(2)]
kms.create_alias(AliasName="alias/firstlight", TargetKeyId=keys[0])
signing = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec="RSA_2048")["KeyMetadata"]["Arn"]
disabled = kms.create_key(KeyUsage=USAGE)["KeyMetadata"]["Arn"]
# moto knows it by its ID alone here
kms.disable_key(KeyId=disabled.rsplit("/")[-1])


def encrypted(key, context):
    blob = kms.encrypt(KeyId=key, Plaintext=bytes(32), EncryptionContext=context)["CiphertextBlob"]
    return base64.b64encode(blob).decode()


credentials = {}
for role in ("operator", "key-service"):
    policy = json.loads(pathlib.Path(FOLDER, f"aws-kms-{role}.json").read_text())
    for statement in policy["Statement"]:
        assert statement["Resource"] == "arn:aws:kms:REGION:ACCOUNT:key/ID"
        statement["Resource"] = "*"
        statement.pop("Condition", None)
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
sys.stdin.read()
server.shutdown()
