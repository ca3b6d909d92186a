"""One seed at load 1 and at load 32: over HTTP, from the real server, alone and then among 32 requests that share every step."""

import pytest

from noria.config import Config
from noria.models.catalog import open_model
from noria_bench.measurement.batch_invariance import IN_FLIGHT, max_channel_differences
from noria_bench.targets.catalog import TARGETS
from noria_bench.targets.server import running_server, running_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        pytest.param([], 1, id="as it is"),  # kernels round differently with the batch's size
        pytest.param(["--buckets", str(2 * IN_FLIGHT)], 0, id="one bucket"),
    ],
)
def test_a_seed_draws_the_same_image_alone_and_among_32(flags, tolerance):
    with running_server(["bundled", "--slots", str(IN_FLIGHT), *flags]) as server:
        found = max_channel_differences(f"http://127.0.0.1:{server.port}/t2i", open_model("bundled"))
    assert max(found) <= tolerance, found


def test_the_seed_s_server_starts_and_draws_the_same_images_too():
    with running_target(TARGETS["seed-batched"], open_model("bundled"), Config()) as server:
        found = max_channel_differences(f"http://127.0.0.1:{server.port}/t2i/batched", open_model("bundled"))
    assert max(found) <= 1, found
