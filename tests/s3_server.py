"""A real S3-compatible server (moto) on loopback, and the package s3fs, by which fsspec reads it."""

import contextlib
import importlib.metadata
import pathlib
import socket
import subprocess
from typing import NamedTuple

import httpx

from python_environment import environment_python
from waiting import wait_until

PACKAGES = ("moto[server]==5.2.1", f"s3fs=={importlib.metadata.version('fsspec')}")


class S3Server(NamedTuple):
    """A server that runs."""

    url: str
    packages: pathlib.Path  # a folder with s3fs, to be put behind Noria's packages

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which s3fs finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextlib.contextmanager
def running_s3(bucket):
    """A server with an empty bucket. It takes seconds to start; pip takes minutes, the first time."""
    python = environment_python("s3", *PACKAGES)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with subprocess.Popen([python, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            server = S3Server(f"http://127.0.0.1:{port}", packages)
            wait_until(lambda: httpx.get(f"{server.url}/moto-api").is_success, 120, (httpx.TransportError,))
            assert httpx.put(f"{server.url}/{bucket}").is_success
            yield server
        finally:
            process.kill()
