"""Previews: estimates of the final image from the model's output at any call.

A prediction of noise or velocity implies a prediction of the clean latent x₀ (Ho et al., 2020, eq. 15; Salimans and Ho,
2022, appendix D). One linear map, fitted once to the model's VAE, converts that latent to colours: a decoder would cost
as much as several steps. With any sampler, the model's input is z = √ᾱ·x₀ + √(1-ᾱ)·ε at a timestep, so previews need
only ᾱ and the timestep.

Tensor shapes: B images, C latent channels, H × W latent size, T training timesteps, N example images.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_NUM_EXAMPLES = 24
_EXAMPLE_LATENTS = 12  # along a side
_MAX_EXAMPLE_PX = _NUM_EXAMPLES * (_EXAMPLE_LATENTS * 16) ** 2  # a VAE of 32 pixels per latent takes 6 s for each image
# at zero terminal SNR, √ᾱ = 0 would be a divisor; a noise prediction contains nothing of the image there
_MIN_ALPHA_BAR = 1e-4


def alpha_bars(scheduler_config: Mapping[str, Any]) -> np.ndarray:
    """Return [T] float64 of ᾱ, as diffusers computes it from the betas of a scheduler_config.json."""
    import diffusers

    return np.asarray(diffusers.DDIMScheduler.from_config(scheduler_config).alphas_cumprod, np.float64)


def clean_weights(timesteps_B: np.ndarray, alpha_bars_T: np.ndarray, prediction_type: str) -> np.ndarray:
    """Return [2, B] float32: the predicted x₀ is the first times the model's input plus the second times its output.

    `prediction_type` is diffusers': "epsilon", "v_prediction" or "sample". Timesteps can lie between training
    timesteps.
    """
    alpha_B = np.interp(timesteps_B, np.arange(len(alpha_bars_T)), alpha_bars_T).clip(_MIN_ALPHA_BAR, 1.0)
    signal_B, noise_B = np.sqrt(alpha_B), np.sqrt(1 - alpha_B)
    match prediction_type:
        case "epsilon":
            weights_2B = 1 / signal_B, -noise_B / signal_B
        case "v_prediction":
            weights_2B = signal_B, -noise_B
        case _:
            assert prediction_type == "sample", prediction_type
            weights_2B = np.zeros_like(alpha_B), np.ones_like(alpha_B)
    return np.stack(weights_2B).astype(np.float32)


def clean_latents(inputs_BCHW: torch.Tensor, outputs_BCHW: torch.Tensor, weights_2B: torch.Tensor) -> torch.Tensor:
    """Return the predicted x₀, [B, C, H, W], with the weights of `clean_weights`."""
    of_inputs_B111, of_outputs_B111 = weights_2B[:, :, None, None, None]
    return torch.addcmul(of_outputs_B111 * outputs_BCHW, of_inputs_B111, inputs_BCHW)


def fit_colours(vae_encode: Callable[[torch.Tensor], torch.Tensor], scale: int) -> torch.Tensor:
    """Fit the map [C + 1, 3] from a latent's channels and 1 to its block's mean colour, 0 to 255, by least squares.

    `vae_encode` encodes pixels [N, 3, scale·H, scale·W] in -1 to 1 to latents [N, C, H, W] in the UNet's scale.
    """
    num_examples = min(_NUM_EXAMPLES, max(1, _MAX_EXAMPLE_PX // (_EXAMPLE_LATENTS * scale) ** 2))
    pixels_N3HW = _example_pixels(_EXAMPLE_LATENTS * scale, scale)[:num_examples]
    latents_NCHW = vae_encode(pixels_N3HW).float().cpu()
    colours_N3HW = functional.avg_pool2d(pixels_N3HW * 127.5 + 127.5, scale)
    targets = colours_N3HW.movedim(1, -1).reshape(-1, 3)
    colours_K3: torch.Tensor = torch.linalg.lstsq(_with_one(latents_NCHW), targets).solution
    return colours_K3


def preview_pixels(latents_BCHW: torch.Tensor, colours_K3: torch.Tensor) -> torch.Tensor:
    """Return [B, H, W, 3] uint8, a pixel for each latent, by the map of `fit_colours`."""
    colours_BHW3 = torch.einsum("bchw,ck->bhwk", latents_BCHW.float(), colours_K3[:-1]) + colours_K3[-1]
    return colours_BHW3.clamp_(0, 255).round_().to(torch.uint8)


def downscale(latents_BCHW: torch.Tensor, max_side: int) -> torch.Tensor:
    """Average blocks of latents so that neither side exceeds `max_side`; small latents are returned unchanged.

    The map to colours is linear, so the average of latents has the average of their colours.
    """
    block = -(-max(latents_BCHW.shape[-2:]) // max_side)
    return latents_BCHW if block == 1 else functional.avg_pool2d(latents_BCHW, block, ceil_mode=True)


def _with_one(latents_NCHW: torch.Tensor) -> torch.Tensor:
    rows = latents_NCHW.movedim(1, -1).reshape(-1, latents_NCHW.shape[1])
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)


def _example_pixels(side_px: int, scale: int) -> torch.Tensor:
    """Return [N, 3, side, side] in -1 to 1: smooth random colours, with a rectangle of another colour in front."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(_NUM_EXAMPLES, 3, 3, 3, generator=generator)
    pixels = functional.interpolate(coarse, size=(side_px, side_px), mode="bilinear", align_corners=True)
    for example in pixels:
        top, left = (int(torch.randint(0, side_px // 2, (1,), generator=generator)) for _ in range(2))
        size = int(torch.randint(scale, side_px // 2, (1,), generator=generator))
        example[:, top : top + size, left : left + size] = torch.rand(3, 1, 1, generator=generator)
    return pixels * 2 - 1
