"""`python -m noria_bench quick …` is `noria bench quick …` without an installation."""

import sys

from noria.cli.main import run
from noria.cli.parser import Parser
from noria_bench.cli import add_benches


def main() -> int:
    """Run the bench that the arguments name; returns the exit status."""
    parser = Parser(prog="noria")
    add_benches(parser.add_subparsers(metavar="COMMAND", required=True))
    return run(parser.parse_args(["bench", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
