"""Windows of several front ends, their comparison with a reference, and their limits."""

import msgspec
import numpy as np
import pytest

from noria.statistics import windows as windows_module
from noria.statistics.distributions import CategoryCounts, Histogram
from noria.statistics.windows import (
    NUM_CURRENT,
    NUM_WINDOWS,
    CountsReport,
    Reference,
    SeriesKey,
    Snapshot,
    StatisticsHistory,
)

KEY = SeriesKey("t2i", "shapes@1", "prompt_chars")
EDGES = tuple(float(edge) for edge in np.arange(-1.5, 2, 0.5))


def histogram(values=(), edges=EDGES) -> Histogram:
    counted = Histogram(edges)
    for value in values:
        counted.record(float(value))
    return counted


def report(window, counts, key=KEY, kind="scalar") -> CountsReport:
    return CountsReport(key, kind, window, counts)


def reference(counts, version="shapes@1", fingerprint="abc", endpoint="t2i") -> Reference:
    return Reference(endpoint, version, fingerprint, "prompt_chars", counts, 1.0, "me", "")


def test_windows_of_two_front_ends_are_merged():
    first, second = np.random.default_rng(1).normal(size=(2, 500))
    history = StatisticsHistory(300)
    history.add([report(7, histogram(first))])
    history.add([report(7, histogram(second)), report(8, histogram([0.0]))])
    (series,) = history.snapshot(8, []).series
    assert {window: each.counts for window, each in series.windows.items()} == {
        7: histogram([*first, *second]).counts,
        8: histogram([0.0]).counts,
    }


def test_the_current_windows_are_compared_with_the_references_of_their_version():
    normal = np.random.default_rng(2).normal(size=5000)
    history = StatisticsHistory(300)
    history.add(report(window, histogram(normal[:100] + 3)) for window in range(5))  # long ago
    history.add(
        report(20 + window, histogram(normal[100 * window : 100 * window + 100])) for window in range(NUM_CURRENT)
    )
    now = 20 + NUM_CURRENT - 1
    (series,) = history.snapshot(now, [reference(histogram(normal))]).series
    assert series.drift.num_current == 100 * NUM_CURRENT
    assert abs(series.drift.psi) < 0.02
    (series,) = history.snapshot(now, [reference(histogram(normal + 1)), reference(histogram(normal))]).series
    assert abs(series.drift.psi) < 0.02  # the last one holds
    (series,) = history.snapshot(now, [reference(histogram(normal + 1))]).series
    assert series.drift.psi > 0.5
    drifts = [drift for _, _, drift in series.over_time()]
    assert [drift.psi for drift in drifts[:5]].count(None) == 1  # the PSI of 100 values
    for other in ({"version": "shapes@2"}, {"endpoint": "other"}):
        (series,) = history.snapshot(now, [reference(histogram(normal), **other)]).series
        assert (series.reference, series.drift) == (None, None)


def test_a_model_of_the_configuration_has_the_reference_of_its_fingerprint():
    history = StatisticsHistory(300)
    history.add([report(1, histogram(), SeriesKey("t2i", "abc", "prompt_chars"))])
    (series,) = history.snapshot(1, [reference(histogram())]).series
    assert series.reference is not None


def test_a_reference_with_other_edges_or_of_another_kind_compares_nothing():
    history = StatisticsHistory(300)
    history.add([report(1, histogram(np.zeros(300)))])
    for counts in (histogram(np.zeros(300), (1.0,)), CategoryCounts(counts={"a": 300})):
        (series,) = history.snapshot(1, [reference(counts)]).series
        assert series.drift is None


def test_a_value_and_a_counter_are_never_compared():
    history = StatisticsHistory(300)
    history.add([report(1, histogram(np.zeros(300)), kind="value")])
    assert history.snapshot(1, [reference(histogram(np.zeros(300)))]).series[0].reference is None


@pytest.mark.parametrize("window", [2, 3])
def test_a_variable_with_other_edges_begins_anew(window):
    history = StatisticsHistory(300)
    history.add([report(1, histogram([0])), report(2, histogram([0])), report(window, histogram([0], (1.0,)))])
    assert history.snapshot(3, []).series[0].windows == {window: histogram([0], (1.0,))}


