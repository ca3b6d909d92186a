"""Pooling: combines the tokens of each text, as sentence-transformers' Pooling and SpladePooling do.

Shapes: B texts, T tokens of the longest, N tokens of all texts, D numbers of a token.
"""

import torch

from noria.protocol.text import Pooling, Splade


class PaddedTexts:
    """Finds the texts in [B, T, D], where they are padded on the right."""

    def __init__(self, mask_BT: torch.Tensor) -> None:
        """`mask_BT` is 0 where others do not attend to a token."""
        self._mask_BT1 = mask_BT.unsqueeze(-1)

    def first(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the first token of each text: [B, D], as the others do."""
        return hidden_BTD[:, 0]

    def last(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the last token of each text."""
        last_B = self._mask_BT1.squeeze(-1).sum(1) - 1
        return hidden_BTD.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BTD.shape[-1])).squeeze(1)

    def largest(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the largest of each number among the tokens of a text."""
        return hidden_BTD.masked_fill(self._mask_BT1 == 0, float("-inf")).amax(1)

    def total(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the sum of each number."""
        return (hidden_BTD * self._mask_BT1.to(hidden_BTD.dtype)).sum(1)

    def places(self) -> torch.Tensor:
        """Return the place of each token in its text, from 1: [B, T, 1]."""
        return self._mask_BT1.cumsum(1)


class PackedTexts:
    """Finds the texts in [1, N, D], where they follow each other, and tokens behind them belong to none."""

    def __init__(self, offsets_B1: torch.Tensor, texts_N: torch.Tensor) -> None:
        """Text b has the tokens from `offsets_B1[b]` to the next offset.

        `texts_N` is the text of each token, and B of one that belongs to none.
        """
        # Texts that only fill up a batch begin behind its last token.
        self._starts_B = offsets_B1[:-1].long().clamp(max=len(texts_N) - 1)
        self._ends_B, self._texts_N = offsets_B1[1:].long(), texts_N

    def first(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Return the first token of each text."""
        return hidden_1ND[0, self._starts_B]

    def last(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Return the last token of each text."""
        return hidden_1ND[0, self._ends_B - 1]

    def largest(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Return the largest of each number among the tokens of a text."""
        texts_ND = self._texts_N[:, None].expand(-1, hidden_1ND.shape[-1])
        return self._rows(hidden_1ND, float("-inf")).scatter_reduce_(0, texts_ND, hidden_1ND[0], "amax")[:-1]

    def total(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """Return the sum of each number."""
        return self._rows(hidden_1ND, 0.0).index_add_(0, self._texts_N, hidden_1ND[0])[:-1]

    def places(self) -> torch.Tensor:
        """Return the place of each token in its text, from 1: [1, N, 1]. Of a token of no text it may be anything."""
        starts_N = self._starts_B[self._texts_N.clamp(max=len(self._starts_B) - 1)]
        return (torch.arange(1, len(starts_N) + 1, device=starts_N.device) - starts_N)[None, :, None]

    def _rows(self, hidden_1ND: torch.Tensor, value: float) -> torch.Tensor:
        """A row for each text, and one for tokens that belong to none, whose numbers may be anything."""
        return hidden_1ND.new_full((len(self._ends_B) + 1, hidden_1ND.shape[-1]), value)


Texts = PaddedTexts | PackedTexts


def pool(mode: Pooling, hidden: torch.Tensor, texts: Texts) -> torch.Tensor:
    """Combine the tokens of each text to [B, D]."""
    match mode:
        case "cls":
            return texts.first(hidden)
        case "max":
            return texts.largest(hidden)
        case "lasttoken":
            return texts.last(hidden)
    weights = texts.places().to(hidden.dtype) if mode == "weightedmean" else torch.ones_like(hidden[..., :1])
    count = texts.total(weights)
    return texts.total(hidden * weights) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def pool_sparsely(splade: Splade, logits: torch.Tensor, texts: Texts) -> torch.Tensor:
    """Combine the logits of each text's tokens to [B, tokens of the vocabulary]."""
    pooled = logits.relu()
    if splade.strategy == "max":  # the logarithm keeps the order
        pooled = texts.largest(pooled)
    pooled = pooled.log1p()
    if splade.activation == "log1p_relu":
        pooled = pooled.log1p()
    return pooled if splade.strategy == "max" else texts.total(pooled)
