"""`noria bench …`: the arguments of every bench and the call that each makes.

Heavy imports wait until a command runs.
"""

import argparse
import dataclasses
import datetime
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from noria.cli.parser import Parser, add_command, add_plain_command, add_settings, argument_type, config_from
from noria.settings import list_settings
from noria_bench.benches import deadline_options, suite_options
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.benches.suite_options import DEFAULT_LOAD_PERCENT, FRAMEWORKS_SWEEP, SWEEPS, SuiteOptions
from noria_bench.cost import options as cost_options
from noria_bench.cost.options import CostOptions
from noria_bench.device.command import add_arguments
from noria_bench.encoders import options as encoders_options
from noria_bench.encoders.options import EncodersOptions
from noria_bench.load.workload import MIXES
from noria_bench.sharing import options as sharing_options
from noria_bench.sharing.options import SharingOptions
from noria_bench.targets.catalog import INSTALLABLE, TARGETS, TargetSettings, read_targets

_STREAM_MODES = ("bytesio", "chunks")


def add_benches(commands: Any) -> list[Parser]:
    """Add `noria bench` with all its commands to argparse's subparsers; returns their parsers."""
    benches = commands.add_parser("bench", help="run benchmarks").add_subparsers(metavar="BENCH", required=True)
    usage = "[MODEL] [--targets A,B|all] [--duration S] [--out FOLDER] [--full]"
    quick = add_command(benches, "quick", _quick, "[MODEL] [-o FILE]", "the server's overhead over a bare loop")
    deadlines = add_command(
        benches, "deadlines", _deadlines, "[MODEL] [--loads A,B] [--out FOLDER]", "which requests meet their deadlines"
    )
    cost = add_command(
        benches, "cost", _cost, "[MODEL] [-o FILE] [--features A,B]", "the cost of metrics, logs and an open page /live"
    )
    scenario1 = add_command(
        benches, "scenario1", _scenario1, usage, "the reference article's single user, target by target"
    )
    scenario2 = add_command(
        benches, "scenario2", _scenario2, usage, "the reference article's eight users, target by target"
    )
    mixed = add_command(benches, "mixed", _mixed, usage + " [--users N]", "mixed requests, target by target")
    sweep = add_command(
        benches, "sweep", _sweep, "NAME [MODEL] [--duration S] [--out FOLDER] [--full]", "one setting after the other"
    )
    sweep.add_argument(
        "sweep",
        metavar="NAME",
        choices=(*SWEEPS, FRAMEWORKS_SWEEP, "all"),
        help=f"{', '.join(SWEEPS)}, all of them, or {FRAMEWORKS_SWEEP}",
    )
    encoders = add_command(
        benches,
        "encoders",
        _encoders,
        "[MODEL] [--targets A,B|all] [--quick] [--out FOLDER]",
        "text encoders: Noria beside Triton, LitServe, BentoML and FastAPI",
    )
    sharing = add_command(
        benches,
        "sharing",
        _sharing,
        "[MODEL] [--quick] [--out FOLDER]",
        "what embeddings and images from one server cost each other",
    )
    serve = add_command(benches, "serve", _serve, "TARGET [MODEL] [--port N]", "run one target, to be loaded by hand")
    serve.add_argument("target", metavar="TARGET", choices=tuple(TARGETS), help=", ".join(TARGETS))
    with_settings = [quick, deadlines, cost, scenario1, scenario2, mixed, sweep, sharing, serve]
    for command in with_settings:
        command.add_argument(
            "model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)"
        )
        add_settings(command, [setting for setting in list_settings() if setting.key != "model"])
    _add_encoders_options(encoders)
    _add_sharing_options(sharing)
    for command in (quick, cost):
        _add_output(command)
    for command in (deadlines, scenario1, scenario2, mixed, sweep, sharing):
        command.add_argument(
            "--out", metavar="FOLDER", type=pathlib.Path, help="for the results (bench-results/DATE-TIME-BENCH)"
        )
    for command in (deadlines, cost, scenario1, scenario2, mixed, sweep):
        command.add_argument("--trace-seed", type=int, default=1, help="of the requests (1)")
    _add_deadlines_options(deadlines)
    _add_cost_options(cost)
    for command in (scenario1, scenario2, mixed):
        _add_targets(command)
    for command in (scenario1, scenario2, mixed, sweep):
        _add_durations(command)
    _add_mixed_options(mixed)
    _add_target_options(serve)
    return [*with_settings, encoders, *_add_others(benches)]


