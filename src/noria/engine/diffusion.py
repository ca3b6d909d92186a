"""The diffusion executor: one turn of the wheel on one device, whatever mix of requests it carries.

A turn gathers every seated image's current sample, makes one UNet call (two rows for a guided image), combines guidance, and applies
each image's own row of its own sampler's table in one weighted sum. There is no loop over requests on the device.

Shapes: S slots, B images of a turn, R UNet rows, K history entries, C × H × W latents, T tokens, D text width.
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
from noria.engine.embeddings import EmbeddingCache
from noria.engine.executor import GLIMPSE_PX, PreviewPixels, preview_calls
from noria.engine.latents import LatentStore
from noria.engine.pixels import HostPixels, to_host
from noria.engine.stopwatch import DeviceStopwatch, HostStopwatch
from noria.models.stable_diffusion import DiffusionModel
from noria.observe.lines import fields
from noria.request import ImageRequest, request_id_of
from noria.sampling.compile import compile_sampler
from noria.sampling.noise import NoiseStream
from noria.sampling.previews import clean_latents, clean_weights, preview_pixels, smaller
from noria.sampling.step import advance, board, guide, model_inputs, samples
from noria.sampling.tables import SamplerTable
from noria.scheduling.plans import ImageId, Outcome, Part, Plan, Seat, ShapeClass, Step

_log = logging.getLogger(__name__)
_FULL = (  # what a plain RuntimeError says where no torch.OutOfMemoryError is raised
    "can't allocate memory",  # the host's allocator
    "CUDA error: out of memory",  # the driver: launches, streams, pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_TURNS_AHEAD = 2  # that a GPU may be behind: enough to keep it fed, few enough that a newcomer boards soon


@dataclass(frozen=True)
class PreparedImages:
    """A request with its sampler's table."""

    request: ImageRequest
    table: SamplerTable
    shown_at: frozenset[int]  # calls after which its images show a preview

    @property
    def num_calls(self) -> int:
        """Model calls of each image."""
        return self.table.num_calls

    @property
    def shape(self) -> ShapeClass:
        """Which histories its images live in."""
        return ShapeClass(self.request.width_px, self.request.height_px, self.request.model)


def _is_of_memory(error: Exception) -> bool:
    """Whether the device, or the host, had no memory left for a tensor or for a library's workspace."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _FULL)


def _said_of(event: str, images: list[ImageId]) -> dict[str, dict[str, object]]:
    ids = sorted({request_id_of(image.request_id) for image in images})
    return fields(event=event, num_images=len(images), request_ids=ids)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class Burst:
    """Turns that follow one another. The first few only fill the queue of a device that is behind, and say nothing of what work costs."""

    _PAUSE_S = 0.01  # between two turns of one burst the wheel does far less than this

    def __init__(self) -> None:
        self._num_turns, self._ended = 0, 0.0

    def begins(self, now: float) -> None:
        """A turn begins; seconds of any clock."""
        if now - self._ended > self._PAUSE_S:
            self._num_turns = 0

    def ends(self, now: float) -> bool:
        """It has ended; whether it took as long as a turn's work."""
        self._ended, self._num_turns = now, self._num_turns + 1
        return self._num_turns > _TURNS_AHEAD


