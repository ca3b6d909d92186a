"""Two real models on one device, in one engine loop."""

import msgspec
import numpy as np
import pytest
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executors, load_or_measure_costs
from noria.engine.loop import PreviewReady, RequestEnded, ResultReady, StepLoop
from noria.engine.multi_model import MultiModelExecutor
from noria.models.catalog import open_model
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import (
    FinishReason,
    ImageProgress,
    ItemId,
    IterationPlan,
    IterationResult,
    MeasuredTimings,
    ReleasedImage,
    SlotAssignment,
    Step,
)
from noria.testing.requests import make_image_request


@pytest.fixture(scope="module")
def two_models(tiny_folder, bundled_folder):
    models = [open_model(str(bundled_folder)), open_model(str(tiny_folder))]
    executors, config = load_executors(models, EngineConfig(slots=6, threads=1, decode_batch=2), "cpu")
    return models, executors, config


def make_request(spec, number, steps=6, previews=0):
    return make_image_request(
        f"r{number}", spec.name, seed=number, width=spec.default_width_px, height=spec.default_height_px,
        inference_steps=steps, partial_images=previews, model_version=spec.fingerprint,
    )  # fmt: skip


def generate(executor, requests):
    images, previews, ends = {}, [], {}

    def on_event(event):
        match event:
            case ResultReady(prepared=prepared, result=result):
                images[prepared.request.request_id] = np.frombuffer(result.pixels.rgb(), np.uint8).astype(int)
            case PreviewReady(prepared=prepared, preview=preview):
                previews.append((prepared.request.request_id, preview.width_px))
            case RequestEnded(event=event):
                ends[event.attempt_id] = event.finish_reason

    loop = StepLoop(StepScheduler(6, decode_batch=2), executor, on_event, lambda: 0.0)
    for request in requests:
        loop.submit(executor.prepare(request))
    while loop.run_iteration() is not None:
        pass
    assert set(ends.values()) == {FinishReason.FINISHED}
    return images, previews


def test_images_of_two_models_are_the_same_together_and_alone(two_models):
    models, executors, _ = two_models
    executor = MultiModelExecutor(executors)
    requests = [make_request(models[number % 2], number, steps=4 + number, previews=1) for number in range(8)]
    together, previews = generate(executor, requests)
    for request in requests:
        (single,) = generate(executor, [request])[0].values()
        assert np.abs(together[request.request_id] - single).max() <= 1
    assert dict(previews) == {f"r{k}": (16, 8)[k % 2] for k in range(8)}
    assert not executor._executor_by_attempt


def test_two_versions_of_a_model_serve_the_requests_that_name_them(two_models):
    (first, second), executors, config = two_models
    renamed = msgspec.structs.replace(second, name=first.name)
    versions = {first.key: executors[first.key], renamed.key: executors[second.key]}
    executor = MultiModelExecutor(versions)
    requests = [make_request(spec, number) for number, spec in enumerate((first, second))]
    apart = generate(MultiModelExecutor(executors), requests)[0]
    by_version = [msgspec.structs.replace(request, model=first.name) for request in requests]
    together = generate(executor, by_version)[0]
    for name, pixels in apart.items():
        assert np.abs(together[name] - pixels).max() <= 1
    assert [executor.prepare(request).batch_key.model for request in by_version] == [first.key, renamed.key]
    costs, _ = load_or_measure_costs(versions, [first, renamed], config)
    assert {batch_key.model for batch_key in costs.steps} == {first.key, renamed.key}


def test_one_models_full_memory_fails_no_request_of_either(two_models, monkeypatch):
    models, executors, _ = two_models
    executor = MultiModelExecutor(executors)
    requests = [make_request(models[number % 2], number) for number in range(6)]
    undisturbed, _ = generate(executor, requests)
    model = executors[models[1].key].model
    real, rejected = model.predict, []

    def predict(latents, *rest):
        if len(latents) > 2:
            rejected.append(len(latents))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(latents, *rest)

    monkeypatch.setattr(model, "predict", predict)
    constrained, _ = generate(executor, requests)
    assert rejected == [6]  # three guided images; after that only batches of one image are tried
    for name, pixels in undisturbed.items():
        assert np.abs(constrained[name] - pixels).max() <= 1


def test_each_models_costs_are_measured_and_cached_separately(two_models, tmp_path):
    models, executors, config = two_models
    config = EngineConfig(
        **{name: getattr(config, name) for name in config.__struct_fields__} | {"cache_dir": str(tmp_path)}
    )
    costs, files = load_or_measure_costs(executors, models, config)
    assert {shape.model for shape in costs.steps} == {spec.key for spec in models}
    assert len({file.path for file in files}) == 2
    assert all(file.path.exists() for file in files)
    again, _ = load_or_measure_costs(executors, models, config)
    assert {s: c.points for s, c in again.steps.items()} == {s: c.points for s, c in costs.steps.items()}


def test_one_models_decode_that_does_not_fit_skips_no_step_of_the_other(two_models, monkeypatch):
    models, executors, _ = two_models
    executor = MultiModelExecutor(executors)
    requests = [make_request(models[number % 2], number, steps=2 + number // 2) for number in range(8)]
    undisturbed, _ = generate(executor, requests)
    for spec in models:
        model = executors[spec.key].model
        real = model.decode

        def decode(latents, real=real):
            if len(latents) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(latents)

        monkeypatch.setattr(model, "decode", decode)
    constrained, _ = generate(executor, requests)
    for name, pixels in undisturbed.items():
        assert np.abs(constrained[name] - pixels).max() <= 1


def test_an_iteration_of_two_models_evicts_all_then_joins_then_steps_then_decodes(two_models):
    models, executors, _ = two_models
    executor = MultiModelExecutor(executors)
    order = []

    class Spy:
        def __init__(self, name):
            self.name = name

        def accept(self, prepared):
            pass

        def execute(self, plan, *, with_thumbnails):
            assert not with_thumbnails
            evicted = [each.image.attempt_id for each in plan.evictions]
            order.append((self.name, evicted, len(plan.joins), len(plan.steps), len(plan.decodes)))
            timings = MeasuredTimings({"joins": 1.0 if plan.joins else 0.0, "steps": 2.0 if plan.steps else 0.0})
            return IterationResult(oom_phase="decodes" if plan.decodes else None, phase_timings=timings)

    spied_executor = MultiModelExecutor({spec.key: Spy(spec.name) for spec in models})
    first, second = (executor.prepare(make_request(spec, number)) for number, spec in enumerate(models))
    for prepared in (first, second):
        spied_executor.accept(prepared)
    a, b = ItemId("r0", 0), ItemId("r1", 0)
    evictions = (ReleasedImage(ItemId("r0", 1), 1, ImageProgress(2)),)
    outcome = spied_executor.execute(
        IterationPlan((SlotAssignment(b, 1),), (Step(b, 1, 0),), (SlotAssignment(a, 0),), evictions=evictions)
    )
    names = [spec.name for spec in models]
    assert order == [
        (names[0], ["r0"], 0, 0, 0),
        (names[1], [], 1, 0, 0),
        (names[1], [], 0, 1, 0),
        (names[0], [], 0, 0, 1),
    ]
    assert (outcome.oom_phase, outcome.phase_timings.seconds("joins"), outcome.phase_timings.seconds("steps")) == (
        "decodes",
        1.0,
        2.0,
    )
    assert outcome.phase_timings.is_known
