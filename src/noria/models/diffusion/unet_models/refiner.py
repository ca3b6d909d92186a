"""The refiner of Stable Diffusion XL: the denoiser of the last steps of an image that another model has begun.

It has a text encoder, a UNet and a scheduler of its own, and takes the latents as the model leaves them. It differs
from the model in this:

- Conditioned on the tokens and the pooled output of one text encoder, on the original size and the crop, and on an
  aesthetic score, which is low for negative prompts.
- Whether a negative prompt that is absent is zeros or empty is the refiner's own setting.

Shapes: R UNet rows, C latent channels, H × W latent size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from noria.config import EngineConfig
from noria.models.adapters.refiner_folders import FAMILY, RefinerFolder, RefinerFolders
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.part_loading import (
    DTYPES,
    SharedParts,
    load_tokenizer,
    load_weights,
    text_encoder_placement,
    unquantized_dtype,
)
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.unet_models.clip_encoding import TextEncoder
from noria.models.diffusion.unet_models.unet import DenoisingUnet
from noria.models.diffusion.unet_models.xl_conditioning import size_ids, text_encode
from noria.models.files.weights import read_object
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import Guidance

_SCORE, _NEGATIVE_SCORE = 6.0, 2.5  # aesthetic scores, as diffusers' defaults


class Refiner:
    """A loaded refiner of one model."""

    def __init__(
        self,
        folder: RefinerFolder,
        text_encoder: TextEncoder,
        unet: Any,
        latent_scale: int,
        config: EngineConfig,
        guidance: Guidance,
    ) -> None:
        """`latent_scale` is pixels per latent along one side; device and dtype are those of the UNet."""
        self.name, self.digest, self.guidance = folder.name, folder.digest, guidance
        self.scheduler_config = read_object(folder.path / "scheduler" / "scheduler_config.json")
        self.device: torch.device = unet.device
        self.dtype = unquantized_dtype(unet)
        self._text_encoder, self._latent_scale = text_encoder, latent_scale
        self._denoiser = DenoisingUnet(unet, self.scheduler_config, config)

    def text_encode(self, prompts: Sequence[PromptText]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as `xl_conditioning.py` makes it; of None it is zeros."""
        return [
            _with_score(each, _SCORE) for each in text_encode([self._text_encoder], prompts, self.device, self.dtype)
        ]

    def as_negative(self, conditioning: Conditioning) -> Conditioning:
        """Return the conditioning of a prompt as that of a negative prompt."""
        return _with_score(conditioning, _NEGATIVE_SCORE)

    def predict(
        self,
        latents_R: torch.Tensor | list[torch.Tensor],
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the UNet's raw output [R, C, H, W]."""
        assert isinstance(latents_R, torch.Tensor), "a UNet takes images of one size at a time"
        num_rows, _, height, width = latents_R.shape
        size_6 = size_ids(width * self._latent_scale, height * self._latent_scale, self.dtype, self.device)
        added = {
            "text_embeds": conditioning.vectors["text_embeds"],
            "time_ids": torch.cat([size_6[:, :4].expand(num_rows, -1), conditioning.vectors["score"]], dim=1),
        }
        return self._denoiser.predict(latents_R, timesteps_R, conditioning, guidance_R, added_cond_kwargs=added)

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview."""
        return self._denoiser.clean_weights(timesteps_B)


def _with_score(conditioning: Conditioning, score: float) -> Conditioning:
    pooled_P = conditioning.vectors["text_embeds"]
    return dataclasses.replace(conditioning, vectors={"text_embeds": pooled_P, "score": pooled_P.new_full((1,), score)})


_loaded: SharedParts[Any] = SharedParts()  # text encoders and UNets


def load_refiner(
    spec: DiffusionModelSpec, config: EngineConfig, device: str, latent_scale: int, text_encoder_2: Any
) -> Refiner | None:
    """Load the refiner of `engine.refiners` for a model, if it has one; onto "meta" without weights.

    `text_encoder_2` is the model's, which is the refiner's, too, if the folders have the same.

    Raises ModelError: the folder is damaged, or its weights do not match its configuration.
    """
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer

    folder = RefinerFolders.of(config).for_model(spec)
    if folder is None:
        return None

    def load(part_class: Any, part: str, dtype: torch.dtype, place: str) -> Any:
        source = folder.path / part, FAMILY.weight_stems[part]
        return _loaded.get(
            _key(folder, part, config, dtype, place), lambda: load_weights(part_class, *source, dtype, place)
        )

    text_encoder = text_encoder_2
    if not folder.shares_text_encoder(spec):
        text_encoder = load(CLIPTextModelWithProjection, "text_encoder_2", *text_encoder_placement(config, device))
    tokenizer = load_tokenizer(CLIPTokenizer, folder.path / "tokenizer_2", text_encoder)
    unet = load(UNet2DConditionModel, "unet", DTYPES[config.dtype], device)
    zeros = read_object(folder.path / "model_index.json").get("force_zeros_for_empty_prompt", True)
    guidance = Guidance(rescale=spec.guidance_rescale, negative_absent="zeros" if zeros else "empty")
    return Refiner(folder, (tokenizer, text_encoder), unet, latent_scale, config, guidance)


def loaded_refiner_parts(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> set[str]:
    """Return the parts of a model's refiner that other models of this process hold, and that it would share."""
    folder = RefinerFolders.of(config).for_model(spec)
    if folder is None:
        return set()
    placements = {"text_encoder_2": text_encoder_placement(config, device), "unet": (DTYPES[config.dtype], device)}
    return {part for part, placement in placements.items() if _key(folder, part, config, *placement) in _loaded}


def _key(folder: RefinerFolder, part: str, config: EngineConfig, dtype: torch.dtype, place: str) -> tuple[object, ...]:
    return folder, part, dtype, place, config.attention, config.channels_last, config.compile
