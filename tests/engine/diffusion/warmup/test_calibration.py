"""Costs are measured with warm-up requests and cached between starts; an unusable cache is never an error."""

import dataclasses
import logging
import types

import msgspec
import pytest

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executors, load_or_measure_costs
from noria.engine.diffusion.warmup import calibration
from noria.engine.diffusion.warmup.calibration import (
    CachedCosts,
    CostCache,
    cost_folder,
    cost_key,
    measure_costs,
    run_warmup_request,
    shape_costs,
)
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey, ItemId, MeasuredTimings
from noria.testing.fake_executor import FakeExecutor
from noria.testing.virtual_clock import VirtualClock

CONFIG = EngineConfig(dtype="float32", slots=8, threads=1)


@pytest.fixture(scope="module")
def spec(tiny_folder):
    return open_model(str(tiny_folder))


class TimedExecutor(FakeExecutor):
    """A fake with phase timings: the step of a guided image takes two rows, a decode 5 ms."""

    def __init__(self, clock):
        super().__init__(clock, lambda plan: self.step_s(plan) + 0.005 * len(plan.decodes))
        self.row_s, self.is_synchronous = 0.01, False

    def step_s(self, plan):
        return 2 * self.row_s * len(plan.steps)

    def execute(self, plan, **options):
        outcome = super().execute(plan, **options)
        timings = MeasuredTimings({"steps": self.step_s(plan), "decodes": 0.005 * len(plan.decodes)})
        return dataclasses.replace(outcome, phase_timings=timings)


@pytest.fixture
def device(monkeypatch):
    """A fake device on virtual time, which `measure_costs` reads too."""
    clock = VirtualClock()
    monkeypatch.setattr(calibration, "time", types.SimpleNamespace(monotonic=clock))
    return TimedExecutor(clock)


def default_batch_key(spec):
    return BatchKey(spec.default_width_px, spec.default_height_px, spec.key)


def known_costs(spec):
    batch_key = default_batch_key(spec)
    return CostModel(8, {batch_key: CostCurve({1: 0.1, 8: 0.8})}, {batch_key: CostCurve({1: 0.05})}, {spec.key: 0.01})


def test_measuring_covers_every_batch_size_up_to_the_slots_and_finds_the_knee(spec, device):
    costs = CostModel(max_rows=16)
    measure_costs(device, spec, CONFIG, costs)
    batch_key = default_batch_key(spec)
    assert sorted(costs.steps[batch_key].points) == [1, 2, 4, 8, 16]
    assert costs.steps[batch_key].points[16] == pytest.approx(0.16)
    assert costs.decodes[batch_key].points[1] == pytest.approx(0.005)
    assert (costs.slowdown, device.is_synchronous) == (1.0, False)
    assert costs.rows_limit(batch_key) < 16  # this device gains nothing by batching


def test_a_number_of_slots_between_the_powers_of_two_is_measured_too(spec, device):
    costs = CostModel(max_rows=12)
    measure_costs(device, spec, msgspec.structs.replace(CONFIG, slots=6), costs)
    assert sorted(costs.steps[default_batch_key(spec)].points) == [1, 2, 4, 8, 12]


def test_clients_get_the_seconds_at_the_slowdown_and_the_slowdown():
    (shape,) = shape_costs(CostModel(steps={BatchKey(64, 64): CostCurve({2: 0.1})}, slowdown=1.5))
    assert (shape.step_s, shape.slowdown) == ({2: pytest.approx(0.15)}, 1.5)


def test_clients_get_what_was_measured_as_it_was():
    costs, key = CostModel(slowdown=1.5), BatchKey(64, 64)
    for seconds in (0.5, 0.25):
        costs.observe_step(key, 2, seconds)
    costs.observe_decode(key, 1, 0.125)
    (shape,) = shape_costs(costs)
    assert (shape.step_totals, shape.decode_totals) == ({2: (2, 0.75)}, {1: (1, 0.125)})
    costs.forget(key.model)
    assert shape_costs(costs) == ()
    assert costs.step_totals == costs.decode_totals == {}


def test_the_budget_limits_the_batch_sizes(spec, device):
    device.row_s = 0.1
    costs = CostModel(max_rows=16)
    measure_costs(device, spec, CONFIG, costs)
    # A pass of 5 steps of 2 rows takes 1.0 s and the next would take twice that, which exceeds 3 s.
    assert sorted(costs.steps[default_batch_key(spec)].points) == [1, 2]
    # larger batches were not tried, so one of twice the size may still pay off
    assert costs.rows_limit(default_batch_key(spec)) == 4


def test_a_model_that_cannot_generate_raises_at_the_start_and_leaves_the_executor_as_it_was(spec, device):
    device.failing[ItemId("warmup-1", 0)] = "no kernel for this device"
    with pytest.raises(ModelError, match="no kernel for this device"):
        measure_costs(device, spec, CONFIG, CostModel())
    assert device.is_synchronous is False


def test_warm_up_requests_have_the_default_size(spec, device):
    costs = CostModel()
    run_warmup_request(device, spec, CONFIG, costs, num_images=2, steps=1)
    assert list(costs.steps) == [default_batch_key(spec)]


