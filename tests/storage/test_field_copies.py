"""Copies of fields by their names."""

from dataclasses import dataclass

import msgspec
import pytest

from noria.storage.field_copies import copy_fields


class Struct(msgspec.Struct):
    number: int
    name: str = "default"


@dataclass
class Data:
    number: int
    name: str = "default"
    more: str = ""


@pytest.mark.parametrize("kind", [Struct, Data])
def test_fields_come_from_the_source_but_for_those_that_are_given(kind):
    source = Data(1, "source", "more")
    assert copy_fields(kind, source) == kind(*[1, "source", "more"][: len(kind.__match_args__)])
    assert copy_fields(kind, source, name="own").name == "own"


def test_a_field_that_nobody_has_is_an_error():
    with pytest.raises(AttributeError, match="more"):
        copy_fields(Data, Struct(1))
