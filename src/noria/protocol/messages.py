"""The messages between an engine and its clients, which are front ends and the supervisor.

Each is a tagged msgspec struct in one MessagePack frame. What is large, such as pixels, is a second, raw frame beside
its message, so that it is never copied into MessagePack. Engines know a request by its `attempt_id`.

    to an engine     Hello, EngineRequest (`request.py`), Resume, Cancel, Release, Leave, Ping, LoadAck (for every
                     EngineLoad), ViewRequest, Mount, CancelMount, Unmount
    from an engine   EngineState (after Hello, and at every change), EngineLoad (when it changes), Pong,
                     EngineView (one for every ViewRequest), MountResult (one for every Mount and Unmount);
                     for every EngineRequest and Resume (Progress | Preview | ImageDone)*, then one of Finished |
                     Failed | HandedOver | NotHeld | StateRefused; the first Progress when it is accepted (of texts
                     only with `stream_progress`); a frame beside an EngineRequest belongs to its payload

A move: an engine that takes no new requests for a model says so in its EngineState; its clients answer with a Release
for each request that another engine can take, and send what HandedOver brings to that one with Resume (ADR 19). So do
they with some requests of an engine that has much more to do than another one.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from noria.protocol.kinds import AnyModelSpec, FinalResult, Payload
from noria.protocol.live_views import (
    DepartureView,
    IterationView,
    RatesView,
    ShareView,
    SlotView,
    ThumbnailView,
    WaitingView,
)
from noria.protocol.model_spec import CallChoice, ModelKey
from noria.protocol.request import EngineRequest
from noria.protocol.text import TextTimings


class Hello(Struct, frozen=True, tag=True):
    """The first message of a client on each connection; answered by `EngineState`.

    The engine cancels the requests that a client of this name submitted on an earlier connection.
    """

    name: str  # the client's, which stays the same when its process restarts
    # The engine cancels its requests, too, when it has sent nothing for so many seconds; None: never.
    lease_s: float | None = None


class ImageState(Struct, frozen=True):
    """The state that image `index` of a request needs beside the request to go on at another engine.

    Its bytes are in the frame beside the message, little-endian float32: the rows of its sampler's table, then the
    latents of `samples` and of `outputs`, which are all that later calls weigh.
    """

    index: int
    call: int  # the next one
    batch_size_sum: int  # images per call, itself included, summed over its calls so far
    samples: tuple[int, ...] = ()  # the calls before which they were
    outputs: tuple[int, ...] = ()  # the calls whose outputs they are
    num_bytes: int = 0


class Resume(Struct, frozen=True, tag=True):
    """Go on with a request that another engine has handed over. Answered as `EngineRequest`, or by `StateRefused`.

    An engine that has released the model answers with `HandedOver` at once.

    It was accepted once, so the length of the queue does not reject it. The frame beside it has the bytes of `images`
    one after the other, then the request's own.
    """

    request: EngineRequest[Payload]
    images: tuple[ImageState, ...] = ()  # others begin at their first call
    done: tuple[int, ...] = ()  # the indices of images that the client has
    model_version: str = ""  # version of the model that computed `images`
    waited_s: float = 0.0  # since it was accepted first; orders it among the others of the engine


class Cancel(Struct, frozen=True, tag=True):
    """Cancel a request. A request that has not ended is answered by `Failed` with code "cancelled"."""

    attempt_id: str


class Release(Struct, frozen=True, tag=True):
    """Hand a request over, for another engine. Answered by `HandedOver`; ignored of a request that has ended.

    Texts are not handed over: they are done sooner.
    """

    attempt_id: str


class Leave(Struct, frozen=True, tag=True):
    """Take no new requests. The state becomes "draining", upon which clients send `Release`."""


class Ping(Struct, frozen=True, tag=True):
    """Checks that the engine is alive and its loop is not hung; answered by `Pong`."""


class LoadAck(Struct, frozen=True, tag=True):
    """Acknowledges the last `EngineLoad`.

    There is at most one unacknowledged load per client, which bounds the engine's memory. A client that does not use
    loads, such as the supervisor, never sends it and gets a single load.
    """


class ViewRequest(Struct, frozen=True, tag=True):
    """Asks for one `EngineView`.

    A new subscriber gets the next one that is due, others get one when something has changed.

    A subscriber sends it after each view, so a slow one gets fewer views and one that stops costs nothing. A request
    that arrives before the reply to the previous one replaces it; one view answers both.
    """

    last_iteration: int | None  # the value of this field in the last view from this incarnation; None: there was none
    with_thumbnails: bool


class Mount(Struct, frozen=True, tag=True):
    """Load a model beside those that the engine holds, while it serves; answered by `MountResult`.

    The new model is listed in `EngineState` when it is loaded, warm and has passed a test request. Those that it
    `replaces` are released first, when their requests in flight have ended; if the load fails, they are loaded again.
    With `max_loaded` it is a checkpoint (`engine.checkpoints`), of which the engine holds at most so many: those that
    were used least recently are released first.
    """

    change_id: str
    model: AnyModelSpec
    replaces: tuple[ModelKey, ...] = ()
    max_loaded: int | None = None


class CancelMount(Struct, frozen=True, tag=True):
    """The last request that waited for a `Mount` of this client has left: the mount fails, unless it has begun."""

    change_id: str


class Unmount(Struct, frozen=True, tag=True):
    """Release a model; answered by `MountResult`.

    The model leaves `EngineState` at once; the requests for it that are in flight are served before it is released.
    """

    change_id: str
    name: str
    version: str  # ModelSpec.fingerprint


class MountResult(Struct, frozen=True, tag=True):
    """The end of a `Mount` or `Unmount`. The engine's models are as before if `error` is not empty."""

    change_id: str
    error: str = ""  # a sentence for the operator


