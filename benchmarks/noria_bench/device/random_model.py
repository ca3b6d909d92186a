"""Stable Diffusion 1.5 at its published size for the engine, with random weights and no text encoder. Needs torch and
diffusers only.

A prompt's embedding is noise whose seed is a hash of the prompt. It takes no time; the UNet and the VAE do all the
work. Shapes: B images, R UNet rows, C × H × W latents.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from noria.config import EngineConfig
from noria.images import scheduler_names
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.diffusion_model import InpaintingInput, LatentRows
from noria.models.diffusion.unet_models.graphed_calls import GraphedCalls
from noria.models.diffusion.vae import LatentDistribution
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule
from noria_bench.device.architectures import SD15, build_denoiser

VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}


class RandomModel:
    """A `noria.models.diffusion.diffusion_model.DiffusionModel`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, config: EngineConfig, unet: Any, vae: Any) -> None:
        self.device, self.dtype, self.noise_dtype = device, dtype, dtype
        self.latent_channels, self.latent_scale = 4, 8
        self.guidance = CLASSIFIER_FREE
        self.inpainting: InpaintingInput | None = None
        self.network: torch.nn.Module = unet
        self.lora_parts: Mapping[str, torch.nn.Module] = {"unet": unet}
        self._text_shape = SD15.num_tokens, unet.config.cross_attention_dim
        self.scheduler_config: dict[str, Any] = {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "steps_offset": 1,
            # As the pipeline sets it, whatever the model's configuration.
            "clip_sample": False,
        }
        # For previews, which are not used.
        self.preview_colours = torch.zeros(5, 3, device=device)
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        unet.to(memory_format=self._memory_format)
        self._unet = GraphedCalls(unet, device) if config.cuda_graphs and device.type == "cuda" else unet
        self._vae = vae.to(memory_format=self._memory_format)

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        return self.latent_channels, height_px // self.latent_scale, width_px // self.latent_scale

    def call_size(self, num_pixels: int) -> None:  # noqa: ARG002
        """None: a call has images of one size."""
        return

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, whatever the size."""
        return DEFAULT_SCHEDULE

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """The conditioning of each prompt."""
        embeddings = {}
        for prompt in dict.fromkeys(prompts):
            generator = torch.Generator(self.device).manual_seed(zlib.crc32((prompt or "").encode()))
            tokens = torch.randn(self._text_shape, generator=generator, device=self.device, dtype=self.dtype)
            embeddings[prompt] = Conditioning({"encoder_hidden_states": tokens})
        return [embeddings[prompt] for prompt in prompts]

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None = None,  # noqa: ARG002
    ) -> LatentRows:
        """The UNet's output [R, C, H, W]."""
        assert isinstance(latents_R, torch.Tensor), "a UNet takes images of one size"
        latents_RCHW = latents_R.to(self.dtype).contiguous(memory_format=self._memory_format)
        output: torch.Tensor = self._unet(latents_RCHW, timesteps_R, **conditioning.tokens, return_dict=False)[0]
        return output

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Weights of previews, which are not used."""
        return np.ones((2, len(timesteps_B)), np.float32)

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Latents of pixels [B, height, width, 3], uint8."""
        scaled = (pixels_BHW3.to(self.device, self.dtype) / 127.5 - 1).movedim(-1, 1)
        encoded = self._vae.encode(scaled).latent_dist
        return LatentDistribution(encoded.mean * 0.18215, encoded.std * 0.18215)

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Pixels [B, height, width, 3], uint8."""
        scaled = (latents_BCHW / 0.18215).to(self.dtype).contiguous(memory_format=self._memory_format)
        image_BCHW = self._vae.decode(scaled, return_dict=False)[0].float() * 0.5 + 0.5
        pixels: torch.Tensor = (image_BCHW.clamp(0, 1).permute(0, 2, 3, 1) * 255).round().to(torch.uint8).contiguous()
        return pixels


def make_random_model(device: torch.device, dtype: torch.dtype, config: EngineConfig) -> RandomModel:
    """Build the model; no setting of `config` may be "auto"."""
    from diffusers import AutoencoderKL

    with torch.device(device):
        vae = AutoencoderKL(**VAE)
    vae = vae.to(dtype).eval().requires_grad_(requires_grad=False)
    return RandomModel(device, dtype, config, build_denoiser(SD15, device, dtype), vae)


RANDOM_SPEC = DiffusionModelSpec(
    name="sd15-random",
    folder="",
    fingerprint="random",
    family="stable-diffusion",
    pipeline="StableDiffusionPipeline",
    default_width_px=512,
    default_height_px=512,
    min_side_px=128,
    max_side_px=1024,
    multiple_px=64,
    default_scheduler="dpm++2m",
    schedulers=tuple(choice.name for choice in scheduler_names.choices_of_family("diffusion")),
    default_steps=SD15.default_steps,
    default_guidance=7.5,
    num_parameters=859_520_964,
)
