"""Numbers of examples: the same few at each run, and many new ones in `make test-random`."""

from hypothesis import settings

_MORE_IN_A_SEARCH = 8


def examples(number: int) -> int:
    """Return `number`, or eight times as many where new examples are searched for."""
    return number * (_MORE_IN_A_SEARCH if settings.get_current_profile_name() == "searching" else 1)
