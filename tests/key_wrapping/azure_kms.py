"""Serves keys of Azure Key Vault, and tokens: azure_kms.py FOLDER CERTIFICATE KEY. The folder has the roles of docs/kms.md.

No registry has an emulator, so this server follows the published API: Azure Key Vault REST API reference (get, wrapkey and unwrapkey of
keys, 7.4), its error codes, the client credentials flow of the Microsoft identity platform, and the token endpoint of the instance
metadata service. Before it is used, Azure's own clients get tokens here, and wrap and unwrap with a key.

If the variable AZURITE names its program, Azurite serves blobs behind this server, which checks the data actions of the caller's role before
("Permissions for blob service operations"); Azurite checks tokens by their form alone.

Prints one line of JSON with the addresses and the callers, and ends with its standard input.
"""

import base64
import json
import os
import pathlib
import secrets
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import jwt
from backend import Backend
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

FOLDER, CERTIFICATE, KEY = sys.argv[1:]
TENANT = "11111111-2222-3333-4444-555555555555"
RESOURCE = "https://vault.azure.net"
STORAGE = "https://storage.azure.com"
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
OAEP = padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=None)
ALL = ["wrapKey", "unwrapKey", "encrypt", "decrypt", "sign", "verify"]
# by name: the versions, the newest at the end
KEYS = {}
TOKENS = {}
ROLES = {
    role: [
        action
        for service in ("kms", "blob")
        if (service, role) != ("blob", "creator")
        for action in json.loads(pathlib.Path(FOLDER, f"azure-{service}-{role}.json").read_text())["DataActions"]
    ]
    for role in ("operator", "key-service", "creator")
}
# the client IDs of the applications, and of the managed identities
CALLERS = {role: {"clientId": f"client-{role}", "secret": secrets.token_urlsafe()} for role in ROLES}


def make(name, enabled=True, operations=ALL, size=2048):
    version = secrets.token_hex(16)
    key = {"private": rsa.generate_private_key(65537, size), "version": version, "enabled": enabled, "operations": operations}
    KEYS.setdefault(name, []).append(key)


