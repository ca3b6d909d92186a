"""A server with fake children, for tests of the supervisor."""

from supervisor.faked_server import start  # noqa: F401 - a fixture
