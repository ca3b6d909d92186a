"""What an engine counts, with the real wheel on virtual time."""

import pytest

from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.gauges import Gauges
from noria.engine.loop import Turn, Wheel
from noria.observe import metrics
from noria.observe.metrics import REGISTRY
from noria.request import ImageRequest
from noria.scheduling.plans import ImageId, Outcome, Plan, ShapeClass, Step
from noria.scheduling.steps import StepScheduler


class Holder:
    """As much of an executor as gauges ask."""

    def memory_bytes(self):
        return 12345


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def moved():
    """How much a sample has moved since the test began, or since it was first asked for."""
    before = {}

    def of(name, **labels):
        key = (name, *sorted(labels.items()))
        now = value(name, **labels)
        return now - before.setdefault(key, now)

    return of


def turn(side_px=64, images=2, overflowed=None):
    steps = tuple(Step(ImageId(f"r{k}", 0), k, 0) for k in range(images))
    return Turn(Plan((), steps, ()), Outcome(overflowed=overflowed), 0.03, ShapeClass(side_px, side_px, "m"))


def test_a_turn_is_counted_with_its_batch_and_its_time(moved):
    asked = [
        ("noria_turns_total", {"engine": "engine-0"}),
        ("noria_engine_busy_seconds_total", {"engine": "engine-0"}),
        ("noria_denoise_steps_total", {"engine": "engine-0", "model": "m"}),
        ("noria_step_seconds_sum", {"shape": "64x64"}),
    ]
    for name, labels in asked:
        moved(name, **labels)
    Gauges("engine-0", Holder(), 4).turned(turn())
    assert [round(moved(name, **labels), 6) for name, labels in asked] == [1, 0.03, 2, 0.03]
    assert value("noria_slots", engine="engine-0") == 4


def test_a_turn_that_did_not_fit_is_counted_by_what_did_not(moved):
    moved("noria_out_of_memory_total", engine="engine-0", part="steps")
    Gauges("engine-0", Holder(), 4).turned(turn(overflowed="steps"))
    assert moved("noria_out_of_memory_total", engine="engine-0", part="steps") == 1


def total(name):
    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


@pytest.mark.parametrize("memory", [{}, {"boards": 3}, {"steps": 2}, {"decodes": 1}, {"boards": 0}, {"steps": 0}])
def test_who_boards_leaves_and_what_did_not_fit_is_no_step(memory):
    names = ("noria_joins_total", "noria_leaves_total", "noria_denoise_steps_total", "noria_batch_size_sum")
    before = [total(name) for name in names]
    clock = VirtualClock()
    executor = FakeExecutor(clock, memory=memory)
    gauges = Gauges("engine-0", Holder(), 4)
    wheel = Wheel(StepScheduler(4), executor, gauges.happened, clock)
    for name in "abc":
        wish = ImageRequest(name, "a circle", "", 7, 8, 8, 3, 2.0, 2, "ddim", 1e6)
        wheel.submit(executor.prepare(wish))
    while (turned := wheel.turn()) is not None:
        gauges.turned(turned)
    joins, leaves, steps, sizes = (total(name) - was for name, was in zip(names, before, strict=True))
    assert joins == leaves
    assert steps == sizes == (0 if 0 in memory.values() else 3 * 2 * 3)
    assert joins == 6 or 0 in memory.values()


def test_however_many_sizes_callers_think_of_labels_are_bounded(moved):
    for shape in ("other", "1000x1000"):
        moved("noria_step_seconds_count", shape=shape)
    gauges = Gauges("engine-0", Holder(), 4)
    for side_px in range(1000, 1000 + metrics.MOST_SHAPES + 3):
        gauges.turned(turn(side_px))
    gauges.turned(turn(1000))
    assert moved("noria_step_seconds_count", shape="other") == 3
    assert moved("noria_step_seconds_count", shape="1000x1000") == 2


def test_an_idle_engine_has_no_queue_and_still_holds_its_memory():
    for gauge in (metrics.SLOTS_USED, metrics.QUEUE_DEPTH, metrics.QUEUE_DRAIN_SECONDS, metrics.OLDEST_AGE_SECONDS):
        gauge.labels("engine-0").set(7)
    Gauges("engine-0", Holder(), 4).stands(StepScheduler(4))
    for name in ("noria_slots_used", "noria_queue_depth", "noria_queue_drain_seconds", "noria_oldest_age_seconds"):
        assert value(name, engine="engine-0") == 0
    assert value("noria_device_memory_bytes", engine="engine-0") == 12345


def test_each_engine_counts_under_its_own_name(moved):
    for engine in ("engine-0", "engine-1"):
        moved("noria_turns_total", engine=engine)
    Gauges("engine-1", Holder(), 8).turned(turn())
    assert [moved("noria_turns_total", engine=f"engine-{k}") for k in range(2)] == [0, 1]
    assert value("noria_slots", engine="engine-1") == 8
