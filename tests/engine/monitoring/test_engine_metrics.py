"""An engine's metrics, with the real loop on virtual time."""

import dataclasses

import pytest

from noria.engine.loop import Iteration, StepLoop
from noria.engine.monitoring.engine_metrics import EngineMetrics
from noria.observe.metrics import declarations
from noria.observe.metrics.declarations import REGISTRY
from noria.protocol.messages import ModelPrecision
from noria.protocol.model_spec import ModelKey
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, ItemId, IterationPlan, IterationResult, Step
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock


class MemoryOnlyExecutor:
    """The part of an executor that the metrics use."""

    def memory_bytes(self):
        return 12345


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def metric_delta():
    """A function that returns by how much a sample has changed since its first call for it."""
    before = {}

    def of(name, **labels):
        key = (name, *sorted(labels.items()))
        now = value(name, **labels)
        return now - before.setdefault(key, now)

    return of


def make_iteration(side_px=64, images=2, oom_phase=None, reference_px=0):
    steps = tuple(Step(ItemId(f"r{k}", 0), k, 0) for k in range(images))
    stepped = BatchKey(side_px, side_px, ModelKey("m"), reference_px=reference_px)
    return Iteration(IterationPlan((), steps, ()), IterationResult(oom_phase=oom_phase), 0.03, stepped)


def test_an_iteration_is_counted_with_its_batch_and_its_duration(metric_delta):
    expected = [
        ("noria_iterations_total", {"engine": "engine-0"}),
        ("noria_engine_busy_seconds_total", {"engine": "engine-0"}),
        ("noria_denoise_steps_total", {"engine": "engine-0", "model": "m"}),
        ("noria_iteration_seconds_sum", {"shape": "64x64"}),
    ]
    for name, labels in expected:
        metric_delta(name, **labels)
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).on_iteration(make_iteration())
    assert [round(metric_delta(name, **labels), 6) for name, labels in expected] == [1, 0.03, 2, 0.03]
    assert value("noria_slots", engine="engine-0", source="set") == 4


def test_the_fidelity_of_a_text_encoder_is_a_gauge():
    precisions = [ModelPrecision("m", "v", "int8", 0.98), ModelPrecision("other", "v", "int8", None)]
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).on_precisions(precisions)
    assert value("noria_fidelity_ratio", engine="engine-0", model="m", dtype="int8") == 0.98
    assert value("noria_fidelity_ratio", engine="engine-0", model="other", dtype="int8") == 0.0


def test_an_iteration_out_of_memory_is_counted_by_its_phase(metric_delta):
    metric_delta("noria_out_of_memory_total", engine="engine-0", phase="steps")
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).on_iteration(make_iteration(oom_phase="steps"))
    assert metric_delta("noria_out_of_memory_total", engine="engine-0", phase="steps") == 1


def total(name):
    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


@pytest.mark.parametrize("memory", [{}, {"joins": 3}, {"steps": 2}, {"decodes": 1}, {"joins": 0}, {"steps": 0}])
def test_every_join_has_a_departure_and_a_step_that_did_not_fit_is_not_counted(memory):
    names = ("noria_joins_total", "noria_departures_total", "noria_denoise_steps_total", "noria_batch_size_sum")
    before = [total(name) for name in names]
    clock = VirtualClock()
    executor = FakeExecutor(clock, memory=memory)
    engine_metrics = EngineMetrics("engine-0", MemoryOnlyExecutor(), 4)
    loop = StepLoop(StepScheduler(4), executor, engine_metrics.on_event, clock)
    for name in "abc":
        loop.submit(executor.prepare(make_image_request(name, n=2)))
    while (iteration := loop.run_iteration()) is not None:
        engine_metrics.on_iteration(iteration)
    joins, departures, steps, sizes = (total(name) - was for name, was in zip(names, before, strict=True))
    assert joins == departures
    assert steps == sizes == (0 if 0 in memory.values() else 3 * 2 * 3)
    assert joins == 6 or 0 in memory.values()


