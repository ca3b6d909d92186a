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
from noria.sampling.compile import compile_sampler
from noria.sampling.probe import SchedulerSetup, probe
from noria.sampling.schedule import Schedule
from noria.sampling.tables import NOISE_COLUMN, WINDOW, output_column, sample_column
from sampling.toy_model import STABLE_DIFFUSION


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
    trace = probe(SchedulerSetup.of(find(name), STABLE_DIFFUSION), 20)
    outputs, noise = np.split(np.eye(1 + 2 * num_calls)[1:], 2)
    samples = [trace.samples_PK[0]]
    for call, row in enumerate(table.coefficients.astype(np.float64)):
        past = range(max(0, call - WINDOW + 1), call + 1)
        after = sum(row[sample_column(q)] * samples[q] + row[output_column(q)] * outputs[q] for q in past)
        samples.append(after + row[NOISE_COLUMN] * noise[call])
    np.testing.assert_allclose(samples, trace.samples_PK, atol=1e-5 * np.abs(trace.samples_PK).max())


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


def test_a_sampler_that_begins_with_an_image_has_the_last_calls_and_the_noise_of_each():
    whole = compile_sampler("euler", STABLE_DIFFUSION, 8)
    table = compile_sampler("euler", STABLE_DIFFUSION, 8, first_step=5)
    assert whole.image_weights is None
    assert table.timesteps.tolist() == whole.timesteps[5:].tolist()
    assert table.image_weights.shape == (4, 2)
    assert table.image_weights[:, 0].tolist() == [1, 1, 1, 1]  # Euler adds noise with the deviation sigma
    assert (np.diff(table.image_weights[:, 1]) < 0).all()
    assert table.image_weights[-1, 1] == 0
    assert compile_sampler("heun", STABLE_DIFFUSION, 8, first_step=5).num_calls == 2 * 3 - 1


def test_a_scheduler_that_adds_no_noise_to_an_image_is_rejected_with_those_that_do():
    with pytest.raises(InvalidField, match=r"'ipndm' cannot begin with an image.*ddim, .*unipc3, ") as caught:
        compile_sampler("ipndm", STABLE_DIFFUSION, 8, first_step=5)
    assert caught.value.field == "scheduler"
    assert "ipndm" not in caught.value.message.partition("use one of")[2]


def test_noise_is_drawn_at_the_calls_where_diffusers_draws_it():
    assert not compile_sampler("ddim", STABLE_DIFFUSION, 6).noise.any()
    assert compile_sampler("lcm", STABLE_DIFFUSION, 6).noise.tolist() == [True] * 5 + [False]
    ancestral = compile_sampler("euler-a", STABLE_DIFFUSION, 6)
    assert ancestral.noise.all()
    assert ancestral.coefficients[-1, NOISE_COLUMN] == 0  # drawn and not used: it advances the generator


def test_a_recurrence_longer_than_the_window_is_rejected_each_time():
    prk = SchedulerChoice("made-up", "PNDMScheduler", {"skip_prk_steps": False}, (), "for a test", "diffusion")
    for _ in range(2):
        with pytest.raises(InvalidField, match=f"'made-up'.*further than {WINDOW} model calls") as caught:
            compile_sampler(prk, STABLE_DIFFUSION, 10)
        assert caught.value.field == "scheduler"


def test_threads_can_compile_at_once(monkeypatch):
    single_threaded = compile_sampler("ddpm", STABLE_DIFFUSION, 15)
    monkeypatch.setattr(compiler, "_cache", compiler._Cache(2**20))
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


def test_the_cache_counts_the_times_in_its_keys():
    cache, rejection = compiler._Cache(100_000), InvalidField("no", field="scheduler")
    setup = SchedulerSetup.of(find("ddim"), {})
    keys = [(setup, 500, Schedule(tuple(float(each + time) for time in range(500))), None, None) for each in range(8)]
    for key in keys:
        cache.put(key, rejection)  # 2 kB, and 16 kB for 500 floats and their places
    assert [cache.get(key) is not None for key in keys] == [False] * 3 + [True] * 5


@pytest.mark.slow  # imports torch and diffusers in a process of its own
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
