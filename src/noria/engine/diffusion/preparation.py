"""Prepares image requests for one loaded model, without its device: samplers, start images, LoRA adapters."""

from dataclasses import dataclass

from noria.config import EngineConfig
from noria.engine.diffusion.controls import PreparedControl, prepare_controls
from noria.engine.diffusion.lora_cache import NO_ADAPTERS, Adapters
from noria.engine.diffusion.model_loras import ModelLoras
from noria.engine.diffusion.request import BaseImageRequest, preview_calls
from noria.engine.diffusion.start_latents import StartFrameReader, StartLatents, check_strength
from noria.errors import InvalidField
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.protocol.diffusion import DiffusionPayload
from noria.protocol.request import ImageRequest
from noria.sampling.compile import compile_sampler, is_compiled
from noria.sampling.schedule import Schedule
from noria.sampling.tables import SamplerTable


@dataclass(frozen=True)
class PreparedImageRequest(BaseImageRequest):
    """A request with its compiled sampler."""

    table: SamplerTable
    latent_shape: tuple[int, int, int]  # [C, H, W] of an image
    prompt: str  # as the model encodes it, as the next
    negative_prompt: str | None  # None: zeros, or not guided
    preview_calls: frozenset[int]  # calls after which its images get a preview
    call_size: tuple[int, int] | None  # see `DiffusionModel`
    adapters: Adapters = NO_ADAPTERS  # held, so that none is evicted
    start: StartLatents | None = None
    controls: tuple[PreparedControl, ...] = ()

    @property
    def num_calls(self) -> int:
        """Model calls for each image."""
        return self.table.num_calls


class RequestPreparer:
    """Prepares requests on any thread; `config` has no "auto" left."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, loras: ModelLoras) -> None:
        assert isinstance(config.slots, int)
        self._model, self._loras = model, loras
        self._max_images = config.slots + config.queue_limit  # of a request
        self._start_frames = StartFrameReader(inpainting=model.inpainting)

    def prepare(self, request: ImageRequest, data: memoryview | None) -> PreparedImageRequest:
        """Compile the request's sampler (up to 1.5 s the first time), load its LoRAs (as long as reading their files).

        Raises `errors.InvalidField` if diffusers rejects it, if it has more images than slots and queue hold, if a LoRA
        cannot be loaded, a ControlNet is not, or the images are not as the settings say; `errors.QueueFull` while those
        of other requests fill the cache or the memory.
        """
        payload = request.payload
        if payload.n > self._max_images:
            raise InvalidField(
                f"n is {payload.n}; this server's slots and queue hold at most {self._max_images} images", field="n"
            )
        shape = self._model.latent_shape(payload.width, payload.height)
        start, control_images = self._start_frames.read(payload, data, shape)
        table = compile_sampler(
            payload.scheduler,
            self._model.scheduler_config,
            payload.inference_steps,
            self._schedule(payload),
            _first_step(payload),
        )
        guidance = self._model.guidance
        return PreparedImageRequest(
            request,
            guided=guidance.is_active(payload.guidance_scale, payload.negative_prompt),
            table=table,
            latent_shape=shape,
            prompt=guidance.prompt_prefix + payload.prompt,
            negative_prompt=guidance.negative(payload.negative_prompt),
            preview_calls=preview_calls(table.num_calls, payload.partial_images),
            call_size=self._model.call_size(payload.width, payload.height),
            adapters=self._loras.load(payload.loras, request.model),
            start=start,
            controls=prepare_controls(payload.controls, control_images, table.num_calls, self._model, request.model),
        )

    def is_compiled(self, request: ImageRequest) -> bool:
        """Whether this scheduler with this number of steps, or its rejection, and all LoRAs are in the caches."""
        payload = request.payload
        try:
            check_strength(payload)
        except InvalidField:
            return True  # rejected at once
        return self._loras.cache.has(payload.loras) and is_compiled(
            payload.scheduler,
            self._model.scheduler_config,
            payload.inference_steps,
            self._schedule(payload),
            _first_step(payload),
        )

    def _schedule(self, payload: DiffusionPayload) -> Schedule:
        return self._model.schedule(payload.width, payload.height, payload.inference_steps)


def _first_step(payload: DiffusionPayload) -> int | None:
    """Return the step with which a sampler begins that is given an image; None: it begins with noise."""
    return None if payload.strength is None else payload.first_step
