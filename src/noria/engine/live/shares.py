"""Whose images an engine has, and who has had how much of it: the `ShareView`s of a live view. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from noria.protocol.live_views import ShareView, SlotView, sum_shares

MAX_SHARES = 64  # clients in a view; a front end shows fewer, but of a key its own


def share_views(
    device_shares: Mapping[str, float],
    slots: Iterable[SlotView],
    waiting: Mapping[str, int],
    evicted: Mapping[str, int],
) -> tuple[ShareView, ...]:
    """Return each client that has images or had time of the device, those with most time first.

    `device_shares` are parts of the device's time, `waiting` numbers of images with those in `evicted`, all by client.
    From the `MAX_SHARES`th on, clients are summed.
    """
    running, paused = Counter[str](), Counter[str]()
    for slot in slots:
        running[slot.share_client] += 1
        paused[slot.share_client] += slot.paused
    shares = [
        ShareView(
            client,
            device_shares.get(client, 0.0),
            running[client],
            paused[client],
            waiting.get(client, 0) - evicted.get(client, 0),
            evicted.get(client, 0),
        )
        for client in {*device_shares, *running, *(client for client, num in waiting.items() if num)}
    ]
    shares.sort(key=lambda each: (-each.device_share, -each.num_running, -each.num_waiting, each.share_client))
    if len(shares) > MAX_SHARES:
        shares[MAX_SHARES - 1 :] = [sum_shares(shares[MAX_SHARES - 1 :])]
    return tuple(shares)