class EngineView(Struct, frozen=True, tag=True):
    """The state of an engine's running batch and queue.

    The pixels of `thumbnails`, if any, are in the frame beside it.
    """

    incarnation: str
    captured_at: float  # Unix time, s
    last_iteration: int  # the number of the last iteration
    num_slots: int
    slots: tuple[SlotView, ...]
    waiting: tuple[WaitingView, ...]  # the first requests of the queue
    num_waiting: int  # images in the whole queue
    backlog_s: float  # predicted time until all accepted requests are done
    # after the subscriber's `last_iteration`, as far as they are kept, oldest first
    iterations: tuple[IterationView, ...]
    departures: tuple[DepartureView, ...]  # since the subscriber's last view; empty in its first
    rates: RatesView
    thumbnails: tuple[ThumbnailView, ...] = ()
    # The clients that have had time of the device in the last minute, or have images: those with most time first.
    shares: tuple[ShareView, ...] = ()
    slots_source: str = "set"  # where `num_slots` came from: "set", or of auto "memory", "maximum" or "minimum"


class Pong(Struct, frozen=True, tag=True):
    """Seconds that the engine has been busy with one piece of work, and the limit above which it counts as hung."""

    incarnation: str
    busy_s: float
    hang_limit_s: float


ExitCause = Literal["none", "crashed", "killed"]
"""How an engine's previous process ended.

There was none, it crashed (a request may have caused it), or it was killed from outside.
`supervisor/exit_cause.py` classifies exit codes and signals.
"""


class EngineState(Struct, frozen=True, tag=True):
    """`incarnation` identifies one process of the engine; requests submitted to another one are lost."""

    incarnation: str
    state: Literal["loading", "ready", "draining"]  # draining: it finishes or hands over what it has, and then ends
    models: tuple[AnyModelSpec, ...]  # empty while loading
    device: str
    previous_exit: ExitCause = "none"
    in_flight: tuple[str, ...] = ()  # attempts that the previous process was generating or preparing when it ended
    replaced: tuple[AnyModelSpec, ...] = ()  # not held, while another version of them is loaded


class ShapeCosts(Struct, frozen=True):
    """The measured costs of one model, or of its refiner, at one size, alone or with reference images, in seconds."""

    model: str
    width_px: int
    height_px: int
    step_s: dict[int, float]  # seconds of one model call, by its number of rows
    decode_s: dict[int, float]  # seconds of one decode, by its number of images
    text_encode_s: float  # seconds of encoding one prompt
    max_rows: int  # in one call; more would not be faster, or not fit the memory
    version: str = ""  # ModelSpec.fingerprint
    image_encode_s: dict[int, float] = {}  # seconds of encoding the images of so many requests together
    reference_px: int = 0  # pixels of the reference images in the calls
    stage: int = 0  # 1: the calls are those of the model's refiner
    slowdown: float = 1.0  # a factor in all these seconds, of iterations now: 1 is as measured without other work
    # Since the start, as measured: the number of calls and decodes, and the sum of their seconds, by rows and images.
    step_totals: dict[int, tuple[int, float]] = {}
    decode_totals: dict[int, tuple[int, float]] = {}


class ModelPrecision(Struct, frozen=True):
    """In which form an engine computes a text encoder, or an image model whose denoiser it has quantized."""

    model: str
    version: str  # ModelSpec.fingerprint
    dtype: str  # such as "float32", or the value of engine.quantize
    # The least of its samples: 1 is equal to float32, or to the model before; None: not measured, or it was not kept.
    fidelity: float | None


