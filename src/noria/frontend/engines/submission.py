"""Finds the model of a request, and records its outcome."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from opentelemetry.trace import INVALID_SPAN

from noria.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    NoriaError,
    RequestCancelled,
    RequestError,
    short_repr,
)
from noria.frontend.engines.checkpoints import Checkpoints
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.versions.canary_counts import Outcome, outcome_of
from noria.frontend.engines.versions.shadow_mirror import ShadowMirror
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.exposition import series
from noria.observe.metrics.section import add_all
from noria.observe.request_scope import current_span
from noria.observe.traces.tracer import fail
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelSpec
from noria.protocol.text import EncoderModelSpec, EncoderTask

DEFAULT_MODEL_ALIAS = "noria"  # names the default model, for clients that cannot leave `model` out

_IMAGE_MODEL, _ENCODER = "an image model", "a text encoder"
_TASKS: dict[EncoderTask, str] = {
    "embedding": "an embedding model",
    "sparse_embedding": "a sparse embedding model",
    "token_embedding": "a model that embeds tokens",
    "classification": "a classification model",
    "token_classification": "a model that classifies tokens",
    "reranking": "a reranking model",
}

SpecT = TypeVar("SpecT", bound=ModelSpec)


class Submission:
    """The engines of a front end, the choice among versions of their models, and the copies for shadows."""

    def __init__(self, engine_pool: EnginePool, checkpoints: Checkpoints | None = None) -> None:
        """`checkpoints` None: `engine_pool` has none that are loaded on demand."""
        self.engine_pool = pool = engine_pool
        self.checkpoints = checkpoints or Checkpoints(pool)
        self.versions = VersionChooser(pool.find_ready, find_known=pool.find_model, set_controls=pool.set_controls)
        self.shadows = ShadowMirror(self.versions, pool.find_ready, pool.route)

    def resolve_model(
        self,
        spec_type: type[SpecT],
        name: str | None,
        tasks: Sequence[EncoderTask] = (),
        versions: RequestVersions | None = None,
    ) -> SpecT:
        """Return the model of one kind named `name`; its default model for None, "" or `DEFAULT_MODEL_ALIAS`.

        Of several versions of it that are deployed, it is the one that answers the request that has `versions`. Errors
        name the models of `tasks`; the model itself may be of another one.

        Raises:
            EngineUnavailable: no engine has been ready yet, so the models are unknown, or none with the default model.
            ModelNotFound: no such model of this kind; names those that are served.
            InvalidField: the request asks for a version that is not served.
        """
        pool = self.engine_pool
        models = pool.models_of(spec_type)
        if not models and not pool.serves(spec_type):
            served = ", ".join(f"{known!r} ({spec.kind})" for known, spec in pool.models.items())
            raise ModelNotFound(
                f"this needs a model of kind {spec_type.kind}; this server has {served}.", field="model"
            )
        if not models or not name or (name == DEFAULT_MODEL_ALIAS and name not in models):
            return self.versions.choose(pool.default_model(spec_type), versions)
        if name not in models:
            if (other := pool.models.get(name)) is not None:
                raise ModelNotFound(self.misfit(spec_type, other, tasks), field="model")
            raise not_served(name, self._names(spec_type, tasks))
        return self.versions.choose(models[name], versions)

    def misfit(self, spec_type: type[ModelSpec], got: ModelSpec, tasks: Sequence[EncoderTask]) -> str:
        """Return the message for a request for the model `got`, which is not what its route needs."""
        kind = _TASKS[got.task] if isinstance(got, EncoderModelSpec) else _IMAGE_MODEL
        needed = " or ".join(_TASKS[task] for task in tasks)
        needed = needed or (_ENCODER if issubclass(spec_type, EncoderModelSpec) else _IMAGE_MODEL)
        fitting = ", ".join(map(repr, self._names(spec_type, tasks))) or "none is served here"
        return f"model {got.name!r} is {kind}; this route needs {needed}: {fitting}."

    def _names(self, spec_type: type[ModelSpec], tasks: Sequence[EncoderTask]) -> list[str]:
        """Return the names of the models that fit, those of the first of `tasks` first."""
        models = self.engine_pool.models_of(spec_type)
        if not tasks:
            return [*models, *(self.checkpoints.unopened if issubclass(DiffusionModelSpec, spec_type) else ())]
        return [name for task in tasks for name, spec in models.items() if getattr(spec, "task", None) == task]


def not_served(name: str, served: Sequence[str]) -> ModelNotFound:
    """Return the error of a request for a model `name` that is not among those `served`."""
    allowed = ", ".join(map(repr, served)) or "none"
    return ModelNotFound(
        f"model {short_repr(name)} is not served here; allowed are {allowed} (or leave it out, or send "
        f"{DEFAULT_MODEL_ALIAS!r}).",
        field="model",
    )


class RequestOutcome:
    """Records the outcome of a request in metrics, log and span, and for its canary; its `versions` None: a job's.

    An attempt of a job is not counted as a request, since it may be retried; `jobs/completion.py` counts the job when
    it ends. A class: a generator takes longer than the recording.
    """

    def __init__(
        self,
        model: str,
        log_record: RequestLogRecord,
        versions: RequestVersions | None = None,
        *,
        has_deadline: bool = False,
        shape: Callable[[], str] = str,
    ) -> None:
        self._model, self._log_record, self._versions, self._has_deadline = model, log_record, versions, has_deadline
        self.shape = shape  # requests of the same shape take equally long; it may be set later, too

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        choice = None if self._versions is None else self._versions.of(self._model)
        self._is_deployed = choice is not None and choice.target is not None
        if choice is not None and choice.target is not None:
            self._log_record.add(deployment=choice.target.deployment, version=choice.target.version)
        add_all((declarations.REQUESTS_IN_FLIGHT, 1))
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        add_all((declarations.REQUESTS_IN_FLIGHT, -1))
        seconds = time.perf_counter() - self._started
        if error is None:
            self._record(outcomes.OK, "ok", seconds)
            return
        code: str = InternalError.code
        judged: Outcome = "error"
        if isinstance(error, NoriaError):
            code, judged = error.code, outcome_of(error, has_deadline=self._has_deadline)
            self._log_record.add(error=error.message)
            if code == DeadlineExceeded.code and self._has_deadline:
                declarations.DEADLINES_MISSED.labels(self._model).inc()
        elif isinstance(error, asyncio.CancelledError):
            code, judged = RequestCancelled.code, "none"
        if not isinstance(error, RequestError):  # needed for streams, whose status is 200
            fail(current_span(), code)
        self._log_record.add(total_s=seconds)  # a request that succeeds has the response's
        self._record(code, judged, seconds)

    def _record(self, code: str, judged: Outcome, seconds: float) -> None:
        if (span := current_span()) is not INVALID_SPAN:
            span.set_attribute("noria.outcome", code)
        self._log_record.add(outcome=code)
        if self._versions is not None:
            outcomes.count_request(self._model, code)
            self._versions.record(self._model, judged, seconds=seconds, shape=self.shape)
            if self._is_deployed:
                count_deployment(self._versions, self._model, code, seconds)


def count_deployment(versions: RequestVersions, model: str, outcome: str, seconds: float = 0.0) -> None:
    """Count a request that a deployed version has answered or rejected."""
    choice = versions.of(model)
    if choice is not None and choice.target is not None:
        series(declarations.DEPLOYMENT_REQUESTS, model, choice.target.version, outcome).inc()
        if outcome == outcomes.OK:
            series(declarations.DEPLOYMENT_REQUEST_SECONDS, model, choice.target.version).observe(seconds)
