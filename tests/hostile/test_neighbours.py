"""Quiet clients of a real server while each attack runs: `noria bench neighbours` has the same in a table."""

import pytest

from noria_bench.soak.neighbours import (
    ALLOWED_GROWTH,
    GRPC_ATTACKS,
    NEIGHBOUR_ATTACKS,
    QUIET_REQUESTS,
    measure_attack,
    serving,
)


@pytest.fixture(scope="module")
def ports():
    """The ports of HTTP and of gRPC of a server."""
    with serving() as found:
        yield found


@pytest.mark.chaos  # ten windows of a second or more for each attack and path
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", QUIET_REQUESTS)
@pytest.mark.parametrize("name", [*NEIGHBOUR_ATTACKS, *GRPC_ATTACKS])
def test_a_quiet_client_is_served_during(ports, name, path):
    growths = measure_attack(ports, name, path)["growths"]
    assert growths[-1] <= ALLOWED_GROWTH, growths
