"""OpenAI's list of models: `GET /v1/models` and `GET /v1/models/{model}`, of all kinds."""

import asyncio
import time
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.frontend.engines.pool import PoolLoad
from noria.frontend.http.json_response import json_response
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.model_capabilities import (
    EncoderCapabilities,
    ModelCapabilities,
    capabilities_of,
    encoder_capabilities_of,
)
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.messages import ModelPrecision, ShapeCosts
from noria.protocol.model_spec import ModelSpec
from noria.protocol.text import EncoderModelSpec


class ModelCard(Struct, frozen=True):
    """OpenAI's description of a model. `noria` is Noria's addition: the bounds and defaults of the model."""

    id: str
    created: int
    noria: ModelCapabilities | EncoderCapabilities
    object: Literal["model"] = "model"
    owned_by: str = "noria"


class ModelDetail(Struct, frozen=True):
    """The response of `GET /v1/models/{model}`: OpenAI's fields, then the model's defaults, load and measured costs."""

    id: str
    created: int
    fingerprint: str
    default_width: int
    default_height: int
    default_steps: int
    default_guidance: float
    default_scheduler: str
    schedulers: tuple[str, ...]
    load: PoolLoad
    costs: list[ShapeCosts]  # one for each engine and size, in seconds
    noria: ModelCapabilities
    object: Literal["model"] = "model"
    owned_by: str = "noria"


class EncoderDetail(Struct, frozen=True):
    """The response of `GET /v1/models/{model}` for a text encoder."""

    id: str
    created: int
    fingerprint: str
    load: PoolLoad
    noria: EncoderCapabilities
    precision: ModelPrecision | None  # of the engines; null: none is ready
    object: Literal["model"] = "model"
    owned_by: str = "noria"


class ModelList(Struct, frozen=True):
    """The response of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelRoutes:
    """The routes under /v1/models."""

    def __init__(self, generation_service: GenerationService) -> None:
        self._generation_service = generation_service
        self._engine_pool, self._config = generation_service.engine_pool, generation_service.config
        self._created = int(time.time())

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [Route("/v1/models", self.models), Route("/v1/models/{model:path}", self.model)]

    async def models(self, _: Request) -> Response:
        """List the models served."""
        specs = list(self._engine_pool.models.values())
        if not specs:
            raise self._engine_pool.unavailable_error("a model")
        return json_response(ModelList([await self._card(spec) for spec in specs]))

    async def model(self, http: Request) -> Response:
        """Return one model by its name or alias, with its load and measured costs."""
        name = http.path_params["model"]
        spec = self._engine_pool.models.get(name) or self._generation_service.resolve_model(name)
        if isinstance(spec, EncoderModelSpec):
            load, capabilities = self._engine_pool.load(spec), encoder_capabilities_of(spec, self._config)
            precision = self._engine_pool.precision(spec)
            encoder = EncoderDetail(spec.name, self._created, spec.fingerprint, load, capabilities, precision)
            return json_response(encoder)
        assert isinstance(spec, DiffusionModelSpec)
        detail = ModelDetail(
            id=spec.name,
            created=self._created,
            fingerprint=spec.fingerprint,
            default_width=spec.default_width_px,
            default_height=spec.default_height_px,
            default_steps=spec.default_steps,
            default_guidance=spec.default_guidance,
            default_scheduler=spec.default_scheduler,
            schedulers=spec.schedulers,
            load=self._engine_pool.load(spec),
            costs=self._engine_pool.costs(spec),
            noria=await self._capabilities(spec),
        )
        return json_response(detail)

    async def _card(self, spec: ModelSpec) -> ModelCard:
        if isinstance(spec, EncoderModelSpec):
            return ModelCard(spec.name, self._created, encoder_capabilities_of(spec, self._config))
        assert isinstance(spec, DiffusionModelSpec)
        return ModelCard(spec.name, self._created, await self._capabilities(spec))

    async def _capabilities(self, spec: DiffusionModelSpec) -> ModelCapabilities:
        loras = await asyncio.to_thread(self._generation_service.loras.files, spec.name)  # reads folders
        controlnets = await asyncio.to_thread(self._generation_service.controlnets.for_model, spec)
        refiner = await asyncio.to_thread(self._generation_service.refiners.for_model, spec)
        return capabilities_of(spec, self._config, loras, controlnets, refiner and refiner.name)
