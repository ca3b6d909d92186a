"""The webhooks that are still to be delivered, in the jobs' database. `store.py` puts them there.

A delivery that is taken becomes due again a minute later, whatever becomes of the process that has taken it.
"""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Engine

from noria.jobs.schema import deliveries, writing

TAKEN_S = 60.0  # three times as long as a try can take


@dataclass(frozen=True)
class WebhookDelivery:
    """One thing to tell one receiver."""

    id: str  # the same at each try
    url: str
    body: str  # JSON
    num_tries: int  # this one counted, once it is taken


class Outbox:
    """Deliveries, through the connections of a store. Calls block. `now` is seconds since 1970."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def take(self, limit: int, now: float) -> list[WebhookDelivery]:
        """Up to `limit` deliveries that are due, for the caller to try; nobody else gets them meanwhile."""
        due = sa.select(deliveries).where(deliveries.c.due_at <= now).order_by(deliveries.c.due_at).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(due).all()
        taken = []
        for row in rows:
            with writing(self._engine) as connection:
                mine = connection.execute(
                    deliveries.update()
                    .where(deliveries.c.id == row.id, deliveries.c.num_tries == row.num_tries)
                    .values(num_tries=row.num_tries + 1, due_at=now + TAKEN_S)
                )
            if mine.rowcount:
                taken.append(WebhookDelivery(row.id, row.url, row.body, row.num_tries + 1))
        return taken

    def put_off(self, delivery: WebhookDelivery, due_at: float) -> None:
        """Try again later."""
        with writing(self._engine) as connection:
            connection.execute(
                deliveries.update()
                .where(deliveries.c.id == delivery.id, deliveries.c.num_tries == delivery.num_tries)
                .values(due_at=due_at)
            )

    def drop(self, delivery: WebhookDelivery) -> None:
        """Forget it: it has arrived, or is given up."""
        with writing(self._engine) as connection:
            connection.execute(deliveries.delete().where(deliveries.c.id == delivery.id))
