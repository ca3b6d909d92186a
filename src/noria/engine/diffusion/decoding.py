"""The decode of latents to pixels, and the check of these by the model's safety classifier, if it has one; previews.

Shapes: B images of one size, of which the last may be padding, C latent channels, H × W latent size.
"""

from typing import NamedTuple

import torch

from noria.engine.diffusion.device_transfer import HostPixels, to_host
from noria.engine.diffusion.results import SafetyScore
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.safety_classifier import SafetyCheck
from noria.sampling.previews import clean_latents, downscale, preview_pixels


class Decoded(NamedTuple):
    """A decoded image."""

    pixels: HostPixels
    safety: SafetyScore | None  # copied before the pixels are; None: the model has no classifier


def decode(
    model: DiffusionModel, check: SafetyCheck | None, latents_BCHW: torch.Tensor, num_images: int
) -> list[Decoded]:
    """Decode the first `num_images`, and start copying their pixels and scores to the host's memory."""
    return checked(check, model.decode(latents_BCHW), latents_BCHW.isfinite().all(dim=(1, 2, 3)), num_images)


def checked(
    check: SafetyCheck | None, pixels_BHWC: torch.Tensor, are_finite_B: torch.Tensor, num_images: int
) -> list[Decoded]:
    """Check the first `num_images`, and start copying their pixels and scores to the host's memory."""
    finite_B, _ = to_host(are_finite_B)
    scores_B = None if check is None else to_host(check.scores(pixels_BHWC))[0]
    pixels_BHWC, copied = to_host(pixels_BHWC)
    return [
        Decoded(
            HostPixels(pixels_BHWC[b], finite_B[b], copied),
            None if scores_B is None or check is None else SafetyScore(scores_B[b], check.rule.threshold),
        )
        for b in range(num_images)
    ]


def preview(
    inputs_BCHW: torch.Tensor,
    outputs_BCHW: torch.Tensor,
    weights_2B: torch.Tensor,
    colours: torch.Tensor,
    max_px: int | None,
) -> list[HostPixels]:
    """Return previews of images, from the inputs and outputs of a call; with `max_px`, no side is longer.

    `weights_2B` are those of `Denoiser.clean_weights`, `colours` those of the model.
    """
    clean_BCHW = clean_latents(inputs_BCHW, outputs_BCHW, weights_2B)
    if max_px is not None:
        clean_BCHW = downscale(clean_BCHW, max_px)
    pixels_BHWC, copied = to_host(preview_pixels(clean_BCHW, colours))
    return [HostPixels(pixels_HWC, torch.tensor(data=True), copied) for pixels_HWC in pixels_BHWC]
