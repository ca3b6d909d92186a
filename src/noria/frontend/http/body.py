"""Reads request bodies, bounded in length, time and number, decodes their JSON, and adds what headers say instead.

msgspec checks shape and types; `decode_errors.py` says what is wrong. `services/images/request_validation.py` checks
ranges.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, get_args

import msgspec
from starlette.requests import Request

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RateLimited,
    RequestCancelled,
    UnsupportedMediaType,
    short_repr,
)
from noria.errors.problems import Problems
from noria.frontend.access.auth import client_id_of
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.http.content_encoding import check_encoding, decompress_gzip
from noria.frontend.http.decode_errors import INTEGRAL_DECODER, INVALID_JSON, all_problems, invalid_json_message
from noria.protocol.request import Priority

T = TypeVar("T", bound=msgspec.Struct)
UrgentT = TypeVar("UrgentT", bound="_Urgency")

JSON, FORM = "application/json", "multipart/form-data"

# The default max_body_bytes at 35 kB/s. Without a limit, a body that stops half-way would hold its connection forever.
_TIMEOUT_S = 30.0

MAX_LARGE_BODIES = 64  # 64 MiB with the default max_body_bytes
MAX_LARGE_BODIES_PER_CLIENT = 16
MAX_SMALL_BODIES = 1024  # that are on their way; 64 MiB
MAX_SMALL_BODIES_PER_CLIENT = 256
_MAX_SMALL_BODY_BYTES = 65_536  # uvicorn buffers as much of a body anyway; image requests are far smaller
_RETRY_AFTER_S = 5.0  # a body takes up to 30 s, most take less than 1 s
_MAX_LEVELS = 32  # levels of objects and lists in ignored fields; responses repeat some, and Python allows about 1000

_MAX_ELEMENTS_BESIDE_IMAGES = 10_000

_UNCOUNTED = contextlib.nullcontext()


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
        self._small_bodies = ConcurrencyLimiter(
            "bodies that have not arrived with their head",
            MAX_SMALL_BODIES,
            MAX_SMALL_BODIES_PER_CLIENT,
            _RETRY_AFTER_S,
        )
        large_bodies = ConcurrencyLimiter(
            f"bodies of more than {_MAX_SMALL_BODY_BYTES} bytes",
            MAX_LARGE_BODIES,
            MAX_LARGE_BODIES_PER_CLIENT,
            _RETRY_AFTER_S,
        )
        # Those of longer bodies than so many bytes, the shortest first.
        self._limiters = [(_MAX_SMALL_BODY_BYTES, large_bodies)]
        if image_uploads is not None:
            self._limiters.append((max_bytes, image_uploads))
        self._limiters.sort(key=lambda each: each[0])

    async def read_json(self, http: Request, struct_type: type[T]) -> T:
        """Return the body as a `struct_type`. Raises what `read` and `decode` raise."""
        return decode(await self.read(http), struct_type)

    async def read(self, http: Request, *, any_type: bool = False, takes_gzip: bool = False) -> bytes:
        """Return the body of a request whose Content-Type is JSON, or with `any_type` any.

        Raises:
            UnsupportedMediaType: the Content-Type is not application/json, or as of `read_bytes`.
            RateLimited: too many large bodies are being received. With a Content-Length, raised before any of the body
                is read.
            BodyTooLarge, InvalidBody, RequestCancelled: see `read_bytes`.
        """
        if not any_type:
            _check_media_type(http, JSON)
        if is_small(http):
            with self._on_its_way(http):
                return await read_bytes(http, self._max_bytes, takes_gzip=takes_gzip)
        with contextlib.ExitStack() as slots:
            return await read_bytes(http, self._max_bytes, self._slot_taker(http, slots), takes_gzip=takes_gzip)

    def _on_its_way(self, http: Request) -> contextlib.AbstractContextManager[None]:
        """Return a context that counts a body that has not arrived with its head, until it has.

        It raises RateLimited, and sets `http.state.must_close`: else what has come of the body would be kept.
        """
        return _UNCOUNTED if _has_arrived(http) else self._counted(http)

    @contextlib.contextmanager
    def _counted(self, http: Request) -> Iterator[None]:
        client = client_id_of(http)
        try:
            self._small_bodies.acquire(client)
        except RateLimited:
            http.state.must_close = True
            raise
        try:
            yield
        finally:
            self._small_bodies.release(client)

    async def receive(self, http: Request, slots: contextlib.ExitStack, *media_types: str) -> bytes:
        """Return the raw body of a request that may have images.

        Its Content-Type is one of `media_types`, by default JSON. A large one counts until `slots` are closed, so that
        those that wait to be decoded do.

        Raises: as `read`.
        """
        media_type, num_elements = _check_media_type(http, *(media_types or (JSON,))), 0

        def count(piece: bytes) -> None:  # 16 ms for all of a long body, in which nobody else would be served
            nonlocal num_elements
            num_elements += sum(map(piece.count, (b",", b"[", b"{")))

        slot_taker = self._slot_taker(http, slots)
        on_piece = count if media_type == JSON else None
        with self._on_its_way(http):
            raw = await read_bytes(http, self._max_bytes_with_images, slot_taker, on_piece)
        # Else decoding takes a long time.
        if len(raw) > self._max_bytes and num_elements > _MAX_ELEMENTS_BESIDE_IMAGES:
            raise BodyTooLarge(
                f"the body is longer than {self._max_bytes} bytes and has {num_elements} values; with images "
                f"at most {_MAX_ELEMENTS_BESIDE_IMAGES} are allowed."
            )
        return raw

    def check_length(self, raw: bytes, *images: object) -> None:
        """Raise BodyTooLarge if `raw`, which `receive` has returned, is too long beside its `images` in base64."""
        num_image_bytes = sum(len(image) for image in images if isinstance(image, str))
        _check_length(len(raw) - num_image_bytes, self._max_bytes)

    def _slot_taker(self, http: Request, slots: contextlib.ExitStack) -> Callable[[int], None]:
        """Return what takes the slots that a body of some length needs, and holds them in `slots`.

        It raises RateLimited.
        """
        limiters = list(self._limiters)

        def take(num_bytes: int) -> None:
            while limiters and num_bytes > limiters[0][0]:
                slots.enter_context(limiters.pop(0)[1].hold(client_id_of(http)))
                http.state.context.holds_upload = True

        return take


def is_small(http: Request) -> bool:
    """Return whether the head of a request says that its body is short, as most are."""
    return int(http.headers.get("content-length", _MAX_SMALL_BODY_BYTES + 1)) <= _MAX_SMALL_BODY_BYTES


def _has_arrived(http: Request) -> bool:
    """Return whether the body has arrived with its head, as most do."""
    return bool(http.scope["state"].get("body_has_arrived", False))


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


async def read_bytes(
    http: Request,
    max_bytes: int,
    on_size: Callable[[int], None] | None = None,
    on_piece: Callable[[bytes], None] | None = None,
    *,
    takes_gzip: bool = False,
) -> bytes:
    """Return the body of a request of any Content-Type, decompressed if it `takes_gzip`.

    Calls `on_size` with the announced length, then with the length received so far; it may raise. Calls `on_piece` with
    each piece of the body as it comes.

    Raises:
        UnsupportedMediaType: it has another Content-Encoding. Raised before any of it is read.
        BodyTooLarge: it is longer than `max_bytes`, before or after it is decompressed; no more than that is kept.
        InvalidBody: the body took too long. Sets `http.state.must_close`.
        RequestCancelled: the client disconnected.
    """
    is_compressed = check_encoding(http, takes_gzip=takes_gzip)
    announced = int(http.headers.get("content-length", 0))
    _check_length(announced, max_bytes)
    if on_size is not None:
        on_size(announced)
    body = bytearray()

    async def receive() -> None:
        more = True
        while more:
            piece, more = await _receive_piece(http)
            body.extend(piece)
            _check_length(len(body), max_bytes)
            if on_size is not None:
                on_size(len(body))
            if on_piece is not None:
                on_piece(piece)

    if _has_arrived(http):  # a timer would take longer than the reading
        await receive()
    else:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await receive()
        except TimeoutError as error:
            raise _too_slow(http, _TIMEOUT_S, len(body)) from error
    return decompress_gzip(body, max_bytes) if is_compressed else bytes(body)


async def stream_bytes(http: Request, max_bytes: int, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body as they come.

    Raises:
        UnsupportedMediaType: the body has a Content-Encoding.
        BodyTooLarge: it is longer than `max_bytes`.
        InvalidBody: it took longer than `timeout_s`. Sets `http.state.must_close`.
        RequestCancelled: the client disconnected.
    """
    check_encoding(http)
    _check_length(int(http.headers.get("content-length", 0)), max_bytes)
    num_bytes, more, deadline = 0, True, asyncio.get_running_loop().time() + timeout_s
    while more:
        try:
            async with asyncio.timeout_at(deadline):
                piece, more = await _receive_piece(http)
        except TimeoutError as error:
            raise _too_slow(http, timeout_s, num_bytes) from error
        num_bytes += len(piece)
        _check_length(num_bytes, max_bytes)
        yield piece


