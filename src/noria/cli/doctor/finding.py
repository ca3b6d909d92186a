"""A line of the reports of `noria doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """A line of a report."""

    verdict: Verdict
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.topic:<9} {self.text}"


def ok(topic: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", topic, text)


def warn(topic: str, text: str) -> Finding:
    """Return what an operator should know, or change."""
    return Finding("warn", topic, text)


def fail(topic: str, text: str) -> Finding:
    """Return what would not work."""
    return Finding("fail", topic, text)