def _add_others(benches: Any) -> list[Parser]:
    """Add the commands that take no settings."""
    report = add_plain_command(benches, "report", _report, "tables, plots and an HTML page of a folder of runs")
    report.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="the `--out` of a bench")
    install = add_plain_command(benches, "install", _install, "create the virtual environment of a framework")
    install.add_argument("framework", metavar="FRAMEWORK", choices=INSTALLABLE, help=", ".join(INSTALLABLE))
    streaming = add_plain_command(benches, "streaming", _streaming, "the cost of a StreamingResponse, without a model")
    _add_output(streaming)
    device = add_plain_command(benches, "device", _device, "the speed of this device, with UNets of published sizes")
    add_arguments(device)
    soak = add_plain_command(benches, "soak", _soak, "what grows in an hour of mixed traffic, attacks and kills")
    soak.add_argument("--minutes", metavar="M", type=argument_type(_minutes), default=60.0, help="(60)")
    soak.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, help="for the results (bench-results/DATE-TIME-soak)"
    )
    canary = add_plain_command(benches, "canary", _canary, "good and bad canaries before the judge, in virtual time")
    canary.add_argument(
        "--runs",
        metavar="N",
        type=argument_type(_runs),
        default=1000,
        help="A/A canaries; a quarter of other kinds (1000)",
    )
    canary.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, help="for the results (bench-results/DATE-TIME-canary)"
    )
    canary.add_argument("--trace-seed", type=int, default=1, help="of the requests (1)")
    return [report, install, streaming, device, soak, canary]


def _add_output(parser: Parser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, help="JSON file for the results")


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
    parser.add_argument(
        "--full", action="store_true", help="15 minutes per run, as in the reference article; complete grids"
    )


def _add_mixed_options(parser: Parser) -> None:
    parser.add_argument(
        "--arrivals", choices=suite_options.ARRIVALS, default="poisson", help="distribution of arrivals (poisson)"
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--load-percent",
        metavar="PERCENT",
        type=argument_type(suite_options.read_load),
        default=DEFAULT_LOAD_PERCENT,
        help=f"of Noria's capacity, which is measured first ({DEFAULT_LOAD_PERCENT})",
    )
    rate.add_argument(
        "--rows-per-s",
        metavar="ROWS",
        type=argument_type(suite_options.read_rate),
        help="rows that arrive per second, instead of a load",
    )
    rate.add_argument(
        "--users",
        metavar="N",
        type=argument_type(cost_options.read_users),
        help="a closed loop of N users instead of arrivals: mixed settings, then uniform requests",
    )


def _add_target_options(parser: Parser) -> None:
    parser.add_argument(
        "--batch-timeout-ms", type=argument_type(_timeout_ms), help="of a batch that is not full (the target's default)"
    )
    parser.add_argument(
        "--batch-size", type=argument_type(_batch_size), help="maximum images of a batch (the target's default)"
    )
    parser.add_argument("--stream", choices=_STREAM_MODES, help="how the streaming endpoints send the body (bytesio)")


