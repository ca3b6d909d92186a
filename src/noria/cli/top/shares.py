"""Renders the shares of an engine's clients: how much of the device each has, and what its images wait for. Pure."""

from rich.text import Text

from noria.cli.top.text import StyledText, bar, elide_middle, flow, line
from noria.protocol.live_views import ShareView, SlotView, WaitingView
from noria.protocol.messages import EngineView

_NAME_WIDTH = 20
_BAR_WIDTH = 12


def has_several_clients(view: EngineView) -> bool:
    """Whether more than one client shares the engine; else there is nothing to say of it."""
    return sum(share.num_clients for share in view.shares) > 1


def client_name(each: SlotView | WaitingView | ShareView) -> str:
    """Return whose it is."""
    if each.share_client:
        return each.share_client
    return f"{each.num_clients} others" if isinstance(each, ShareView) and each.num_clients > 1 else "another"


def share_lines(view: EngineView, width: int, max_lines: int | None) -> list[Text]:
    """Return a line for each client, those with most time of the device first; one for all if there is no more room.

    There is none if one client has the engine for itself, or if `max_lines` is 0 or less.
    """
    if not has_several_clients(view) or (max_lines is not None and max_lines < 1):
        return []
    if max_lines is None or len(view.shares) <= max_lines:
        return [line(_share(each), width) for each in view.shares]
    items: list[list[StyledText]] = [
        [(f"{client_name(each)} ", "dim"), (f"{each.device_share:.0%}", "bold")] for each in view.shares
    ]
    return flow([[("shares", "dim")], *items], width, 1)


def _share(share: ShareView) -> list[StyledText]:
    name = elide_middle(client_name(share), _NAME_WIDTH).ljust(_NAME_WIDTH)
    pieces: list[StyledText] = [
        (f"{name} ", "magenta"),
        (bar(share.device_share, _BAR_WIDTH), "green"),
        (f" {share.device_share:4.0%}", "bold"),
        (f"  {share.num_running - share.num_paused} run", ""),
    ]
    waits = ((share.num_paused, "paused"), (share.num_evicted, "evicted"), (share.num_waiting, "waiting"))
    return pieces + [(f" · {num} {what}", "yellow") for num, what in waits if num]
