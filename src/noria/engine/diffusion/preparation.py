"""Prepares image requests for one loaded model, without its device: samplers, start images, LoRA adapters."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.image_state import BegunImage
from noria.engine.diffusion.input_images.controls import (
    ActiveControl,
    PreparedControl,
    active_controls,
    prepare_controls,
)
from noria.engine.diffusion.input_images.image_prompts import ImagePrompt, check_ip_adapter
from noria.engine.diffusion.input_images.references import ReferenceImages
from noria.engine.diffusion.input_images.start_latents import StartFrameReader, StartLatents, check_strength
from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapters
from noria.engine.diffusion.loras.model_loras import ModelLoras
from noria.engine.diffusion.request import (
    BaseImageRequest,
    ScheduledPrompt,
    preview_calls,
    reference_class_px,
    schedule_prompt,
)
from noria.engine.diffusion.sizing.slot_count import max_rows
from noria.engine.diffusion.upscaling.prepared_upscaling import PreparedUpscaling, UpscalingPreparer
from noria.engine.diffusion.upscaling.second_pass import PreparedSecondPass
from noria.engine.resources.priority import run_apart
from noria.errors import InvalidField, short_repr
from noria.models.adapters.embedding_folders import EmbeddingFolders
from noria.models.adapters.refiner_folders import NO_REFINER
from noria.models.diffusion.diffusion_model import DiffusionModel, ReferencedModel, RefinedModel
from noria.models.diffusion.prompts.clip_prompt import TextEmbedding
from noria.models.diffusion.unet_models.refiner import Refiner
from noria.models.diffusion.unet_models.text_embedding import load_embedding
from noria.protocol.diffusion import DiffusionPayload, SecondPass, Upscaling
from noria.protocol.request import ImageRequest
from noria.sampling.compile import compile_sampler, is_compiled
from noria.sampling.schedule import Schedule, switch_timestep
from noria.sampling.tables import SamplerTable, concatenate_tables
from noria.scheduling.types import BatchKey

_SamplerArguments = tuple[str, Mapping[str, object], int, Schedule, int | None, int | None]


@dataclass(frozen=True)
class PreparedImageRequest(BaseImageRequest):
    """A request with its compiled sampler."""

    table: SamplerTable
    latent_shape: tuple[int, int, int]  # [C, H, W] of an image, in its first pass
    prompts: tuple[ScheduledPrompt, ...]  # those that it joins, mostly one, as the model encodes them, as the next
    negative_prompt: ScheduledPrompt  # that of None: zeros, or not guided
    preview_calls: frozenset[int]  # calls after which its images get a preview
    call_size: tuple[int, int] | None = None  # see `DiffusionModel`
    adapters: Adapters = NO_ADAPTERS  # held, so that none is evicted
    start: StartLatents | None = None
    controls: tuple[PreparedControl, ...] = ()
    references: ReferenceImages | None = None
    image_prompt: ImagePrompt | None = None
    reference_px: int = 0  # pixels of reference images in the batch key
    second_stage_from: int | None = None
    second_pass: PreparedSecondPass | None = None
    embeddings: tuple[TextEmbedding, ...] = ()
    upscaling: PreparedUpscaling | None = None  # before the second pass or, without prompts, of an image that is sent
    begun: Mapping[int, BegunImage] = field(default_factory=dict)  # images that another engine has handed over

    @property
    def batch_key(self) -> BatchKey:
        """The batch key of all its images."""
        batch_key = super().batch_key._replace(reference_px=self.reference_px)
        return self.upscaling.tile_key(batch_key) if self.upscaling is not None and not self.prompts else batch_key

    @property
    def between(self) -> tuple[tuple[BatchKey, int], ...]:
        """The batch keys and numbers of the calls before a second pass that enlarge pixels."""
        if self.upscaling is None or self.second_pass is None:
            return ()
        width_px, height_px = self.request.payload.result_px
        return self.upscaling.stages(self.batch_key, self.batch_key._replace(width_px=width_px, height_px=height_px))

    @property
    def num_calls(self) -> int:
        """Model calls for each image."""
        return self.table.num_calls

    @property
    def num_prompts(self) -> int:
        """Prompts that each call has a row for, without the negative one; a tile is a row, too."""
        return len(self.prompts) or 1

    @property
    def longest_iteration_s(self) -> float:
        """Seconds that an iteration of tiles may take; 0: nothing is enlarged by a file."""
        return 0.0 if self.upscaling is None else self.upscaling.longest_iteration_s

    def calls_of_passes(self) -> tuple[int, int]:
        """Return the calls of its first and of its second pass."""
        return _calls_of_passes(self.table, self.second_stage_from, has_second=self.second_pass is not None)

    def stage_of(self, call: int) -> int:
        """Return 1 for a call of the refiner, else 0."""
        return int(self.second_pass is None and self._is_second(call))

    def pass_of(self, call: int) -> int:
        """Return 1 for a call of the second pass, else 0."""
        return int(self.second_pass is not None and self._is_second(call))

    def active_controls(self, call: int, model: DiffusionModel) -> list[ActiveControl]:
        """Return the controls that steer a call, which are none of a refiner's."""
        return [] if self.stage_of(call) else active_controls(self.controls, call, self.pass_of(call), model)

    def first_call_of(self, call: int) -> int:
        """Return the first call of the pass that makes `call`."""
        return self.second_stage_from or 0 if self.pass_of(call) else 0

    def shape_at(self, call: int) -> tuple[int, int, int]:
        """[C, H, W] of the latents before a call."""
        return self.second_pass.latent_shape if self.second_pass and self.pass_of(call) else self.latent_shape

    @property
    def largest_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of the latents of its largest pass."""
        return max(self.latent_shape, self.shape_at(self.num_calls), key=math.prod)

    def call_elsewhere(self, call: int) -> int:
        """Return the call at which an image goes on in another engine: its enlarged pixels do not move."""
        upscaling = self.upscaling
        return upscaling.first_call if upscaling is not None and (not self.prompts or upscaling.has(call)) else call

    def _is_second(self, call: int) -> bool:
        return self.second_stage_from is not None and call >= self.second_stage_from


class RequestPreparer:
    """Prepares requests on any thread; `config` has no "auto" left."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, loras: ModelLoras) -> None:
        assert isinstance(config.slots, int)
        self._model, self._loras = model, loras
        self._embeddings = EmbeddingFolders.of(config)
        self.max_images = config.slots + config.queue_limit  # images of one request, at most
        self.max_rows = max_rows(config)
        self._start_frames = StartFrameReader(inpainting=model.inpainting)
        self._upscalings = UpscalingPreparer(config, model.device, model.dtype)

    def prepare(self, request: ImageRequest, data: memoryview | None) -> PreparedImageRequest:
        """Compile the request's sampler (up to 1.5 s the first time), load its LoRAs (as long as reading their files).

        Raises `errors.InvalidField` if diffusers rejects it, if it has more images than slots and queue hold, if a LoRA
        cannot be loaded, a ControlNet or an IP-Adapter is not, or the images are not as the settings say;
        `errors.QueueFull` while those of other requests fill the cache or the memory.
        """
        payload = request.payload
        if payload.upscaling is not None:
            return self._prepare_upscaling(request, payload.upscaling, data)
        if payload.n > self.max_images:
            raise InvalidField(
                f"n is {payload.n}; this server's slots and queue hold at most {self.max_images} images", field="n"
            )
        if payload.reference_images and not isinstance(self._model, ReferencedModel):
            raise InvalidField(f"{request.model} takes no reference images", field="reference_images")
        check_ip_adapter(payload.ip_adapter, self._model, request.model)
        shape = self._model.latent_shape(payload.width, payload.height)
        frame = self._start_frames.read(payload, data, shape, is_limited=not request.was_moved)
        table, *of_second = [compile_sampler(*arguments) for arguments in self._samplers(payload, request.model)]
        # The start and the end of a ControlNet are parts of the calls that the model would make without its refiner.
        num_unrefined, second_stage_from, second_pass, upscaling = table.num_calls, None, None, None
        if payload.refiner is not None:
            table, second_stage_from = self._with_refiner(payload, table, *of_second)
        elif payload.second_pass is not None:
            second_pass, upscaling = self._second_pass(payload.second_pass, *of_second), self._upscaling(request, table)
            if upscaling is not None:
                table = concatenate_tables(table, table.num_calls, upscaling.table(table.scheduler))
            second_stage_from = table.num_calls
            table = concatenate_tables(table, table.num_calls, *of_second)
        guidance, embeddings = self._model.guidance, self._load_embeddings(payload, request.model)
        reference_px, size_px = payload.num_reference_pixels, payload.width * payload.height
        if self._model.call_size(size_px) is not None:  # else rows with equal keys must have equally many tokens
            reference_px = reference_class_px(reference_px)
        num_first, num_second = _calls_of_passes(table, second_stage_from, has_second=second_pass is not None)
        num_between = 0 if upscaling is None else upscaling.num_calls
        num_calls = num_first - num_between, num_second
        read = functools.partial(
            schedule_prompt, payload=payload, num_calls=num_calls, embeddings=embeddings, num_between=num_between
        )
        prompts = read(guidance.prompt_prefix + payload.prompt)
        self._check_joined(len(prompts), request.model)
        (negative_prompt,) = read(guidance.negative(payload.negative_prompt), is_joined=False)
        return PreparedImageRequest(
            request,
            guided=len(prompts) > 1 or guidance.is_active(payload.guidance_scale, payload.negative_prompt),
            table=table,
            latent_shape=shape,
            prompts=prompts,
            negative_prompt=negative_prompt,
            preview_calls=preview_calls(table.num_calls, payload.partial_images),
            call_size=self._model.call_size(size_px + reference_px),
            adapters=self._loras.load(payload.loras, request.model),
            start=frame.start,
            references=frame.references,
            image_prompt=frame.image_prompt,
            reference_px=reference_px,
            controls=prepare_controls(
                payload.controls,
                frame.controls,
                (num_unrefined, num_between, num_second),
                self._model,
                request.model,
            ),
            second_stage_from=second_stage_from,
            second_pass=second_pass,
            embeddings=embeddings,
            upscaling=upscaling,
        )

    def _prepare_upscaling(
        self, request: ImageRequest, wanted: Upscaling, data: memoryview | None
    ) -> PreparedImageRequest:
        """Prepare a request that only enlarges its image. Its slot has one number, which is none of the image."""
        payload = request.payload
        shape, num_bytes = (payload.height, payload.width, 3), len(data or b"")
        if num_bytes != math.prod(shape):
            raise InvalidField(
                f"the data has {num_bytes} bytes, and not the {math.prod(shape)} of its image", field="image"
            )
        upscaling = self._upscalings.prepare(
            wanted.upscaler,
            (payload.width, payload.height),
            payload.result_px,
            payload.n,
            "upscaling",
            max_rows=self.max_rows,
            pixels_HW3=torch.from_numpy(np.frombuffer(data or b"", np.uint8).reshape(shape).copy()),
            is_limited=not request.was_moved,
        )
        return PreparedImageRequest(
            request,
            guided=False,
            table=upscaling.table(payload.scheduler),
            latent_shape=(1, 1, 1),
            prompts=(),
            negative_prompt=ScheduledPrompt(()),
            preview_calls=frozenset(),
            upscaling=upscaling,
        )

    def _upscaling(self, request: ImageRequest, first: SamplerTable) -> PreparedUpscaling | None:
        """Return how pixels are enlarged between both passes; None: they are not. `first` is of the first pass."""
        payload = request.payload
        assert payload.second_pass is not None
        if payload.second_pass.pixel_upscaler is None:
            return None
        is_guided = self._model.guidance.is_active(payload.guidance_scale, payload.negative_prompt)
        return self._upscalings.prepare(
            payload.second_pass.pixel_upscaler,
            (payload.width, payload.height),
            payload.result_px,
            payload.n,
            "second_pass",
            max_rows=self.max_rows,
            first_call=first.num_calls,
            tiles_per_call=1 + is_guided,  # the rows of its other calls
            is_limited=not request.was_moved,
        )

    def _check_joined(self, num_prompts: int, model_name: str) -> None:
        """Raise InvalidField if a prompt joins more than calls have rows for."""
        if num_prompts == 1:
            return
        if self._model.guidance.embedded:
            raise InvalidField(
                f"prompt: AND joins {num_prompts} prompts, but {model_name} takes its guidance itself, with one "
                "prompt. Write it in small letters, or leave it out.",
                field="prompt",
            )
        if num_prompts + 1 > self.max_rows:
            raise InvalidField(
                f"prompt: AND joins {num_prompts} prompts, which take {num_prompts + 1} rows of a call; this server's "
                f"slots have memory for {self.max_rows}. Join fewer.",
                field="prompt",
            )

    def _load_embeddings(self, payload: DiffusionPayload, model_name: str) -> tuple[TextEmbedding, ...]:
        files = [self._embeddings.find(each, model_name) for each in payload.embeddings]
        # In a thread that ends, as samplers are compiled (ADR 5).
        return tuple(
            run_apart(functools.partial(load_embedding, each, file, self._model.lora_parts, model_name))
            for each, file in zip(payload.embeddings, files, strict=True)
        )

    def is_compiled(self, request: ImageRequest) -> bool:
        """Whether this scheduler with this number of steps, or its rejection, and all LoRAs are in the caches."""
        payload = request.payload
        if payload.upscaling is not None:
            return self._upscalings.has(payload.upscaling.upscaler)
        try:
            check_strength(payload)
            samplers = self._samplers(payload, request.model)
        except InvalidField:
            return True  # rejected at once
        upscaler = None if payload.second_pass is None else payload.second_pass.pixel_upscaler
        is_loaded = self._loras.cache.has(payload.loras) and (upscaler is None or self._upscalings.has(upscaler))
        return is_loaded and all(is_compiled(*arguments) for arguments in samplers)

    def _samplers(self, payload: DiffusionPayload, model_name: str) -> list[_SamplerArguments]:
        """Return the arguments of `compile_sampler` for the model and, if it is used, its refiner.

        Raises InvalidField: the model has no such refiner, or it cannot be used with a mask.
        """
        name, num_steps = payload.scheduler, payload.inference_steps
        first_step = None if payload.strength is None else payload.first_step  # None: it begins with noise
        schedule = self._model.schedule(payload.width, payload.height, num_steps)
        config, num_calls = self._model.scheduler_config, payload.num_calls
        samplers: list[_SamplerArguments] = [(name, config, num_steps, schedule, first_step, num_calls)]
        if payload.refiner is not None:
            refiner = check_refiner(payload, self._model, model_name)
            schedule = Schedule(begins_below=switch_timestep(payload.refiner.start, refiner.scheduler_config))
            samplers.append((name, refiner.scheduler_config, num_steps, schedule, None, None))
        elif (second := payload.second_pass) is not None:
            self._check_second_pass(payload, model_name)
            schedule = self._model.schedule(second.width, second.height, second.inference_steps)
            first_step = payload.first_step_of_second_pass
            samplers.append((name, config, second.inference_steps, schedule, first_step, None))
        return samplers

    def _check_second_pass(self, payload: DiffusionPayload, model_name: str) -> None:
        """Raise InvalidField if the model makes none for a request."""
        width_px, height_px = payload.result_px
        if self._model.call_size(width_px * height_px) is not None:
            raise InvalidField(
                f"second_pass: the calls of {model_name} take images of several sizes, and it makes no second pass. "
                "Leave it out.",
                field="second_pass",
            )
        if payload.strength is not None or payload.reference_images:
            raise InvalidField(
                "second_pass: start images and reference images have none; leave it or them out.", field="second_pass"
            )

    def _second_pass(self, second: SecondPass, table: SamplerTable) -> PreparedSecondPass:
        assert table.image_weights is not None, "a sampler that begins with an image"
        of_image, of_noise = map(float, table.image_weights[0])
        shape = self._model.latent_shape(second.width, second.height)
        return PreparedSecondPass(shape, of_image, of_noise, second.upscaler)

    def _with_refiner(
        self, payload: DiffusionPayload, table: SamplerTable, of_refiner: SamplerTable
    ) -> tuple[SamplerTable, int]:
        """Return the table of all calls, and how many of them are the model's.

        Raises InvalidField: the model makes none.
        """
        assert payload.refiner is not None
        start = payload.refiner.start
        num_calls = int((table.timesteps >= switch_timestep(start, self._model.scheduler_config)).sum())
        if not num_calls:
            raise InvalidField(
                f"refiner: its start {start} leaves no step to the model, which begins at timestep "
                f"{table.timesteps[0]:g}. Use a larger start, or a strength nearer to 1.",
                field="refiner",
            )
        return concatenate_tables(table, num_calls, of_refiner), num_calls


