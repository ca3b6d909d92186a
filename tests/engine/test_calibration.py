"""What work costs: measured by drawing, kept from one start to the next, and never missed where it cannot be kept."""

import dataclasses
import logging
import types

import msgspec
import pytest

from noria.config import EngineConfig
from noria.engine import calibration
from noria.engine.calibration import CostFile, KeptCosts, cost_folder, cost_key, draw_throw_away, measure
from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.loading import load_fleet, measured_costs
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import ImageId, Measured, ShapeClass

CONFIG = EngineConfig(dtype="float32", slots=8, threads=1)


@pytest.fixture(scope="module")
def spec(tiny_folder):
    return open_model(str(tiny_folder))


class TimedExecutor(FakeExecutor):
    """One that times the parts of its turns: a guided image's step takes two rows, its decoding 5 ms."""

    def __init__(self, clock):
        super().__init__(clock, lambda plan: self.step_s(plan) + 0.005 * len(plan.decodes))
        self.row_s, self.waits = 0.01, False

    def step_s(self, plan):
        return 2 * self.row_s * len(plan.steps)

    def execute(self, plan, **options):
        outcome = super().execute(plan, **options)
        spent = Measured(step_s=self.step_s(plan), decode_s=0.005 * len(plan.decodes))
        return dataclasses.replace(outcome, spent=spent)


@pytest.fixture
def device(monkeypatch):
    """On virtual time, which `measure` is made to read."""
    clock = VirtualClock()
    monkeypatch.setattr(calibration, "time", types.SimpleNamespace(monotonic=clock))
    return TimedExecutor(clock)


def default_size(spec):
    return ShapeClass(spec.default_width_px, spec.default_height_px, spec.name)


def known(spec):
    shape = default_size(spec)
    return CostModel(8, {shape: Curve({1: 0.1, 8: 0.8})}, {shape: Curve({1: 0.05})}, {spec.name: 0.01})


def test_measuring_draws_every_batch_up_to_the_slots_and_settles_the_knee(spec, device):
    costs = CostModel(most_rows=16)
    measure(device, spec, CONFIG, costs)
    shape = default_size(spec)
    assert sorted(costs.steps[shape].points) == [1, 2, 4, 8, 16]
    assert costs.steps[shape].points[16] == pytest.approx(0.16)
    assert costs.decodes[shape].points[1] == pytest.approx(0.005)
    assert (costs.pace, device.waits) == (1.0, False)
    assert costs.rows_limit(shape) < 16  # this device gains nothing by batching


def test_a_number_of_slots_between_the_powers_of_two_is_measured_too(spec, device):
    costs = CostModel(most_rows=12)
    measure(device, spec, msgspec.structs.replace(CONFIG, slots=6), costs)
    assert sorted(costs.steps[default_size(spec)].points) == [1, 2, 4, 8, 12]


def test_the_budget_ends_the_ladder(spec, device):
    device.row_s = 0.1
    costs = CostModel(most_rows=16)
    measure(device, spec, CONFIG, costs)
    # A pass of 5 steps of 2 rows takes 1.0 s, and the next would take twice that: then 3 s are over.
    assert sorted(costs.steps[default_size(spec)].points) == [1, 2]
    assert costs.rows_limit(default_size(spec)) == 16  # nobody tried more: nothing says that it does not pay


def test_a_model_that_cannot_draw_is_told_at_the_start_and_the_device_is_left_as_it_was(spec, device):
    device.failing[ImageId("throw-away-1", 0)] = "no kernel for this device"
    with pytest.raises(ModelError, match=r"cannot draw with these settings: .*no kernel for this device"):
        measure(device, spec, CONFIG, CostModel())
    assert device.waits is False


def test_what_is_thrown_away_is_drawn_in_the_default_size(spec, device):
    costs = CostModel()
    draw_throw_away(device, spec, CONFIG, costs, num_images=2, steps=1)
    assert list(costs.steps) == [default_size(spec)]


