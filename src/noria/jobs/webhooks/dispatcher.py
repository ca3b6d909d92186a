"""Delivers webhooks: claims due deliveries, a few at a time, and reschedules those that fail."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from opentelemetry.trace import get_current_span

from noria.errors import JobsUnavailable
from noria.jobs.periodic import run_periodically
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.webhooks.client import FailedTry, WebhookClient, retry_delay_s
from noria.jobs.webhooks.outbox import MAX_IN_FLIGHT, Outbox, WebhookDelivery
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations
from noria.observe.request_scope import RequestScope

_POLL_EVERY_S = 1.0

log = logging.getLogger("noria.webhooks")


def _log_fields(delivery: WebhookDelivery, event: str, reason: str | None = None, **more: object) -> dict[str, Any]:
    return fields(
        event=event, webhook_id=delivery.id, url=delivery.safe_url, num_tries=delivery.num_tries, reason=reason, **more
    )


class WebhookDispatcher:
    """Delivers until cancelled. Several dispatchers may share an outbox. `uniform` returns numbers in [0, 1)."""

    def __init__(
        self,
        outbox: Outbox,
        client: WebhookClient,
        offload: ThreadOffloader,
        clock: Callable[[], float] = time.time,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._outbox, self._client, self._offload = outbox, client, offload
        self._clock, self._uniform = clock, uniform
        self._in_flight: dict[asyncio.Task[None], WebhookDelivery] = {}

    async def run(self) -> None:
        """Deliver due webhooks until cancelled.

        A delivery that is in flight then is due again a minute after it was claimed.
        """
        try:
            await run_periodically(self._dispatch_due, lambda: asyncio.sleep(_POLL_EVERY_S))
        finally:
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _dispatch_due(self) -> None:
        in_flight = list(self._in_flight.values())
        num_free = MAX_IN_FLIGHT - len(in_flight)
        for delivery in await self._offload(self._outbox.claim_due, num_free, self._clock(), in_flight):
            # Tasks keep the scope in which they were created.
            with RequestScope(delivery.job_id, get_current_span(delivery.trace)):
                task = asyncio.create_task(self._deliver(delivery))
            self._in_flight[task] = delivery
            task.add_done_callback(self._in_flight.pop)

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        failed = await self._client.send(delivery, self._clock())
        declarations.WEBHOOK_ATTEMPTS.labels("delivered" if failed is None else "failed").inc()
        try:
            if failed is None:
                log_fields = _log_fields(delivery, "webhook_delivered")
                log.info("webhook %s is delivered", delivery.id, extra=log_fields)
                await self._offload(self._outbox.drop, delivery)
            else:
                await self._handle(failed, delivery)
        except JobsUnavailable as error:  # due again in a minute
            log.warning("webhook %s: %s (%s)", delivery.id, error.message, error.__cause__)

    async def _handle(self, failed: FailedTry, delivery: WebhookDelivery) -> None:
        """Put the delivery off, or end it, with all others to its URL if the receiver said that it is gone."""
        if failed.is_gone:
            num_dropped = await self._offload(self._outbox.drop_all_to_url, delivery)
            log_fields = _log_fields(delivery, "webhook_gone", failed.reason, num_dropped=num_dropped)
            message = "webhook %s: the receiver answered 410, so no pending one of the key is sent to its URL"
            log.warning(message, delivery.id, extra=log_fields)
            return
        wait_s = retry_delay_s(delivery.num_tries, self._uniform(), failed.retry_after_s)
        if wait_s is None:
            log_fields = _log_fields(delivery, "webhook_abandoned", failed.reason)
            log.error("webhook %s is abandoned after %d tries", delivery.id, delivery.num_tries, extra=log_fields)
            await self._offload(self._outbox.drop, delivery)
            return
        log_fields = _log_fields(delivery, "webhook_failed", failed.reason, delay_s=wait_s)
        log.info("webhook %s: try %d failed, next in %.0f s", delivery.id, delivery.num_tries, wait_s, extra=log_fields)
        await self._offload(self._outbox.reschedule, delivery, self._clock() + wait_s)
