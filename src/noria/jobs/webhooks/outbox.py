"""The pending webhook deliveries, in the database of jobs; `store.py` adds them.

A claimed delivery becomes due again a minute later, even if the process that claimed it dies.
"""

from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from opentelemetry.context import Context
from sqlalchemy import Engine

from noria.jobs.schema import deliveries, jobs
from noria.jobs.tracing import stored_trace_context
from noria.storage.database import write_transaction

CLAIM_S = 60.0  # three times the maximum duration of a try


@dataclass(frozen=True)
class WebhookDelivery:
    """One message to one receiver."""

    id: str  # the same for each try
    url: str
    body: str  # JSON
    num_tries: int  # including the one for which it is claimed
    job_id: str
    trace: Context = field(default_factory=Context)  # of the request that created the job

    @property
    def safe_url(self) -> str:
        """The URL for logs and traces: without the query, which may hold a secret."""
        url = urlsplit(self.url)
        return urlunsplit((url.scheme, url.netloc, url.path, "", ""))


class _DeliveryBody(Struct, frozen=True):
    """The part of a delivery's body that the outbox reads."""

    id: str


class Outbox:
    """Pending deliveries. Calls block. `now` is Unix time in seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def claim_due(self, limit: int, now: float) -> list[WebhookDelivery]:
        """Claim up to `limit` due deliveries for one try each; no other caller gets them for `CLAIM_S`."""
        due_query = sa.select(deliveries).where(deliveries.c.due_at <= now).order_by(deliveries.c.due_at).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(due_query).all()
        claimed = []
        for row in rows:
            with write_transaction(self._engine) as connection:
                updated = connection.execute(
                    deliveries.update()
                    .where(deliveries.c.id == row.id, deliveries.c.num_tries == row.num_tries)
                    .values(num_tries=row.num_tries + 1, due_at=now + CLAIM_S)
                )
            if updated.rowcount:
                job_id = msgspec.json.decode(row.body, type=_DeliveryBody).id
                claimed.append(
                    WebhookDelivery(row.id, row.url, row.body, row.num_tries + 1, job_id, self._trace_of_job(job_id))
                )
        return claimed

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
