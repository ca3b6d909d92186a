"""Selects which waiting images join the batch, and which start images are encoded for them."""

from collections.abc import Callable, Iterable

from noria.scheduling.step.batch_selection import can_encode
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.step.waiting_queue import WaitingImage
from noria.scheduling.types import BatchKey, ItemId


def select_joins(
    in_order: Iterable[WaitingImage], table: RequestTable, num_free: int, max_encodes: Callable[[BatchKey], int]
) -> tuple[list[ItemId], list[ItemId]]:
    """Return the waiting images that join, and those of them whose requests' start images are encoded.

    At most `num_free` join.
    `max_encodes` is how many start images of a key an iteration encodes.
    """
    first = next(iter(table.running), None)
    in_flight = set() if first is None else {first.attempt_id}
    exclusive = first is not None and table.request_of(first).exclusive  # then no other request runs
    joining: list[ItemId] = []
    encodes: list[ItemId] = []
    postponed: set[str] = set()  # requests whose start images are encoded later
    for waiting in in_order:
        if len(joining) == num_free:
            break
        image, request = waiting.image, waiting.active.request
        exclusive = exclusive or request.exclusive
        if exclusive and not in_flight.union([image.attempt_id for image in table.running]) <= {image.attempt_id}:
            break  # an exclusive request waits, and holds others back, until the batch is empty
        if waiting.active.needs_encode and image.attempt_id not in in_flight:
            encoding = [table.request_of(other).batch_key for other in encodes]
            if image.attempt_id in postponed or not can_encode(
                request.batch_key, encoding, max_encodes(request.batch_key)
            ):
                postponed.add(image.attempt_id)
                continue
            encodes.append(image)
        joining.append(image)
        in_flight.add(image.attempt_id)
    return joining, encodes
