"""Traffic: a seed reproduces a trace, the load is as requested, and the mix has its distribution."""

import collections
import itertools
import random
import statistics

import pytest

from noria.models.catalog import open_model
from noria.sampling.compile import compile_sampler
from noria_bench.load.workload import (
    DEADLINE_CLASSES,
    MIXES,
    generate_trace,
    mixed,
    mixed_loras,
    mixed_sizes,
    mixed_start_images,
    uniform,
)

SPEC = open_model("bundled")


def solo_s(template):
    return 0.01 * template.rows(SPEC)


def make_trace(**changes):
    options = {"rows_per_s": 200.0, "seconds": 60.0, "arrivals": "poisson", "seed": 7}
    return generate_trace(mixed(SPEC), SPEC, solo_s, **options | changes)


def gaps(arrivals):
    return [b.intended_s - a.intended_s for a, b in itertools.pairwise(arrivals)]


def test_a_seed_repeats_a_trace_and_another_does_not():
    assert make_trace() == make_trace()
    assert make_trace() != make_trace(seed=8)


def test_without_deadlines_the_same_requests_come_at_the_same_moments():
    free = generate_trace(mixed(SPEC), SPEC, None, rows_per_s=200.0, seconds=60.0, arrivals="poisson", seed=7)
    assert [(a.intended_s, a.template) for a in free] == [(a.intended_s, a.template) for a in make_trace()]
    assert {(a.deadline_s, a.deadline_class) for a in free} == {(None, "")}
    assert "deadline_ms" not in free[0].body


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
@pytest.mark.parametrize("rate", [100.0, 250.0])
def test_a_trace_has_the_requested_work(arrivals, rate):
    generated = make_trace(arrivals=arrivals, rows_per_s=rate)
    work = sum(arrival.rows for arrival in generated)
    assert work == pytest.approx(rate * 60.0, rel=0.05)  # the last request is not cut
    assert generated[0].intended_s == 0.0
    assert generated[-1].intended_s < work / rate


def test_more_load_is_the_same_requests_sooner():
    slow, fast = make_trace(rows_per_s=100.0), make_trace(rows_per_s=200.0)
    assert len(slow) < len(fast)
    assert [a.template for a in slow] == [a.template for a in fast[: len(slow)]]
    assert [a.deadline_class for a in slow] == [a.deadline_class for a in fast[: len(slow)]]


def test_poisson_gaps_vary_as_much_as_their_mean_and_bursts_twice_as_much():
    for arrivals, variation in (("poisson", 1.0), ("bursty", 2.0)):
        between = gaps(make_trace(arrivals=arrivals, seconds=3000.0))
        assert statistics.stdev(between) / statistics.mean(between) == pytest.approx(variation, rel=0.1)


def test_a_deadline_is_its_class_s_multiple_of_the_time_alone():
    classes = {kind.name: kind for kind in DEADLINE_CLASSES.values}
    for arrival in make_trace():
        kind = classes[arrival.deadline_class]
        assert arrival.deadline_s == pytest.approx(kind.factor * solo_s(arrival.template) + kind.constant_s)
        assert arrival.body["deadline_ms"] == round(1000 * arrival.deadline_s)


def test_the_mix_has_every_setting_and_the_defaults_most_often():
    templates = [arrival.template for arrival in make_trace(seconds=600.0)]
    for field, default in (
        ("inference_steps", SPEC.default_steps),
        ("guidance_scale", SPEC.default_guidance),
        ("scheduler", SPEC.default_scheduler),
        ("n", 1),
        ("width", SPEC.default_width_px),
    ):
        counts = collections.Counter(getattr(template, field) for template in templates)
        assert len(counts) > 1
        assert counts.most_common(1)[0][0] == default
        assert counts[default] / len(templates) == pytest.approx({"n": 0.8, "width": 0.75}.get(field, 0.6), abs=0.05)
    assert any(not template.guided for template in templates)


def test_uniform_requests_differ_in_prompt_and_seed_only():
    templates = itertools.islice(uniform(SPEC).templates(1), 50)
    assert len({(a.width, a.height, a.inference_steps, a.guidance_scale, a.scheduler, a.n) for a in templates}) == 1


MORE_MIXES = {
    "sizes": mixed_sizes,
    "start images": mixed_start_images,
    "loras": lambda spec: mixed_loras(spec, ("a", "b")),
}


@pytest.mark.parametrize("name", [*MIXES, *MORE_MIXES])
def test_every_request_is_valid_for_the_model(name):
    from noria.config import FrontendConfig
    from noria.frontend.services.images.request_validation import limits

    allowed = limits(SPEC, FrontendConfig())
    for template in itertools.islice((MIXES | MORE_MIXES)[name](SPEC).templates(3), 300):
        assert template.scheduler in SPEC.schedulers
        for field in ("n", "seed", "width", "height", "inference_steps", "guidance_scale"):
            assert allowed[field].min <= getattr(template, field) <= allowed[field].max
            assert field not in ("width", "height") or getattr(template, field) % allowed[field].multiple == 0


def test_calls_are_those_of_the_compiled_samplers():
    config = {"_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "clip_sample": False}
    rng = random.Random(0)
    templates = {
        template.scheduler: template for template in itertools.islice(mixed(SPEC).templates(rng.randrange(9)), 200)
    }
    assert len(templates) == 4
    for name, template in templates.items():
        assert template.num_calls == compile_sampler(name, config, template.inference_steps).num_calls
