"""W3C Trace Context (https://www.w3.org/TR/trace-context/): the trace and parent span of a request, in two headers.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
    tracestate:  vendor=anything,another@tenant=thing

Plain Python without state: a client's trace id is logged, and propagated to webhooks, even if tracing is off. As the
specification requires, invalid headers are ignored, never rejected.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_KNOWN_VERSION = "00"

_MAX_MEMBERS = 32
_KEY = r"[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"  # printable, without comma and =, no space at the end
_MEMBER = re.compile(rf"({_KEY})=({_VALUE})")


@dataclass(frozen=True)
class TraceContext:
    """The propagated identity of a span: what its children in other processes know of it."""

    trace_id: str  # 32 hexadecimal digits, not all 0
    span_id: str  # 16 hexadecimal digits, not all 0
    is_sampled: bool  # whether the trace is recorded
    tracestate: str = ""  # data of tracing systems, propagated unchanged

    @property
    def traceparent(self) -> str:
        """The value of the `traceparent` header."""
        return f"{_KNOWN_VERSION}-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of outgoing requests that belong to this span."""
        return {"traceparent": self.traceparent} | ({"tracestate": self.tracestate} if self.tracestate else {})


def parse(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> TraceContext | None:
    """Parse the header lines of a request; return None without exactly one valid traceparent."""
    if len(traceparents) != 1 or not (matched := _TRACEPARENT.fullmatch(traceparents[0])):
        return None
    version, trace_id, span_id, flags, extra = matched.groups()
    if version == _KNOWN_VERSION and extra is not None:  # only later versions may have more fields
        return None
    return TraceContext(
        trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _validated_tracestate(",".join(tracestates))
    )


def _validated_tracestate(tracestate: str) -> str:
    """Return `tracestate` without optional spaces; empty if any member is invalid, which makes all of it invalid."""
    members = [member for each in tracestate.split(",") if (member := each.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    return ",".join(members) if len(keys) == len(members) <= _MAX_MEMBERS else ""
