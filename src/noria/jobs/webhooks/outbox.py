"""The webhooks that are still to be delivered, in the jobs' database. `store.py` puts them there.

A delivery that is taken becomes due again a minute later, whatever becomes of the process that has taken it.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Engine

from noria.jobs.schema import deliveries, jobs, write_transaction
from noria.jobs.tracing import stored_trace_context
from noria.observe.traces.trace_context import TraceContext

CLAIM_S = 60.0  # three times as long as a try can take


@dataclass(frozen=True)
class WebhookDelivery:
    """One thing to tell one receiver."""

    id: str  # the same at each try
    url: str
    body: str  # JSON
    num_tries: int  # this one counted, once it is taken
    job_id: str
    trace: TraceContext | None = None  # of the request that made the job

    @property
    def safe_url(self) -> str:
        """Its URL without the query, which may be a secret: what logs and traces may say."""
        url = urlsplit(self.url)
        return urlunsplit((url.scheme, url.netloc, url.path, "", ""))


class _DeliveryBody(Struct, frozen=True):
    """Of a body: whose job it tells of."""

    id: str


class Outbox:
    """Deliveries, through the connections of a store. Calls block. `now` is seconds since 1970."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def claim_due(self, limit: int, now: float) -> list[WebhookDelivery]:
        """Up to `limit` deliveries that are due, for the caller to try; nobody else gets them meanwhile."""
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

    def _trace_of_job(self, job_id: str) -> TraceContext | None:
        """Kept with the job; one that is deleted meanwhile has none any more."""
        with self._engine.connect() as connection:
            request = connection.scalar(sa.select(jobs.c.request).where(jobs.c.id == job_id))
        return None if request is None else stored_trace_context(request)

    def reschedule(self, delivery: WebhookDelivery, due_at: float) -> None:
        """Try again later."""
        with write_transaction(self._engine) as connection:
            connection.execute(
                deliveries.update()
                .where(deliveries.c.id == delivery.id, deliveries.c.num_tries == delivery.num_tries)
                .values(due_at=due_at)
            )

    def drop(self, delivery: WebhookDelivery) -> None:
        """Forget it: it has arrived, or is given up."""
        with write_transaction(self._engine) as connection:
            connection.execute(deliveries.delete().where(deliveries.c.id == delivery.id))
