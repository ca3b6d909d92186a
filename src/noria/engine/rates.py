"""The last minute of a wheel, for who watches it: how fast, how full, how long requests took.

Kept in buckets of a second, so that an hour of small turns takes no more memory than a minute of large ones. Seconds are of any one
clock, and an argument.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from noria.views import RatesView

WINDOW_S = 60
_MOST_REQUESTS = 1000  # of one second, whose times are kept: more would say the same


@dataclass(slots=True)
class _Second:
    number: int  # it began then
    busy_s: float = 0.0
    seated_s: float = 0.0  # of all slots together
    num_turns: int = 0  # that stepped
    num_steps: int = 0
    num_images: int = 0
    num_requests: int = 0
    requests_s: list[float] = field(default_factory=list)


class Rates:
    """What happened in each of the last seconds."""

    def __init__(self, num_slots: int, now: float) -> None:
        self._num_slots, self._began = num_slots, now
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)

    def turned(self, seconds: float, num_seated: int, num_stepped: int, now: float) -> None:
        """A turn ended that took `seconds`, with so many images in slots."""
        second = self._second(now)
        second.busy_s += seconds
        second.seated_s += seconds * num_seated
        second.num_turns += num_stepped > 0
        second.num_steps += num_stepped

    def drew(self, now: float) -> None:
        """An image is done."""
        self._second(now).num_images += 1

    def served(self, seconds: float, now: float) -> None:
        """A request ended well, `seconds` after it came."""
        second = self._second(now)
        second.num_requests += 1
        if len(second.requests_s) < _MOST_REQUESTS:
            second.requests_s.append(seconds)

    def any(self, now: float) -> bool:
        """Whether anything happened in the last minute, so that a second from now the view is another."""
        return bool(self._seconds) and self._seconds[-1].number > int(now) - WINDOW_S

    def view(self, now: float) -> RatesView:
        """The last minute, or since the beginning where that is less; never less than a second."""
        first = int(now) - WINDOW_S + 1
        kept = [second for second in self._seconds if second.number >= first]
        window_s = max(now - max(self._began, first), 1.0)
        took_s = [each_s for second in kept for each_s in second.requests_s]
        p50_s, p95_s, p99_s = np.percentile(took_s, (50, 95, 99)).tolist() if took_s else (None, None, None)
        num_turns, num_steps = sum(each.num_turns for each in kept), sum(each.num_steps for each in kept)
        # A turn counts in the second in which it ended, so one that is long may count for more than the window.
        return RatesView(
            window_s=window_s,
            requests_per_s=sum(each.num_requests for each in kept) / window_s,
            images_per_s=sum(each.num_images for each in kept) / window_s,
            steps_per_s=num_steps / window_s,
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            mean_batch=num_steps / num_turns if num_turns else 0.0,
            occupancy=min(sum(each.seated_s for each in kept) / (window_s * self._num_slots), 1.0),
            busy=min(sum(each.busy_s for each in kept) / window_s, 1.0),
        )

    def _second(self, now: float) -> _Second:
        if not self._seconds or self._seconds[-1].number != int(now):
            self._seconds.append(_Second(int(now)))
        return self._seconds[-1]
