"""Messages about wrong bodies: each names the field, its value and the allowed ones, and all wrong fields at once."""

import time
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from noria.errors import InvalidBody, InvalidField, short_repr
from noria.frontend.http.body import decode
from noria.frontend.registry.version_routes import AddVersionBody
from noria.protocol.request import ImageRequestBody


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Body(msgspec.Struct, forbid_unknown_fields=True):
    size: str
    n: Annotated[int, Meta(ge=1, lt=5)] = 1
    strength: Annotated[float, Meta(gt=0, le=1)] = 0.5
    prompt: Annotated[str, Meta(max_length=3)] = ""
    format: Literal["png", "webp"] | None = None
    flag: bool | None = None
    sizes: list[int | str] = []
    flags: list[bool] = []
    table: dict[str, int] = {}
    inner: Inner | None = None
    inners: list[Inner] = []


KNOWN = " Known are: size, n, strength, prompt, format, flag, sizes, flags, table, inner, inners."


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ('"n": 0', "n", "n is 0; allowed is 1 or more."),
        ('"n": 5', "n", "n is 5; allowed is 4 or less."),
        ('"n": 1.5', "n", "n is 1.5; allowed is an integer."),
        ('"n": 0, "n": 1', "n", "n is 1; allowed is 1 or more."),  # msgspec's words for the first
        ('"strength": 0', "strength", "strength is 0; allowed is more than 0.0."),
        ('"strength": 2', "strength", "strength is 2; allowed is 1.0 or less."),
        ('"strength": 1e999', "strength", "strength is out of range; allowed is a number."),
        ('"prompt": "abcd"', "prompt", "prompt has more than 3 characters."),
        ('"format": "gif"', "format", """format is 'gif'; allowed is "png", "webp" or null."""),
        ('"flag": 1', "flag", "flag is 1; allowed is true, false or null."),
        ('"flags": 1', "flags", "flags is 1; allowed is a list of true or false."),
        ('"sizes": 3', "sizes", "sizes is 3; allowed is a list of integers or strings."),
        ('"sizes": [true]', "sizes", "sizes[0] is true; allowed is an integer or a string."),
        ('"sizes": [1, null]', "sizes", "sizes[1] is null; allowed is an integer or a string."),
        ('"table": []', "table", "table is []; allowed is an object."),
        ('"table": {"a": "b"}', "table", "table[...]: Expected `int`, got `str`."),
        ('"inner": {}', "inner", "inner.name is missing."),
        ('"inner": {"name": null}', "inner", "inner.name is null; allowed is a string."),
        ('"inner": {"name": "a", "x": 1}', "inner", "inner has the unknown field 'x'."),
        ('"inner": 3', "inner", "inner is 3; allowed is an object or null."),
        ('"inners": [3]', "inners", "inners[0] is 3; allowed is an object."),
        ('"inners": {}', "inners", "inners is {}; allowed is a list of objects."),
        ('"width": 3', "width", "unknown field 'width'. Did you mean 'size'?" + KNOWN),
        ('"width": 3, "hight": 4', "width", "unknown fields 'width', 'hight'. Did you mean 'size'?" + KNOWN),
        (
            ", ".join(f'"{name}": 1' for name in "abcdefgh"), "a",
            "unknown fields 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'." + KNOWN,
        ),
        (
            ", ".join(f'"{name}": 1' for name in "abcdefghi"), "a",
            "unknown fields 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' and others." + KNOWN,
        ),
        (f'"{"x" * 100}": 1', "x" * 80, f"unknown field {short_repr('x' * 100)}.{KNOWN}"),
        ('"n": 0, "flag": ""', "n", "n is 0; allowed is 1 or more."),
        ('"n": 0, "nn": 1', "n", "n is 0; allowed is 1 or more. unknown field 'nn'." + KNOWN),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_value_and_the_allowed_ones(fields, field, message):
    with pytest.raises(InvalidField) as raised:
        decode(f'{{"size": "s", {fields}}}'.encode(), Body)
    assert (raised.value.field, raised.value.message) == (field, message)


