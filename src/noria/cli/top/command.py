"""`noria top`: its arguments. `session.py` does the work."""

import argparse
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_command, add_settings, config_from
from noria.settings import list_settings

_ADDRESS_SETTINGS = ("frontend.host", "frontend.port", "frontend.uds", "frontend.ssl_certfile")


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    usage = "[URL] [--key-file FILE] [--once]"
    parser = add_command(commands, "top", run, usage, "watch a server's running batch in the terminal")
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="of the server (the settings' address: http://127.0.0.1:8000)"
    )
    parser.add_argument("--key-file", metavar="FILE", type=pathlib.Path, help="a file with the API key alone")
    parser.add_argument("--once", action="store_true", help="print one frame of any height and exit")
    add_settings(parser, [setting for setting in list_settings() if setting.key in _ADDRESS_SETTINGS])
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Watch a server: every slot of its running batch, its queue, its last iterations and its statistics. `q` quits."""
    from noria.cli.top import session
    from noria.cli.top.stream import checked_url, local_url

    if arguments.url is not None:
        return session.run(checked_url(arguments.url), arguments.key_file, once=arguments.once)
    frontend = config_from(arguments).frontend
    return session.run(local_url(frontend), arguments.key_file, once=arguments.once, certfile=frontend.ssl_certfile)
