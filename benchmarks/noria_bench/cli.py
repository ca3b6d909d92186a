"""`noria bench …`: the arguments of every bench, and the call that each makes. Imports nothing heavy before it is known which."""

import argparse
import datetime
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from noria.cli.parser import Parser, add_command, add_settings, argument_type, config_from
from noria.settings import list_settings
from noria_bench.benches.suite_options import ARRIVALS as ARRIVAL_CHOICES
from noria_bench.benches.suite_options import (
    DEFAULT_LOAD,
    PEERS_SWEEP,
    SWEEPS,
    SuiteOptions,
    read_duration,
    read_load,
    read_rate,
)
from noria_bench.device.command import add_arguments
from noria_bench.targets.catalog import PEERS, TARGETS, TargetSettings, read_targets

_STREAM_BODIES = ("bytesio", "chunks")


def add_benches(commands: Any) -> list[Parser]:
    """Add `noria bench` and all its commands; returns their parsers."""
    benches = commands.add_parser("bench", help="measure").add_subparsers(metavar="BENCH", required=True)
    quick = add_command(benches, "quick", _quick, "[MODEL] [-o FILE]", "what the server costs over a bare loop")
    deadlines = add_command(
        benches, "contract", _deadlines, "[MODEL] [-o FILE] [--plots FOLDER]", "who gets his image in time"
    )
    bench = add_command(
        benches, "cost", _cost, "[MODEL] [-o FILE] [--parts A,B]", "what metrics, logs and an open page /live cost"
    )
    usage = "[MODEL] [--targets A,B|all] [--duration S] [--out FOLDER] [--full]"
    scenario1 = add_command(benches, "scenario1", _scenario1, usage, "the seed article's single user, target by target")
    scenario2 = add_command(benches, "scenario2", _scenario2, usage, "the seed article's eight users, target by target")
    mixed = add_command(
        benches, "mixed", _mixed, usage + " [--arrivals KIND]", "mixed requests that wait for nobody, target by target"
    )
    sweep = add_command(
        benches, "sweep", _sweep, "NAME [MODEL] [--duration S] [--out FOLDER] [--full]", "one setting after the other"
    )
    sweep.add_argument(
        "sweep",
        metavar="NAME",
        choices=(*SWEEPS, PEERS_SWEEP, "all"),
        help=f"{', '.join(SWEEPS)}, all of them, or {PEERS_SWEEP}",
    )
    serve = add_command(benches, "serve", _serve, "TARGET [MODEL] [--port N]", "run one target, to be loaded by hand")
    serve.add_argument("target", metavar="TARGET", choices=tuple(TARGETS), help=", ".join(TARGETS))
    for command in (quick, deadlines, bench, scenario1, scenario2, mixed, sweep, serve):
        command.add_argument(
            "model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)"
        )
        add_settings(command, [setting for setting in list_settings() if setting.key != "model"])
    for command in (quick, deadlines, bench):
        command.add_argument("-o", "--output", type=pathlib.Path, help="JSON file to write the results to")
    _add_deadlines_options(deadlines)
    _add_cost_options(bench)
    for command in (scenario1, scenario2, mixed, sweep):
        _add_suite_options(command, with_targets=command is not sweep)
    _add_mixed_options(mixed)
    _add_target_options(serve)
    return [quick, deadlines, bench, scenario1, scenario2, mixed, sweep, serve, *_add_others(benches)]


def _add_others(benches: Any) -> list[Parser]:
    """The commands that measure no model's server."""
    report = _add_without_settings(benches, "report", _report, "tables, pictures and a page of a folder of runs")
    report.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="where `--out` of a bench was")
    install = _add_without_settings(benches, "install", _install, "make the virtual environment of a peer")
    install.add_argument("peer", metavar="PEER", choices=PEERS, help=", ".join(PEERS))
    streaming = _add_without_settings(
        benches, "streaming", _streaming, "what a StreamingResponse costs, without a model"
    )
    streaming.add_argument("-o", "--output", type=pathlib.Path, help="JSON file to write the results to")
    device = _add_without_settings(benches, "device", _device, "what this device can do, with UNets of true size")
    add_arguments(device)
    return [report, install, streaming, device]


