"""The words of the scheduler: what it is told, what it decides, and what it says has happened. Data only.

An *image* is the unit that boards: a request for four images boards four slots, perhaps at different turns. A *turn* is one `Plan`
carried out: new images board, one model call for every seated image of one shape class, finished latents are decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from noria.protocol.request import Priority


@dataclass(frozen=True, slots=True)
class ImageId:
    """Image `index` of a request."""

    request_id: str
    index: int


class BatchKey(NamedTuple):
    """Images that can share a model call: those of one model and one size."""

    width_px: int
    height_px: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class SchedulableRequest:
    """All that the scheduler knows of a request: its whole future."""

    request_id: str
    batch_key: BatchKey
    num_images: int
    num_calls: int  # rows of its sampler's table: model calls per image
    expires_at: float | None  # when it ends whatever its state, monotonic seconds; None is never
    deadline: float | None = (
        None  # the deadline that the caller asked for, which is kept or refused; None: there is none
    )
    rows: int = 1  # of one image in a model call: a guided one has two
    priority: Priority = "normal"
    exclusive: bool = False  # shares the wheel with nobody


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """An image and its slot in the batch."""

    image: ImageId
    slot: int


@dataclass(frozen=True, slots=True)
class Step:
    """One model call for one seated image: row `call` of its table."""

    image: ImageId
    slot: int
    call: int


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One turn, to be carried out in this order. Images of `boards` may be of any shape; those of `steps` are all of one, and so are
    those of `decodes`, perhaps of another.
    """

    joins: tuple[SlotAssignment, ...]
    steps: tuple[Step, ...]
    decodes: tuple[SlotAssignment, ...]  # may name images whose last step is in this very plan


Phase = Literal["boards", "steps", "decodes"]


class PhaseTimings(Protocol):
    """What the parts of a turn took, in seconds.

    Unless it `is_known`, the device may still be at them, and who asks waits for it: the scheduler and the wheel do not.
    """

    @property
    def is_known(self) -> bool:
        """Whether nobody has to wait for it."""
        ...

    @property
    def text_encode_s(self) -> float:
        """On `boards`."""
        ...

    @property
    def step_s(self) -> float:
        """On `steps`."""
        ...

    @property
    def decode_s(self) -> float:
        """On `decodes`."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredTimings:
    """What is known of the parts of a turn; a `Spent`."""

    text_encode_s: float = 0.0
    step_s: float = 0.0
    decode_s: float = 0.0
    is_known: bool = True


NO_TIMINGS = MeasuredTimings()


@dataclass(frozen=True, slots=True)
class IterationResult:
    """How a turn went. `failed` names images one by one, so that one bad request never fails its batch."""

    failed: Mapping[ImageId, str] = field(default_factory=dict)  # why, in words
    oom_phase: Phase | None = None  # what did not fit the memory: nothing of it, and of what comes after it, was done
    is_timed: bool = True  # whether the turn took as long as its work; not so while a device's queue is being filled
    phase_timings: PhaseTimings | None = None  # on its parts; None: they were not timed
    join_s: float = 0.0  # for which `boards` held up the wheel, also where the device does them later


class FinishReason(Enum):
    """The ways in which a request can end, exactly one each."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"  # the queue is full
    UNMEETABLE = "unmeetable"  # it could not be done by its deadline, or only at another's cost


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request's time went, in seconds; of several images the one that ended last counts.

    Of a request that did not finish: until its end, by its image that had come furthest of those not decoded.
    """

    queue_s: float = 0.0
    slot_s: float = 0.0  # from its boarding to its end
    join_timings: PhaseTimings = NO_TIMINGS  # of the turn in which it boarded
    decode_timings: PhaseTimings = NO_TIMINGS  # of the turn in which it was decoded
    mean_batch: float = 0.0  # images that stepped together in its steps, itself included
    num_calls: int = 0  # of the model, for that image

    # These wait for the device where `Spent` does.

    @property
    def text_encode_s(self) -> float:
        """The prompts of all who boarded with it."""
        return min(self.join_timings.text_encode_s, self.slot_s)

    @property
    def denoise_s(self) -> float:
        """What of its time in the slot was neither encoding nor decoding."""
        return max(0.0, self.slot_s - self.text_encode_s - self.decode_s)

    @property
    def decode_s(self) -> float:
        """All who were decoded with it."""
        return self.decode_timings.decode_s


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is; of several images, the one furthest behind. Predictions in seconds from now."""

    queue_position: int | None  # images that board before its last one; None: all of them have boarded
    call: int
    start_in_s: float
    finish_in_s: float


@dataclass(frozen=True, slots=True)
class RunningImageSnapshot:
    """An image with a slot, between two turns."""

    image: ImageId
    request: SchedulableRequest
    slot: int
    call: int
    joined_at: float  # monotonic seconds
    finish_in_s: float  # predicted


@dataclass(frozen=True, slots=True)
class WaitingRequestSnapshot:
    """A request with images that wait, between two turns."""

    request: SchedulableRequest
    num_images: int  # that wait
    arrived_at: float  # monotonic seconds
    start_in_s: float  # predicted, of the first of them


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Who is where, between two turns."""

    running: tuple[RunningImageSnapshot, ...]  # by slot
    waiting: tuple[WaitingRequestSnapshot, ...]  # the first of them, in the order in which they will board


@dataclass(frozen=True, slots=True)
class ImageDecoded:
    """An image is done and has left its slot."""

    image: ImageId


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The one terminal event of a request."""

    request_id: str
    finish_reason: FinishReason
    message: str = ""
    timings: RequestTimings = RequestTimings()
    num_departures: int = 0  # of its images that left a slot undone
    retry_after_s: float | None = None  # of a refusal: when it would be accepted, if nobody else comes
    finished_at: float = 0.0  # monotonic seconds


SchedulerEvent = ImageDecoded | RequestFinished
