"""Parses the server-sent events of `GET /v1/live`. Pure: lines in, events out.

An event is lines of `field: value` and an empty line; a line that begins with a colon is a keep-alive comment.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria.protocol.messages import EngineView


class EngineInfo(Struct, frozen=True):
    """The state of an engine, as a front end reports it."""

    name: str
    state: Literal["unknown", "loading", "ready", "draining"]
    device: str | None = None
    incarnation: str | None = None
    kind: str | None = None  # kind of its models; None: not known yet, or the server is older


class ServerInfo(Struct, frozen=True):
    """The facts that all engines share."""

    version: str
    models: tuple[str, ...] = ()


class EnginesEvent(Struct, frozen=True):
    """The list of engines; sent at the start and at every change."""

    engines: tuple[EngineInfo, ...]
    server: ServerInfo


@dataclass(frozen=True)
class EngineViewEvent:
    """The live view of one engine."""

    engine: str
    view: EngineView


LiveEvent = EnginesEvent | EngineViewEvent


@dataclass
class LiveEventParser:
    """An incremental parser: takes lines, returns events."""

    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def feed_line(self, text: str) -> LiveEvent | None:
        """Take a line without its line feed. Returns the event that it completes, if any; ignores unknown events.

        Raises msgspec.MsgspecError: the data of the event do not have the shape that this version of Noria sends.
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
            case "engine_view":
                payload = msgspec.json.decode(data, type=dict[str, Any])
                payload.pop("thumbnails", None)  # with an image each, which a terminal does not show
                return EngineViewEvent(
                    msgspec.convert(payload.pop("engine", None), str), msgspec.convert(payload, EngineView)
                )
        return None
