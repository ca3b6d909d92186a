"""The types that a scheduler's interface (`interface.py`) takes and returns: requests, plans, their results, events.

An *image* is the unit of scheduling: a request for four images takes four slots, possibly at different iterations. An
*iteration* executes one `IterationPlan`: images are evicted from slots, start images are encoded, new and evicted
images join, one model call steps running images of one batch key, finished latents are decoded.

For text encoders the unit is a *text*, a row of a batch; a `BatchPlan` is one model call with texts of one model. Both
kinds share requests and their ends: there, an *item* is an image or a text. Types that each text has one of are msgspec
structs, since a frozen dataclass takes five times as long to make.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from noria.protocol.model_spec import ModelKey
from noria.protocol.request import Priority


class ItemId(NamedTuple):
    """Image or text `index` of a request."""

    attempt_id: str
    index: int  # type: ignore[assignment]  # a tuple has a method of this name


class BatchKey(NamedTuple):
    """Images with equal keys (one version of one model, one size, one stage, as large references) can share a call.

    Those that differ in size can, too, if their requests have equal call keys. Texts have no size: their width and
    height are 0.
    """

    width_px: int
    height_px: int
    model: ModelKey = ModelKey()
    stage: int = 0  # 1: the later calls of an image, if they are of another denoiser; more: calls that enlarge pixels
    reference_px: int = 0  # pixels of the reference images, which are in each call beside the image

    @property
    def area_px(self) -> int:
        """The pixels of a row of a call."""
        return self.width_px * self.height_px + self.reference_px

    @property
    def decode_key(self) -> "BatchKey":
        """The key of images that are decoded together, and take as long."""
        return self._replace(reference_px=0) if self.reference_px else self


class ImageProgress(NamedTuple):
    """How far an image is."""

    call: int = 0  # the next one
    batch_size_sum: int = 0  # images per call, itself included, summed over its calls so far


class SchedulableRequest(Struct, frozen=True):
    """All that the scheduler knows of a request. It determines the request's work completely."""

    attempt_id: str
    batch_key: BatchKey
    num_images: int
    num_calls: int  # model calls per image: the rows of its sampler's table
    expires_at: float | None  # the request ends then, whatever its state; monotonic seconds, None: never
    deadline: float | None = None  # set by the caller: met or rejected; monotonic seconds, None: no deadline
    rows: int = 1  # rows of one image in a model call: 2 with guidance, more if prompts are joined
    priority: Priority = "normal"
    exclusive: bool = False  # runs with no other request in the batch
    num_tokens: tuple[int, ...] = ()  # tokens of each of its `num_images` texts, special ones too; empty for images
    call_size: tuple[int, int] | None = None  # what images of other sizes in its calls have, too; None: there are none
    # Or reference images: the same for all of its images, encoded before the first of them joins.
    has_start_image: bool = False
    second_stage_from: int | None = None  # the first call of the second stage; None: all are of one
    second_stage_px: tuple[int, int] | None = None  # its width and height; None: it has another denoiser
    # Keys and numbers of the calls just before the second stage, which are of neither: they enlarge pixels.
    between: tuple[tuple[BatchKey, int], ...] = ()
    # The images that are not done of a request that another engine has handed over. None: all, from the first call on.
    resumed: Mapping[int, ImageProgress] | None = None
    waited_s: float = 0.0  # since it arrived at the first engine, before it arrived at this one
    client: str = ""  # whose share of the device it takes; those without a name share one
    weight: float = 1.0  # weight of its client's share, above 0

    @property
    def indices(self) -> Iterable[int]:
        """Its images that are to be generated."""
        return range(self.num_images) if self.resumed is None else self.resumed

    def progress_of(self, index: int) -> ImageProgress:
        """How far an image of it is when it arrives."""
        return ImageProgress() if self.resumed is None else self.resumed[index]

    def call_key(self, step_key: BatchKey) -> BatchKey:
        """Return what calls share: the key of a step, without its size where the model mixes sizes in a call."""
        if self.call_size is None:
            return step_key
        width_px, height_px = self.call_size
        return step_key._replace(width_px=width_px, height_px=height_px, reference_px=0)

    def step_key(self, call: int) -> BatchKey:
        """The batch key of a call: that of its stage."""
        if self.second_stage_from is None:
            return self.batch_key
        return self.second_key if call >= self.second_stage_from else self.stages_from(call)[0][0]

    @property
    def second_key(self) -> BatchKey:
        """The batch key of the calls of the second stage."""
        if self.second_stage_px is None:
            return self.batch_key._replace(stage=1)
        return self.batch_key._replace(width_px=self.second_stage_px[0], height_px=self.second_stage_px[1])

    @property
    def last_key(self) -> BatchKey:
        """The batch key with which its images are decoded, whatever denoised them."""
        return self.batch_key if self.second_stage_px is None else self.second_key

    def stages_from(self, call: int) -> tuple[tuple[BatchKey, int], ...]:
        """The stages of an image from `call` on, in order: their batch keys, and their calls that are left."""
        if self.second_stage_from is None:
            return ((self.batch_key, self.num_calls - call),)
        num_second, before = self.num_calls - max(call, self.second_stage_from), self.second_stage_from - call
        found = [(self.second_key, num_second)] if num_second or before <= 0 else []
        for batch_key, num_calls in reversed(self.between):
            if before > 0:
                found.insert(0, (batch_key, min(num_calls, before)))
            before -= num_calls
        return ((self.batch_key, before), *found) if before > 0 else tuple(found)

    def calls_by_key(self, call: int) -> tuple[tuple[BatchKey, int], ...]:
        """The calls of an image from `call` on, by the batch keys of their stages, with that of its decode."""
        if self.second_stage_from is None:
            return ((self.batch_key, self.num_calls - call),)
        found: dict[BatchKey, int] = {}
        for batch_key, num_calls in self.stages_from(call):
            found[batch_key] = found.pop(batch_key, 0) + num_calls  # a second pass may have the size of the first one
        found.setdefault(self.last_key, 0)
        return tuple(found.items())


