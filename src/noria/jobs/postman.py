"""Brings webhooks to their receivers: takes those that are due, a few at a time, and puts off those that did not arrive."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from noria.errors import JobsUnavailable
from noria.jobs.blocking import Blocking
from noria.jobs.loops import forever
from noria.jobs.outbox import Outbox, WebhookDelivery
from noria.jobs.webhooks import Sender, delay_s
from noria.observe import metrics
from noria.observe.lines import fields
from noria.observe.traces import NoSpan, working_for

_TICK_S = 1.0
_AT_ONCE = 8  # a receiver that does not answer holds up one of them, for 20 s

log = logging.getLogger("noria.webhooks")


def _said_of(delivery: WebhookDelivery, event: str, why_not: str | None = None, **said: object) -> dict[str, Any]:
    return fields(
        event=event, webhook_id=delivery.id, url=delivery.place, num_tries=delivery.num_tries, why_not=why_not, **said
    )


class Postman:
    """Delivers until cancelled. Several may work on one outbox."""

    def __init__(
        self,
        outbox: Outbox,
        sender: Sender,
        blocking: Blocking,
        clock: Callable[[], float] = time.time,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._outbox, self._sender, self._blocking, self._clock, self._uniform = (
            outbox,
            sender,
            blocking,
            clock,
            uniform,
        )
        self._on_their_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Deliver what is due, for ever. What is on its way when this is cancelled is due again a minute after it was taken."""
        try:
            await forever(self._take, lambda: asyncio.sleep(_TICK_S))
        finally:
            for task in self._on_their_way:
                task.cancel()
            await asyncio.gather(*self._on_their_way, return_exceptions=True)

    async def _take(self) -> None:
        free = _AT_ONCE - len(self._on_their_way)
        for delivery in await self._blocking(self._outbox.take, free, self._clock()):
            with working_for(delivery.job_id, NoSpan(delivery.trace)):  # tasks keep what they were made in
                task = asyncio.create_task(self._deliver(delivery))
            self._on_their_way.add(task)
            task.add_done_callback(self._on_their_way.discard)

    async def _deliver(self, delivery: WebhookDelivery) -> None:
        why_not = await self._sender.send(delivery, self._clock())
        metrics.WEBHOOKS.labels("delivered" if why_not is None else "failed").inc()
        try:
            if why_not is None:
                said = _said_of(delivery, "webhook_delivered")
                log.info("webhook %s is delivered", delivery.id, extra=said)
                await self._blocking(self._outbox.drop, delivery)
                return
            wait_s = delay_s(delivery.num_tries, self._uniform())
            if wait_s is None:
                said = _said_of(delivery, "webhook_given_up", why_not)
                log.error("webhook %s is given up after %d tries", delivery.id, delivery.num_tries, extra=said)
                await self._blocking(self._outbox.drop, delivery)
                return
            said = _said_of(delivery, "webhook_failed", why_not, delay_s=wait_s)
            log.info("webhook %s: try %d failed, next in %.0f s", delivery.id, delivery.num_tries, wait_s, extra=said)
            await self._blocking(self._outbox.put_off, delivery, self._clock() + wait_s)
        except JobsUnavailable as error:  # due again in a minute
            log.warning("webhook %s: %s (%s)", delivery.id, error.message, error.__cause__)
