"""Tables with skipped calls: diffusers' own loop with the outputs of skipped calls extrapolated, sample by sample."""

import copy

import numpy as np
import pytest
import torch

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.sampling.compile import compile_sampler, is_compiled
from noria.sampling.probe import SchedulerSetup, _make_scheduler, _silence_diffusers, pipeline_options
from noria.sampling.skipped_calls import evenly_spread, extrapolation_weight
from noria.sampling.tables import WINDOW, output_column, sample_column
from sampling.toy_model import CONFIGS, SHAPE_CHW, STABLE_DIFFUSION, toy_model
from sampling.toy_model import IMAGE as IMAGE_32

IMAGE = IMAGE_32.double()

SKIPPING = [choice for choice in scheduler_names.SCHEDULERS if not choice.needs_all_calls]


def skipping_loop(choice, num_steps, num_calls, first_step=None):
    """The last sample of a pipeline's loop in float64 that asks the model at `num_calls` of its steps only."""
    with _silence_diffusers():
        scheduler = copy.deepcopy(_make_scheduler(SchedulerSetup.of(choice, CONFIGS[choice.family])))
        scheduler.set_timesteps(num_steps)
        timesteps = scheduler.timesteps[first_step or 0 :]
        noise = start_noise()[None]
        sample = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        if first_step is not None:
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(first_step)
            noised = getattr(scheduler, "add_noise", None)
            sample = (
                noised(IMAGE[None], noise, timesteps[:1])
                if noised
                else scheduler.scale_noise(IMAGE[None], timesteps[:1], noise)
            )
        made = evenly_spread(len(timesteps), num_calls)
        slope = 1.0 if num_calls >= 10 else 0.8
        options = pipeline_options(scheduler, torch.Generator())
        outputs: dict[int, torch.Tensor] = {}
        for call, timestep in enumerate(timesteps):
            scale = getattr(scheduler, "scale_model_input", None)
            inputs = scale(sample, timestep) if scale else sample
            if call in made:
                output = outputs[call] = toy_model(inputs, timestep.double()[None])
            elif len(outputs) == 1:
                output = outputs[0]
            else:
                before, last = sorted(outputs)[-2:]
                output = outputs[last] + slope * (call - last) / (last - before) * (outputs[last] - outputs[before])
            sample = scheduler.step(output, timestep, sample, return_dict=False, **options)[0]
    return sample[0]


def relative_error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def start_noise():
    return torch.randn(SHAPE_CHW, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def table_loop(table):
    """The last sample of a table in float64."""
    start = start_noise() * table.init_noise_sigma
    if table.image_weights is not None:
        of_image, of_noise = table.image_weights[0].tolist()
        start = of_image * IMAGE + of_noise * start_noise()
    samples, outputs = [start], []
    for call in range(table.num_calls):
        inputs = samples[-1] * float(table.input_scale[call])
        timestep = torch.tensor([float(table.timesteps[call])], dtype=torch.float64)
        outputs.append(toy_model(inputs[None], timestep)[0])
        row, after = table.coefficients[call].tolist(), torch.zeros_like(start)
        for q in range(max(0, call - WINDOW + 1), call + 1):
            after = after + row[sample_column(q)] * samples[q] + row[output_column(q)] * outputs[q]
        samples.append(after)
    return samples[-1]


@pytest.mark.parametrize(("num_steps", "num_calls"), [(12, 4), (20, 10), (28, 25)])
@pytest.mark.parametrize("choice", SKIPPING, ids=lambda choice: choice.name)
def test_a_table_is_the_loop_of_diffusers_with_extrapolated_outputs(choice, num_steps, num_calls):
    table = compile_sampler(choice, CONFIGS[choice.family], num_steps, num_calls=num_calls)
    assert table.num_calls == num_calls
    ours, theirs = table_loop(table), skipping_loop(choice, num_steps, num_calls)
    # float32 coefficients; both loops are in float64
    assert relative_error(ours, theirs) <= 1e-6
    every_call = table_loop(compile_sampler(choice, CONFIGS[choice.family], num_steps))
    assert relative_error(ours, every_call) > 1e-5


@pytest.mark.parametrize("name", ["ddim", "dpm++2m", "unipc3", "flow-euler"])
def test_a_table_that_begins_with_an_image_skips_of_the_calls_that_are_left(name):
    choice = scheduler_names.find(name)
    table = compile_sampler(choice, CONFIGS[choice.family], 20, first_step=4, num_calls=8)
    assert table.image_weights.shape == (9, 2)
    ours, theirs = table_loop(table), skipping_loop(choice, 20, 8, first_step=4)
    assert relative_error(ours, theirs) <= 1e-6


def test_calls_are_evenly_spread_with_the_first_and_the_last():
    for num_calls in range(2, 60):
        for num_made in range(2, num_calls + 1):
            made = evenly_spread(num_calls, num_made)
            assert (made[0], made[-1], len(set(made))) == (0, num_calls - 1, num_made)
            gaps = np.diff(made)
            assert gaps.max() - gaps.min() <= 1
            skipped = [call for call in range(made[1], num_calls) if call not in made]
            weights = [extrapolation_weight(call, made, sum(each < call for each in made)) for call in skipped]
            assert all(0 < weight <= 1 for weight in weights)


@pytest.mark.parametrize("choice", scheduler_names.SCHEDULERS, ids=lambda choice: choice.name)
def test_calls_of_all_schedulers_can_be_skipped_but_those_with_a_reason(choice):
    config = CONFIGS[choice.family]
    whole = compile_sampler(choice, config, 12)
    assert bool(choice.needs_all_calls) == (whole.noise.any() or whole.num_calls > 12 or whole.window > 3) or (
        choice.name == "unipc3"  # the fourth sample of its window is of its corrector
    )


def test_a_scheduler_whose_noise_is_a_setting_of_the_model_is_rejected():
    config = CONFIGS["flow"] | {"stochastic_sampling": True}
    with pytest.raises(InvalidField, match="'flow-euler' draws noise at its calls for this model") as caught:
        compile_sampler("flow-euler", config, 20, num_calls=10)
    assert caught.value.field == "calls"


def test_tables_are_cached_by_their_calls():
    table = compile_sampler("ddim", STABLE_DIFFUSION, 21, num_calls=9)
    assert compile_sampler("ddim", STABLE_DIFFUSION, 21, num_calls=9) is table
    assert not is_compiled("ddim", STABLE_DIFFUSION, 21, num_calls=8)
