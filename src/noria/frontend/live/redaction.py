"""The part of a view that a subscriber sees. With an API key: its own requests, and only that others exist.

Without keys a client is a digest of its address, or of the name that it gave its user: few enough that a reader could
try them all, so it is replaced by a name that cannot be computed. Pure. `noria.frontend.live.feed` has the views.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from noria.frontend.access.shares import is_digest, is_share_of
from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.live_views import DepartureView, ShareView, SlotView, ThumbnailView, WaitingView, sum_shares
from noria.protocol.messages import EngineView

HIDDEN = "hidden"
"""The scheduler of a hidden request, and how its id begins."""

_NUM_CALLS = 100  # calls that a hidden image shows: its own number is that of its steps
_HIDDEN_SETTINGS = ImageSettingsView(0, 0, HIDDEN, 0.0, 0)

_MAX_SHARES = 8
"""The clients that have a line of their own; the others have one together."""

AnyView = TypeVar("AnyView", SlotView, WaitingView, DepartureView, ThumbnailView)
SharingView = TypeVar("SharingView", SlotView, WaitingView, ShareView)


class Redaction:
    """Hides the requests of others, and addresses; an id is replaced by one that stays the same, and says nothing
    without `secret`.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def view_for(self, view: EngineView, key_name: str | None) -> EngineView:
        """Return what the key of this name sees of a view; None: who sees the requests of all."""
        if key_name is not None:
            view = self._view_of_key(view, key_name)
        return msgspec.structs.replace(
            view,
            slots=tuple([self._name_client(each) for each in view.slots]),
            waiting=tuple([self._name_client(each) for each in view.waiting]),
            shares=tuple(
                [self._name_client(each) for each in _with_others(view.shares[:_MAX_SHARES], view.shares[_MAX_SHARES:])]
            ),
        )

    def _name_client(self, each: SharingView) -> SharingView:
        """Show the name of a key, or one that stands for an address."""
        if not each.share_client:
            return each
        name = f"client-{self._digest(each.share_client, 3)}" if is_digest(each.share_client) else each.share_client
        return msgspec.structs.replace(each, share_client=name.strip())

    def _view_of_key(self, view: EngineView, key_name: str) -> EngineView:
        own_slots = {slot.slot for slot in view.slots if slot.client == key_name}
        return msgspec.structs.replace(
            view,
            slots=tuple(slot if slot.client == key_name else self._hide_slot(slot) for slot in view.slots),
            waiting=tuple(
                each
                if each.client == key_name
                else self._hide(each, settings=_HIDDEN_SETTINGS, deadline_at=None, share_client="")
                for each in view.waiting
            ),
            departures=tuple(each if each.client == key_name else self._hide(each) for each in view.departures),
            thumbnails=tuple(
                each if each.slot in own_slots else msgspec.structs.replace(each, request_id=self._id(each.request_id))
                for each in view.thumbnails
            ),
            shares=_with_others(
                [each for each in view.shares if is_share_of(each.share_client, key_name)],
                [each for each in view.shares if not is_share_of(each.share_client, key_name)],
            ),
        )

    def _hide_slot(self, slot: SlotView) -> SlotView:
        call = slot.call * _NUM_CALLS // max(1, slot.num_calls)
        return self._hide(
            slot, settings=_HIDDEN_SETTINGS, deadline_at=None, call=call, num_calls=_NUM_CALLS, share_client=""
        )

    def _hide(self, each: AnyView, **changes: object) -> AnyView:
        return msgspec.structs.replace(each, request_id=self._id(each.request_id), client="", **changes)

    def _id(self, request_id: str) -> str:
        return f"{HIDDEN}-{self._digest(request_id, 8)}"

    def _digest(self, name: str, num_bytes: int) -> str:
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=num_bytes).hexdigest()


def _with_others(shares: Sequence[ShareView], others: Sequence[ShareView]) -> tuple[ShareView, ...]:
    """Return `shares`, and behind them the others as one."""
    return (*shares, sum_shares(others)) if others else tuple(shares)
