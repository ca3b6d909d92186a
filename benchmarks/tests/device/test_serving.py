"""The same users served by microbatching and by the engine loop, and the summary of their answers."""

import itertools
import time

import msgspec
import numpy as np
import pytest
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto
from noria.engine.loop import ResultReady, StepLoop
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from noria_bench.device.architectures import build_denoiser
from noria_bench.device.random_model import RANDOM_SPEC, RandomModel
from noria_bench.device.serving import (
    CompletedRequest,
    ServingLog,
    generate,
    run_engine_loop,
    run_microbatcher,
    set_up,
    summarise_serving,
)
from noria_bench.load.workload import MIXES, RequestTemplate

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside diffusers

SPEC = msgspec.structs.replace(
    RANDOM_SPEC, default_width_px=128, default_height_px=128, min_side_px=64, default_steps=4
)


@pytest.fixture(scope="module")
def serving_setup(tiny):
    from diffusers import AutoencoderKL

    kinds = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    vae = AutoencoderKL(
        block_out_channels=(16,) * 4,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=kinds[0],
        up_block_types=kinds[1],
    ).eval()
    config = resolve_auto(EngineConfig(dtype="float32"), SPEC, "cpu", Machine(num_cores=2, has_cuda=False))
    config = msgspec.structs.replace(config, slots=16)
    model = RandomModel(config, build_denoiser(tiny, "cpu", torch.float32), vae)
    return set_up(DiffusionExecutor(model, config), SPEC, config)


def test_rates_count_whole_rounds_from_the_first_answer_after_the_warm_up():
    early = [CompletedRequest(0.0, 1.0, 1, 40)]
    counted = [CompletedRequest(k, k + 2.0, 2, 80) for k in range(9)]  # answered from 2 to 10
    more = [CompletedRequest(9.0, 12.0, 4, 160)]
    found = summarise_serving("noria", "mixed", "m", ServingLog(early + counted + more, [2, 4]), 1.5, 20.0)
    assert (found.num_requests, found.images_per_s, found.rows_per_s) == (10, 16 / 8, 640 / 8)
    assert (found.p50_s, found.mean_batch) == (2.0, 3.0)
    assert found.p99_s == pytest.approx(np.percentile([2.0] * 9 + [3.0], 99))


@pytest.mark.parametrize("apart_s", [0.0, 0.1])
def test_the_rate_of_users_in_step_does_not_depend_on_the_spread_of_bursts(apart_s):
    answers = [
        CompletedRequest(10.0 * burst, 10.0 * (burst + 1) + k * apart_s, 1, 40) for burst in range(3) for k in range(8)
    ]
    assert summarise_serving(
        "wheel", "uniform", "m", ServingLog(answers, [8]), 0.0, 40.0
    ).images_per_s == pytest.approx(8 / 10)


def test_less_than_a_round_or_no_answer_has_no_rate():
    log = ServingLog([CompletedRequest(0.0, 1.0, 1, 40)] * 8, [8])
    found = summarise_serving("reference", "uniform", "m", log, 0.0, 10.0)
    assert (found.num_requests, found.images_per_s, found.p50_s) == (8, None, 1.0)
    found = summarise_serving("reference", "uniform", "m", ServingLog(), 1.0, 10.0)
    assert (found.images_per_s, found.p50_s, found.mean_batch) == (None, None, None)


def log_with_answers(serve):
    """The log of the shortest time in which a possibly busy machine answers something; one second on an idle one."""
    for seconds in (1.0, 10.0, 60.0):
        log = serve(time.monotonic() + seconds)
        if log.completed:
            return log
    raise AssertionError(f"no answer in {seconds} s")


def test_microbatching_runs_uniform_requests_eight_at_a_time_and_mixed_ones_in_groups_of_equal_settings(serving_setup):
    templates = MIXES["uniform"](SPEC).templates(1)
    log = log_with_answers(lambda end_s: run_microbatcher(serving_setup.executor.model, SPEC, templates, end_s))
    assert len(log.completed) >= 8 and len(log.completed) % 8 == 0
    assert set(log.batch_sizes) == {8} and len(log.batch_sizes) == len(log.completed) // 8 * SPEC.default_steps
    templates = MIXES["mixed"](SPEC).templates(1)
    log = log_with_answers(lambda end_s: run_microbatcher(serving_setup.executor.model, SPEC, templates, end_s))
    assert sum(log.batch_sizes) / len(log.batch_sizes) < 8


@pytest.mark.parametrize("traffic", ["uniform", "mixed"])
def test_the_engine_loop_answers_its_users_and_releases_their_requests(serving_setup, traffic):
    templates = MIXES[traffic](SPEC).templates(1)
    for _ in range(2):  # the executor can be used again
        log = log_with_answers(lambda end_s: run_engine_loop(serving_setup, templates, end_s))
        assert max(log.batch_sizes) <= 16
        assert all(answer.done_s > answer.sent_s for answer in log.completed)
        assert not serving_setup.executor._requests


@pytest.mark.parametrize("scheduler", ["dpm++2m", "euler-a", "ddim"])
def test_both_give_the_same_images(serving_setup, scheduler):
    executor, config = serving_setup.executor, serving_setup.config
    templates = [RequestTemplate(f"prompt {k}", k, 64, 64, 3, 5.0, scheduler, 2) for k in range(2)]
    expected = generate(executor.model, templates).int()
    images = {}

    def on_event(event):
        if isinstance(event, ResultReady):
            images[event.prepared.request.request_id, event.index] = event.result.pixels.pixels_HWC.int()

    engine_loop = StepLoop(StepScheduler(config.slots), executor, on_event, time.monotonic)
    for k, template in enumerate(templates):
        request = make_image_request(
            str(k), SPEC.name, prompt=template.prompt, seed=k, width=64, height=64, guidance_scale=5.0, n=2,
            scheduler=scheduler,
        )  # fmt: skip
        engine_loop.submit(executor.prepare(request))
    while engine_loop.run_iteration() is not None:
        pass
    keys = itertools.product("01", range(2))
    # float32 sums in different orders: the last of 255 steps may differ.
    assert all((expected[row] - images[key]).abs().max() <= 2 for row, key in enumerate(keys))
