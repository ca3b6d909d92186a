"""The command `noria simulate`. Heavy imports wait until it runs."""

import argparse
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from noria.cli.parser import Parser, add_plain_command, argument_type
from noria_bench.option_values import number, whole
from noria_bench.running import make_results_folder
from noria_bench.simulator.workload import SimulateError, read_duration, read_mean_time

_KINDS = ("poisson", "bursty", "diurnal")


def add_to(commands: Any) -> list[Parser]:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(commands, "simulate", _run, "a cluster in virtual time: devices for a p99, costs")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--arrivals", choices=_KINDS, help="the process (poisson)")
    traffic.add_argument("--rate", type=_number(1e-6, 1e6), metavar="N", help="mean requests a second (1)")
    traffic.add_argument(
        "--duration", type=argument_type(read_duration), metavar="TIME", help="such as 90s, 30m, 24h, 1d (10m)"
    )
    traffic.add_argument("--shapes", type=pathlib.Path, metavar="FILE", help="JSON: what shares of requests ask for")
    traffic.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="CSV of requests, instead of a process")
    traffic.add_argument("--trace-format", choices=("noria", "gentd26", "burstgpt"), default="noria", help="(noria)")
    traffic.add_argument(
        "--clients",
        nargs="?",
        const=True,
        type=pathlib.Path,
        metavar="FILE",
        help="several clients in closed loops, instead: JSON, or an example; what fairness costs",
    )
    traffic.add_argument("--write-trace", type=pathlib.Path, metavar="FILE", help="write requests, simulate nothing")
    world = parser.add_argument_group("devices")
    world.add_argument("--device", type=pathlib.Path, metavar="FILE", help="costs: saved by an engine, or a table")
    world.add_argument("--devices", type=_whole(1, 100_000), default=1, metavar="N", help="how many (1)")
    world.add_argument("--p99", type=_number(1e-3, 1e6), metavar="SECONDS", help="find the fewest devices for this p99")
    world.add_argument(
        "--slots", type=_whole(1, 1024), nargs="+", metavar="N", help="of each device; several are compared"
    )
    world.add_argument(
        "--policy", nargs="+", metavar="NAME", help="of the scheduler; several are compared, with --clients all"
    )
    world.add_argument(
        "--fair-width-slack",
        type=_number(0.0, math.inf),
        nargs="+",
        default=[],
        metavar="X",
        help="of the policy fair (0.2); several are compared",
    )
    world.add_argument("--queue-limit", type=_whole(0, 10**6), default=256, metavar="N", help="of a device (256)")
    world.add_argument("--autoscale", type=argument_type(_bounds), metavar="MIN-MAX", help="devices, by their backlog")
    world.add_argument("--target-backlog", type=_number(0.01, 1e6), default=10.0, metavar="S", help="of a device (10)")
    mean_time = argument_type(read_mean_time)
    world.add_argument("--failures", type=mean_time, metavar="TIME", help="mean time of a device to one")
    world.add_argument("--spot", type=mean_time, metavar="TIME", help="the same to an interruption; both are compared")
    world.add_argument(
        "--canary", type=_number(0.0, 1.0), default=0.0, metavar="SHARE", help="of the requests; compared with none"
    )
    parser.add_argument(
        "--calibrate", type=pathlib.Path, metavar="FOLDER", help="compare with the runs of noria bench mixed in it"
    )
    parser.add_argument("--engine", choices=("auto", "exact", "fast"), default="auto", help="(auto)")
    parser.add_argument("--seed", type=_whole(0, 2**31 - 1), default=0, metavar="N", help="of all random numbers (0)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="write results.json, plots and report.html")
    return [parser]


def _number(low: float, high: float) -> Any:
    return number(low, high, f"it must be a number from {low:g} to {high:g}")


def _whole(low: int, high: int) -> Any:
    return whole(low, high, f"it must be a whole number from {low} to {high}")


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high) <= 10_000:
        raise ValueError(f"{text!r}; it must be the fewest and the most devices, such as 2-16, at most 10000")
    return int(low), int(high)


