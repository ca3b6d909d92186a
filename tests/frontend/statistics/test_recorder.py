"""Counts of a front end's requests, in metrics and reports; histograms are compared with numpy's."""

import asyncio
import math

import httpx
import msgspec
import numpy as np
import pytest

from frontends import serving
from noria.canary.windows import WINDOW_S
from noria.config import Config, StatisticsConfig, VariableConfig
from noria.errors import ConfigError
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
from noria.frontend.statistics.recorder import StatisticsRecorder, declare_family
from noria.observe.metrics.exposition import exposition
from noria.protocol.routes import Route, Routes, Target
from noria.statistics.distributions import MAX_CATEGORIES, CategoryCounts, Histogram
from noria.statistics.variables import Variable
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from waiting import wait_until

EDGES = (0.0, 0.5, 1.0, 2.0)
ALL = StatisticsConfig(builtin=("prompts", "parameters", "images", "texts"))


def recorder(*variables: VariableConfig, clock=lambda: 1000.0, draw=lambda: 0.5, **settings) -> StatisticsRecorder:
    return StatisticsRecorder(StatisticsConfig(variables=variables, **settings), clock, draw)


def record(statistics, endpoint, *values, version="v", versions=None):
    statistics.record(endpoint, version, statistics.wanted(endpoint), list(values), versions)


def metrics(beginning: str) -> dict[str, float]:
    lines = exposition()[0].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning)}


def test_exported_histograms_agree_with_numpy():
    statistics = recorder(VariableConfig("agreed", kind="scalar", edges=EDGES))
    values = [*np.random.default_rng(1).normal(size=500), *EDGES * 7]  # ties at edges
    for part in np.array_split(values, 3):
        for value in part:
            record(statistics, "numpy", ("agreed", value))
        statistics.flush()
    # `le` is closed on the right and numpy's cells on the left: those of the negated values are ours, from the last.
    negated = np.histogram(-np.array(values), [-np.inf, *(-edge for edge in reversed(EDGES)), np.inf])[0]
    got = metrics('noria_stat_agreed_bucket{endpoint="numpy"')
    assert list(got.values()) == list(np.cumsum(negated[::-1]))
    assert metrics('noria_stat_agreed_sum{endpoint="numpy"')['noria_stat_agreed_sum{endpoint="numpy",version="v"}'] == (
        pytest.approx(sum(values))
    )
    assert list(metrics('noria_stat_agreed_count{endpoint="numpy"').values()) == [len(values)]


def test_values_that_are_no_numbers_are_counted_apart():
    statistics = recorder(VariableConfig("apart", kind="scalar", edges=EDGES))
    record(statistics, "nan", *[("apart", value) for value in (math.nan, math.inf, -math.inf, 1.0)])
    statistics.flush()
    assert list(metrics('noria_stat_apart_count{endpoint="nan"').values()) == [1]
    assert list(metrics('noria_statistics_invalid_total{endpoint="nan"').values()) == [3]


def test_categories_beyond_the_limit_are_other_however_often_counts_are_exported():
    statistics = recorder(VariableConfig("hostile", kind="category"))
    for number in range(MAX_CATEGORIES + 20):
        record(statistics, "names", ("hostile", f'"}}\n{number}' * 100))
        statistics.flush()
    got = metrics("noria_stat_hostile_total")
    assert (len(got), sum(got.values())) == (MAX_CATEGORIES + 1, MAX_CATEGORIES + 20)
    assert got['noria_stat_hostile_total{category="other",endpoint="names",version="v"}'] == 20


def test_counters_and_values_are_summed():
    statistics = recorder(VariableConfig("items", kind="counter"), VariableConfig("price", kind="value"))
    record(statistics, "shop", ("items", 2), ("items", 3), ("price", 4.0), ("price", -1.0))
    statistics.flush()
    assert list(metrics("noria_stat_items_total").values()) == [5]
    assert list(metrics("noria_stat_price_sum").values()) == [3]
    assert list(metrics("noria_stat_price_count").values()) == [2]


def test_a_share_of_the_requests_is_sampled_and_each_for_all_variables_together():
    drawn = iter(np.random.default_rng(2).random(4000))
    statistics = recorder(
        VariableConfig("rarely", kind="category", sampling=0.1),
        VariableConfig("often", kind="category", sampling=0.6),
        draw=lambda: next(drawn),
    )
    wanted = [set(statistics.wanted("sampled")) for _ in range(4000)]
    assert 320 < sum("rarely" in each for each in wanted) < 480
    assert 2250 < sum("often" in each for each in wanted) < 2550
    assert all("often" in each for each in wanted if "rarely" in each)


def test_reports_have_what_was_counted_since_the_last_in_the_window_of_now():
    now = [1000.0]
    statistics = recorder(VariableConfig("reported", kind="scalar", edges=EDGES), clock=lambda: now[0], window_s=10.0)
    statistics.take_reports()
    record(statistics, "a", ("reported", 0.7))
    statistics.flush()
    record(statistics, "a", ("reported", 5.0))
    (report,) = statistics.take_reports()
    assert (tuple(report.series), report.kind, report.window) == (("a", "v", "reported"), "scalar", 100)
    assert report.counts == Histogram(EDGES, [0, 0, 1, 0, 1], 5.7)
    now[0] = 1010.0
    record(statistics, "a", ("reported", 5.0))
    assert [each.window for each in statistics.take_reports()] == [101]
    assert statistics.take_reports() == ()


