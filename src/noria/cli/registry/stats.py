"""`noria stats`: what a server counts, how far it drifts, and what it is compared with."""

import argparse
import pathlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    add_why_flag,
    as_json,
    change_of,
    format_table,
    format_time,
    registry_of,
)
from noria.errors import RegistryError, did_you_mean, short_list, short_repr
from noria.observe.terminal_text import escape_for_terminal
from noria.statistics.distributions import Counts, Histogram
from noria.statistics.drift import MIN_SAMPLES
from noria.statistics.values import TEXT_COLUMNS
from noria.statistics.variables import BUILT_IN_VARIABLES, Variable
from noria.statistics.windows import NO_VERSION, Series, Snapshot

if TYPE_CHECKING:
    from noria.registry.statistics.baselines import BaselineStore

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    stats = commands.add_parser("stats", help="print distributions of requests and results, and choose references")
    subcommands = stats.add_subparsers(metavar="COMMAND", required=True)
    show = add_command(subcommands, "show", run_show, "[ENDPOINT]", "print what is counted, and how far it drifts")
    show.add_argument("endpoint", metavar="ENDPOINT", nargs="?", help="only this one")
    baseline = add_command(
        subcommands, "baseline", run_baseline, "ENDPOINT", "choose what a version is compared with from now on"
    )
    baseline.add_argument("endpoint", metavar="ENDPOINT", help="the name that requests give as model, or an endpoint")
    baseline.add_argument("--version", metavar="VERSION", help="MODEL@NUMBER; by default the one that was counted last")
    baseline.add_argument(
        "--variable", metavar="NAME", action="append", default=[], help="only this one; may be repeated"
    )
    baseline.add_argument(
        "--last", metavar="TIME", type=argument_type(_seconds), help="what was counted in this time, such as 6h (all)"
    )
    baseline.add_argument(
        "--from", metavar="FILE", dest="file", type=pathlib.Path, help="training data, .csv or JSON, instead"
    )
    baseline.add_argument("--delete", action="store_true", help="compare with nothing from now on")
    for parser in (show, baseline):
        add_json_flag(parser)
        add_registry_settings(parser)
    add_why_flag(baseline)
    return [show, baseline]


def run_show(arguments: argparse.Namespace) -> int:
    """Print the variables of each endpoint and version, and their drift from the reference.

    The values are those of the last 12 windows of the server that runs with this data folder, an hour by default.
    """
    snapshot = _snapshot(arguments)
    found = [] if snapshot is None else _of_endpoint(snapshot, arguments.endpoint)
    if arguments.json:
        for series in found:
            print(as_json({"current": _current(snapshot, series), "series": series}))
        return 0
    if not found:
        print("nothing was counted; let a server count: --statistics-builtin prompts,parameters,images,texts")
        return 0
    rows = [
        (
            series.key.endpoint,
            series.key.version,
            series.key.variable,
            series.kind,
            *_describe(_current(snapshot, series)),
            _psi(series),
            "" if series.reference is None else format_time(series.reference.at),
        )
        for series in found
    ]
    print(format_table(("endpoint", "version", "variable", "kind", "values", "", "PSI", "reference of"), rows))
    return 0


def run_baseline(arguments: argparse.Namespace) -> int:
    """Let what was counted, or training data, be the reference distribution of a version at an endpoint.

    It is stored with the version in the registry. A running server compares with it within seconds. Variables with
    fewer than 200 values are left out. Columns of a file are variables by their names; `prompt` and `text` are turned
    into the built-in variables of prompts and texts.
    """
    from noria.registry.statistics.baselines import BaselineStore

    unused: list[str] = []
    snapshot = _snapshot(arguments)
    label = arguments.version or _version_counted_last(snapshot, arguments.endpoint)
    with registry_of(arguments) as engine:
        store = BaselineStore(engine)
        version = store.version_named(label)
        labels = (version.name, version.fingerprint)
        known = [] if snapshot is None else _of_endpoint(snapshot, arguments.endpoint)
        of_version = [series for series in known if series.key.version in labels and series.has_distribution]
        if arguments.delete:
            counts: dict[str, Counts | None] = dict.fromkeys(arguments.variable or _referenced(store, arguments, label))
        elif arguments.file is not None:
            counts, unused = _from_file(arguments.file, _variables(known), arguments.variable)
        else:
            counts = _from_windows(snapshot, of_version, arguments)
        store.set(arguments.endpoint, version, counts, change_of(arguments))
    if arguments.json:
        print(as_json({"endpoint": arguments.endpoint, "version": version.name, "counts": counts}))
        return 0
    verb = "is compared with nothing in" if arguments.delete else "has a reference of"
    sizes = ", ".join(name if each is None else f"{name} ({each.total} values)" for name, each in counts.items())
    rest = f"; columns that are no variables, or have fewer than 200 values: {short_list(unused)}" if unused else ""
    print(escape_for_terminal(f"{version.name} at {arguments.endpoint} {verb} {sizes}{rest}"))
    return 0


def _referenced(store: "BaselineStore", arguments: argparse.Namespace, version: str) -> list[str]:
    found = [
        reference.variable
        for reference in store.all()
        if reference.endpoint == arguments.endpoint and version in (reference.version, reference.fingerprint)
    ]
    if not found:
        raise RegistryError(
            f"{version} has no reference at {short_repr(arguments.endpoint)}, so there is none to delete."
        )
    return found


