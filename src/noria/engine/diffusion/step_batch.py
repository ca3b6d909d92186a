"""Images of one size that step together: their inputs of the model, the samples that follow, and previews.

Shapes: S slots, K columns of history, B images, E elements of the C × H × W latents of an image.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from noria.engine.diffusion.decoding import preview
from noria.engine.diffusion.device_transfer import to_device
from noria.engine.diffusion.latents import LatentSlots
from noria.engine.diffusion.preparation import PreparedImageRequest
from noria.engine.diffusion.results import PreviewPixels
from noria.models.diffusion.diffusion_model import Denoiser
from noria.sampling.step import KeptLatents, model_inputs, next_samples, write_samples
from noria.sampling.tables import fold, window_of
from noria.scheduling.types import Step


class StepBatch(NamedTuple):
    """Images of one size that step, and their inputs of the model."""

    steps: list[Step]
    prepared: list[PreparedImageRequest]
    history_SKE: torch.Tensor
    slots_B: torch.Tensor
    calls_B: torch.Tensor
    inputs_BCHW: torch.Tensor
    timesteps_B: np.ndarray

    @classmethod
    def gather(cls, steps: list[Step], prepared: list[PreparedImageRequest], latents: LatentSlots) -> "StepBatch":
        """Gather the inputs of images of one size; `prepared` has the request of each."""
        calls = [step.call for step in steps]
        shape = prepared[0].shape_at(calls[0])
        history_SKE = latents.of(shape)
        device = history_SKE.device
        slots_B, calls_B = to_device([step.slot for step in steps], device), to_device(calls, device)
        tables = [(p.table, call) for p, call in zip(prepared, calls, strict=True)]
        scales_B = to_device(np.array([table.input_scale[call] for table, call in tables], np.float32), device)
        inputs_BCHW = model_inputs(history_SKE, slots_B, calls_B, scales_B).reshape(-1, *shape)
        timesteps_B = np.array([table.timesteps[call] for table, call in tables], np.float32)
        return cls(steps, prepared, history_SKE, slots_B, calls_B, inputs_BCHW, timesteps_B)

    def next_samples(
        self, outputs_BCHW: torch.Tensor, noise_BE: torch.Tensor | None, kept: KeptLatents | None
    ) -> torch.Tensor:
        """Return the samples [B, E] that follow the model's outputs; writes no sample."""
        rows_BK = np.stack([p.table.coefficients[s.call] for p, s in zip(self.prepared, self.steps, strict=True)])
        coefficients_BK = to_device(fold(rows_BK, window_of(self.history_SKE.shape[1])), self.history_SKE.device)
        at = self.history_SKE, self.slots_B, self.calls_B
        return next_samples(*at, outputs_BCHW.flatten(1), noise_BE, coefficients_BK, kept)

    def write(self, next_BE: torch.Tensor) -> None:
        """Write the samples that follow."""
        write_samples(self.history_SKE, self.slots_B, self.calls_B, next_BE)

    def previews(
        self,
        indices: Sequence[int],
        outputs_BCHW: torch.Tensor,
        denoiser: Denoiser,
        colours: torch.Tensor,
        max_px: int | None,
    ) -> list[PreviewPixels]:
        """Return previews of the images at `indices`, from the outputs of `denoiser`; with `max_px`, no side is longer.

        `colours` are those of the model.
        """
        indices, inputs_BCHW = list(indices), self.inputs_BCHW
        if len(indices) < len(self.steps):
            indices_B = to_device(indices, inputs_BCHW.device)
            inputs_BCHW, outputs_BCHW = inputs_BCHW[indices_B], outputs_BCHW[indices_B]
        weights_2B = to_device(denoiser.clean_weights(self.timesteps_B[indices]), inputs_BCHW.device)
        made = preview(inputs_BCHW, outputs_BCHW, weights_2B, colours, max_px)
        stepped = [self.steps[b] for b in indices]
        return [PreviewPixels(s.image, s.call, *each.size_px, each) for each, s in zip(made, stepped, strict=True)]