async def _receive_piece(http: Request) -> tuple[bytes, bool]:
    """Return the next piece of a body, and whether more will come. Raises RequestCancelled."""
    message = await http.receive()
    if message["type"] == "http.disconnect":
        raise RequestCancelled("the client closed the connection before the end of its request.")
    return message.get("body", b""), message.get("more_body", False)


def _too_slow(http: Request, timeout_s: float, num_bytes: int) -> InvalidBody:
    http.state.must_close = True
    return InvalidBody(f"the body did not arrive within {timeout_s:g} s; {num_bytes} bytes of it did.")


def decode(raw: bytes, struct_type: type[T], *, strict: bool = True, problems: Problems | None = None) -> T:
    """Decode `raw` as a `struct_type`. Unless `strict`, strings are converted to numbers and booleans.

    20.0 is an integer, as in JSON Schema, and an empty text is a field that is left out where it is no value, as in
    forms. With `problems`, invalid fields are added there and left out, if the others are enough for a `struct_type`.

    Raises:
        InvalidBody: not JSON, or not an object.
        InvalidField: fields are unknown, missing, or of the wrong type.
    """
    try:
        return msgspec.json.decode(raw, type=struct_type, strict=strict)
    except msgspec.ValidationError as error:
        if "got `float`" in str(error):
            with contextlib.suppress(*INVALID_JSON):
                return msgspec.convert(INTEGRAL_DECODER.decode(raw), struct_type)
        found, valid = all_problems(str(error), raw, struct_type, strict=strict)
        if isinstance(found, InvalidField) and problems is not None:
            with contextlib.suppress(msgspec.ValidationError):
                decoded = msgspec.convert(valid, struct_type, strict=strict)
                problems.add(found, are_of_form=True)
                return decoded
        if found is None:
            return msgspec.convert(valid, struct_type, strict=strict)
        raise found from error
    except INVALID_JSON as error:
        raise InvalidBody(invalid_json_message(raw, error)) from error


