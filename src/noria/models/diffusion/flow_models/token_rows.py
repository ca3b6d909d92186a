"""Images of several sizes as rows of one call of a transformer of diffusers that embeds positions for all rows alike.

Rows are padded to the longest, and a mask hides the padding from attention. The positions of each row differ: they are
given side by side, as more axes than the transformer has, and its layer for positions is replaced by one that returns
the angles of each row.

Shapes: R rows, T tokens of a prompt, N tokens of an image, or of the longest, D their width, S = T + N, A axes of
positions, E elements of a head of attention.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CLASS_LENGTH = 4096
_CLASSES_PER_FACTOR_4 = 15  # 4^(1 / 15) = 1.097: at most 8.9 % of the tokens of an image's row are padding


def length_class(num_tokens: int) -> int:
    """Return the number of a class of lengths, the same for lengths of which the longest has up to 9.7 % more.

    The longest of classes are those of square images of 1024 px, 512 px and so on.
    """
    return math.floor(math.log2(_CLASS_LENGTH / num_tokens) / 2 * _CLASSES_PER_FACTOR_4)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Tokens of images as rows of one call."""

    tokens_RND: torch.Tensor
    positions: torch.Tensor  # [N, A] or, of several sizes, [N, R · A]
    mask_RN: torch.Tensor | None  # bool: the tokens that are no padding; None: all rows have one size

    def attention_mask(self, num_tokens: int) -> dict[str, torch.Tensor] | None:
        """Return what hides the padding from attention, after a prompt of so many tokens; None: there is none."""
        if self.mask_RN is None:
            return None
        mask_RS = torch.nn.functional.pad(self.mask_RN, (num_tokens, 0), value=True)
        return {"attention_mask": mask_RS[:, None, None]}


def token_rows(tokens: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]) -> TokenRows:
    """Return the rows of all `tokens`, each [1, N, D], whose `positions` are each [N, A]; alone also [R, N, D]."""
    if len(tokens) == 1:
        return TokenRows(tokens[0], positions[0], None)
    lengths = [len(positions_NA) for positions_NA in positions]
    longest, device = max(lengths), tokens[0].device
    return TokenRows(
        torch.cat([_pad(tokens_1ND, longest) for tokens_1ND in tokens]),
        torch.cat([_pad(positions_NA, longest) for positions_NA in positions], dim=1),
        torch.arange(longest, device=device) < torch.tensor(lengths).to(device, non_blocking=True)[:, None],
    )


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

    def __getitem__(self, axes: object) -> torch.Tensor:
        assert axes == (None, slice(None), None, slice(None)), "diffusers gives other axes than it did"
        return self._angles_RS1E