def test_cached_costs_are_loaded_and_their_knee_is_found(spec, tmp_path):
    costs = known_costs(spec)
    second_stage = BatchKey(64, 64, spec.key, 1)
    another_version = BatchKey(1, 1, ModelKey(spec.name, "another version"))
    costs.steps |= {second_stage: CostCurve({1: 0.2, 8: 1.6}), another_version: CostCurve({1: 9.0})}
    costs.image_encodes = {default_batch_key(spec): CostCurve({1: 0.1})}
    CostCache(tmp_path / "new" / "folder", spec, CONFIG, "a device").save(costs)
    loaded = CostModel(max_rows=8)
    assert CostCache(tmp_path / "new" / "folder", spec, CONFIG, "a device").load(loaded)
    batch_key = default_batch_key(spec)
    assert (loaded.steps, loaded.decodes, loaded.text_encode_s_by_model) == (
        {each: costs.steps[each] for each in (batch_key, second_stage)},
        costs.decodes,
        costs.text_encode_s_by_model,
    )
    assert loaded.image_encodes == costs.image_encodes
    assert loaded.rows_limit(batch_key) == 1
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"buckets": (16,)}, {"threads": 2}])
def test_costs_of_other_settings_are_not_loaded(spec, tmp_path, change):
    CostCache(tmp_path, spec, CONFIG, "a device").save(known_costs(spec))
    other = msgspec.structs.replace(CONFIG, **change)
    assert CostCache(tmp_path, spec, other, "a device").load(CostModel()) is False


def test_costs_of_another_device_or_model_are_not_loaded(spec, tmp_path):
    CostCache(tmp_path, spec, CONFIG, "a device").save(known_costs(spec))
    retrained = msgspec.structs.replace(spec, fingerprint="other weights")
    assert CostCache(tmp_path, spec, CONFIG, "another device").load(CostModel()) is False
    assert CostCache(tmp_path, retrained, CONFIG, "a device").load(CostModel()) is False


def test_settings_that_change_no_cost_keep_the_cache_key(spec):
    assert cost_key(spec, CONFIG, "d") == cost_key(
        spec, msgspec.structs.replace(CONFIG, policy="fcfs", queue_limit=9), "d"
    )


def test_a_missing_cache_logs_nothing(spec, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert CostCache(tmp_path, spec, CONFIG, "a device").load(CostModel()) is False
    assert caplog.records == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 3}', b"\xff\xfe", b'{"key": "\xff"}'])
def test_a_damaged_file_is_logged_and_not_loaded(spec, tmp_path, caplog, damage):
    cache, costs = CostCache(tmp_path, spec, CONFIG, "a device"), CostModel()
    cache.path.write_bytes(damage)
    assert cache.load(costs) is False
    assert "cannot be used and are measured again" in caplog.text
    assert (costs.steps, costs.text_encode_s_by_model) == ({}, {})


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{"width_px": 8, "height_px": 8, "seconds": {}}],
        [{"width_px": 8, "height_px": 8, "seconds": {"2": 0.0}}],
        [{"width_px": 8, "height_px": 8, "seconds": {"0": 1.0}}],
        [{"width_px": 8, "height_px": 8, "seconds": {"2": -1.0}}],
    ],
)
def test_impossible_costs_are_not_loaded(spec, tmp_path, steps):
    cache, costs = CostCache(tmp_path, spec, CONFIG, "a device"), CostModel()
    cached = {"key": cost_key(spec, CONFIG, "a device"), "steps": steps, "decodes": [], "text_encode_s": 0.0}
    cache.path.write_bytes(msgspec.json.encode(cached))
    assert msgspec.json.decode(cache.path.read_bytes(), type=CachedCosts)
    assert cache.load(costs) is False
    assert costs.steps == {}


def test_a_folder_that_cannot_be_written_is_only_logged(spec, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    CostCache(tmp_path / "file" / "costs", spec, CONFIG, "a device").save(known_costs(spec))
    assert "the measured costs cannot be cached" in caplog.text


def test_a_file_that_cannot_be_read_is_logged_and_not_loaded(spec, tmp_path, caplog):
    cache = CostCache(tmp_path, spec, CONFIG, "a device")
    cache.path.mkdir()
    assert cache.load(CostModel()) is False
    assert "measured again" in caplog.text


def test_costs_are_cached_in_the_folder_of_the_setting_or_in_the_users_cache(monkeypatch, tmp_path):
    assert cost_folder(str(tmp_path)) == tmp_path / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cost_folder("") == tmp_path / "cache" / "noria" / "costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cost_folder("") == tmp_path / "home" / ".cache" / "noria" / "costs"


def test_a_real_model_is_measured_at_its_first_start_and_not_at_its_second(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "BUDGET_S", 120.0)  # a busy machine would leave the larger sizes out
    settings = msgspec.structs.replace(CONFIG, slots=2, cache_dir=str(tmp_path))
    executors, config = load_executors([spec], settings, "cpu")
    costs, (cache,) = load_or_measure_costs(executors, [spec], config)
    batch_key = default_batch_key(spec)
    assert sorted(costs.steps[batch_key].points) == [1, 2, 4]
    assert costs.decode_s(batch_key) > 0.0
    assert costs.text_encode_s(spec.key) > 0.0
    assert cache.path.exists()
    monkeypatch.setattr("noria.engine.diffusion.loading.measure_costs", lambda *_: pytest.fail("measured again"))
    again, _ = load_or_measure_costs(executors, [spec], config)
    assert again.steps[batch_key].points == costs.steps[batch_key].points