def _calls_of_passes(table: SamplerTable, second_stage_from: int | None, *, has_second: bool) -> tuple[int, int]:
    """Return the calls of the first and of the second pass; those of a refiner are of the first one."""
    num_second = table.num_calls - (second_stage_from or 0) if has_second else 0
    return table.num_calls - num_second, num_second


def refiner_of(model: DiffusionModel) -> Refiner | None:
    """Return the refiner that is loaded with a model."""
    return model.refiner if isinstance(model, RefinedModel) else None


def check_refiner(payload: DiffusionPayload, model: DiffusionModel, model_name: str) -> Refiner:
    """Return the refiner of a model. Raises `errors.InvalidField` if it has none, another one, or there is a mask."""
    refinement, refiner = payload.refiner, refiner_of(model)
    assert refinement is not None
    if refiner is None:
        raise InvalidField(f"refiner: {model_name} has no refiner loaded: {NO_REFINER}.", field="refiner")
    if refinement.digest not in (None, refiner.digest):
        raise InvalidField(
            f"refiner: {short_repr(refinement.name)} has digest {short_repr(refinement.digest)} on disk, but "
            f"{refiner.digest} is loaded. Restart the server to use the new files.",
            field="refiner",
        )
    if payload.has_mask:
        raise InvalidField("refiner: images with a mask cannot be refined; leave one of them out.", field="refiner")
    return refiner
