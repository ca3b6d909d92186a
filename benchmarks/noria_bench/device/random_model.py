"""Stable Diffusion 1.5 at its published size for the engine, with random weights and no text encoder. Needs torch and
diffusers only.

A prompt's embedding is noise whose seed is a hash of the prompt. It takes no time; the UNet and the VAE do all the
work.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.images import scheduler_names
from noria.models.diffusion.conditioning import Conditioning
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.unet_models.controlnet import ControlNets
from noria.models.diffusion.unet_models.stable_diffusion import StableDiffusion
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE
from noria_bench.device.architectures import SD15, build_denoiser

VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_SCHEDULER_CONFIG = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "clip_sample": False,  # as the pipeline sets it, whatever the model's configuration
}


class RandomModel(StableDiffusion):
    """A StableDiffusion without its text encoder."""

    def __init__(self, config: EngineConfig, unet: Any, vae: Any) -> None:
        super().__init__(None, None, unet, vae, ControlNets({}, {}, config), _SCHEDULER_CONFIG, config, CLASSIFIER_FREE)
        self.lora_parts: Mapping[str, torch.nn.Module] = {"unet": unet}

    def text_encode(self, prompts: Sequence[PromptText]) -> list[Conditioning]:
        """The conditioning of each prompt."""
        shape = SD15.num_tokens, self.unet.config.cross_attention_dim
        embeddings = {}
        for prompt in dict.fromkeys(prompts):
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(str(prompt or "").encode()))
            tokens = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            embeddings[prompt] = Conditioning({"encoder_hidden_states": tokens})
        return [embeddings[prompt] for prompt in prompts]


def make_random_model(device: torch.device, dtype: torch.dtype, config: EngineConfig) -> DiffusionModel:
    """Build the model; no setting of `config` may be "auto"."""
    from diffusers import AutoencoderKL

    with torch.device(device):
        vae = AutoencoderKL(**VAE)
    vae = vae.to(dtype).eval().requires_grad_(requires_grad=False)
    return RandomModel(config, build_denoiser(SD15, device, dtype), vae)  # type: ignore[return-value]  # no lists


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
