"""Webhooks: signed as Standard Webhooks has it (https://www.standardwebhooks.com), which is also Replicate's scheme, and delivered.

    webhook-id: msg_…                  the same at each try: receivers drop what they have had
    webhook-timestamp: 1795230000      of this try, Unix time
    webhook-signature: v1,BASE64       HMAC-SHA256 of "{id}.{timestamp}.{body}" with the secret's bytes
    traceparent: 00-…                  the trace of the request that made the job, if it is in one

A delivery is kept in the database, in the transaction of the change that it tells of, until a receiver has answered 2xx: at least once.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import os
import pathlib
import secrets
import ssl
from urllib.parse import urlsplit

import httpx2

from noria.errors import ConfigError, InvalidField, short_repr
from noria.jobs.webhooks.outbox import WebhookDelivery
from noria.jobs.webhooks.url_check import ResolveHost, WebhookTarget, check_webhook_url
from noria.observe.traces.trace_context import TraceContext
from noria.observe.traces.tracer import NO_TRACER, Attributes, Tracer

MAX_TRIES = 12  # the last about 4 hours after the first

_FIRST_DELAY_S = 5.0
_MAX_DELAY_S = 3600.0
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 10.0  # to the answer's head; a receiver should answer first and work later
_TOTAL_TIMEOUT_S = 20.0
_MAX_RESPONSE_BYTES = (
    16_384  # bytes of an answer, which nobody looks at; they are read so that the connection ends in order
)
_SECRET_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24  # bytes, as the specification has it; we make 32

log = logging.getLogger("noria.webhooks")


def sign(secret: bytes, delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """The `webhook-signature` of one try."""
    signed = b".".join((delivery_id.encode(), str(timestamp_s).encode(), body))
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def retry_delay_s(num_tries: int, uniform: float) -> float | None:
    """How long to wait after try number `num_tries` failed; None: give up. `uniform` in [0, 1) spreads it by ± 20 %."""
    if num_tries >= MAX_TRIES:
        return None
    return min(_FIRST_DELAY_S * 2.5 ** (num_tries - 1), _MAX_DELAY_S) * (0.8 + 0.4 * uniform)


def read_secret(setting: str, data_folder: pathlib.Path) -> bytes:
    """The secret that signs, from the file that `jobs.webhook_secret_file` names; made where that is `auto` and there is none yet.

    Raises:
        ConfigError: the file cannot be read, or holds something else.

    """
    file = data_folder / "webhook-secret" if setting == "auto" else pathlib.Path(setting)
    try:
        if setting == "auto":
            _create_secret(file)
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the secret of webhooks cannot be read from {file}: {error}. Set jobs.webhook_secret_file."
        ) from error
    try:
        secret = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ConfigError(f"the file {file} holds no secret: it is {_SECRET_PREFIX} and base64.") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"the secret in {file} has {len(secret)} bytes; at least {_MIN_SECRET_BYTES} are allowed.")
    return secret


def _create_secret(file: pathlib.Path) -> None:
    """Put a new secret there, for its owner's eyes, unless another process has; none ever reads half of one."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(_SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, file)
    temporary.unlink()


def _attributes(delivery: WebhookDelivery) -> Attributes:
    """Of a try's span."""
    url = urlsplit(delivery.url)
    attributes: dict[str, str | int] = {
        "http.request.method": "POST",
        "url.full": delivery.safe_url,
        "server.address": url.hostname or "",
        "server.port": url.port or (443 if url.scheme == "https" else 80),
        "noria.webhook.id": delivery.id,
    }
    if delivery.num_tries > 1:
        attributes["http.request.resend_count"] = delivery.num_tries - 1
    return attributes


class WebhookClient:
    """Posts deliveries. To be closed at the end."""

    def __init__(self, secret: bytes, *, allow_private: bool, resolve: ResolveHost, tracer: Tracer = NO_TRACER) -> None:
        self._secret, self._allow_private, self._resolve, self._tracer = secret, allow_private, resolve, tracer
        self._client: httpx2.AsyncClient | None = None
        self._client_lock = asyncio.Lock()

    async def check_url(self, url: str) -> WebhookTarget:
        """Whether `url` would be posted to now; raises InvalidField as `addresses.check` does."""
        return await check_webhook_url(url, self._resolve, allow_private=self._allow_private)

    async def send(self, delivery: WebhookDelivery, now: float) -> str | None:
        """Try once. None: the receiver has it. Else why not, in words."""
        span = self._tracer.span("POST", "client", delivery.trace, _attributes(delivery))
        try:
            async with asyncio.timeout(_TOTAL_TIMEOUT_S):
                target = await self.check_url(delivery.url)
                status = await self._post(delivery, target, int(now), span.context)
        except InvalidField as error:
            span.fail(error.code)
            return error.message.replace(short_repr(delivery.url), short_repr(delivery.safe_url))
        except TimeoutError:
            span.fail("timeout")
            return f"no answer within {_TOTAL_TIMEOUT_S:g} s"
        except httpx2.HTTPError as error:
            span.fail(type(error).__name__)
            return f"{type(error).__name__}: {error}"
        else:
            span.set_attributes({"http.response.status_code": status})
            if 200 <= status < 300:
                return None
            span.fail(str(status))
            return f"it answered {status}"
        finally:
            span.end()

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(
        self, delivery: WebhookDelivery, target: WebhookTarget, timestamp_s: int, trace: TraceContext | None
    ) -> int:
        """The status that was answered."""
        client = await self._get_client()
        body = delivery.body.encode()
        headers = {
            "Host": target.host_header,
            "Content-Type": "application/json",
            "User-Agent": "noria-webhooks",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": sign(self._secret, delivery.id, timestamp_s, body),
        } | (trace.headers if trace is not None else {})
        tls_extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        async with client.stream(
            "POST", target.url, content=body, headers=headers, extensions=tls_extensions
        ) as response:
            num_bytes = 0
            async for chunk in response.aiter_raw():
                num_bytes += len(chunk)
                if num_bytes > _MAX_RESPONSE_BYTES:
                    break
            return response.status_code

    async def _get_client(self) -> httpx2.AsyncClient:
        async with self._client_lock:
            if self._client is None:
                # Its line for each request has the URL's query, which may be a secret; ours (`postman.py`) has not.
                logging.getLogger(httpx2.__name__).setLevel(logging.WARNING)
                ssl_context = await asyncio.to_thread(ssl.create_default_context)  # the system's: 0.1 s
                self._client = httpx2.AsyncClient(
                    verify=ssl_context,
                    follow_redirects=False,  # a redirect leads to an address that nobody has checked
                    trust_env=False,  # nor does a proxy connect to the address that we have
                    timeout=httpx2.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                    limits=httpx2.Limits(max_keepalive_connections=0),
                )
            return self._client
