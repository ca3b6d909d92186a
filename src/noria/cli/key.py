"""`noria key`: generates an API key."""

import argparse
import sys
from typing import Any

from noria.cli.parser import Parser, add_plain_command


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_plain_command(commands, "key", run, "generate an API key")
    parser.add_argument("name", metavar="NAME", help="of the key's owner: 1 to 64 of A-Z a-z 0-9 . _ -")
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Generate an API key.

    The key is printed to stderr, only this once; its table for the API keys file, with a hash, to stdout.
    """
    from noria.frontend.access.api_keys import generate_key

    key, table = generate_key(arguments.name)
    print(f"{key}\n", file=sys.stderr)
    print(table)
    return 0
