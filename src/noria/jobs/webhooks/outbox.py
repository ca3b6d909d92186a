"""The pending webhook deliveries, in the database of jobs; `store.py` adds them.

A claimed delivery becomes due again a minute later, even if the process that claimed it dies.
"""

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from opentelemetry.context import Context
from sqlalchemy import Engine

from noria.jobs.database.schema import deliveries, jobs
from noria.jobs.tracing import stored_trace_context
from noria.observe.logs.log_record import fields
from noria.storage.database import write_transaction
from noria.storage.field_copies import copy_fields

CLAIM_S = 60.0  # three times the maximum duration of a try
MAX_IN_FLIGHT = 32  # messages of one front end; a receiver that does not answer occupies one of them for 20 s
# Shares of them, so that receivers that do not answer, and all receivers of one client, delay only their own.
MAX_PER_HOST = 4
MAX_PER_CLIENT = 8
# The tries of a webhook take four days at most; this bounds those that a receiver puts off with Retry-After, and those
# that wait for a share.
MAX_AGE_S = 5 * 86_400.0

log = logging.getLogger("noria.webhooks")


@dataclass(frozen=True)
class WebhookDelivery:
    """A message to a receiver."""

    id: str  # the same for each try
    url: str
    body: str  # JSON
    num_tries: int  # including the one for which it is claimed
    job_id: str
    host: str = ""
    made_by: str = ""
    client: str = ""
    trace: Context = field(default_factory=Context)  # trace context of the request that created the job

    @property
    def safe_url(self) -> str:
        """The URL for logs and traces: without the query, which may hold a secret."""
        url = urlsplit(self.url)
        return urlunsplit((url.scheme, url.netloc, url.path, "", ""))


class _DeliveryBody(Struct, frozen=True):
    """The part of a delivery's body that the outbox reads."""

    id: str


# Made once: an idle front end asks every second, and making the query takes most of the time.
_DUE = (
    sa.select(deliveries)
    .where(
        deliveries.c.due_at <= sa.bindparam("now"),
        deliveries.c.host.not_in(sa.bindparam("full_hosts", expanding=True)),
        deliveries.c.client.not_in(sa.bindparam("full_clients", expanding=True)),
        deliveries.c.id.not_in(sa.bindparam("taken", expanding=True)),
    )
    .order_by(deliveries.c.due_at)
    .limit(sa.bindparam("limit"))
)


class Outbox:
    """Pending deliveries. Calls block. `now` is Unix time in seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def claim_due(self, limit: int, now: float, in_flight: Collection[WebhookDelivery] = ()) -> list[WebhookDelivery]:
        """Claim up to `limit` due deliveries for one try each; no other caller gets them for `CLAIM_S`.

        Together with those `in_flight` they are at most `MAX_PER_HOST` of one host and `MAX_PER_CLIENT` of one client.
        """
        claimed = []
        for row in self._due(limit, now, in_flight):
            with write_transaction(self._engine) as connection:
                updated = connection.execute(
                    deliveries.update()
                    .where(deliveries.c.id == row.id, deliveries.c.num_tries == row.num_tries)
                    .values(num_tries=row.num_tries + 1, due_at=now + CLAIM_S)
                )
            if updated.rowcount:
                job_id = msgspec.json.decode(row.body, type=_DeliveryBody).id
                claimed.append(
                    copy_fields(
                        WebhookDelivery,
                        row,
                        num_tries=row.num_tries + 1,
                        job_id=job_id,
                        trace=self._trace_of_job(job_id),
                    )
                )
        return claimed

    def _due(self, limit: int, now: float, in_flight: Collection[WebhookDelivery]) -> list[Any]:
        """Rows of due deliveries within the limits, the longest due first.

        Each query leaves out hosts and clients that have their share, so a long backlog of one is skipped in the index.
        """
        of_host = Counter(delivery.host for delivery in in_flight)
        of_client = Counter(delivery.client for delivery in in_flight)
        taken: dict[str, Any] = {}
        with self._engine.connect() as connection:
            while len(taken) < limit:
                parameters = {
                    "now": now,
                    "full_hosts": [host for host, number in of_host.items() if number >= MAX_PER_HOST],
                    "full_clients": [client for client, number in of_client.items() if number >= MAX_PER_CLIENT],
                    "taken": list(taken),
                    "limit": limit - len(taken),
                }
                rows = connection.execute(_DUE, parameters).all()
                if not rows:
                    break
                for row in rows:
                    if of_host[row.host] < MAX_PER_HOST and of_client[row.client] < MAX_PER_CLIENT:
                        taken[row.id] = row
                        of_host[row.host] += 1
                        of_client[row.client] += 1
        return list(taken.values())

    def _trace_of_job(self, job_id: str) -> Context:
        """The trace context stored with the job; empty also if the job was deleted meanwhile."""
        with self._engine.connect() as connection:
            request = connection.scalar(sa.select(jobs.c.request).where(jobs.c.id == job_id))
        return Context() if request is None else stored_trace_context(request)

    def reschedule(self, delivery: WebhookDelivery, due_at: float) -> None:
        """Make the delivery due again at `due_at`, unless it was claimed again meanwhile."""
        with write_transaction(self._engine) as connection:
            connection.execute(
                deliveries.update()
                .where(deliveries.c.id == delivery.id, deliveries.c.num_tries == delivery.num_tries)
                .values(due_at=due_at)
            )

    def drop(self, delivery: WebhookDelivery) -> None:
        """Delete the delivery: it was accepted or abandoned."""
        with write_transaction(self._engine) as connection:
            connection.execute(deliveries.delete().where(deliveries.c.id == delivery.id))

    def drop_all_to_url(self, delivery: WebhookDelivery) -> int:
        """Delete the delivery and all others of the same API key to the same URL. Returns their number."""
        is_same = sa.and_(deliveries.c.url == delivery.url, deliveries.c.made_by == delivery.made_by)
        with write_transaction(self._engine) as connection:
            return connection.execute(deliveries.delete().where(is_same)).rowcount

    def expire(self, now: float) -> int:
        """Delete the deliveries that are older than `MAX_AGE_S`. Returns their number."""
        is_too_old = deliveries.c.created_at < now - MAX_AGE_S
        with write_transaction(self._engine) as connection:
            num_dropped = connection.execute(deliveries.delete().where(is_too_old)).rowcount
        if num_dropped:
            log.error(
                "%d webhooks are abandoned: in five days their receivers did not accept them",
                num_dropped,
                extra=fields(event="webhooks_expired", num_dropped=num_dropped),
            )
        return num_dropped
