import subprocess
import sys
import threading
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.errors import InvalidField
from noria.images.scheduler_names import SchedulerChoice, find
from noria.sampling import compile as compiler
from noria.sampling.compile import MAX_STEPS, compile_sampler
from noria.sampling.tables import NOISE_COLUMN, WINDOW

STABLE_DIFFUSION = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def made_up(diffusers_class: str, **overrides) -> SchedulerChoice:
    return SchedulerChoice("made-up", diffusers_class, overrides, (), "for a test", "diffusion")


@pytest.mark.parametrize(
    ("name", "num_calls", "window"),
    [
        ("ddim", 20, 1),
        ("euler-a", 20, 1),
        ("dpm++2m", 20, 2),
        ("unipc", 20, 3),
        ("pndm", 21, 4),
        ("heun", 39, 2),
        ("kdpm2-a", 39, 2),
    ],
)
def test_tables_have_the_calls_and_the_window_of_the_method(name, num_calls, window):
    table = compile_sampler(name, STABLE_DIFFUSION, 20)
    assert (table.num_calls, table.window) == (num_calls, window)
    assert table.residual <= 1e-6


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["ddim", "ddpm", "pndm", "euler-a", "heun", "dpm++2m-sde", "dpm++2s-karras"]), st.integers(1, 40)
)
def test_any_number_of_steps_is_compiled(name, num_steps):
    table = compile_sampler(name, STABLE_DIFFUSION, num_steps)  # which checks its invariants
    assert table.num_steps == num_steps
    assert table.num_calls == {"heun": 2 * num_steps - 1, "pndm": num_steps + 1 if num_steps > 1 else 1}.get(
        name, num_steps
    )
    assert (np.diff(table.timesteps) <= 0).all() or name == "pndm"


def test_tables_are_cached():
    first = compile_sampler("ddim", STABLE_DIFFUSION, 11)
    assert compile_sampler("DDIMScheduler", dict(reversed(STABLE_DIFFUSION.items())), 11) is first
    assert compile_sampler(find("ddim"), MappingProxyType(STABLE_DIFFUSION), 12) is not first


def test_parallel_classes_compile_to_the_tables_of_their_aliases():
    for name, other in (("ddim", "DDIMParallelScheduler"), ("ddpm", "DDPMParallelScheduler")):
        table, twin = (compile_sampler(choice, STABLE_DIFFUSION, 9) for choice in (name, made_up(other)))
        assert np.array_equal(table.coefficients, twin.coefficients)


def test_settings_forced_by_the_pipeline_are_forced():
    outdated = STABLE_DIFFUSION | {"clip_sample": True, "steps_offset": 0}
    table, expected = (compile_sampler("ddim", config, 10) for config in (outdated, STABLE_DIFFUSION))
    assert np.array_equal(table.timesteps, expected.timesteps)
    assert np.array_equal(table.coefficients, expected.coefficients)


def test_noise_is_drawn_at_the_calls_where_diffusers_draws_it():
    assert not compile_sampler("ddim", STABLE_DIFFUSION, 6).noise.any()
    assert compile_sampler("lcm", STABLE_DIFFUSION, 6).noise.tolist() == [True] * 5 + [False]
    ancestral = compile_sampler("euler-a", STABLE_DIFFUSION, 6)
    assert ancestral.noise.all()
    assert ancestral.coefficients[-1, NOISE_COLUMN] == 0  # drawn and not used: it advances the generator


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dpm++2m-sde", "float32"), ("dpm++2m", "model"), ("euler-a", "model"), ("ddpm", "model"), ("tcd", "model")],
)
def test_the_dtype_of_the_noise_is_recorded(name, dtype):
    assert compile_sampler(name, STABLE_DIFFUSION, 4).noise_dtype == dtype


