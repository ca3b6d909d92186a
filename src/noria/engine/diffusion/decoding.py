"""The decode of latents to pixels, and the check of these by the model's safety classifier, if it has one.

Shapes: B images of one size, of which the last may be padding, C latent channels, H × W latent size.
"""

from typing import NamedTuple

import torch

from noria.engine.diffusion.device_transfer import HostPixels, to_host
from noria.engine.diffusion.results import SafetyScore
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.safety_classifier import SafetyCheck


class Decoded(NamedTuple):
    """A decoded image."""

    pixels: HostPixels
    safety: SafetyScore | None  # copied before the pixels are; None: the model has no classifier


def decode(
    model: DiffusionModel, check: SafetyCheck | None, latents_BCHW: torch.Tensor, num_images: int
) -> list[Decoded]:
    """Decode the first `num_images`, and start copying their pixels and scores to the host's memory."""
    pixels_BHWC = model.decode(latents_BCHW)
    finite_B, _ = to_host(latents_BCHW.isfinite().all(dim=(1, 2, 3)))
    scores_B = None if check is None else to_host(check.scores(pixels_BHWC))[0]
    pixels_BHWC, copied = to_host(pixels_BHWC)
    return [
        Decoded(
            HostPixels(pixels_BHWC[b], finite_B[b], copied),
            None if scores_B is None or check is None else SafetyScore(scores_B[b], check.rule.threshold),
        )
        for b in range(num_images)
    ]