def _timeout_ms(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3_600_000:
        raise ValueError(f"{text!r}; a timeout is more than 0 and at most 3600000 milliseconds")
    return value


def _batch_size(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"{text!r}; a batch size is a whole number from 1 to 1024")
    return int(text)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10_080:
        raise ValueError(f"{text!r}; a soak takes more than 0 and at most 10080 minutes")
    return value


def _runs(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 4 <= int(text) <= 100_000:
        raise ValueError(f"{text!r}; runs are a whole number from 4 to 100000")
    return int(text)


def _add_deadlines_options(parser: Parser) -> None:
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


def _add_cost_options(parser: Parser) -> None:
    default = CostOptions()
    parser.add_argument(
        "--pairs",
        type=argument_type(cost_options.read_pairs),
        default=default.num_pairs,
        help=f"number of pairs of runs, with and without ({default.num_pairs})",
    )
    parser.add_argument(
        "--requests",
        type=argument_type(cost_options.read_requests),
        default=default.num_requests,
        help=f"number of requests in each run ({default.num_requests})",
    )
    parser.add_argument(
        "--users",
        type=argument_type(cost_options.read_users),
        default=default.num_users,
        help=f"number of users in a closed loop ({default.num_users})",
    )
    parser.add_argument(
        "--features",
        metavar="A,B",
        type=argument_type(cost_options.read_features),
        default=default.features,
        help=f"measured features, of {', '.join(cost_options.FEATURES)} (all); others are off on both sides; "
        "none: two equal servers",
    )


def _add_encoders_options(parser: Parser) -> None:
    default = EncodersOptions()
    parser.add_argument(
        "model", nargs="?", default="minilm", help="a folder in transformers format, a hub id, or minilm (the default)"
    )
    add_settings(parser, [setting for setting in list_settings() if setting.key != "model"])
    parser.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, help="for the results (bench-results/DATE-TIME-encoders)"
    )
    parser.add_argument(
        "--targets",
        metavar="A,B|all",
        type=argument_type(encoders_options.read_targets),
        help=f"of {', '.join(encoders_options.TARGETS)} (all but triton-n and triton-n-batching)",
    )
    parser.add_argument(
        "--connections",
        metavar="A,B",
        type=argument_type(encoders_options.read_connections),
        help=f"of the closed loops, 1 to 128 ({','.join(map(str, default.connections))})",
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(encoders_options.read_seconds),
        help=f"of each load ({default.seconds:g})",
    )
    parser.add_argument(
        "--corpus",
        type=argument_type(encoders_options.read_corpora),
        help="fixed: one sentence; mixed: 4 to 256 tokens; all (the default)",
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(encoders_options.read_rounds),
        help=f"in which all targets are measured in turn ({default.num_rounds})",
    )
    parser.add_argument("--trace-seed", type=int, help="of the texts and arrivals (1)")
    parser.add_argument("--quick", action="store_true", help="one short round without sweeps, in some three minutes")


def _add_sharing_options(parser: Parser) -> None:
    default = SharingOptions()
    parser.add_argument(
        "--connections",
        metavar="A,B",
        type=argument_type(encoders_options.read_connections),
        help=f"of the closed loops of texts, 1 to 128 ({','.join(map(str, default.connections))})",
    )
    parser.add_argument(
        "--rate",
        type=argument_type(sharing_options.read_rate),
        help=f"of the open loop of texts, requests per second ({default.rate:g})",
    )
    parser.add_argument(
        "--users",
        type=argument_type(cost_options.read_users),
        help=f"of images, in a closed loop ({default.num_users})",
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(encoders_options.read_seconds),
        help=f"of each load, twice as long of the open loop ({default.seconds:g})",
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(encoders_options.read_rounds),
        help=f"in which all divisions of the cores are measured in turn ({default.num_rounds})",
    )
    parser.add_argument("--trace-seed", type=int, help="of the images and arrivals (1)")
    parser.add_argument("--quick", action="store_true", help="one short round, in some two minutes")


def _sharing(arguments: argparse.Namespace) -> int:
    """Measure what embeddings and images from one server cost each other, by how the cores are divided."""
    config = config_from(arguments)

    from noria_bench.sharing import bench

    given = {
        "connections": arguments.connections,
        "rate": arguments.rate,
        "num_users": arguments.users,
        "seconds": arguments.seconds,
        "num_rounds": arguments.rounds,
        "seed": arguments.trace_seed,
    }
    defaults = sharing_options.QUICK if arguments.quick else SharingOptions()
    options = dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})
    return bench.main(config, options, arguments.out or _results_folder("sharing"))


def _encoders(arguments: argparse.Namespace) -> int:
    """Measure text encoders: Noria beside Triton, LitServe, BentoML and FastAPI, in about twenty minutes."""
    config = config_from(arguments)

    from noria_bench.encoders import bench

    given = {
        "targets": arguments.targets,
        "connections": arguments.connections,
        "seconds": arguments.seconds,
        "corpora": arguments.corpus,
        "num_rounds": arguments.rounds,
        "seed": arguments.trace_seed,
    }
    defaults = encoders_options.QUICK if arguments.quick else EncodersOptions()
    options = dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})
    return bench.main(config, options, arguments.out or _results_folder("encoders"))


def _quick(arguments: argparse.Namespace) -> int:
    """Measure the server's overhead over a bare loop on this machine, in about two minutes."""
    config = config_from(arguments)

    from noria_bench.benches import quick

    return quick.main(config, arguments.output)


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


def _cost(arguments: argparse.Namespace) -> int:
    """Measure what metrics, logs and an open page /live cost in throughput, and how long a scrape takes."""
    config = config_from(arguments)

    from noria_bench.cost import bench

    options = CostOptions(
        num_pairs=arguments.pairs,
        num_requests=arguments.requests,
        num_users=arguments.users,
        features=arguments.features,
        seed=arguments.trace_seed,
    )
    return bench.main(config, options, arguments.output)


