"""What is shown of a wheel that turns: on the page /live, in `noria top`, and to whoever reads `GET /v1/live`.

The same structs travel from an engine to a front end (MessagePack) and from there to the watchers (JSON, by the same names). They say
nothing of prompts. Times are seconds; `…_at` is Unix time.
"""

from msgspec import Struct

from noria.protocol.request import Priority


class SlotView(Struct, frozen=True):
    """An image in a slot of the running batch."""

    slot: int
    request_id: str  # the caller's
    index: int  # of the request's images
    model: str
    width_px: int
    height_px: int
    scheduler: str
    guidance_scale: float
    num_steps: int  # as asked for
    call: int  # model calls done
    num_calls: int  # to be done; a bar of progress is call / num_calls
    priority: Priority
    joined_at: float
    deadline_at: float | None  # the caller's deadline
    finish_at: float | None  # predicted
    paused: bool = False  # it has made no step for a second and two turns or more, as others went first


class WaitingView(Struct, frozen=True):
    """A request with images that wait for a slot, in the order in which they will board."""

    request_id: str
    num_images: int  # that wait
    model: str
    width_px: int
    height_px: int
    scheduler: str
    guidance_scale: float
    num_steps: int
    priority: Priority
    arrived_at: float
    start_at: float | None  # predicted
    deadline_at: float | None


class IterationView(Struct, frozen=True):
    """One turn of the wheel. What of `seconds` was neither encoding nor decoding was denoising."""

    number: int  # counts up by one within an incarnation
    started_at: float
    duration_s: float  # the device's, where it works behind the wheel
    text_encode_s: float
    decode_s: float
    num_joined: int
    num_stepped: int
    num_decoded: int


class DepartureView(Struct, frozen=True):
    """An image that left its slot; `number` is the turn's after which it did."""

    iteration: int
    slot: int
    request_id: str
    index: int
    outcome: str  # "ok" or the code of an error


class RatesView(Struct, frozen=True):
    """The last `window_s` seconds: of requests that ended well, of images, and of the wheel. None where nothing ended."""

    window_s: float
    requests_per_s: float
    images_per_s: float
    steps_per_s: float
    p50_s: float | None  # from a request's arrival at the engine to its end
    p95_s: float | None
    p99_s: float | None
    mean_batch: float  # images in a turn
    occupancy: float  # 0 to 1, the share of the slots that was used
    busy: float  # 0 to 1, the share of the time in which the wheel turned


class ThumbnailView(Struct, frozen=True):
    """Where a slot's picture is in the bytes beside a `WheelView`: height × width × 3 bytes of RGB from `offset` on."""

    slot: int
    request_id: str
    index: int
    width_px: int
    height_px: int
    offset: int
