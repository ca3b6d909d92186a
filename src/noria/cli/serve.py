"""`noria serve`: serves models over HTTP."""

import argparse
import contextlib
import threading
from typing import Any

from noria.cli.parser import Parser, add_command, add_model_and_settings, config_from
from noria.config import Config


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "serve", run, "[MODEL]", "serve a model over HTTP")
    parser.add_argument(
        "--on",
        metavar="local|ray://HOST:PORT",
        help="serve on Ray, with front ends and engines on many machines: `local` starts a Ray on this one "
        "(docs/ray.md). Needs noria-serve[ray]",
    )
    add_model_and_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; requests in flight are finished first."""
    config = config_from(arguments)
    if arguments.on is not None:
        return _run_on_ray(arguments.on, config)

    from noria.supervisor import supervisor

    return supervisor.serve(config)


def _run_on_ray(target: str, config: Config) -> int:
    from noria.cluster.check import check_servable
    from noria.cluster.serving import running_on

    check_servable(config, num_nodes=1)  # at once: what more nodes forbid is said when Ray has started

    with contextlib.suppress(KeyboardInterrupt), running_on(target, config) as url:
        print(f"noria serves on Ray at {url}", flush=True)
        threading.Event().wait()
    print("noria has stopped", flush=True)
    return 0
