"""A VAE between pixels and the latents of a denoiser, for families whose latents are the VAE's shifted and scaled.

Shapes: B images, C latent channels, H × W latent size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from noria.config import EngineConfig
from noria.sampling.previews import fit_colours

MAX_PIXELS = 2048**2
"""Of all images that a VAE takes at once: more images are taken one by one, and a larger image in tiles by default.

One of so many takes 6.4 GB in Stable Diffusion XL's VAE in float16, in tiles 1.6.
"""


@dataclass(frozen=True, eq=False)
class LatentDistribution:
    """The distribution that a VAE makes of images, in the denoiser's scale and the VAE's dtype."""

    mean_BCHW: torch.Tensor
    deviation_BCHW: torch.Tensor | None  # None: the mean is all, and no noise is drawn to sample it


def without_overflow(vae: Any) -> Any:
    """Return the VAE, in float32 if it is in float16 and its configuration says that it overflows there."""
    return vae.float() if vae.dtype is torch.float16 and getattr(vae.config, "force_upcast", False) else vae


def memory_format_of(vae: Any, config: EngineConfig) -> torch.memory_format:
    """Return how the VAE's weights and images are laid out."""
    is_of_frames = hasattr(vae.config, "temperal_downsample")
    return torch.channels_last if config.channels_last and not is_of_frames else torch.contiguous_format


class LatentVae:
    """An AutoencoderKL, AutoencoderTiny, AutoencoderDC, or AutoencoderKLQwenImage (2.1), to which an image is a frame.

    Device and dtype are its own.
    """

    def __init__(self, vae: Any, config: EngineConfig) -> None:
        self._has_frames = hasattr(vae.config, "temperal_downsample")
        names = "dim_mult", "block_out_channels", "encoder_block_out_channels"
        blocks = next(getattr(vae.config, name) for name in names if hasattr(vae.config, name))
        self._memory_format = memory_format_of(vae, config)
        self._vae = vae.to(memory_format=self._memory_format)
        self._tiling = config.vae_tiling
        self.scale: int = 2 ** (len(blocks) - 1)  # pixels of a side per latent
        self._factor: float = getattr(vae.config, "scaling_factor", 1.0)
        self._shift: float = getattr(vae.config, "shift_factor", None) or 0.0
        mean, std = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
        self._mean_std_2C: torch.Tensor | None = None
        if mean is not None and std is not None:
            self._mean_std_2C = torch.tensor([list(mean), list(std)], device=vae.device, dtype=vae.dtype)

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of pixels, 0 to 255, as the pipelines of diffusers encode them."""
        pixels_BHW3 = pixels_BHW3.to(self._vae.device).float() / 255
        return self._encode((2 * pixels_BHW3 - 1).movedim(-1, 1))

    def _encode(self, pixels_B3HW: torch.Tensor) -> LatentDistribution:
        """Return the latents of pixels in -1 to 1."""
        pixels_B3HW = pixels_B3HW.to(self._vae.device, self._vae.dtype)
        self._limit_memory(len(pixels_B3HW), pixels_B3HW.shape[2] * pixels_B3HW.shape[3])
        encoded = self._vae.encode(pixels_B3HW[:, :, None] if self._has_frames else pixels_B3HW)
        # AutoencoderTiny and AutoencoderDC return latents, AutoencoderKL a distribution.
        distribution: Any = getattr(encoded, "latent_dist", None)
        mean_BCHW = encoded[0] if distribution is None else distribution.mean
        deviation_BCHW = None if distribution is None else distribution.std
        if self._has_frames:
            mean_BCHW, deviation_BCHW = distribution.mean.squeeze(2), distribution.std.squeeze(2)
        if self._mean_std_2C is None:
            factor: float | torch.Tensor = self._factor
            scaled = (mean_BCHW - self._shift) * factor
        else:
            mean, std = self._mean_std_2C[:, None, :, None, None]
            factor = self._factor / std
            scaled = (mean_BCHW - mean) * self._factor / std
        return LatentDistribution(scaled, None if deviation_BCHW is None else deviation_BCHW * factor)

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8, rounded as diffusers' VaeImageProcessor does."""
        self._limit_memory(len(latents_BCHW), latents_BCHW.shape[2] * latents_BCHW.shape[3] * self.scale**2)
        unscaled = self._unscaled(latents_BCHW.to(self._vae.dtype))
        unscaled = unscaled.contiguous(memory_format=self._memory_format)
        image = self._vae.decode(unscaled[:, :, None] if self._has_frames else unscaled, return_dict=False)[0]
        if self._has_frames:
            image = image.squeeze(2)
        image_BCHW = self._rgb((image.float() * 0.5 + 0.5).clamp(0, 1))
        return (image_BCHW.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).contiguous()

    def _rgb(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the colours of decoded images, 0 to 1."""
        return image_BCHW

    def _limit_memory(self, num_images: int, num_pixels: int) -> None:
        """Choose how the VAE takes images of so many pixels each: whole or in tiles, together or one by one."""
        self._vae.use_tiling = num_pixels > MAX_PIXELS if self._tiling == "auto" else self._tiling
        self._vae.use_slicing = num_images * num_pixels > MAX_PIXELS

    def _unscaled(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        if self._mean_std_2C is None:
            return latents_BCHW / self._factor + self._shift
        mean, std = self._mean_std_2C[:, None, :, None, None]
        unscaled_BCHW: torch.Tensor = latents_BCHW * std / self._factor + mean
        return unscaled_BCHW

    @torch.inference_mode()
    def fit_preview_colours(self) -> torch.Tensor:
        """Return the map of `fit_colours` for this VAE, on its device."""
        if self._vae.device.type == "meta":
            return torch.empty(0, device="meta")
        return fit_colours(lambda pixels_N3HW: self._encode(pixels_N3HW).mean_BCHW, self.scale).to(self._vae.device)


class OpaqueVae(LatentVae):
    """An AutoencoderKLQwenImage21, whose images have a channel for opacity: those here are opaque, on white."""

    def _encode(self, pixels_B3HW: torch.Tensor) -> LatentDistribution:
        return super()._encode(torch.nn.functional.pad(pixels_B3HW, (0, 0, 0, 0, 0, 1), value=1.0))

    def _rgb(self, image_BCHW: torch.Tensor) -> torch.Tensor:
        colours_B3HW, opacity_B1HW = image_BCHW[:, :3], image_BCHW[:, 3:]
        return torch.lerp(torch.ones_like(colours_B3HW), colours_B3HW, opacity_B1HW)


class PatchedVae(LatentVae):
    """An AutoencoderKLFlux2: its latents in blocks of 2 × 2 are the channels of one, by the statistics of a batch norm.

    It encodes to the mean of its distribution, so that no noise is drawn.
    """

    patch = 2

    def __init__(self, vae: Any, config: EngineConfig) -> None:
        super().__init__(vae, config)
        self.scale *= self.patch
        self._mean_1C11 = vae.bn.running_mean.view(1, -1, 1, 1)
        self._std_1C11 = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)

    def _encode(self, pixels_B3HW: torch.Tensor) -> LatentDistribution:
        mean_BCHW = super()._encode(pixels_B3HW).mean_BCHW
        patched_BCHW = torch.nn.functional.pixel_unshuffle(mean_BCHW, self.patch)
        return LatentDistribution((patched_BCHW - self._mean_1C11) / self._std_1C11, None)

    def _unscaled(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        unscaled_BCHW = latents_BCHW * self._std_1C11 + self._mean_1C11
        return torch.nn.functional.pixel_shuffle(unscaled_BCHW, self.patch)
