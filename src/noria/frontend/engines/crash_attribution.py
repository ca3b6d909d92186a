"""What becomes of a request whose engine ended: who is suspected of it, who flies again in company, who alone, and who no more.

Pure. The rules (ADR 6 has the reasons):

    how the engine ended            the request was aboard      it was not
    crashed, or hung                suspected                   excused
    killed by somebody's signal     excused                     forgotten
    nobody has told in time         suspected                   suspected

  - Who is suspected once flies alone: nobody else is aboard, so a second crash is certainly its own. Then it is failed.
  - Who is excused flies on in company; after three times alone, and after ten times alone no more.
  - What is forgotten counts nothing: it had not touched the device. Its deadline bounds it, as it bounds all of this.
"""

from dataclasses import dataclass, replace
from typing import Literal

from noria.protocol.messages import ExitCause

MAX_CRASHES = 2
MAX_EXCUSED_SHARED = 3  # whoever kills engines for a reason that we cannot see may have one in this request
MAX_EXCUSED_EXCLUSIVE = 10

LossCause = Literal["suspected", "excused", "forgotten"]


@dataclass(frozen=True)
class ExitReport:
    """What an engine's next life tells of the end of the one before."""

    exit_cause: ExitCause
    in_flight: frozenset[str]  # the flights that it was drawing, or preparing

    def loss_cause(self, attempt_id: str) -> LossCause:
        """How the loss of that flight counts."""
        was_in_flight = attempt_id in self.in_flight
        match self.exit_cause:
            case "crashed":
                return "suspected" if was_in_flight else "excused"
            case "killed":
                return "excused" if was_in_flight else "forgotten"
            case "none":  # an engine that knows of no earlier life has nothing to tell
                return "suspected"


@dataclass(frozen=True)
class AttemptHistory:
    """What one request has lost so far."""

    num_crashes: int = 0
    num_excused: int = 0
    num_excused_exclusive: int = 0

    @property
    def needs_exclusive(self) -> bool:
        """Whether its next engine takes nobody else aboard with it."""
        return self.num_crashes > 0 or self.num_excused >= MAX_EXCUSED_SHARED

    @property
    def crashes_engines(self) -> bool:
        """Whether it is known to crash engines."""
        return self.num_crashes >= MAX_CRASHES

    @property
    def retries_exhausted(self) -> bool:
        """Whether it has been tried often enough, guilty or not."""
        return self.num_excused_exclusive >= MAX_EXCUSED_EXCLUSIVE

    def with_loss(self, cause: LossCause) -> "AttemptHistory":
        """The same with one loss more, of a flight as `flies_alone` said."""
        match cause:
            case "suspected":
                return replace(self, num_crashes=self.num_crashes + 1)
            case "excused" if self.needs_exclusive:
                return replace(self, num_excused_exclusive=self.num_excused_exclusive + 1)
            case "excused":
                return replace(self, num_excused=self.num_excused + 1)
            case "forgotten":
                return self
