"""A change of the registry, as all of its rows have it."""

from msgspec import Struct


class Change(Struct, frozen=True):
    """Who asked for a change, when and why."""

    at: float
    by: str
    why: str = ""