def _snapshot(arguments: argparse.Namespace) -> Snapshot | None:
    from noria.registry.statistics.file import read_statistics, statistics_file

    return read_statistics(statistics_file(config_from(arguments)))


def _of_endpoint(snapshot: Snapshot, endpoint: str | None) -> list[Series]:
    """Return the series of an endpoint, or of all. Raises RegistryError: nothing was counted there."""
    found = [series for series in snapshot.series if endpoint in (None, series.key.endpoint)]
    if endpoint is not None and not found:
        known = sorted({series.key.endpoint for series in snapshot.series})
        raise RegistryError(
            f"nothing was counted at {short_repr(endpoint)}.{did_you_mean(endpoint, known)} Counted was "
            f"{', '.join(known) or 'nothing at all'}."
        )
    return found


def _version_counted_last(snapshot: Snapshot | None, endpoint: str) -> str:

    if snapshot is None:
        raise RegistryError(
            "nothing was counted yet. Let a server with this data folder count first (statistics.builtin), or give "
            "--version and --from."
        )
    found = [series for series in _of_endpoint(snapshot, endpoint) if series.key.version != NO_VERSION]
    if not found:
        raise RegistryError(
            f"what {short_repr(endpoint)} has counted belongs to no version, and a reference belongs to one: no model "
            "was asked, as when preprocess of its code returns None. Let it return inputs for its model."
        )
    return max(found, key=lambda series: max(series.windows)).key.version


def _variables(known: list[Series]) -> Mapping[str, Variable]:
    """Return the variables that can have a reference, as they are counted, else as they are built in."""
    variables = dict(BUILT_IN_VARIABLES)
    for series in known:
        if series.has_distribution:
            counts = series.windows[max(series.windows)]
            edges = counts.edges if isinstance(counts, Histogram) else ()
            variables[series.key.variable] = Variable(series.key.variable, series.kind, edges)
    return variables


def _from_file(
    file: pathlib.Path, variables: Mapping[str, Variable], only: list[str]
) -> tuple[dict[str, Counts | None], list[str]]:
    """Return the references, and the columns that are not used: no variables, or with too few values."""
    from noria.registry.statistics.training_data import count_columns, read_columns

    columns = read_columns(file)
    counts = count_columns(columns, variables)
    missing = [name for name in only if name not in counts and name not in columns]
    if missing:
        raise RegistryError(
            f"{file} has no column {short_repr(missing[0])}.{did_you_mean(missing[0], columns)} It has the columns "
            f"{short_list(columns) or 'none'}."
        )
    if not counts:
        raise RegistryError(
            f"{file} has the columns {short_list(columns) or 'none'}, none of which is a variable. Variables are "
            f"{', '.join(variables)}; prompt and text are turned into some of these."
        )
    kept = _enough(counts, only)
    unused = [name for name in columns if name not in kept and name not in TEXT_COLUMNS]
    return kept, [] if only else unused


def _from_windows(
    snapshot: Snapshot | None, of_version: list[Series], arguments: argparse.Namespace
) -> dict[str, Counts | None]:
    if snapshot is None or not of_version:
        raise RegistryError(
            f"nothing was counted of {arguments.version} at {arguments.endpoint}. See noria stats show "
            f"{arguments.endpoint}, or give --from FILE."
        )
    last = int(time.time() / snapshot.window_s)
    first = 0 if arguments.last is None else last - int(arguments.last / snapshot.window_s)
    counts = {series.key.variable: series.between(first, last) for series in of_version}
    return _enough({name: each for name, each in counts.items() if each is not None}, arguments.variable)


def _enough(counts: Mapping[str, Counts], only: list[str]) -> dict[str, Counts | None]:
    """Return those with enough values. Raises RegistryError: none has, or one that is named has not."""
    for name in only:
        if name not in counts:
            raise RegistryError(
                f"there are no values of {short_repr(name)}.{did_you_mean(name, counts)} There are values of "
                f"{', '.join(counts) or 'nothing'}."
            )
    chosen = {name: each for name, each in counts.items() if not only or name in only}
    kept: dict[str, Counts | None] = {name: each for name, each in chosen.items() if each.total >= MIN_SAMPLES}
    if not kept or (only and len(kept) < len(chosen)):
        sizes = ", ".join(f"{name} has {each.total}" for name, each in chosen.items()) or "there are none"
        raise RegistryError(f"a reference needs {MIN_SAMPLES} values or more; {sizes}. Count for longer.")
    return kept


def _current(snapshot: Snapshot | None, series: Series) -> Counts | None:
    return None if snapshot is None else series.current(int(time.time() / snapshot.window_s))


def _describe(counts: Counts | None) -> tuple[str, str]:
    """Return the number of values, and their mean or the most frequent categories."""
    if counts is None or not counts.total:
        return "0", ""
    if isinstance(counts, Histogram):
        return str(counts.total), f"mean {counts.sum / counts.total:.3g}"
    frequent = sorted(counts.cells().items(), key=lambda each: -each[1])[:3]
    return str(counts.total), ", ".join(f"{name} {100 * count / counts.total:.0f} %" for name, count in frequent)


def _psi(series: Series) -> str:
    if series.drift is None:
        return ""
    return "too few" if series.drift.psi is None else f"{series.drift.psi:.3f}"


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    if not number.replace(".", "", 1).isdecimal() or unit not in _UNITS_S:
        raise ValueError(f"{short_repr(text)}; a time is a number and s, m, h or d, such as 6h")
    return float(number) * _UNITS_S[unit]