def _add_without_settings(benches: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> Parser:
    """A bench that takes no settings."""
    parser: Parser = benches.add_parser(name, help=summary, description=run.__doc__)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_suite_options(parser: Parser, *, with_targets: bool) -> None:
    """What the benches take that hold targets against each other."""
    default = SuiteOptions()
    if with_targets:
        parser.add_argument(
            "--targets",
            metavar="A,B|all",
            type=argument_type(read_targets),
            default=default.targets,
            help=f"of {', '.join(TARGETS)} ({','.join(target.name for target in default.targets)})",
        )
    parser.add_argument(
        "--duration",
        metavar="SECONDS",
        type=argument_type(read_duration),
        help="of each run (scenarios 90, mixed 60, sweeps 45); a scenario's ramp is scaled with it",
    )
    parser.add_argument("--out", metavar="FOLDER", type=pathlib.Path, help="for the results (bench-results/DATE-BENCH)")
    parser.add_argument("--full", action="store_true", help="15 minutes a run, as the seed article; whole grids")
    parser.add_argument("--trace-seed", type=int, default=default.seed, help=f"of the dice ({default.seed})")


def _add_mixed_options(parser: Parser) -> None:
    """What `noria bench mixed` takes besides."""
    parser.add_argument("--arrivals", choices=ARRIVAL_CHOICES, default="poisson", help="when it is asked for (poisson)")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--load",
        metavar="PERCENT",
        type=argument_type(read_load),
        default=DEFAULT_LOAD,
        help=f"of Noria's capacity, which is measured first ({DEFAULT_LOAD})",
    )
    rate.add_argument(
        "--rate", metavar="ROWS", type=argument_type(read_rate), help="rows a second that arrive, instead of a load"
    )


def _add_target_options(parser: Parser) -> None:
    """What may be turned at a target that is not Noria."""
    parser.add_argument(
        "--batch-timeout-ms", type=argument_type(_timeout_ms), help="of a batch that is not full (the target's own)"
    )
    parser.add_argument(
        "--batch-size", type=argument_type(_batch_size), help="most images of a batch (the target's own)"
    )
    parser.add_argument("--stream", choices=_STREAM_BODIES, help="how the streaming endpoints give the body (bytesio)")


def _timeout_ms(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3_600_000:
        raise ValueError(f"{text!r}; it is a number of milliseconds, more than 0")
    return value


def _batch_size(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"{text!r}; it is a whole number from 1 to 1024")
    return int(text)


def _add_deadlines_options(parser: Parser) -> None:
    """What `noria bench contract` takes besides settings."""
    from noria_bench.benches.deadline_options import (
        ARRIVALS,
        DEADLINE_TARGETS,
        DeadlineOptions,
        read_deadline_targets,
        read_loads,
        read_seconds,
    )
    from noria_bench.load.workload import MIXES

    default = DeadlineOptions()
    parser.add_argument(
        "--loads",
        type=argument_type(read_loads),
        default=default.loads,
        help=f"per cents of Noria's capacity ({','.join(map(str, default.loads))})",
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(read_seconds),
        default=default.seconds,
        help=f"that requests arrive for, in each run ({default.seconds:.0f})",
    )
    parser.add_argument(
        "--policies",
        type=argument_type(read_deadline_targets),
        default=default.targets,
        help=f"of Noria, or the seed article's server ({','.join(DEADLINE_TARGETS)})",
    )
    parser.add_argument("--mix", choices=list(MIXES), default=default.mix, help=f"what is asked for ({default.mix})")
    parser.add_argument(
        "--arrivals", choices=ARRIVALS, default=default.arrivals, help=f"when it is asked for ({default.arrivals})"
    )
    parser.add_argument("--trace-seed", type=int, default=default.seed, help=f"of the dice ({default.seed})")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="folder to draw pictures into, as SVG")


def _add_cost_options(parser: Parser) -> None:
    """What `noria bench cost` takes besides settings."""
    from noria_bench.cost.options import FEATURES, CostOptions, read_features, read_pairs, read_requests, read_users

    default = CostOptions()
    parser.add_argument(
        "--pairs",
        type=argument_type(read_pairs),
        default=default.num_pairs,
        help=f"of runs, with and without ({default.num_pairs})",
    )
    parser.add_argument(
        "--requests",
        type=argument_type(read_requests),
        default=default.num_requests,
        help=f"of each run ({default.num_requests})",
    )
    parser.add_argument(
        "--users",
        type=argument_type(read_users),
        default=default.num_users,
        help=f"who each ask again when answered ({default.num_users})",
    )
    parser.add_argument(
        "--parts",
        metavar="A,B",
        type=argument_type(read_features),
        default=default.features,
        help=f"what is measured, of {', '.join(FEATURES)} (all); the others are off on both sides; none: two equal servers",
    )
    parser.add_argument("--trace-seed", type=int, default=default.seed, help=f"of the dice ({default.seed})")


def _quick(arguments: argparse.Namespace) -> int:
    """Measure, in about two minutes, what the server costs over a bare loop on this machine."""
    config = config_from(arguments)

    from noria_bench.benches import quick

    return quick.main(config, arguments.output)


def _deadlines(arguments: argparse.Namespace) -> int:
    """Measure, in about half an hour, who gets his image by his deadline at 50 to 150 % of capacity, policy by policy."""
    config = config_from(arguments)

    from noria_bench.benches import deadlines as contract
    from noria_bench.benches.deadline_options import DeadlineOptions

    options = DeadlineOptions(
        loads=arguments.loads,
        seconds=arguments.seconds,
        targets=arguments.policies,
        mix=arguments.mix,
        arrivals=arguments.arrivals,
        seed=arguments.trace_seed,
    )
    return contract.main(config, options, arguments.output, arguments.plots)


