"""The headers X-Noria-Priority and X-Noria-Deadline-Ms, which a body can leave to a gateway."""

import re
from collections.abc import Mapping
from typing import Protocol, TypeVar, get_args

import msgspec

from noria.errors import InvalidField, short_repr
from noria.protocol.request import Priority


class _Urgency(Protocol):
    """The part of a body that headers can have instead."""

    @property
    def priority(self) -> Priority | None: ...
    @property
    def deadline_ms(self) -> int | None: ...


BodyT = TypeVar("BodyT", bound=_Urgency)


def apply_headers(body: BodyT, headers: Mapping[str, str]) -> BodyT:
    """Return `body`, with the headers X-Noria-Priority and X-Noria-Deadline-Ms where it has no value of its own.

    The headers are for gateways and for clients of other APIs, which cannot change the body.

    Raises:
        InvalidField: names the header.

    """
    priority, deadline_ms = headers.get("x-noria-priority"), headers.get("x-noria-deadline-ms")
    if body.priority is None and priority is not None:
        if priority not in get_args(Priority):
            raise InvalidField(
                f"header X-Noria-Priority is {short_repr(priority)}; allowed are {', '.join(get_args(Priority))}.",
                field="X-Noria-Priority",
            )
        body = msgspec.structs.replace(body, priority=priority)  # type: ignore[type-var]
    if body.deadline_ms is None and deadline_ms is not None:
        if not re.fullmatch(r"\d{1,9}", deadline_ms, re.ASCII):
            raise InvalidField(
                f"header X-Noria-Deadline-Ms is {short_repr(deadline_ms)}; allowed is a whole number of milliseconds.",
                field="X-Noria-Deadline-Ms",
            )
        body = msgspec.structs.replace(body, deadline_ms=int(deadline_ms))  # type: ignore[type-var]
    return body