def _scenario1(arguments: argparse.Namespace) -> int:
    """One user in a closed loop, as in the reference article: 15 minutes with --full, 90 seconds otherwise."""
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
    """One setting after the other under the reference article's eight users (docs/benchmarks/scenarios.md)."""
    from noria_bench.benches import run_plans, sweeps
    from noria_bench.targets import environments

    if arguments.sweep == FRAMEWORKS_SWEEP:
        variants = sweeps.variants(FRAMEWORKS_SWEEP, full=arguments.full)
        environments.check_installed(TARGETS[variant.target] for variant in variants)
    return _run_targets(f"sweep-{arguments.sweep}", arguments, functools.partial(run_plans.sweep_runs, arguments.sweep))


def _run_targets(name: str, arguments: argparse.Namespace, plans: Callable[..., Any]) -> int:
    """Run what `plans` yields for the options, after checking that the targets are installed."""
    from noria_bench.targets import environments

    options = SuiteOptions(
        targets=getattr(arguments, "targets", ()),
        seconds=arguments.duration,
        full=arguments.full,
        seed=arguments.trace_seed,
        arrivals=getattr(arguments, "arrivals", "poisson"),
        load_percent=getattr(arguments, "load_percent", DEFAULT_LOAD_PERCENT),
        rows_per_s=getattr(arguments, "rows_per_s", None),
        num_users=getattr(arguments, "users", None),
    )
    environments.check_installed(options.targets)
    return _run_suite(name, arguments, functools.partial(plans, options))


def _run_suite(name: str, arguments: argparse.Namespace, plans: Callable[..., Any]) -> int:
    config = config_from(arguments)

    from noria_bench.benches import suite
    from noria_bench.reports import writer

    return suite.main(config, arguments.out or _results_folder(name), plans, writer.write_report)


def _results_folder(name: str) -> pathlib.Path:
    return pathlib.Path("bench-results") / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}"


def _report(arguments: argparse.Namespace) -> int:
    """Write the tables, the plots and the HTML page of a folder of runs again."""
    from noria_bench.encoders import report, results
    from noria_bench.reports import writer

    if (file := arguments.folder / results.FILE_NAME).is_file():
        print(report.write_report(results.read_result(file), arguments.folder)[0].read_text(encoding="utf-8"))
        return 0
    return writer.main(arguments.folder)


def _install(arguments: argparse.Namespace) -> int:
    """Create the virtual environment in which a framework's server runs."""
    from noria_bench.targets import environments

    environments.install(arguments.framework, functools.partial(print, flush=True))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Run one target on --port (8001) until Ctrl-C, to be loaded with ab, Locust or curl."""
    config = config_from(arguments)

    from noria_bench.targets import serve

    timeout_ms, defaults = arguments.batch_timeout_ms, TARGETS[arguments.target].settings
    settings = TargetSettings(
        timeout_s=defaults.timeout_s if timeout_ms is None else timeout_ms / 1000,
        max_images=arguments.batch_size or defaults.max_images,
        stream=arguments.stream or defaults.stream,
    )
    has_port = getattr(arguments, "frontend.port") is not None
    return serve.main(config, arguments.target, config.frontend.port if has_port else serve.DEFAULT_PORT, settings)


def _device(arguments: argparse.Namespace) -> int:
    """Measure UNets of published sizes, and Noria's engine against the reference loop, on one device, in 8 minutes."""
    from noria_bench.device import command

    return command.run(arguments)


def _streaming(arguments: argparse.Namespace) -> int:
    """Measure the cost of each way to stream an image, which explains the reference article's results."""
    from noria_bench.benches import streaming

    return streaming.main(arguments.output)


def _soak(arguments: argparse.Namespace) -> int:
    """Serve the bundled model under mixed traffic, attacks and kills, and say whether memory, files, threads,
    connections and stored data stay flat.
    """
    from noria_bench.soak import bench

    return bench.main(60 * arguments.minutes, arguments.out or _results_folder("soak"))


def _canary(arguments: argparse.Namespace) -> int:
    """Simulate canaries before the judge: how many good ones are rolled back, and how soon bad ones are."""
    from noria_bench.canary import bench

    return bench.main(arguments.runs, arguments.out or _results_folder("canary"), arguments.trace_seed)
