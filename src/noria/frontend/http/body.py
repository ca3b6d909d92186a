"""Reads request bodies, bounded in length, time and number, and decodes their JSON.

msgspec checks shape and types; this module turns its messages into errors that name the field, the value got and the
values allowed. `services/images/request_validation.py` checks ranges.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import Request

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RequestCancelled,
    UnsupportedMediaType,
    did_you_mean,
    short_repr,
)
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter, client_id_of

T = TypeVar("T", bound=msgspec.Struct)

JSON, FORM = "application/json", "multipart/form-data"

# The default max_body_bytes at 35 kB/s. Without a limit, a body that stops half-way would hold its connection forever.
_TIMEOUT_S = 30.0

MAX_LARGE_BODIES = 64  # 64 MiB with the default max_body_bytes
MAX_LARGE_BODIES_PER_CLIENT = 16
_MAX_SMALL_BODY_BYTES = 65_536  # uvicorn buffers as much of a body anyway; image requests are far smaller
_RETRY_AFTER_S = 5.0  # a body takes up to 30 s, most take less than 1 s
_MAX_LEVELS = 32  # of objects and lists in ignored fields; responses repeat some, and Python allows about 1000

_INVALID_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises; a string in an ignored field is decoded only when the field is."""

_JSON_TYPE_NAMES = {  # one, several
    "int": ("an integer", "integers"),
    "float": ("a number", "numbers"),
    "str": ("a string", "strings"),
    "bool": ("true or false", "true or false"),
    "array": ("a list", "lists"),
    "object": ("an object", "objects"),
    "null": ("null", "null"),
}


def _integer_if_integral(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


_INTEGRAL_DECODER = msgspec.json.Decoder(float_hook=_integer_if_integral)

_MAX_ELEMENTS_BESIDE_IMAGES = 10_000


class JsonBodyReader:
    """Reads the JSON bodies of all routes of a front end.

    Limits how many bodies of more than `_MAX_SMALL_BODY_BYTES` are received at once, to bound memory.
    """

    def __init__(
        self, max_bytes: int, max_image_bytes: int = 0, image_uploads: ConcurrencyLimiter | None = None
    ) -> None:
        """A body with images may be longer than `max_bytes` by `max_image_bytes` in base64.

        If it is, it counts among `image_uploads`.
        """
        self._max_bytes = max_bytes
        self._max_bytes_with_images = max_bytes + 4 * math.ceil(max_image_bytes / 3)
        self._image_uploads = image_uploads
        self._large_bodies = ConcurrencyLimiter(
            f"bodies of more than {_MAX_SMALL_BODY_BYTES} bytes",
            MAX_LARGE_BODIES,
            MAX_LARGE_BODIES_PER_CLIENT,
            _RETRY_AFTER_S,
        )

    async def read_json(self, http: Request, struct_type: type[T]) -> T:
        """Return the body as a `struct_type`. Raises what `read` and `decode` raise."""
        return decode(await self.read(http), struct_type)

    async def read(self, http: Request, *, any_type: bool = False) -> bytes:
        """Return the raw body of a request whose Content-Type is JSON, or with `any_type` any.

        Raises:
            UnsupportedMediaType: the Content-Type is not application/json.
            RateLimited: too many large bodies are being received. With a Content-Length, raised before any of the body
                is read.
            BodyTooLarge, InvalidBody, RequestCancelled: see `read_bytes`.

        """
        if not any_type:
            _check_media_type(http, JSON)
        if int(http.headers.get("content-length", _MAX_SMALL_BODY_BYTES + 1)) <= _MAX_SMALL_BODY_BYTES:
            return await read_bytes(http, self._max_bytes)
        with contextlib.ExitStack() as slots:
            return await read_bytes(http, self._max_bytes, self._slot_taker(http, slots))

    @contextlib.asynccontextmanager
    async def receive(self, http: Request, *media_types: str) -> AsyncIterator[bytes]:
        """Yield the raw body of a request that may have images. It is not kept here.

        Its Content-Type is one of `media_types`, by default JSON. A large one counts until the context ends, so that
        those that wait to be decoded do.

        Raises: as `read`.
        """
        media_type = _check_media_type(http, *(media_types or (JSON,)))
        with contextlib.ExitStack() as slots:
            yield await self._read_with_images(http, slots, media_type)

    async def _read_with_images(self, http: Request, slots: contextlib.ExitStack, media_type: str) -> bytes:
        num_elements = 0

        def count(piece: bytes) -> None:  # 16 ms for all of a long body, in which nobody else would be served
            nonlocal num_elements
            num_elements += sum(map(piece.count, (b",", b"[", b"{")))

        slot_taker = self._slot_taker(http, slots)
        raw = await read_bytes(http, self._max_bytes_with_images, slot_taker, count if media_type == JSON else _ignore)
        # Else decoding takes a long time.
        if len(raw) > self._max_bytes and num_elements > _MAX_ELEMENTS_BESIDE_IMAGES:
            raise BodyTooLarge(
                f"the body is longer than {self._max_bytes} bytes and has {num_elements} values; with images "
                f"at most {_MAX_ELEMENTS_BESIDE_IMAGES} are allowed."
            )
        return raw

    def check_length(self, raw: bytes, *images: object) -> None:
        """Raise BodyTooLarge if `raw`, which `receive` has yielded, is too long beside its `images` in base64."""
        num_image_bytes = sum(len(image) for image in images if isinstance(image, str))
        _check_length(len(raw) - num_image_bytes, self._max_bytes)

    def _slot_taker(self, http: Request, slots: contextlib.ExitStack) -> Callable[[int], None]:
        """Return what takes the slots that a body of some length needs, and holds them in `slots`.

        It raises RateLimited.
        """
        limiters = [(_MAX_SMALL_BODY_BYTES, self._large_bodies)]
        if self._image_uploads is not None:
            limiters.append((self._max_bytes, self._image_uploads))
        limiters.sort(key=lambda each: each[0])

        def take(num_bytes: int) -> None:
            while limiters and num_bytes > limiters[0][0]:
                slots.enter_context(limiters.pop(0)[1].hold(client_id_of(http)))

        return take


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"the body is longer than {max_bytes} bytes.")


