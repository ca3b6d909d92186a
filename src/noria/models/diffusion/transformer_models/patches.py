"""Patches of 2 × 2 latents, the tokens of several transformers, as diffusers' pipelines order their numbers.

Shapes: R rows, C latent channels, H × W latent size, N = H / 2 · W / 2 tokens, D = 4·C numbers of a token.
"""

import functools

import torch

from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH


def to_tokens(latents_RCHW: torch.Tensor) -> torch.Tensor:
    """Return [R, N, D]."""
    num_rows, channels, height, width = latents_RCHW.shape
    patches = latents_RCHW.reshape(num_rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(num_rows, -1, channels * PATCH**2)


def from_tokens(tokens_RND: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return [R, C, H, W]."""
    num_rows, _, numbers = tokens_RND.shape
    patches = tokens_RND.reshape(num_rows, height // PATCH, width // PATCH, numbers // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(num_rows, -1, height, width)


@functools.lru_cache(maxsize=64)
def positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, 3] of 0, row and column of an image's tokens; without `columns` zeros, those of a text."""
    if not columns:
        return torch.zeros(rows, 3, device=device, dtype=dtype)
    grid = torch.zeros(rows, columns, 3)
    grid[..., 1], grid[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
    return grid.reshape(-1, 3).to(device, dtype)
