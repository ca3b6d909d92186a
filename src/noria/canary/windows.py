"""The reports of front ends on a canary, and the windows that the judge takes: of all front ends together, in order.

A front end counts a request in the window of its admission, once it has ended. It says from which window on requests
may still run; an earlier one is complete. Windows are closed by time, and neighbours are merged until the canary has
enough responses in one. Many repeats, which are later responses to a sticky key, also make a window complete, so that
the judge can say that the users are few.
"""

from collections.abc import Iterable

from msgspec import Struct

from noria.canary.arm import Arm
from noria.canary.shadow import ShadowReport
from noria.statistics.windows import CountsReport

WINDOW_S = 2.0
MIN_CANARY_RESPONSES = 5  # in a window that is judged
MAX_REPEATS = 20  # repeats of both arms in a window that is judged later
MAX_CONTROL_RESPONSES = 50_000  # responses while the canary has too few; with more, all are dropped, to bound memory


class WindowReport(Struct, frozen=True):
    """The outcome of one front end's requests that were admitted in one window, as far as they have ended."""

    deployment: int  # number of the canary's deployment
    window: int  # its number: Unix time divided by `WINDOW_S`
    control: Arm
    canary: Arm


class InFlight(Struct, frozen=True):
    """The requests of one version that a front end has admitted and not answered."""

    endpoint: str
    version: str  # ModelSpec.fingerprint
    count: int


class FrontendReport(Struct, frozen=True):
    """The report of a front end to the registrar, twice a second."""

    frontend: str
    generation: int  # generation of the routes that it follows
    in_flight: tuple[InFlight, ...]
    ended: tuple[WindowReport, ...]  # since its last report
    first_open: int  # all requests that were admitted in earlier windows have ended
    shadows: tuple[ShadowReport, ...] = ()
    statistics: tuple[CountsReport, ...] = ()  # since its last report


class CanaryWindows:
    """The windows of one canary that were not judged yet."""

    def __init__(self) -> None:
        self._arms: dict[int, tuple[Arm, Arm]] = {}  # control and canary, by window
        self._rest = (Arm(), Arm())  # complete windows in which the canary has too few responses

    def add(self, report: WindowReport) -> None:
        """Add what one front end counted."""
        control, canary = self._arms.get(report.window, (Arm(), Arm()))
        self._arms[report.window] = control.merge(report.control), canary.merge(report.canary)

    @property
    def num_waiting(self) -> tuple[int, int]:
        """The responses of the control and of the canary in complete windows that are too small to be judged."""
        return self._rest[0].n, self._rest[1].n

    def take(self, first_open: int) -> Iterable[tuple[Arm, Arm]]:
        """Yield control and canary of the windows that are complete and can be judged; each once."""
        for window in sorted(window for window in self._arms if window < first_open):
            control, canary = self._arms.pop(window)
            self._rest = self._rest[0].merge(control), self._rest[1].merge(canary)
            rest_control, rest_canary = self._rest
            is_complete = (
                rest_canary.n >= MIN_CANARY_RESPONSES or rest_control.repeats + rest_canary.repeats > MAX_REPEATS
            )
            if is_complete:
                yield self._rest
            if is_complete or rest_control.n > MAX_CONTROL_RESPONSES:
                self._rest = (Arm(), Arm())
