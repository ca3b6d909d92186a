"""`engine.compile_blocks` "auto": what is measured decides, and it is measured once."""

import contextlib
import functools
import importlib.metadata
import shutil

import msgspec
import pytest
import torch

import tiny_models
from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.engine.diffusion.warmup.call_choice import choose_calls, compare, describe, known_choice
from noria.engine.diffusion.warmup.call_trials import time_pair, try_calls
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.protocol.model_spec import CallTrial

SETTINGS = {"dtype": "float32", "slots": 2, "threads": 1, "channels_last": False, "cuda_graphs": False}


@pytest.fixture(autouse=True)
def _reset():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def config(tmp_path):
    return EngineConfig(**SETTINGS, compile_blocks="auto", cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def spec(tmp_path):
    spec = open_model(str(tiny_models.save_stable_diffusion(tmp_path / "model")))
    return msgspec.structs.replace(spec, default_width_px=32, default_height_px=32, min_side_px=16)


def mark_as_compiled(module, **_):
    module._compiled_call_impl = module._call_impl


def choose(spec, config, seconds, device="a device", with_loras=None):
    """Choose where a call takes these seconds, before and compiled; return what is chosen and the number of loads.

    `with_loras` are the seconds of a call with LoRAs.
    """
    loads = []

    def load(settings):
        loads.append(settings)
        return FAMILIES[spec.family].load(spec, settings, "cpu")

    def timed(ways, call, _):
        counted = num_adapted[0]
        for way in ways:
            with way():
                call()
        return seconds if num_adapted[0] == counted else with_loras

    num_adapted, applied = [0], LoraRows.applied

    def counting(self, rows):
        num_adapted[0] += 1
        return applied(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoraRows, "applied", counting)
        resolved, choice = choose_calls(spec, config, device, load, functools.partial(try_calls, time_pair=timed))
    return resolved, choice, len(loads)


@pytest.mark.parametrize(
    ("pairs", "is_chosen"),
    [
        ({1: (1.04, 1.0), 4: (1.04, 1.0)}, True),
        ({1: (1.02, 1.0), 4: (1.02, 1.0)}, False),  # less than the margin
        ({1: (0.97, 1.0), 4: (2.0, 1.0)}, False),  # slower with one row
        ({1: (0.995, 1.0), 4: (2.0, 1.0)}, True),  # equal with one row
    ],
)
def test_a_way_of_calling_has_to_win_by_a_margin_and_to_lose_nowhere(pairs, is_chosen):
    assert compare(CallTrial("sdpa", compile_blocks=True), pairs).is_chosen is is_chosen


def test_calls_are_timed_in_turns_and_the_first_ones_do_not_count():
    now, order = [0.0], []

    @contextlib.contextmanager
    def way(name, seconds):
        now[0] += 100.0  # what a change of the way takes is not counted
        order.append((name, seconds))
        yield

    def call():
        _, seconds = order[-1]
        now[0] += seconds if len(order) > 6 else 50.0

    ways = functools.partial(way, "a", 2.0), functools.partial(way, "b", 1.0)
    assert time_pair(ways, call, torch.device("cpu"), lambda: now[0]) == (2.0, 1.0)
    assert [name for name, _ in order] == ["a", "b"] * 6  # after the budget as few as make a median


@pytest.mark.parametrize(("seconds", "is_compiled"), [((2.0, 1.0), True), ((1.0, 2.0), False)])
def test_the_measurement_decides_and_is_kept(spec, config, monkeypatch, seconds, is_compiled):
    monkeypatch.setattr(torch.nn.Module, "compile", mark_as_compiled)
    resolved, choice, num_loads = choose(spec, config, seconds)
    assert (resolved.compile_blocks, choice.compile_blocks, num_loads) == (is_compiled, is_compiled, 1)
    assert choice.speedup == pytest.approx(2.0 if is_compiled else 1.0)
    times = f"1 row {1000 * seconds[0]:.1f} → {1000 * seconds[1]:.1f} ms"
    assert times in describe(choice)
    again, kept, num_loads = choose(spec, config, (1.0, 1.0))
    assert (again, kept, num_loads) == (resolved, choice, 0)
    assert known_choice(spec, config, "a device") == choice
    for others in ((spec, config, "another"), (msgspec.structs.replace(spec, fingerprint="b"), config, "a device")):
        assert known_choice(*others) is None


@pytest.mark.parametrize(
    ("seconds", "with_loras", "compiled"),
    [
        ((2.0, 1.0), (2.0, 1.0), (True, True)),
        ((2.0, 1.0), (1.0, 2.0), (True, False)),
        ((1.0, 2.0), None, (False, False)),
    ],
)
def test_calls_with_loras_are_compiled_only_where_that_is_faster(
    spec, config, tmp_path, monkeypatch, seconds, with_loras, compiled
):
    monkeypatch.setattr(torch.nn.Module, "compile", mark_as_compiled)
    (tmp_path / "loras").mkdir()
    served = msgspec.structs.replace(config, loras=(str(tmp_path / "loras"),))
    _, choice, _ = choose(spec, served, seconds, with_loras=with_loras)
    assert (choice.compile_blocks, choice.compile_loras) == compiled
    assert choice.speedup == (2.0 if compiled[0] else 1.0)  # that of calls without LoRAs
    assert ("compiled blocks with LoRAs" in describe(choice)) == compiled[0]
    assert known_choice(spec, config, "a device") is None


def test_a_choice_is_not_that_of_other_attention_packages(spec, config, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", mark_as_compiled)
    choose(spec, config, (2.0, 1.0))
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8" if name == "flash-attn" else real(name))
    assert known_choice(spec, config, "a device") is None
    monkeypatch.undo()
    assert known_choice(spec, config, "a device") is not None


def test_blocks_that_cannot_be_compiled_stay_as_they_are(spec, config, monkeypatch, caplog):
    def fail(*_, **__):
        raise NotImplementedError("no compiler")

    monkeypatch.setattr(torch.nn.Module, "compile", fail)
    resolved, choice, _ = choose(spec, config, (2.0, 1.0))
    assert resolved.compile_blocks is False
    assert "compiled blocks cannot be used here: no compiler" in caplog.text
    assert "compiled blocks failed: no compiler" in describe(choice)


@pytest.mark.slow  # a minute: a C++ compiler runs
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_a_start_measures_and_the_next_one_reads_what_was_chosen(tmp_path, config):
    spec = open_model(str(tiny_models.save_krea2(tmp_path / "model")))
    spec = msgspec.structs.replace(spec, default_width_px=48, default_height_px=48, min_side_px=32)
    first, settings = load_executor(spec, config, "cpu")
    (trial,) = first.call_choice.trials
    assert (trial.compile_blocks, trial.error, [*trial.seconds]) == (True, "", [1, 2, 4])
    assert settings.compile_blocks is first.config.compile_blocks is trial.is_chosen
    blocks_are_compiled = any(each._compiled_call_impl for each in first.model.network.modules())
    assert blocks_are_compiled is trial.is_chosen
    assert load_executor(spec, config, "cpu")[0].call_choice == first.call_choice