def _check_media_type(http: Request, *allowed: str) -> str:
    """Return the media type of the body. Raises UnsupportedMediaType."""
    content_type = http.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise UnsupportedMediaType(f"Content-Type is {short_repr(content_type)}; send {' or '.join(allowed)}.")
    return media_type


def _ignore(_: object) -> None:
    """Do nothing."""


async def read_bytes(
    http: Request,
    max_bytes: int,
    on_size: Callable[[int], None] = _ignore,
    on_piece: Callable[[bytes], None] = _ignore,
) -> bytes:
    """Return the raw body of a request of any Content-Type.

    Calls `on_size` with the announced length, then with the length received so far; it may raise. Calls `on_piece` with
    each piece of the body as it comes.

    Raises:
        BodyTooLarge: the body is longer than `max_bytes`; no more than that is kept.
        InvalidBody: the body took too long. Sets `http.state.must_close`.
        RequestCancelled: the client disconnected.

    """

    def check_size(num_bytes: int) -> None:
        _check_length(num_bytes, max_bytes)
        on_size(num_bytes)

    check_size(int(http.headers.get("content-length", 0)))
    body = bytearray()
    try:
        # A timer would take longer than the reading of a body that has arrived with its head.
        has_arrived = http.scope["state"].get("body_has_arrived", False)
        async with contextlib.nullcontext() if has_arrived else asyncio.timeout(_TIMEOUT_S):
            more = True
            while more:
                message = await http.receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("the client closed the connection before the end of its request.")
                piece, more = message.get("body", b""), message.get("more_body", False)
                body += piece
                check_size(len(body))
                on_piece(piece)
    except TimeoutError as error:
        http.state.must_close = True
        raise InvalidBody(f"the body did not arrive within {_TIMEOUT_S:g} s; {len(body)} bytes of it did.") from error
    return bytes(body)