class SlotAssignment(NamedTuple):
    """An image and its slot in the batch."""

    image: ItemId
    slot: int


class Step(NamedTuple):
    """A model call for one running image: row `call` of its sampler's table."""

    image: ItemId
    slot: int
    call: int


class ReleasedImage(NamedTuple):
    """An image that leaves its slot with steps to make, or that is evicted and leaves its engine."""

    image: ItemId
    slot: int | None  # None: it is evicted
    progress: ImageProgress


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """The work of one iteration: `evictions`, `encodes`, `joins`, `steps`, `decodes`. Made by `Scheduler.plan`.

    Images of `joins` can have any batch keys; those of `steps` share a batch key, that of their stage, or a call key,
    those of `decodes` a decode key, and those of `encodes` a batch key, each possibly another.
    """

    joins: tuple[SlotAssignment, ...]
    steps: tuple[Step, ...]
    decodes: tuple[SlotAssignment, ...]  # includes images whose last step is in this plan
    encodes: tuple[SlotAssignment, ...] = ()  # those of `joins` whose requests' start images are encoded before
    evictions: tuple[ReleasedImage, ...] = ()  # images whose state is saved, since `joins` take their slots
    returns: tuple[SlotAssignment, ...] = ()  # those of `joins` that were evicted, and go on


class BatchPlan(Struct, frozen=True):
    """A model call for texts of one batch key, padded to the longest or packed. Made by `BatchScheduler.plan`."""

    session: int  # that executes it, from 0; no other plan has it until this one is committed
    batch_key: BatchKey
    rows: tuple[ItemId, ...]
    num_tokens: tuple[int, ...]  # tokens of each row, without padding
    is_alone: bool = False  # no other plan is made until this one is committed
    is_packed: bool = False  # it is computed without padding

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.num_tokens)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the call computes, padding included."""
        return sum(self.num_tokens) if self.is_packed else len(self.rows) * self.length


Phase = Literal["evictions", "encodes", "joins", "steps", "decodes"]
UNTIL_JOINED: frozenset[Phase | None] = frozenset({"evictions", "encodes", "joins"})
"""The phases that come before anything has joined: if one of them runs out of memory, nothing has."""


class PhaseTimings(Protocol):
    """The durations of an iteration's phases.

    Unless `is_known`, the device may not have finished, and reading a duration blocks until it has. The scheduler and
    the engine loop never block on it.
    """

    @property
    def is_known(self) -> bool:
        """Whether reading the durations returns at once."""

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a phase, of `joins` those of encoding texts; 0 if it did not run."""


@dataclass(frozen=True, slots=True)
class MeasuredTimings:
    """`PhaseTimings` that are already known."""

    by_phase: Mapping[Phase, float] = field(default_factory=dict)
    is_known: bool = True

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a phase."""
        return self.by_phase.get(phase, 0.0)


NO_TIMINGS = MeasuredTimings()


@dataclass(frozen=True, slots=True)
class IterationResult:
    """The result of executing a plan. `failed` names single images, so one bad request never fails its batch."""

    failed: Mapping[ItemId, str] = field(default_factory=dict)  # the reasons, as text
    oom_phase: Phase | None = None  # ran out of memory: neither this phase nor any after it was executed
    is_timed: bool = True  # False while a device's queue fills: the iteration's duration says nothing of its work
    phase_timings: PhaseTimings | None = None  # None: the phases were not timed
    # For which `encodes` and `joins` blocked the engine loop, also where the device executes them later.
    join_s: float = 0.0


class BatchResult(Struct, frozen=True):
    """The result of executing a batch. `failed` names single texts, so one of them never fails the others."""

    failed: Mapping[ItemId, str] = {}  # the reasons, as text
    fits: bool = True  # False: it ran out of memory, and has no results
    is_timed: bool = True  # False: its texts were tried alone, so its duration says nothing of the batch


class FinishReason(Enum):
    """How a request ended. Every request ends in exactly one way."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REJECTED = "rejected"  # the queue is full
    UNMEETABLE = "unmeetable"  # its deadline cannot be met, or only by breaking another accepted deadline


