"""Selects which waiting images join the batch, and which start images are encoded for them."""

from collections.abc import Callable, Iterable

from noria.scheduling.step.batch_selection import can_encode
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, ItemId


def select_joins(
    in_order: Iterable[ItemId], table: RequestTable, num_free: int, max_encodes: Callable[[BatchKey], int]
) -> tuple[list[ItemId], list[ItemId]]:
    """Return the images that join, at most `num_free`, and those of them whose requests' start images are encoded.

    `max_encodes` is how many start images of a key an iteration encodes.
    """
    in_flight = {image.attempt_id for image in table.running}
    exclusive = any(table.requests[attempt_id].request.exclusive for attempt_id in in_flight)
    joining: list[ItemId] = []
    encodes: dict[str, ItemId] = {}  # by attempt
    for image in in_order:
        if len(joining) == num_free:
            break
        exclusive = exclusive or table.request_of(image).exclusive
        if exclusive and in_flight - {image.attempt_id}:
            break  # an exclusive request waits, and holds others back, until the batch is empty
        if table.requests[image.attempt_id].needs_encode and image.attempt_id not in encodes:
            batch_key = table.request_of(image).batch_key
            encoding = [table.request_of(other).batch_key for other in encodes.values()]
            if not can_encode(batch_key, encoding, max_encodes(batch_key)):
                continue
            encodes[image.attempt_id] = image
        joining.append(image)
        in_flight.add(image.attempt_id)
    return joining, list(encodes.values())
