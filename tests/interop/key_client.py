"""Calls a key service like the callers of Constellation: in plaintext, with a new connection for each call.

    key_client.py HOST:PORT ID LENGTH [ID LENGTH]..    prints one line per call: the name of the status code and the key in hex
"""

import sys

import grpc


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def request(key_id, length):
    """Encodes kms.GetDataKeyRequest; proto3 omits zero values."""
    text = key_id.encode()
    fields = b"\x0a" + varint(len(text)) + text if text else b""
    return fields + (b"\x10" + varint(length) if length else b"")


def key(response):
    """Returns the key in kms.GetDataKeyResponse, whose only field is shorter than 128 bytes."""
    assert response[0] == 0x0A and response[1] == len(response) - 2, response
    return response[2:]


def main(address, *calls):
    for key_id, length in zip(calls[::2], calls[1::2]):
        with grpc.insecure_channel(address) as channel:
            get_data_key = channel.unary_unary("/kms.API/GetDataKey")
            try:
                print("OK", key(get_data_key(request(key_id, int(length)), timeout=10)).hex())
            except grpc.RpcError as error:
                print(error.code().name)


main(*sys.argv[1:])