def _cost(arguments: argparse.Namespace) -> int:
    """Measure, in about half an hour, what metrics, logs and an open page /live take of the throughput, and how long /metrics takes."""
    config = config_from(arguments)

    from noria_bench.cost import bench
    from noria_bench.cost.options import CostOptions

    options = CostOptions(
        num_pairs=arguments.pairs,
        num_requests=arguments.requests,
        num_users=arguments.users,
        features=arguments.parts,
        seed=arguments.trace_seed,
    )
    return bench.main(config, options, arguments.output)


def _scenario1(arguments: argparse.Namespace) -> int:
    """One user who asks again as soon as he is answered, as in the seed article: 15 minutes with --full, 90 seconds otherwise."""
    return _scenario("scenario1", arguments)


def _scenario2(arguments: argparse.Namespace) -> int:
    """Eight users who come one by one, as in the seed article: every 50 seconds of 15 minutes with --full, every 5 of 90 otherwise."""
    return _scenario("scenario2", arguments)


def _scenario(name: str, arguments: argparse.Namespace) -> int:
    from noria_bench.benches import run_plans

    return _suite(name, arguments, functools.partial(run_plans.scenario_runs, name))


def _mixed(arguments: argparse.Namespace) -> int:
    """Mixed steps, guidance, schedulers, sizes and numbers of images, sent when they are due, at a share of Noria's capacity."""
    from noria_bench.benches import run_plans

    return _suite("mixed", arguments, run_plans.mixed_runs)


def _suite(name: str, arguments: argparse.Namespace, plans: Callable[..., Any]) -> int:
    """Run what `plans` gives for the options; targets that are not installed are refused first."""
    from noria_bench import preflight
    from noria_bench.benches import suite
    from noria_bench.reports import writer

    config = config_from(arguments)
    options = SuiteOptions(
        targets=getattr(arguments, "targets", ()),
        seconds=arguments.duration,
        full=arguments.full,
        seed=arguments.trace_seed,
        arrivals=getattr(arguments, "arrivals", "poisson"),
        load_percent=getattr(arguments, "load", DEFAULT_LOAD),
        rows_per_s=getattr(arguments, "rate", None),
    )
    preflight.check_installed("fastapi", "httpx", "locust", "matplotlib")
    preflight.check_peers(options.targets)
    return suite.main(
        config, arguments.out or _new_folder(name), functools.partial(plans, options), writer.write_report
    )


def _new_folder(name: str) -> pathlib.Path:
    return pathlib.Path("bench-results") / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}"


def _sweep(arguments: argparse.Namespace) -> int:
    """One setting after the other under the seed article's eight users, 45 seconds each; docs/benchmarks/scenarios.md says which."""
    from noria_bench import preflight
    from noria_bench.benches import run_plans, sweeps

    if arguments.sweep == PEERS_SWEEP:
        preflight.check_peers(TARGETS[variant.target] for variant in sweeps.variants(PEERS_SWEEP, full=arguments.full))
    return _suite(f"sweep-{arguments.sweep}", arguments, functools.partial(run_plans.sweep_runs, arguments.sweep))


def _report(arguments: argparse.Namespace) -> int:
    """Make the tables, the pictures and the page of a folder of runs again."""
    from noria_bench import preflight
    from noria_bench.reports import writer

    preflight.check_installed("matplotlib")
    return writer.main(arguments.folder)


def _install(arguments: argparse.Namespace) -> int:
    """Make the virtual environment in which a peer's server runs, with everything it needs."""
    from noria_bench.targets import environments

    environments.install(arguments.peer, functools.partial(print, flush=True))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Run one target on --port (8001) until Ctrl-C, to be loaded with ab, locust or curl."""
    config = config_from(arguments)

    from noria_bench.targets import serve as by_hand

    timeout_ms, target_defaults = arguments.batch_timeout_ms, TARGETS[arguments.target].settings
    target_settings = TargetSettings(
        timeout_s=target_defaults.timeout_s if timeout_ms is None else timeout_ms / 1000,
        max_images=arguments.batch_size or target_defaults.max_images,
        stream=arguments.stream or target_defaults.stream,
    )
    has_port = getattr(arguments, "frontend.port") is not None
    return by_hand.main(
        config, arguments.target, config.frontend.port if has_port else by_hand.DEFAULT_PORT, target_settings
    )


def _device(arguments: argparse.Namespace) -> int:
    """Measure UNets of true size on one device, within eight minutes, and the seed article's batched loop against the wheel."""
    from noria_bench.device import command

    return command.run(arguments)


def _streaming(arguments: argparse.Namespace) -> int:
    """Measure what each way to stream an image costs, and how it reaches the client: why the seed article saw what it saw."""
    from noria_bench import preflight

    preflight.check_installed("fastapi")

    from noria_bench.benches import streaming

    return streaming.main(arguments.output)
