"""Selects which waiting images join the batch, and which start images are encoded for them."""

from collections.abc import Callable, Iterable

from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.batch_selection import can_encode
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, ItemId


def select_joins(
    in_order: Iterable[ActiveRequest], table: RequestTable, num_free: int, max_encodes: Callable[[BatchKey], int]
) -> tuple[list[ItemId], list[ItemId]]:
    """Return the images of waiting requests that join, and those of them whose requests' start images are encoded.

    At most `num_free` join.
    `max_encodes` is how many start images of a key an iteration encodes.
    """
    first = next(iter(table.running), None)
    in_flight = set() if first is None else {first.attempt_id}
    exclusive = first is not None and table.request_of(first).exclusive  # then no other request runs
    joining: list[ItemId] = []
    encodes: list[ItemId] = []
    for active in in_order:
        if len(joining) == num_free:
            break
        attempt_id, request = active.request.attempt_id, active.request
        exclusive = exclusive or request.exclusive
        if exclusive and not in_flight.union([image.attempt_id for image in table.running]) <= {attempt_id}:
            break  # an exclusive request waits, and holds others back, until the batch is empty
        images = active.waiting_images[: num_free - len(joining)]
        if active.needs_encode:
            encoding = [table.request_of(other).batch_key for other in encodes]
            if not can_encode(request.batch_key, encoding, max_encodes(request.batch_key)):
                continue
            encodes.append(images[0])
        joining += images
        in_flight.add(attempt_id)
    return joining, encodes
