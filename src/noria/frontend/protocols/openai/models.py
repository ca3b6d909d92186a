"""OpenAI's list of models: `GET /v1/models` and `GET /v1/models/{model}`, of all kinds.

The limits of a model's capabilities are those that `request_validation.py` enforces, so a form built from them sends
nothing that is rejected.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.errors import EngineUnavailable, ModelNotFound
from noria.frontend.engines.load_reports import PoolLoad
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.submission import DEFAULT_MODEL_ALIAS, not_served
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import Operation, parameter
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.request_images import MAX_CONTROL_SCALE, MAX_CONTROLS
from noria.frontend.services.images.request_validation import MAX_LORA_WEIGHT, MAX_LORAS, limits
from noria.images import scheduler_names
from noria.images.image_file import MAX_PIXELS, MAX_SIDE_PX
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.messages import ModelPrecision, ShapeCosts
from noria.protocol.model_spec import CallChoice, ModelSpec
from noria.protocol.text import EncoderModelSpec, EncoderTask


class Bounds(Struct, frozen=True):
    """The allowed values of a setting: `min` to `max`, in multiples of `multiple`. `default` is null if it varies."""

    min: float
    max: float
    multiple: int
    default: float | None


class SchedulerInfo(Struct, frozen=True):
    """A scheduler that the model supports."""

    name: str
    description: str


class StartImageLimits(Struct, frozen=True):
    """The limits of a start image and its mask; `settings` has the bounds of their strength."""

    max_bytes: int  # bytes of all images of a request together
    max_pixels: int  # pixels of each image
    max_side_px: int
    default_strength: float  # if there is an image
    needs_mask: bool  # whether each request needs an image and a mask, as those of a model for inpainting do


class ModelCapabilities(Struct, frozen=True, tag_field="kind", tag="diffusion"):
    """Facts about an image model that forms and clients need. The keys of `settings` are fields of `POST /t2i`."""

    version: str  # the model's fingerprint
    pipeline: str  # its diffusers class
    settings: dict[str, Bounds]
    default_scheduler: str
    schedulers: list[SchedulerInfo]
    max_prompt_chars: int
    loras: list[str]  # names of adapters
    max_loras: int  # adapters of a request
    max_lora_weight: float  # and its negative is the least
    start_image: StartImageLimits | None  # None: it cannot begin with one
    controlnets: list[str]  # their names
    ip_adapters: list[str]  # likewise
    max_references: int  # reference images of a request; 0: it takes none
    refiner: str | None  # its name; null: there is none
    max_controls: int  # controls of a request
    max_control_scale: float  # also of an IP-Adapter


class EncoderCapabilities(Struct, frozen=True, tag_field="kind", tag="encoder"):
    """Facts about a text encoder that clients need."""

    version: str  # the model's fingerprint
    task: EncoderTask
    architecture: str  # its transformers class
    dimensions: int  # length of an embedding, or the number of labels
    max_length: int  # tokens of a text, special tokens included
    max_texts: int  # texts of a request
    prompts: list[str]  # names
    default_prompt: str | None
    labels: list[str]


def encoder_capabilities_of(spec: EncoderModelSpec, config: FrontendConfig) -> EncoderCapabilities:
    """Return what the encoder accepts behind a front end with this `config`."""
    return EncoderCapabilities(
        version=spec.fingerprint,
        task=spec.task,
        architecture=spec.architecture,
        dimensions=spec.dimensions,
        max_length=spec.max_length,
        max_texts=config.max_texts,
        prompts=[name for name, _ in spec.prompts],
        default_prompt=spec.default_prompt,
        labels=list(spec.labels),
    )


def capabilities_of(
    spec: DiffusionModelSpec,
    config: FrontendConfig,
    loras: Iterable[str],
    controlnets: Iterable[str],
    refiner: str | None = None,
    ip_adapters: Iterable[str] = (),
) -> ModelCapabilities:
    """Return what the model accepts behind a front end with this `config`.

    `loras`, `controlnets` and `ip_adapters` are the names of its adapters, `refiner` is that of its refiner.
    """
    return ModelCapabilities(
        version=spec.fingerprint,
        pipeline=spec.pipeline,
        settings={
            field: Bounds(allowed.min, allowed.max, allowed.multiple, allowed.default)
            for field, allowed in limits(spec, config).items()
        },
        default_scheduler=spec.default_scheduler,
        schedulers=[SchedulerInfo(name, scheduler_names.find(name).description) for name in spec.schedulers],
        max_prompt_chars=config.max_prompt_chars,
        loras=list(loras) if spec.takes_loras else [],
        max_loras=MAX_LORAS,
        max_lora_weight=MAX_LORA_WEIGHT,
        start_image=StartImageLimits(
            config.max_image_bytes, MAX_PIXELS, MAX_SIDE_PX, spec.default_strength, spec.needs_mask
        )
        if spec.takes_start_images
        else None,
        controlnets=list(controlnets),
        ip_adapters=list(ip_adapters),
        max_references=spec.max_references,
        refiner=refiner,
        max_controls=MAX_CONTROLS,
        max_control_scale=MAX_CONTROL_SCALE,
    )


class ModelCard(Struct, frozen=True):
    """OpenAI's description of a model. `noria` is Noria's addition: the bounds and defaults of the model.

    It is null of a checkpoint (`engine.checkpoints`) that no request has named yet. `loaded`: an engine holds it.
    """

    id: str
    created: int
    loaded: bool
    noria: ModelCapabilities | EncoderCapabilities | None
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
    precision: ModelPrecision | None  # that of a model which engines quantize; null: they do not, or none is ready
    call_choice: CallChoice | None  # the measured one, with engine.compile_blocks "auto"; null: no, or none is ready
    object: Literal["model"] = "model"
    owned_by: str = "noria"


class EncoderDetail(Struct, frozen=True):
    """The response of `GET /v1/models/{model}` for a text encoder."""

    id: str
    created: int
    fingerprint: str
    load: PoolLoad
    noria: EncoderCapabilities
    precision: ModelPrecision | None  # precision of the engines; null: none is ready
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
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        return [
            Operation(
                method="GET",
                path="/v1/models",
                handler=self._models,
                group="Models",
                scopes=(),
                summary="List the models served",
                description="In the form of OpenAI's API; `noria` has each model's bounds, defaults and schedulers.",
                response=ModelList,
                errors=[EngineUnavailable],
            ),
            Operation(
                method="GET",
                path="/v1/models/{model:path}",
                handler=self._model,
                group="Models",
                scopes=(),
                summary="Get one model",
                description="By its name, or `noria` for the first one; with the load of its engines, and the measured "
                "costs in seconds. A checkpoint that no request has named is as in the list.",
                parameters=[parameter("model", "path")],
                response=(ModelDetail, EncoderDetail, ModelCard),
                errors=[ModelNotFound, EngineUnavailable],
            ),
        ]

    async def _models(self, _: Request) -> Response:
        specs = list(self._engine_pool.models.values())
        if not specs:
            raise self._engine_pool.unavailable_error("a model")
        unopened = self._generation_service.submission.checkpoints.unopened
        cards = [ModelCard(name, self._created, loaded=False, noria=None) for name in unopened]
        return json_response(ModelList([*[await self._card(spec) for spec in specs], *cards]))

    async def _model(self, http: Request) -> Response:
        name, context = http.path_params["model"], http.state.context
        if name in self._generation_service.submission.checkpoints.unopened:
            return json_response(ModelCard(name, self._created, loaded=False, noria=None))
        spec = self._find(name, context)
        if isinstance(spec, EncoderModelSpec):
            load, capabilities = self._engine_pool.reports.load(spec), encoder_capabilities_of(spec, self._config)
            precision = self._engine_pool.reports.precision(spec)
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
            load=self._engine_pool.reports.load(spec),
            costs=self._engine_pool.reports.costs(spec),
            noria=await self._capabilities(spec),
            precision=self._engine_pool.reports.precision(spec),
            call_choice=self._engine_pool.reports.call_choice(spec),
        )
        return json_response(detail)

    def _find(self, name: str, context: RequestContext) -> ModelSpec:
        """Return the model of any kind. Raises ModelNotFound, and EngineUnavailable as long as none is known."""
        models = self._engine_pool.models
        if name in models:
            return models[name]
        if models and name != DEFAULT_MODEL_ALIAS:
            raise not_served(name, [*models, *self._generation_service.submission.checkpoints.unopened])
        has_images = self._engine_pool.serves(DiffusionModelSpec)
        return self._generation_service.submission.resolve_model(
            DiffusionModelSpec if has_images else EncoderModelSpec, name, (), context.versions
        )

    async def _card(self, spec: ModelSpec) -> ModelCard:
        is_loaded = self._engine_pool.find_ready(spec.name, spec.fingerprint) is not None
        if isinstance(spec, EncoderModelSpec):
            return ModelCard(spec.name, self._created, is_loaded, encoder_capabilities_of(spec, self._config))
        assert isinstance(spec, DiffusionModelSpec)
        return ModelCard(spec.name, self._created, is_loaded, await self._capabilities(spec))

    async def _capabilities(self, spec: DiffusionModelSpec) -> ModelCapabilities:
        loras = await asyncio.to_thread(self._generation_service.folders.loras.files, spec.name)  # reads folders
        controlnets = await asyncio.to_thread(self._generation_service.folders.controlnets.for_model, spec)
        refiner = await asyncio.to_thread(self._generation_service.folders.refiners.for_model, spec)
        ip_adapters = await asyncio.to_thread(self._generation_service.folders.ip_adapters.for_model, spec)
        return capabilities_of(spec, self._config, loras, controlnets, refiner and refiner.name, ip_adapters)