class RequestTimings(Struct, frozen=True):
    """Where a request's time went, in seconds; of several images, the one that finished last.

    Of an unfinished request: up to its end, for the image that got furthest among those not decoded.
    """

    queue_s: float = 0.0
    slot_s: float = 0.0  # from joining the batch to the end
    join_timings: PhaseTimings = NO_TIMINGS  # timings of the iteration in which the image joined
    decode_timings: PhaseTimings = NO_TIMINGS  # timings of the iteration in which the image was decoded
    mean_batch: float = 0.0  # images per model call over its calls, itself included
    num_calls: int = 0  # model calls made for that image

    # These properties block where `PhaseTimings` do.

    @property
    def image_encode_s(self) -> float:
        """Encoding all start images that were encoded in the iteration in which the image joined."""
        return min(self.join_timings.seconds("encodes"), self.slot_s)

    @property
    def text_encode_s(self) -> float:
        """Encoding the prompts of all images that joined in the same iteration."""
        return min(self.join_timings.seconds("joins"), self.slot_s)

    @property
    def denoise_s(self) -> float:
        """Time in the slot that was neither encoding nor decoding."""
        return max(0.0, self.slot_s - self.image_encode_s - self.text_encode_s - self.decode_s)

    @property
    def decode_s(self) -> float:
        """Decoding all images that were decoded in the same iteration."""
        return self.decode_timings.seconds("decodes")


@dataclass(frozen=True, slots=True)
class ReleasedRequest:
    """A request that another engine goes on with, and its images that had slots or were evicted."""

    images: tuple[ReleasedImage, ...]
    timings: RequestTimings
    released_at: float  # monotonic seconds


class RequestProgress(Struct, frozen=True):
    """The progress of a request; of several images, the one furthest behind. Predictions are seconds from now."""

    queue_position: int | None  # images that join before its last one; None: all of its images have joined
    call: int
    start_in_s: float
    finish_in_s: float


@dataclass(frozen=True, slots=True)
class RunningImageSnapshot:
    """An image with a slot, between two iterations."""

    image: ItemId
    request: SchedulableRequest
    slot: int
    call: int
    joined_at: float  # monotonic seconds
    finish_in_s: float  # predicted


@dataclass(frozen=True, slots=True)
class WaitingRequestSnapshot:
    """A request with waiting images, between two iterations."""

    request: SchedulableRequest
    num_images: int  # waiting
    arrived_at: float  # monotonic seconds
    start_in_s: float  # predicted, of its first waiting image


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Running images and waiting requests, between two iterations."""

    running: tuple[RunningImageSnapshot, ...]  # by slot
    waiting: tuple[WaitingRequestSnapshot, ...]  # the first ones, in the order in which they will join
    waiting_by_client: Mapping[str, int] = field(default_factory=dict)  # all waiting images
    evicted_by_client: Mapping[str, int] = field(default_factory=dict)  # those of them that are evicted


@dataclass(frozen=True, slots=True)
class ImageFinished:
    """An image is decoded and has left its slot."""

    image: ItemId


class RequestFinished(Struct, frozen=True):
    """The one terminal event of a request."""

    attempt_id: str
    finish_reason: FinishReason
    message: str = ""
    timings: RequestTimings = RequestTimings()
    num_departures: int = 0  # the number of its images that left a slot, or were evicted, unfinished
    retry_after_s: float | None = None  # set on rejections: when it would be accepted if no other request arrives
    finished_at: float = 0.0  # monotonic seconds
    predicted_s: float | None = None  # time to its end, predicted at admission; None: only `progress` says it


SchedulerEvent = ImageFinished | RequestFinished


@dataclass(frozen=True, slots=True)
class RunningBatchSnapshot:
    """A batch in flight."""

    plan: BatchPlan
    started_at: float  # monotonic seconds
    finish_in_s: float  # predicted


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """Batches in flight and waiting requests."""

    running: tuple[RunningBatchSnapshot, ...]  # by session
    waiting: tuple[WaitingRequestSnapshot, ...]  # the first ones, in the policy's order
    waiting_by_client: Mapping[str, int] = field(default_factory=dict)  # all waiting texts

    @property
    def evicted_by_client(self) -> Mapping[str, int]:
        """Return no client: no text is evicted."""
        return {}
