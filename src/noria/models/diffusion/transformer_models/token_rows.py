"""Images of several sizes as rows of one call of a transformer of diffusers that embeds positions for all rows alike.

The tokens of a row's reference images follow those of its image. Rows are padded to the longest, and a mask hides the
padding from attention. Where the positions of rows differ, they are given side by side, as more axes than the
transformer has, and its layer for positions is replaced by one that returns the angles of each row.

Shapes: R rows, T tokens of a prompt, N tokens of an image with its references, or of the longest, D their width,
S = T + N, A axes of positions, E elements of a head of attention.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import ReferenceTokens
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.family import MASKLESS_ATTENTION

Sizes = tuple[tuple[int, int], ...]
_CLASS_LENGTH = 4096
_CLASSES_PER_FACTOR_4 = 15  # 4^(1 / 15) = 1.097: at most 8.9 % of the tokens of an image's row are padding


def length_class(num_tokens: float) -> int:
    """Return the number of a class of lengths, the same for lengths of which the longest has up to 9.7 % more.

    The longest of classes are those of square images of 1024 px, 512 px and so on.
    """
    return math.floor(math.log2(_CLASS_LENGTH / num_tokens) / 2 * _CLASSES_PER_FACTOR_4)


def can_mix_sizes(config: EngineConfig) -> bool:
    """Return whether calls take rows of several sizes: not in buckets, in which a batch changes no bit.

    Nor if attention takes no masks.
    """
    return config.attention not in MASKLESS_ATTENTION and not config.buckets


def reference_tokens(
    latents: Sequence[torch.Tensor], to_tokens: Callable[[torch.Tensor], torch.Tensor]
) -> ReferenceTokens:
    """Return the tokens of reference images, whose latents are each [1, C, H, W]."""
    tokens_MD = torch.cat([to_tokens(latents_1CHW)[0] for latents_1CHW in latents])
    return ReferenceTokens(tokens_MD, tuple((each.shape[2], each.shape[3]) for each in latents))


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Tokens of images, each with those of its references after it, as rows of one call."""

    tokens_RND: torch.Tensor
    positions: torch.Tensor  # [N, A] or, if they differ between rows, [N, R · A]
    mask_RN: torch.Tensor | None  # bool: the tokens that are no padding; None: all rows have as many

    def attention_mask(self, num_tokens: int) -> dict[str, torch.Tensor] | None:
        """Return what hides the padding from attention, after a prompt of so many tokens; None: there is none."""
        if self.mask_RN is None:
            return None
        mask_RS = torch.nn.functional.pad(self.mask_RN, (num_tokens, 0), value=True)
        return {"attention_mask": mask_RS[:, None, None]}

    def text_positions(self, positions_TA: torch.Tensor) -> torch.Tensor:
        """Return those of a text, which are the same in all rows, side by side as those of the images are."""
        return positions_TA.repeat(1, self.positions.shape[1] // positions_TA.shape[1])


def token_rows(
    latents_R: LatentRows,
    references: Sequence[ReferenceTokens | None],
    to_tokens: Callable[[torch.Tensor], torch.Tensor],
    positions_of: Callable[[tuple[int, int], Sizes], torch.Tensor],
) -> TokenRows:
    """Return the rows of all latents, each with its references; () if no row has any.

    `to_tokens` makes [R, N, D] of [R, C, H, W]; `positions_of` returns the [N, A] of an image of H × W latents and of
    references of such sizes, for equal ones the same tensor.
    """
    if isinstance(latents_R, torch.Tensor) and not references:
        return TokenRows(to_tokens(latents_R), positions_of(_size(latents_R), ()), None)
    rows, positions = [], []
    for row, latents_CHW in enumerate(latents_R):
        reference = references[row] if references else None
        tokens_ND = to_tokens(latents_CHW[None])[0]
        rows.append(tokens_ND if reference is None else torch.cat([tokens_ND, reference.tokens_MD]))
        positions.append(positions_of(_size(latents_CHW), () if reference is None else reference.sizes))
    if all(each is positions[0] for each in positions):
        return TokenRows(torch.stack(rows), positions[0], None)
    lengths = [len(tokens_ND) for tokens_ND in rows]
    longest, device = max(lengths), rows[0].device
    mask_RN = None
    if min(lengths) < longest:
        mask_RN = torch.arange(longest, device=device) < torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    return TokenRows(
        torch.stack([_pad(tokens_ND, longest) for tokens_ND in rows]),
        torch.cat([_pad(positions_NA, longest) for positions_NA in positions], dim=1),
        mask_RN,
    )


def image_rows(
    outputs_RND: torch.Tensor,
    latents_R: LatentRows,
    from_tokens: Callable[[torch.Tensor, int, int], torch.Tensor],
    latents_per_token: int,
) -> LatentRows:
    """Return the outputs for the images, which come first in their rows, of the sizes of `latents_R`.

    `from_tokens` makes [R, C, H, W] of [R, N, D].
    """

    def image(outputs_RND: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return from_tokens(outputs_RND[:, : math.prod(size) // latents_per_token], *size)

    if isinstance(latents_R, torch.Tensor):
        return image(outputs_RND, _size(latents_R))
    return [
        image(outputs_ND[None], _size(latents_CHW))[0].float()
        for outputs_ND, latents_CHW in zip(outputs_RND, latents_R, strict=True)
    ]


def _size(latents: torch.Tensor) -> tuple[int, int]:
    return latents.shape[-2], latents.shape[-1]


def _pad(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros to the last axis but one."""
    return torch.nn.functional.pad(tokens, (0, 0, 0, length - tokens.shape[-2]))


class RowPositions(torch.nn.Module):
    """Returns the angles of positions, or those of each row if their positions are side by side."""

    def __init__(self, inner: Any) -> None:
        """`inner` is the transformer's own layer: it returns cosines and sines [S, E] of positions [S, A]."""
        super().__init__()
        self._inner, self._num_axes = inner, len(inner.axes_dim)

    def forward(self, positions_SK: torch.Tensor) -> Any:
        """Return both, for `apply_rotary_emb` of diffusers."""
        if positions_SK.shape[1] == self._num_axes:
            return self._inner(positions_SK)
        length = len(positions_SK)
        positions_RSA = positions_SK.view(length, -1, self._num_axes).transpose(0, 1)
        cos, sin = self._inner(positions_RSA.flatten(0, 1))
        return _RowAngles(cos.view(-1, length, cos.shape[-1])), _RowAngles(sin.view(-1, length, sin.shape[-1]))


class _RowAngles:
    """Angles [R, S, E] in the place of those of all rows, [S, E], which diffusers gives axes of rows and of heads."""

    def __init__(self, angles_RSE: torch.Tensor) -> None:
        self._angles_RS1E = angles_RSE[:, :, None]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> "_RowAngles":
        """Join those of a text and of images, as FLUX.2 does along the first axis; here it is the second."""
        del types
        assert func is torch.cat and (kwargs or {}).get("dim", 0) == 0, "diffusers does other things than it did"
        return cls(torch.cat([each._angles_RS1E for each in args[0]], dim=1).squeeze(2))

    def __getitem__(self, axes: object) -> torch.Tensor:
        assert axes == (None, slice(None), None, slice(None)), "diffusers gives other axes than it did"
        return self._angles_RS1E
