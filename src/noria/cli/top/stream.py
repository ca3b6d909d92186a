"""`GET /v1/live` of a server, as events: the only part of `noria top` that knows HTTP."""

import contextlib
import ipaddress
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from msgspec import Struct

from noria.cli.terminal_text import escape_for_terminal
from noria.cli.top.events import LiveEvent, LiveEventParser
from noria.config import FrontendConfig
from noria.errors import ConfigError, LiveError, short_repr

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 40.0  # a server that has nothing to say says so every 15 s
_MAX_LINE_BYTES = 8 * 2**20  # bytes: a wheel of 256 slots with a long queue has some 200 kB
_MAX_ERROR_BODY_BYTES = 64 * 2**10


class ServerUnreachable(Exception):
    """The server cannot be heard at the moment, and why; it may be back soon."""


class _ErrorDetail(Struct):
    message: str


class _ErrorBody(Struct):
    error: _ErrorDetail


def checked_url(text: str) -> str:
    """The URL of a server, without a slash at its end. Raises ConfigError where it is none."""
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # a port that is none, half an IPv6 address
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"the URL is {short_repr(text)}; it has the form http://HOST:PORT, such as http://127.0.0.1:8000."
        )
    return text.rstrip("/")


def local_url(frontend: FrontendConfig) -> str:
    """Of the server that these settings start on this machine. Raises ConfigError where they leave its port open."""
    if frontend.port == 0:
        raise ConfigError("setting frontend.port is 0, any free port: give the URL that `noria serve` printed.")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(frontend.host, frontend.host)  # noqa: S104 - not listened on
    return f"http://[{host}]:{frontend.port}" if ":" in host else f"http://{host}:{frontend.port}"


async def stream_events(url: str, key: str | None) -> AsyncGenerator[LiveEvent, None]:
    """What the server at `url` says, until it ends.

    Raises:
        Away: nobody answers, the connection broke, or the server ended it.
        LiveError: it answers, but will not show its wheel; asking again is no use.

    """
    headers = {"Accept": "text/event-stream"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    timeout = httpx2.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        async with (
            # A proxy that the environment names is not asked for this machine.
            httpx2.AsyncClient(timeout=timeout, trust_env=not _is_loopback(url)) as client,
            client.stream("GET", f"{url}/v1/live", params={"pictures": "false"}, headers=headers) as response,
        ):
            await _check_response(response, url)
            reader = LiveEventParser()
            async with contextlib.aclosing(_lines(response, url)) as lines:
                async for line in lines:
                    event = reader.feed_line(line)
                    if event is not None:
                        yield event
    except httpx2.TimeoutException as error:
        raise ServerUnreachable("it does not answer in time") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerUnreachable(escape_for_terminal(str(error)) or type(error).__name__) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"{url} says what this version of Noria does not understand: {escape_for_terminal(str(error))}. Is it of another version?"
        raise LiveError(message) from error
    raise ServerUnreachable("it has ended the connection")


async def _lines(response: httpx2.Response, url: str) -> AsyncGenerator[str, None]:
    """Split at line feeds alone, unlike httpx's own: other ends of lines may stand in JSON."""
    rest = b""
    async for part in response.aiter_bytes():
        *complete_lines, rest = (rest + part).split(b"\n")
        for line in complete_lines:
            yield line.removesuffix(b"\r").decode()
        if len(rest) > _MAX_LINE_BYTES:
            raise LiveError(f"{url} sends lines of more than {_MAX_LINE_BYTES} bytes; that is no Noria's stream.")


async def _check_response(response: httpx2.Response, url: str) -> None:
    """Raise what an answer means that is not the stream."""
    status = response.status_code
    if status == 200 and response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    message = _error_message(await _read_error_body(response))
    if status == 401 and message is not None:
        raise LiveError(f"{url} wants an API key: {message} Give the file that holds yours: --key-file FILE.")
    if status == 404 and message is not None:
        raise LiveError(
            f"{url} does not show its wheel: {message} (frontend.live is off there, or it is of an older version.)"
        )
    if status in (429, 502, 503, 504):
        raise ServerUnreachable(f"it answers {status}" + ("" if message is None else f": {message}"))
    if message is not None:
        raise LiveError(f"{url} answers {status}: {message}")
    raise LiveError(
        f"{url} is no Noria: it answers GET /v1/live with status {status}. Name the URL that `noria serve` prints."
    )


async def _read_error_body(response: httpx2.Response) -> bytes:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_BODY_BYTES:
            break
    return content


def _error_message(content: bytes) -> str | None:
    """The words of a refusal in Noria's shape; None where it has another."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return escape_for_terminal(msgspec.json.decode(content, type=_ErrorBody).error.message)
    return None


def _is_loopback(url: str) -> bool:
    host: Any = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return bool(host == "localhost")
