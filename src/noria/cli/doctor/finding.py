"""One line of the reports of `noria doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    verdict: Verdict
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.topic:<9} {self.text}"
