"""Runs the scenarios: how often a good canary is rolled back, how soon a bad one; and drift measures on resamples."""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from noria.statistics.distributions import Histogram
from noria.statistics.drift import chi_square, corrected_psi, kolmogorov_smirnov, psi
from noria_bench.canary.options import CanaryOptions
from noria_bench.canary.plot import plot_canaries
from noria_bench.canary.simulation import NUM_REQUESTS, SETTINGS, Run, Scenario, simulate
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.reports.result_report import median
from noria_bench.reports.table import Table, format_number, format_share
from noria_bench.running import write_json

BEYOND = NUM_REQUESTS // 100  # requests beyond the minimum within which a bad canary shall be found

HARMLESS = (
    Scenario("A/A"),
    Scenario("A/A, both rates of errors and rejections move by up to 5 points", drift=0.05),
    Scenario("A/A, windows slow the canary by σ 0.3", arm_noise=0.3),
    Scenario("A/A, sticky keys, the first request of each", keys="first"),
    Scenario("A/A, sticky keys, every request", keys="request"),
)
HARMFUL = (
    Scenario("errors 20 %", error_rate=0.2),
    Scenario("errors 10 %", error_rate=0.1),
    Scenario("errors 5 %", error_rate=0.05),
    Scenario("rejections 50 %", rejection_rate=0.5),
    Scenario("rejections 20 %", rejection_rate=0.2),
    Scenario("rejections 10 %", rejection_rate=0.1),
    Scenario("slower × 3", slowdown=3.0),
    Scenario("slower × 2", slowdown=2.0),
    Scenario("slower × 1.5", slowdown=1.5),
    Scenario("output + 1 σ", shift=1.0),
    Scenario("output + 0.5 σ", shift=0.5),
)
_NUM_PLOTTED = 12
_NUM_REFERENCE, _NUM_CELLS = 5_000, 10


def main(options: CanaryOptions, folder: pathlib.Path) -> int:
    """Simulate `num_runs` A/A canaries and a quarter as many of each other kind; print tables, write JSON and a plot.

    Returns 1 if more than 5 % of the plain A/A canaries were rolled back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = measure(options.num_runs, options.seed)
    plot_canaries(result, folder / "canary.svg")
    for scenario in result["scenarios"]:
        del scenario["trajectories"]
    write_json(result, folder / "canary.json")
    print("\n\n".join(table.markdown() for table in tables(result)))
    return int(result["scenarios"][0]["rolled_back"] > 0.05 * options.num_runs)


def measure(num_runs: int, seed: int) -> dict[str, Any]:
    """The results as one JSON-ready document."""
    header, scenarios = collect_provenance(), []
    for scenario in (*HARMLESS, *HARMFUL):
        num = num_runs if scenario is HARMLESS[0] else max(1, num_runs // 4)
        scenarios.append(summary(scenario, [simulate(scenario, seed + k) for k in range(num)]))
        print(f"{scenario.name}: {scenarios[-1]['rolled_back']} of {num} rolled back", flush=True)
    return {
        **header,
        "bench": "canary",
        "seed": seed,
        "settings": msgspec.to_builtins(SETTINGS),
        "scenarios": scenarios,
        "drift": [drift_rates(num, shift, 4 * num_runs, seed) for num in (100, 200, 500) for shift in (0.0, 0.25, 0.5)],
    }


def summary(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    """The counts of one scenario."""
    bad = [run for run in runs if run.end == "rolled_back"]
    promoted = [run for run in runs if run.end == "promoted"]
    return {
        "name": scenario.name,
        "runs": len(runs),
        "rolled_back": len(bad),
        "promoted": len(promoted),
        "waiting": len(runs) - len(bad) - len(promoted),
        "rolled_back_in_time": sum(run.num_beyond <= BEYOND for run in bad),
        "responses_until_rolled_back": sorted(run.num_canary for run in bad),
        "z_test_fails": sum(run.z_test_fails for run in runs),
        "largest_e": max(run.max_e for run in runs),
        "trajectories": [run.trajectory for run in runs[:_NUM_PLOTTED]],
    }


def drift_rates(num: int, shift: float, num_resamples: int, seed: int) -> dict[str, Any]:
    """How often drift measures alarm on `num` values that are shifted by so many standard deviations."""
    normal, rng = statistics.NormalDist(), np.random.default_rng(seed)
    edges = tuple(normal.inv_cdf(k / _NUM_CELLS) for k in range(1, _NUM_CELLS))
    cumulative = np.array([0.0, *(normal.cdf(edge - shift) for edge in edges), 1.0])
    reference_counts = rng.multinomial(_NUM_REFERENCE, [1 / _NUM_CELLS] * _NUM_CELLS, num_resamples)
    current_counts = rng.multinomial(num, np.diff(cumulative), num_resamples)
    alarms = dict.fromkeys(("psi", "corrected_psi", "ks", "chi_square"), 0)
    for counts in zip(reference_counts.tolist(), current_counts.tolist(), strict=True):
        reference, current = (Histogram(edges, side) for side in counts)
        cells = reference.cells(), current.cells()
        alarms["psi"] += psi(*cells) > 0.1
        alarms["corrected_psi"] += corrected_psi(*cells) > 0.1
        alarms["ks"] += kolmogorov_smirnov(reference, current).p_value < 0.05
        alarms["chi_square"] += chi_square(*cells).p_value < 0.05
    return {"values": num, "shift": shift, "resamples": num_resamples, "alarms": alarms}


def tables(result: dict[str, Any]) -> list[Table]:
    """The results as tables."""
    return [_canary_table(result["scenarios"]), _drift_table(result["drift"])]


def _canary_table(scenarios: Sequence[dict[str, Any]]) -> Table:
    def share(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda each: format_share(each[name] / each["runs"])

    def p95(found: Sequence[int]) -> float | None:
        return found[int(0.95 * len(found))] if len(found) >= 20 else None

    notes = (
        "median, p95: responses of the canary until it was rolled back.",
        f"in time: rolled back within {BEYOND} requests (1 % of the ramp) of both arms beyond the minimum of "
        f"{SETTINGS.min_responses} responses, of all runs.",
        "z-test: would have rolled back, by a one-sided test of the error rates at 5 % after each window.",
    )
    return Table.of(
        "Canaries",
        scenarios,
        ("canary", lambda each: each["name"]),
        ("runs", lambda each: str(each["runs"])),
        ("rolled back", share("rolled_back")),
        ("promoted", share("promoted")),
        ("z-test at every look", share("z_test_fails")),
        ("median", lambda each: format_number(median(each["responses_until_rolled_back"]))),
        ("p95", lambda each: format_number(p95(each["responses_until_rolled_back"]))),
        ("in time", share("rolled_back_in_time")),
        notes=notes,
    )


def _drift_table(rates: Sequence[dict[str, Any]]) -> Table:
    columns = ("values, shift", "PSI above 0.1", "corrected PSI above 0.1", "KS below 5 %", "chi-square below 5 %")
    rows = tuple(
        (
            f"{each['values']}, {each['shift']:g} σ" if each["shift"] else f"{each['values']}, none",
            *(format_share(alarms / each["resamples"]) for alarms in each["alarms"].values()),
        )
        for each in rates
    )
    notes = (f"{rates[0]['resamples']} resamples of {_NUM_CELLS} cells beside a reference of {_NUM_REFERENCE} values.",)
    return Table("Drift", columns, rows, notes)
