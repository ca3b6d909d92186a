"""What a client asks of a text encoder, and the message to the engine that it becomes; for every protocol. Pure."""

import array
import sys
from collections.abc import Sequence

from msgspec import Struct

from noria.errors import EmptyInput, InvalidField, short_repr
from noria.models.encoder.tokens import TextInput, TokenizedText, TruncationSide
from noria.protocol.request import Priority
from noria.protocol.text import EncoderModelSpec, TextPayload


class TextRequestSettings(Struct, frozen=True, kw_only=True):
    """What a client asks for, as far as it is given; the same for every protocol."""

    inputs: Sequence[TextInput] = ()
    token_ids: Sequence[Sequence[int]] = ()  # instead of `inputs`: texts that the client has tokenized
    type_ids: Sequence[bytes] = ()  # of those, a byte for each token; empty: all 0
    model: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None  # None: as the model's own configuration says
    truncate: bool | None = None  # None: the server's setting
    truncation_side: TruncationSide = "right"
    prompt_name: str | None = None  # None: the model's default prompt
    priority: Priority | None = None
    deadline_ms: int | None = None

    @property
    def num_texts(self) -> int:
        """A pair counts as one."""
        return len(self.inputs) + len(self.token_ids)


def with_prompt(settings: TextRequestSettings, spec: EncoderModelSpec) -> Sequence[TextInput]:
    """Return the texts with the prompt before each; pairs have none."""
    prompt = dict(spec.prompts).get(settings.prompt_name or spec.default_prompt or "", "")
    if not prompt:
        return settings.inputs
    return [prompt + text if isinstance(text, str) else text for text in settings.inputs]


def pack_token_ids(
    ids: Sequence[int], index: int, spec: EncoderModelSpec, side: TruncationSide, type_ids: bytes = b""
) -> TokenizedText:
    """Return a text that the client has tokenized, with whatever special tokens it has.

    Raises:
        InvalidField: it is empty, or has an id that the model does not know.

    """
    if not ids:
        raise EmptyInput(f"text {index} is empty.", field="input")
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < spec.vocab_size)
        raise InvalidField(
            f"text {index} has the token id {short_repr(wrong)}; {spec.name} has the ids 0 to {spec.vocab_size - 1}. "
            "Send the text itself, unless your tokens are of this model's tokenizer (LangChain's are, with "
            "check_embedding_ctx_length=False).",
            field="input",
        )
    part = slice(spec.max_length) if side == "right" else slice(-spec.max_length, None)
    kept = ids[part]
    packed = array.array("H" if spec.vocab_size <= 65_536 else "I", kept)
    if sys.byteorder == "big":
        packed.byteswap()
    return TokenizedText(len(kept), packed.tobytes(), type_ids[part], len(ids) - len(kept))


def make_payload(texts: Sequence[TokenizedText], spec: EncoderModelSpec, settings: TextRequestSettings) -> TextPayload:
    """Return the payload of tokenized texts."""
    lengths = tuple(text.num_tokens for text in texts)
    type_ids = b""
    if any(text.type_ids for text in texts):
        type_ids = b"".join(text.type_ids or bytes(text.num_tokens) for text in texts)
    return TextPayload(
        spec.task,
        len(texts),
        sum(lengths),
        num_truncated(texts),
        lengths=lengths,
        token_ids=texts[0].token_ids if len(texts) == 1 else b"".join([text.token_ids for text in texts]),
        type_ids=type_ids,
        id_bytes=2 if spec.vocab_size <= 65_536 else 4,
        dimensions=settings.dimensions,
        normalize=spec.normalize if settings.normalize is None else settings.normalize,
    )


def num_truncated(texts: Sequence[TokenizedText]) -> int:
    """Return how many texts were cut."""
    return sum(text.num_cut > 0 for text in texts)
