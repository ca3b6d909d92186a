"""The base of FLUX.1 and FLUX.2: rows with nearly as many tokens share a call, whatever their sizes and references.

Shapes: R rows, C latent channels, H × W latent size, T tokens of a prompt, N tokens of an image, M of references, D
numbers of a token, A axes of positions.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import ConditioningRows, ReferenceTokens
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.transformer_models.token_rows import (
    RowPositions,
    Sizes,
    can_mix_sizes,
    image_rows,
    length_class,
    reference_tokens,
    token_rows,
)
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts
from noria.sampling.guidance import Guidance


class TokenRowModel(TransformerModel):
    """A model whose calls mix rows as `token_rows.py` makes them."""

    patch: ClassVar[int]  # latents of a token along one side

    def __init__(
        self, parts: TransformerParts, config: EngineConfig, guidance: Guidance, latent_channels: int | None = None
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, guidance, latent_channels)
        self._mixes_sizes = can_mix_sizes(config)
        parts.transformer.pos_embed = RowPositions(parts.transformer.pos_embed)

    def call_size(self, num_pixels: int) -> tuple[int, int] | None:
        """Return the class of a row's number of tokens, whose rows share calls."""
        return (length_class(num_pixels / (self.patch * self.latent_scale) ** 2), 0) if self._mixes_sizes else None

    def encode_references(self, pixels: Sequence[torch.Tensor]) -> ReferenceTokens:
        """Return the tokens of reference images, the modes of the VAE's distributions."""
        return reference_tokens([self.encode(pixels_HW3[None]).mean_BCHW for pixels_HW3 in pixels], self._to_tokens)

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        references: Sequence[ReferenceTokens | None] = (),
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape.

        `guidance_R` are the scales of a model that embeds them; `references` are those of each row, () if no row has
        any.
        """
        rows = token_rows(latents_R, references, self._to_tokens, self._positions)
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        (velocity_RND,) = self._transformer(
            hidden_states=rows.tokens_RND,
            timestep=timesteps_R.to(self.dtype) / 1000,
            guidance=guidance_R,
            **conditioning.tokens,
            **conditioning.vectors,
            txt_ids=rows.text_positions(self._text_positions(num_tokens)),
            img_ids=rows.positions,
            joint_attention_kwargs=rows.attention_mask(num_tokens),
            return_dict=False,
        )
        return image_rows(velocity_RND, latents_R, self._from_tokens, self.patch**2)

    @abstractmethod
    def _to_tokens(self, latents_RCHW: torch.Tensor) -> torch.Tensor:
        """Return [R, N, D], in the model's precision."""

    @abstractmethod
    def _from_tokens(self, tokens_RND: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Return [R, C, H, W]."""

    @abstractmethod
    def _positions(self, size: tuple[int, int], reference_sizes: Sizes) -> torch.Tensor:
        """Return [N + M, A] of an image and of its references, of H × W latents."""

    @abstractmethod
    def _text_positions(self, num_tokens: int) -> torch.Tensor:
        """Return [T, A]."""
