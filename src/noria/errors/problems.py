"""Collects what is wrong with a request, so that one error says all of it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from noria.errors import InvalidField, RequestError

_MAX_SAID = 20  # errors in a message

T = TypeVar("T")
OtherT = TypeVar("OtherT")


class Problems:
    """The errors found so far in the fields of a request."""

    def __init__(self) -> None:
        self._found: dict[str, InvalidField] = {}  # by their messages

    @property
    def are_there(self) -> bool:
        """Whether there are errors."""
        return bool(self._found)

    def add(self, *errors: InvalidField, are_of_form: bool = False) -> None:
        """Add errors, or the parts of those that have some; `are_of_form`: every model would reject them."""
        for part in (part for error in errors for part in error.parts or (error,)):
            part.is_of_form |= are_of_form
            self._found.setdefault(part.message, part)

    def attempt(self, check: Callable[[], T], otherwise: OtherT) -> T | OtherT:
        """Return what `check` returns; if it raises InvalidField, add the error and return `otherwise`."""
        try:
            return check()
        except InvalidField as error:
            self.add(error)
            return otherwise

    def as_one(self) -> InvalidField | None:
        """Return the error; if there are several, one that says all of them and names the first's field."""
        return combined([*self._found.values()]) if self._found else None

    def raise_all(self) -> None:
        """Raise `as_one`, if there is an error."""
        if (error := self.as_one()) is not None:
            raise error


def combined(errors: Sequence[InvalidField]) -> InvalidField:
    """Return one error for `errors`, which are its parts. It is of their type, if they are of one.

    Its message says the first `_MAX_SAID` and how many more there are.
    """
    first, *others = errors
    if not others:
        return first
    kind = type(first) if all(type(each) is type(first) for each in others) else InvalidField
    said, num_more = [each.message for each in errors[:_MAX_SAID]], len(errors) - _MAX_SAID
    error = kind(" ".join([*said, f"And {num_more} more."] if num_more > 0 else said), field=first.field)
    error.parts, error.is_of_form = tuple(errors), any(each.is_of_form for each in errors)
    return error


def each_part(error: RequestError, change: Callable[[RequestError], RequestError]) -> RequestError:
    """Return `error` as `change` returns it, or each of its parts."""
    if not isinstance(error, InvalidField):
        return change(error)
    changed = []
    for part in error.parts or (error,):
        changed_part = change(part)
        assert isinstance(changed_part, InvalidField), "a change of words"
        changed_part.is_of_form = part.is_of_form
        changed.append(changed_part)
    return combined(changed)
