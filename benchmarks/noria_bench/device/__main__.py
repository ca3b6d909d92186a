"""`python -m noria_bench.device`: runs the bench from a checkout where only torch and diffusers are installed."""

import argparse

from noria_bench.device.command import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m noria_bench.device", description=run.__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
