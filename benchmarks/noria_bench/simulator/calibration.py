"""Compares a simulation with a measured run of the real server on the same trace.

The run's folder has `trace.csv`, a trace with the measured `latency_s` of each request as another column (empty: it was
not served), and `costs.json`, the costs of the device as its engine has saved them.
"""

import csv
import pathlib

from noria_bench.simulator.outcome import Outcome
from noria_bench.simulator.workload import SimulateError

TRACE, COSTS = "trace.csv", "costs.json"


def read_measured(folder: pathlib.Path) -> Outcome:
    """Return the measured latencies. Raises SimulateError; other columns are checked by `trace.read_trace`."""
    file, outcome = folder / TRACE, Outcome()
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            if "latency_s" not in (reader.fieldnames or ()):
                raise SimulateError(f"{file} has no column latency_s, the measured latency of each request")
            for row in reader:
                text = row["latency_s"] or ""
                try:
                    latency_s = float(text or "nan")
                except ValueError:
                    latency_s = -1.0
                if latency_s < 0.0 or latency_s == float("inf"):
                    raise SimulateError(
                        f"{file}, line {reader.line_num}: latency_s is {text[:40]!r}; it must be seconds, or empty"
                    )
                if text:
                    outcome.latencies_s.append(latency_s)
                else:
                    outcome.unserved["measured"] += 1
    except OSError as error:
        raise SimulateError(f"{file} cannot be read: {error.strerror}") from error
    if not len(outcome.latencies_s):
        raise SimulateError(f"{file} has no latency_s: no request was served")
    return outcome


def compare(measured: Outcome, simulated: Outcome) -> str:
    """Return a table of quantiles, with the simulation's difference."""
    lines = ["| quantile | measured (s) | simulated (s) | difference |", "|---|---|---|---|"]
    for share in (0.5, 0.9, 0.99):
        known_s, found_s = measured.quantile_s(share), simulated.quantile_s(share)
        difference = found_s / known_s - 1 if known_s else 0.0
        lines.append(f"| p{100 * share:g} | {known_s:.3f} | {found_s:.3f} | {difference:+.1%} |")
    lines.append(f"| served | {measured.served_share:.3f} | {simulated.served_share:.3f} | |")
    return "\n".join(lines)
