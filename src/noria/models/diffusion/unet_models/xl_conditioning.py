"""The conditions of Stable Diffusion XL and its refiner: the outputs of text encoders, and sizes.

Shapes: B prompts, T tokens, D text width, P width of the pooled output.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from noria.models.diffusion.conditioning import Conditioning
from noria.models.diffusion.folders.unet_models.stable_diffusion_xl_folder import CLIP_SKIP
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.unet_models.clip_encoding import TextEncoder, clip_encode


def text_encode(
    text_encoders: Sequence[TextEncoder], prompts: Sequence[PromptText], device: torch.device, dtype: torch.dtype
) -> list[Conditioning]:
    """Return the conditioning of each prompt, of a plain one as by diffusers' `encode_prompt`; of None it is zeros.

    It has the tokens of all encoders side by side, and the pooled output of the last one.
    """
    encoded = [clip_encode(encoder, prompts, _read_layer) for encoder in text_encoders]
    found = []
    for prompt, *of_encoders in zip(prompts, *encoded, strict=True):
        pooled_P = of_encoders[-1].pooled_P
        assert pooled_P is not None
        length = min(len(each.tokens_TD) for each in of_encoders)  # tokenizers may differ in a folder
        tokens_TD = torch.cat([each.tokens_TD[:length] for each in of_encoders], dim=-1).to(device, dtype)
        pooled_P = pooled_P.to(device, dtype)
        if prompt is None:
            tokens_TD, pooled_P = torch.zeros_like(tokens_TD), torch.zeros_like(pooled_P)
        num_cut = 0 if prompt is None else of_encoders[-1].num_cut
        found.append(
            Conditioning({"encoder_hidden_states": tokens_TD}, {"text_embeds": pooled_P}, num_cut, is_repeatable=True)
        )
    return found


def _read_layer(outputs: Any, clip_skip: int | None) -> torch.Tensor:
    """Return the outputs of the last layer but one, or of another one from the end, as they are."""
    layer_BTD: torch.Tensor = outputs.hidden_states[-(clip_skip or CLIP_SKIP)]
    return layer_BTD


@functools.lru_cache(maxsize=64)
def size_ids(width_px: int, height_px: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [1, 6]: original size, crop and target size, of an image that is neither scaled nor cropped."""
    return torch.tensor([[height_px, width_px, 0, 0, height_px, width_px]], dtype=dtype, device=device)
