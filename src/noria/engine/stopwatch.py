"""What the parts of one turn take: by the host's clock where the wheel waits for each part, else by the device's own.

A GPU is ordered to do a turn and does it later; the host's clock would tell how long the order took. So events are put into its stream
around each part, and whoever needs the seconds, and may wait, reads them when the device has passed the events: the wheel never does.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from noria.scheduling.plans import Measured, Part, Spent


class HostStopwatch:
    """Of parts that are over when they have been done."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = {}

    @contextlib.contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Inside, the part is done."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = time.perf_counter() - started

    def spent(self) -> Measured:
        """What they took."""
        took = self._seconds
        return Measured(took.get("boards", 0.0), took.get("steps", 0.0), took.get("decodes", 0.0))


class DeviceStopwatch:
    """Of parts that the device is ordered to do."""

    def __init__(self) -> None:
        self._events: dict[Part, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Inside, the part is ordered."""
        began = _event()
        try:
            yield
        finally:
            self._events[part] = began, _event()

    def spent(self) -> "DeviceSpent":
        """What they will have taken."""
        return DeviceSpent(self._events)


@dataclass(frozen=True)
class DeviceSpent:
    """Parts between events of a device; their seconds can be asked from any thread, which then waits for the device to be there."""

    _events: Mapping[Part, tuple[torch.cuda.Event, torch.cuda.Event]]
    is_known: bool = False

    @property
    def encode_s(self) -> float:
        """On `boards`."""
        return self._seconds("boards")

    @property
    def step_s(self) -> float:
        """On `steps`."""
        return self._seconds("steps")

    @property
    def decode_s(self) -> float:
        """On `decodes`, and on copying them to the host."""
        return self._seconds("decodes")

    def _seconds(self, part: Part) -> float:
        if part not in self._events:
            return 0.0
        began, ended = self._events[part]
        ended.synchronize()
        elapsed_ms: float = began.elapsed_time(ended)
        return elapsed_ms / 1000


@dataclass(frozen=True)
class SpentTogether:
    """What several executors took, one after the other, for the parts of one turn."""

    each: tuple[Spent, ...]

    @property
    def is_known(self) -> bool:
        """Whether nobody has to wait for any of it."""
        return all(spent.is_known for spent in self.each)

    @property
    def encode_s(self) -> float:
        """On `boards`."""
        return sum(spent.encode_s for spent in self.each)

    @property
    def step_s(self) -> float:
        """On `steps`."""
        return sum(spent.step_s for spent in self.each)

    @property
    def decode_s(self) -> float:
        """On `decodes`."""
        return sum(spent.decode_s for spent in self.each)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
