"""`noria top`: its arguments. `session.py` does the work."""

import argparse
import os
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_command, add_settings, config_from
from noria.cli.server_address import ADDRESS_SETTINGS, checked_url, local_url


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    usage = "[URL] [--key-file FILE] [--once]"
    parser = add_command(commands, "top", run, usage, "watch a server's running batch in the terminal")
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="of the server (the settings' address: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--key-file", metavar="FILE", type=pathlib.Path, help="a file with the API key alone (the key in NORIA_API_KEY)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame of any height and exit")
    add_settings(parser, *ADDRESS_SETTINGS)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Watch a server: every slot of its running batch, its queue, its last iterations and its statistics. `q` quits."""
    from noria.cli.top import session

    key = session.read_key(arguments.key_file, os.environ)
    if arguments.url is not None:
        return session.run(checked_url(arguments.url), key, once=arguments.once)
    frontend = config_from(arguments).frontend
    return session.run(local_url(frontend), key, once=arguments.once, certfile=frontend.ssl_certfile)
