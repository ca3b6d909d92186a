"""Embeddings (textual inversion): files with vectors in place of the tokens of a word, for CLIP text encoders.

A file has one tensor, as `emb_params` of A1111 or by the placeholder of diffusers, or `clip_l` and `clip_g` for SDXL.
An encoder is given the vectors that have its width.
"""

import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from noria.errors import InvalidField, ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.loras.lora_file import read_tensors
from noria.models.diffusion.prompts.clip_prompt import TextEmbedding
from noria.protocol.diffusion import Embedding

_MAX_BYTES = 4 * 2**20
_MAX_VECTORS = 75  # those that fit one call of a text encoder


def load_embedding(embedding: Embedding, file: pathlib.Path, parts: Mapping[str, Any], model: str) -> TextEmbedding:
    """Return an embedding for the text encoders among a model's `parts`.

    Raises InvalidField: the file is damaged or too large, or its vectors do not fit a text encoder.
    """
    widths = [part.config.hidden_size for name, part in parts.items() if name.startswith("text_encoder")]
    try:
        vectors = _read(file, embedding.digest)
    except ModelError as error:
        raise InvalidField(f"prompt: {error.message}", field="prompt") from error
    if not set(widths) <= vectors.keys():
        raise InvalidField(
            f"prompt: the embedding {embedding.name} has vectors of width {_listed(vectors)}, but the text encoders of "
            f"{model} have {_listed(widths)}: it is made for another family.",
            field="prompt",
        )
    return TextEmbedding(embedding.name, embedding.digest, vectors)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers))


@functools.lru_cache(maxsize=64)
def _read(file: pathlib.Path, digest: str) -> Mapping[int, torch.Tensor]:
    """Return the vectors of a file, [number, width] float32, by width."""
    tensors, _ = read_tensors(file, _MAX_BYTES)
    if digest_of(file) != digest:
        raise ModelError(f"{file.name}: was replaced while it was read. Send the request again.")
    found: dict[int, torch.Tensor] = {}
    if len(tensors) > 1:
        tensors = {name: tensor for name, tensor in tensors.items() if name in ("clip_l", "clip_g")}
    for tensor in tensors.values():
        vectors = tensor[None] if tensor.dim() == 1 else tensor
        if vectors.dim() != 2 or not vectors.is_floating_point():
            raise ModelError(f"{file.name}: has a tensor of shape {list(tensor.shape)} and {tensor.dtype}, no vectors.")
        if not 1 <= len(vectors) <= _MAX_VECTORS:
            raise ModelError(f"{file.name}: has {len(vectors)} vectors; allowed are 1 to {_MAX_VECTORS}.")
        vectors = vectors.float()
        if not vectors.isfinite().all():
            raise ModelError(f"{file.name}: has numbers that are not finite.")
        found[vectors.shape[1]] = vectors
    if not found:
        raise ModelError(f"{file.name}: several tensors, but neither clip_l nor clip_g; it is no embedding.")
    if len({len(vectors) for vectors in found.values()}) > 1:
        raise ModelError(f"{file.name}: clip_l and clip_g have unequally many vectors.")
    return found
