"""The interface of a tokenizer, as front ends use it. Knows no library."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from noria.protocol.text import TruncationSide

TextInput = str | tuple[str, str]
"""A text, or a pair of texts that the model sees together."""

CharSpan = tuple[int, int]
"""Where a token stands in its text: characters from the first up to but not including the second."""


class TokenizedText(NamedTuple):
    """A text (or pair) as the model sees it."""

    num_tokens: int  # special tokens included
    token_ids: bytes  # little-endian, each `Tokenizer.id_bytes` long
    type_ids: bytes = b""  # a byte for each token; empty: all 0
    num_cut: int = 0  # tokens that were cut off, because the text was longer than `Tokenizer.max_length`
    num_unknown: int = 0  # tokens that are the tokenizer's unknown one
    spans: Sequence[CharSpan | None] = ()  # each token's span, None if special; only if the model classifies tokens
    num_seen: int = 0  # the first tokens, to which all attend; 0: all
    skipped: Sequence[int] = ()  # positions of tokens that get no vector


class TokenSpan(NamedTuple):
    """A token and where it stands in the text."""

    token_id: int
    text: str  # as in the vocabulary
    is_special: bool
    start: int  # characters of the text, from `start` up to but not including `end`; both 0 for special tokens
    end: int


class Tokenizer(Protocol):
    """Tokenizes texts for one model. Any thread may call it; nothing about it changes after it was loaded."""

    max_length: int  # tokens of a text, special tokens included
    id_bytes: Literal[2, 4]  # bytes of each token id: 2 if the vocabulary has at most 65,536 tokens

    def encode(self, inputs: Sequence[TextInput], side: TruncationSide = "right") -> list[TokenizedText]:
        """Tokenize texts, with special tokens; cut those that are too long.

        May release the interpreter lock. One call for many texts costs less than a call for each.
        """
        ...

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Return the tokens of a text as `encode` makes them, not cut."""
        ...
