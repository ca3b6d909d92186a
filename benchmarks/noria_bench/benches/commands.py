"""The commands of the benches of images: `noria bench deadlines`, `scenario1`, `scenario2`, `mixed`, `sweep`.

Heavy imports wait until one runs.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.benches import deadline_options, suite_options
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.benches.suite_options import DEFAULT_LOADS, FRAMEWORKS_SWEEP, SWEEPS, SuiteOptions
from noria_bench.command_arguments import add_diffusion_model, add_results_folder, add_trace_seed, results_folder
from noria_bench.cost import options as cost_options
from noria_bench.load.workload import MIXES
from noria_bench.targets.catalog import TARGETS, read_targets


def add_deadlines(benches: Any) -> Parser:
    """Add `deadlines` to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches, "deadlines", _deadlines, "[MODEL] [--loads A,B] [--out FOLDER]", "which requests meet their deadlines"
    )
    _add_shared(parser)
    default = DeadlineOptions()
    parser.add_argument(
        "--loads",
        type=argument_type(deadline_options.read_loads),
        default=default.loads,
        help=f"per cents of Noria's capacity ({','.join(map(str, default.loads))})",
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(deadline_options.read_seconds),
        default=default.seconds,
        help=f"during which requests arrive in each run ({default.seconds:.0f})",
    )
    parser.add_argument(
        "--policies",
        type=argument_type(deadline_options.read_deadline_targets),
        default=default.targets,
        help=f"of Noria, or reference for the reference server ({','.join(deadline_options.DEADLINE_TARGETS)})",
    )
    parser.add_argument(
        "--mix", choices=list(MIXES), default=default.mix, help=f"distribution of requests ({default.mix})"
    )
    parser.add_argument(
        "--arrivals",
        choices=deadline_options.ARRIVALS,
        default=default.arrivals,
        help=f"distribution of arrivals ({default.arrivals})",
    )
    return parser


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
    default = SuiteOptions().targets
    parser.add_argument(
        "--targets",
        metavar="A,B|all",
        type=argument_type(read_targets),
        default=default,
        help=f"of {', '.join(TARGETS)} ({','.join(target.name for target in default)})",
    )


def _add_durations(parser: Parser) -> None:
    parser.add_argument(
        "--duration",
        metavar="SECONDS",
        type=argument_type(suite_options.read_duration),
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
    parser.add_argument(
        "--arrivals", choices=suite_options.ARRIVALS, default="poisson", help="distribution of arrivals (poisson)"
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--load-percent",
        metavar="A,B",
        type=argument_type(deadline_options.read_loads),
        default=DEFAULT_LOADS,
        help=f"per cents of Noria's capacity, which is measured first ({DEFAULT_LOADS[0]})",
    )
    rate.add_argument(
        "--rows-per-s",
        metavar="ROWS",
        type=argument_type(suite_options.read_rate),
        help="rows that arrive per second, instead of loads",
    )
    rate.add_argument(
        "--users",
        metavar="N",
        type=argument_type(cost_options.read_users),
        help="a closed loop of N users instead of arrivals: one run for each mix",
    )
    mixed_with_users = ", ".join(suite_options.CLOSED_MIXES)
    parser.add_argument(
        "--mixes",
        metavar="A,B",
        type=argument_type(suite_options.read_mixes),
        default=suite_options.CLOSED_MIXES,
        help=f"with --users: of {mixed_with_users} (all)",
    )


def _deadlines(arguments: argparse.Namespace) -> int:
    """Measure which requests meet their deadlines at 50 to 150 % of capacity, by policy, in about half an hour."""
    from noria_bench.benches import deadlines

    options = DeadlineOptions(
        loads=arguments.loads,
        seconds=arguments.seconds,
        targets=arguments.policies,
        mix=arguments.mix,
        arrivals=arguments.arrivals,
        seed=arguments.trace_seed,
    )
    return _run_suite("deadlines", arguments, functools.partial(deadlines.deadline_runs, options))


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

    options = SuiteOptions(
        targets=getattr(arguments, "targets", ()),
        seconds=arguments.duration,
        full=arguments.full,
        quick=arguments.quick,
        seed=arguments.trace_seed,
        mixes=getattr(arguments, "mixes", suite_options.CLOSED_MIXES),
        arrivals=getattr(arguments, "arrivals", "poisson"),
        load_percents=getattr(arguments, "load_percent", DEFAULT_LOADS),
        rows_per_s=getattr(arguments, "rows_per_s", None),
        num_users=getattr(arguments, "users", None),
    )
    for target in options.targets:
        interpreter_of(target.framework)
    return _run_suite(name, arguments, functools.partial(plans, options), quick=arguments.quick)


def _run_suite(name: str, arguments: argparse.Namespace, plans: Callable[..., Any], *, quick: bool = False) -> int:
    config = config_from(arguments)

    from noria_bench.benches import suite
    from noria_bench.reports import writer

    return suite.main(config, results_folder(arguments.out, name), plans, writer.write_report, quick=quick)
