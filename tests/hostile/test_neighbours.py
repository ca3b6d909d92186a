"""A quiet client of a real server while each attack runs: its p99, over its p99 alone.

Alone, a p99 below ten medians counts as ten medians (the floor in `growth_of_p99`): /healthz is answered in a
millisecond, and the p99 of a quiet machine is that of its scheduler, which varies as much between two runs.
"""

import functools

import pytest

from hostile_neighbours import ALLOWED_GROWTH, growth_of_p99
from noria.testing.server import reserve_port, running_server
from noria_bench.soak.attacks import ATTACKS, tarpit_webhooks
from noria_bench.soak.grpc_attacks import calls_without_message

ATTEMPTS = 3  # another program may take the machine for a moment
FLAGS = ("--additional-models", "minilm", "--webhook-allow-private", "--log-level", "error")
# By path: the requests of a window, so many that the p99 is not that of the moment in which an attack begins.
QUIET_REQUESTS = {"/healthz": (400, None), "/v1/embeddings": (100, {"input": "a cat", "model": "minilm"})}


@pytest.mark.chaos  # ten windows of hundreds of requests for each attack and path
@pytest.mark.timeout(3600)
def test_a_quiet_client_is_served_while_each_attack_runs():
    growths = {}
    print("| attack | path | ratio | attempts |\n|---|---|---:|---:|")
    with (
        reserve_port() as grpc_port,
        running_server(["bundled", *FLAGS, "--grpc-port", str(grpc_port)]) as server,
    ):
        attacks = {name: functools.partial(attack, server.port) for name, attack in ATTACKS.items()}
        attacks["tarpit webhooks"] = functools.partial(tarpit_webhooks, server.port)
        attacks["calls without message"] = functools.partial(calls_without_message, grpc_port)
        for name, attack in attacks.items():
            for path, (num_requests, body) in QUIET_REQUESTS.items():
                growths[name, path] = measured = []
                while len(measured) < ATTEMPTS and (not measured or measured[-1] > ALLOWED_GROWTH):
                    measured.append(growth_of_p99(server.port, attack, path, num_requests, body=body))
                print(f"| {name} | {path} | {min(measured):.2f} | {len(measured)} |", flush=True)
    assert {name: measured for name, measured in growths.items() if min(measured) > ALLOWED_GROWTH} == {}