class EngineLoad(Struct, frozen=True, tag=True):
    """How busy an engine is. Sent after `EngineState`, and at most twice a second when it has changed."""

    backlog_s: float  # predicted time until all accepted requests are done
    num_running: int
    num_waiting: int
    num_slots: int
    costs: tuple[ShapeCosts, ...] = ()
    precisions: tuple[ModelPrecision, ...] = ()
    call_choices: tuple[CallChoice, ...] = ()


class Progress(Struct, frozen=True, tag=True):
    """How far a request is, by its image that is furthest behind.

    Sent when it is accepted; then only with `stream_progress`.
    """

    attempt_id: str
    queue_position: int | None  # images that will join before its last one; None: all its images have joined
    call: int
    num_calls: int
    start_in_s: float  # predicted
    finish_in_s: float


class Preview(Struct, frozen=True, tag=True):
    """A preview of image `index` after `call`; the frame beside it is height × width × 3 bytes of RGB."""

    attempt_id: str
    index: int
    call: int
    width_px: int
    height_px: int


class ImageDone(Struct, frozen=True, tag=True):
    """The completed image `index` of a request; the frame beside it is height × width × 3 bytes of RGB.

    A refused image has no such frame.
    """

    attempt_id: str
    index: int
    seed: int
    width_px: int
    height_px: int
    num_truncated_tokens: int = 0  # at the ends of its prompts: the model is not shown them
    safety_score: float | None = None  # 0 to 1; None: the model has no safety classifier
    is_refused: bool = False


class Timings(Struct, frozen=True, tag="diffusion"):
    """Seconds that an image request spent in each stage of the engine, by the image that finished last.

    For a failed request: until its end, by its image that was furthest among those not decoded. Stages not reached have
    0.
    """

    queue_s: float
    text_encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    image_encode_s: float = 0.0  # seconds of encoding start images


AnyTimings = Timings | TextTimings


class Finished(Struct, frozen=True, tag=True):
    """The request is complete. All its images were sent, or `result` describes its results in the frame beside it."""

    attempt_id: str
    timings: AnyTimings
    # model calls of that image: PNDM makes one more than the requested steps, Heun almost twice as many
    num_steps_run: int
    mean_batch: float = 0.0  # mean number of images in these calls, including this one
    predicted_s: float | None = None  # time to its end, predicted at acceptance; None: `Progress` said it
    result: FinalResult | None = None


class Failed(Struct, frozen=True, tag=True):
    """The request ended before all its images were sent; `code` is an error code of `noria.errors`."""

    attempt_id: str
    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    timings: AnyTimings | None = None  # None: it was rejected before it was queued
    num_steps_run: int = 0  # this and mean_batch as in `Finished`, until its end
    mean_batch: float = 0.0


class HandedOver(Struct, frozen=True, tag=True):
    """The engine has given up the request, for another one. The frame beside it has the bytes of `images`.

    Images that are neither among `images` nor sent are as far as they were at the attempt's beginning.
    """

    attempt_id: str
    images: tuple[ImageState, ...] = ()
    model_version: str = ""  # version of the model that computed them
    timings: AnyTimings | None = None  # as in `Failed`


class NotHeld(Struct, frozen=True, tag=True):
    """The request's checkpoint left while the request was under way, so that it was not accepted."""

    attempt_id: str


class StateRefused(Struct, frozen=True, tag=True):
    """The engine cannot go on from the images of a `Resume`; their request has to begin anew."""

    attempt_id: str
    message: str


ToEngine = (
    Hello
    | EngineRequest[Payload]
    | Resume
    | Cancel
    | Release
    | Leave
    | Ping
    | LoadAck
    | ViewRequest
    | Mount
    | CancelMount
    | Unmount
)
AboutAttempt = Progress | Preview | ImageDone | Finished | Failed | HandedOver | NotHeld | StateRefused
"""The answers to `EngineRequest` and `Resume`."""
FromEngine = EngineState | EngineLoad | Pong | EngineView | MountResult | AboutAttempt

serialize = msgspec.msgpack.Encoder().encode
"""Return a message as one MessagePack frame."""

_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def deserialize_to_engine(frame: bytes | memoryview) -> ToEngine:
    """Decode a frame sent to an engine; raises msgspec.DecodeError if it is none of these messages."""
    try:
        return _to_engine_decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def deserialize_from_engine(frame: bytes | memoryview) -> FromEngine:
    """Decode a frame sent by an engine; raises msgspec.DecodeError if it is none of these messages."""
    try:
        return _from_engine_decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
