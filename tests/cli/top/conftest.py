"""A fake server of live views. Puts this folder on the path, for the modules that these tests share."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from fake_live_server import FakeLiveServer


@pytest.fixture
def live_server():
    servers = []

    def start(*responses, port=0):
        servers.append(FakeLiveServer(responses, port))
        return servers[-1]

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()
