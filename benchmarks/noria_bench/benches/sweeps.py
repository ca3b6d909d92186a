"""The sweeps: which settings each one varies, as a table of variants. Pure.

Every variant is loaded as in the reference article's tables: scenario 2's eight users, for 45 seconds instead of 900 by
default.

The article crosses memory-efficient attention with attention slicing, in four rows. With today's diffusers there are
three: slicing replaces the attention processor, so that "both" is slicing alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from noria_bench.targets.catalog import TargetSettings

DEFAULT_SECONDS = 45.0
# Milliseconds and images, in the article's order.
_REFERENCE_BATCHING = ((500, 8), (250, 8), (1000, 8), (500, 4), (500, 16))
# The rows of 8 users, all guided: the only bucket in which compiled and eager are compared.
_USERS_ROWS = 16


@dataclass(frozen=True)
class Variant:
    """A target with some of its settings changed."""

    name: str
    target: str
    engine: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    settings: TargetSettings | None = None  # settings of a target other than Noria


def variants(sweep: str, *, full: bool) -> tuple[Variant, ...]:
    """The variants of a sweep in the order in which they run; `full` gives complete grids."""
    return _SWEEPS[sweep](full)


def _attention(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001 - all sweeps have one signature
    names = {"sdpa": "memory-efficient", "sliced": "sliced", "plain": "neither"}
    return tuple(Variant(name, "reference-batched", {"attention": kind}) for kind, name in names.items())


def _channels_last(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    return tuple(
        Variant(name, target, {"channels_last": on})
        for target in ("reference-batched", "noria")
        for name, on in (("off", False), ("on", True))
    )


def _dtype(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    return tuple(
        Variant(dtype, target, {"dtype": dtype})
        for target in ("reference-batched", "noria")
        for dtype in ("float32", "bfloat16")
    )


def _compile(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    bucket = {"buckets": (_USERS_ROWS,), "slots": _USERS_ROWS // 2}
    return tuple(
        Variant(name, "noria", {"compile": on} | bucket) for name, on in (("eager", False), ("compiled", True))
    )


def _batching(full: bool) -> tuple[Variant, ...]:
    grid = [(timeout_ms, size) for timeout_ms in (250, 500, 1000) for size in (4, 8, 16)]
    cells = (*_REFERENCE_BATCHING, *(cell for cell in grid if full and cell not in _REFERENCE_BATCHING))
    return tuple(
        Variant(
            f"{timeout_ms} ms, {size}",
            "reference-batched",
            settings=TargetSettings(timeout_s=timeout_ms / 1000, max_images=size),
        )
        for timeout_ms, size in cells
    )


def _slots(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    return tuple(Variant(f"{slots} slots", "noria", {"slots": slots}) for slots in (4, 8, 16))


def _policy(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    return tuple(Variant(policy, "noria", {"policy": policy}) for policy in ("least-slack", "shortest-first", "fcfs"))


# Ray forms a batch while the previous one runs, from what has arrived until then: a wait shorter than a run does not
# fill it.
_FRAMEWORKS_BATCHING = {
    "litserve": ((5, 8), (50, 8), (200, 8), (500, 8), (200, 16)),
    "ray": ((50, 8), (200, 8), (500, 8), (1000, 8), (2000, 8)),
}


def _frameworks(full: bool) -> tuple[Variant, ...]:  # noqa: ARG001
    """The basis of LitServe's and Ray Serve's settings in `catalog.TARGETS`. BentoML learns how long it waits."""
    return tuple(
        Variant(f"{timeout_ms} ms, {size}", framework, settings=TargetSettings(timeout_ms / 1000, size))
        for framework, cells in _FRAMEWORKS_BATCHING.items()
        for timeout_ms, size in cells
    )


_SWEEPS: dict[str, Callable[[bool], tuple[Variant, ...]]] = {
    "attention": _attention,
    "channels-last": _channels_last,
    "dtype": _dtype,
    "compile": _compile,
    "batching": _batching,
    "slots": _slots,
    "policy": _policy,
    "frameworks": _frameworks,
}
