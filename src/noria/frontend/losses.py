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

from noria.messages import PreviousEnd

MOST_CRASHES = 2
MOST_EXCUSES_IN_COMPANY = 3  # whoever kills engines for a reason that we cannot see may have one in this request
MOST_EXCUSES_ALONE = 10

Blame = Literal["suspected", "excused", "forgotten"]


@dataclass(frozen=True)
class Obituary:
    """What an engine's next life tells of the end of the one before."""

    previous_end: PreviousEnd
    aboard: frozenset[str]  # the flights that it was drawing, or preparing

    def blame(self, flight_id: str) -> Blame:
        """How the loss of that flight counts."""
        aboard = flight_id in self.aboard
        match self.previous_end:
            case "crashed":
                return "suspected" if aboard else "excused"
            case "killed":
                return "excused" if aboard else "forgotten"
            case "none":  # an engine that knows of no earlier life has nothing to tell
                return "suspected"


@dataclass(frozen=True)
class Losses:
    """What one request has lost so far."""

    num_crashes: int = 0
    num_excused: int = 0
    num_excused_alone: int = 0

    @property
    def flies_alone(self) -> bool:
        """Whether its next engine takes nobody else aboard with it."""
        return self.num_crashes > 0 or self.num_excused >= MOST_EXCUSES_IN_COMPANY

    @property
    def is_convicted(self) -> bool:
        """Whether it is known to crash engines."""
        return self.num_crashes >= MOST_CRASHES

    @property
    def is_hopeless(self) -> bool:
        """Whether it has been tried often enough, guilty or not."""
        return self.num_excused_alone >= MOST_EXCUSES_ALONE

    def after(self, blame: Blame) -> "Losses":
        """The same with one loss more, of a flight as `flies_alone` said."""
        match blame:
            case "suspected":
                return replace(self, num_crashes=self.num_crashes + 1)
            case "excused" if self.flies_alone:
                return replace(self, num_excused_alone=self.num_excused_alone + 1)
            case "excused":
                return replace(self, num_excused=self.num_excused + 1)
            case "forgotten":
                return self
