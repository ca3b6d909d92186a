"""`noria docs`: prints the documents, which the wheel has and messages name as docs/NAME.md."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command
from noria.errors import ConfigError, did_you_mean, short_repr
from noria.folders import documents


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    parser = add_plain_command(commands, "docs", run, "print a document, such as settings")
    parser.add_argument("page", metavar="NAME", nargs="?", help="as messages name it: docs/settings.md, or settings")
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Print a document as Markdown; without NAME the names of all."""
    pages = {name.removesuffix(".md"): file for name, file in documents().items()}
    if not pages:
        raise ConfigError("this installation has no documents; the wheel of noria-serve has them.")
    if arguments.page is None:
        print(*pages, sep="\n")
        return 0
    name = arguments.page.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        hint = did_you_mean(name, pages)
        main = ", ".join(page for page in pages if "/" not in page)
        raise ConfigError(
            f"there is no document {short_repr(arguments.page)}.{hint} There are: {main}; `noria docs` lists all."
        )
    print(pages[name].read_text(encoding="utf-8"), end="")
    return 0
