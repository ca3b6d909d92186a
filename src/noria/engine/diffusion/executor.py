"""The diffusion executor: executes iterations on one device, for any mix of requests of one model.

A step gathers the current samples of its images, makes one model call (two rows for a guided image), combines guidance,
and applies to each image the current row of its sampler's table, all in one weighted sum. There is no loop over
requests on the device, but one over sizes, where a model mixes them in a call.

Shapes: B images of a step, of one size, E elements of the C × H × W latents of an image.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.decoding import Decoded, checked, decode
from noria.engine.diffusion.device_transfer import to_device
from noria.engine.diffusion.guided_calls import GuidedCalls, GuidedImage
from noria.engine.diffusion.image_conditioner import ImageConditioner, encode_images
from noria.engine.diffusion.image_state import BegunImage, dump_image, load_image, save_image
from noria.engine.diffusion.input_images.masked_images import MaskedImages
from noria.engine.diffusion.latents import LatentSlots
from noria.engine.diffusion.loras.model_loras import ModelLoras
from noria.engine.diffusion.noise_streams import NoiseStreams
from noria.engine.diffusion.preparation import PreparedImageRequest, RequestPreparer, refiner_of
from noria.engine.diffusion.results import DecodedImage, PreviewPixels
from noria.engine.diffusion.sizing.slot_count import max_rows
from noria.engine.diffusion.step_batch import StepBatch
from noria.engine.diffusion.timing import (
    MAX_ITERATIONS_AHEAD,
    DeviceStopwatch,
    HostStopwatch,
    PipelineFillDetector,
    RunAheadLimit,
)
from noria.engine.diffusion.upscaling.enlarged_images import EnlargedImages
from noria.engine.resources.memory import used_memory_bytes
from noria.engine.resources.out_of_memory import first_line, is_out_of_memory
from noria.engine.resumption import InvalidStateError, StateWithBytes
from noria.engine.runtime import THUMBNAIL_MAX_PX
from noria.models import cuda_graph
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.safety_classifier import SafetyCheck
from noria.observe.logs.log_record import fields
from noria.protocol.messages import ImageState
from noria.protocol.model_spec import CallChoice
from noria.protocol.request import ImageRequest
from noria.sampling.step import init_slot, samples
from noria.scheduling.types import (
    ImageProgress,
    ItemId,
    IterationPlan,
    IterationResult,
    Phase,
    ReleasedImage,
    SlotAssignment,
    Step,
)

_log = logging.getLogger(__name__)


class DiffusionExecutor:
    """The `Executor` of one model on one device; `config` has no "auto" left."""

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        safety: SafetyCheck | None = None,
        call_choice: CallChoice | None = None,
    ) -> None:
        """`safety` checks all images; previews and thumbnails are then none, since they would show what is refused.

        `call_choice` is what was measured with `engine.compile_blocks` "auto".
        """
        assert isinstance(config.slots, int)
        self.model, self.config, self._safety = model, config, safety
        self._requests: dict[str, PreparedImageRequest] = {}
        self._noise = NoiseStreams(model)
        self._latents = LatentSlots(config.slots, model.device)
        self._guided: dict[ItemId, tuple[GuidedImage, ...]] = {}  # running and evicted images, by call
        self._evicted: dict[ItemId, BegunImage] = {}
        self._masked_images, self._enlarged = MaskedImages(model), EnlargedImages(model, self._noise)
        self._loras, self._refiner = ModelLoras(model, config, call_choice), refiner_of(model)
        self._calls = [GuidedCalls(model, self._loras, config.buckets)]  # by stage
        self._preparer = RequestPreparer(model, config, self._loras)
        if self._refiner is not None:
            self._calls.append(GuidedCalls(self._refiner, None, config.buckets))
        self.conditioner = ImageConditioner(model, config, self._loras)
        self._decoded: dict[ItemId, Decoded] = {}
        self._run_ahead, self._fill_detector = RunAheadLimit(model.device), PipelineFillDetector(MAX_ITERATIONS_AHEAD)
        self._previews: list[PreviewPixels] = []
        self._thumbnails: list[PreviewPixels] = []
        self._grad_mode = torch.inference_mode if config.inference_mode else torch.no_grad
        self.call_choice = call_choice
        self.call_bytes = 0  # GPU memory that the warm-up's calls needed beside the weights, at most
        self.is_synchronous = model.device.type == "cpu"  # waits after each phase, which the host's clock times

    def prepare(self, request: ImageRequest, data: memoryview | None = None) -> PreparedImageRequest:
        """Prepare a request as `RequestPreparer` does; `data` is its start image."""
        return self._preparer.prepare(request, data)

    def resume(self, prepared: PreparedImageRequest, states: Sequence[StateWithBytes]) -> PreparedImageRequest:
        """Let images begin as another engine has handed them over. Raises InvalidStateError if they cannot."""
        if halfway := [state.call for state, _ in states if state.call != prepared.call_elsewhere(state.call)]:
            raise InvalidStateError(f"call {halfway[0]} needs pixels, which do not move")
        begun = {
            state.index: load_image(state, data, prepared.table, math.prod(prepared.shape_at(state.call)))
            for state, data in states
            if prepared.prompts  # else they begin anew
        }
        return replace(prepared, begun=begun)

    def hand_over(self, released: ReleasedImage) -> tuple[ImageState, bytes]:
        """The state of an image that has a slot or is evicted, for another engine; waits for the device."""
        prepared = self._requests[released.image.attempt_id]
        with self._grad_mode():
            begun = self._evicted[released.image] if released.slot is None else self._saved(released)
            call, batch_size_sum = released.progress
            if (first := prepared.call_elsewhere(call)) != call:  # the calls between keep the sample
                begun = replace(begun, call=first, samples=(first,))
                released = released._replace(progress=ImageProgress(first, batch_size_sum * first // call))
            return dump_image(released, prepared.table, begun)

    def _saved(self, released: ReleasedImage) -> BegunImage:
        """Return the state of an image that has a slot."""
        assert released.slot is not None, released
        prepared = self._requests[released.image.attempt_id]
        history = self._latents.of(prepared.shape_at(released.progress.call))
        return save_image(released.progress.call, released.slot, prepared.table, history)

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
            image = ItemId(attempt_id, index)
            for held in (self._guided, self._decoded, self._evicted):
                held.pop(image, None)
            self._noise.end(image)
            self._masked_images.end(image)
            self._enlarged.end(image)
        if request.payload.loras and not any(prepared.adapters for prepared in self._requests.values()):
            self._loras.release()

    def take_result(self, image: ItemId) -> DecodedImage:
        """An image that the last iteration decoded; each can be taken once."""
        request, decoded = self._requests[image.attempt_id].request, self._decoded.pop(image)
        num_cut = max((each.num_cut for each in self._guided[image]), default=0)
        return DecodedImage(request, image.index, decoded.pixels, num_cut, decoded.safety)

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
        return used_memory_bytes(str(self.model.device))

    def set_slots(self, slots: int) -> None:
        """Have `slots` slots from now on; call it while there is no request."""
        self.config = msgspec.structs.replace(self.config, slots=slots)
        self._latents = LatentSlots(slots, self.model.device)
        self._preparer.max_images, self._preparer.max_rows = slots + self.config.queue_limit, max_rows(self.config)

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Execute evictions, encodes, joins, steps and decodes.

        An exception in one phase fails the images of that phase, and no others.
        A phase that does not fit the memory ends the iteration without having changed anything, so that it can be
        planned again in smaller batches.
        """
        failed: dict[ItemId, str] = {}
        began = time.perf_counter()
        self._fill_detector.begin_iteration(began)
        stopwatch, join_s = HostStopwatch() if self.is_synchronous else DeviceStopwatch(), 0.0
        actions: dict[Phase, Callable[[list[Any]], None]] = {
            "evictions": self._evict,
            "encodes": self._encode,
            "joins": self._join,
            "steps": functools.partial(self._step, with_thumbnails=with_thumbnails),
            "decodes": self._decode,
        }
        with self._grad_mode():
            for phase, action in actions.items():
                # A plan has a field for each phase.
                entries = [each for each in getattr(plan, phase) if each.image not in failed]
                if entries:
                    images = [each.image for each in entries]
                    if phase == "encodes":  # all images of their requests that join
                        encoding = {image.attempt_id for image in images}
                        images = [each.image for each in plan.joins if each.image.attempt_id in encoding]
                    with stopwatch.timing(phase):
                        fits = self._run_phase(functools.partial(action, entries), images, failed)
                    if not fits:
                        return IterationResult(failed, phase, phase_timings=stopwatch.timings())
                if phase == "joins":
                    join_s = time.perf_counter() - began
            self._run_ahead.wait()
        is_timed = self._fill_detector.end_iteration(time.perf_counter()) or self.is_synchronous
        return IterationResult(failed, is_timed=is_timed, phase_timings=stopwatch.timings(), join_s=join_s)

    def _run_phase(self, action: Callable[[], None], images: list[ItemId], failed: dict[ItemId, str]) -> bool:
        """Run `action`; add its `images` to `failed` if it raises. Returns whether it fitted the memory."""
        fits = True
        try:
            action()
            if self.is_synchronous and self.model.device.type == "cuda":
                cuda_graph.synchronize(self.model.device)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # many types; a panic in Rust (tokenizers) raises no Exception
            fits = not is_out_of_memory(error)
            if fits:
                _log.exception(
                    "an iteration failed for %d images", len(images), extra=self._log_fields("iteration_failed", images)
                )
                failed |= dict.fromkeys(images, f"the model failed: {first_line(error)}")
            else:
                log_fields = self._log_fields("out_of_memory", images)
                _log.warning("%d images do not fit the memory: %s", len(images), first_line(error), extra=log_fields)
            if self.model.device.type == "cuda":
                # Raises if this process has lost the device: then it exits and is restarted.
                cuda_graph.synchronize(self.model.device)
        if not fits and self.model.device.type == "cuda":
            cuda_graph.free_memory(self.model.device)  # not inside the handler: the exception keeps its tensors alive
        return fits

    def _evict(self, evictions: Sequence[ReleasedImage]) -> None:
        """Move the states of images to the host's memory. What their requests share, as embeddings, stays."""
        self._evicted |= {each.image: self._saved(each) for each in evictions}
        for each in evictions:
            self._masked_images.to_host(each.image)

    def _encode(self, assignments: Sequence[SlotAssignment]) -> None:
        batch_size = self.config.decode_batch if self.config.buckets else None
        encode_images([self._requests[each.image.attempt_id] for each in assignments], self.model, batch_size)

    def _join(self, assignments: list[SlotAssignment]) -> None:
        self._return([assignment for assignment in assignments if assignment.image in self._evicted])
        self._begin([assignment for assignment in assignments if assignment.image not in self._evicted])

    def _return(self, assignments: list[SlotAssignment]) -> None:
        """Let evicted images go on. Their states stay until they step: joins that run out of memory are repeated."""
        for assignment in assignments:
            prepared = self._requests[assignment.image.attempt_id]
            begun = self._evicted[assignment.image]
            self._latents.join(prepared.largest_shape, prepared.table.window, assignment.slot, is_first=False)
            begun.write(self._latents.of(prepared.shape_at(begun.call)), assignment.slot)

    def _begin(self, assignments: list[SlotAssignment]) -> None:
        """Let images begin, at their first call or where another engine has handed them over."""
        requests = [self._requests[assignment.image.attempt_id] for assignment in assignments]
        guided = self.conditioner.condition([prepared for prepared in requests if prepared.prompts])
        for assignment, prepared in zip(assignments, requests, strict=True):
            self._guided[assignment.image] = guided.get(assignment.image.attempt_id, ())
            begun = prepared.begun.get(assignment.image.index)
            call = 0 if begun is None else begun.call
            window, slot = prepared.table.window, assignment.slot
            self._latents.join(prepared.largest_shape, window, slot, is_first=not self._noise)
            history = self._latents.of(prepared.shape_at(call))
            noise = self._noise.open(assignment.image, prepared, call, has_begun=begun is not None)
            self._noise[assignment.image] = noise
            if prepared.start is None:
                first = noise.initial().to(self.model.device, torch.float32) * prepared.table.init_noise_sigma
            else:
                first = self._masked_images.begin(assignment.image, prepared, noise)
            if begun is None:
                init_slot(history, assignment.slot, first)
            else:
                noise.replay(prepared.table.noise[:call], self._noise.dtype(prepared), prepared.first_call_of(call))
                begun.write(history, assignment.slot)

    def _step(self, steps: list[Step], *, with_thumbnails: bool) -> None:
        for step in steps:
            self._evicted.pop(step.image, None)
        upscaling = self._requests[steps[0].image.attempt_id].upscaling
        if upscaling is not None and upscaling.has(steps[0].call):  # so have all, by the batch key
            self._enlarged.make_calls(steps, [self._requests[step.image.attempt_id] for step in steps], self._latents)
            return
        batches = [
            StepBatch.gather(of_size, [self._requests[step.image.attempt_id] for step in of_size], self._latents)
            for of_size in self._by_size(steps)
        ]
        stage = self._requests[steps[0].image.attempt_id].stage_of(steps[0].call)  # equal for all, by the batch key
        outputs = self._calls[stage].predict(
            [self._masked_images.with_masks(batch.steps, batch.inputs_BCHW) for batch in batches],
            np.concatenate([batch.timesteps_B for batch in batches]),
            [self._guided[step.image][step.call] for batch in batches for step in batch.steps],
            [
                prepared.active_controls(step.call, self.model)
                for batch in batches
                for step, prepared in zip(batch.steps, batch.prepared, strict=True)
            ],
        )
        previews: list[PreviewPixels] = []
        thumbnails: list[PreviewPixels] = []
        for batch, outputs_BCHW in zip(batches, outputs, strict=True):
            indices = [b for b, p in enumerate(batch.prepared) if batch.steps[b].call in p.preview_calls]
            previews += self._make_previews(batch, indices, outputs_BCHW)
            if with_thumbnails:
                thumbnails += self._make_previews(batch, range(len(batch.steps)), outputs_BCHW, THUMBNAIL_MAX_PX)
        advanced = [
            batch.next_samples(
                outputs_BCHW,
                self._noise.draw(batch.steps, batch.prepared),
                self._masked_images.kept(batch.steps, batch.prepared),
            )
            for batch, outputs_BCHW in zip(batches, outputs, strict=True)
        ]
        second = [
            each
            for batch, next_BE in zip(batches, advanced, strict=True)
            for each in self._noise.second_passes(batch.steps, batch.prepared, next_BE)
        ]
        # These come last: a step that runs out of memory is repeated, unless it has advanced.
        for batch, next_BE in zip(batches, advanced, strict=True):
            batch.write(next_BE)
        for step, first_CHW, noise in second:
            init_slot(self._latents.of(first_CHW.shape), step.slot, first_CHW, step.call + 1)
            self._noise[step.image] = noise
        self._previews += previews
        self._thumbnails += thumbnails

    def _by_size(self, steps: list[Step]) -> Iterable[list[Step]]:
        """Return the steps of each size of images; a call has several only if the model mixes them."""
        if self._requests[steps[0].image.attempt_id].call_size is None:
            return [steps]
        by_size: dict[tuple[int, ...], list[Step]] = {}
        for step in steps:
            by_size.setdefault(self._requests[step.image.attempt_id].latent_shape, []).append(step)
        return by_size.values()

    def _make_previews(
        self, batch: StepBatch, indices: Sequence[int], outputs_BCHW: torch.Tensor, max_px: int | None = None
    ) -> list[PreviewPixels]:
        """Previews of the images at `indices` of `batch`; with `max_px`, no side is longer."""
        if not indices or self._safety is not None:
            return []
        refiner = self._refiner if batch.prepared[0].stage_of(batch.steps[0].call) else None
        return batch.previews(indices, outputs_BCHW, refiner or self.model, self.model.preview_colours, max_px)

    def _decode(self, assignments: list[SlotAssignment]) -> None:
        prepared = [self._requests[assignment.image.attempt_id] for assignment in assignments]
        if not prepared[0].prompts:  # they only enlarge images, of any sizes; so do the others, by the batch key
            for (image, _), p in zip(assignments, prepared, strict=True):
                pixels_1HW3 = self._enlarged.result(image, p)[None].to(self.model.device)
                (self._decoded[image],) = checked(self._safety, pixels_1HW3, torch.ones(1, dtype=torch.bool), 1)
            return
        shape = prepared[0].shape_at(prepared[0].num_calls)
        history = self._latents.of(shape)
        padding = self.config.decode_batch - len(assignments) if self.config.buckets else 0
        slots = [assignment.slot for assignment in assignments] + [assignments[0].slot] * padding
        calls = [p.num_calls for p in prepared] + [prepared[0].num_calls] * padding
        latents_BE = samples(history, to_device(slots, history.device), to_device(calls, history.device))
        decoded = decode(self.model, self._safety, latents_BE.reshape(-1, *shape), len(assignments))
        for assignment, each in zip(assignments, decoded, strict=True):
            self._decoded[assignment.image] = each
            self._masked_images.end(assignment.image)

    def _log_fields(self, event: str, images: list[ItemId]) -> dict[str, dict[str, object]]:
        ids = sorted({self._requests[image.attempt_id].request.request_id for image in images})
        return fields(event=event, num_images=len(images), request_ids=ids)
