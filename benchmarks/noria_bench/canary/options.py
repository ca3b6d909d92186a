"""The command `noria bench canary` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import whole


@dataclass(frozen=True)
class CanaryOptions:
    """The canaries to simulate."""

    num_runs: int = 1000  # A/A canaries
    seed: int = 1


_RUNS = whole(4, 100_000, "runs are a whole number from 4 to 100000")

COMMAND = BenchCommand(
    "canary",
    "good and bad canaries before the judge, in virtual time",
    "Simulate canaries before the judge: how many good ones are rolled back, and how soon bad ones are.",
    CanaryOptions(),
    (("--runs N", "num_runs", _RUNS, "A/A canaries; a quarter of other kinds"),),
    seed_of="the requests",
)
