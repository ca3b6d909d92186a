"""What is known of a server, as far as it is shown: the last view of each wheel, and the turns and rates before it.

Pure; `now` is monotonic seconds of this machine. The server's clock is only ever compared with itself.
"""

from collections import deque
from dataclasses import dataclass, field

from noria.messages import WheelView
from noria.top.events import Engines, EngineSaid, Event, ServerSaid, Wheel
from noria.views import LeftView, TurnView

_KEPT = 512  # turns and rates: more than a terminal has columns


@dataclass
class WheelBoard:
    """One engine's wheel."""

    view: WheelView
    seen_at: float
    turns: deque[TurnView] = field(default_factory=lambda: deque(maxlen=_KEPT))
    images_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    left: dict[int, tuple[LeftView, float]] = field(
        default_factory=dict
    )  # who left each slot last, and when it was seen

    def server_s(self, now: float) -> float:
        """Unix time on the server's clock."""
        return self.view.at + (now - self.seen_at)


@dataclass
class Board:
    """One server."""

    server: ServerSaid | None = None
    engines: tuple[EngineSaid, ...] = ()
    wheels: dict[str, WheelBoard] = field(default_factory=dict)

    def take(self, event: Event, now: float) -> None:
        """Note what the server said."""
        match event:
            case Engines(engines, server):
                self.server, self.engines = server, engines
                lives = {engine.name: engine.incarnation for engine in engines if engine.state == "ready"}
                self.wheels = {
                    name: wheel for name, wheel in self.wheels.items() if lives.get(name) == wheel.view.incarnation
                }
            case Wheel(name, view):
                lives = {engine.name: engine.incarnation for engine in self.engines}
                if (
                    lives.get(name, view.incarnation) == view.incarnation
                ):  # else it is older than the news of its engine
                    self._turned(name, view, now)

    @property
    def is_whole(self) -> bool:
        """Whether every engine that is ready has shown its wheel."""
        return self.server is not None and all(
            engine.state != "ready" or engine.name in self.wheels for engine in self.engines
        )

    def _turned(self, name: str, view: WheelView, now: float) -> None:
        before = self.wheels.get(name)
        if before is None or before.view.incarnation != view.incarnation:
            before = WheelBoard(view, now)
        last = before.turns[-1].number if before.turns else -1
        before.turns.extend(turn for turn in view.turns if turn.number > last)
        before.images_per_s.append(view.rates.images_per_s)
        before.left |= {left.slot: (left, now) for left in view.left}
        before.view, before.seen_at = view, now
        self.wheels[name] = before
