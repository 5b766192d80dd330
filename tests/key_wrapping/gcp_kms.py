"""Serves keys of Google Cloud KMS, and tokens: gcp_kms.py FOLDER CERTIFICATE KEY. The folder has the roles of docs/kms.md.

No registry has an emulator, so this server follows the published API: Cloud KMS API v1 with Google's own definitions of its messages, which
refuse unknown fields; "Verifying end-to-end data integrity"; the error model of AIP-193; the tokens of "Using OAuth 2.0 for Server to
Server Applications" and of the metadata server. Before it is used, Google's own client gets a token here, and encrypts and decrypts.

If the variable STORAGE names its program, fake-gcs-server serves buckets behind this server, which checks tokens, scopes and the permissions
of the caller's role before ("IAM permissions for JSON methods").

Prints one line of JSON with the addresses and the accounts, and ends with its standard input.
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
import yaml
from backend import Backend
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.cloud import kms
from google_crc32c import value as crc32c

FOLDER, CERTIFICATE, KEY = sys.argv[1:]
RING = "projects/own/locations/europe-west3/keyRings/ring/cryptoKeys"
KMS, STORAGE, ALL = (f"https://www.googleapis.com/auth/{name}" for name in ("cloudkms", "devstorage.read_write", "cloud-platform"))
# always this one, wherever the endpoint is
AUDIENCE = "https://oauth2.googleapis.com/token"
ENABLED, DISABLED = (kms.CryptoKeyVersion.CryptoKeyVersionState[name] for name in ("ENABLED", "DISABLED"))
PURPOSE = kms.CryptoKey.CryptoKeyPurpose
# by name: the versions, whose last is the primary one
KEYS = {name: [secrets.token_bytes(32)] for name in ("firstlight", "another", "disabled", "signing", "bent")}
TOKENS = {}
ROLES = {
    role: [
        permission
        for service in ("kms", "storage")
        if (service, role) != ("storage", "creator")
        for permission in yaml.safe_load(pathlib.Path(FOLDER, f"gcp-{service}-{role}.yaml").read_text())["includedPermissions"]
    ]
    for role in ("operator", "key-service", "creator")
}
ACCOUNTS = {}


class Fault(Exception):
    def __init__(self, code, status, message):
        super().__init__(code, {"error": {"code": code, "message": message, "status": status}})


def token(role, scopes):
    value = "ya29." + secrets.token_urlsafe()
    TOKENS[value] = (role, scopes)
    return {"access_token": value, "expires_in": 3599, "token_type": "Bearer"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, data, fields=()):
        data = data if isinstance(data, str) else json.dumps(data)
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in fields:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data.encode())


class Metadata(Handler):
    def do_GET(self):
        flavor = [("Metadata-Flavor", "Google")]
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.answer(403, {}, flavor)
        if urlsplit(self.path).path != "/computeMetadata/v1/instance/service-accounts/default/token":
            return self.answer(404, {}, flavor)
        return self.answer(200, token("key-service", {ALL}), flavor)


class Api(Handler):
    def do_GET(self):
        self.serve("GET")

    def do_POST(self):
        self.serve("POST")

    def serve(self, method):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        if url.path == "/token":
            return self.login(body)
        if storage and "/storage/v1/b/" in url.path:
            return self.object(method, body)
        try:
            path = url.path.removeprefix("/v1/")
            if path.endswith("/cryptoKeys"):
                return self.answer(200, self.create(method, path, parse_qs(url.query), body))
            self.answer(200, self.key(method, path, body))
        except Fault as fault:
            self.answer(*fault.args)

    def login(self, body):
        form = {name: value[0] for name, value in parse_qs(body.decode()).items()}
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        assertion = form["assertion"]
        try:
            role = jwt.decode(assertion, options={"verify_signature": False})["iss"].split("@")[0]
            public = ACCOUNTS[role].public_key()
            claims = jwt.decode(assertion, public, ["RS256"], audience=AUDIENCE, options={"require": ["exp", "iat", "iss", "aud"]})
            header = jwt.get_unverified_header(assertion)
            assert header["kid"] == f"key of {role}" and claims["exp"] - claims["iat"] <= 3600 and claims["exp"] > time.time()
            scopes = set(claims["scope"].split())
            assert scopes <= {KMS, STORAGE, ALL}
        except (jwt.InvalidTokenError, KeyError):
            return self.answer(400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
        return self.answer(200, token(role, scopes))

    def caller(self, scope):
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        role, scopes = TOKENS.get(value, (None, set()))
        if scheme != "Bearer" or not role:
            raise Fault(401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
        if not scopes & {scope, ALL}:
            raise Fault(403, "PERMISSION_DENIED", "Request had insufficient authentication scopes.")
        return role

    def object(self, method, body):
        permission = {"GET": "storage.objects.get", "POST": "storage.objects.create"}[method]
        try:
            role = self.caller(STORAGE)
            if permission not in ROLES[role]:
                raise Fault(403, "PERMISSION_DENIED", f"{role} does not have {permission} access to the Google Cloud Storage object.")
        except Fault as fault:
            return self.answer(*fault.args)
        status, _, content = storage.answer(method, self.path, self.headers, body)
        return self.answer(status, content.decode())

    def create(self, method, ring, query, body):
        role, permission = self.caller(KMS), "cloudkms.cryptoKeys.create"
        assert method == "POST"
        if permission not in ROLES[role]:
            raise Fault(403, "PERMISSION_DENIED", f"Permission '{permission}' denied on resource '{ring}' (or it may not exist).")
        (short,) = query["cryptoKeyId"]
        name = f"{ring}/{short}"
        if ring != RING:
            raise Fault(404, "NOT_FOUND", f"KeyRing {ring} not found.")
        if short in KEYS:
            raise Fault(409, "ALREADY_EXISTS", f"CryptoKey {name} already exists.")
        wanted = kms.CryptoKey.from_json(body, ignore_unknown_fields=False)
        assert wanted == kms.CryptoKey(purpose=PURPOSE.ENCRYPT_DECRYPT)
        KEYS[short] = [secrets.token_bytes(32)]
        return self.described(name, short)

    def key(self, method, path, body):
        role = self.caller(KMS)
        name, _, operation = path.partition(":")
        permission = {
            "": "cloudkms.cryptoKeys.get",
            "encrypt": "cloudkms.cryptoKeyVersions.useToEncrypt",
            "decrypt": "cloudkms.cryptoKeyVersions.useToDecrypt",
        }[operation]
        if permission not in ROLES[role]:
            raise Fault(403, "PERMISSION_DENIED", f"Permission '{permission}' denied on resource '{name}' (or it may not exist).")
        ring, short = name.rsplit("/", 1)
        if ring != RING or short not in KEYS:
            raise Fault(404, "NOT_FOUND", f"CryptoKey {name} not found.")
        if not operation:
            assert method == "GET"
            return self.described(name, short)
        assert method == "POST" and self.headers["Content-Type"].startswith("application/json")
        kind = {"encrypt": kms.EncryptRequest, "decrypt": kms.DecryptRequest}[operation]
        request = kind.from_json(body, ignore_unknown_fields=False)
        assert not request.name
        given = request.plaintext if operation == "encrypt" else request.ciphertext
        own = request.plaintext_crc32c if operation == "encrypt" else request.ciphertext_crc32c
        aad = request.additional_authenticated_data
        for data, checksum in ((given, own), (aad, request.additional_authenticated_data_crc32c)):
            assert checksum is not None, "a request without a checksum"
            if checksum != crc32c(data):
                raise Fault(400, "INVALID_ARGUMENT", "The checksum in field crc32c did not match the data.")
        if short == "disabled":
            raise Fault(400, "FAILED_PRECONDITION", f"{name}/cryptoKeyVersions/1 is not enabled, current state is: DISABLED.")
        if operation == "encrypt":
            return self.encrypted(name, short, given, aad)
        return self.decrypted(short, given, aad)

    @staticmethod
    def described(name, short):
        state = DISABLED if short == "disabled" else ENABLED
        primary = kms.CryptoKeyVersion(name=f"{name}/cryptoKeyVersions/{len(KEYS[short])}", state=state)
        key = kms.CryptoKey(name=name, purpose=PURPOSE.ENCRYPT_DECRYPT, primary=primary)
        if short == "signing":
            key = kms.CryptoKey(name=name, purpose=PURPOSE.ASYMMETRIC_SIGN)
        return kms.CryptoKey.to_json(key, use_integers_for_enums=False)

    @staticmethod
    def encrypted(name, short, data, aad):
        ciphertext = encrypt(short, data, aad)
        answer = kms.EncryptResponse(
            name=f"{name}/cryptoKeyVersions/{len(KEYS[short])}",
            ciphertext=ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]) if short == "bent" else ciphertext,
            ciphertext_crc32c=crc32c(ciphertext),
            verified_plaintext_crc32c=True,
            verified_additional_authenticated_data_crc32c=True,
        )
        return kms.EncryptResponse.to_json(answer, use_integers_for_enums=False)

    @staticmethod
    def decrypted(short, data, aad):
        try:
            version = data[0] - 1
            plaintext = AESGCM(KEYS[short][version]).decrypt(data[1:13], data[13:], aad)
        except (InvalidTag, IndexError, ValueError):
            message = "Decryption failed: verify that 'name' refers to the correct CryptoKey."
            raise Fault(400, "INVALID_ARGUMENT", message) from None
        primary = version + 1 == len(KEYS[short])
        answer = kms.DecryptResponse(plaintext=plaintext, plaintext_crc32c=crc32c(plaintext), used_primary=primary)
        return kms.DecryptResponse.to_json(answer, use_integers_for_enums=False)


def encrypt(short, data, aad):
    nonce = secrets.token_bytes(12)
    return bytes([len(KEYS[short])]) + nonce + AESGCM(KEYS[short][-1]).encrypt(nonce, data, aad)


def serve(handler, certificate=False):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, KEY)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"


base = "https://" + serve(Api, True)
metadata = serve(Metadata)


def account(role):
    private = ACCOUNTS[role] = rsa.generate_private_key(65537, 2048)
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "own",
        "private_key_id": f"key of {role}",
        "private_key": pem.decode(),
        "client_email": f"{role}@own.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"{base}/token",
        "universe_domain": "googleapis.com",
    }


def check_with_the_client_of_google(info):
    from google.auth.transport.requests import Request
    from google.oauth2 import credentials as bare, service_account

    os.environ["REQUESTS_CA_BUNDLE"] = CERTIFICATE
    account = service_account.Credentials.from_service_account_info(info, scopes=["https://www.googleapis.com/auth/cloudkms"])
    account.refresh(Request())
    # with the account, the client would sign a token itself, which takes Google's public list of keys to check
    credentials = bare.Credentials(account.token)
    client = kms.KeyManagementServiceClient(credentials=credentials, transport="rest", client_options={"api_endpoint": base})
    name = f"{RING}/firstlight"
    assert client.get_crypto_key(request={"name": name}).primary.state == ENABLED
    request = {"name": name, "plaintext": bytes(32), "plaintext_crc32c": crc32c(bytes(32))}
    aad = {"additional_authenticated_data": b"a", "additional_authenticated_data_crc32c": crc32c(b"a")}
    given = client.encrypt(request=request | aad)
    assert given.verified_plaintext_crc32c and given.ciphertext_crc32c == crc32c(given.ciphertext)
    request = {"name": name, "ciphertext": given.ciphertext, "ciphertext_crc32c": given.ciphertext_crc32c}
    assert client.decrypt(request=request | aad).plaintext == bytes(32)
    ROLES["operator"].append("cloudkms.cryptoKeys.create")
    wanted = kms.CryptoKey(purpose=PURPOSE.ENCRYPT_DECRYPT)
    made = client.create_crypto_key(request={"parent": RING.rpartition("/")[0], "crypto_key_id": "made-by-google", "crypto_key": wanted})
    assert made.primary.state == ENABLED and "made-by-google" in KEYS
    ROLES["operator"].remove("cloudkms.cryptoKeys.create")


storage = Backend([os.environ["STORAGE"], "own"], "127.0.0.1:") if "STORAGE" in os.environ else None
accounts = {role: account(role) for role in ROLES}
check_with_the_client_of_google(accounts["operator"])


def foreign(key, aad):
    return base64.b64encode(encrypt(key, bytes(32), aad)).decode()


found = {
    "url": base,
    "metadata": metadata,
    "keys": RING,
    "accounts": accounts,
    "ofOtherKey": foreign("another", b"firstlight master secret"),
    "ofOtherContext": foreign("firstlight", b"another"),
}
print(json.dumps(found), flush=True)
# each further line is the name of a key that gets a new version, or the path of an object that is replaced
for line in sys.stdin:
    if "/" in line:
        path = f"/upload/storage/v1/b/own/o?uploadType=media&name={line.strip().replace('/', '%2F')}"
        print(storage.answer("POST", path, {}, b"{}")[0], flush=True)
        continue
    KEYS[line.strip()].append(secrets.token_bytes(32))
    print(len(KEYS[line.strip()]), flush=True)
if storage:
    storage.stop()
