"""The noise of the running images: a stream for each, and another one for its second pass.

Shapes: B images of a step, of one size, E elements of the C × H × W latents of an image.
"""

from collections.abc import Iterator, Sequence

import torch

from noria.engine.diffusion.input_images.masked_images import sample_latents
from noria.engine.diffusion.preparation import PreparedImageRequest
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.sampling.noise import NoiseStream
from noria.scheduling.types import ItemId, Step

_ANY_SIDE_PX = 64  # sides of an image that any VAE takes


class NoiseStreams:
    """The streams of the running images of one model."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self._streams: dict[ItemId, NoiseStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __setitem__(self, item: ItemId, stream: NoiseStream) -> None:
        self._streams[item] = stream

    def open(self, item: ItemId, prepared: PreparedImageRequest, call: int, *, has_begun: bool = False) -> NoiseStream:
        """Return a new stream for the pass that makes a call of an image; it is not kept.

        Of a pass that `has_begun`, what sampled the latents of enlarged pixels is drawn.
        """
        seed, shape = prepared.request.payload.seed, prepared.shape_at(call)
        stream = NoiseStream(seed, shape, self._model.noise_dtype, image=item.index)
        if has_begun and prepared.upscaling is not None and prepared.first_call_of(call):
            black_1HW3 = torch.zeros(1, _ANY_SIDE_PX, _ANY_SIDE_PX, 3, dtype=torch.uint8)
            if (deviation_BCHW := self._model.encode(black_1HW3).deviation_BCHW) is not None:  # which says its dtype
                stream.of_start_image(deviation_BCHW.dtype)
        return stream

    def end(self, item: ItemId) -> None:
        """Drop the stream of an image, if it has one."""
        self._streams.pop(item, None)

    def draw(self, steps: Sequence[Step], prepared: Sequence[PreparedImageRequest]) -> torch.Tensor | None:
        """[B, E] of this call's noise, zero for samplers that need none; None if no image's sampler needs any."""
        needs_noise = [p.table.noise[step.call] > 0 for step, p in zip(steps, prepared, strict=True)]
        if not any(needs_noise):
            return None
        noise_BCHW = torch.zeros(len(steps), *prepared[0].shape_at(steps[0].call), dtype=torch.float32)
        for b, (step, p) in enumerate(zip(steps, prepared, strict=True)):
            if needs_noise[b]:
                noise_BCHW[b] = self._streams[step.image].next(self.dtype(p), call=step.call)
        return noise_BCHW.flatten(1).to(self._model.device, non_blocking=True)

    def second_passes(
        self, steps: Sequence[Step], prepared: Sequence[PreparedImageRequest], next_BE: torch.Tensor
    ) -> Iterator[tuple[Step, torch.Tensor, NoiseStream]]:
        """Yield the steps that end first passes, and the first samples and the streams of the second ones.

        `next_BE` are the samples after the steps. No stream is kept, since steps can be repeated.
        """
        for step, p, next_E in zip(steps, prepared, next_BE, strict=True):
            if p.second_pass is not None and step.call + 1 == p.second_stage_from:
                stream = self.open(step.image, p, step.call + 1)
                noise_CHW = stream.initial().to(self._model.device, torch.float32)
                yield step, p.second_pass.begin(next_E.reshape(p.latent_shape), noise_CHW), stream

    def second_pass_of_pixels(
        self, step: Step, prepared: PreparedImageRequest, pixels_HW3: torch.Tensor
    ) -> tuple[torch.Tensor, NoiseStream]:
        """Return the first sample and the stream of a second pass that begins after a step, with an enlarged image.

        Draws are those of diffusers' pipelines for start images.
        """
        assert prepared.second_pass is not None
        device, stream = self._model.device, self.open(step.image, prepared, step.call + 1)
        latents_CHW = sample_latents(self._model.encode(pixels_HW3[None]), stream, device)
        return prepared.second_pass.begin(latents_CHW, stream.initial().to(device, torch.float32)), stream

    def dtype(self, prepared: PreparedImageRequest) -> torch.dtype:
        """Return that of the draws of calls."""
        return torch.float32 if prepared.table.noise_dtype == "float32" else self._model.dtype
