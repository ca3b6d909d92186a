"""The provenance of runs as text: machine, commit, versions, command, time and traffic. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from noria_bench.measurement.runs import BenchRun, Traffic

_SPECIAL_MACHINE_FIELDS = ("cpu", "cores", "memory_bytes", "load_average_before")


def provenance_lines(runs: Sequence[BenchRun]) -> list[str]:
    """A line for each combination of machine, commit, command and model; a warning if machines or commits differ."""
    found: dict[str, list[BenchRun]] = {}
    for run in runs:
        found.setdefault(_origin_text(run), []).append(run)
    lines = [f"{origin}; {_time_text(same_origin)}." for origin, same_origin in found.items()]
    if len({(str(run.provenance.get("machine", {}).get("cpu")), run.provenance.get("commit")) for run in runs}) > 1:
        lines.append("These runs are of different machines or commits: their rows are not comparable.")
    return lines


def traffic_lines(runs: Sequence[BenchRun]) -> list[str]:
    """Return a line for each kind of traffic that was sent."""
    return list(dict.fromkeys(_traffic_text(run.traffic) for run in runs))


def result_line(result: Mapping[str, Any]) -> str:
    """Machine, commit, day and load of a bench whose result is one JSON document."""
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {noria_text(result)}, "
        f"{result['date'][:10]}; load before {machine['load_average_before']:.1f}."
    )


def noria_text(provenance: Mapping[str, Any]) -> str:
    """Return the version of Noria, and its commit if it ran from a clone."""
    commit = provenance.get("commit")
    return f"noria {provenance.get('noria', '?')}" + (f" at {commit}" if commit else "")


def _origin_text(run: BenchRun) -> str:
    provenance, machine = run.provenance, run.provenance.get("machine", {})
    versions = ", ".join(f"{name} {version}" for name, version in provenance.get("versions", {}).items())
    parts = [
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unnamed CPU')}",
        _memory_text(machine),
        *(f"{name} {value}" for name, value in machine.items() if name not in _SPECIAL_MACHINE_FIELDS and value),
        noria_text(provenance),
        f"Python {provenance.get('python', '?')}",
        versions,
        f"model {run.model.get('name', '?')}",
        f"command: {provenance.get('command', '?')}",
    ]
    return "; ".join(part for part in parts if part)


def _memory_text(machine: Mapping[str, Any]) -> str:
    memory_bytes = machine.get("memory_bytes")
    return f"{memory_bytes / 2**30:.1f} GiB" if isinstance(memory_bytes, int | float) else ""


def _time_text(runs: Sequence[BenchRun]) -> str:
    dates = [_format_minute(str(run.provenance.get("date", "?"))) for run in runs]
    loads = [run.provenance.get("machine", {}).get("load_average_before") for run in runs]
    numeric_loads = [load for load in loads if isinstance(load, int | float)]
    load = f"; load before {_format_range(f'{load:.2f}' for load in numeric_loads)}" if numeric_loads else ""
    return _format_range(dates) + load


def _format_minute(date: str) -> str:
    return date[:16].replace("T", " ") + (" UTC" if date.endswith("+00:00") else "")


def _format_range(values: Iterable[str]) -> str:
    ordered = sorted(values)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def _traffic_text(traffic: Traffic) -> str:
    if traffic.kind == "closed":
        has_several_users = traffic.num_users != 1
        ramp = (
            f", one more every {traffic.spawn_interval_s:.3g} s"
            if traffic.spawn_interval_s and has_several_users
            else ""
        )
        users = f"{traffic.num_users} users{ramp}" if has_several_users else "1 user"
        description = f"Closed: {users}; each sends the next request when answered"
    else:
        work = "" if traffic.rows_per_s is None else f", {traffic.rows_per_s:.0f} rows of work per second"
        if traffic.load_percent is not None:
            work += f" ({traffic.load_percent} % of Noria's capacity)"
        description = f"Open: {traffic.arrivals} arrivals{work}; latency counts from the intended start"
    return f"{description}; {traffic.mix} requests, {traffic.seconds:.4g} s per run, seed {traffic.seed}."
