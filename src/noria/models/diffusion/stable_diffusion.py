"""Stable Diffusion 1.x and 2.x on one device: prompts to embeddings, one UNet call, latents to pixels.

Loads the parts of a folder in diffusers format (safetensors only, checked before by `models/catalog.py`) without
diffusers' pipeline: `engine/diffusion/executor.py` replaces the pipeline's loop, for many requests at once. Knows
nothing of requests or slots.

Conditioned on one tensor of tokens, by the name of the UNet's argument: `encoder_hidden_states` [rows, T, D].

Shapes: B images, R UNet rows (two for a guided image), T tokens, D text width, C latent channels, H × W latent size.
"""

import contextlib
import logging
from typing import Any

import numpy as np
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.families import FAMILIES
from noria.models.weights import variant
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE, Guidance
from noria.sampling.previews import fit_colours
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StableDiffusion:
    """The four parts of one StableDiffusionPipeline folder, ready on a device."""

    def __init__(
        self,
        tokenizer: Any,
        text_encoder: Any,
        unet: Any,
        vae: Any,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance = CLASSIFIER_FREE,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the UNet."""
        self.tokenizer, self.text_encoder, self.unet, self.vae = tokenizer, text_encoder, unet, vae
        self.scheduler_config, self.guidance = scheduler_config, guidance
        self.device, self.dtype = unet.device, unet.dtype
        self.latent_channels: int = unet.config.in_channels
        self.latent_scale: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self._num_tokens: int = tokenizer.model_max_length
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        for part in (text_encoder, unet, vae):
            part.eval().requires_grad_(requires_grad=False)
        unet.to(memory_format=self._memory_format)
        vae.to(memory_format=self._memory_format)
        set_attention(unet, config.attention)
        self.alpha_bars = _alpha_bars(scheduler_config)
        self.prediction_type: str = scheduler_config.get("prediction_type", "epsilon")
        with torch.inference_mode():
            self.preview_colours = fit_colours(self._encode_pixels, self.latent_scale).to(self.device)
        self._unet = torch.compile(unet, dynamic=False) if config.compile else unet

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "StableDiffusion":
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.

        """
        dtype = _DTYPES[config.dtype]
        with _silence_libraries(), _wrap_load_errors(spec):
            import diffusers
            from transformers import CLIPTextModel, CLIPTokenizer

            folder = spec.path
            index = diffusers.DiffusionPipeline.load_config(folder)
            tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
            text_encoder = _load_part(CLIPTextModel, spec, "text_encoder", dtype)
            unet = _load_part(diffusers.UNet2DConditionModel, spec, "unet", dtype)
            vae_class = FAMILIES[spec.family].check_class(folder / "model_index.json", "vae", index["vae"][1])
            vae = _load_part(getattr(diffusers, vae_class), spec, "vae", dtype)
            scheduler_config = diffusers.DDIMScheduler.load_config(folder / "scheduler")
            return cls(
                tokenizer,
                text_encoder.to(device),
                unet.to(device),
                vae.to(device),
                dict(scheduler_config),
                config,
                Guidance(rescale=spec.guidance_rescale),
            )

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        return self.latent_channels, height_px // self.latent_scale, width_px // self.latent_scale

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, whatever the size."""
        return DEFAULT_SCHEDULE

    def text_encode(self, prompts: list[str]) -> list[Conditioning]:
        """Return the conditioning of each prompt, padded or truncated to T tokens, as by diffusers' `encode_prompt`."""
        tokens = self.tokenizer(
            prompts, padding="max_length", max_length=self._num_tokens, truncation=True, return_tensors="pt"
        )
        mask = (
            tokens.attention_mask.to(self.device)
            if getattr(self.text_encoder.config, "use_attention_mask", False)
            else None
        )
        embeddings_BTD = self.text_encoder(tokens.input_ids.to(self.device), attention_mask=mask)[0]
        return [Conditioning({"encoder_hidden_states": each_TD}) for each_TD in embeddings_BTD.to(self.dtype)]

    def _encode_pixels(self, pixels_N3HW: torch.Tensor) -> torch.Tensor:
        """Return latents [N, C, H, W], in the UNet's scale, of pixels in -1 to 1."""
        encoded = self.vae.encode(pixels_N3HW.to(self.device, self.dtype))
        # AutoencoderTiny returns latents, AutoencoderKL a distribution.
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        scaled: torch.Tensor = latents * self.vae.config.scaling_factor
        return scaled

    def predict(
        self, latents_RCHW: torch.Tensor, timesteps_R: torch.Tensor, conditioning: ConditioningRows
    ) -> torch.Tensor:
        """Return the UNet's raw output [R, C, H, W], of the kind `prediction_type`."""
        latents_RCHW = latents_RCHW.to(self.dtype).contiguous(memory_format=self._memory_format)
        outputs = self._unet(
            latents_RCHW,
            timesteps_R,
            **conditioning.tokens,
            encoder_attention_mask=conditioning.mask_RT,
            return_dict=False,
        )
        output_RCHW: torch.Tensor = outputs[0]
        return output_RCHW

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8, rounded as diffusers' VaeImageProcessor does."""
        scaled = latents_BCHW.to(self.dtype) / self.vae.config.scaling_factor
        image = self.vae.decode(scaled.contiguous(memory_format=self._memory_format), return_dict=False)[0]
        image_BCHW: torch.Tensor = (image.float() * 0.5 + 0.5).clamp(0, 1)
        return (image_BCHW.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).contiguous()


def _alpha_bars(scheduler_config: dict[str, Any]) -> np.ndarray:
    """Return ᾱ of each training timestep, as diffusers computes it from the betas of the configuration."""
    import diffusers

    return np.asarray(diffusers.DDIMScheduler.from_config(scheduler_config).alphas_cumprod, np.float64)


def set_attention(unet: Any, kind: str) -> None:
    """Choose the UNet's implementation of attention, by the values of `engine.attention`.

    Raises:
        ConfigError: xformers is not installed or does not work on this device.

    """
    if kind == "sdpa":  # torch's scaled_dot_product_attention, diffusers' default
        from diffusers.models.attention_processor import AttnProcessor2_0

        unet.set_attn_processor(AttnProcessor2_0())
    elif kind == "plain":
        from diffusers.models.attention_processor import AttnProcessor

        unet.set_attn_processor(AttnProcessor())
    elif kind == "sliced":
        unet.set_attention_slice("auto")
    elif kind == "xformers":
        try:
            unet.enable_xformers_memory_efficient_attention()
        except (ImportError, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                f"engine.attention is 'xformers', which does not work here: {error}. Use 'sdpa'."
            ) from error
    else:
        raise AssertionError(kind)


def _load_part(part_class: Any, spec: DiffusionModelSpec, name: str, dtype: torch.dtype) -> Any:
    """Load one part; check that no weights are missing, which the libraries would silently fill with random numbers."""
    folder, stem = spec.path / name, FAMILIES[spec.family].weight_stems[name]
    part, info = part_class.from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
        local_files_only=True,
        variant=variant(folder, stem),
    )
    missing_keys = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if missing_keys:
        raise ModelError(
            f"the weights in {folder} do not match its configuration: {len(missing_keys)} parameters are missing or "
            f"have another shape, the first is {missing_keys[0]}. Save the model again with save_pretrained."
        )
    return part


@contextlib.contextmanager
def _silence_libraries() -> Any:
    """Disable progress bars and warnings of diffusers and transformers, until the process ends; errors still raise."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield


@contextlib.contextmanager
def _wrap_load_errors(spec: DiffusionModelSpec) -> Any:
    """Convert the libraries' exceptions to a ModelError that names the model."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"the model in {spec.folder} cannot be loaded: {error}") from error
