"""Brings webhooks to their receivers: takes those that are due, a few at a time, and puts off those that did not arrive."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from noria.errors import JobsUnavailable
from noria.jobs.periodic import run_periodically
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.webhooks.client import WebhookClient, retry_delay_s
from noria.jobs.webhooks.outbox import Outbox, WebhookDelivery
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations
from noria.observe.traces.tracer import NoSpan, request_scope

_POLL_EVERY_S = 1.0
_MAX_IN_FLIGHT = 8  # a receiver that does not answer holds up one of them, for 20 s

log = logging.getLogger("noria.webhooks")


def _log_fields(delivery: WebhookDelivery, event: str, reason: str | None = None, **more: object) -> dict[str, Any]:
    return fields(
        event=event, webhook_id=delivery.id, url=delivery.safe_url, num_tries=delivery.num_tries, why_not=reason, **more
    )


class WebhookDispatcher:
    """Delivers until cancelled. Several may work on one outbox."""

    def __init__(
        self,
        outbox: Outbox,
        client: WebhookClient,
        offload: ThreadOffloader,
        clock: Callable[[], float] = time.time,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._outbox, self._client, self._offload, self._clock, self._uniform = (
            outbox,
            client,
            offload,
            clock,
            uniform,
        )
        self._in_flight: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Deliver what is due, for ever. What is on its way when this is cancelled is due again a minute after it was taken."""
        try:
            await run_periodically(self._dispatch_due, lambda: asyncio.sleep(_POLL_EVERY_S))
        finally:
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _dispatch_due(self) -> None:
        num_free = _MAX_IN_FLIGHT - len(self._in_flight)
        for delivery in await self._offload(self._outbox.claim_due, num_free, self._clock()):
            with request_scope(delivery.job_id, NoSpan(delivery.trace)):  # tasks keep what they were made in
                task = asyncio.create_task(self._deliver(delivery))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        reason = await self._client.send(delivery, self._clock())
        declarations.WEBHOOK_ATTEMPTS.labels("delivered" if reason is None else "failed").inc()
        try:
            if reason is None:
                log_fields = _log_fields(delivery, "webhook_delivered")
                log.info("webhook %s is delivered", delivery.id, extra=log_fields)
                await self._offload(self._outbox.drop, delivery)
                return
            wait_s = retry_delay_s(delivery.num_tries, self._uniform())
            if wait_s is None:
                log_fields = _log_fields(delivery, "webhook_given_up", reason)
                log.error("webhook %s is given up after %d tries", delivery.id, delivery.num_tries, extra=log_fields)
                await self._offload(self._outbox.drop, delivery)
                return
            log_fields = _log_fields(delivery, "webhook_failed", reason, delay_s=wait_s)
            log.info(
                "webhook %s: try %d failed, next in %.0f s", delivery.id, delivery.num_tries, wait_s, extra=log_fields
            )
            await self._offload(self._outbox.reschedule, delivery, self._clock() + wait_s)
        except JobsUnavailable as error:  # due again in a minute
            log.warning("webhook %s: %s (%s)", delivery.id, error.message, error.__cause__)
