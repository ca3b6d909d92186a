"""A prompt of a model with CLIP text encoders, as one of its requests sets it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.protocol.diffusion import DiffusionPayload, PromptSyntax


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """An embedding that is loaded; it is the same as another one of its name and digest."""

    name: str
    digest: str
    vectors: Mapping[int, Any] = field(compare=False)  # tensors [number, width] by width; equally many of each


@dataclass(frozen=True, slots=True)
class ClipPrompt:
    """A prompt that is not read as a model reads a text by default; equal ones have equal embeddings."""

    text: str  # in A1111's syntax that of some steps, by `a1111_schedule.py`
    syntax: PromptSyntax = "plain"
    clip_skip: int | None = None  # which layer from the end is read; None: the family's
    embeddings: tuple[TextEmbedding, ...] = ()  # those that may be named in it


PromptText = str | ClipPrompt | None
"""A prompt to encode; None, where a model allows it, is zeros."""


def prompt_of(text: str | None, payload: DiffusionPayload, embeddings: tuple[TextEmbedding, ...] = ()) -> PromptText:
    """Return a prompt of a request as its settings say that it is read."""
    if text is None or (payload.prompt_syntax in (None, "plain") and payload.clip_skip is None):
        return text
    return ClipPrompt(text, payload.prompt_syntax or "plain", payload.clip_skip, embeddings)
