"""A server that speaks the protocol of S3 on this host: moto's, in a process of its own, where it may warn."""

import os
import subprocess
import sys
import uuid

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class ObjectStore:
    """The server; it ends with this process.

    Attributes:
      environment: by which clients find it.
    """

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        )
        port = self._process.stdout.readline().strip()
        assert port, "moto's server has not started"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def close(self):
        self._process.communicate()


def make_bucket():
    """The URL of a new bucket, for a process that has the `environment`."""
    import s3fs

    name = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
