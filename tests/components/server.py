"""The servers of Kubernetes' programs and images, over HTTPS, from files: each sends its clients to another address first, as
dl.k8s.io and registry.k8s.io do. Arguments: folder, certificate, key. Prints its port."""

import http.server
import os
import ssl
import sys

folder, certificate, key = sys.argv[1:]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = folder + self.path
        if self.path.startswith(("/dl/", "/v2/")):
            self.send_response(302 if self.path.startswith("/dl/") else 307)
            self.send_header("Location", "/elsewhere" + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        index = "/manifests/" in self.path
        if index and "application/vnd.oci.image.index.v1+json" not in self.headers["Accept"]:
            self.send_error(406)
            return
        if not os.path.isfile(path):
            self.send_error(404)
            return
        with open(path, "rb") as file:
            body = file.read()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.oci.image.index.v1+json" if index else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
