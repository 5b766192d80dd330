"""grpcio as a peer of benches/rpc.rs, which describes the command line."""

import sys
import threading
import time
from concurrent import futures

import grpc

BLOB = b"\x0a\x10" + b"x" * 16
MIB = b"\x0a\x80\x80\x40" + b"x" * (1 << 20)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def serve(certificate=None, key=None):
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    stream = grpc.unary_stream_rpc_method_handler(lambda request, context: (MIB for _ in range(64)))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
    methods = {"Echo": echo, "Stream": stream}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", methods),))
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([(read(key), read(certificate))])
        )
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


def call(method, port, connections, seconds, certificate=None):
    connections, seconds = int(connections), float(seconds)
    ready, go = threading.Barrier(connections + 1), threading.Barrier(connections + 1)
    times = []

    def caller(index):
        # Channels with equal options share a connection, so each channel has an option of its own.
        options = [("bench.index", index), ("grpc.ssl_target_name_override", "localhost")]
        if certificate is None:
            channel = grpc.insecure_channel(f"127.0.0.1:{port}", options[:1])
        else:
            channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(read(certificate)), options)
        if method == "stream":
            stream = channel.unary_stream("/bench.Bench/Stream")
            once = lambda: sum(len(response) for response in stream(BLOB))
        else:
            echo = channel.unary_unary("/bench.Bench/Echo")
            once = lambda: echo(BLOB)
        for _ in range(1 if method == "stream" else 10):
            once()
        ready.wait()
        go.wait()
        now = time.perf_counter_ns()
        until = now + seconds * 1e9
        while now < until:
            once()
            before, now = now, time.perf_counter_ns()
            times.append(now - before)

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(connections)]
    for thread in threads:
        thread.start()
    ready.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    go.wait()
    for thread in threads:
        thread.join()
    print(*times)


{"serve": serve, "call": call}[sys.argv[1]](*sys.argv[2:])
