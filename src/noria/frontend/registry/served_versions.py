"""The server's own knowledge of versions: which engine holds which, and how many requests each has answered."""

from collections.abc import Iterator

from msgspec import Struct

from noria.config import Config
from noria.frontend.engines.submission import Submission
from noria.observe.metrics.exposition import samples
from noria.protocol.model_spec import ModelSpec


class HeldModel(Struct, frozen=True):
    """A model that an engine holds."""

    name: str  # the endpoint that it serves
    kind: str
    fingerprint: str
    folder: str
    version: str | None  # MODEL@NUMBER of the registry; None: it is of the configuration
    deployment: int | None


class EngineModels(Struct, frozen=True):
    """An engine and what it holds, as it last reported."""

    engine: int
    state: str  # "unknown", "loading", "ready" or "draining"
    device: str | None
    models: list[HeldModel]


class AnsweredRequests(Struct, frozen=True):
    """Requests since the server's start."""

    endpoint: str
    version: str | None  # MODEL@NUMBER; None: all of the endpoint, whatever answered them, and its jobs
    by_outcome: dict[str, int]  # "ok", or the code of an error


class ServedVersions(Struct, frozen=True):
    """The versions that a server serves, and the requests that they have answered."""

    carries_out_deployments: bool
    engines: list[EngineModels]
    requests: list[AnsweredRequests]


class ServedVersionsService:
    """Reads what engines hold, and the counters of all front ends."""

    def __init__(self, submission: Submission, config: Config) -> None:
        self._submission, self._config = submission, config

    def engines(self) -> list[EngineModels]:
        """Return the models that each engine holds; to be called in the event loop."""
        return [
            EngineModels(number, status.state, status.device, [self._held(spec) for spec in models])
            for number, (status, models) in enumerate(self._submission.engine_pool.held_models())
        ]

    def _held(self, spec: ModelSpec) -> HeldModel:
        target = self._submission.versions.target_of(spec)
        version, deployment = (None, None) if target is None else (target.version, target.deployment)
        return HeldModel(spec.name, spec.kind, spec.fingerprint, spec.folder, version, deployment)

    def read(self, engines: list[EngineModels]) -> ServedVersions:
        """Return all, with counters from their files. Blocks."""
        return ServedVersions(self._config.registry.deployments, engines, list(_answered()))


def _answered() -> Iterator[AnsweredRequests]:
    """Yield what is counted, of endpoints as a whole, then of their deployed versions; without what is 0."""
    counts: dict[tuple[str, str | None], dict[str, int]] = {}
    all_samples = samples()
    for name in ("noria_requests_total", "noria_deployment_requests_total"):
        for sample in all_samples:
            if sample.name == name and sample.value:
                outcomes = counts.setdefault((sample.labels["model"], sample.labels.get("version")), {})
                outcomes[sample.labels["outcome"]] = int(sample.value)
    for (endpoint, version), outcomes in counts.items():
        yield AnsweredRequests(endpoint, version, outcomes)
