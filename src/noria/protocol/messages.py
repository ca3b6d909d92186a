"""What front ends, engines and the supervisor say to each other: tagged msgspec structs, one MessagePack frame each.

Pixels travel beside a message as a raw frame of their own (`ImageDone`), so that they are never copied into MessagePack.

    to an engine     Hello, Submit, Cancel, Ping, Heard (for every Load), Follow
    from an engine   EngineState (after Hello, and at every change), Load (now and then), Pong, WheelView (one for every Follow); for
                     every Submit one Progress when it is accepted, (Progress | Preview | ImageDone)*, then one of Finished | Failed
"""

from typing import Literal

import msgspec
from msgspec import Struct

from noria.protocol.live_views import DepartureView, IterationView, RatesView, SlotView, ThumbnailView, WaitingView
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest


def engine_name(number: int) -> str:
    """What a server's engine of its device `number` is called in all its lives: in logs, metrics, traces and `GET /v1/live`."""
    return f"engine-{number}"


class Hello(Struct, frozen=True, tag=True):
    """A peer introduces itself, once after each connection; it will be told the engine's state.

    What this name has asked for before is nobody's any more, and leaves.
    """

    name: str  # its own, and the same in all its lives


class Submit(Struct, frozen=True, tag=True):
    """Draw these images. Answered by `ImageDone` for each and one `Finished`, or by one `Failed`."""

    request: ImageRequest


class Cancel(Struct, frozen=True, tag=True):
    """Forget this request; still answered, by `Failed` with code "cancelled" if it was known."""

    request_id: str


class Ping(Struct, frozen=True, tag=True):
    """Is the wheel turning? Answered by `Pong`."""


class LoadAck(Struct, frozen=True, tag=True):
    """The last `Load` was read. Until then no other comes: who does not read must not fill the engine's memory.

    Who wants no loads, such as the supervisor, never says it, and gets one.
    """


class ViewRequest(Struct, frozen=True, tag=True):
    """Show the wheel: answered by one `WheelView`: to who has seen none as soon as one is due, else when there is something new to see.

    Asked again after each answer, so who stops asking costs nothing, and who reads slowly gets fewer. Asked again before the answer,
    the newer one counts, and one view answers both.
    """

    last_iteration: int | None  # the number of the last turn in the last view of this incarnation; None: there was none
    with_thumbnails: bool  # whether slots show what their images are going to be


class EngineView(Struct, frozen=True, tag=True):
    """A wheel as it stands; the frame beside it, if any, holds the pictures of `cells`."""

    incarnation: str
    captured_at: float  # Unix time, s
    last_iteration: int  # of the last turn
    num_slots: int
    slots: tuple[SlotView, ...]
    waiting: tuple[WaitingView, ...]  # the first of them
    num_waiting: int  # images, all of them
    backlog_s: float  # until all that was accepted is done
    iterations: tuple[IterationView, ...]  # since the turn that was seen: the last ones kept, oldest first
    departures: tuple[DepartureView, ...]  # since the last view for this peer; none in the first
    rates: RatesView
    thumbnails: tuple[ThumbnailView, ...] = ()


class Pong(Struct, frozen=True, tag=True):
    """How long the wheel has been in its present turn, and how long a turn may take before the engine counts as hung; seconds."""

    incarnation: str
    busy_s: float
    hang_limit_s: float


ExitCause = Literal["none", "crashed", "killed"]
"""How an engine's last run ended: there was none, in a way that a request may have caused, or as only others' signals end it.

`supervisor/exit_cause.py` has the list of both.
"""


class EngineState(Struct, frozen=True, tag=True):
    """`incarnation` names one run of the process: requests sent to another are gone."""

    incarnation: str
    state: Literal["loading", "ready"]
    models: tuple[ModelSpec, ...]  # empty while loading
    device: str
    previous_exit: ExitCause = "none"
    in_flight: tuple[
        str, ...
    ] = ()  # the requests that the run before this one was drawing, or preparing, when it ended


class ShapeCosts(Struct, frozen=True):
    """What the engine has measured of one model at one size, in seconds."""

    model: str
    width_px: int
    height_px: int
    step_s: dict[int, float]  # one call of the model, by its number of rows
    decode_s: dict[int, float]  # by the number of images decoded together
    text_encode_s: float  # one prompt
    max_rows: int  # in one call: more would not be faster, or not fit the memory


class EngineLoad(Struct, frozen=True, tag=True):
    """How busy an engine is; sent to every peer after `EngineState`, and when it has changed, twice a second at most."""

    backlog_s: float  # until all that was accepted is done
    num_running: int
    num_waiting: int
    num_slots: int
    costs: tuple[ShapeCosts, ...] = ()


class Progress(Struct, frozen=True, tag=True):
    """How far a request is: of several images, the one furthest behind. Sent once when it is accepted; then only if `watched`."""

    request_id: str
    queue_position: int | None  # images that will board before its last one; None: all of them have boarded
    call: int
    num_calls: int
    start_in_s: float  # predicted
    finish_in_s: float


class Preview(Struct, frozen=True, tag=True):
    """What image `index` is going to be, as seen at `call`; the frame beside it is height × width × 3 bytes of RGB."""

    request_id: str
    index: int
    call: int
    width_px: int
    height_px: int


class ImageDone(Struct, frozen=True, tag=True):
    """Image `index` of a request; the frame beside it is height × width × 3 bytes of RGB."""

    request_id: str
    index: int
    seed: int
    width_px: int
    height_px: int


class Timings(Struct, frozen=True):
    """Where a request's time in the engine went, in seconds; of several images that of the one that ended last.

    Of a request that failed: until its end, of its image that had come furthest of those not decoded; a stage that it did not reach has 0.
    """

    queue_s: float
    text_encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0


class Finished(Struct, frozen=True, tag=True):
    """Every image of the request was sent."""

    request_id: str
    timings: Timings
    num_steps_run: (
        int  # model calls of that image: PNDM makes one more than the steps asked for, Heun nearly twice as many
    )
    mean_batch: float = 0.0  # images that shared these calls, itself included


class Failed(Struct, frozen=True, tag=True):
    """The request ended without all its images; `code` is one of `noria.errors`."""

    request_id: str
    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    timings: Timings | None = None  # None: it was refused before it was anybody's
    num_steps_run: int = 0  # this and the next as in `Finished`, until the end
    mean_batch: float = 0.0


ToEngine = Hello | Submit | Cancel | Ping | LoadAck | ViewRequest
FromEngine = EngineState | EngineLoad | Pong | EngineView | Progress | Preview | ImageDone | Finished | Failed

_serializer = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def serialize(message: ToEngine | FromEngine) -> bytes:
    """One message as one MessagePack frame."""
    return _serializer.encode(message)


def deserialize_to_engine(frame: bytes | memoryview) -> ToEngine:
    """What an engine received; raises msgspec.DecodeError on anything else."""
    return _to_engine_decoder.decode(frame)


def deserialize_from_engine(frame: bytes | memoryview) -> FromEngine:
    """What a front end or the supervisor received; raises msgspec.DecodeError on anything else."""
    return _from_engine_decoder.decode(frame)
