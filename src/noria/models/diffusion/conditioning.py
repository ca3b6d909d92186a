"""The conditions that prompts set for a model, and how the prompts of a model call become its rows.

Shapes: R rows of a model call (two for a guided image), T tokens of a prompt, or of the longest in a call.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_REPEATED = 2
"""Times the longest row up to which rows are repeated; with more tokens the mask costs less."""


@dataclass(frozen=True, eq=False)
class Conditioning:
    """The conditions that one prompt sets for a model."""

    tokens: Mapping[str, torch.Tensor]  # [T, …] by name; T differs between prompts, not between their tensors
    vectors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name; of one shape for all prompts
    num_cut: int = 0  # tokens at the end of the prompt that the model is not shown
    # Whether its tokens, repeated any number of times, are the same condition. They are to an attention that knows no
    # positions: each weight of its softmax becomes as many equal parts.
    is_repeatable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.tokens.values(), *self.vectors.values()))

    def clone(self) -> "Conditioning":
        """Return a copy, which keeps no batch that these tensors are views of in memory."""
        return Conditioning(
            {name: tensor.clone() for name, tensor in self.tokens.items()},
            {name: tensor.clone() for name, tensor in self.vectors.items()},
            self.num_cut,
            self.is_repeatable,
        )


def num_cut_of(tokens: Any) -> list[int]:
    """Return how many tokens of each text a tokenizer of Hugging Face's has cut off, special ones not counted."""
    encodings = tokens.encodings or [None] * len(tokens["input_ids"])  # a slow tokenizer does not say
    return [sum(part.special_tokens_mask.count(0) for part in each.overflowing) if each else 0 for each in encodings]


@dataclass(frozen=True, eq=False)
class ReferenceTokens:
    """The reference images of a request, as a model is shown them: M tokens, which follow those of the image."""

    tokens_MD: torch.Tensor
    sizes: tuple[tuple[int, int], ...]  # H × W latents of each image


@dataclass(frozen=True, eq=False)
class ConditioningRows:
    """The conditioning of the R rows of a model call."""

    tokens: Mapping[str, torch.Tensor]  # [R, T, …], padded with zeros at the end
    vectors: Mapping[str, torch.Tensor]  # [R, …]
    mask_RT: torch.Tensor | None  # bool: the tokens that are no padding; None: there is no padding
    lengths: tuple[int, ...]  # tokens of each row, without padding


def collate(rows: Sequence[Conditioning]) -> ConditioningRows:
    """Return the conditioning of `rows`, all of one model, of one length.

    They are repeated, if they can be, up to a common multiple of their lengths, which needs no mask; else they are
    padded to the longest.
    """
    lengths = tuple(len(next(iter(row.tokens.values()))) for row in rows)
    multiple = math.lcm(*lengths)
    if len({*lengths}) > 1 and multiple <= _MAX_REPEATED * max(lengths) and all(row.is_repeatable for row in rows):
        return collate([_repeated(row, multiple) for row in rows])
    longest = max(lengths)
    tokens = {name: torch.stack([_pad(row.tokens[name], longest) for row in rows]) for name in rows[0].tokens}
    vectors = {name: torch.stack([row.vectors[name] for row in rows]) for name in rows[0].vectors}
    if min(lengths) == longest:
        return ConditioningRows(tokens, vectors, None, lengths)
    device = next(iter(tokens.values())).device
    positions_T = torch.arange(longest, device=device)
    mask_RT = positions_T < torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    return ConditioningRows(tokens, vectors, mask_RT, lengths)


def _repeated(row: Conditioning, length: int) -> Conditioning:
    """Return the same condition in so many tokens, a multiple of its own."""
    tokens = {
        name: tensor.repeat(length // len(tensor), *[1] * (tensor.dim() - 1)) for name, tensor in row.tokens.items()
    }
    return dataclasses.replace(row, tokens=tokens)


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros to the first axis."""
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