def encoded(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decoded(text):
    assert "=" not in text
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def number(value):
    return encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def token(role, resource):
    assert resource in (RESOURCE, STORAGE), resource
    now = int(time.time())
    claims = {"aud": resource, "iss": f"https://sts.windows.net/{TENANT}/", "iat": now, "nbf": now, "exp": now + 3599}
    value = jwt.encode(claims | {"jti": secrets.token_urlsafe()}, secrets.token_bytes(32), "HS256")
    TOKENS[value] = (role, resource)
    return value


class Fault(Exception):
    def __init__(self, status, code, message, inner=None):
        error = {"code": code, "message": message}
        if inner:
            error["innererror"] = {"code": inner}
        super().__init__(status, {"error": error})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, fields=()):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in fields:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def read(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


class Metadata(Handler):
    """Gives tokens of managed identities ("How to use managed identities on an Azure VM to acquire an access token")."""

    def do_GET(self):
        url = urlsplit(self.path)
        query = {name: value[0] for name, value in parse_qs(url.query).items()}
        if url.path != "/metadata/identity/oauth2/token" or self.headers.get("Metadata") != "true":
            return self.answer(404, {})
        role = {caller["clientId"]: role for role, caller in CALLERS.items()}.get(query.get("client_id"))
        if not role:
            return self.answer(400, {"error": "invalid_request", "error_description": "Identity not found"})
        resource = query["resource"]
        given = {"access_token": token(role, resource), "expires_in": "3599", "resource": resource, "token_type": "Bearer"}
        return self.answer(200, given | {"expires_on": "4102444800", "not_before": "0"})


class Vault(Handler):
    def do_GET(self):
        self.serve("GET")

    def do_POST(self):
        self.serve("POST")

    def do_PUT(self):
        self.serve("PUT")

    def serve(self, method):
        body = self.read()
        url = urlsplit(self.path)
        if azurite and url.path.startswith("/devstoreaccount1/"):
            return self.blob(method, body)
        if url.path.endswith("/oauth2/v2.0/token"):
            return self.login(url.path, body)
        if "/.well-known/" in url.path:
            login = f"{base}/{TENANT}"
            found = {"issuer": f"{login}/v2.0", "authorization_endpoint": f"{login}/oauth2/v2.0/authorize"}
            return self.answer(200, found | {"token_endpoint": f"{login}/oauth2/v2.0/token"})
        challenge = f'Bearer authorization="{base}/{TENANT}", resource="{RESOURCE}"'
        try:
            return self.answer(200, self.key(method, url, body))
        except Fault as fault:
            status, answer = fault.args
            return self.answer(status, answer, [("WWW-Authenticate", challenge)] if status == 401 else ())

    def login(self, path, body):
        form = {name: value[0] for name, value in parse_qs(body.decode()).items()}
        assert form["grant_type"] == "client_credentials"
        role = {caller["clientId"]: role for role, caller in CALLERS.items()}.get(form["client_id"])
        if path != f"/{TENANT}/oauth2/v2.0/token":
            return self.answer(400, {"error": "invalid_request", "error_description": "AADSTS90002: Tenant not found."})
        if not role or form["client_secret"] != CALLERS[role]["secret"]:
            return self.answer(401, {"error": "invalid_client", "error_description": "AADSTS7000215: Invalid client secret provided."})
        scopes = [scope for scope in form["scope"].split() if scope.endswith("/.default")]
        given = {"token_type": "Bearer", "expires_in": 3599, "ext_expires_in": 3599}
        return self.answer(200, given | {"access_token": token(role, scopes[0].removesuffix("/.default"))})

    def blob(self, method, body):
        role, resource = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "), (None, None))
        actions = {"GET": [f"{BLOBS}/read"], "PUT": [f"{BLOBS}/add/action", f"{BLOBS}/write"]}[method]
        code = None
        if resource != STORAGE:
            status, code = 401, "InvalidAuthenticationInfo"
        elif not set(actions) & set(ROLES[role]):
            status, code = 403, "AuthorizationPermissionMismatch"
        if code:
            # the service begins its XML so
            content = f"\ufeff<?xml version='1.0' encoding='utf-8'?><Error><Code>{code}</Code><Message>No.</Message></Error>".encode()
            fields = [("Content-Type", "application/xml"), ("x-ms-error-code", code)]
        else:
            status, fields, content = azurite.answer(method, self.path, self.headers, body)
        self.send_response(status)
        for name, value in fields:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    @staticmethod
    def create(method, name, wanted):
        assert method == "POST" and wanted["kty"] == "RSA"
        if name == "deleted":
            message = "Key deleted is currently in a deleted but recoverable state, and its name cannot be reused."
            raise Fault(409, "Conflict", message, "ObjectIsDeletedButRecoverable")
        make(name, operations=wanted.get("key_ops", ALL), size=wanted.get("key_size", 2048))

    def key(self, method, url, body):
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        role, resource = TOKENS.get(value, (None, None))
        if scheme != "Bearer" or resource != RESOURCE:
            raise Fault(401, "Unauthorized", "AKV10000: Request is missing a Bearer or PoP token.")
        if "api-version" not in parse_qs(url.query):
            raise Fault(400, "BadParameter", "The request has no api-version")
        _, keys, name, *rest = url.path.split("/")
        assert keys == "keys"
        version, operation = (rest + ["", ""])[:2]
        if version == "create":
            version, operation = "", "create"
        action = {"": "read", "create": "create/action", "wrapkey": "wrap/action", "unwrapkey": "unwrap/action"}[operation]
        if f"Microsoft.KeyVault/vaults/keys/{action}" not in ROLES[role]:
            raise Fault(403, "Forbidden", "Caller is not authorized to perform action on resource.", "ForbiddenByRbac")
        if operation == "create":
            self.create(method, name, json.loads(body))
            method, operation = "GET", ""
        found = [key for key in KEYS.get(name, []) if version in ("", key["version"])]
        if not found:
            raise Fault(404, "KeyNotFound", f"A key with (name/id) {name}/{version} was not found in this key vault.")
        key = found[-1]
        kid = f"{base}/keys/{name}/{key['version']}"
        if method == "GET" and not operation:
            public = key["private"].public_key().public_numbers()
            jwk = {"kid": kid, "kty": "RSA", "key_ops": key["operations"], "n": number(public.n), "e": number(public.e)}
            return {"key": jwk, "attributes": {"enabled": key["enabled"], "exportable": False}, "tags": {}}
        assert method == "POST" and version, "an operation without a version"
        if not key["enabled"]:
            raise Fault(403, "Forbidden", "Operation is not allowed on a disabled key.", "KeyDisabled")
        if {"wrapkey": "wrapKey", "unwrapkey": "unwrapKey"}[operation] not in key["operations"]:
            raise Fault(403, "Forbidden", "Operation is not permitted on this key.", "KeyOperationForbidden")
        assert self.headers.get("Content-Type", "").startswith("application/json")
        request = json.loads(body)
        assert request["alg"] == "RSA-OAEP-256"
        try:
            data = decoded(request["value"])
            if operation == "wrapkey":
                result = key["private"].public_key().encrypt(data, OAEP)
            else:
                result = key["private"].decrypt(data, OAEP)
        except ValueError:
            raise Fault(400, "BadParameter", "The parameter is incorrect.") from None
        return {"kid": kid, "value": encoded(result)}


def serve(handler, certificate=False):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, KEY)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"


