"""What `GET /v1/live` says, read. Pure: lines in, events out.

A server-sent event is lines of `field: value` and an empty line; a line that begins with a colon only says that the server is still there.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria.protocol.messages import EngineView


class EngineInfo(Struct, frozen=True):
    """An engine, as a front end sees it."""

    name: str
    state: Literal["unknown", "loading", "ready"]
    device: str | None = None
    incarnation: str | None = None


class ServerInfo(Struct, frozen=True):
    """What is the same for all engines."""

    version: str
    models: tuple[str, ...] = ()


class EnginesEvent(Struct, frozen=True):
    """Who there is: at the start, and at every change."""

    engines: tuple[EngineInfo, ...]
    server: ServerInfo


@dataclass(frozen=True)
class EngineViewEvent:
    """One engine's wheel, as it stands."""

    engine: str
    view: EngineView


LiveEvent = EnginesEvent | EngineViewEvent


@dataclass
class LiveEventParser:
    """Takes lines, gives events."""

    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def feed_line(self, text: str) -> LiveEvent | None:
        """Take a line, without its end; returns the event that it completes, if any. Events of other names are passed over.

        Raises:
            msgspec.MsgspecError: its data are not what this version of Noria sends.

        """
        if text:
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._name = value
            elif name == "data":
                self._data.append(value)
            return None
        name, data = self._name, "\n".join(self._data)
        self._name, self._data = "", []
        match name:
            case "engines":
                return msgspec.json.decode(data, type=EnginesEvent)
            case "wheel":
                payload = msgspec.json.decode(data, type=dict[str, Any])
                payload.pop("cells", None)  # of pictures: nothing that a terminal shows
                return EngineViewEvent(
                    msgspec.convert(payload.pop("engine", None), str), msgspec.convert(payload, EngineView)
                )
        return None
