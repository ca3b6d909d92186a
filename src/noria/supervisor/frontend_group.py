"""The front ends: their number, the one that stops, and their messages about each other.

`frontend_scaler.py` decides about their number, `supervisor.py` runs their processes.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import psutil

from noria.protocol.supervisor_link import NumFrontends, Retire
from noria.supervisor import frontend_scaler
from noria.supervisor.child_process import FrontendChild
from noria.supervisor.frontend_scaler import FrontendScaler, StartFrontend, StopFrontend


class FrontendGroup:
    """The front ends of one server. Those that were told to retire belong to it until they have ended."""

    def __init__(self, bounds: tuple[int, int], make_child: Callable[[str, int], FrontendChild]) -> None:
        """`make_child` returns a front end, given its name and how many front ends there are with it."""
        self._bounds, self._make_child = bounds, make_child
        self._scaler = FrontendScaler(*bounds)
        self.children: list[FrontendChild] = []
        for _ in range(bounds[0]):
            self._add(bounds[0]).is_counted = True

    def _add(self, num_frontends: int) -> FrontendChild:
        # A name is used again when its process has ended: engines would take two of one name for a reconnection.
        taken = {child.name for child in self.children}
        name = next(name for index in itertools.count() if (name := f"frontend-{index}") not in taken)
        child = self._make_child(name, num_frontends)
        child.on_accepting = self._tell_number
        self.children.append(child)
        return child

    def remove(self, child: FrontendChild) -> None:
        """Forget a front end that has retired and ended."""
        self.children.remove(child)
        child.close()

    async def scale(self, run: Callable[[FrontendChild], None]) -> None:
        """Have front ends started, by `run`, and stopped as load demands, until cancelled."""
        if self._bounds[0] == self._bounds[1]:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(frontend_scaler.SAMPLE_INTERVAL_S)
            match self._decide(time.monotonic()):
                case StartFrontend(cores):
                    number = len(self._staying) + 1
                    child = self._add(number)
                    message = f"is started: {number - 1} front ends use {cores:.2f} cores"
                    child.log(logging.INFO, "added", message, num_frontends=number, cores=cores)
                    run(child)
                case StopFrontend(cores):
                    *staying, child = self._staying
                    message = f"stops when its clients have left: {len(staying) + 1} front ends use {cores:.2f} cores"
                    child.log(logging.INFO, "retired", message, num_frontends=len(staying), cores=cores)
                    child.is_retired = True
                    child.tell(Retire())
                    self._tell_number()

    @property
    def _staying(self) -> list[FrontendChild]:
        return [child for child in self.children if not child.is_retired]

    def _decide(self, now: float) -> StartFrontend | StopFrontend | None:
        cpu_s = {}
        try:
            for child in self._staying:
                if child.process is None or not child.is_accepting:
                    self._scaler.changing()
                    return None
                times = psutil.Process(child.process.pid).cpu_times()
                cpu_s[child.process.pid] = times.user + times.system
        except psutil.Error:  # it has just ended
            self._scaler.changing()
            return None
        return self._scaler.decide(cpu_s, now)

    def _tell_number(self) -> None:
        """Tell those that stay how many they are; one that starts counts from when it first accepts connections."""
        for child in self._staying:
            child.is_counted = child.is_counted or child.is_accepting
        counted = [child for child in self._staying if child.is_counted]
        for child in counted:
            child.tell(NumFrontends(len(counted)))
