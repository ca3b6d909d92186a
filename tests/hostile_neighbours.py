"""A quiet second client that must be served while another client attacks."""

import ssl
import threading
from collections.abc import Callable

from noria_bench.soak.neighbours import ALLOWED_GROWTH, Windows, grow_until_allowed, measure_growth

SHORT = Windows(3, 0.4)  # the median of three is not that of one window that another program has disturbed


def assert_neighbour_is_served(
    port: int, attack: Callable[[threading.Event], None], path: str = "/healthz", *, has_tls: bool = False
) -> None:
    """Fail if the p99 of a second client grows more than threefold while `attack` runs until its event is set.

    Another program may take the machine for a moment, so only growth in three measurements out of three counts.
    """
    tls = ssl._create_unverified_context() if has_tls else None
    measured = grow_until_allowed(lambda: measure_growth(port, attack, path, tls=tls, windows=SHORT))
    growths = [each.factor for each in measured]
    assert growths[-1] <= ALLOWED_GROWTH, f"a quiet client's p99 grew by the factors {growths}"