def test_missing_fields_are_named_beside_wrong_ones_and_an_empty_text_is_one_that_is_left_out():
    for raw, field, message in (
        (b"{}", "size", "size is missing."),
        (b'{"n": 0}', "size", "size is missing. n is 0; allowed is 1 or more."),
        (b'{"size": 3, "n": ""}', "size", "size is 3; allowed is a string."),
    ):
        with pytest.raises(InvalidField) as raised:
            decode(raw, Body)
        assert (raised.value.field, raised.value.message) == (field, message)
    assert decode(b'{"size": "", "n": "", "flag": true}', Body) == Body("", flag=True)
    assert decode(b'{"size": "s", "n": 2.0}', Body) == Body("s", n=2)


_NOT_JSON = "the body is not JSON: "


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b" ", "the body is empty; send a JSON object, whose fields /docs has."),
        (b"[]", "the body is not an object: Expected `object`, got `array`."),
        (b"null", "the body is not an object: Expected `object`, got `null`."),
        (b'{"size": "s"', _NOT_JSON + "Input data was truncated."),
        (
            b'{"size": NaN}',
            _NOT_JSON + "JSON is malformed: invalid character (byte 9). NaN and Infinity are no JSON numbers.",
        ),
        (
            b'{"size": "\\ud83d"}',
            _NOT_JSON + "Input data was truncated. Surrogates such as \\ud83d are characters in pairs only.",
        ),
    ],
)
def test_a_body_that_is_no_json_object_is_answered_with_the_cause(raw, message):
    with pytest.raises(InvalidBody) as raised:
        decode(raw, Body)
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "x", "loras": [{}]}', "loras[0].name is missing."),
        (b'{"prompt": "x", "loras": [{"name": "a", "wight": 1}]}', "loras[0] has the unknown field 'wight'."),
        (b'{"prompt": "x", "loras": [{"name": 1}]}', "loras[0].name is 1; allowed is a string."),
        (b'{"prompt": "x", "loras": [{"name": 1}], "loras": 5}', "loras[0].name: Expected `str`, got `int`."),
    ],
)
def test_a_wrong_element_of_a_list_is_named(body, message):
    with pytest.raises(InvalidField) as raised:
        decode(body, ImageRequestBody)
    assert (raised.value.message, raised.value.field) == (message, "loras")


@pytest.mark.parametrize(
    ("model", "allowed"), [('""', "of length >= 1"), ('"a\\u0000"', "matching regex '^[^\\\\x00]*$'")]
)
def test_a_wrong_string_is_answered_with_the_allowed_ones(model, allowed):
    with pytest.raises(InvalidField) as raised:
        decode(f'{{"model": {model}, "source": "bundled"}}'.encode(), AddVersionBody)
    assert raised.value.message.endswith(f"allowed is a string {allowed}.")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": 5, "negative_prompt": "\xff"}', "prompt is in a body that is not UTF-8; allowed is a string."),
        (
            b'{"prompt": 5, "seed": 1e999}',
            "prompt is 5; allowed is a string. seed is out of range; allowed is an integer or null.",
        ),
    ],
)
def test_wrong_fields_of_a_body_are_named_beside_values_that_cannot_be_decoded(body, message):
    with pytest.raises(InvalidField) as raised:
        decode(body, ImageRequestBody)
    assert raised.value.message == message


def test_all_wrong_fields_of_a_long_body_are_named_soon():
    names = ImageRequestBody.__struct_fields__
    body = msgspec.json.encode({name: {} for name in names} | {"image": [1] * 4_000_000})
    started = time.process_time()
    with pytest.raises(InvalidField) as raised:
        decode(body, ImageRequestBody)
    assert time.process_time() - started < 1  # one decoding takes 0.07 s
    assert all(f"{name} is " in raised.value.message for name in names[:20])