def test_reports_that_wait_have_a_limited_number_of_cells(monkeypatch):
    monkeypatch.setattr("noria.frontend.statistics.recorder.MAX_CELLS", 300)
    now = [0.0]
    statistics = recorder(VariableConfig("waiting", kind="category"), clock=lambda: now[0], window_s=60.0)
    for _ in range(2):
        statistics.take_reports()
        for number in range(2000):  # 100 names in each window, which is flushed twice
            record(statistics, "a", ("waiting", str(number)))
            if number % 50 == 49:
                statistics.flush()
                now[0] += 30.0
        assert [len(each.counts.counts) for each in statistics.take_reports()] == [100, 100]


def test_without_a_reader_no_reports_are_kept():
    statistics = recorder(VariableConfig("unread", kind="category"))
    record(statistics, "a", ("unread", "x"))
    statistics.flush()
    assert statistics.take_reports() == ()


def test_a_family_has_one_set_of_edges():
    declare_family(Variable("kept", "scalar", (1.0,)))
    with pytest.raises(ConfigError, match=r"since the start it is a scalar with the edges \[1.0\]"):
        recorder(VariableConfig("kept", kind="scalar", edges=(2.0,)))


async def test_what_is_counted_last_is_exported_when_the_front_end_ends():
    statistics = recorder(VariableConfig("last", kind="category"))
    task = asyncio.create_task(statistics.run())
    await asyncio.sleep(0)
    record(statistics, "end", ("last", "x"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert list(metrics("noria_stat_last_total").values()) == [1]


def test_the_first_value_of_a_request_is_counted_for_the_judge():
    targets = [Target(number, f"tiny@{number}", "sha256:0", str(number), ()) for number in (1, 2)]
    chooser = VersionChooser(lambda *_: FAKE_MODEL, lambda: 100 * WINDOW_S)
    chooser.follow(Routes(1, (Route("tiny", targets[0], targets[1], 0.5),)))
    statistics = recorder(
        VariableConfig("guarded", kind="scalar", edges=EDGES), VariableConfig("named", kind="category")
    )
    control = msgspec.structs.replace(FAKE_MODEL, name="tiny", fingerprint="1")
    for number in range(200):
        with RequestVersions(str(number)) as versions:
            chooser.choose(control, versions)
            guarded = ("guarded", 0.7), ("guarded", 5.0), ("guarded", math.nan)
            record(statistics, "tiny", *guarded, versions=versions)
            versions.record("tiny", "ok", seconds=1.0, shape=lambda: "")
            record(
                statistics, "endpoint", ("named", "late"), versions=versions
            )  # code of an endpoint, after the model has answered
    (window,) = chooser.take_ended()
    for arm in (window.control, window.canary):
        assert arm.cells == {"guarded": {"1": arm.n}, "named": {"late": arm.n}}
    assert window.control.n + window.canary.n == 200


def test_a_server_counts_prompts_parameters_images_and_texts(folder):
    models = (FAKE_MODEL, FAKE_ENCODER)
    with (
        FakeEngine(f"ipc://{folder}/statistics", models=models, load=FAKE_LOAD) as engine,
        serving(Config(statistics=ALL), engine) as (url, _),
        httpx.Client(base_url=url) as web,
    ):
        wait_until(lambda: web.get("/readyz").status_code == 200)

        def counted(line: str, page: str) -> float:
            found = [each for each in page.splitlines() if each.startswith(f"noria_stat_{line}")]
            return sum(float(each.rpartition(" ")[2]) for each in found)

        before = web.get("/metrics").text  # other tests of this process have counted, too

        page = before

        def value(line: str) -> float:
            return counted(line, page) - counted(line, before)

        def new_value(line: str) -> float:
            nonlocal page
            page = web.get("/metrics").text
            return value(line)

        name, version = FAKE_MODEL.name, FAKE_MODEL.fingerprint
        body = {"prompt": "ein rotes Haus", "n": 2, "seed": 1, "inference_steps": 3}
        assert web.post("/t2i", json=body).status_code == 200
        texts = {"input": ["a red cat", "кот"], "model": FAKE_ENCODER.name}
        assert web.post("/v1/embeddings", json=texts).status_code == 200
        assert web.post("/embed", json={"inputs": ["a"], "normalize": False}).status_code == 200

        labels = f'endpoint="{name}",version="{version}"'
        wait_until(
            lambda: new_value(f"prompt_words_count{{{labels}") and value(f"image_brightness_count{{{labels}") == 2
        )
        page = web.get("/metrics").text  # the one before may be of the middle of an export
        assert value(f"prompt_chars_sum{{{labels}") == 14
        assert value(f"inference_steps_sum{{{labels}") == 3
        size = f"{FAKE_MODEL.default_width_px}x{FAKE_MODEL.default_height_px}"
        assert value(f'image_size_total{{category="{size}",{labels}') == 1
        assert value(f"image_brightness_count{{{labels}") == 2
        assert value(f"image_entropy_sum{{{labels}") == 0  # images of one colour
        labels = f'endpoint="{FAKE_ENCODER.name}",version="{FAKE_ENCODER.fingerprint}"'
        wait_until(lambda: new_value(f"text_tokens_count{{{labels}") == 3)
        page = web.get("/metrics").text
        assert value(f"text_tokens_sum{{{labels}") == 5 + 3 + 3
        assert value(f"text_non_latin_ratio_sum{{{labels}") == 1
        assert value(f"embedding_norm_count{{{labels}") == 1


def test_reports_have_the_categories_that_the_metrics_call_other():
    statistics = recorder(VariableConfig("alike", kind="category"))
    statistics.take_reports()
    for number in range(MAX_CATEGORIES + 5):
        record(statistics, "a", ("alike", str(number)))
        statistics.flush()
    (report,) = statistics.take_reports()
    assert isinstance(report.counts, CategoryCounts)
    assert (len(report.counts.counts), report.counts.other) == (MAX_CATEGORIES + 5, 0)
