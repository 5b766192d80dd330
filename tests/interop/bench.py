"""grpcio for benches/rpc.rs: unary round trips.

    bench.py server                              prints its port, serves until its standard input closes
    bench.py client PORT CONNECTIONS SECONDS     prints calls a second
"""

import sys
import threading
import time
from concurrent import futures

import grpc


def serve():
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


def run(port, connections, seconds):
    counts = [0] * connections
    until = time.monotonic() + seconds

    def call(index):
        # a channel of its own needs options of its own: equal ones share a connection
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("bench.index", index)])
        echo = channel.unary_unary("/bench.Bench/Echo")
        while time.monotonic() < until:
            echo(b"\x0a\x10" + b"x" * 16)
            counts[index] += 1

    threads = [threading.Thread(target=call, args=(index,)) for index in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts) / seconds)


if sys.argv[1] == "server":
    serve()
else:
    run(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
