"""Request bodies, bounded in length, time and number: JSON of a known shape, or a refusal that names the field, the value got and the
values allowed.

msgspec checks shape and types; this module only turns its messages into ours. Bounds are `admission.py`'s.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RequestCancelled,
    UnsupportedMediaType,
    did_you_mean,
    shown,
)
from noria.frontend.places import Places, client_of

T = TypeVar("T", bound=msgspec.Struct)

# The default max_body_bytes at 35 kB/s. A body that stops half-way would hold its connection for ever.
_TIMEOUT_S = 30.0

MOST_LONG = 64  # 64 MiB with the default max_body_bytes
MOST_LONG_OF_A_CLIENT = 16
_SHORT_BYTES = 65_536  # as much of a body as uvicorn has by itself; no request that is drawn comes near
_COME_AGAIN_S = 5.0  # a body takes up to 30 s, most take less than one

_JSON_NAMES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list"}


class Bodies:
    """Reads JSON for every route of a front end.

    A short body costs no more than its connection does. Of long ones so many are received at once that all of them together fit into memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._long = Places(
            f"bodies of more than {_SHORT_BYTES} bytes", MOST_LONG, MOST_LONG_OF_A_CLIENT, _COME_AGAIN_S
        )

    async def read_json(self, http: Request, kind: type[T]) -> T:
        """The body of `http` as a `kind`; raises as `read` and `decode` do."""
        return decode(await self.read(http), kind)

    async def read(self, http: Request) -> bytes:
        """The body of `http`, which says that it is JSON.

        Raises:
            UnsupportedMediaType: the Content-Type is not application/json.
            RateLimited: too many long ones are being received; where the length is announced, nothing of this one has been asked for.
            BodyTooLarge, InvalidBody, RequestCancelled: as `read_bytes` does.

        """
        media_type = http.headers.get("content-type", "")
        if media_type.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType(f"Content-Type is {shown(media_type)}; send application/json.")
        long = False
        with contextlib.ExitStack() as place:

            def grow(num_bytes: int) -> None:
                nonlocal long
                if num_bytes > _SHORT_BYTES and not long:
                    place.enter_context(self._long.one(client_of(http)))
                    long = True

            return await read_bytes(http, self._max_bytes, grow)


async def read_bytes(http: Request, max_bytes: int, grow: Callable[[int], None] = lambda _: None) -> bytes:
    """The body of `http`, whatever it says that it is.

    `grow` is told how long the body is going to be, or is by now, and may raise.

    Raises:
        BodyTooLarge: without having kept more than `max_bytes`.
        InvalidBody: too slow; then `http.state.must_close` is set.
        RequestCancelled: the client left.

    """
    too_large = BodyTooLarge(f"the body is longer than {max_bytes} bytes.")
    announced = int(http.headers.get("content-length", 0))
    if announced > max_bytes:
        raise too_large
    grow(announced)
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in http.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
                grow(len(body))
    except TimeoutError as error:
        http.state.must_close = True
        raise InvalidBody(f"the body did not arrive within {_TIMEOUT_S:g} s; {len(body)} bytes of it did.") from error
    except ClientDisconnect as error:
        raise RequestCancelled("the client left before the end of its request.") from error
    return bytes(body)


def decode(raw: bytes, kind: type[T], *, strict: bool = True) -> T:
    """`raw` as a `kind`; numbers and booleans may come as strings if not `strict`.

    Raises:
        InvalidBody: not JSON, or not an object.
        InvalidField: an unknown field, a missing one, or one of another type.

    """
    try:
        return msgspec.json.decode(raw, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _in_our_words(str(error), raw, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBody(_why_not_json(raw, error)) from error


def _why_not_json(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return 'the body is empty; send a JSON object such as {"prompt": "a red bicycle"}.'
    hint = " NaN and Infinity are no JSON numbers." if re.search(rb"\b(NaN|Infinity)\b", raw) else ""
    return f"the body is not JSON: {error}.{hint}"


def _in_our_words(text: str, raw: bytes, kind: type[T]) -> InvalidBody | InvalidField:
    """A sentence of msgspec's, such as "Expected `int | null`, got `str` - at `$.seed`", as an error of ours."""
    fields = kind.__struct_fields__
    what, _, place = text.partition(" - at `$")
    field = re.split(r"[.\[]", place.strip("`").lstrip("."))[0]
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        got = unknown[1]
        hint = did_you_mean(got, fields)
        return InvalidField(f"unknown field {shown(got)}.{hint} Known are: {', '.join(fields)}.", field=got[:80])
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return InvalidField(f"{missing[1]} is missing.", field=missing[1])
    if not field:
        return InvalidBody(f"the body is not an object: {what}.")
    return InvalidField(f"{field} is {_value_of(field, raw)}; {_expected(field, kind)}.", field=field)


def _value_of(field: str, raw: bytes) -> str:
    try:
        return shown(msgspec.json.decode(raw)[field])
    except (msgspec.DecodeError, RecursionError):  # a number out of range, or too deep: it cannot be shown
        return "out of range"


def _expected(field: str, kind: type[T]) -> str:
    declared = next(each.type for each in msgspec.structs.fields(kind) if each.name == field)
    return f"allowed is {' or '.join(_words(declared))}"


def _words(declared: Any) -> list[str]:
    """`int | None` as ["an integer", "null"]; `Literal["png", "webp"]` as ['"png"', '"webp"']."""
    if declared is NoneType:
        return ["null"]
    if isinstance(declared, type):
        return [_JSON_NAMES.get(declared.__name__, declared.__name__)]
    if isinstance(declared, str | int | float):
        return [msgspec.json.encode(declared).decode()]
    if get_origin(declared) is dict:
        return ["an object"]
    return [word for part in get_args(declared) for word in _words(part)]
