"""CLIP text encoders: prompts of any syntax to the outputs of a layer, for each token.

A prompt in A1111's syntax takes a call for each of its chunks. Each call has one row of every prompt, so that the size
of calls, with which a kernel's last bits differ, does not depend on the lengths of prompts. Weights multiply the
outputs, which get the mean that they had before, by chunk; A1111 takes the mean over all prompts of its call, which is
the same for one image.

Shapes: B prompts, T tokens of a call, K chunks of a prompt, D text width, P width of the pooled output.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noria.models.diffusion.conditioning import num_cut_of
from noria.models.diffusion.prompts import a1111_syntax, chunks
from noria.models.diffusion.prompts.chunks import WeightedTokens
from noria.models.diffusion.prompts.clip_prompt import ClipPrompt, PromptText
from noria.models.diffusion.prompts.embedding_names import EmbeddingNames

TextEncoder = tuple[Any, Any]
"""A tokenizer and its text encoder."""

ReadLayer = Callable[[Any, int | None], torch.Tensor]
"""Returns [B, T, D] of a text encoder's outputs; the number is the layer from the end, None the family's."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The outputs of one text encoder for one prompt, on its device."""

    tokens_TD: torch.Tensor  # K times T
    pooled_P: torch.Tensor | None  # output of the first chunk, without weights; None: it has no projection
    num_cut: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a prompt: K rows of T, their mask, and weights other than 1."""

    ids: list[list[int]]
    masks: list[list[int]]
    weights: list[list[float] | None]
    vectors: Sequence[torch.Tensor]  # those of embeddings: number k is in the place of token -1 - k
    num_cut: int


def clip_encode(
    encoder: TextEncoder, prompts: Sequence[PromptText], read_layer: ReadLayer, *, has_mask: bool = False
) -> list[EncodedPrompt]:
    """Return what a text encoder makes of each prompt; None is an empty one. With `has_mask` padding is masked."""
    tokenizer, text_encoder = encoder
    settings = [each if isinstance(each, ClipPrompt) else ClipPrompt(each or "") for each in prompts]
    tokens = _tokenize(tokenizer, settings, text_encoder.config.hidden_size)
    skips = [each.clip_skip for each in settings]
    device = text_encoder.device
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    pooled_BP = None
    for k in range(max(len(each.ids) for each in tokens)):
        # A prompt that has no more chunks is represented by its first one.
        rows = [k if k < len(each.ids) else 0 for each in tokens]
        ids = [each.ids[row] for each, row in zip(tokens, rows, strict=True)]
        start = ids[0][0]  # also in the place of vectors, since encoders search for the end
        ids_BT = torch.tensor([[token if token >= 0 else start for token in row] for row in ids]).to(device)
        masks = [each.masks[row] for each, row in zip(tokens, rows, strict=True)]
        mask_BT = torch.tensor(masks).to(device) if has_mask else None
        with _embedded(text_encoder, ids, [each.vectors for each in tokens]):
            outputs = text_encoder(ids_BT, attention_mask=mask_BT, output_hidden_states=True)
        if k == 0 and "text_embeds" in outputs:
            pooled_BP = outputs.text_embeds
        layers = {skip: read_layer(outputs, skip) for skip in set(skips)}
        for b, each in enumerate(tokens):
            if k < len(each.ids):
                hidden[b].append(_weigh(layers[skips[b]][b], each.weights[k]))
    return [
        EncodedPrompt(
            rows[0] if len(rows) == 1 else torch.cat(rows), None if pooled_BP is None else pooled_BP[b], each.num_cut
        )
        for b, (rows, each) in enumerate(zip(hidden, tokens, strict=True))
    ]


@contextlib.contextmanager
def _embedded(
    text_encoder: Any, ids: Sequence[Sequence[int]], vectors: Sequence[Sequence[torch.Tensor]]
) -> Iterator[None]:
    """Call a text encoder inside of this context with the vectors of each row in the places of its embeddings."""
    places = [(b, t, vectors[b][-1 - token]) for b, row in enumerate(ids) for t, token in enumerate(row) if token < 0]

    def put(_module: Any, _arguments: Any, embedded_BTD: torch.Tensor) -> torch.Tensor:
        found_BTD = embedded_BTD.clone()
        for b, t, vector_D in places:
            found_BTD[b, t] = vector_D.to(found_BTD)
        return found_BTD

    handle = text_encoder.get_input_embeddings().register_forward_hook(put) if places else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _tokenize(tokenizer: Any, prompts: Sequence[ClipPrompt], width: int) -> list[_Tokens]:
    """Return the tokens of each prompt, for an encoder of this width; a plain one is cut or padded to T."""
    padded = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    plain = tokenizer([each.text if each.syntax == "plain" else "" for each in prompts], **padded)
    return [
        _Tokens([ids], [mask], [None], (), num_cut)
        if each.syntax == "plain"
        else _chunks(tokenizer, each, width, ids, mask)
        for each, ids, mask, num_cut in zip(
            prompts, plain.input_ids, plain.attention_mask, num_cut_of(plain), strict=True
        )
    ]


def _chunks(tokenizer: Any, prompt: ClipPrompt, width: int, empty_ids: list[int], empty_mask: list[int]) -> _Tokens:
    """Return the chunks of a prompt in A1111's syntax, each between the first two tokens of an empty prompt."""

    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    vectors: list[torch.Tensor] = []
    ids_of_embedding = {}
    for each in prompt.embeddings:
        of_width = each.vectors.get(width, ())
        ids_of_embedding[each.name] = [-1 - k for k in range(len(vectors), len(vectors) + len(of_width))]
        vectors += of_width
    names = EmbeddingNames(ids_of_embedding)

    def read(text: str, weight: float) -> Iterator[WeightedTokens]:
        end = 0
        for start, stop, name in names.find(text):
            yield from (WeightedTokens([token], weight) for token in ids_of(text[end:start]))
            yield WeightedTokens(ids_of_embedding[name], weight)
            end = stop
        yield from (WeightedTokens([token], weight) for token in ids_of(text[end:]))

    commas = ids_of(",")
    sections = [
        [tokens for text, weight in section for tokens in read(text, weight)]
        for section in a1111_syntax.parse(prompt.text)
    ]
    found, num_cut = chunks.split(sections, len(empty_ids) - 2, commas[0] if len(commas) == 1 else None)
    all_ids, masks, weights = [], [], []
    for chunk in found:
        length = len(chunk.tokens)
        all_ids.append([empty_ids[0], *chunk.tokens, *empty_ids[1 : len(empty_ids) - length]])
        masks.append([1] * length + empty_mask[: len(empty_mask) - length])
        others = [1.0] * (len(empty_ids) - 1 - length)
        weights.append(None if all(each == 1 for each in chunk.weights) else [1.0, *chunk.weights, *others])
    return _Tokens(all_ids, masks, weights, vectors, num_cut)


def _weigh(hidden_TD: torch.Tensor, weights: list[float] | None) -> torch.Tensor:
    """Return the outputs of a chunk times its weights, with the mean that they had before."""
    if weights is None:
        return hidden_TD
    before_TD = hidden_TD.float()
    weighted_TD = before_TD * torch.tensor(weights).to(hidden_TD.device)[:, None]
    factor = before_TD.mean() / weighted_TD.mean()
    return (weighted_TD * torch.where(factor.isfinite(), factor, 1.0)).to(hidden_TD.dtype)
