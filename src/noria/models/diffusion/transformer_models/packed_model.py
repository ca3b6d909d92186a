"""Base of FLUX.1 and Chroma: blocks of 2 × 2 latents are the transformer's tokens, and the shift is by their number.

Shapes: R rows, C latent channels, H × W latent size, N = H / 2 · W / 2 tokens of an image, or of the largest in a call,
D = 4 · C.
"""

import functools

import torch

from noria.config import EngineConfig
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts
from noria.sampling.guidance import CLASSIFIER_FREE, Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length


class PackedModel(TransformerModel):
    """A model whose transformer takes packed latents; elsewhere they stay [C, H, W]."""

    def __init__(self, parts: TransformerParts, config: EngineConfig, guidance: Guidance = CLASSIFIER_FREE) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, guidance, parts.transformer.out_channels // PATCH**2)

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens."""
        mu = shift_of_length(self.num_tokens(width_px, height_px), self.scheduler_config)
        return Schedule(evenly_falling_sigmas(num_steps), mu=mu)


@functools.lru_cache(maxsize=64)
def positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return [N, 3] of 0, row and column of an image's tokens; without `columns` zeros, those of a text."""
    if not columns:
        return torch.zeros(rows, 3, device=device, dtype=dtype)
    grid = torch.zeros(rows, columns, 3)
    grid[..., 1], grid[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
    return grid.reshape(-1, 3).to(device, dtype)
