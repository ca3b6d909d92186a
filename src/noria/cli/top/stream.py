"""Reads `GET /v1/live` of a server as events: the only part of `noria top` that knows HTTP."""

import contextlib
import ipaddress
import pathlib
import re
import ssl
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from msgspec import Struct

from noria.cli.top.events import LiveEvent, LiveEventParser
from noria.errors import ConfigError, LiveError
from noria.observe.terminal_text import escape_for_terminal

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 40.0  # the server sends a keep-alive every 15 s
_MAX_LINE_BYTES = 8 * 2**20  # a view of 256 slots with a long queue has some 200 kB
_MAX_ERROR_BODY_BYTES = 64 * 2**10
_PEM_CERTIFICATE = re.compile(
    r"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----[ -~\s]*?-----END (TRUSTED |X509 )?CERTIFICATE-----", re.ASCII
)


class ServerUnreachable(Exception):
    """The server is unreachable at the moment, and why; a retry may succeed."""


class _ErrorDetail(Struct):
    message: str


class _ErrorBody(Struct):
    error: _ErrorDetail


async def stream_events(url: str, key: str | None, certfile: str = "") -> AsyncGenerator[LiveEvent, None]:
    """The events that the server at `url` sends, until the connection ends.

    With `certfile`, a server on this machine must have a certificate of that file, whatever names it is for.

    Raises:
        ConfigError: `certfile` cannot be used.
        ServerUnreachable: nothing answers, or the connection broke or ended.
        LiveError: the server rejects the request, or is not Noria; a retry is useless.
    """
    headers = {"Accept": "text/event-stream"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    verify: ssl.SSLContext | bool = True
    if certfile:
        verify = _own_certificate(certfile)
    elif url.startswith("https:") and _is_loopback(url):
        verify = ssl.create_default_context()  # heeds SSL_CERT_FILE, as httpx does if it trusts the environment
    transport, base_url = None, url
    if url.startswith("unix:"):
        transport, base_url = httpx2.AsyncHTTPTransport(uds=url.removeprefix("unix:")), "http://localhost"
    client = httpx2.AsyncClient(
        timeout=httpx2.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
        trust_env=not _is_loopback(base_url),  # proxies of the environment are not used for this machine
        verify=verify,
        transport=transport,
    )
    try:
        async with (
            client,
            client.stream("GET", f"{base_url}/v1/live", params={"thumbnails": "false"}, headers=headers) as response,
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
        reason = escape_for_terminal(str(error))
        raise LiveError(
            f"{url} sent an event that this version of Noria cannot parse: {reason}. Is it another version?"
        ) from error
    raise ServerUnreachable("it closed the connection")


def _own_certificate(certfile: str) -> ssl.SSLContext:
    """A context that trusts the first certificate of `certfile`, the server's own, and none of its authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is the very certificate, and need not be for this address
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        content = pathlib.Path(certfile).read_text("latin-1")  # text around a block may be anything
        own = _PEM_CERTIFICATE.search(content)
        context.load_verify_locations(cadata=own[0] if own else "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate {certfile} (frontend.ssl_certfile) cannot be used: {error}.") from error
    return context


async def _lines(response: httpx2.Response, url: str) -> AsyncGenerator[str, None]:
    """The lines of the body, split at line feeds only: httpx also splits at other line ends, which JSON may contain."""
    rest = b""
    async for part in response.aiter_bytes():
        *complete_lines, rest = (rest + part).split(b"\n")
        for line in complete_lines:
            yield line.removesuffix(b"\r").decode()
        if len(rest) > _MAX_LINE_BYTES:
            raise LiveError(f"{url} sends lines of more than {_MAX_LINE_BYTES} bytes; it is not Noria.")


async def _check_response(response: httpx2.Response, url: str) -> None:
    status = response.status_code
    if status == 200 and response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    message = _error_message(await _read_error_body(response))
    if status == 401 and message is not None:
        raise LiveError(
            f"{url} needs an API key: {message} Set NORIA_API_KEY, or give the file with your key: --key-file FILE."
        )
    if status == 404 and message is not None:
        raise LiveError(
            f"{url} does not show its live view: {message} (Its setting frontend.live is off, or it is an older "
            "version.)"
        )
    if status in (429, 502, 503, 504):
        raise ServerUnreachable(f"it answered {status}" + ("" if message is None else f": {message}"))
    if message is not None:
        raise LiveError(f"{url} answered {status}: {message}")
    raise LiveError(
        f"{url} is not Noria: it answered GET /v1/live with status {status}. Give the URL that `noria serve` printed."
    )


async def _read_error_body(response: httpx2.Response) -> bytes:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_BODY_BYTES:
            break
    return content


def _error_message(content: bytes) -> str | None:
    """The message of an error body in Noria's format; None if it has another."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return escape_for_terminal(msgspec.json.decode(content, type=_ErrorBody).error.message)
    return None


def _is_loopback(url: str) -> bool:
    host: Any = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return bool(host == "localhost")
