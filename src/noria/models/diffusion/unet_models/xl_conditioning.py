"""What Stable Diffusion XL and its refiner are conditioned on: the outputs of text encoders, and sizes.

Shapes: B prompts, T tokens, D text width, P width of the pooled output.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from noria.models.diffusion.conditioning import Conditioning

TextEncoder = tuple[Any, Any]
"""A tokenizer and its text encoder."""


def text_encode(
    text_encoders: Sequence[TextEncoder], prompts: Sequence[str | None], device: torch.device, dtype: torch.dtype
) -> list[Conditioning]:
    """Return the conditioning of each prompt, as by diffusers' `encode_prompt`; of None it is zeros.

    It has the tokens of all encoders side by side, and the pooled output of the last one.
    """
    texts = ["" if prompt is None else prompt for prompt in prompts]
    hidden, pooled_BP = [], None
    for tokenizer, text_encoder in text_encoders:
        tokens = tokenizer(
            texts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        )
        outputs = text_encoder(tokens.input_ids.to(text_encoder.device), output_hidden_states=True)
        hidden.append(outputs.hidden_states[-2])
        pooled_BP = outputs[0]  # with a projection, its pooled output comes first
    assert pooled_BP is not None
    embeddings_BTD = torch.cat(hidden, dim=-1).to(device, dtype)
    return [
        _conditioning(tokens_TD, pooled_P)
        if prompt is not None
        else _conditioning(torch.zeros_like(tokens_TD), torch.zeros_like(pooled_P))
        for prompt, tokens_TD, pooled_P in zip(prompts, embeddings_BTD, pooled_BP.to(device, dtype), strict=True)
    ]


def _conditioning(tokens_TD: torch.Tensor, pooled_P: torch.Tensor) -> Conditioning:
    return Conditioning({"encoder_hidden_states": tokens_TD}, {"text_embeds": pooled_P})


@functools.lru_cache(maxsize=64)
def size_ids(width_px: int, height_px: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [1, 6]: original size, crop and target size, of an image that is neither scaled nor cropped."""
    return torch.tensor([[height_px, width_px, 0, 0, height_px, width_px]], dtype=dtype, device=device)
