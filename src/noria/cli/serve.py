"""`noria serve`: serves models over HTTP."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, add_model_and_settings, config_from


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_command(commands, "serve", run, "[MODEL]", "serve a model over HTTP")
    add_model_and_settings(parser)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; requests in flight are finished first."""
    config = config_from(arguments)

    from noria.supervisor import supervisor

    return supervisor.serve(config)
