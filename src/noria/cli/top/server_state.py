"""The state of a server as shown by `noria top`: the last view of each engine, and the iterations and rates before it.

Pure. `now` is monotonic seconds of this machine; timestamps of the server are only compared with each other.
"""

from collections import deque
from dataclasses import dataclass, field

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, LiveEvent, ServerInfo
from noria.protocol.live_views import DepartureView, IterationView
from noria.protocol.messages import EngineView

_MAX_HISTORY = 512  # iterations and rates: more than a terminal has columns


@dataclass
class EngineHistory:
    """The last view of one engine, and what earlier views showed."""

    view: EngineView
    received_at: float
    iterations: deque[IterationView] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    images_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_HISTORY))
    # By slot, with the time at which it was received.
    last_departures: dict[int, tuple[DepartureView, float]] = field(default_factory=dict)

    def server_time_s(self, now: float) -> float:
        """Unix time by the server's clock."""
        return self.view.captured_at + (now - self.received_at)


@dataclass
class ServerState:
    """The engines of one server, and their histories by name."""

    server: ServerInfo | None = None
    engines: tuple[EngineInfo, ...] = ()
    histories: dict[str, EngineHistory] = field(default_factory=dict)

    def apply(self, event: LiveEvent, now: float) -> None:
        """Update the state with an event received at `now`."""
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
                # a view of an earlier incarnation is of an engine that has exited
                if incarnations.get(name, view.incarnation) == view.incarnation:
                    self._apply_view(name, view, now)

    @property
    def is_complete(self) -> bool:
        """Whether every ready engine has sent a view."""
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
