"""Times the phases of an iteration: with the host's clock where the loop waits for each phase, else with device events.

A GPU executes an iteration after it was launched, and the host's clock would measure the launch. So CUDA events are
recorded around each phase, and reading a time waits until the device has passed them. The loop's thread never reads
them.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from noria.scheduling.types import MeasuredTimings, Phase


class HostStopwatch:
    """For phases that are complete when their calls return."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {}

    @contextlib.contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """A context in which the phase is executed."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = time.perf_counter() - started

    def timings(self) -> MeasuredTimings:
        """The times measured so far; a phase that did not run took 0."""
        return MeasuredTimings(dict(self._seconds))


class DeviceStopwatch:
    """For phases that are launched on a CUDA device and complete later."""

    def __init__(self) -> None:
        self._events: dict[Phase, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """A context in which the phase is launched."""
        start = _event()
        try:
            yield
        finally:
            self._events[phase] = start, _event()

    def timings(self) -> "DeviceTimings":
        """The times, which are read from the device when they are asked for."""
        return DeviceTimings(self._events)


@dataclass(frozen=True)
class DeviceTimings:
    """Phase times between pairs of device events; reading one from any thread waits for the device."""

    _events: Mapping[Phase, tuple[torch.cuda.Event, torch.cuda.Event]]
    is_known: bool = False

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a phase, of `decodes` also those of copying to the host."""
        if phase not in self._events:
            return 0.0
        start, end = self._events[phase]
        end.synchronize()
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms / 1000


MAX_ITERATIONS_AHEAD = 2
"""Iterations that the loop may be ahead of a GPU: enough to keep it busy, few enough that a new request joins soon."""


class RunAheadLimit:
    """Keeps the loop at most `MAX_ITERATIONS_AHEAD` iterations ahead of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pending = device, deque[torch.cuda.Event]()

    def wait(self) -> None:
        """Wait, at the end of an iteration, until the GPU has done those that are too far behind."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._pending.append(done)
        if len(self._pending) > MAX_ITERATIONS_AHEAD:
            self._pending.popleft().synchronize()


class PipelineFillDetector:
    """Detects iterations that only fill the queue of a GPU, whose duration on the host says nothing about their cost.

    They are the first ones of an uninterrupted sequence.
    """

    _PAUSE_S = 0.01  # ends a sequence; between consecutive iterations the loop needs far less

    def __init__(self, max_iterations_ahead: int) -> None:
        self._max_iterations_ahead = max_iterations_ahead
        self._num_iterations, self._last_end_s = 0, 0.0

    def begin_iteration(self, now: float) -> None:
        """An iteration begins at `now`, in seconds of any clock."""
        if now - self._last_end_s > self._PAUSE_S:
            self._num_iterations = 0

    def end_iteration(self, now: float) -> bool:
        """It has ended; returns whether its duration is that of its work."""
        self._last_end_s, self._num_iterations = now, self._num_iterations + 1
        return self._num_iterations > self._max_iterations_ahead


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
