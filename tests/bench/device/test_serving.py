"""The same users at the seed's loop and at the wheel, and what the answers amount to."""

import itertools
import time

import msgspec
import numpy as np
import pytest
import torch

from noria.bench.device.architectures import build
from noria.bench.device.random_model import RANDOM_SPEC, RandomModel
from noria.bench.device.serving import Answer, Log, draw, figures, microbatched, on_the_wheel, set_up
from noria.bench.workload import MIXES, Ask
from noria.config import EngineConfig
from noria.engine.diffusion import DiffusionExecutor
from noria.engine.loop import ImageReady, Wheel
from noria.engine.resources import Machine, resolve
from noria.request import ImageRequest
from noria.scheduling.steps import StepScheduler

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside diffusers

SPEC = msgspec.structs.replace(
    RANDOM_SPEC, default_width_px=128, default_height_px=128, min_side_px=64, default_steps=4
)


@pytest.fixture(scope="module")
def served(tiny):
    from diffusers import AutoencoderKL

    kinds = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    vae = AutoencoderKL(
        block_out_channels=(16,) * 4,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=kinds[0],
        up_block_types=kinds[1],
    ).eval()
    config = resolve(EngineConfig(dtype="float32"), SPEC, "cpu", Machine(num_cores=2, has_cuda=False))
    config = msgspec.structs.replace(config, slots=16)
    model = RandomModel(torch.device("cpu"), torch.float32, config, build(tiny, "cpu", torch.float32), vae)
    return set_up(DiffusionExecutor(model, config), SPEC, config)


def test_figures_count_whole_rounds_from_the_first_answer_after_the_warm_up():
    early = [Answer(0.0, 1.0, 1, 40)]
    counted = [Answer(k, k + 2.0, 2, 80) for k in range(9)]  # answered from 2 to 10
    more = [Answer(9.0, 12.0, 4, 160)]
    found = figures("wheel", "mixed", "m", Log(early + counted + more, [2, 4]), 1.5, 20.0)
    assert (found.requests, found.images_per_s, found.rows_per_s) == (10, 16 / 8, 640 / 8)
    assert (found.p50_s, found.mean_batch) == (2.0, 3.0)
    assert found.p99_s == pytest.approx(np.percentile([2.0] * 9 + [3.0], 99))


@pytest.mark.parametrize("apart_s", [0.0, 0.1])
def test_users_in_step_have_their_rate_however_their_burst_is_spread(apart_s):
    answers = [Answer(10.0 * turn, 10.0 * (turn + 1) + k * apart_s, 1, 40) for turn in range(3) for k in range(8)]
    assert figures("wheel", "alike", "m", Log(answers, [8]), 0.0, 40.0).images_per_s == pytest.approx(8 / 10)


def test_less_than_a_round_is_no_rate():
    found = figures("seed", "alike", "m", Log([Answer(0.0, 1.0, 1, 40)] * 8, [8]), 0.0, 10.0)
    assert (found.requests, found.images_per_s, found.p50_s) == (8, None, 1.0)


def test_a_device_that_answers_nothing_has_no_figures():
    found = figures("seed", "alike", "m", Log(), 1.0, 10.0)
    assert (found.images_per_s, found.p50_s, found.mean_batch) == (None, None, None)


def answered(serve):
    """The log of the shortest time in which a machine that may be busy answers something; one second on a quiet one."""
    for seconds in (1.0, 10.0, 60.0):
        log = serve(time.monotonic() + seconds)
        if log.answers:
            return log
    raise AssertionError(f"no answer in {seconds} s")


def test_alike_requests_are_drawn_eight_at_a_time_by_the_seeds_loop(served):
    asks = MIXES["alike"](SPEC).asks(1)
    log = answered(lambda end_s: microbatched(served.executor.model, SPEC, asks, end_s))
    assert len(log.answers) >= 8 and len(log.answers) % 8 == 0
    assert set(log.batches) == {8} and len(log.batches) == len(log.answers) // 8 * SPEC.default_steps


@pytest.mark.parametrize("traffic", ["alike", "mixed"])
def test_the_wheel_answers_its_users_and_lets_them_go(served, traffic):
    asks = MIXES[traffic](SPEC).asks(1)
    for _ in range(2):  # the executor can be used again
        log = answered(lambda end_s: on_the_wheel(served, asks, end_s))
        assert max(log.batches) <= 16
        assert all(answer.done_s > answer.sent_s for answer in log.answers)
        assert not served.executor._requests


def test_the_seeds_loop_answers_mixed_requests_in_groups_of_equal_settings(served):
    asks = MIXES["mixed"](SPEC).asks(1)
    log = answered(lambda end_s: microbatched(served.executor.model, SPEC, asks, end_s))
    assert sum(log.batches) / len(log.batches) < 8


@pytest.mark.parametrize("scheduler", ["dpm++2m", "euler-a", "ddim"])
def test_both_draw_the_same_images(served, scheduler):
    executor, config = served.executor, served.config
    asks = [Ask(f"prompt {k}", k, 64, 64, 3, 5.0, scheduler, 2) for k in range(2)]
    drawn = draw(executor.model, asks).int()
    images = {}

    def deliver(happening):
        if isinstance(happening, ImageReady):
            images[happening.prepared.request.request_id, happening.index] = happening.pixels.pixels_HWC.int()

    wheel = Wheel(StepScheduler(config.slots), executor, deliver, time.monotonic)
    for k, ask in enumerate(asks):
        request = ImageRequest(str(k), ask.prompt, "", k, 64, 64, 3, 5.0, 2, scheduler, 600.0, SPEC.name)
        wheel.submit(executor.prepare(request))
    while wheel.turn() is not None:
        pass
    keys = itertools.product("01", range(2))
    # Different orders of the same float32 sums: the last of 255 steps may fall either way.
    assert all((drawn[row] - images[key]).abs().max() <= 2 for row, key in enumerate(keys))
