"""Images of one seed at load 1 and at load 32, over HTTP: alone and among 32 requests that share every step."""

import pytest

from noria.config import Config
from noria.models.catalog import open_model
from noria.testing.server import running_server
from noria_bench.measurement.batch_invariance import IN_FLIGHT, max_channel_differences
from noria_bench.targets.catalog import TARGETS
from noria_bench.targets.server import running_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # starts servers


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        # Kernels round differently with the batch size.
        pytest.param([], 1, id="default"),
        pytest.param(["--buckets", str(2 * IN_FLIGHT)], 0, id="single_bucket"),
    ],
)
def test_a_seed_gives_the_same_image_alone_and_among_32(flags, tolerance):
    with running_server(["bundled", "--slots", str(IN_FLIGHT), *flags]) as server:
        found = max_channel_differences(f"http://127.0.0.1:{server.port}/t2i", open_model("bundled"))
    assert max(found) <= tolerance, found


def test_the_reference_server_starts_and_gives_the_same_images_too():
    with running_target(TARGETS["reference-batched"], open_model("bundled"), Config()) as server:
        found = max_channel_differences(f"http://127.0.0.1:{server.port}/t2i/batched", open_model("bundled"))
    assert max(found) <= 1, found
