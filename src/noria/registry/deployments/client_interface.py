"""Compares a version with what serves an endpoint: clients must not notice that it joins.

Legitimate are other weights, defaults that change only the content of images and rows, and wider limits. A property
that is in neither table must be equal, so that one which specs get later is compared, too.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from noria.errors import RegistryError, short_list, short_repr
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec

MAY_CHANGE = frozenset({
    "name", "folder", "fingerprint", "family", "num_parameters",
    "pipeline", "default_scheduler", "default_steps", "default_guidance", "default_strength", "default_calls",
    "default_prompt_syntax", "family_clip_skip", "default_clip_skip", "reference_size", "guidance_rescale",
    "cfg_normalization",
    "architecture", "pooling", "fill_id", "lowercases", "dense", "head", "template", "splade", "late_interaction",
    "default_prompt", "matryoshka_dimensions", "truncation_side", "unread_keys",
})  # fmt: skip


def _has_all(before: tuple[str, ...], after: tuple[str, ...]) -> bool:
    return set(before) <= set(after)


WIDENS: Mapping[str, Callable[[Any, Any], bool]] = {  # by field: whether the second value allows all that the first did
    "min_side_px": operator.ge,
    "max_side_px": operator.le,
    "multiple_px": lambda before, after: before % after == 0,
    "schedulers": _has_all,
    "max_references": operator.le,
    "takes_start_images": operator.le,
    "takes_loras": operator.le,
    "prompt_syntaxes": _has_all,
    "max_clip_skip": operator.le,
    "needs_mask": operator.ge,
    "max_length": operator.le,
    "inputs": _has_all,
    "prompts": _has_all,  # their names
}


def check_fits(version: str, spec: AnyModelSpec, serving: AnyModelSpec) -> None:
    """Raise RegistryError if clients of an endpoint would notice that `version` answers instead of what serves."""
    if changes := interface_changes(serving, spec):
        raise RegistryError(
            f"{version} is {_described(spec)}, and {spec.name} is served by one {_described(serving)}; clients of "
            f"{spec.name} would notice: {'; '.join(changes)}. Deploy it to another endpoint."
        )


def interface_changes(before: AnyModelSpec, after: AnyModelSpec) -> list[str]:
    """Return what clients of `before` would notice of `after`, one text for each property; empty: nothing."""
    if before.kind != after.kind:
        return [f"kind {after.kind} instead of {before.kind}"]
    old, new = _properties(before), _properties(after)
    return [
        _change(name, old[name], new[name])
        for name in old
        if not (WIDENS[name](old[name], new[name]) if name in WIDENS else old[name] == new[name])
    ]


def _change(name: str, before: Any, after: Any) -> str:
    if WIDENS.get(name) is _has_all:  # nobody sees what differs in long lists
        return f"{name} without {short_list(short_repr(each) for each in before if each not in after)}"
    return f"{name} {short_repr(after)} instead of {short_repr(before)}"


def _properties(spec: AnyModelSpec) -> dict[str, Any]:
    found = {name: value for name, value in msgspec.structs.asdict(spec).items() if name not in MAY_CHANGE}
    if isinstance(spec, DiffusionModelSpec):
        return found
    # The two other types of problem have their own activations, and no type may be the same as one of them.
    return found | {
        "prompts": tuple(name for name, _ in spec.prompts),
        "problem_type": "regression" if spec.problem_type == "regression" else "classification",
    }


def _described(spec: AnyModelSpec) -> str:
    if isinstance(spec, DiffusionModelSpec):
        size = f"{spec.default_width_px} × {spec.default_height_px} px"
        sides = f"{spec.min_side_px} to {spec.max_side_px} px a side"
        return f"of kind {spec.kind} (images of {size}, {sides})"
    of_each = "token" if spec.task.startswith("token_") else "text"
    plural = "" if spec.dimensions == 1 else "s"
    return f"of kind {spec.kind} (task {spec.task}, {spec.dimensions} number{plural} for each {of_each})"
