"""grpcio as a peer of our client and server; tests/grpc_interop.rs starts it.

    peer.py server [CERTIFICATE KEY]        prints its port, serves until its standard input closes
    peer.py client PORT [CERTIFICATE]       runs every case against our server, prints "ok CASE" for each

It serves and calls two services: the test service of gRPC's interoperability specification (testing.py), and test.Interop
for cases that the specification lacks. test.Interop has only one message, which is encoded here by hand: field 1 (bytes)
data, field 2 (uint32) count.
"""

import os
import sys
import threading
import time
import traceback
from concurrent import futures

import grpc

import testing

MIB = 1 << 20
OPTIONS = [("grpc.max_receive_message_length", 64 * MIB), ("grpc.max_send_message_length", 64 * MIB)]
TEXT = "schlüssel 🔑 100 %\n"


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(data=b"", count=0):
    out = b""
    if data:
        out += b"\x0a" + varint(len(data)) + data
    if count:
        out += b"\x10" + varint(count)
    return out


def decode(message):
    data, count, at = b"", 0, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag == 0x0A:
            length = number()
            data = message[at : at + length]
            at += length
        elif tag == 0x10:
            count = number()
        else:
            raise ValueError(f"tag {tag}")
    return data, count


# ---- as the server ----


def echo(request, context):
    return request


def fail(request, context):
    context.abort(grpc.StatusCode.NOT_FOUND, TEXT)


def sleep(request, context):
    time.sleep(decode(request)[1] / 1000)
    return request


def metadata(request, context):
    received = dict(context.invocation_metadata())
    context.send_initial_metadata((("x-echo", received["x-ascii"]), ("x-echo-bin", received["x-data-bin"])))
    return request


def many(request, context):
    data, count = decode(request)
    for number in range(count):
        yield encode(data, number)


cancelled = threading.Event()


def endless(request, context):
    context.add_callback(cancelled.set)
    while context.is_active():
        yield request


def was_cancelled(request, context):
    return encode(count=1 if cancelled.wait(10) else 0)


def ping_pong(requests, context):
    yield from requests


def serve(certificate=None, key=None):
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
        "Sleep": grpc.unary_unary_rpc_method_handler(sleep),
        "Metadata": grpc.unary_unary_rpc_method_handler(metadata),
        "WasCancelled": grpc.unary_unary_rpc_method_handler(was_cancelled),
        "Many": grpc.unary_stream_rpc_method_handler(many),
        "Endless": grpc.unary_stream_rpc_method_handler(endless),
        "PingPong": grpc.stream_stream_rpc_method_handler(ping_pong),
    }
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Interop", methods),))
    testing.add_to(server)
    if certificate:
        with open(key, "rb") as k, open(certificate, "rb") as c:
            credentials = grpc.ssl_server_credentials([(k.read(), c.read())])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


# ---- as the client ----


def refused(code, call):
    try:
        call()
    except grpc.RpcError as error:
        assert error.code() == code, f"expected {code}, got {error.code()}: {error.details()}"
        return error
    raise AssertionError(f"expected {code}, but the call went well")


def run(port, certificate=None):
    if certificate:
        with open(certificate, "rb") as c:
            channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(c.read()), OPTIONS)
    else:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS)

    def unary(method, data=b"", count=0, service="test.Interop", **options):
        options.setdefault("timeout", 30)
        return decode(channel.unary_unary(f"/{service}/{method}")(encode(data, count), **options))

    def streaming(method, data=b"", count=0, **options):
        options.setdefault("timeout", 30)
        return channel.unary_stream(f"/test.Interop/{method}")(encode(data, count), **options)

    def empty_unary():
        assert unary("Echo") == (b"", 0)

    def large_unary():
        data = bytes(range(256)) * (12 * MIB // 256)
        assert unary("Echo", data, 7) == (data, 7)

    def repeated_unary():
        for count in range(500):
            assert unary("Echo", b"x" * count, count) == (b"x" * count, count)

    def concurrent_unary():
        call = channel.unary_unary("/test.Interop/Echo")
        pending = [call.future(encode(b"x" * 1000, count), timeout=30) for count in range(300)]
        for count, future in enumerate(pending):
            assert decode(future.result())[1] == count

    def server_streaming():
        assert [decode(m)[1] for m in streaming("Many", b"y" * 1000, 1000)] == list(range(1000))
        assert list(streaming("Many", b"", 0)) == []

    def large_stream():
        assert sum(len(m) for m in streaming("Many", b"z" * MIB, 32)) > 32 * MIB

    def slow_reader():
        for number, message in enumerate(streaming("Many", b"z" * 100_000, 60)):
            time.sleep(0.005)
            assert decode(message)[1] == number

    def ping_pong_streaming():
        sent = [encode(b"p" * size, size) for size in (0, 1, 100_000, 5)]
        assert list(channel.stream_stream("/test.Interop/PingPong")(iter(sent), timeout=30)) == sent

    def timeout_on_sleeping_server():
        refused(grpc.StatusCode.DEADLINE_EXCEEDED, lambda: unary("Sleep", count=2000, timeout=0.1))

    def cancel_after_first_response():
        call = streaming("Endless", b"e" * 1000, 1)
        next(call)
        call.cancel()
        assert unary("WasCancelled")[1] == 1

    def status_code_and_message():
        error = refused(grpc.StatusCode.NOT_FOUND, lambda: unary("Fail"))
        assert error.details() == TEXT, error.details()

    def unimplemented():
        refused(grpc.StatusCode.UNIMPLEMENTED, lambda: unary("Nope"))
        refused(grpc.StatusCode.UNIMPLEMENTED, lambda: unary("Echo", service="test.Nope"))

    def compressed_request():
        call = channel.unary_unary("/test.Interop/Echo")
        error = refused(
            grpc.StatusCode.UNIMPLEMENTED,
            lambda: call(encode(b"c" * 5000), timeout=30, compression=grpc.Compression.Gzip),
        )
        assert "compress" in error.details()

    def custom_metadata():
        call = channel.unary_unary("/test.Interop/Metadata")
        sent = (("x-ascii", "value"), ("x-data-bin", b"\x00\xff\x01"))
        _, done = call.with_call(encode(), metadata=sent, timeout=30)
        received = dict(done.initial_metadata())
        assert received["x-echo"] == "value" and received["x-echo-bin"] == b"\x00\xff\x01", received

    def health():
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        # The server, then a service by its name in field 1. The answer has SERVING = 1 in field 1.
        assert check(b"", timeout=30) == b"\x08\x01"
        assert check(b"\x0a\x0ctest.Interop", timeout=30) == b"\x08\x01"
        refused(grpc.StatusCode.NOT_FOUND, lambda: check(b"\x0a\x01x", timeout=30))

    def message_above_the_limit():
        refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: unary("Echo", b"x" * (17 * MIB)))
        assert unary("Echo", count=1) == (b"", 1)

    def headers_above_the_limit():
        refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: unary("Echo", metadata=(("x-long", "v" * 60_000),)))
        assert unary("Echo", count=1) == (b"", 1)

    def panicking_handler():
        refused(grpc.StatusCode.INTERNAL, lambda: unary("Panic"))
        assert unary("Echo", count=1) == (b"", 1)

    cases = [case for case in list(locals().values()) if callable(case) and case not in (unary, streaming)]
    for case in cases + testing.cases(channel):
        case()
        print("ok", case.__name__, flush=True)
    channel.close()


if sys.argv[1] == "server":
    serve(*sys.argv[2:])
else:
    try:
        run(*sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Threads of grpcio may still wait for the requests of the failed case.
        os._exit(1)
