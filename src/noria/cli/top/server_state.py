"""What is known of a server, as far as it is shown: the last view of each wheel, and the turns and rates before it.

Pure; `now` is monotonic seconds of this machine. The server's clock is only ever compared with itself.
"""

from collections import deque
from dataclasses import dataclass, field

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, LiveEvent, ServerInfo
from noria.protocol.live_views import DepartureView, IterationView
from noria.protocol.messages import EngineView

_MAX_HISTORY = 512  # turns and rates: more than a terminal has columns


@dataclass
class EngineHistory:
    """One engine's wheel."""

    view: EngineView
    received_at: float
    iterations: deque[IterationView] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    images_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    last_departures: dict[int, tuple[DepartureView, float]] = field(
        default_factory=dict
    )  # who left each slot last, and when it was seen

    def server_time_s(self, now: float) -> float:
        """Unix time on the server's clock."""
        return self.view.captured_at + (now - self.received_at)


@dataclass
class ServerState:
    """One server."""

    server: ServerInfo | None = None
    engines: tuple[EngineInfo, ...] = ()
    histories: dict[str, EngineHistory] = field(default_factory=dict)

    def apply(self, event: LiveEvent, now: float) -> None:
        """Note what the server said."""
        match event:
            case EnginesEvent(engines, server):
                self.server, self.engines = server, engines
                incarnations = {engine.name: engine.incarnation for engine in engines if engine.state == "ready"}
                self.histories = {
                    name: history
                    for name, history in self.histories.items()
                    if incarnations.get(name) == history.view.incarnation
                }
            case EngineViewEvent(name, view):
                incarnations = {engine.name: engine.incarnation for engine in self.engines}
                if (
                    incarnations.get(name, view.incarnation) == view.incarnation
                ):  # else it is older than the news of its engine
                    self._apply_view(name, view, now)

    @property
    def is_complete(self) -> bool:
        """Whether every engine that is ready has shown its wheel."""
        return self.server is not None and all(
            engine.state != "ready" or engine.name in self.histories for engine in self.engines
        )

    def _apply_view(self, name: str, view: EngineView, now: float) -> None:
        history = self.histories.get(name)
        if history is None or history.view.incarnation != view.incarnation:
            history = EngineHistory(view, now)
        last_iteration = history.iterations[-1].number if history.iterations else -1
        history.iterations.extend(iteration for iteration in view.iterations if iteration.number > last_iteration)
        history.images_per_s.append(view.rates.images_per_s)
        history.last_departures |= {departure.slot: (departure, now) for departure in view.departures}
        history.view, history.received_at = view, now
        self.histories[name] = history