def decode_with_ignored(
    raw: bytes,
    struct_type: type[T],
    *,
    strict: bool = True,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields,
    problems: Problems | None = None,
) -> tuple[T, dict[str, Any]]:
    """Return what `decode` does of what `prepare` makes of all fields, and these as `decode_object` does.

    Both have the same strings. Raises what these raise.
    """
    fields = None
    with contextlib.suppress(InvalidBody, msgspec.ValidationError):
        fields = decode_object(raw)
        return msgspec.convert(prepare(fields), struct_type, strict=strict), fields
    prepared = raw if fields is None else msgspec.json.encode(prepare(fields))
    return decode(prepared, struct_type, strict=strict, problems=problems), fields or decode_object(raw)


def decode_object(raw: bytes) -> dict[str, Any]:
    """Return all fields of `raw`, also those that `decode` ignores.

    Raises InvalidBody: it is no object, or an ignored field has a number out of range, invalid UTF-8, or more levels
    than `_MAX_LEVELS`.
    """
    try:
        fields: dict[str, Any] = msgspec.json.decode(raw)
    except INVALID_JSON as error:
        raise InvalidBody(invalid_json_message(raw, error)) from error
    if not isinstance(fields, dict):
        raise InvalidBody("the body is not an object.")
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


class _Urgency(Protocol):
    """The part of a body that headers can have instead."""

    @property
    def priority(self) -> Priority | None: ...
    @property
    def deadline_ms(self) -> int | None: ...


def apply_headers(body: UrgentT, headers: Mapping[str, str]) -> UrgentT:
    """Return `body`, with the headers X-Noria-Priority and X-Noria-Deadline-Ms where it has no value of its own.

    They are for gateways and for clients of other APIs, which cannot change the body. Raises InvalidField.
    """
    priority, deadline_ms = headers.get("x-noria-priority"), headers.get("x-noria-deadline-ms")
    if body.priority is None and priority is not None:
        if priority not in get_args(Priority):
            raise InvalidField(
                f"header X-Noria-Priority is {short_repr(priority)}; allowed are {', '.join(get_args(Priority))}.",
                field="X-Noria-Priority",
            )
        body = msgspec.structs.replace(body, priority=priority)  # type: ignore[type-var]
    if body.deadline_ms is None and deadline_ms is not None:
        if not _is_deadline(deadline_ms):
            raise InvalidField(
                f"header X-Noria-Deadline-Ms is {short_repr(deadline_ms)}; allowed is a whole number of milliseconds.",
                field="X-Noria-Deadline-Ms",
            )
        body = msgspec.structs.replace(body, deadline_ms=int(deadline_ms))  # type: ignore[type-var]
    return body


def deadline_ms_of(body: _Urgency, headers: Mapping[str, str]) -> int | None:
    """Return the deadline of a body or else of its headers; None: there is none, or `apply_headers` rejects it."""
    deadline_ms = headers.get("x-noria-deadline-ms", "")
    return int(deadline_ms) if body.deadline_ms is None and _is_deadline(deadline_ms) else body.deadline_ms


def _is_deadline(deadline_ms: str) -> bool:
    return re.fullmatch(r"\d{1,9}", deadline_ms, re.ASCII) is not None
