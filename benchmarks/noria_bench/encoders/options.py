"""Options of `noria bench encoders`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

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
