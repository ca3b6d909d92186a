import numpy as np
import pytest

from noria.errors import InvalidField
from noria.images.scheduler_names import SchedulerChoice, find
from noria.sampling.compile import compile_sampler
from noria.sampling.probe import MAX_STEPS, SchedulerSetup, Trace, probe
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule
from noria.sampling.tables import concatenate_tables

MODEL = {"_class_name": "PNDMScheduler"}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def trace(choice: SchedulerChoice | str, config=MODEL, num_steps=10, schedule=DEFAULT_SCHEDULE) -> Trace:
    choice = find(choice) if isinstance(choice, str) else choice
    return probe(SchedulerSetup.of(choice, config), num_steps, schedule)


def made_up(diffusers_class: str, **overrides) -> SchedulerChoice:
    return SchedulerChoice("made-up", diffusers_class, overrides, (), "for a test", "diffusion")


def test_parallel_classes_sample_as_their_aliases():
    for name, other in (("ddim", "DDIMParallelScheduler"), ("ddpm", "DDPMParallelScheduler")):
        assert np.array_equal(trace(name).samples_PK, trace(made_up(other)).samples_PK)


def test_clipping_is_off_as_in_the_pipeline():
    outdated, expected = (trace("ddim", MODEL | {"clip_sample": clips}) for clips in (True, False))
    assert np.array_equal(outdated.samples_PK, expected.samples_PK)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dpm++2m-sde", "float32"), ("dpm++2m", "model"), ("euler-a", "model"), ("ddpm", "model"), ("tcd", "model")],
)
def test_the_dtype_of_the_noise_is_recorded(name, dtype):
    assert trace(name).noise_dtype == dtype


def rejection(choice, config=MODEL, **options) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        trace(choice, config, **options)
    return caught.value


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (made_up("DDIMScheduler", clip_sample=True), "not linear"),
        (made_up("DDIMScheduler", thresholding=True), "not linear"),
        (made_up("CMStochasticIterativeScheduler"), "not linear"),
        (made_up("EntropyBoundScheduler"), "without diffusers' randn_tensor"),
        (made_up("VQDiffusionScheduler"), "num_vec_classes"),
        (made_up("DPMSolverMultistepScheduler", algorithm_type="no-such"), "no-such"),
    ],
)
def test_a_scheduler_that_cannot_be_probed_is_rejected_by_name(choice, reason):
    error = rejection(choice)
    assert error.field == "scheduler"
    assert "'made-up'" in error.message
    assert reason in error.message


def test_a_model_with_thresholding_is_rejected():
    error = rejection("ddim", MODEL | {"thresholding": True})
    assert error.field == "scheduler"
    assert "thresholding" in error.message
    trace("euler", MODEL | {"thresholding": True})  # it has no such setting


def test_a_scheduler_of_another_family_is_rejected():
    error = rejection("flow-euler")
    assert error.field == "scheduler"
    assert "samples flow models" in error.message
    assert "ddim" in error.message
    assert "flow-heun" in rejection("ddim", FLOW).message


@pytest.mark.parametrize(
    ("choice", "config", "schedule"),
    [
        ("flow-heun", FLOW, Schedule(mu=0.8)),
        ("flow-heun", FLOW, Schedule(sigmas=(1.0, 0.5))),
        ("dpm++2s", MODEL, Schedule(sigmas=(1.0, 0.5))),
        ("pndm", MODEL, Schedule(timesteps=(999.0, 500.0))),
    ],
)
def test_a_scheduler_that_cannot_take_the_models_schedule_is_rejected(choice, config, schedule):
    error = rejection(choice, config, schedule=schedule)
    assert error.field == "scheduler"
    assert "cannot be set by" in error.message


def test_a_model_that_shifts_its_schedule_needs_mu():
    assert "mu" in rejection("flow-euler", FLOW | {"use_dynamic_shifting": True}).message


@pytest.mark.parametrize(
    ("name", "num_steps", "words"),
    [
        ("lcm", 60, "60"),
        ("tcd", 60, "60"),
        ("ddim", 0, "from 1 to"),
        ("ddim", -3, "got -3"),
        ("euler", MAX_STEPS + 1, "1001"),
    ],
)
def test_too_many_or_too_few_steps_are_rejected(name, num_steps, words):
    error = rejection(name, num_steps=num_steps)
    assert error.field == "inference_steps"
    assert words in error.message


def test_the_reason_of_diffusers_is_in_the_message():
    error = rejection("ddim", MODEL | {"num_train_timesteps": 8}, num_steps=10)
    assert "diffusers says ValueError: `num_inference_steps`: 10 cannot be larger" in error.message


def test_values_that_are_not_finite_are_rejected():
    error = rejection("ddim", MODEL | {"beta_end": float("nan")})
    assert error.field == "inference_steps"
    assert "not a number" in error.message


def test_a_probe_leaves_diffusers_unchanged():
    import diffusers.schedulers.scheduling_ddpm as module
    from diffusers.utils import logging
    from diffusers.utils.torch_utils import randn_tensor

    verbosity = logging.get_verbosity()
    trace("ddpm")
    rejection("flow-euler")
    assert module.randn_tensor is randn_tensor
    assert logging.get_verbosity() == verbosity


@pytest.mark.parametrize("name", ["ddim", "euler", "heun"])
@pytest.mark.parametrize("timestep", [250, 500])
def test_a_table_that_begins_below_a_timestep_is_the_end_of_the_whole_one(name, timestep):
    """It has all calls below it, and of a method with two calls a step also the first one of a step."""
    whole = compile_sampler(name, MODEL, 10)
    end = compile_sampler(name, MODEL, 10, schedule=Schedule(begins_below=timestep))
    num_calls = int((whole.timesteps < timestep).sum())
    num_calls += num_calls % 2 == 0 and name == "heun"
    assert end.num_calls == num_calls
    joined = concatenate_tables(whole, whole.num_calls - num_calls, end)
    assert (joined.scheduler, joined.num_steps, joined.window) == (name, 10, whole.window)
    assert joined.init_noise_sigma == whole.init_noise_sigma
    for field in ("timesteps", "input_scale", "coefficients", "noise"):
        np.testing.assert_allclose(getattr(joined, field), getattr(whole, field), atol=1e-6, err_msg=field)