def _run(arguments: argparse.Namespace) -> int:
    """Simulate a cluster in virtual time, with the scheduler, the router and the autoscaler of the server.

    Says latencies and costs, and with --p99 how many devices are needed; with --clients what each client gets. Several
    values of --slots or --policy are compared; --spot adds the same devices without interruptions, and --canary those
    without a canary.
    """
    from noria_bench.simulator import page, trace
    from noria_bench.simulator.study import Study

    if arguments.out is not None:
        make_results_folder(arguments.out)
    if arguments.calibrate is not None:
        return _calibrate(arguments)
    device = _device(arguments)
    if arguments.clients is not None:
        return _simulate_clients(arguments, device)
    traffic = _traffic(arguments, device)
    if arguments.write_trace is not None:
        num = trace.write_trace(arguments.write_trace, iter(traffic.arrivals()))
        print(f"{num} requests are in {arguments.write_trace}")
        return 0
    study, scenarios = Study(traffic, arguments.engine), _scenarios(arguments, device)
    lines = [traffic.description, _device_line(device, traffic.shapes)]
    print("\n".join(lines), end="\n\n", flush=True)
    results = [study.run(each, arguments.p99) for each in scenarios]
    print(page.table_of(page.rows_of(results)).markdown())
    if arguments.out is not None:
        print(f"\nthe report is {page.write_report(arguments.out, results, lines, arguments.p99)}")
    return 0


