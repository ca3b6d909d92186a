"""The commands that the receiver's thread and the mounter pass to the loop's thread."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from noria.engine.resumption import Resumption
from noria.engine.runtime import PreparedRequest
from noria.protocol.messages import ViewRequest
from noria.protocol.model_spec import ModelKey
from noria.protocol.transport import ClientId


class SubmitCommand(NamedTuple):
    """Accept a prepared request from a client."""

    client: ClientId
    prepared: PreparedRequest
    arrived: float  # monotonic seconds, when its frame was read
    resumption: Resumption | None = None


@dataclass(frozen=True)
class CancelCommand:
    """Cancel a client's request, or all of its requests (None), for instance when it has reconnected."""

    client: ClientId
    attempt_id: str | None


@dataclass(frozen=True)
class ReleaseCommand:
    """Hand a client's request over, for another engine."""

    client: ClientId
    attempt_id: str


@dataclass(frozen=True)
class SubscribeCommand:
    """Send a client the next view of the engine."""

    client: ClientId
    view_request: ViewRequest


@dataclass(frozen=True)
class ChangeModelCommand:
    """Call `change` between two iterations, as soon as no request of `model` is left; then `done` gets its result."""

    model: ModelKey
    change: Callable[[], None]
    done: Future[None]


@dataclass(frozen=True)
class WakeCommand:
    """Look anew for how long there is nothing to do."""


Command = SubmitCommand | CancelCommand | ReleaseCommand | SubscribeCommand | ChangeModelCommand | WakeCommand
"""The inputs that the loop's thread waits for."""
