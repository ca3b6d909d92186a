"""Quiet clients of a real server while each attack runs: their p99, over their p99 alone.

Alone, a p99 below ten medians counts as ten medians (the floor in `growth_of_p99`): /healthz is answered in less than a
millisecond, and the p99 of a quiet machine is that of its scheduler, which varies as much between two runs.
"""

import pytest

from hostile_neighbours import ALLOWED_GROWTH, growth_of_p99
from noria.testing.server import reserve_port, running_server
from noria_bench.soak.attacks import ATTACKS, tarpit_webhooks
from noria_bench.soak.grpc_attacks import calls_without_message

ATTEMPTS = 3  # another program may take the machine for a moment
FLAGS = ("--additional-models", "minilm", "--webhook-allow-private", "--log-level", "error")
# By path: the least requests of a window, and their body.
QUIET_REQUESTS = {"/healthz": (400, None), "/v1/embeddings": (100, {"input": "a cat", "model": "minilm"})}
ALL_ATTACKS = {**ATTACKS, "tarpit webhooks": tarpit_webhooks, "calls without message": calls_without_message}


@pytest.fixture(scope="module")
def ports():
    """The ports of HTTP and of gRPC of a server."""
    with reserve_port() as grpc_port, running_server(["bundled", *FLAGS, "--grpc-port", str(grpc_port)]) as server:
        yield server.port, grpc_port


@pytest.mark.chaos  # ten windows of a second or more for each attack and path
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", QUIET_REQUESTS)
@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_a_quiet_client_is_served_during(ports, name, path):
    port, grpc_port = ports
    attack, (num_requests, body) = ALL_ATTACKS[name], QUIET_REQUESTS[path]
    attacked_port = grpc_port if attack is calls_without_message else port
    growths = []
    while len(growths) < ATTEMPTS and (not growths or growths[-1] > ALLOWED_GROWTH):
        growth = growth_of_p99(port, lambda stopped: attack(attacked_port, stopped), path, num_requests, body=body)
        growths.append(growth)
    print(f"| {name} | {path} | {growths[-1]:.2f} | {len(growths)} |")
    assert growths[-1] <= ALLOWED_GROWTH, growths