def test_costs_that_were_kept_are_loaded_and_settled(spec, tmp_path):
    costs = known(spec)
    costs.steps[ShapeClass(1, 1, "another")] = Curve({1: 9.0})
    CostFile(tmp_path / "new" / "folder", spec, CONFIG, "a device").save(costs)
    loaded = CostModel(most_rows=8)
    assert CostFile(tmp_path / "new" / "folder", spec, CONFIG, "a device").load(loaded)
    shape = default_size(spec)
    assert (loaded.steps, loaded.decodes, loaded.encode_s) == (
        {shape: costs.steps[shape]},
        costs.decodes,
        costs.encode_s,
    )
    assert loaded.rows_limit(shape) == 1
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize("change", [{"slots": 4}, {"dtype": "bfloat16"}, {"buckets": (16,)}, {"threads": 2}])
def test_costs_of_other_settings_are_not_taken_for_these(spec, tmp_path, change):
    CostFile(tmp_path, spec, CONFIG, "a device").save(known(spec))
    other = msgspec.structs.replace(CONFIG, **change)
    assert CostFile(tmp_path, spec, other, "a device").load(CostModel()) is False


def test_costs_of_another_device_or_model_are_not_taken_for_these(spec, tmp_path):
    CostFile(tmp_path, spec, CONFIG, "a device").save(known(spec))
    retrained = msgspec.structs.replace(spec, fingerprint="other weights")
    assert CostFile(tmp_path, spec, CONFIG, "another device").load(CostModel()) is False
    assert CostFile(tmp_path, retrained, CONFIG, "a device").load(CostModel()) is False


def test_settings_that_change_no_cost_do_not_lose_what_was_kept(spec):
    assert cost_key(spec, CONFIG, "d") == cost_key(
        spec, msgspec.structs.replace(CONFIG, policy="fcfs", queue_limit=9), "d"
    )


def test_nothing_kept_is_no_news(spec, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert CostFile(tmp_path, spec, CONFIG, "a device").load(CostModel()) is False
    assert caplog.records == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 3}', b"\xff\xfe"])
def test_a_damaged_file_is_said_and_measured_anew(spec, tmp_path, caplog, damage):
    file, costs = CostFile(tmp_path, spec, CONFIG, "a device"), CostModel()
    file.path.write_bytes(damage)
    assert file.load(costs) is False
    assert "cannot be used and are measured anew" in caplog.text
    assert (costs.steps, costs.encode_s) == ({}, {})


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
def test_numbers_that_no_device_gives_are_not_believed(spec, tmp_path, steps):
    file, costs = CostFile(tmp_path, spec, CONFIG, "a device"), CostModel()
    kept = {"key": cost_key(spec, CONFIG, "a device"), "steps": steps, "decodes": [], "encode_s": 0.0}
    file.path.write_bytes(msgspec.json.encode(kept))
    assert msgspec.json.decode(file.path.read_bytes(), type=KeptCosts)
    assert file.load(costs) is False
    assert costs.steps == {}


def test_a_folder_that_cannot_be_written_is_said_and_no_more(spec, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    CostFile(tmp_path / "file" / "costs", spec, CONFIG, "a device").save(known(spec))
    assert "the measured costs are not kept" in caplog.text


def test_a_folder_that_cannot_be_read_is_said_and_measured_anew(spec, tmp_path, caplog):
    file = CostFile(tmp_path, spec, CONFIG, "a device")
    file.path.mkdir()
    assert file.load(CostModel()) is False
    assert "measured anew" in caplog.text


def test_costs_are_kept_in_the_folder_of_the_setting_or_in_the_users_cache(monkeypatch, tmp_path):
    assert cost_folder(str(tmp_path)) == tmp_path / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cost_folder("") == tmp_path / "cache" / "noria" / "costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cost_folder("") == tmp_path / "home" / ".cache" / "noria" / "costs"


def test_a_real_model_is_measured_at_its_first_start_and_not_at_its_second(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "BUDGET_S", 120.0)  # a busy machine would leave the larger sizes out
    settings = msgspec.structs.replace(CONFIG, slots=2, cache_dir=str(tmp_path))
    fleet, config = load_fleet([spec], settings, "cpu")
    costs, (file,) = measured_costs(fleet, [spec], config)
    shape = default_size(spec)
    assert sorted(costs.steps[shape].points) == [1, 2, 4]
    assert costs.decode_s(shape) > 0.0
    assert costs.prompt_s(spec.name) > 0.0
    assert file.path.exists()
    monkeypatch.setattr("noria.engine.loading.measure", lambda *_: pytest.fail("measured again"))
    again, _ = measured_costs(fleet, [spec], config)
    assert again.steps[shape].points == costs.steps[shape].points
