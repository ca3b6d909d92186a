"""The diffusion executor: executes iterations on one device, for any mix of requests of one model.

A step gathers the current samples of its images, makes one UNet call (two rows for a guided image), combines guidance,
and applies to each image the current row of its sampler's table, all in one weighted sum. There is no loop over
requests on the device.

Shapes: B images of a step, R UNet rows, E elements of the C × H × W latents of an image.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.device_transfer import HostPixels, to_host
from noria.engine.diffusion.latents import LatentSlots
from noria.engine.diffusion.masked_images import MaskedImages
from noria.engine.diffusion.model_loras import ModelLoras, prompt_key
from noria.engine.diffusion.preparation import PreparedImageRequest, RequestPreparer
from noria.engine.diffusion.prompt_embeddings import CollatedRows, PromptEmbeddingCache
from noria.engine.diffusion.results import DecodedImage, PreviewPixels
from noria.engine.diffusion.timing import DeviceStopwatch, HostStopwatch, PipelineFillDetector
from noria.engine.resources.out_of_memory import is_out_of_memory
from noria.engine.runtime import THUMBNAIL_MAX_PX
from noria.models.diffusion.conditioning import Conditioning
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.observe.logs.log_record import fields
from noria.protocol.request import ImageRequest
from noria.sampling.noise import NoiseStream
from noria.sampling.previews import clean_latents, downscale, preview_pixels
from noria.sampling.step import advance, init_slot, model_inputs, samples
from noria.sampling.tables import fold, window_of
from noria.scheduling.types import BatchKey, ItemId, IterationPlan, IterationResult, Phase, SlotAssignment, Step

_log = logging.getLogger(__name__)
# Iterations that the loop may be ahead of a GPU: enough to keep it busy, few enough that a new request joins soon.
_MAX_ITERATIONS_AHEAD = 2


@dataclass(frozen=True)
class _ImageConditioning:
    """What an image is conditioned on."""

    prompt: Conditioning
    negative: Conditioning | None  # None: not guided


def _scales(prepared: list[PreparedImageRequest]) -> np.ndarray:
    """Return the guidance scales, [B] float32."""
    return np.array([p.request.payload.guidance_scale for p in prepared], np.float32)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class DiffusionExecutor:
    """The `Executor` of one model on one device; `config` has no "auto" left."""

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        assert isinstance(config.slots, int)
        self.model = model
        self.config = config
        self._buckets = sorted(config.buckets)
        self._requests: dict[str, PreparedImageRequest] = {}
        self._noise: dict[ItemId, NoiseStream] = {}
        self._latents = LatentSlots(config.slots, model.device)
        self._conditioning: dict[ItemId, _ImageConditioning] = {}  # of running images
        self._rows = CollatedRows()
        self._masked_images = MaskedImages(model)
        self._loras = ModelLoras(model, config)
        self._preparer = RequestPreparer(model, config, self._loras)
        self._embeddings = PromptEmbeddingCache(
            self._loras.text_encode, config.embedding_cache_bytes, 8 if self._buckets else None
        )
        self._decoded: dict[ItemId, HostPixels] = {}
        self._pending_events: deque[torch.cuda.Event] = deque()
        self._fill_detector = PipelineFillDetector(_MAX_ITERATIONS_AHEAD)
        self._previews: list[PreviewPixels] = []
        self._thumbnails: list[PreviewPixels] = []
        self._grad_mode = torch.inference_mode if config.inference_mode else torch.no_grad
        # Whether to wait for the device after each phase, which can then be timed by the host's clock.
        self.is_synchronous = model.device.type == "cpu"

    def prepare(self, request: ImageRequest, data: memoryview | None = None) -> PreparedImageRequest:
        """Prepare a request as `RequestPreparer` does; `data` is its start image."""
        return self._preparer.prepare(request, data)

    def is_compiled(self, request: ImageRequest) -> bool:
        """Whether all that takes long is in the caches."""
        return self._preparer.is_compiled(request)

    def accept(self, prepared: PreparedImageRequest) -> None:
        """Keep a request until `forget`."""
        self._requests[prepared.request.attempt_id] = prepared

    def forget(self, attempt_id: str) -> None:
        """Release what is held for a request; its slots are overwritten by the next images in them."""
        request = self._requests.pop(attempt_id).request
        for index in range(request.payload.n):
            self._noise.pop(ItemId(attempt_id, index), None)
            self._conditioning.pop(ItemId(attempt_id, index), None)
            self._decoded.pop(ItemId(attempt_id, index), None)
            self._masked_images.end(ItemId(attempt_id, index))
        if request.payload.loras and not any(prepared.adapters for prepared in self._requests.values()):
            self._loras.release()

    def take_result(self, image: ItemId) -> DecodedImage:
        """An image that the last iteration decoded; each can be taken once."""
        return DecodedImage(self._requests[image.attempt_id].request, image.index, self._decoded.pop(image))

    def previews(self) -> list[PreviewPixels]:
        """The previews of the last iteration; they are returned once."""
        previews, self._previews = self._previews, []
        return previews

    def thumbnails(self) -> list[PreviewPixels]:
        """The thumbnails of the last iteration; they are returned once."""
        thumbnails, self._thumbnails = self._thumbnails, []
        return thumbnails

    def memory_bytes(self) -> int:
        """GPU memory that torch has reserved, in use or cached; on a CPU the resident memory of this process."""
        if self.model.device.type == "cuda":
            return torch.cuda.memory_reserved(self.model.device)
        resident: int = psutil.Process().memory_info().rss
        return resident

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Execute joins, steps and decodes. An exception in one phase fails the images of that phase, and no others.

        A phase that does not fit the memory ends the iteration without having changed anything, so that it can be
        planned again in smaller batches.
        """
        failed: dict[ItemId, str] = {}
        began = time.perf_counter()
        self._fill_detector.begin_iteration(began)
        stopwatch = HostStopwatch() if self.is_synchronous else DeviceStopwatch()

        def run_phase(phase: Phase, action: Callable[[], None], images: list[ItemId]) -> bool:
            with stopwatch.timing(phase):
                return self._run_phase(action, images, failed)

        with self._grad_mode():
            joining = [assignment.image for assignment in plan.joins]
            if joining and not run_phase("joins", lambda: self._join(plan.joins), joining):
                return IterationResult(failed, "joins")
            join_s = time.perf_counter() - began
            steps = [step for step in plan.steps if step.image not in failed]
            stepping = [step.image for step in steps]
            if steps and not run_phase("steps", lambda: self._step(steps, with_thumbnails=with_thumbnails), stepping):
                return IterationResult(failed, "steps", phase_timings=stopwatch.timings())
            decodes = [assignment for assignment in plan.decodes if assignment.image not in failed]
            decoding = [assignment.image for assignment in decodes]
            if decodes and not run_phase("decodes", lambda: self._decode(decodes), decoding):
                return IterationResult(failed, "decodes", phase_timings=stopwatch.timings())
            self._limit_run_ahead()
        is_timed = self._fill_detector.end_iteration(time.perf_counter()) or self.is_synchronous
        return IterationResult(failed, is_timed=is_timed, phase_timings=stopwatch.timings(), join_s=join_s)

    def _run_phase(self, action: Callable[[], None], images: list[ItemId], failed: dict[ItemId, str]) -> bool:
        """Run `action`; add its `images` to `failed` if it raises. Returns whether it fitted the memory."""
        fits = True
        try:
            action()
            if self.is_synchronous and self.model.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # torch, tokenizers and diffusers raise many types, and none may end the engine
            fits = not is_out_of_memory(error)
            if fits:
                _log.exception(
                    "an iteration failed for %d images", len(images), extra=self._log_fields("iteration_failed", images)
                )
                failed |= dict.fromkeys(images, f"the model failed: {_first_line(error)}")
            else:
                log_fields = self._log_fields("out_of_memory", images)
                _log.warning("%d images do not fit the memory: %s", len(images), _first_line(error), extra=log_fields)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize()  # raises if this process has lost the device: then it exits and is restarted
        if not fits and self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # not inside the handler: the exception keeps its tensors alive
        return fits

    def _join(self, assignments: Iterable[SlotAssignment]) -> None:
        assignments = list(assignments)
        requests = [self._requests[assignment.image.attempt_id] for assignment in assignments]
        embeddings = self._embeddings.get(
            prompt_key(text, p.adapters)
            for p in requests
            for text in ([p.negative_prompt] if p.guided else []) + [p.request.payload.prompt]
        )
        for assignment, prepared in zip(assignments, requests, strict=True):
            payload = prepared.request.payload
            prompt = embeddings[prompt_key(payload.prompt, prepared.adapters)]
            negative = embeddings[prompt_key(prepared.negative_prompt, prepared.adapters)] if prepared.guided else None
            self._conditioning[assignment.image] = _ImageConditioning(prompt, negative)
            shape = prepared.latent_shape
            history = self._latents.join(prepared.batch_key, shape, prepared.table.window, self._keys_in_use())
            noise = NoiseStream(payload.seed, shape, self.model.dtype, image=assignment.image.index)
            self._noise[assignment.image] = noise
            start = self._masked_images.begin(assignment.image, prepared, noise)
            init_slot(history, assignment.slot, start)

    def _step(self, steps: list[Step], *, with_thumbnails: bool) -> None:
        prepared = [self._requests[step.image.attempt_id] for step in steps]
        history, shape = self._latents[prepared[0].batch_key], prepared[0].latent_shape
        slots, calls = [step.slot for step in steps], [step.call for step in steps]
        slots_B, calls_B = self._to_device(slots), self._to_device(calls)
        scales_B = self._to_device(
            np.array([p.table.input_scale[c] for p, c in zip(prepared, calls, strict=True)], np.float32)
        )
        inputs_BCHW = model_inputs(history, slots_B, calls_B, scales_B).reshape(-1, *shape)
        timesteps = np.array([p.table.timesteps[c] for p, c in zip(prepared, calls, strict=True)], np.float32)
        outputs_BCHW = self._predict(inputs_BCHW, prepared, [step.image for step in steps], timesteps)
        preview_indices = [
            b for b, step in enumerate(steps) if step.call in self._requests[step.image.attempt_id].preview_calls
        ]
        previews = self._make_previews(steps, preview_indices, inputs_BCHW, outputs_BCHW, timesteps)
        thumbnail_indices = range(len(steps)) if with_thumbnails else ()
        thumbnails = self._make_previews(
            steps, thumbnail_indices, inputs_BCHW, outputs_BCHW, timesteps, max_px=THUMBNAIL_MAX_PX
        )
        rows = np.stack([p.table.coefficients[c] for p, c in zip(prepared, calls, strict=True)])
        coefficients_BK = self._to_device(fold(rows, window_of(history.shape[1])))
        noise_BE, kept = self._draw_noise(steps, prepared), self._masked_images.kept(steps, prepared)
        advance(history, slots_B, calls_B, outputs_BCHW.flatten(1), noise_BE, coefficients_BK, kept)
        # `advance` and these come last: a step that runs out of memory is repeated, unless it has advanced.
        self._previews += previews
        self._thumbnails += thumbnails

    def _predict(
        self,
        inputs_BCHW: torch.Tensor,
        prepared: list[PreparedImageRequest],
        image_ids: list[ItemId],
        timesteps: np.ndarray,
    ) -> torch.Tensor:
        """One UNet call with guidance applied: [B, C, H, W] float32.

        Rows: negative prompts of guided images, then all prompts.
        """
        texts = [self._conditioning[image] for image in image_ids]
        negatives = [(b, text.negative) for b, text in enumerate(texts) if text.negative is not None]
        guided = [b for b, _ in negatives]
        images = guided + list(range(len(prepared)))
        rows = [negative for _, negative in negatives] + [text.prompt for text in texts]
        padding = self._bucket(len(images)) - len(images)
        images_R = self._to_device(images + images[:1] * padding)
        conditioning = self._rows.get(rows + rows[:1] * padding)
        adapters = [prepared[b].adapters for b in images + images[:1] * padding]
        with self._loras.denoising(adapters):
            outputs_RCHW = self.model.predict(
                inputs_BCHW[images_R],
                self._to_device(timesteps)[images_R],
                conditioning,
                self._to_device(_scales(prepared))[images_R] if self.model.guidance.embedded else None,
            ).float()
        prompted = outputs_RCHW[len(guided) : len(images)]
        if not guided:
            return prompted
        negative = {b: row for row, b in enumerate(guided)}
        negative_B = self._to_device([negative.get(b, len(guided) + b) for b in range(len(prepared))])
        scales = np.where([p.guided for p in prepared], _scales(prepared), np.float32(1.0))
        return self.model.guidance.combine(prompted, outputs_RCHW[negative_B], self._to_device(scales))

    def _make_previews(
        self,
        steps: list[Step],
        indices: Sequence[int],
        inputs_BCHW: torch.Tensor,
        outputs_BCHW: torch.Tensor,
        timesteps: np.ndarray,
        max_px: int | None = None,
    ) -> list[PreviewPixels]:
        """Previews of the images at `indices` of `steps`; with `max_px`, no side is longer."""
        if not indices:
            return []
        indices = list(indices)
        if len(indices) < len(steps):
            indices_B = self._to_device(indices)
            inputs_BCHW, outputs_BCHW = inputs_BCHW[indices_B], outputs_BCHW[indices_B]
        weights_2B = self.model.clean_weights(timesteps[indices])
        clean_BCHW = clean_latents(inputs_BCHW, outputs_BCHW, self._to_device(weights_2B))
        if max_px is not None:
            clean_BCHW = downscale(clean_BCHW, max_px)
        pixels_BHWC, copied = to_host(preview_pixels(clean_BCHW, self.model.preview_colours))
        height, width = pixels_BHWC.shape[1:3]
        finite = torch.tensor(data=True)
        return [
            PreviewPixels(steps[b].image, steps[b].call, width, height, HostPixels(pixels_HWC, finite, copied))
            for pixels_HWC, b in zip(pixels_BHWC, indices, strict=True)
        ]

    def _draw_noise(self, steps: list[Step], prepared: list[PreparedImageRequest]) -> torch.Tensor | None:
        """[B, E] of this call's noise, zero for samplers that need none; None if no image's sampler needs any."""
        needs_noise = [p.table.noise[step.call] > 0 for step, p in zip(steps, prepared, strict=True)]
        if not any(needs_noise):
            return None
        noise_BCHW = torch.zeros(len(steps), *prepared[0].latent_shape, dtype=torch.float32)
        for b, (step, p) in enumerate(zip(steps, prepared, strict=True)):
            if needs_noise[b]:
                noise_BCHW[b] = self._noise[step.image].next(
                    torch.float32 if p.table.noise_dtype == "float32" else self.model.dtype, call=step.call
                )
        return noise_BCHW.flatten(1).to(self.model.device, non_blocking=True)

    def _decode(self, assignments: list[SlotAssignment]) -> None:
        prepared = [self._requests[assignment.image.attempt_id] for assignment in assignments]
        history, shape = self._latents[prepared[0].batch_key], prepared[0].latent_shape
        padding = self.config.decode_batch - len(assignments) if self._buckets else 0
        slots = [assignment.slot for assignment in assignments] + [assignments[0].slot] * padding
        calls = [p.num_calls for p in prepared] + [prepared[0].num_calls] * padding
        latents_BCHW = samples(history, self._to_device(slots), self._to_device(calls)).reshape(-1, *shape)
        pixels_BHWC, finite_B = self.model.decode(latents_BCHW), latents_BCHW.isfinite().all(dim=(1, 2, 3))
        finite_B, _ = to_host(finite_B)
        pixels_BHWC, copied = to_host(pixels_BHWC)
        for b, assignment in enumerate(assignments):
            self._decoded[assignment.image] = HostPixels(pixels_BHWC[b], finite_B[b], copied)
            self._masked_images.end(assignment.image)

    def _log_fields(self, event: str, images: list[ItemId]) -> dict[str, dict[str, object]]:
        ids = sorted({self._requests[image.attempt_id].request.request_id for image in images})
        return fields(event=event, num_images=len(images), request_ids=ids)

    def _keys_in_use(self) -> set[BatchKey]:
        return {self._requests[image.attempt_id].batch_key for image in self._noise}

    def _bucket(self, num_rows: int) -> int:
        """The number of rows that `num_rows` are padded to; above the largest bucket there is no padding."""
        return next((bucket for bucket in self._buckets if bucket >= num_rows), num_rows)

    def _to_device(self, values: "list[int] | np.ndarray") -> torch.Tensor:
        return torch.as_tensor(values).to(self.model.device, non_blocking=True)

    def _limit_run_ahead(self) -> None:
        """Wait until a GPU is at most `_MAX_ITERATIONS_AHEAD` iterations behind the loop."""
        if self.model.device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._pending_events.append(done)
        if len(self._pending_events) > _MAX_ITERATIONS_AHEAD:
            self._pending_events.popleft().synchronize()
