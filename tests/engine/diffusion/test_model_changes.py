"""Loads small diffusion models beside one that serves, and releases them."""

import gc
import os
import shutil
import threading
import weakref

import msgspec
import numpy as np
import pytest
import torch

import tiny_models
from noria.config import EngineConfig
from noria.engine.diffusion import loading, model_changes
from noria.engine.diffusion.loading import load_runtime
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto
from noria.engine.diffusion.sizing.weight_bytes import weights_of, weights_to_load
from noria.engine.diffusion.warmup import call_choice
from noria.engine.diffusion.warmup.calibration import device_name
from noria.engine.loop import RequestEnded, ResultReady, StepLoop
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.diffusion.folders.unet_models.controlnet_folder import inspect
from noria.protocol.model_spec import CallTrial
from noria.scheduling.types import FinishReason
from noria.testing.requests import make_image_request

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def change_weights(folder, change):
    """Apply `change` to a tensor of the UNet."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    name = "conv_in.bias"
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def newer(tiny_folder, tmp_path):
    """A second version of the tiny model: its folder."""
    folder = tmp_path / tiny_folder.name
    shutil.copytree(tiny_folder, folder)
    change_weights(folder, lambda bias: bias + 0.5)
    return folder


@pytest.fixture
def spec(tiny_folder):
    return open_model(str(tiny_folder))


@pytest.fixture(scope="module")
def measured_cache(tiny_folder, tmp_path_factory):
    """A cache folder with the costs of the tiny model, as an earlier start of the engine left it."""
    folder, threads = tmp_path_factory.mktemp("measured"), torch.get_num_threads()
    load_runtime([open_model(str(tiny_folder))], EngineConfig(slots=2, threads=1, cache_dir=str(folder)), "cpu")
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def config(tmp_path, measured_cache):
    shutil.copytree(measured_cache, tmp_path / "cache")
    # Beside other tests, which use all cores, a load at niceness 19 takes minutes.
    return EngineConfig(slots=2, threads=1, mount_niceness=5, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def runtime(spec, config):
    before = torch.get_num_threads()
    yield load_runtime([spec], config, "cpu")
    torch.set_num_threads(before)


def test_the_log_names_the_device_before_a_part_is_loaded(spec, config, caplog):
    caplog.set_level("INFO")
    threads = torch.get_num_threads()
    runtime = load_runtime([spec], config, "auto")
    torch.set_num_threads(threads)
    first, second, *_ = (record.noria_fields for record in caplog.records)
    assert (first["event"], first["device"], second["event"]) == ("libraries_imported", runtime.device, "part_loaded")


def generate(runtime, *specs):
    """The pixels of one image of each model, from one batch."""
    images, reasons = {}, []

    def on_event(event):
        match event:
            case ResultReady(prepared=prepared, result=result):
                images[prepared.request.model_version] = np.frombuffer(result.pixels.rgb(), np.uint8).astype(int)
            case RequestEnded(event=event):
                reasons.append(event.finish_reason)

    loop = StepLoop(runtime.scheduler, runtime.executor, on_event, lambda: 0.0)
    for spec in specs:
        request = make_image_request(
            spec.fingerprint, spec.name, inference_steps=4, width=spec.default_width_px, height=spec.default_height_px
        )
        loop.submit(runtime.executor.prepare(msgspec.structs.replace(request, model_version=spec.fingerprint)))
    while loop.run_iteration() is not None:
        pass
    assert reasons == [FinishReason.FINISHED] * len(specs)
    return [images[spec.fingerprint] for spec in specs]


def test_a_second_version_makes_its_own_images_with_the_costs_of_the_first(runtime, spec, newer, config, monkeypatch):
    (before,) = generate(runtime, spec)
    newer_spec = open_model(str(newer))
    assert (newer_spec.name, newer_spec.key != spec.key) == (spec.name, True)
    with monkeypatch.context() as patch:
        patch.setattr(model_changes, "measure_costs", lambda *_: pytest.fail("measured"))
        runtime.load_beside(newer_spec).add()
    first, second = generate(runtime, spec, newer_spec)
    (alone,) = generate(load_runtime([newer_spec], config, "cpu"), newer_spec)
    assert np.abs(first - before).max() <= 1
    assert np.abs(second - alone).max() <= 1
    assert np.abs(first - second).max() > 1
    assert {costs.version for costs in runtime.shape_costs()} == {spec.fingerprint, newer_spec.fingerprint}


def test_a_released_version_leaves_nothing(runtime, spec, newer):
    newer_spec = open_model(str(newer))
    runtime.load_beside(newer_spec).add()
    generate(runtime, spec, newer_spec)
    unet = weakref.ref(runtime.executor._executors[newer_spec.key].model.unet)
    gc.disable()
    try:
        runtime.release(newer_spec.key)
        runtime.free_memory()
        assert unet() is None  # without a garbage collection, which stops the loop
    finally:
        gc.enable()
    assert {costs.version for costs in runtime.shape_costs()} == {spec.fingerprint}
    generate(runtime, spec)
    assert runtime.load_beside(newer_spec).longest_iteration_s > 0.0  # the costs were kept in the cache


def test_the_load_leaves_the_threads_and_the_priority_of_the_others_alone(runtime, newer, monkeypatch):
    torch.set_num_threads(2)
    seen, real = [], loading._load

    def load(*arguments):
        seen.append((torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return real(*arguments)

    monkeypatch.setattr(loading, "_load", load)
    priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    runtime.load_beside(open_model(str(newer)))
    assert seen == [(1, max(5, priority))]
    assert torch.get_num_threads() == 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == priority
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


def test_compiled_models_are_loaded_and_measured_with_the_threads_that_serve(runtime, bundled_folder, monkeypatch):
    changes = runtime.load_beside.__self__
    changes._config = msgspec.structs.replace(changes._config, compile=True, buckets=(2, 4))
    torch.set_num_threads(2)
    seen, real = [], loading._load

    def load(spec, config, device, _):
        seen.append(torch.get_num_threads())
        return real(spec, msgspec.structs.replace(config, compile=False), device)  # compiling takes minutes

    monkeypatch.setattr(loading, "_load", load)
    monkeypatch.setattr(model_changes, "measure_costs", lambda *_: seen.append(torch.get_num_threads()))
    runtime.load_beside(open_model(str(bundled_folder)))
    assert seen == [2, 2]


def test_a_mounted_model_is_called_as_an_earlier_start_chose_and_is_not_measured(runtime, newer, monkeypatch):
    changes, newer_spec = runtime.load_beside.__self__, open_model(str(newer))
    changes._config = config = msgspec.structs.replace(changes._config, compile_blocks="auto")
    monkeypatch.setattr(loading, "choose_calls", lambda *_: pytest.fail("measured"))
    loads, real = [], loading._load

    def load(spec, config, device, choice):
        loads.append(config.compile_blocks)
        uncompiled = msgspec.structs.replace(config, compile_blocks=False)  # compiling takes a minute
        return real(spec, uncompiled, device, choice)

    monkeypatch.setattr(loading, "_load", load)
    runtime.load_beside(newer_spec).add()
    assert runtime.call_choices() == ()
    resolved = resolve_auto(config, newer_spec, "cpu", detect_machine())
    trial = CallTrial("sdpa", compile_blocks=True, speedup=2.0, is_chosen=True)
    monkeypatch.setattr(call_choice, "_measure", lambda *_: [trial])
    _, choice = call_choice.choose_calls(newer_spec, resolved, device_name("cpu"), None)
    runtime.load_beside(newer_spec).add()
    assert (loads, runtime.call_choices()) == ([False, True], (choice,))


def test_the_costs_of_another_architecture_are_measured_and_not_kept(runtime, spec, bundled_folder, tmp_path):
    other = open_model(str(bundled_folder))
    loaded = runtime.load_beside(other)
    assert loaded.longest_iteration_s > 0.0
    loaded.add()
    generate(runtime, spec, other)
    assert {costs.model for costs in runtime.shape_costs()} == {spec.name, other.name}
    runtime.save_costs()
    runtime.release(other.key)
    assert len(list((tmp_path / "cache/costs").glob("*.json"))) == 1  # a later start measures undisturbed


def test_a_model_that_does_not_fit_the_memory_is_rejected_with_the_numbers(spec, newer, config):
    runtime = load_runtime([spec], config, "cpu", free_bytes=lambda _device: 1000)
    with pytest.raises(ModelError, match=r"[\d,]+ bytes .* 1,000 .*--swap"):
        runtime.load_beside(open_model(str(newer)))
    generate(runtime, spec)


def test_controlnets_and_loras_count_in_the_memory_of_a_model(spec, newer, tiny_folder, config, tmp_path):
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "a.safetensors").write_bytes(bytes(3000))
    edges = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    with_all = msgspec.structs.replace(
        config, dtype="float32", controlnets=(str(edges),), loras=(str(tmp_path / "loras"),), lora_cache_bytes=2000
    )
    other = open_model(str(newer))
    bare, weights = (
        weights_of(other, each).here for each in (msgspec.structs.replace(with_all, controlnets=(), loras=()), with_all)
    )
    assert (weights["LoRAs"], weights["ControlNet edges"]) == (2000, 4 * inspect(edges).num_parameters)
    assert {name: weights[name] for name in bare} == bare
    assert weights_to_load(other, with_all, "cpu").here == weights
    free = int(1.25 * sum(bare.values())) + 2**26  # enough without
    beside = load_runtime([spec], with_all, "cpu", free_bytes=lambda _device: free)
    with pytest.raises(ModelError, match=f"needs {int(1.25 * (sum(bare.values()) + 2000)) + 2**26:,} bytes"):
        beside.load_beside(other)  # they share the ControlNet


def test_text_encoders_elsewhere_need_the_memory_of_their_device(spec, config):
    apart = msgspec.structs.replace(config, dtype="float16", text_encoder_device="cpu")
    weights, together = (
        weights_of(spec, apart),
        weights_of(spec, msgspec.structs.replace(apart, text_encoder_device="same")),
    )
    assert weights.elsewhere == {"text_encoder": 2 * together.here["text_encoder"]}  # in float32
    assert weights.here == {name: each for name, each in together.here.items() if name != "text_encoder"}


def truncate(folder):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def remove(folder):
    (folder / WEIGHTS).unlink()


def make_infinite(folder):
    change_weights(folder, lambda bias: bias * float("nan"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(truncate, "truncated: expected"), (remove, "missing"), (make_infinite, "latents are not finite")],
)
def test_a_model_that_cannot_be_loaded_raises_and_leaves_the_others(runtime, spec, newer, damage, says):
    newer_spec = open_model(str(newer))
    (before,) = generate(runtime, spec)
    damage(newer)
    with pytest.raises(ModelError, match=says):
        runtime.load_beside(newer_spec)
    runtime.free_memory()
    (after,) = generate(runtime, spec)
    assert np.abs(after - before).max() <= 1
    assert len(runtime.executor._executors) == 1
