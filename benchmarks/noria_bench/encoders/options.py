"""The command `noria bench encoders` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria.cli.parser import Parser, add_settings
from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import CONNECTIONS, ROUNDS, SECONDS, names, ordered, wholes

Corpus = Literal["fixed", "mixed"]
"""The texts: one sentence, as the reference article sent it, or texts of many lengths."""

CORPORA: tuple[Corpus, ...] = get_args(Corpus)

# In the order of the tables.
TARGETS = (
    "raw",
    "raw-bfloat16",
    "noria",
    "noria-8",
    "noria-bfloat16",
    "fastapi",
    "triton-1",
    "triton-1-batching",
    "triton-n",
    "triton-n-batching",
    "triton-best",
    "litserve",
    "bentoml",
    "infinity",
)
_NO_DEFAULTS = ("noria-8", "triton-n", "triton-n-batching", "infinity")
_DEFAULT_TARGETS = tuple(name for name in TARGETS if name not in _NO_DEFAULTS)


@dataclass(frozen=True)
class EncodersOptions:
    """The measurements to make; each load takes `seconds`."""

    targets: tuple[str, ...] = _DEFAULT_TARGETS
    connections: tuple[int, ...] = (1, 16, 128)
    seconds: float = 4.0
    corpora: tuple[Corpus, ...] = CORPORA
    load_percents: tuple[int, ...] = (30, 60, 85)  # rates of an open loop, in % of the raw loop's texts per second
    num_rounds: int = 2
    sweeps: bool = True  # whether the best settings are looked for; otherwise the first candidates are used
    seed: int = 1


QUICK = EncodersOptions(connections=(1, 16), seconds=2.0, load_percents=(60,), num_rounds=1, sweeps=False)
"""A run of some three minutes, which shows that all works."""

_OPEN_LOOPS = ordered(wholes(1, 100, "open loops are none, or percents of the raw loop's rate, such as 30,60,85"))


def _read_open_loops(text: str) -> tuple[int, ...]:
    return () if text == "none" else _OPEN_LOOPS(text)


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="minilm",
        help="a folder in transformers format, a hub id, minilm (the default), or free: a model that costs nothing, "
        "so that only the way of a request is measured",
    )
    add_settings(parser)


def _add_no_sweeps(parser: Parser) -> None:
    parser.add_argument(
        "--no-sweeps",
        dest="sweeps",
        action="store_const",
        const=False,
        help="use each target's first settings instead of looking for the best",
    )


COMMAND = BenchCommand(
    "encoders",
    "text encoders: Noria beside Triton, LitServe, BentoML, FastAPI and Infinity",
    "Measure text encoders: Noria beside other servers, on a CPU in about twenty minutes; --devices names a GPU.",
    EncodersOptions(),
    (
        (
            "--targets A,B|all",
            "targets",
            names(TARGETS, "targets"),
            f"of {', '.join(TARGETS)} (all but {', '.join(_NO_DEFAULTS)})",
        ),
        ("--connections A,B", "connections", CONNECTIONS, "of the closed loops, 1 to 128"),
        ("--seconds", "seconds", SECONDS, "of each load"),
        (
            "--corpus",
            "corpora",
            names(CORPORA, "corpora"),
            "fixed: one sentence; mixed: 4 to 256 tokens; all (the default)",
        ),
        ("--open-loops A,B|none", "load_percents", _read_open_loops, "percents of the raw loop's rate"),
        ("--rounds", "num_rounds", ROUNDS, "in which all targets are measured in turn"),
    ),
    usage="[MODEL] [--targets A,B|all] [--quick] [--out FOLDER]",
    add_model=_add_model,
    add_more=_add_no_sweeps,
    seed_of="the texts and arrivals",
    quick=QUICK,
    quick_help="one short round without sweeps, in some three minutes",
)