def refusal(choice, config=STABLE_DIFFUSION, num_steps=10, **options) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        compile_sampler(choice, config, num_steps, **options)
    return caught.value


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (made_up("PNDMScheduler", skip_prk_steps=False), f"further than {WINDOW} model calls"),
        (made_up("DDIMScheduler", clip_sample=True), "not linear"),
        (made_up("DDIMScheduler", thresholding=True), "not linear"),
        (made_up("CMStochasticIterativeScheduler"), "not linear"),
        (made_up("EntropyBoundScheduler"), "without diffusers' randn_tensor"),
        (made_up("VQDiffusionScheduler"), "num_vec_classes"),
        (made_up("DPMSolverMultistepScheduler", algorithm_type="no-such"), "no-such"),
    ],
)
def test_a_scheduler_that_a_table_cannot_represent_is_refused_by_name(choice, reason):
    error = refusal(choice)
    assert error.field == "scheduler"
    assert "'made-up'" in error.message
    assert reason in error.message


def test_a_model_with_thresholding_is_refused():
    error = refusal("ddim", STABLE_DIFFUSION | {"thresholding": True})
    assert error.field == "scheduler"
    assert "thresholding" in error.message
    compile_sampler("euler", STABLE_DIFFUSION | {"thresholding": True}, 10)  # it has no such setting


def test_a_scheduler_of_another_family_is_refused():
    error = refusal("flow-euler")
    assert error.field == "scheduler"
    assert "samples flow models" in error.message
    assert "ddim" in error.message
    assert "flow-heun" in refusal("ddim", FLOW).message


def test_a_scheduler_that_cannot_shift_its_schedule_is_refused():
    assert refusal("flow-heun", FLOW, mu=0.8).field == "scheduler"
    assert "mu" in refusal("flow-euler", FLOW | {"use_dynamic_shifting": True}).message


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
def test_too_many_or_too_few_steps_are_refused(name, num_steps, words):
    error = refusal(name, num_steps=num_steps)
    assert error.field == "inference_steps"
    assert words in error.message


def test_the_reason_of_diffusers_is_in_the_message():
    error = refusal("ddim", STABLE_DIFFUSION | {"num_train_timesteps": 8}, num_steps=10)
    assert "diffusers says ValueError: `num_inference_steps`: 10 cannot be larger" in error.message


def test_values_that_are_not_finite_are_refused():
    error = refusal("ddim", STABLE_DIFFUSION | {"beta_end": float("nan")})
    assert error.field == "inference_steps"
    assert "not a number" in error.message


def test_compiling_leaves_diffusers_unchanged():
    import diffusers.schedulers.scheduling_ddpm as module
    from diffusers.utils import logging
    from diffusers.utils.torch_utils import randn_tensor

    verbosity = logging.get_verbosity()
    compile_sampler("ddpm", STABLE_DIFFUSION, 13)
    refusal("flow-euler")
    assert module.randn_tensor is randn_tensor
    assert logging.get_verbosity() == verbosity


def test_threads_can_compile_at_once():
    compiler._compile_cached.cache_clear()
    single_threaded = compile_sampler("ddpm", STABLE_DIFFUSION, 15)
    compiler._compile_cached.cache_clear()
    tables = []
    threads = [
        threading.Thread(target=lambda: tables.append(compile_sampler("ddpm", STABLE_DIFFUSION, 15))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tables) == 4
    assert all(np.array_equal(table.coefficients, single_threaded.coefficients) for table in tables)


def test_compiling_leaves_no_openmp_threads_behind():
    """A second pool would slow down every iteration: see the comment in `compile.py`."""
    script = """
import os, threading, time, torch
from noria.sampling.compile import compile_sampler
torch.set_num_threads(2)
torch.rand(400, 400) @ torch.rand(400, 400)  # starts the main thread's pool
compile_sampler("ddim", {}, 5)  # starts threads that are started once
before, wait, compiled = len(os.listdir("/proc/self/task")), threading.Event(), threading.Event()
def compile_in_thread():
    compile_sampler("euler-a", {}, 20)
    compiled.set()
    wait.wait()
thread = threading.Thread(target=compile_in_thread)
thread.start()
compiled.wait()
time.sleep(1.0)  # the pool of an ended thread ends a little later
print(len(os.listdir("/proc/self/task")) - before)
wait.set()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1, "more than the compiling thread itself"