async def stream_bytes(http: Request, max_bytes: int, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body as they come.

    Raises:
        BodyTooLarge: the body is longer than `max_bytes`.
        InvalidBody: it took longer than `timeout_s`. Sets `http.state.must_close`.
        RequestCancelled: the client disconnected.

    """
    too_large = BodyTooLarge(f"the body is longer than {max_bytes} bytes.")
    if int(http.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    num_bytes, more, deadline = 0, True, asyncio.get_running_loop().time() + timeout_s
    while more:
        try:
            async with asyncio.timeout_at(deadline):
                message = await http.receive()
        except TimeoutError as error:
            http.state.must_close = True
            raise InvalidBody(
                f"the body did not arrive within {timeout_s:g} s; {num_bytes} bytes of it did."
            ) from error
        if message["type"] == "http.disconnect":
            raise RequestCancelled("the client closed the connection before the end of its request.")
        piece, more = message.get("body", b""), message.get("more_body", False)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise too_large
        yield piece


def decode(raw: bytes, struct_type: type[T], *, strict: bool = True) -> T:
    """Decode `raw` as a `struct_type`. Unless `strict`, strings are converted to numbers and booleans.

    20.0 is an integer, as in JSON Schema.

    Raises:
        InvalidBody: not JSON, or not an object.
        InvalidField: a field is unknown, missing, or of the wrong type.

    """
    try:
        return msgspec.json.decode(raw, type=struct_type, strict=strict)
    except msgspec.ValidationError as error:
        if "got `float`" in str(error):
            with contextlib.suppress(*_INVALID_JSON):
                return msgspec.convert(_INTEGRAL_DECODER.decode(raw), struct_type)
        raise _translate_validation_error(str(error), raw, struct_type) from error
    except _INVALID_JSON as error:
        raise InvalidBody(_invalid_json_message(raw, error)) from error


def decode_with_ignored(raw: bytes, struct_type: type[T], *, strict: bool = True) -> tuple[T, dict[str, Any]]:
    """Return what `decode` does, and what `decode_object` does; both have the same strings. Raises what these raise."""
    with contextlib.suppress(InvalidBody, msgspec.ValidationError):
        fields = decode_object(raw)
        return msgspec.convert(fields, struct_type, strict=strict), fields
    return decode(raw, struct_type, strict=strict), decode_object(raw)


def decode_object(raw: bytes) -> dict[str, Any]:
    """Return all fields of `raw`, which `decode` has accepted, also those that it ignored.

    Raises:
        InvalidBody: an ignored field has a number out of range, invalid UTF-8, or more levels than `_MAX_LEVELS`.

    """
    try:
        fields: dict[str, Any] = msgspec.json.decode(raw)
    except _INVALID_JSON as error:
        raise InvalidBody(_invalid_json_message(raw, error)) from error
    level: list[Any] = [fields]
    for _ in range(_MAX_LEVELS):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise InvalidBody(f"the body is nested too deeply; allowed are {_MAX_LEVELS} levels.")
    return fields


def _invalid_json_message(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return "the body is empty; send a JSON object, whose fields /docs has."
    start = raw[:_MAX_SMALL_BODY_BYTES]
    hint = " NaN and Infinity are no JSON numbers." if re.search(rb"\b(NaN|Infinity)\b", start) else ""
    if re.search(rb"\\u[dD][89a-fA-F]", start):
        hint += r" Surrogates such as \ud83d are characters in pairs only."
    return f"the body is not JSON: {error}.{hint}"


def _translate_validation_error(text: str, raw: bytes, struct_type: type[T]) -> InvalidBody | InvalidField:
    """Translate msgspec's message, such as "Expected `int | null`, got `str` - at `$.seed`"."""
    fields = struct_type.__struct_fields__
    problem, _, path = text.partition(" - at `$")
    path = path.strip("`").lstrip(".")
    field = re.split(r"[.\[]", path)[0]
    if (wrong := re.fullmatch(r"Expected `(.*)`, got `\w+`", problem)) and path not in ("", field):
        # With a key that is there twice, the path may lead nowhere.
        with contextlib.suppress(LookupError, TypeError, ValueError, *_INVALID_JSON):
            allowed = _alternatives([_JSON_TYPE_NAMES[name][0] for name in wrong[1].split(" | ")])
            return InvalidField(f"{path} is {_value_at(path, raw)}; allowed is {allowed}.", field=field)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return InvalidField(f"{path}.{missing[1]} is missing.".lstrip("."), field=field or missing[1])
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        name = unknown[1]
        if path:
            return InvalidField(f"{path} has the unknown field {short_repr(name)}.", field=field)
        hint = did_you_mean(name, fields)
        return InvalidField(f"unknown field {short_repr(name)}.{hint} Known are: {', '.join(fields)}.", field=name[:80])
    if "." in path or ("[" in path and problem.startswith("Expected `object`")):  # an object in a list
        return InvalidField(f"{path}: {problem}.", field=field)
    if not field:
        return InvalidBody(f"the body is not an object: {problem}.")
    if too_long := re.fullmatch(r"Expected `str` of length <= (\d+)", problem):
        return InvalidField(f"{field} has more than {too_long[1]} characters.", field=field)
    if kind := re.fullmatch(r"Expected `str` ((?:of length|matching regex) .*)", problem, re.DOTALL):
        return InvalidField(f"{field} is {_value_of(field, raw)}; allowed is a string {kind[1]}.", field=field)
    return InvalidField(f"{field} is {_value_of(field, raw)}; {_allowed_types(field, struct_type)}.", field=field)


def _value_at(path: str, raw: bytes) -> str:
    """Return the value at a path such as `inputs[0].shape`.

    Raises LookupError, TypeError, ValueError, and what msgspec raises.
    """
    value = msgspec.json.decode(raw)
    for name, index in re.findall(r"([^.\[\]]+)|\[(.+?)\]", path):
        value = value[name] if name else value[int(index)]
    return _json_repr(value)


def _json_repr(value: object) -> str:
    return msgspec.json.encode(value).decode() if value is None or isinstance(value, bool) else short_repr(value)


def _value_of(field: str, raw: bytes) -> str:
    try:
        return _json_repr(msgspec.json.decode(raw)[field])
    except UnicodeDecodeError:  # of another field
        return "in a body that is not UTF-8"
    except _INVALID_JSON:  # a number out of range, or nesting too deep
        return "out of range"


def _allowed_types(field: str, struct_type: type[T]) -> str:
    declared = next(each.type for each in msgspec.structs.fields(struct_type) if each.name == field)
    return f"allowed is {_alternatives(_type_names(declared))}"


def _alternatives(names: list[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _type_names(declared: Any, *, plural: bool = False) -> list[str]:
    """Return `int | None` as ["an integer", "null"], and `Literal["png", "webp"]` as ['"png"', '"webp"']."""
    if declared is NoneType:
        return ["null"]
    if isinstance(declared, str | int | float):
        return [msgspec.json.encode(declared).decode()]
    if get_origin(declared) in (list, tuple):
        items = _alternatives(_type_names(get_args(declared)[0], plural=True))
        return [f"{_JSON_TYPE_NAMES['array'][plural]} of {items}"]
    if get_origin(declared) is dict or (isinstance(declared, type) and issubclass(declared, msgspec.Struct)):
        return [_JSON_TYPE_NAMES["object"][plural]]
    if isinstance(declared, type):
        return [_JSON_TYPE_NAMES.get(declared.__name__, (declared.__name__, declared.__name__))[plural]]
    return [type_name for argument in get_args(declared) for type_name in _type_names(argument, plural=plural)]
