"""Divides the tokens of a prompt among calls of a text encoder, which takes a fixed number of them.

AUTOMATIC1111's rule: where a chunk is full, what follows its last comma moves to the next one, if that comma is near.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_CHUNKS = 6
"""The most chunks of a prompt. Each is a call of the text encoder, and lengthens the denoiser's calls for all rows."""

_MAX_BACK = 20  # tokens from the one that finds the chunk full back to the comma; A1111's default


class WeightedTokens(NamedTuple):
    """Tokens that are kept together if a chunk can have so many, and their weight."""

    tokens: Sequence[int]
    weight: float


class Chunk(NamedTuple):
    """The tokens of one call, without those of start, end and padding, and their weights."""

    tokens: list[int]
    weights: list[float]


def split(sections: Iterable[Iterable[WeightedTokens]], num_tokens: int, comma: int | None) -> tuple[list[Chunk], int]:
    """Return the chunks of a prompt, at least one, of at most `num_tokens`, and how many tokens are cut off at its end.

    Each section begins with a new chunk; an empty last one has none. `comma` is the token at which a prompt is divided;
    None: anywhere.
    """
    chunks = []
    for section in sections:
        chunk, after_comma = Chunk([], []), None
        chunks.append(chunk)
        for tokens, weight in section:
            if len(chunk.tokens) + len(tokens) > num_tokens >= len(tokens) > 1:
                chunk, after_comma = Chunk([], []), None
                chunks.append(chunk)
            for token in tokens:
                if len(chunk.tokens) == num_tokens:
                    full, chunk = chunk, Chunk([], [])
                    if token != comma and after_comma is not None and num_tokens - after_comma < _MAX_BACK:
                        chunk = Chunk(full.tokens[after_comma:], full.weights[after_comma:])
                        del full.tokens[after_comma:], full.weights[after_comma:]
                    chunks.append(chunk)
                    after_comma = None
                chunk.tokens.append(token)
                chunk.weights.append(weight)
                if token == comma:
                    after_comma = len(chunk.tokens)
    if len(chunks) > 1 and not chunks[-1].tokens:
        chunks.pop()
    return chunks[:MAX_CHUNKS], sum(len(chunk.tokens) for chunk in chunks[MAX_CHUNKS:])