class DiffusionExecutor:
    """One device with one model; `config` has no "auto" left."""

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        assert isinstance(config.slots, int)
        self.model = model
        self._config = config
        self._buckets = sorted(config.buckets)
        self._requests: dict[str, PreparedImages] = {}
        self._compiled: set[tuple[str, int]] = set()
        self._noise: dict[ImageId, NoiseStream] = {}
        self._latents = LatentStore(config.slots, model.latent_channels, model.latent_scale, model.device)
        # Row 2·slot is a slot's negative prompt, row 2·slot + 1 its prompt.
        self._text = torch.zeros(
            2 * config.slots, model.num_tokens, model.text_width, dtype=model.dtype, device=model.device
        )
        self._embeddings = EmbeddingCache(model.encode, config.embedding_cache, 8 if self._buckets else None)
        self._decoded: dict[ImageId, HostPixels] = {}
        self._ahead: deque[torch.cuda.Event] = deque()
        self._burst = Burst()
        self._previews: list[PreviewPixels] = []
        self._glimpses: list[PreviewPixels] = []
        self._grad_mode = torch.inference_mode if config.inference_mode else torch.no_grad
        self.waits = model.device.type == "cpu"  # for the device after each part of a turn, which can then be timed

    def prepare(self, request: ImageRequest) -> PreparedImages:
        """Compile the request's sampler (8–30 ms the first time); raises `errors.InvalidField` if diffusers refuses it."""
        try:
            table = compile_sampler(request.scheduler, self.model.scheduler_config, request.num_steps)
        finally:
            self._compiled.add((request.scheduler, request.num_steps))
        return PreparedImages(request, table, preview_calls(table.num_calls, request.num_previews))

    def is_prompt(self, request: ImageRequest) -> bool:
        """Whether this scheduler was compiled, or refused, at this number of steps before."""
        return (request.scheduler, request.num_steps) in self._compiled

    def accept(self, prepared: PreparedImages) -> None:
        """Remember a request until `forget`."""
        self._requests[prepared.request.request_id] = prepared

    def forget(self, request_id: str) -> None:
        """Drop what is held for it; its slots are overwritten by whoever boards next."""
        request = self._requests.pop(request_id).request
        for index in range(request.num_images):
            self._noise.pop(ImageId(request_id, index), None)
            self._decoded.pop(ImageId(request_id, index), None)

    def take(self, image: ImageId) -> HostPixels:
        """The pixels of an image that the last turn decoded."""
        return self._decoded.pop(image)

    def previews(self) -> list[PreviewPixels]:
        """Those that the last turn made."""
        shown, self._previews = self._previews, []
        return shown

    def glimpses(self) -> list[PreviewPixels]:
        """Those that the last turn made for who watches the wheel."""
        shown, self._glimpses = self._glimpses, []
        return shown

    def memory_bytes(self) -> int:
        """What torch has of the device, used or kept for later; of a CPU, what this process holds."""
        if self.model.device.type == "cuda":
            return torch.cuda.memory_reserved(self.model.device)
        resident: int = psutil.Process().memory_info().rss
        return resident

    def execute(self, plan: Plan, *, glimpse: bool = False) -> Outcome:
        """Board, step, decode. An exception in one of them fails the images that it was about, and no others.

        What does not fit the memory ends the turn, and changes nothing: it can be planned again, in smaller parts.
        """
        failed: dict[ImageId, str] = {}
        began = time.perf_counter()
        self._burst.begins(began)
        watch = HostStopwatch() if self.waits else DeviceStopwatch()

        def attempt(part: Part, do: Callable[[], None], images: list[ImageId]) -> bool:
            with watch.timing(part):
                return self._attempt(do, images, failed)

        with self._grad_mode():
            boarding = [seat.image for seat in plan.boards]
            if boarding and not attempt("boards", lambda: self._board(plan.boards), boarding):
                return Outcome(failed, "boards")
            boarding_s = time.perf_counter() - began
            steps = [step for step in plan.steps if step.image not in failed]
            stepping = [step.image for step in steps]
            if steps and not attempt("steps", lambda: self._step(steps, glimpse=glimpse), stepping):
                return Outcome(failed, "steps", spent=watch.spent())
            decodes = [seat for seat in plan.decodes if seat.image not in failed]
            decoding = [seat.image for seat in decodes]
            if decodes and not attempt("decodes", lambda: self._decode(decodes), decoding):
                return Outcome(failed, "decodes", spent=watch.spent())
            self._stay_close()
        timed = self._burst.ends(time.perf_counter()) or self.waits
        return Outcome(failed, timed=timed, spent=watch.spent(), boarding_s=boarding_s)

    def _attempt(self, do: Callable[[], None], images: list[ImageId], failed: dict[ImageId, str]) -> bool:
        """Whether what is done of `images` fits the memory."""
        fits = True
        try:
            do()
            if self.waits and self.model.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # torch, tokenizers and diffusers raise many kinds, and none is worth the engine
            fits = not _is_of_memory(error)
            if fits:
                _log.exception("a turn failed for %d images", len(images), extra=_said_of("turn_failed", images))
                failed |= dict.fromkeys(images, f"the model failed: {_first_line(error)}")
            else:
                said = _said_of("out_of_memory", images)
                _log.warning("%d images do not fit the memory: %s", len(images), _first_line(error), extra=said)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost to this process: then it ends, and is replaced
        if not fits and self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # not before the exception is gone, which holds what was computed
        return fits

    def _board(self, seats: Iterable[Seat]) -> None:
        seats = list(seats)
        requests = [self._requests[seat.image.request_id].request for seat in seats]
        embeddings = self._embeddings.get(
            [text for r in requests for text in ([r.negative_prompt] if r.guided else []) + [r.prompt]]
        )
        for seat, request in zip(seats, requests, strict=True):
            if request.guided:
                self._text[2 * seat.slot] = embeddings[request.negative_prompt]
            self._text[2 * seat.slot + 1] = embeddings[request.prompt]
            prepared = self._requests[request.request_id]
            noise = NoiseStream(
                request.seed, self._latents.size(prepared.shape), self.model.dtype, image=seat.image.index
            )
            self._noise[seat.image] = noise
            start = noise.initial().to(self.model.device, torch.float32) * prepared.table.init_noise_sigma
            board(self._history(prepared.shape), seat.slot, start)

    def _step(self, steps: list[Step], *, glimpse: bool) -> None:
        prepared = [self._requests[step.image.request_id] for step in steps]
        history = self._history(prepared[0].shape)
        slots, calls = [step.slot for step in steps], [step.call for step in steps]
        slots_B, calls_B = self._on_device(slots), self._on_device(calls)
        scales_B = self._on_device(
            np.array([p.table.input_scale[c] for p, c in zip(prepared, calls, strict=True)], np.float32)
        )
        inputs_BCHW = model_inputs(history, slots_B, calls_B, scales_B)
        timesteps = np.array([p.table.timesteps[c] for p, c in zip(prepared, calls, strict=True)], np.float32)
        outputs_BCHW = self._predict(inputs_BCHW, prepared, slots, timesteps)
        shown = [b for b, step in enumerate(steps) if step.call in self._requests[step.image.request_id].shown_at]
        previews = self._show(steps, shown, inputs_BCHW, outputs_BCHW, timesteps)
        everyone = range(len(steps)) if glimpse else ()
        glimpses = self._show(steps, everyone, inputs_BCHW, outputs_BCHW, timesteps, most_px=GLIMPSE_PX)
        coefficients_BK = self._on_device(
            np.stack([p.table.coefficients[c] for p, c in zip(prepared, calls, strict=True)])
        )
        advance(history, slots_B, calls_B, outputs_BCHW, self._draws(steps, prepared), coefficients_BK)
        # Last: a step that does not fit is tried again, and once it has advanced it must not be.
        self._previews += previews
        self._glimpses += glimpses

    def _predict(
        self, inputs_BCHW: torch.Tensor, prepared: list[PreparedImages], slots: list[int], timesteps: np.ndarray
    ) -> torch.Tensor:
        """One UNet call for all images, guidance applied: [B, C, H, W] float32. Rows: the guided images' negatives, then every prompt."""
        guided = [b for b, p in enumerate(prepared) if p.request.guided]
        images = guided + list(range(len(prepared)))
        text = [2 * slots[b] for b in guided] + [2 * slot + 1 for slot in slots]
        padding = self._bucket(len(images)) - len(images)
        images_R, text_R = self._on_device(images + images[:1] * padding), self._on_device(text + text[:1] * padding)
        outputs_RCHW = self.model.predict(
            inputs_BCHW[images_R], self._on_device(timesteps)[images_R], self._text[text_R]
        ).float()
        prompted = outputs_RCHW[len(guided) : len(images)]
        if not guided:
            return prompted
        negative = {b: row for row, b in enumerate(guided)}
        negative_B = self._on_device([negative.get(b, len(guided) + b) for b in range(len(prepared))])
        scales = np.array([p.request.guidance_scale if p.request.guided else 1.0 for p in prepared], np.float32)
        return guide(prompted, outputs_RCHW[negative_B], self._on_device(scales))

    def _show(
        self,
        steps: list[Step],
        shown: Sequence[int],
        inputs_BCHW: torch.Tensor,
        outputs_BCHW: torch.Tensor,
        timesteps: np.ndarray,
        most_px: int | None = None,
    ) -> list[PreviewPixels]:
        """Previews of the images `shown`, by their places in `steps`; with `most_px`, no side is longer."""
        if not shown:
            return []
        shown = list(shown)
        if len(shown) < len(steps):
            shown_B = self._on_device(shown)
            inputs_BCHW, outputs_BCHW = inputs_BCHW[shown_B], outputs_BCHW[shown_B]
        weights_2B = clean_weights(timesteps[shown], self.model.alpha_bars, self.model.prediction_type)
        clean_BCHW = clean_latents(inputs_BCHW, outputs_BCHW, self._on_device(weights_2B))
        if most_px is not None:
            clean_BCHW = smaller(clean_BCHW, most_px)
        pixels_BHWC, copied = to_host(preview_pixels(clean_BCHW, self.model.preview_colours))
        height, width = pixels_BHWC.shape[1:3]
        finite = torch.tensor(data=True)
        return [
            PreviewPixels(steps[b].image, steps[b].call, width, height, HostPixels(pixels_HWC, finite, copied))
            for pixels_HWC, b in zip(pixels_BHWC, shown, strict=True)
        ]

    def _draws(self, steps: list[Step], prepared: list[PreparedImages]) -> torch.Tensor | None:
        """[B, C, H, W] of this call's noise, zero where the sampler draws none; None when no image's does."""
        drawing = [p.table.noise[step.call] > 0 for step, p in zip(steps, prepared, strict=True)]
        if not any(drawing):
            return None
        noise_BCHW = torch.zeros(len(steps), *self._latents.size(prepared[0].shape), dtype=torch.float32)
        for b, (step, p) in enumerate(zip(steps, prepared, strict=True)):
            if drawing[b]:
                noise_BCHW[b] = self._noise[step.image].next(
                    torch.float32 if p.table.noise_dtype == "float32" else self.model.dtype, call=step.call
                )
        return noise_BCHW.to(self.model.device, non_blocking=True)

    def _decode(self, seats: list[Seat]) -> None:
        prepared = [self._requests[seat.image.request_id] for seat in seats]
        history = self._history(prepared[0].shape)
        padding = self._config.decode_batch - len(seats) if self._buckets else 0
        slots = [seat.slot for seat in seats] + [seats[0].slot] * padding
        calls = [p.num_calls for p in prepared] + [prepared[0].num_calls] * padding
        latents_BCHW = samples(history, self._on_device(slots), self._on_device(calls))
        pixels_BHWC, finite_B = self.model.decode(latents_BCHW), latents_BCHW.isfinite().all(dim=(1, 2, 3))
        finite_B, _ = to_host(finite_B)
        pixels_BHWC, copied = to_host(pixels_BHWC)
        for b, seat in enumerate(seats):
            self._decoded[seat.image] = HostPixels(pixels_BHWC[b], finite_B[b], copied)

    def _history(self, shape: ShapeClass) -> torch.Tensor:
        seated = {self._requests[image.request_id].shape for image in self._noise}
        return self._latents.history(shape, seated)

    def _bucket(self, num_rows: int) -> int:
        """How many rows `num_rows` are padded up to; beyond the largest bucket, none are added."""
        return next((bucket for bucket in self._buckets if bucket >= num_rows), num_rows)

    def _on_device(self, values: "list[int] | np.ndarray") -> torch.Tensor:
        return torch.as_tensor(values).to(self.model.device, non_blocking=True)

    def _stay_close(self) -> None:
        """Keep a GPU at most `_TURNS_AHEAD` turns behind the plans."""
        if self.model.device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._ahead.append(done)
        if len(self._ahead) > _TURNS_AHEAD:
            self._ahead.popleft().synchronize()