def test_an_evicted_image_joins_once_and_its_evictions_are_counted(metric_delta):
    names = ("noria_joins_total", "noria_evictions_total")
    for name in names:
        metric_delta(name, engine="engine-0")
    executor = FakeExecutor(VirtualClock())
    engine_metrics = EngineMetrics("engine-0", MemoryOnlyExecutor(), 1)
    scheduler = StepScheduler(1)
    loop = StepLoop(scheduler, executor, engine_metrics.on_event, executor.clock)
    evicted = []
    for priority in ("low", "high"):
        loop.submit(executor.prepare(make_image_request(priority, priority=priority)))
        engine_metrics.on_iteration(loop.run_iteration())
        engine_metrics.update_evicted(scheduler.num_evicted)
        evicted.append(value("noria_evicted", engine="engine-0"))
    while (iteration := loop.run_iteration()) is not None:
        engine_metrics.on_iteration(iteration)
    engine_metrics.update_evicted(scheduler.num_evicted)
    assert [*evicted, value("noria_evicted", engine="engine-0")] == [0, 1, 0]
    assert [metric_delta(name, engine="engine-0") for name in names] == [2, 1]


def test_the_number_of_shape_labels_is_bounded(metric_delta):
    for shape in ("other", "1000x1000"):
        metric_delta("noria_iteration_seconds_count", shape=shape)
    engine_metrics = EngineMetrics("engine-0", MemoryOnlyExecutor(), 4)
    for side_px in range(1000, 1000 + declarations.MAX_SHAPES + 3):
        engine_metrics.on_iteration(make_iteration(side_px))
    engine_metrics.on_iteration(make_iteration(1000))
    assert metric_delta("noria_iteration_seconds_count", shape="other") == 3
    assert metric_delta("noria_iteration_seconds_count", shape="1000x1000") == 2


def test_iterations_with_reference_images_have_a_shape_of_their_own(metric_delta):
    metric_delta("noria_iteration_seconds_count", shape="72x72+references")
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).on_iteration(make_iteration(72, reference_px=4096))
    assert metric_delta("noria_iteration_seconds_count", shape="72x72+references") == 1


def test_an_idle_engine_has_no_queue_and_still_holds_its_memory():
    for gauge in (
        declarations.SLOTS_USED,
        declarations.QUEUE_DEPTH,
        declarations.BACKLOG_SECONDS,
        declarations.QUEUE_OLDEST_AGE_SECONDS,
    ):
        gauge.labels("engine-0").set(7)
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).update_occupancy(StepScheduler(4))
    for name in ("noria_slots_used", "noria_queue_depth", "noria_backlog_seconds", "noria_queue_oldest_age_seconds"):
        assert value(name, engine="engine-0") == 0
    assert value("noria_device_memory_bytes", engine="engine-0") == 12345


def test_each_engine_has_its_own_label(metric_delta):
    for engine in ("engine-0", "engine-1"):
        metric_delta("noria_iterations_total", engine=engine)
    EngineMetrics("engine-1", MemoryOnlyExecutor(), 8).on_iteration(make_iteration())
    assert [metric_delta("noria_iterations_total", engine=f"engine-{k}") for k in range(2)] == [0, 1]
    assert value("noria_slots", engine="engine-1", source="set") == 8


def test_the_time_of_an_iteration_is_divided_among_keys_by_their_images(metric_delta):
    for key in ("alice", ""):
        metric_delta("noria_key_busy_seconds_total", key=key)
    iteration = dataclasses.replace(
        make_iteration(images=4), images_by_client={("alice", "alice"): 1, ("alice", "alice jobs"): 2, ("", "~1"): 1}
    )
    EngineMetrics("engine-0", MemoryOnlyExecutor(), 4).on_iteration(iteration)
    found = [metric_delta("noria_key_busy_seconds_total", key=key) for key in ("alice", "")]
    assert found == pytest.approx([0.0225, 0.0075])
