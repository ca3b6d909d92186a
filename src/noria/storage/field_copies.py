"""Structs and dataclasses with fields of something else, such as a row of a query."""

from typing import Any, TypeVar

T = TypeVar("T")


def copy_fields(kind: type[T], source: object, **own: object) -> T:
    """Return a `kind` with these fields of its own, and with the source's of the same names."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]  # all fields but keyword-only ones, of both
    values: dict[str, Any] = {name: getattr(source, name) for name in names if name not in own}
    return kind(**values, **own)
