"""`python -m noria_bench.device`: the bench where only torch and diffusers are installed, beside this source."""

import argparse

from noria_bench.device.command import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m noria_bench.device", description=run.__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
