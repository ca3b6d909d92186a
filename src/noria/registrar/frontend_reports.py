"""The last reports of the living front ends: which routes they follow, and which versions their requests need."""

from noria.canary.windows import FrontendReport
from noria.protocol.model_spec import ModelKey

SILENCE_S = 10.0  # after which a front end counts as ended; it reports twice a second


class FrontendReports:
    """The last report of each front end."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, FrontendReport]] = {}  # when it came, by the front end's name

    def add(self, report: FrontendReport, now: float) -> None:
        """Keep a report."""
        self._last[report.frontend] = now, report

    def forget_silent(self, now: float) -> None:
        """Forget the front ends that have ended."""
        self._last = {name: last for name, last in self._last.items() if now - last[0] < SILENCE_S}

    def first_open_window(self) -> int:
        """The first window in which requests may still run; without a front end, none is complete."""
        return min((report.first_open for _, report in self._last.values()), default=0)

    def follow(self, generation: int) -> bool:
        """Whether all front ends follow the routes of this generation; not known before the first report."""
        return bool(self._last) and all(report.generation == generation for _, report in self._last.values())

    def needs(self, key: ModelKey) -> bool:
        """Whether a request to this version has not ended."""
        return any(
            (each.endpoint, each.version) == key for _, report in self._last.values() for each in report.in_flight
        )
