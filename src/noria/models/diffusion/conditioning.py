"""What prompts condition a model on, and how the prompts of a model call become its rows.

Shapes: R rows of a model call (two for a guided image), T tokens of a prompt, or of the longest in a call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What one prompt conditions a model on."""

    tokens: Mapping[str, torch.Tensor]  # [T, …] by name; T differs between prompts, not between their tensors
    vectors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name; of one shape for all prompts

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.tokens.values(), *self.vectors.values()))

    def clone(self) -> "Conditioning":
        """Return a copy, which keeps no batch that these tensors are views of in memory."""
        return Conditioning(
            {name: tensor.clone() for name, tensor in self.tokens.items()},
            {name: tensor.clone() for name, tensor in self.vectors.items()},
        )


@dataclass(frozen=True, eq=False)
class ReferenceTokens:
    """What a model is shown of the reference images of a request: M tokens, which follow those of the image."""

    tokens_MD: torch.Tensor
    sizes: tuple[tuple[int, int], ...]  # H × W latents of each image


@dataclass(frozen=True, eq=False)
class ConditioningRows:
    """The conditioning of the R rows of a model call."""

    tokens: Mapping[str, torch.Tensor]  # [R, T, …], padded with zeros at the end
    vectors: Mapping[str, torch.Tensor]  # [R, …]
    mask_RT: torch.Tensor | None  # bool: the tokens that are no padding; None: there is no padding
    lengths: tuple[int, ...]  # of each row, without padding


def collate(rows: Sequence[Conditioning]) -> ConditioningRows:
    """Return the conditioning of `rows`, all of one model, padded to the longest of them."""
    lengths = tuple(len(next(iter(row.tokens.values()))) for row in rows)
    longest = max(lengths)
    tokens = {name: torch.stack([_pad(row.tokens[name], longest) for row in rows]) for name in rows[0].tokens}
    vectors = {name: torch.stack([row.vectors[name] for row in rows]) for name in rows[0].vectors}
    if min(lengths) == longest:
        return ConditioningRows(tokens, vectors, None, lengths)
    device = next(iter(tokens.values())).device
    positions_T = torch.arange(longest, device=device)
    mask_RT = positions_T < torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    return ConditioningRows(tokens, vectors, mask_RT, lengths)


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros to the first axis."""
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
