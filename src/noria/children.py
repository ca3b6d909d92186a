"""The supervisor's children, each through all its lives: its process, and what is known of it.

What is to be done is decided in `supervision/`; here it is fed with what happens. Starting them is `supervisor.py`'s.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noria.messages import EngineState, PreviousEnd
from noria.observe.lines import fields
from noria.supervision.endings import ending, worse
from noria.supervision.pulse import Pulse
from noria.supervision.restarts import GiveUp, Restarts, StartAgain

log = logging.getLogger("noria.supervisor")

Kind = Literal["engine", "frontend"]


@dataclass(kw_only=True)
class Child:
    """One engine or front end, through all its lives."""

    kind: Kind
    name: str
    task: dict[str, object]  # its argument, as JSON
    restarts: Restarts
    num_oom_kills: Callable[[], int]
    pass_fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = None  # of its present life, or the last
    _was_killed_for_hanging: bool = False
    _oom_kills_before: int = 0

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def log(self, level: int, event: str, words: str, **said: object) -> None:
        """A line about it; `words` follow its name, and the event is that of its kind: `engine_ready`."""
        log.log(level, "%s %s", self.name, words, extra=fields(event=f"{self.kind}_{event}", child=self.name, **said))

    def started(self, now: float) -> None:
        """It was started."""
        self.restarts.started(now)
        self._was_killed_for_hanging = False
        self._oom_kills_before = self.num_oom_kills()

    def ended(self, status: int, now: float) -> StartAgain | GiveUp:
        """It ended with `status`; returns what is to be done."""
        return self.restarts.ended(status, now, killed=status < 0 and self._ending(status) == "killed")

    def _ending(self, status: int) -> PreviousEnd:
        num_oom_kills = self.num_oom_kills() - self._oom_kills_before
        return ending(status, hung=self._was_killed_for_hanging, num_oom_kills=num_oom_kills)


@dataclass(kw_only=True)
class EngineChild(Child):
    """An engine: also watched for hanging, and told how its last life ended."""

    address: str
    pulse: Pulse
    incarnation: str | None = None  # as it last told
    previous_end: PreviousEnd = "none"
    _is_ready: bool = False
    _ended_incarnation: str | None = None

    def started(self, now: float) -> None:
        """It was started."""
        super().started(now)
        self.pulse.started(now)
        self._is_ready = False

    def told(self, state: EngineState) -> bool:
        """Take note of what it says of itself; returns whether it is ready. A dead life's last words are passed over."""
        if state.incarnation == self._ended_incarnation:
            return False
        self.incarnation = state.incarnation
        if state.state == "ready":
            self._is_ready = True
            self.restarts.ready()
            self.pulse.ready()
        return self._is_ready

    def kill_if_it_hangs(self, now: float) -> None:
        """SIGKILL: nothing less ends a thread that waits for a device."""
        reason = self.pulse.hang(now)
        if reason is not None:
            self.log(logging.ERROR, "hangs", f"hangs: {reason}; killing it", reason=reason)
            self._was_killed_for_hanging = True
            self.pulse.ended()  # once is enough
            self.send(signal.SIGKILL)

    def ended(self, status: int, now: float) -> StartAgain | GiveUp:
        """It ended with `status`; its next life will be told what that means."""
        end = self._ending(status)
        self.previous_end = end if self._is_ready else worse(self.previous_end, end)
        self.task = self.task | {"previous_end": self.previous_end}
        self.pulse.ended()
        self._ended_incarnation = self.incarnation
        return super().ended(status, now)
