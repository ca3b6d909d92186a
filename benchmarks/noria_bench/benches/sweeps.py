"""The sweeps: which settings each one varies, as a table of variants. Pure.

Every variant is loaded as in the reference article's tables: scenario 2's eight users, for 45 seconds instead of 900 by
default.

The article crosses memory-efficient attention with attention slicing, in four rows. With today's diffusers there are
three: slicing replaces the attention processor, so that "both" is slicing alone.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from noria_bench.targets.catalog import TargetSettings

DEFAULT_SECONDS = 45.0


@dataclass(frozen=True)
class Variant:
    """A target with some of its settings changed."""

    name: str
    target: str
    engine: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    settings: TargetSettings | None = None  # settings of a target other than Noria


def variants(sweep: str, *, full: bool) -> tuple[Variant, ...]:
    """The variants of a sweep in the order in which they run; `full` gives the complete grid of `batching`."""
    return (*_SWEEPS[sweep], *(_batching(*_REST_OF_GRID) if full and sweep == "batching" else ()))


def _engine_settings(settings: dict[str, dict[str, Any]], *targets: str) -> tuple[Variant, ...]:
    """The variants of each target that differ in these fields of EngineConfig, by name."""
    return tuple(Variant(name, target, engine) for target in targets for name, engine in settings.items())


def _batching(*cells: tuple[int, int], target: str = "reference-batched") -> tuple[Variant, ...]:
    """The variants of a target that waits for so many milliseconds, for at most so many images."""
    return tuple(
        Variant(f"{timeout_ms} ms, {size}", target, settings=TargetSettings(timeout_ms / 1000, size))
        for timeout_ms, size in cells
    )


# Milliseconds and images, in the article's order.
_REFERENCE_BATCHING = ((500, 8), (250, 8), (1000, 8), (500, 4), (500, 16))
_REST_OF_GRID = tuple(
    cell for cell in itertools.product((250, 500, 1000), (4, 8, 16)) if cell not in _REFERENCE_BATCHING
)
_BOTH = ("reference-batched", "noria")
# The rows of 8 users, all guided: the only bucket in which compiled and eager are compared.
_BUCKET = {"buckets": (16,), "slots": 8}

_SWEEPS: dict[str, tuple[Variant, ...]] = {
    "attention": _engine_settings(
        {
            "memory-efficient": {"attention": "sdpa"},
            "sliced": {"attention": "sliced"},
            "neither": {"attention": "plain"},
        },
        "reference-batched",
    ),
    "channels-last": _engine_settings({"off": {"channels_last": False}, "on": {"channels_last": True}}, *_BOTH),
    "dtype": _engine_settings({dtype: {"dtype": dtype} for dtype in ("float32", "bfloat16")}, *_BOTH),
    "compile": _engine_settings(
        {"eager": _BUCKET | {"compile": False}, "compiled": _BUCKET | {"compile": True}}, "noria"
    ),
    "batching": _batching(*_REFERENCE_BATCHING),
    "slots": _engine_settings({f"{slots} slots": {"slots": slots} for slots in (4, 8, 16)}, "noria"),
    "policy": _engine_settings(
        {policy: {"policy": policy} for policy in ("least-slack", "shortest-first", "fcfs")}, "noria"
    ),
    # The basis of LitServe's and Ray Serve's settings in `catalog.TARGETS`; BentoML learns how long it waits. Ray forms
    # a batch while the previous one runs, from what has arrived until then: a wait shorter than a run does not fill it.
    "frameworks": (
        *_batching((5, 8), (50, 8), (200, 8), (500, 8), (200, 16), target="litserve"),
        *_batching((50, 8), (200, 8), (500, 8), (1000, 8), (2000, 8), target="ray"),
    ),
}
