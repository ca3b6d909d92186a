"""Posts webhooks, signed (`signing.py`) and with the trace of the request that created the job, if it has one.

The store adds a delivery to the outbox in the same transaction as the status change, and it stays there until the
receiver answers 2xx or 410, or `MAX_TRIES` failed: delivery is at least once.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2
from opentelemetry.trace import Span, SpanKind, Tracer

from noria.errors import NoriaError, short_repr
from noria.jobs.webhooks.outbox import WebhookDelivery
from noria.jobs.webhooks.signing import secret_of_key, sign
from noria.jobs.webhooks.url_check import ResolveHost, WebhookTarget, check_webhook_url
from noria.observe.traces.tracer import GLOBAL_TRACER, fail, trace_headers

# After each failed try but the last: the schedule of the specification, 76 hours.
_RETRY_DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
MAX_TRIES = 1 + len(_RETRY_DELAYS_S)
_MAX_RETRY_AFTER_S = 86_400.0
_RETRY_AFTER_STATUSES = (429, 503)
_GONE = 410
_MAX_DATE_CHARS = 40
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 10.0  # until the response's headers; a receiver should answer first and work later
_TOTAL_TIMEOUT_S = 20.0
# Responses are ignored; this much is read so that the connection closes in order.
_MAX_RESPONSE_BYTES = 16_384


@dataclass(frozen=True)
class FailedTry:
    """Why the receiver did not accept a webhook, and what it asked for."""

    reason: str
    is_gone: bool = False  # no more webhooks are to be sent to this URL
    retry_after_s: float = 0.0


def retry_delay_s(num_tries: int, uniform: float, retry_after_s: float = 0.0) -> float | None:
    """Seconds to wait after try number `num_tries` failed; None after the last try.

    `uniform` in [0, 1) adds ± 20 % jitter. The wait is at least `retry_after_s`, of which at most a day counts, with a
    jitter of up to 20 % more, so that webhooks that were put off together do not come back together.
    """
    if num_tries >= MAX_TRIES:
        return None
    scheduled_s = _RETRY_DELAYS_S[num_tries - 1] * (0.8 + 0.4 * uniform)
    return max(scheduled_s, min(retry_after_s, _MAX_RETRY_AFTER_S) * (1.0 + 0.2 * uniform))


def _parse_retry_after(text: str, now: float) -> float:
    """The seconds in a Retry-After header (RFC 9110, 10.2.3), a number or a date; 0 if it is neither."""
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return float(text)
    try:
        return max(parsedate_to_datetime(text[:_MAX_DATE_CHARS]).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return 0.0


def _attributes(delivery: WebhookDelivery) -> dict[str, str | int]:
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
    """Posts deliveries. Call `close` at the end."""

    def __init__(
        self, secrets: Sequence[bytes], *, allow_private: bool, resolve: ResolveHost, tracer: Tracer = GLOBAL_TRACER
    ) -> None:
        """`secrets` are the server's; each API key signs with what is derived from them."""
        self._secrets, self._allow_private, self._resolve, self._tracer = secrets, allow_private, resolve, tracer
        self._client: httpx2.AsyncClient | None = None
        self._client_lock = asyncio.Lock()

    async def check_url(self, url: str, resolve: ResolveHost | None = None) -> WebhookTarget:
        """Resolve and check `url`. Raises InvalidField and JobsUnavailable; see `check_webhook_url`."""
        return await check_webhook_url(url, resolve or self._resolve, allow_private=self._allow_private)

    async def send(self, delivery: WebhookDelivery, now: float) -> FailedTry | None:
        """Try once. Returns None if the receiver accepted it."""
        span = self._tracer.start_span("POST", delivery.trace, SpanKind.CLIENT, _attributes(delivery))
        try:
            async with asyncio.timeout(_TOTAL_TIMEOUT_S):
                target = await self.check_url(delivery.url)
                status, retry_after = await self._post(delivery, target, int(now), span)
        except NoriaError as error:  # raised by `check_url`
            fail(span, error.code)
            return FailedTry(error.message.replace(short_repr(delivery.url), short_repr(delivery.safe_url)))
        except TimeoutError:
            fail(span, "timeout")
            return FailedTry(f"no answer within {_TOTAL_TIMEOUT_S:g} s")
        except httpx2.HTTPError as error:
            fail(span, type(error).__name__)
            return FailedTry(f"{type(error).__name__}: {error}")
        else:
            span.set_attribute("http.response.status_code", status)
            if 200 <= status < 300:
                return None
            fail(span, str(status))
            retry_after_s = _parse_retry_after(retry_after, now) if status in _RETRY_AFTER_STATUSES else 0.0
            return FailedTry(f"it answered {status}", status == _GONE, retry_after_s)
        finally:
            span.end()

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(
        self, delivery: WebhookDelivery, target: WebhookTarget, timestamp_s: int, span: Span
    ) -> tuple[int, str]:
        """Post once. Returns the status code of the response, and its Retry-After."""
        client = await self._get_client()
        body = delivery.body.encode()
        signing_secrets = [secret_of_key(secret, delivery.made_by) for secret in self._secrets]
        headers = {
            "Host": target.host_header,
            "Content-Type": "application/json",
            "User-Agent": "noria-webhooks",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": sign(signing_secrets, delivery.id, timestamp_s, body),
        } | trace_headers(span)
        tls_extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        async with client.stream(
            "POST", target.url, content=body, headers=headers, extensions=tls_extensions
        ) as response:
            num_bytes = 0
            async for chunk in response.aiter_raw():
                num_bytes += len(chunk)
                if num_bytes > _MAX_RESPONSE_BYTES:
                    break
            return response.status_code, response.headers.get("retry-after", "")

    async def _get_client(self) -> httpx2.AsyncClient:
        async with self._client_lock:
            if self._client is None:
                # httpx logs the URL with its query, which may hold a secret; `dispatcher.py` logs it without.
                logging.getLogger(httpx2.__name__).setLevel(logging.WARNING)
                # reads the system's certificates: 0.1 s
                ssl_context = await asyncio.to_thread(ssl.create_default_context)
                self._client = httpx2.AsyncClient(
                    verify=ssl_context,
                    follow_redirects=False,  # the target of a redirect is not checked
                    trust_env=False,  # a proxy would not connect to the checked address
                    timeout=httpx2.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                    limits=httpx2.Limits(max_keepalive_connections=0),
                )
            return self._client
