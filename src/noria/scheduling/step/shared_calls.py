"""Decides which sizes of images share the calls of a model that takes several at once.

In a shared call, every row is padded to the tokens of the largest size: a small image costs as much as a large one. A
token is a fixed number of pixels, so areas, reference images included, order sizes by tokens. That pays where a larger
call takes little longer, or the sizes are nearly equal; else each size has calls of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from noria.scheduling.costs import CostModel
from noria.scheduling.step.forecast import SimulatedImage
from noria.scheduling.types import BatchKey, SchedulableRequest


def share_calls(
    rows: Mapping[BatchKey, int], call_keys: Mapping[BatchKey, BatchKey], costs: CostModel
) -> dict[BatchKey, BatchKey]:
    """Return for each key that of the largest size in its calls: its own, unless it joins those of another.

    `rows` are those of the images of each key, and keys can share calls if `call_keys` has the same for them. A key
    joins where one call for both takes no longer than one for each.
    """
    largest: dict[BatchKey, BatchKey] = {}
    joined = dict(rows)
    for key in sorted(rows, key=lambda key: key.area_px, reverse=True):
        largest[key] = key
        for other in [host for host in largest.values() if call_keys[host] == call_keys[key] and host != key]:
            together = joined[other] + rows[key]
            apart_s = costs.step_s(other, joined[other]) + costs.step_s(key, rows[key])
            if together <= costs.rows_limit(other) and costs.step_s(other, together) <= apart_s:
                largest[key], joined[other] = other, together
                break
    return largest


def mix_sizes(
    images: Sequence[SimulatedImage],
    requests: Mapping[BatchKey, SchedulableRequest],
    max_running: int,
    costs: CostModel,
) -> None:
    """Set which sizes share calls: as those do now that run, and the next ones, as many as there are slots.

    `requests` has one for each key of `images`.
    """
    if all(request.call_size is None for request in requests.values()):
        return
    rows = Counter[BatchKey]()
    for each in sorted(images, key=lambda each: not each.running)[:max_running]:
        rows[each.batch_key] += each.rows
    largest = share_calls(rows, {key: request.call_key(key) for key, request in requests.items()}, costs)
    for each in images:
        each.largest_key = largest.get(each.batch_key)