azurite = None
if "AZURITE" in os.environ:
    options = ["--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--oauth", "basic", "--cert", CERTIFICATE, "--key", KEY]
    azurite = Backend([os.environ["AZURITE"], *options], "Azurite Blob service successfully listens")
    fields = {"x-ms-version": "2021-12-02", "Authorization": f"Bearer {token('operator', STORAGE)}"}
    status, _, content = azurite.answer("PUT", "/devstoreaccount1/own?restype=container", fields, b"")
    assert status == 201, content
make("firstlight")
make("another")
make("disabled", enabled=False)
make("signing", operations=["sign", "verify"])
base = serve(Vault, True)
imds = serve(Metadata)


def wrapped(name, data):
    key = KEYS[name][-1]
    return encoded(key["private"].public_key().encrypt(data, OAEP)), key["version"]


def check_with_the_clients_of_azure():
    from azure.identity import ClientSecretCredential
    from azure.keyvault.keys import KeyClient
    from azure.keyvault.keys.crypto import CryptographyClient, KeyWrapAlgorithm

    caller = CALLERS["operator"]
    credential = ClientSecretCredential(
        TENANT, caller["clientId"], caller["secret"], authority=base, disable_instance_discovery=True, connection_verify=CERTIFICATE
    )
    more = {"credential": credential, "verify_challenge_resource": False, "connection_verify": CERTIFICATE, "api_version": "7.4"}
    key = KeyClient(base, **more).get_key("firstlight")
    client = CryptographyClient(key.id, **more)
    given = client.wrap_key(KeyWrapAlgorithm.rsa_oaep_256, bytes(32))
    assert client.unwrap_key(KeyWrapAlgorithm.rsa_oaep_256, given.encrypted_key).key == bytes(32)
    caller = CALLERS["creator"]
    more["credential"] = ClientSecretCredential(
        TENANT, caller["clientId"], caller["secret"], authority=base, disable_instance_discovery=True, connection_verify=CERTIFICATE
    )
    made = KeyClient(base, **more).create_rsa_key("made-by-azure", size=3072, key_operations=["wrapKey"])
    assert made.properties.version == KEYS["made-by-azure"][0]["version"] and made.key_operations == ["wrapKey"]


check_with_the_clients_of_azure()
value, version = wrapped("another", bytes(32))
found = {"url": base, "imds": imds, "tenant": TENANT, "callers": CALLERS, "ofOtherKey": value, "ofOtherVersion": version}
print(json.dumps(found), flush=True)
# each further line makes a new version of a key, or disables all of them, or replaces a blob
for line in sys.stdin:
    command, name = line.split()
    if command == "replace":
        fields["x-ms-blob-type"] = "BlockBlob"
        print(azurite.answer("PUT", f"/devstoreaccount1/own/{name}", fields, b"{}")[0], flush=True)
        continue
    if command == "rotate":
        make(name)
    else:
        for key in KEYS[name]:
            key["enabled"] = command == "enable"
    print(KEYS[name][-1]["version"], flush=True)
if azurite:
    azurite.stop()
