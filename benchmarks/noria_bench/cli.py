"""`noria bench …`: its commands. Each bench's arguments are in a module `options` of its folder."""

import argparse
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_plain_command
from noria_bench.benches import commands as image_benches
from noria_bench.benches import deadline_options
from noria_bench.calls import options as calls
from noria_bench.canary import options as canary
from noria_bench.cluster import options as cluster
from noria_bench.command_arguments import BenchCommand
from noria_bench.cost import options as cost
from noria_bench.deploys import options as deploys
from noria_bench.device import options as device
from noria_bench.encoders import options as encoders
from noria_bench.sharing import options as sharing
from noria_bench.soak import options as soak
from noria_bench.targets import command as targets

_QUICK = BenchCommand(
    "quick",
    "the server's overhead over a bare loop",
    "Measure the server's overhead over a bare loop on this machine, in about two minutes.",
    usage="[MODEL] [-o FILE]",
    has_folder=False,
    module="noria_bench.benches.quick",
)
_STREAMING = BenchCommand(
    "streaming",
    "the cost of a StreamingResponse, without a model",
    "Measure the cost of each way to stream an image, which explains the reference article's results.",
    has_folder=False,
    module="noria_bench.benches.streaming",
)


def add_benches(commands: Any) -> list[Parser]:
    """Add `noria bench` with all its commands to argparse's subparsers; returns their parsers."""
    benches = commands.add_parser("bench", help="run benchmarks").add_subparsers(metavar="BENCH", required=True)
    with_settings = [
        _QUICK.add_to(benches),
        deadline_options.COMMAND.add_to(benches),
        cost.COMMAND.add_to(benches),
        *image_benches.add_comparisons(benches),
        calls.COMMAND.add_to(benches),
        encoders.COMMAND.add_to(benches),
        sharing.COMMAND.add_to(benches),
        deploys.COMMAND.add_to(benches),
        targets.add_serve(benches),
    ]
    report = add_plain_command(benches, "report", _report, "tables, plots and an HTML page of a folder of runs")
    report.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="the `--out` of a bench")
    plain = (_STREAMING, device.COMMAND, soak.SOAK, soak.NEIGHBOURS, canary.COMMAND, cluster.COMMAND)
    return [*with_settings, report, targets.add_install(benches), *(command.add_to(benches) for command in plain)]


def _report(arguments: argparse.Namespace) -> int:
    """Write the tables, the plots and the HTML page of a folder of runs again."""
    from noria_bench.encoders import report, results
    from noria_bench.reports import writer

    if (file := arguments.folder / results.FILE_NAME).is_file():
        print(report.write_report(results.read_result(file), arguments.folder)[0].read_text(encoding="utf-8"))
        return 0
    return writer.main(arguments.folder)
