"""The interface between an engine and the kind of model that it runs.

A *runtime* is models of one kind, loaded on one device: an `Executor`, which prepares requests and executes the
scheduler's plans, and its `Scheduler`. `engine/diffusion` loads that of diffusion models, `engine/encoder` that of text
encoders. `engine/multi_model` is an executor that combines several; `testing/fake_executor` is one without a device.

The engine's threads know payloads, results, conditioning and schedulers only through these protocols. The loop decides
nothing and computes nothing; an executor does not know which requests wait, or why a plan is what it is.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from noria.config import EngineConfig
from noria.engine.resumption import StateWithBytes
from noria.errors import SetupError
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import FinalResult, SettingsView
from noria.protocol.messages import AnyTimings, FromEngine, ImageState, ModelPrecision, ShapeCosts
from noria.protocol.model_spec import CallChoice, ModelKey, ModelSpec
from noria.protocol.request import AnyRequest
from noria.scheduling.interface import BatchwiseScheduler, StepwiseScheduler
from noria.scheduling.types import (
    BatchKey,
    BatchPlan,
    BatchResult,
    ItemId,
    IterationPlan,
    IterationResult,
    Phase,
    ReleasedImage,
    RequestTimings,
    SchedulableRequest,
)

_log = logging.getLogger("noria.engine")

THUMBNAIL_MAX_PX = 64
"""The longest side of a thumbnail: 64 of them are less than a megabyte, sent five times a second."""


class Result(Protocol):
    """A result of a request, which may still be in transfer from the device."""

    def message(self) -> tuple[FromEngine, bytes | memoryview]:
        """The message to its client and the raw bytes beside it; blocks until the transfer is complete.

        May be called from any thread. Raises `errors.NoriaError` if the result is not valid.
        """


class Preview(Result, Protocol):
    """An early view of a result."""

    @property
    def image(self) -> ItemId:
        """The image that it shows."""


class Thumbnail(Preview, Protocol):
    """A small preview, for live views."""

    @property
    def width_px(self) -> int:
        """At most `THUMBNAIL_MAX_PX`."""

    @property
    def height_px(self) -> int:
        """At most `THUMBNAIL_MAX_PX`."""

    def rgb(self) -> bytes | memoryview:
        """Height × width × 3 bytes; blocks until the transfer is complete. Any thread may call it, repeatedly."""


class PreparedRequest(Protocol):
    """A request of either kind after the preparation that needs no device."""

    @property
    def request(self) -> AnyRequest:
        """The request, with the version of the model that it runs on."""

    @property
    def batch_key(self) -> BatchKey:
        """The batch key of all its items, which are images or texts."""

    @property
    def num_calls(self) -> int:
        """Model calls for each of its items."""

    @property
    def longest_iteration_s(self) -> float:
        """Seconds that one of its iterations may take, if longer than those of the warm-up; else 0."""

    @property
    def stages(self) -> Mapping[Phase, str]:
        """The names of its trace spans, by phase."""

    @property
    def settings_view(self) -> SettingsView:
        """The settings that live views show."""

    @property
    def span_attributes(self) -> Mapping[str, str | int | float]:
        """The settings that the trace span of its model calls has."""

    def schedulable(self, expires_at: float | None, deadline: float | None) -> SchedulableRequest:
        """Return the part of it that its scheduler uses; both times are monotonic seconds."""

    def timings(self, measured: RequestTimings) -> AnyTimings:
        """Return the seconds of its stages, for the client; may wait for the device."""

    def final_result(self) -> tuple[FinalResult | None, bytes | memoryview | None]:
        """Return what is sent at its end: results that were not sent one by one, and their description. Any thread."""


class StepRequest(PreparedRequest, Protocol):
    """A prepared request whose images step in a running batch."""

    @property
    def call_size(self) -> tuple[int, int] | None:
        """The value that images of other sizes need to have, too, to share its model calls; None: there are none."""

    @property
    def num_rows(self) -> int:
        """Rows of each of its images in a model call."""


RequestT = TypeVar("RequestT", bound=PreparedRequest)


class Executor(Protocol[RequestT]):
    """Holds the requests of one device.

    `prepare`, `resume` and `is_compiled` may be called from other threads, everything else from the loop's only.
    """

    def prepare(self, request: AnyRequest, data: memoryview | None = None) -> RequestT:
        """Prepare a request, which names a version of its model, for `accept`; `data` is the frame beside its message.

        Raises `errors.RequestError` if it cannot be served.
        """

    def resume(self, prepared: RequestT, states: Sequence[StateWithBytes]) -> RequestT:
        """Return a prepared request some of whose images begin as another engine has handed them over.

        Raises InvalidStateError: they cannot.
        """

    def is_compiled(self, request: AnyRequest) -> bool:
        """Whether `prepare` would return at once because it has nothing new to compile."""

    def accept(self, prepared: RequestT) -> None:
        """Keep a request that the scheduler has accepted, until `forget`."""

    def forget(self, attempt_id: str) -> None:
        """Release a request that has ended; no later plan names it."""

    def memory_bytes(self) -> int:
        """Device memory that the executor holds."""


class IterationExecutor(Executor[RequestT], Protocol[RequestT]):
    """Executes iterations on one device, on the loop's thread."""

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Execute one iteration. May return while the device still works. Failures of single images are in the result.

        With `with_thumbnails`, also make a thumbnail of every image that steps, for `thumbnails`.
        """

    def take_result(self, image: ItemId) -> Result:
        """The result of an image that the last iteration decoded. Each can be taken once."""

    def hand_over(self, released: ReleasedImage) -> tuple[ImageState, bytes]:
        """The state of an image that has a slot or is evicted, for `resume` of another engine; waits for the device."""

    def previews(self) -> Sequence[Preview]:
        """The previews of the last iteration. They are returned once."""

    def thumbnails(self) -> Sequence[Thumbnail]:
        """The thumbnails of the last iteration. They are returned once."""


class FinishedBatch(Struct, frozen=True):
    """A batch that a session has executed."""

    plan: BatchPlan
    result: BatchResult
    seconds: float  # that the session took


class BatchExecutor(Executor[RequestT], Protocol[RequestT]):
    """Executes batches on one device, beside the loop's thread."""

    def start(self, plan: BatchPlan, on_done: Callable[[FinishedBatch], None]) -> None:
        """Execute a batch in its session, which is idle; return at once.

        `on_done` is called once, by any thread. Results of requests that were forgotten meanwhile are dropped.
        """

    def close(self) -> None:
        """End the sessions, once they are idle."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that was loaded beside those that serve."""

    add: Callable[[], None]  # makes it serve; called by the loop's thread, between two iterations
    longest_iteration_s: float = 0.0  # measured


