"""Devices: the file that an engine saves, and files that cannot be used."""

import json

import pytest

from noria.config import EngineConfig
from noria.engine.diffusion.warmup.calibration import CostCache
from noria.models.catalog import open_model
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey
from noria_bench.simulator.devices import read_device
from noria_bench.simulator.workload import SimulateError


def test_the_file_of_an_engine_has_its_settings_and_the_costs_of_plain_calls(tmp_path):
    spec = open_model("bundled")
    costs = CostModel()
    for stage, reference_px, seconds in ((0, 0, 0.1), (1, 0, 0.7), (0, 4096, 0.9)):
        costs.steps[BatchKey(128, 128, spec.key, stage, reference_px)] = CostCurve({1: seconds})
    cache = CostCache(tmp_path, spec, EngineConfig(decode_batch=2, buckets=(4, 16)), "a device")
    cache.save(costs)
    device = read_device(cache.path)
    assert (device.name, device.slots, device.decode_batch, device.max_rows) == ("a device", 32, 2, 16)
    assert device.sizes == [(128, 128)]
    assert [curve.points for curve in device.costs().steps.values()] == [{1: 0.1}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": []}, "has no steps"),
        ({"slots": 0}, "slots"),
        ({"front_end_s": -1}, "front_end_s"),
        ({"slot": 4}, "unknown field `slot`"),
        ({"steps": [{"width_px": 0, "height_px": 8, "seconds": {"1": 1}}]}, "width_px"),
        ({"steps": [{"width_px": 8, "height_px": 8, "seconds": {"1": -1}}]}, "seconds"),
        ({"steps": [{"width_px": 8, "height_px": 8, "seconds": {}}]}, "no seconds of 8x8"),
        ({"key": {"slots": "9999999999", "decode_batch": "4", "buckets": "()"}}, r"its key has not .* <= 1024"),
    ],
)
def test_costs_that_cannot_be_are_named(tmp_path, fields, message):
    file = tmp_path / "costs.json"
    steps = [{"width_px": 8, "height_px": 8, "seconds": {"1": 0.1}}]
    file.write_text(json.dumps({"steps": steps} | fields))
    with pytest.raises(SimulateError, match=message):
        read_device(file)


def test_a_file_that_is_no_json_says_what_it_should_be(tmp_path):
    file = tmp_path / "costs.json"
    file.touch()
    with pytest.raises(SimulateError, match=r"is no file of costs.* one that an engine has saved"):
        read_device(file)
