"""What these tests share stands beside them, not in a package: put their folder on the path."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from showing import FakeLiveServer


@pytest.fixture
def live_server():
    servers = []

    def start(*responses, port=0):
        servers.append(FakeLiveServer(responses, port))
        return servers[-1]

    yield start
    for server in servers:
        server.go_on.set()
        server.shutdown()
        server.server_close()