def _load_nothing(spec: ModelSpec) -> LoadedModel:
    raise SetupError(f"{spec.name} cannot be loaded: the models of this engine do not change")


@dataclass(frozen=True, kw_only=True)
class LoadedModels:
    """Facts that the runtimes of all kinds tell of their models, which are loaded on one device and ready to serve."""

    device: str = "cpu"  # as torch names it
    longest_iteration_s: float = 0.0  # measured; longer ones may be a hang
    shape_costs: Callable[[], tuple[ShapeCosts, ...]] = lambda: ()  # the measured costs, as clients get them
    precisions: Callable[[], tuple[ModelPrecision, ...]] = lambda: ()  # those of text encoders and quantized models
    call_choices: Callable[[], tuple[CallChoice, ...]] = lambda: ()  # those of image models that measured them
    on_idle: Callable[[], None] = lambda: None  # called by the loop's thread when nothing runs or waits any more
    save_costs: Callable[[], None] = lambda: None
    resolved_settings: Mapping[str, Any] = field(default_factory=dict)  # what "auto" was resolved to, for the log
    # Loads, warms up, measures and tests one more model, on a thread that is not the loop's; raises as `load_runtime`.
    load_beside: Callable[[ModelSpec], LoadedModel] = _load_nothing
    release: Callable[[ModelKey], None] = lambda _model: None  # called by the loop's thread, without requests of it
    slots_source: str = "set"  # as `SlotCount` has it
    free_memory: Callable[[], None] = lambda: None  # returns what a released model held; not on the loop's thread


@dataclass(frozen=True)
class StepRuntime(LoadedModels, Generic[RequestT]):
    """Models whose iterations the loop executes itself."""

    executor: IterationExecutor[RequestT]
    scheduler: StepwiseScheduler


@dataclass(frozen=True)
class BatchRuntime(LoadedModels, Generic[RequestT]):
    """Models whose batches `num_sessions` sessions execute beside the loop."""

    executor: BatchExecutor[RequestT]
    scheduler: BatchwiseScheduler
    num_sessions: int


AnyRuntime = StepRuntime[Any] | BatchRuntime[Any]


def log_imported(models: Sequence[ModelSpec], device: str, seconds: float) -> None:
    """Log that a loader has imported its libraries, and loads `models` on `device`, "cpu" or "cuda:N", from now on."""
    names = [spec.name for spec in models]
    _log.info(
        "imported the libraries in %.1f s; loading %s on %s",
        seconds,
        ", ".join(names),
        device,
        extra=fields(event="libraries_imported", models=names, device=device, seconds=round(seconds, 3)),
    )


_LOADERS = {"diffusion": "noria.engine.diffusion.loading", "encoder": "noria.engine.encoder.loading"}


def load_runtime(models: Sequence[ModelSpec], config: EngineConfig, device: str) -> AnyRuntime:
    """Load `models`, all of one kind, on `device`, warm them up and measure their costs.

    Raises SetupError: a model or the device cannot be used.
    """
    kind, *others = {spec.kind for spec in models}
    if others:
        raise SetupError(f"an engine loads models of one kind; got {', '.join(sorted([kind, *others]))}")
    loader = importlib.import_module(_LOADERS[kind])
    runtime: AnyRuntime = loader.load_runtime(models, config, device)
    return runtime
