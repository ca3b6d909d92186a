"""The real diffusers schedulers in their own loop, and Noria's tables, noise and step: equal, sample by sample.

Both start from one seed and ask one toy model, which is not linear, so that an error in a sample comes back in all that
follow.
"""

import copy
import functools
import inspect
import json
import math

import diffusers.schedulers
import numpy as np
import pytest
import torch

from noria.images import scheduler_names
from noria.images.scheduler_names import SchedulerChoice
from noria.sampling import step
from noria.sampling.compile import compile_sampler
from noria.sampling.noise import NoiseStream
from noria.sampling.probe import _silence_diffusers, pipeline_options
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule
from noria.sampling.tables import SamplerTable, fold, ring_window
from sampling.toy_model import CONFIGS, FLOW, IMAGE, SHAPE_CHW, STABLE_DIFFUSION, toy_model

# Both sides round to float32 (6e-8 of the largest term of a sum) at every call, in different orders; the worst seen is
# 1e-6 of the largest sample so far, but 9e-6 for kdpm2-a in 2 steps: there diffusers' own (x - (x - σm)) / σ cancels,
# and in float64 it comes 27 times nearer to ours than its float32. An error in a table is 1e-3 and more.
TOLERANCE = 2e-5
SEED = 7
REPAINTED = torch.arange(SHAPE_CHW[-1]) > 2  # columns of pixels


def diffusers_samples(
    choice: SchedulerChoice, config: dict, num_steps: int, schedule: dict | None = None, first_step: int | None = None
) -> list[torch.Tensor]:
    """x_0, x_1, … [C, H, W] of a pipeline's loop in float32.

    With `first_step`, that of a pipeline that begins there with `IMAGE` and keeps it outside of `REPAINTED`.
    """
    with _silence_diffusers():  # diffusers warns of its own deprecations
        scheduler = _diffusers_scheduler(choice, config)
        scheduler.set_timesteps(**(schedule or {"num_inference_steps": num_steps}))
        timesteps, generator = scheduler.timesteps, torch.Generator().manual_seed(SEED)
        options = pipeline_options(scheduler, generator)
        noise = torch.randn((1, *SHAPE_CHW), generator=generator)

        def noised(timestep):
            if hasattr(scheduler, "add_noise"):
                return scheduler.add_noise(IMAGE[None], noise, timestep[None])
            return scheduler.scale_noise(IMAGE[None], timestep[None], noise)

        if first_step is None:
            sample = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        else:
            timesteps = timesteps[first_step * scheduler.order :]
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(first_step * scheduler.order)
            sample = noised(timesteps[0])
        samples, scale = [sample[0].clone()], getattr(scheduler, "scale_model_input", None)
        for call, timestep in enumerate(timesteps):
            output = toy_model(scale(sample, timestep) if scale else sample, timestep.float()[None])
            sample = scheduler.step(output, timestep, sample, return_dict=False, **options)[0]
            if first_step is not None:
                is_last = call == len(timesteps) - 1
                sample = torch.where(REPAINTED, sample, IMAGE if is_last else noised(timesteps[call + 1]))
            samples.append(sample[0].clone())
    return samples


def _diffusers_scheduler(choice: SchedulerChoice, config: dict):
    """A copy: KDPM2 takes half a second to make."""
    return copy.deepcopy(_make_scheduler(choice.name, json.dumps(config)))


@functools.lru_cache
def _make_scheduler(name: str, config_json: str):
    choice, config = scheduler_names.find(name), json.loads(config_json)
    scheduler_class = getattr(diffusers.schedulers, choice.diffusers_class)
    known = inspect.signature(scheduler_class).parameters
    pipeline = {"steps_offset": 1, "clip_sample": False} if choice.family == "diffusion" else {}
    shift = {"flow_shift": config["shift"]} if "shift" in config else {}
    return scheduler_class.from_config(
        config, **{k: v for k, v in (pipeline | shift).items() if k in known}, **choice.overrides
    )


