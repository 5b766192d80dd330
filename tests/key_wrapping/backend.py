"""An emulator behind a server of these tests, which checks who may do what before it."""

import http.client
import ssl
import subprocess
from urllib.parse import urlsplit

# what a proxy does not pass on
OWN = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}


class Backend:
    def __init__(self, command, prefix):
        """Starts the program, which prints its address in a line that begins with the prefix, and which ends with this process."""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = next(line for line in self.process.stdout if line.startswith(prefix))
        address = urlsplit(line.split()[-1] if "://" in line else f"http://{line.strip()}")
        self.host, self.is_tls = address.netloc, address.scheme == "https"

    def answer(self, method, path, fields, body):
        """Returns status, fields and content of the answer to a request."""
        if self.is_tls:
            connection = http.client.HTTPSConnection(self.host, context=ssl._create_unverified_context())
        else:
            connection = http.client.HTTPConnection(self.host)
        fields = {name: value for name, value in fields.items() if name.lower() not in OWN | {"host"}}
        connection.request(method, path, body, fields)
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, [(name, value) for name, value in answer.getheaders() if name.lower() not in OWN], content

    def stop(self):
        self.process.kill()
        self.process.wait()
