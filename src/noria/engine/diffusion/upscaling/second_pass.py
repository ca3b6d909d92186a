"""The second pass of an image, in another size: it begins with the latents of the first one, enlarged, and noise.

Its noise is that of diffusers' pipelines for start images which are given latents in place of an image, and a new
generator with the image's seed.
"""

from dataclasses import dataclass

import torch

from noria.protocol.diffusion import LatentUpscaler


@dataclass(frozen=True, eq=False)
class PreparedSecondPass:
    """The start of a second pass."""

    latent_shape: tuple[int, int, int]  # [C, H, W]
    image_weight: float  # weight of the enlarged latents in the first sample
    noise_weight: float
    upscaler: LatentUpscaler

    def begin(self, latents_CHW: torch.Tensor, noise_CHW: torch.Tensor) -> torch.Tensor:
        """Return the first sample, of the latents of the first pass, in their size, and noise, in its own."""
        enlarged_CHW = enlarge(latents_CHW, self.latent_shape[1:], self.upscaler)
        return self.image_weight * enlarged_CHW + self.noise_weight * noise_CHW


def enlarge(latents_CHW: torch.Tensor, size: tuple[int, int], upscaler: LatentUpscaler) -> torch.Tensor:
    """Return latents of another height and width; of other proportions, they are cut on both sides."""
    old_size = latents_CHW.shape[1:]
    scale = max(new / old for new, old in zip(size, old_size, strict=True))
    height, width = (max(new, round(old * scale)) for new, old in zip(size, old_size, strict=True))
    mode, _, antialiased = upscaler.partition(" ")
    larger_1CHW = torch.nn.functional.interpolate(
        latents_CHW[None], (height, width), mode=mode, antialias=bool(antialiased)
    )
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return larger_1CHW[0, :, top : top + size[0], left : left + size[1]]


def stretch(latents_CHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return latents of another height and width, as A1111's "Just resize (latent upscale)" makes them."""
    return torch.nn.functional.interpolate(latents_CHW[None], size, mode="bilinear")[0]
