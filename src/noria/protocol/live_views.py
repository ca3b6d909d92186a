"""The parts of an `EngineView`: what the page /live, `noria top` and `GET /v1/live` show of a running engine.

The same structs are sent from an engine to a front end (MessagePack) and from there to subscribers (JSON, with the same
names). They contain no prompts. Times are in seconds; `…_at` is Unix time.
"""

from collections.abc import Iterable

from msgspec import Struct

from noria.protocol.kinds import SettingsView
from noria.protocol.request import Priority


class SlotView(Struct, frozen=True):
    """An image in a slot of the running batch."""

    slot: int
    request_id: str  # the client's
    index: int  # index of the image within its request
    model: str
    settings: SettingsView
    call: int  # model calls done
    num_calls: int  # in total; the progress is call / num_calls
    priority: Priority
    joined_at: float
    deadline_at: float | None  # the client's deadline
    finish_at: float | None  # predicted
    paused: bool = False  # no step for at least a second and two iterations, because others had priority
    client: str = ""  # the name of the API key; empty: none, or that of another one is hidden
    share_client: str = ""  # whose share of the device it takes; empty: hidden


class WaitingView(Struct, frozen=True):
    """A request with images that wait for a slot. A view lists them in the order in which they will join."""

    request_id: str
    num_images: int  # that are waiting
    model: str
    settings: SettingsView
    priority: Priority
    arrived_at: float
    start_at: float | None  # predicted
    deadline_at: float | None
    client: str = ""  # as of a slot
    share_client: str = ""  # as of a slot


class BatchView(Struct, frozen=True):
    """The one batch of an iteration of texts."""

    session: int  # that executed it, from 0
    model: str
    num_tokens: int  # without padding
    padded_tokens: int  # with padding


class CallSizeView(Struct, frozen=True):
    """The rows of one size in a model call that has several sizes; each row is padded to the largest."""

    width: int  # px
    height: int  # px
    num_rows: int  # 2 of an image with guidance


class IterationView(Struct, frozen=True):
    """An iteration. The part of `duration_s` that is neither encoding nor decoding is denoising."""

    number: int  # consecutive within an incarnation
    started_at: float
    duration_s: float  # the device's time, if it runs behind the loop
    text_encode_s: float
    decode_s: float
    num_joined: int
    num_stepped: int
    num_decoded: int
    batch: BatchView | None = None  # None: it was an iteration of images
    image_encode_s: float = 0.0  # seconds of encoding start images
    call_sizes: tuple[CallSizeView, ...] = ()  # empty: all images in its call have one size


class DepartureView(Struct, frozen=True):
    """An image that left its slot after an iteration."""

    iteration: int
    slot: int
    request_id: str
    index: int
    outcome: str  # "ok" or an error code
    client: str = ""  # as of a slot


class RatesView(Struct, frozen=True):
    """Rates over the last `window_s` seconds.

    Requests are those that finished; the percentiles are None if there were none.
    """

    window_s: float
    requests_per_s: float
    images_per_s: float
    steps_per_s: float
    p50_s: float | None  # from a request's arrival at the engine to its end
    p95_s: float | None
    p99_s: float | None
    mean_batch: float  # images per iteration
    occupancy: float  # 0 to 1, the share of slots in use
    busy: float  # 0 to 1, the share of time spent in iterations


class ShareView(Struct, frozen=True):
    """A client of the engine, or several, and what it has of the device."""

    share_client: str  # as of a slot; empty: several, or hidden
    device_share: float  # 0 to 1, of the time of the iterations of the last minute
    num_running: int  # images with a slot
    num_paused: int  # those of them without a row in the calls, because it is the turn of others
    num_waiting: int  # images without a slot, which have not had one
    num_evicted: int  # images that wait for a slot again, since they gave theirs to others
    num_clients: int = 1


def sum_shares(shares: Iterable[ShareView]) -> ShareView:
    """Return several clients, at least one, as one."""
    counts = (
        (each.device_share, each.num_running, each.num_paused, each.num_waiting, each.num_evicted, each.num_clients)
        for each in shares
    )
    return ShareView("", *[sum(column) for column in zip(*counts, strict=True)])


class ThumbnailView(Struct, frozen=True):
    """Where a thumbnail is in the frame beside an `EngineView`: height × width × 3 bytes of RGB from `offset` on."""

    slot: int
    request_id: str
    index: int
    width_px: int
    height_px: int
    offset: int