def table_samples(table: SamplerTable) -> list[torch.Tensor]:
    """x_0, x_1, … [C, H, W] of one image alone; of a table that begins with an image, that of `IMAGE`, in part kept."""
    stream = NoiseStream(SEED, SHAPE_CHW, torch.float32)
    window = ring_window(table.window)
    history, coefficients = step.empty_history(1, math.prod(SHAPE_CHW), window), fold(table.coefficients, window)
    start = initial = stream.initial()
    weights = table.image_weights
    if weights is None:
        start = initial * table.init_noise_sigma
    else:
        noised = [of_image * IMAGE + of_noise * initial for of_image, of_noise in weights.tolist()]
        start = noised[0]
    step.init_slot(history, 0, start)
    slots, samples = torch.zeros(1, dtype=torch.int64), [start]
    for call in range(table.num_calls):
        cursors = torch.tensor([call])
        inputs = step.model_inputs(history, slots, cursors, torch.tensor(table.input_scale[[call]]))
        outputs = toy_model(inputs.unflatten(1, SHAPE_CHW), torch.tensor(table.timesteps[[call]])).flatten(1)
        noise = stream.next().flatten()[None] if table.noise[call] else None
        kept = None
        if weights is not None:
            repainted = REPAINTED.expand(SHAPE_CHW).flatten()[None]
            kept = step.KeptLatents(torch.tensor([0]), repainted, noised[call + 1].flatten()[None])
        after = step.next_samples(history, slots, cursors, outputs, noise, torch.tensor(coefficients[[call]]), kept)
        step.write_samples(history, slots, cursors, after)
        samples.append(after[0].unflatten(0, SHAPE_CHW))
    return samples


