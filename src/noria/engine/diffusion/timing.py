"""What the parts of one turn take: by the host's clock where the wheel waits for each part, else by the device's own.

A GPU is ordered to do a turn and does it later; the host's clock would tell how long the order took. So events are put into its stream
around each part, and whoever needs the seconds, and may wait, reads them when the device has passed the events: the wheel never does.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from noria.scheduling.types import MeasuredTimings, Phase, PhaseTimings


class HostStopwatch:
    """Of parts that are over when they have been done."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {}

    @contextlib.contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Inside, the part is done."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = time.perf_counter() - started

    def timings(self) -> MeasuredTimings:
        """What they took."""
        seconds = self._seconds
        return MeasuredTimings(seconds.get("boards", 0.0), seconds.get("steps", 0.0), seconds.get("decodes", 0.0))


class DeviceStopwatch:
    """Of parts that the device is ordered to do."""

    def __init__(self) -> None:
        self._events: dict[Phase, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Inside, the part is ordered."""
        began = _event()
        try:
            yield
        finally:
            self._events[phase] = began, _event()

    def timings(self) -> "DeviceTimings":
        """What they will have taken."""
        return DeviceTimings(self._events)


@dataclass(frozen=True)
class DeviceTimings:
    """Parts between events of a device; their seconds can be asked from any thread, which then waits for the device to be there."""

    _events: Mapping[Phase, tuple[torch.cuda.Event, torch.cuda.Event]]
    is_known: bool = False

    @property
    def text_encode_s(self) -> float:
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

    def _seconds(self, phase: Phase) -> float:
        if phase not in self._events:
            return 0.0
        began, ended = self._events[phase]
        ended.synchronize()
        elapsed_ms: float = began.elapsed_time(ended)
        return elapsed_ms / 1000


@dataclass(frozen=True)
class CombinedTimings:
    """What several executors took, one after the other, for the parts of one turn."""

    parts: tuple[PhaseTimings, ...]

    @property
    def is_known(self) -> bool:
        """Whether nobody has to wait for any of it."""
        return all(part.is_known for part in self.parts)

    @property
    def text_encode_s(self) -> float:
        """On `boards`."""
        return sum(part.text_encode_s for part in self.parts)

    @property
    def step_s(self) -> float:
        """On `steps`."""
        return sum(part.step_s for part in self.parts)

    @property
    def decode_s(self) -> float:
        """On `decodes`."""
        return sum(part.decode_s for part in self.parts)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
