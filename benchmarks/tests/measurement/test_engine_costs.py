"""Records of an engine's costs, from two answers of `/v1/models/{model}`."""

import pytest

from noria.config import EngineConfig
from noria.models.catalog import open_model
from noria_bench.measurement.engine_costs import device_costs


def answer(slowdown, step_totals, decode_totals):
    shape = {"width_px": 128, "height_px": 96, "stage": 0, "reference_px": 0, "slowdown": slowdown}
    shape |= {"step_s": {"2": 9.0}, "decode_s": {"1": 3.0}, "text_encode_s": 0.02}
    return {"costs": [shape | {"step_totals": step_totals, "decode_totals": decode_totals}], "load": {"num_slots": 16}}


def test_costs_are_the_means_of_what_was_measured_during_the_load():
    samples = [answer(2.0, {"2": [10, 9.0], "4": [1, 7.0]}, {}), answer(1.0, {"2": [14, 10.0], "4": [1, 7.0]}, {})]
    found = device_costs(samples, open_model("bundled"), EngineConfig())
    assert found["steps"] == [{"width_px": 128, "height_px": 96, "seconds": {"2": pytest.approx(0.25)}}]
    assert found["slowdown"] == pytest.approx(1.5)
    # No image was decoded meanwhile: what the engine has learned, at the mean slowdown.
    assert found["decodes"] == [{"width_px": 128, "height_px": 96, "seconds": {"1": pytest.approx(4.5)}}]