def check(
    choice: SchedulerChoice,
    config: dict,
    num_steps: int,
    schedule: Schedule = DEFAULT_SCHEDULE,
    arguments: dict | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare a sampler of `schedule` with a scheduler whose `set_timesteps` gets `arguments`."""
    ours = table_samples(compile_sampler(choice, config, num_steps, schedule))
    theirs = diffusers_samples(choice, config, num_steps, arguments)
    compare(ours, theirs, f"{choice.name}, {num_steps} steps", tolerance)


def compare(ours: list[torch.Tensor], theirs: list[torch.Tensor], title: str, tolerance: float = TOLERANCE) -> None:
    assert len(ours) == len(theirs), f"{title}: diffusers makes {len(theirs) - 1} calls"
    largest = 1.0
    for call, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        largest = max(largest, float(real.abs().max()))
        error = float((mine - real).abs().max()) / largest
        assert error <= tolerance, f"{title}, sample {call} of {len(ours) - 1}: off by {error:.1e}"


@pytest.mark.parametrize("num_steps", [1, 2, 20])
@pytest.mark.parametrize("choice", scheduler_names.SCHEDULERS, ids=lambda choice: choice.name)
def test_every_scheduler_follows_diffusers(choice, num_steps):
    check(choice, CONFIGS[choice.family], num_steps)


WITH_IMAGE = [choice for choice in scheduler_names.SCHEDULERS if choice.takes_start_image]


def check_with_image(choice: SchedulerChoice, config: dict, num_steps: int, first_step: int) -> None:
    """Compare a sampler that begins with an image and keeps a part of it."""
    ours = table_samples(compile_sampler(choice, config, num_steps, first_step=first_step))
    theirs = diffusers_samples(choice, config, num_steps, first_step=first_step)
    compare(ours, theirs, f"{choice.name} from {first_step}")
    assert torch.equal(ours[-1].where(~REPAINTED, IMAGE), IMAGE)
    assert float((ours[-1] - IMAGE).abs().max()) > 20 * TOLERANCE


@pytest.mark.parametrize(("num_steps", "first_step"), [(5, 0), (5, 4), (20, 14)])
@pytest.mark.parametrize("choice", WITH_IMAGE, ids=lambda choice: choice.name)
def test_every_scheduler_that_begins_with_an_image_follows_diffusers(choice, num_steps, first_step):
    check_with_image(choice, CONFIGS[choice.family], num_steps, first_step)


@pytest.mark.parametrize(
    "config",
    [
        {"timestep_spacing": "trailing"},  # Turbo
        {"timestep_spacing": "linspace"},
        {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ddim", "euler", "euler-a", "heun", "dpm++2m-karras", "unipc"])
def test_settings_of_models_with_an_image_follow_diffusers(name, config):
    for first_step in (0, 3):
        check_with_image(scheduler_names.find(name), STABLE_DIFFUSION | config, 6, first_step)


def test_those_schedulers_are_allowed_that_can_add_noise_to_an_image():
    for choice in scheduler_names.SCHEDULERS:
        scheduler_class = getattr(diffusers.schedulers, choice.diffusers_class)
        assert choice.takes_start_image == any(hasattr(scheduler_class, name) for name in ("add_noise", "scale_noise"))


@pytest.mark.parametrize(
    "choice", [c for c in scheduler_names.SCHEDULERS if c.family != "flow"], ids=lambda choice: choice.name
)
def test_v_prediction_follows_diffusers(choice):
    check(choice, CONFIGS[choice.family] | {"prediction_type": "v_prediction"}, 12)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("name", ["ddim", "pndm", "euler", "euler-a", "heun", "dpm++2m-karras", "unipc", "deis"])
def test_timestep_spacings_follow_diffusers(name, spacing):
    check(scheduler_names.find(name), STABLE_DIFFUSION | {"timestep_spacing": spacing}, 7)


@pytest.mark.parametrize("name", ["ddim", "euler", "dpm++2m"])
def test_zero_terminal_snr_follows_diffusers(name):
    config = STABLE_DIFFUSION | {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    check(scheduler_names.find(name), config | {"rescale_betas_zero_snr": True}, 10)


@pytest.mark.parametrize("name", ["ddim", "ddpm", "euler", "heun", "dpm++2m", "unipc", "lcm"])
def test_sample_prediction_follows_diffusers(name):
    check(scheduler_names.find(name), STABLE_DIFFUSION | {"prediction_type": "sample"}, 10)


SHIFTED = FLOW | {"use_dynamic_shifting": True}
# A few float32 operations a call, without the cancellation that `TOLERANCE` allows for.
FLOW_TOLERANCE = 1e-6


@pytest.mark.parametrize("name", ["flow-euler", "flow-euler-a", "flow-lcm", "flow-unipc", "flow-dpm++2m"])
def test_a_shift_with_the_size_follows_diffusers(name):
    check(scheduler_names.find(name), SHIFTED, 8, Schedule(mu=0.9), {"num_inference_steps": 8, "mu": 0.9})


@pytest.mark.parametrize("config", [{}, {"shift_terminal": 0.02}, {"stochastic_sampling": True}], ids=str)
@pytest.mark.parametrize("num_steps", [2, 4, 12, 50])
def test_sigmas_and_shift_of_the_pipelines_follow_diffusers_exactly(config, num_steps):
    """The pipelines of FLUX and Qwen-Image set them so; without sigmas, other times result."""
    sigmas, mu = np.linspace(1.0, 1 / num_steps, num_steps), 0.81
    schedule = Schedule(sigmas=tuple(sigmas.tolist()), mu=mu)
    arguments = {"sigmas": sigmas, "mu": mu}
    check(scheduler_names.find("flow-euler"), SHIFTED | config, num_steps, schedule, arguments, FLOW_TOLERANCE)


def test_the_sigmas_of_the_pipelines_are_not_those_of_the_scheduler():
    sigmas = Schedule(sigmas=tuple(np.linspace(1.0, 1 / 12, 12).tolist()), mu=0.81)
    last, without = (
        compile_sampler("flow-euler", SHIFTED, 12, each).timesteps[-1] for each in (sigmas, Schedule(mu=0.81))
    )
    assert last > 100 > 10 > without


@pytest.mark.parametrize("name", ["flow-unipc", "flow-dpm++2m"])
def test_a_scheduler_with_sigmas_of_its_own_gets_the_shift_alone_as_from_the_pipelines(name):
    schedule = Schedule(sigmas=(1.0, 0.75, 0.5, 0.25), mu=0.9)
    check(scheduler_names.find(name), SHIFTED, 4, schedule, {"num_inference_steps": 4, "mu": 0.9})


@pytest.mark.parametrize("name", ["flow-lcm", "flow-euler-a"])
def test_sigmas_alone_follow_diffusers(name):
    sigmas = (1.0, 0.7, 0.4)
    check(scheduler_names.find(name), FLOW, 3, Schedule(sigmas=sigmas), {"sigmas": list(sigmas)})


@pytest.mark.parametrize("name", ["dpm++2m", "euler", "lcm"])
def test_timesteps_follow_diffusers(name):
    timesteps = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)  # "align your steps" of SD 1.5
    check(
        scheduler_names.find(name), STABLE_DIFFUSION, 10, Schedule(timesteps=timesteps), {"timesteps": list(timesteps)}
    )


def test_sigmas_with_timesteps_follow_diffusers():
    sigmas, timesteps = (1.0, 0.6, 0.2), (900.0, 500.0, 300.0)  # as the pipeline of CogView4 gives both
    schedule = Schedule(sigmas, timesteps, 0.7)
    arguments = {"sigmas": list(sigmas), "timesteps": list(timesteps), "mu": 0.7}
    check(scheduler_names.find("flow-euler"), SHIFTED, 3, schedule, arguments, FLOW_TOLERANCE)


def test_the_tolerance_tells_neighbouring_schedulers_apart():
    """At 100 steps, where all of them are closest; else the tests above could not fail."""
    ddim, second_order = (
        table_samples(compile_sampler(name, STABLE_DIFFUSION, 100))[-1] for name in ("ddim", "dpm++2s")
    )
    assert float((ddim - second_order).abs().max()) > 20 * TOLERANCE
