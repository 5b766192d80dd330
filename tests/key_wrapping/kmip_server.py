"""Serves keys by KMIP, as PyKMIP does: kmip_server.py FOLDER CERTIFICATE KEY. The folder is not used.

PyKMIP's own client makes the keys, and encrypts and decrypts, before the server is used. Prints one line of JSON, and ends with its standard
input. The line `versions 1.4` has it know these versions alone; `destroy NAME` destroys a key, and `stop` ends the server.
"""

import datetime
import json
import logging
import multiprocessing
import os
import pathlib
import socket
import sys
import threading
import types
import warnings

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

warnings.simplefilter("ignore")  # of what PyKMIP uses of its libraries
from kmip.core import enums
from kmip.core.messages.contents import ProtocolVersion
from kmip.pie import client, objects
from kmip.services.server.monitor import PolicyDirectoryMonitor
from kmip.services.server.server import KmipServer

_, CERTIFICATE, KEY = sys.argv[1:]
HERE = pathlib.Path(CERTIFICATE).parent
DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.timezone.utc)
logging.disable(logging.CRITICAL)


def name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def authority(text):
    """An authority, and its function that makes a client's files."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateBuilder().subject_name(name(text)).issuer_name(name(text)).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256())

    def client_of(who, file):
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = x509.CertificateBuilder().subject_name(name(who)).issuer_name(name(text)).public_key(own.public_key())
        certificate = certificate.serial_number(x509.random_serial_number()).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = certificate.add_extension(usage, critical=False).sign(key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        (HERE / f"{file}.pem").write_bytes(certificate.public_bytes(pem))
        encoded = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (HERE / f"{file}.key").write_bytes(encoded)

    return made, client_of


AUTHORITY, CLIENT = authority("clients")
(HERE / "clients.pem").write_bytes(AUTHORITY.public_bytes(serialization.Encoding.PEM))
CLIENT("operator", "operator")
CLIENT("stranger", "stranger")
authority("others")[1]("operator", "foreign")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
SERVER = KmipServer(
    hostname="127.0.0.1",
    port=PORT,
    certificate_path=CERTIFICATE,
    key_path=KEY,
    ca_path=str(HERE / "clients.pem"),
    auth_suite="TLS1.2",
    config_path=None,
    log_path=str(HERE / "kmip.log"),
    policy_path=str(HERE),
    enable_tls_client_auth=True,
    database_path=str(HERE / "kmip.db"),
    logging_level="CRITICAL",
)


(HERE / "client.conf").write_text("[client]\n")


def own_client():
    return client.ProxyKmipClient(
        hostname="127.0.0.1",
        port=PORT,
        cert=str(HERE / "operator.pem"),
        key=str(HERE / "operator.key"),
        ca=CERTIFICATE,
        ssl_version="PROTOCOL_TLSv1_2",
        config_file=str(HERE / "client.conf"),
        kmip_version=enums.KMIPVersion.KMIP_1_4,
    )


def make_keys():
    usage = enums.CryptographicUsageMask
    both = [usage.ENCRYPT, usage.DECRYPT]
    keys = {}
    with own_client() as proxy:
        for key, masks in [("firstlight", both), ("another", both), ("inactive", both), ("signing", [usage.SIGN])]:
            made = objects.SymmetricKey(enums.CryptographicAlgorithm.AES, 256, os.urandom(32), masks, key)
            keys[key] = proxy.register(made)
            if key != "inactive":
                proxy.activate(keys[key])
        how = {
            "cryptographic_algorithm": enums.CryptographicAlgorithm.AES,
            "block_cipher_mode": enums.BlockCipherMode.CBC,
            "padding_method": enums.PaddingMethod.PKCS5,
        }
        data, iv = proxy.encrypt(b"text", keys["firstlight"], how)
        assert proxy.decrypt(data, keys["firstlight"], how, iv) == b"text"
    return keys


def talk():
    keys = make_keys()
    print(json.dumps({"address": f"127.0.0.1:{PORT}", "keys": keys}), flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        argument = " ".join(rest)
        if command == "versions":
            versions = [ProtocolVersion(*map(int, version.split("."))) for version in argument.split(",")]
            SERVER._engine._protocol_versions = versions
        elif command == "stop":
            SERVER._socket.close()
        else:
            with own_client() as proxy:
                proxy.revoke(enums.RevocationReasonCode.CESSATION_OF_OPERATION, keys[argument])
                proxy.destroy(keys[argument])
        print("done", flush=True)


def run():
    try:
        talk()
    finally:
        os._exit(0)


# The server starts two processes that outlive this one when it is killed, and that hold its output open: one shares the policies,
# the other watches their folder. This server has constant policies.
multiprocessing.Manager = lambda: types.SimpleNamespace(dict=dict)
PolicyDirectoryMonitor.start = lambda monitor: None
SERVER.start()
SERVER._socket.listen()
threading.Thread(target=run, daemon=True).start()
SERVER.serve()
