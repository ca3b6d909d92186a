"""The commands of the benches of images: `noria bench scenario1`, `scenario2`, `mixed`, `sweep`.

Heavy imports wait until one runs.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.benches import suite_options
from noria_bench.benches.suite_options import CLOSED_MIXES, FRAMEWORKS_SWEEP, SWEEPS, SuiteOptions
from noria_bench.command_arguments import (
    add_diffusion_model,
    add_options,
    add_results_folder,
    add_trace_seed,
    options_from,
    results_folder,
)
from noria_bench.option_values import LOADS, USERS, names, number, whole
from noria_bench.targets.catalog import TARGETS, read_targets

_DURATION = whole(1, 86400, "a run lasts 1 to 86400 whole seconds")
_ROWS_PER_S = number(0.1, 1e6, "a rate is 0.1 to 1000000 rows per second (a guided step of one image has two)")


def add_comparisons(benches: Any) -> list[Parser]:
    """Add the benches that compare targets, and the sweeps, to argparse's subparsers; returns their parsers."""
    usage = "[MODEL] [--targets A,B|all] [--duration S] [--out FOLDER] [--full]"
    scenario1 = add_command(
        benches, "scenario1", _scenario1, usage, "the reference article's single user, target by target"
    )
    scenario2 = add_command(
        benches, "scenario2", _scenario2, usage, "the reference article's eight users, target by target"
    )
    mixed = add_command(benches, "mixed", _mixed, usage + " [--users N]", "mixed requests, target by target")
    for parser in (scenario1, scenario2, mixed):
        _add_shared(parser)
        _add_targets(parser)
        _add_durations(parser)
    _add_mixed_options(mixed)
    sweep = add_command(
        benches, "sweep", _sweep, "NAME [MODEL] [--duration S] [--out FOLDER] [--full]", "one setting after the other"
    )
    sweep.add_argument(
        "sweep",
        metavar="NAME",
        choices=(*SWEEPS, FRAMEWORKS_SWEEP, "all"),
        help=f"{', '.join(SWEEPS)}, all of them, or {FRAMEWORKS_SWEEP}",
    )
    _add_shared(sweep)
    _add_durations(sweep)
    return [scenario1, scenario2, mixed, sweep]


def _add_shared(parser: Parser) -> None:
    add_diffusion_model(parser)
    add_results_folder(parser)
    add_trace_seed(parser)


def _add_targets(parser: Parser) -> None:
    parser.add_argument(
        "--targets",
        metavar="A,B|all",
        type=argument_type(read_targets),
        help=f"of {', '.join(TARGETS)} ({','.join(target.name for target in SuiteOptions().targets)})",
    )


def _add_durations(parser: Parser) -> None:
    parser.add_argument(
        "--duration",
        dest="seconds",
        metavar="SECONDS",
        type=lambda text: float(_DURATION(text)),
        help="of each run (scenarios 90, mixed 60, sweeps 45); a scenario's ramp is scaled with it",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--quick",
        action="store_true",
        help="for rented devices: 15 s per run, one start of a server for all its runs, less warm-up, 4 checked images",
    )
    length.add_argument(
        "--full", action="store_true", help="15 minutes per run, as in the reference article; complete grids"
    )


def _add_mixed_options(parser: Parser) -> None:
    parser.add_argument("--arrivals", choices=suite_options.ARRIVALS, help="distribution of arrivals (poisson)")
    work: Any = parser.add_mutually_exclusive_group()
    add_options(
        work,
        SuiteOptions(),
        ("--load-percent A,B", "load_percents", LOADS, "per cents of Noria's capacity, which is measured first"),
        ("--rows-per-s ROWS", "rows_per_s", _ROWS_PER_S, "rows that arrive per second, instead of loads (none)"),
        ("--users N", "num_users", USERS, "a closed loop of N users instead of arrivals: one run for each mix (none)"),
    )
    mixes = f"with --users: of {', '.join(CLOSED_MIXES)} (all)"
    parser.add_argument("--mixes", metavar="A,B", type=names(CLOSED_MIXES, "mixes"), help=mixes)


def _scenario1(arguments: argparse.Namespace) -> int:
    """Run one user in a closed loop, as in the reference article: 15 minutes with --full, 90 seconds otherwise."""
    return _scenario("scenario1", arguments)


def _scenario2(arguments: argparse.Namespace) -> int:
    """Eight users who arrive one by one, as in the reference article: every 50 s with --full, every 5 s of 90."""
    return _scenario("scenario2", arguments)


def _scenario(name: str, arguments: argparse.Namespace) -> int:
    from noria_bench.benches import run_plans

    return _run_targets(name, arguments, functools.partial(run_plans.scenario_runs, name))


def _mixed(arguments: argparse.Namespace) -> int:
    """Mixed requests: in an open loop at a share of Noria's capacity, or from users who each wait for their answer."""
    from noria_bench.benches import run_plans

    return _run_targets("mixed", arguments, run_plans.mixed_runs)


def _sweep(arguments: argparse.Namespace) -> int:
    """Run one setting after the other under the reference article's eight users (docs/benchmarks/scenarios.md)."""
    from noria_bench.benches import run_plans, sweeps
    from noria_bench.targets.server import interpreter_of

    if arguments.sweep == FRAMEWORKS_SWEEP:
        for variant in sweeps.variants(FRAMEWORKS_SWEEP, full=arguments.full):
            interpreter_of(TARGETS[variant.target].framework)
    return _run_targets(f"sweep-{arguments.sweep}", arguments, functools.partial(run_plans.sweep_runs, arguments.sweep))


def _run_targets(name: str, arguments: argparse.Namespace, plans: Callable[..., Any]) -> int:
    """Run what `plans` yields for the options, after checking that the targets are installed."""
    from noria_bench.targets.server import interpreter_of

    options = options_from(arguments, SuiteOptions())
    for target in options.targets:
        interpreter_of(target.framework)
    config = config_from(arguments)

    from noria_bench.benches import suite
    from noria_bench.reports import writer

    folder = results_folder(arguments.out, name)
    return suite.main(config, folder, functools.partial(plans, options), writer.write_report, quick=arguments.quick)