def _refuse(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise SimulateError if one of these options is given."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise SimulateError(f"{reason}: leave out --{name.replace('_', '-')}")


def _simulate_clients(arguments: argparse.Namespace, device: Any) -> int:
    """Simulate several clients, by policy, and print what each gets."""
    from noria_bench.simulator import clients, page

    names = ("arrivals", "rate", "shapes", "trace", "write_trace", "p99", "autoscale", "spot")
    _refuse(arguments, names, "--clients send their requests themselves")
    if arguments.canary or arguments.engine == "fast":
        raise SimulateError("--clients takes no canary, and the fast engine knows no clients")
    groups = clients.EXAMPLE_GROUPS if arguments.clients is True else clients.read_groups(arguments.clients)
    scenarios, duration_s = _scenarios(arguments, device), arguments.duration or 600.0
    lines = [f"{'; '.join(group.text for group in groups)}. For {duration_s:,.0f} s.", _device_line(device, ())]
    print("\n".join(lines), end="\n\n", flush=True)
    rows = clients.rows_of(
        [
            each
            for scenario in scenarios
            for each in clients.simulate_clients(scenario, groups, duration_s, arguments.seed)
        ]
    )
    table = clients.table_of(rows)
    print(table.markdown())
    if arguments.out is not None:
        print(f"\nthe report is {page.write_page(arguments.out, 'Noria simulation: clients', lines, table, [], rows)}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    """Simulate measured runs, and print the latencies of both."""
    from noria_bench.simulator import calibration

    traffic, world = ("arrivals", "rate", "duration", "shapes", "trace"), ("device", "p99", "slots", "autoscale")
    names = (*traffic, *world, "failures", "spot")
    _refuse(arguments, names, "--calibrate takes what it simulates from the measured runs")
    found = calibration.calibrate(arguments.calibrate)
    print(calibration.table_of(found).markdown())
    if arguments.out is not None:
        print(f"\nthe report is {calibration.write_report(arguments.out, found)}")
    return 0


def _device(arguments: argparse.Namespace) -> Any:
    from noria_bench.simulator.devices import EXAMPLE, read_device

    return EXAMPLE if arguments.device is None else read_device(arguments.device)


def _device_line(device: Any, shapes: Any) -> str:
    """Return what the costs are of, and which sizes they lack."""
    from noria_bench.simulator.devices import EXAMPLE

    line = f"Device: {device.name}."
    if device is EXAMPLE:
        line = "Device: an example, round numbers of no particular one; --device names a file of costs."
    wanted = {(shape.width_px, shape.height_px) for shape in shapes} - set(device.sizes)
    if wanted:
        sizes = ", ".join(f"{width_px} × {height_px}" for width_px, height_px in sorted(wanted)[:5])
        line += f" It has no costs of {sizes} px{' and others' if len(wanted) > 5 else ''}: estimated by area."
    return line


def _traffic(arguments: argparse.Namespace, device: Any) -> Any:
    from noria_bench.simulator import trace
    from noria_bench.simulator.study import Traffic
    from noria_bench.simulator.workload import Shape, read_json

    if arguments.trace is not None:
        _refuse(arguments, ("arrivals", "rate", "duration", "shapes"), "--trace has all requests")
        read = trace.CONVERTERS.get(arguments.trace_format, trace.read_trace)
        arrivals = tuple(read(arguments.trace))
        if not arrivals:
            raise SimulateError(f"{arguments.trace} has no requests below its header")
        return Traffic("trace", seed=arguments.seed, trace=arrivals, shapes=_shapes_of(arrivals))
    width_px, height_px = device.sizes[0]
    shapes: tuple[Shape, ...] = (Shape(width_px=width_px, height_px=height_px),)
    if arguments.shapes is not None:
        example = '; shapes are a list such as [{"share": 1, "steps": 20}]'
        shapes = read_json(arguments.shapes, tuple[Shape, ...], "", example)
        for number, shape in enumerate(shapes):
            if problem := shape.problem():
                raise SimulateError(f"{arguments.shapes}: shape {number}: {problem}")
        if not shapes or not sum(shape.share for shape in shapes):
            raise SimulateError(f"{arguments.shapes} has no shape with a share above 0")
    rate, duration_s = arguments.rate or 1.0, arguments.duration or 600.0
    return Traffic(arguments.arrivals or "poisson", rate, duration_s, shapes, arguments.seed)


def _shapes_of(arrivals: Any) -> Any:
    """Return a shape for each kind of request in a trace."""
    from collections import Counter

    from noria_bench.simulator.workload import Shape

    counts = Counter(each[1:-2] for each in arrivals)  # without the client and its weight
    return tuple(Shape(float(num), *fields) for fields, num in counts.most_common(1000))


def _scenarios(arguments: argparse.Namespace, device: Any) -> list[Any]:
    from dataclasses import replace

    from noria.scheduling.cluster.autoscaler import AutoscalerSettings
    from noria.scheduling.policies import POLICIES
    from noria_bench.simulator.study import Scenario, scenarios
    from noria_bench.simulator.world import Settings

    policies = arguments.policy or (["least-slack"] if arguments.clients is None else list(POLICIES))
    if unknown := [name for name in policies if name not in POLICIES]:
        raise SimulateError(f"--policy {unknown[0]!r} is unknown; policies are {', '.join(POLICIES)}")
    if arguments.autoscale is not None and arguments.p99 is not None:
        raise SimulateError("--p99 searches a number of devices, and --autoscale changes it: use one of them")
    low, high = arguments.autoscale or (arguments.devices, arguments.devices)
    settings = Settings(
        device,
        low,
        queue_limit=arguments.queue_limit,
        mean_time_to_failure_s=arguments.failures or math.inf,
        canary_share=arguments.canary,
        seed=arguments.seed,
    )
    autoscale = AutoscalerSettings(low, high, arguments.target_backlog) if arguments.autoscale else None
    base = Scenario("", settings, device.price_per_hour, autoscale)
    found = scenarios(base, policies, arguments.slots or [device.slots], arguments.fair_width_slack)
    if arguments.canary:
        without = [replace(each, settings=replace(each.settings, canary_share=0.0)) for each in found]
        found = [*without, *(replace(each, name=f"{each.name}, canary {arguments.canary:g}") for each in found)]
    if arguments.spot is not None:
        price = device.spot_price_per_hour
        if price is None:
            raise SimulateError("--spot needs spot_price_per_hour in the file of --device")
        found += [
            replace(
                each,
                name=f"{each.name}, spot",
                price_per_hour=price,
                settings=replace(each.settings, mean_time_to_interruption_s=arguments.spot),
            )
            for each in found
        ]
    return found
