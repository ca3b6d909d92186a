"""The runs that each bench plans."""

import contextlib

import image_server
import pytest

from noria.config import Config
from noria.models.catalog import open_model
from noria_bench.benches import run_plans
from noria_bench.benches.suite_options import SuiteOptions
from noria_bench.targets.catalog import read_targets

SPEC = open_model("bundled")


@pytest.fixture
def started_targets(monkeypatch):
    """The names of the targets that were started to be measured."""
    names = []

    def running_target(target, *_):
        names.append(target.name)
        return image_server.running("fine")

    monkeypatch.setattr(run_plans, "running_target", running_target)
    return names


def plans_with_capacity(monkeypatch, options):
    """The plans after the shortest measurement in which a machine that may be busy finishes something.

    One second on a quiet one.
    """
    for seconds in (1.0, 10.0, 60.0):
        monkeypatch.setattr(run_plans, "_CAPACITY_S", seconds)
        with contextlib.suppress(RuntimeError):
            return list(run_plans.mixed_runs(options, Config(), SPEC))
    raise AssertionError(f"finished nothing in {seconds} s")


def test_loads_are_shares_of_noria_s_capacity_for_all_targets(started_targets, monkeypatch):
    found = []
    measured = run_plans.capacity.measure_capacity

    def measure_capacity(*arguments):
        found.append(measured(*arguments))
        return found[-1]

    monkeypatch.setattr(run_plans.capacity, "measure_capacity", measure_capacity)
    options = SuiteOptions(read_targets("reference-batched"), 2.0, load_percents=(50, 90))
    plans = plans_with_capacity(monkeypatch, options)
    assert set(started_targets) == {"noria"}
    for plan, percent in zip(plans, (50, 90), strict=True):
        traffic = plan.load_generator.traffic
        assert traffic.rows_per_s == pytest.approx(percent / 100 * found[-1].rows_per_s)
        assert (traffic.load_percent, plan.variant, plan.target.name) == (
            percent, f"poisson, {percent} %", "reference-batched"
        )  # fmt: skip


def test_a_rate_needs_no_measurement_and_repeats_the_same_requests(started_targets):
    options = SuiteOptions(read_targets("noria,reference-batched"), 20.0, arrivals="both", rows_per_s=200.0)
    first, again = (list(run_plans.mixed_runs(options, Config(), SPEC)) for _ in range(2))
    assert started_targets == []
    assert [(plan.variant, plan.target.name) for plan in first] == [
        ("poisson", "noria"),
        ("poisson", "reference-batched"),
        ("bursty", "noria"),
        ("bursty", "reference-batched"),
    ]
    assert [plan.load_generator.arrivals for plan in first] == [plan.load_generator.arrivals for plan in again]
    assert first[0].load_generator.arrivals == first[1].load_generator.arrivals != first[2].load_generator.arrivals


def test_users_get_the_same_mixed_and_uniform_requests_from_every_target(started_targets):
    plans = list(run_plans.mixed_runs(SuiteOptions(seconds=5.0, num_users=8), Config(), SPEC))
    assert started_targets == []
    assert [(plan.target.name, plan.variant, plan.load_generator.traffic.mix) for plan in plans] == [
        (target, variant, mix)
        for target in ("noria", "reference-batched")
        for variant, mix in (
            ("8 users", "mixed-settings"),
            ("8 users, uniform", "uniform"),
            ("8 users, sizes", "mixed-sizes"),
            ("8 users, start images", "mixed-start-images"),
            ("8 users, LoRAs", "mixed-loras"),
        )
    ]
    generators = [plan.load_generator for plan in plans]
    assert generators[5:] == generators[:5]
    mixed, _, sizes, starts, loras = generators[:5]
    assert {(body["width"], body["height"]) for body in map(sizes.body, range(100))} == {
        (body["width"], body["height"]) for body in sizes.warm_up_bodies
    }
    assert {body.get("strength") for body in map(starts.body, range(100))} == {None, 0.4, 0.6, 0.8}
    assert any("image" in body for body in starts.warm_up_bodies)
    for bodies in (map(loras.body, range(100)), loras.warm_up_bodies):
        assert {lora["name"] for body in bodies for lora in body.get("loras", ())} == {"night", "outline"}
    bodies = [mixed.body(number) for number in range(200)]
    assert (min(body["inference_steps"] for body in bodies), max(body["inference_steps"] for body in bodies)) == (6, 40)
    assert {body["guidance_scale"] for body in bodies} == {1.0, 3.0, 5.0, 7.5}
    assert mixed.body(4096) == mixed.body(0)


def test_some_mixes_can_be_left_out(started_targets):
    options = SuiteOptions(read_targets("noria"), num_users=8, quick=True, mixes=("settings", "uniform"))
    plans = list(run_plans.mixed_runs(options, Config(), SPEC))
    assert [plan.variant for plan in plans] == ["8 users", "8 users, uniform"]
    assert plans[0].load_generator.traffic.seconds == 15.0 and plans[0].server == plans[1].server


def test_the_warm_up_of_a_mixed_run_has_requests_of_every_kind():
    plan = next(run_plans.mixed_runs(SuiteOptions(seconds=600.0, rows_per_s=200.0), Config(), SPEC))
    warm = plan.load_generator.warm_up_bodies

    def kinds(bodies):
        return {(body["width"], body["height"], body["guidance_scale"] > 1, body["n"]) for body in bodies}

    sent = [arrival.body for arrival in plan.load_generator.arrivals]
    assert kinds(sent) <= kinds(warm)
    assert {body["scheduler"] for body in sent} <= {body["scheduler"] for body in warm}
