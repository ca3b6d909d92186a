"""W3C Trace Context (https://www.w3.org/TR/trace-context/): which span of which trace asked, as two headers say it.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
    tracestate:  vendor=anything,another@tenant=thing

Plain Python and no state: a caller's trace is told in the log, and handed on to webhooks, also where nothing is traced. As the
specification has it, headers that do not conform are ignored, never refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_KNOWN_VERSION = "00"

_MAX_MEMBERS = 32
_KEY = r"[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"  # printable, no comma, no =, no space at its end
_MEMBER = re.compile(rf"({_KEY})=({_VALUE})")


@dataclass(frozen=True)
class TraceContext:
    """A span, as those elsewhere know it whose parent it is."""

    trace_id: str  # 32 hexadecimal digits, not all 0
    span_id: str  # 16, likewise
    is_sampled: bool  # whether whoever began the trace has it recorded
    tracestate: str = ""  # what tracing systems on the way have noted for themselves; handed on as it came

    @property
    def traceparent(self) -> str:
        """The header that names it."""
        return f"{_KNOWN_VERSION}-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """What a request carries that is made on its behalf."""
        return {"traceparent": self.traceparent} | ({"tracestate": self.tracestate} if self.tracestate else {})


def parse(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> TraceContext | None:
    """What a request's headers say, each line of a name one item; None where there is no one valid traceparent."""
    if len(traceparents) != 1 or not (matched := _TRACEPARENT.fullmatch(traceparents[0])):
        return None
    version, trace_id, span_id, flags, extra = matched.groups()
    if version == _KNOWN_VERSION and extra is not None:  # later versions may say more than we understand
        return None
    return TraceContext(
        trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _validated_tracestate(",".join(tracestates))
    )


def _validated_tracestate(tracestate: str) -> str:
    """`tracestate` without needless space; empty where any of it does not conform, for then all of it is void."""
    members = [member for each in tracestate.split(",") if (member := each.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    return ",".join(members) if len(keys) == len(members) <= _MAX_MEMBERS else ""