def test_a_snapshot_is_restored_as_it_was():
    history = StatisticsHistory(300)
    categories = CategoryCounts(counts={"a": 2})
    history.add([report(1, histogram([0.0, float("nan")]))])
    history.add([report(1, categories, KEY._replace(variable="scheduler"), "category")])
    snapshot = history.snapshot(1, [reference(histogram(np.zeros(300)))])
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
    assert again == snapshot
    restored = StatisticsHistory(300)
    restored.restore(again)
    restored.add([report(1, histogram([0.0]))])
    assert restored.snapshot(1, []).series[0].windows[1].total == 2
    other = StatisticsHistory(60)
    other.restore(again)
    assert other.snapshot(1, []).series == []


def test_old_windows_and_too_many_series_are_forgotten(monkeypatch):
    monkeypatch.setattr(windows_module, "MAX_SERIES", 3)
    history = StatisticsHistory(300)
    history.add(report(window, histogram([0])) for window in range(2 * NUM_WINDOWS))
    now = 2 * NUM_WINDOWS - 1
    (series,) = history.snapshot(now, []).series
    assert (min(series.windows), len(series.windows)) == (NUM_WINDOWS, NUM_WINDOWS)
    history.add(report(now - index, histogram([0]), KEY._replace(version=f"v{index}")) for index in range(5))
    assert {each.key.version for each in history.snapshot(now, []).series} == {"shapes@1", "v0", "v1"}


def test_the_oldest_windows_are_dropped_first_when_there_are_too_many_cells(monkeypatch):
    monkeypatch.setattr(windows_module, "MAX_CELLS", 5 * (len(EDGES) + 1))
    history = StatisticsHistory(300)
    history.add(report(window, histogram([0])) for window in range(20))
    history.add([report(3, histogram([0]), KEY._replace(version="old"))])
    (series,) = history.snapshot(19, []).series
    assert list(series.windows) == [15, 16, 17, 18, 19]


def test_resampled_data_raises_the_psi_over_its_threshold_in_less_than_1_percent_and_a_shift_does():
    """Check the rates in docs/statistics.md. 2,000 windows of 500 values, a reference of 5,000."""
    draw = np.random.default_rng(3)
    prompts = draw.gamma(3.0, 20.0, 20_000)
    edges = (10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 160.0)
    cells = [-np.inf, *edges, np.inf]
    chosen = Histogram(edges, [int(count) for count in np.histogram(draw.choice(prompts, 5000), cells)[0]])

    def psi(values):
        counts = Histogram(edges, [int(count) for count in np.histogram(values, cells)[0]])
        return windows_module.compare(reference(chosen), counts).psi

    assert sum(psi(draw.choice(prompts, 500)) > 0.1 for _ in range(2000)) == 0
    assert sum(psi(draw.choice(prompts, 200)) > 0.1 for _ in range(2000)) < 20
    assert all(psi(draw.choice(prompts, 500) * 1.6) > 0.1 for _ in range(200))


def test_many_categories_of_several_front_ends_have_no_drift_before_and_after_a_restart():
    rng = np.random.default_rng(3)
    key = KEY._replace(variable="topic")

    def counts(num) -> CategoryCounts:
        counted = CategoryCounts()
        for k in rng.integers(100, size=num):
            counted.record(f"t{k}")
        return counted

    history = StatisticsHistory(300)
    chosen = msgspec.structs.replace(reference(counts(5000)), variable="topic")
    for window in range(4):
        history.add(report(window, counts(100), key, "category") for _ in range(5))
        snapshot = msgspec.json.decode(msgspec.json.encode(history.snapshot(window, [chosen])), type=Snapshot)
        history = StatisticsHistory(300)
        history.restore(snapshot)
    (series,) = snapshot.series
    assert abs(series.drift.psi) < 0.05 and series.drift.unseen == {}
    assert [abs(drift.psi) < 0.1 for _, _, drift in series.over_time()] == [True] * 4
