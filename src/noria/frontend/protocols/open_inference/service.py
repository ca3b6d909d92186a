"""The operations of the protocol, which REST and gRPC share: finds models, asks the encoding service, reads metrics."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from noria.errors import ModelNotFound, OperationNotSupported, short_repr
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http.body import apply_headers
from noria.frontend.protocols.open_inference.inference import InferenceRequest, as_settings, outputs_of
from noria.frontend.protocols.open_inference.model_metadata import (
    VERSION,
    index_entry,
    model_config,
    statistics,
)
from noria.frontend.protocols.open_inference.tensors import OutputTensor
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.observe.metrics.exposition import samples
from noria.protocol.text import EncoderModelSpec


class OpenInferenceService:
    """The text encoders of a server, by the Open Inference Protocol."""

    def __init__(self, encoding_service: EncodingService) -> None:
        self._encoding_service, self.respond = encoding_service, encoding_service.respond

    @property
    def is_ready(self) -> bool:
        """Whether of each kind of model that is served an engine is ready."""
        return self._encoding_service.engine_pool.ready

    def find(self, context: RequestContext, name: str, version: str = "") -> EncoderModelSpec:
        """Return a model; an empty version is any.

        Raises:
            EngineUnavailable: no engine has been ready yet.
            ModelNotFound: no such model, or not in this version.

        """
        spec = self._encoding_service.find_model(name, context)
        if version not in ("", VERSION):
            raise ModelNotFound(
                f"model {spec.name!r} has no version {short_repr(version)}; its one version is {VERSION!r}, or leave "
                "it out.",
                field="model",
            )
        return spec

    def is_model_ready(self, spec: EncoderModelSpec) -> bool:
        """Whether an engine that holds the model is ready."""
        return spec.key in self._encoding_service.engine_pool.ready_models()

    def config(self, spec: EncoderModelSpec) -> dict[str, Any]:
        """Return the configuration of a model, in Triton's form."""
        return model_config(spec, self._encoding_service.config.max_texts)

    async def statistics(self, specs: Sequence[EncoderModelSpec]) -> dict[str, Any]:
        """Return the statistics of models, summed over all front ends."""
        all_samples = await asyncio.to_thread(samples)
        return {"model_stats": [statistics(spec, all_samples) for spec in specs]}

    def index(self, *, only_ready: bool = False) -> list[dict[str, Any]]:
        """Return the index of models: text encoders, the default one first."""
        entries = [
            index_entry(spec, is_ready=self.is_model_ready(spec)) for spec in self._encoding_service.models.values()
        ]
        return [entry for entry in entries if entry["state"] == "READY" or not only_ready]

    @property
    def models(self) -> Sequence[EncoderModelSpec]:
        """The text encoders, the default one first."""
        return list(self._encoding_service.models.values())

    def reject_model_control(self) -> NoReturn:
        """Raise OperationNotSupported: the registry decides what is loaded."""
        raise OperationNotSupported(
            "models are loaded by noria serve MODEL --additional-models MODEL,… and by noria deploy ENDPOINT VERSION."
        )

    async def infer(
        self,
        spec: EncoderModelSpec,
        request: InferenceRequest,
        context: RequestContext,
        headers: Mapping[str, str],
        within_s: Callable[[], float | None] = lambda: None,
    ) -> tuple[EncodingResult, list[OutputTensor]]:
        """Compute a request, whose client waits for at most `within_s()` (None: not said). Cancelling this cancels it.

        Raises NoriaError: the request was rejected or failed.
        """
        config = self._encoding_service.config
        settings = apply_headers(as_settings(request, spec, config), headers)
        remaining_s = within_s()
        if remaining_s is not None and 1000 * remaining_s < (settings.deadline_ms or 1000 * config.request_timeout_s):
            settings = msgspec.structs.replace(settings, deadline_ms=max(1, int(1000 * remaining_s)))
        result = await self._encoding_service.encode(settings, (spec.task,), context)
        return result, outputs_of(result, request.outputs)
