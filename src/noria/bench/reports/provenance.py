"""Where runs come from, in words: the machine, the commit, the versions, the command, the hour, the traffic. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from noria.bench.runs import BenchRun, Traffic

_TOLD_APART = ("cpu", "cores", "memory_bytes", "load_average_before")


def provenance_of(runs: Sequence[BenchRun]) -> list[str]:
    """A line for each machine, commit, command and model that the runs have: more than one line, and they cannot be compared."""
    found: dict[str, list[BenchRun]] = {}
    for run in runs:
        found.setdefault(_origin(run), []).append(run)
    lines = [f"{origin}; {_when(alike)}." for origin, alike in found.items()]
    if len({(str(run.about.get("machine", {}).get("cpu")), run.about.get("commit")) for run in runs}) > 1:
        lines.append("These runs are of different machines or commits: rows of different lines cannot be compared.")
    return lines


def traffic_of(runs: Sequence[BenchRun]) -> list[str]:
    """What was sent, a line for each kind of traffic."""
    return list(dict.fromkeys(_traffic(run.traffic) for run in runs))


def _origin(run: BenchRun) -> str:
    about, machine = run.about, run.about.get("machine", {})
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    parts = [
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unnamed CPU')}",
        _memory(machine),
        *(f"{name} {value}" for name, value in machine.items() if name not in _TOLD_APART and value),
        f"noria {about.get('noria', '?')} at {about.get('commit') or 'no commit'}",
        f"Python {about.get('python', '?')}",
        versions,
        f"model {run.model.get('name', '?')}",
        f"command: {about.get('command', '?')}",
    ]
    return "; ".join(part for part in parts if part)


def _memory(machine: Mapping[str, Any]) -> str:
    held = machine.get("memory_bytes")
    return f"{held / 2**30:.1f} GiB" if isinstance(held, int | float) else ""


def _when(runs: Sequence[BenchRun]) -> str:
    dates = [_minute(str(run.about.get("date", "?"))) for run in runs]
    loads = [run.about.get("machine", {}).get("load_average_before") for run in runs]
    known = [load for load in loads if isinstance(load, int | float)]
    load = f"; load before {_span(f'{load:.2f}' for load in known)}" if known else ""
    return _span(dates) + load


def _minute(date: str) -> str:
    return date[:16].replace("T", " ") + (" UTC" if date.endswith("+00:00") else "")


def _span(values: Iterable[str]) -> str:
    ordered = sorted(values)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def _traffic(traffic: Traffic) -> str:
    if traffic.kind == "closed":
        several = traffic.users != 1
        ramp = f", one more every {traffic.user_every_s:.3g} s" if traffic.user_every_s and several else ""
        users = f"{traffic.users} users{ramp}, who each ask" if several else "1 user, who asks"
        sent = f"Closed: {users} again when answered"
    else:
        work = "" if traffic.rows_per_s is None else f", {traffic.rows_per_s:.0f} rows of work a second"
        sent = f"Open: {traffic.arrivals} arrivals{work}; latency counts from the intended start"
    return f"{sent}; {traffic.mix} requests, {traffic.seconds:.4g} s a run, seed {traffic.seed}."
