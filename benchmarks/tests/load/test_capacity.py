"""Solo costs from two measurements, and capacity from what was finished in a window."""

import contextlib

import msgspec
import pytest

from noria.frontend.http.body import decode
from noria.models.catalog import open_model
from noria.protocol.request import ImageRequestBody
from noria_bench.load.capacity import (
    Capacity,
    capacity_of_replies,
    fit_solo_cost,
    measure_capacity,
    measure_prediction_errors,
    solo_s,
)
from noria_bench.load.closed_loop import Reply
from noria_bench.load.workload import RequestTemplate, mixed_loras

SPEC = open_model("bundled")
TEMPLATE = RequestTemplate("p", 1, SPEC.default_width_px, SPEC.default_height_px, 10, 3.0, "ddim", 1)  # 20 rows


def steps(count, **fields):
    return msgspec.structs.replace(TEMPLATE, inference_steps=count, **fields)


def test_the_time_alone_is_the_line_through_few_steps_and_many():
    cost = fit_solo_cost(steps(5), 0.3, steps(20), 0.9)
    assert solo_s([cost], steps(5)) == pytest.approx(0.3)
    assert solo_s([cost], steps(30)) == pytest.approx(1.3)
    assert solo_s([cost], steps(30, scheduler="heun")) == pytest.approx(0.1 + 59 * 0.04)


def test_a_disturbed_measurement_gives_no_time_below_zero():
    assert solo_s([fit_solo_cost(steps(5), 0.9, steps(20), 0.3)], steps(40)) == pytest.approx(0.9)
    assert solo_s([fit_solo_cost(steps(5), 0.1, steps(20), 1.0)], steps(1)) > 0


def test_each_kind_of_request_has_its_own_cost():
    costs = [fit_solo_cost(steps(5, **kind), s, steps(20, **kind), 4 * s) for kind, s in (({}, 1.0), ({"n": 2}, 2.0))]
    assert solo_s(costs, steps(5)) == pytest.approx(1.0)
    assert solo_s(costs, steps(5, n=2, seed=9, guidance_scale=7.0)) == pytest.approx(2.0)


def test_capacity_counts_what_ended_in_the_window_by_its_rows():
    replies = [
        Reply(0.0, 1.0, 200, 1, 0),  # before the window
        Reply(0.0, 2.5, 200, 1, 0),
        Reply(0.0, 3.0, 200, 1, 1),
        Reply(0.0, 3.5, 500, 1, 1),
        Reply(0.0, 3.9, 200, 1, 2),  # templates repeat: it is the first again
        Reply(0.0, 4.0, 200, 1, 0),  # after it
    ]
    found = capacity_of_replies(replies, [TEMPLATE, steps(20, n=3)], SPEC, 2.0, 4.0)
    assert found == Capacity(rows_per_s=(20 + 120 + 20) / 2, images_per_s=5 / 2, requests_per_s=3 / 2, num_failures=1)


@pytest.mark.parametrize(
    ("measure", "spec"), [(measure_capacity, [SPEC]), (measure_prediction_errors, [])], ids=["capacity", "errors"]
)
def test_capacity_is_measured_with_what_the_server_accepts(measure, spec, monkeypatch):
    sent = []

    def run(_port, _num_users, _seconds, body, _path):
        sent.extend(body(number) for number in range(64))
        return [Reply(0.0, 1e12, 200, 1, 0)]

    monkeypatch.setattr("noria_bench.load.capacity.closed_loop.run_closed_loop", run)
    mix = mixed_loras(SPEC, ("outline",))
    with contextlib.suppress(RuntimeError):  # nothing is finished in the window
        measure(8000, "/t2i", mix, *spec, 1.0, 1)
    bodies = [decode(msgspec.json.encode(body), ImageRequestBody) for body in sent]
    assert {len(body.loras or ()) for body in bodies} == {0, 1}


def test_a_server_that_finishes_nothing_has_no_capacity():
    with pytest.raises(RuntimeError, match=r"finished nothing in 2.0 s under load; its answers were \[0, 503\]"):
        capacity_of_replies([Reply(0.0, 1.0, 503, 1), Reply(0.0, 1.0, 0, 1)], [TEMPLATE], SPEC, 0.0, 2.0)
