"""A text encoder without a model: its vectors follow from the token ids; its batches take as long as a test says."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from noria.models.encoder.tokenizers.token_rows import FloatArray, TokenRow
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText, TokenSpan
from noria.protocol.request import EngineRequest, TextRequest
from noria.protocol.text import EncoderModelSpec, ImageInput, LateInteraction, TextPayload, TruncationSide

FAKE_ENCODER = EncoderModelSpec(
    name="fake-encoder",
    folder="/models/fake-encoder",
    fingerprint="0123456789ab",
    family="text-encoder",
    num_parameters=1_000_000,
    task="embedding",
    architecture="BertModel",
    dimensions=8,
    max_length=64,
    vocab_size=1000,
    inputs=("input_ids", "attention_mask"),
    pooling=("mean",),
    normalize=True,
)
"""The spec of a small embedding model."""


def fake_vector(token_ids: ArrayLike, dimensions: int = FAKE_ENCODER.dimensions) -> FloatArray:
    """The vector of a text, not normalized; it does not depend on the batch."""
    angles = np.outer(np.asarray(token_ids, np.float64) + 1, np.arange(1, dimensions + 1)) * 0.1
    mean: FloatArray = np.cos(angles).mean(0).astype(np.float32)
    return mean


class FakeSession:
    """A session whose batches call `on_batch` first, which may wait or raise. Keeps the sizes of all batches."""

    is_faster_alone = is_packed = False

    def __init__(
        self,
        on_batch: Callable[[Sequence[TokenRow]], None] = lambda _rows: None,
        spec: EncoderModelSpec = FAKE_ENCODER,
    ) -> None:
        self.batch_sizes: list[int] = []
        self._on_batch, self._spec = on_batch, spec
        self._is_running = threading.Lock()

    def run(self, rows: Sequence[TokenRow], is_alone: bool = False) -> list[FloatArray]:  # noqa: ARG002
        """Return `fake_vector` of each row; of each token, if results are of tokens."""
        assert self._is_running.acquire(blocking=False), "two threads call one session"
        try:
            self.batch_sizes.append(len(rows))
            self._on_batch(rows)
            if not self._spec.task.startswith("token_"):
                return [fake_vector(row.ids, self._spec.dimensions) for row in rows]
            return [np.stack([fake_vector([each], self._spec.dimensions) for each in row.ids]) for row in rows]
        finally:
            self._is_running.release()


class FakeTokenizer:
    """A `Tokenizer` that makes a token of each word, between the special tokens 1 and 2.

    A text with a NUL character raises ValueError.
    """

    def __init__(self, spec: EncoderModelSpec = FAKE_ENCODER) -> None:
        self.max_length, self._has_spans = spec.max_length, spec.task == "token_classification"
        self.id_bytes: Literal[2, 4] = 2
        self.batch_sizes: list[int] = []  # texts of each call

    def encode(self, inputs: Sequence[TextInput], side: TruncationSide = "right") -> list[TokenizedText]:
        """Tokenize texts; cut those that are too long."""
        self.batch_sizes.append(len(inputs))
        return [self._encode(each if isinstance(each, str) else " ".join(each), side) for each in inputs]

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Return the words of a text, not cut."""
        words = [TokenSpan(word_id(each[0]), each[0], False, *each.span()) for each in re.finditer(r"\S+", text)]
        if not add_special_tokens:
            return words
        return [TokenSpan(1, "[CLS]", True, 0, 0), *words, TokenSpan(2, "[SEP]", True, 0, 0)]

    def _encode(self, text: str, side: TruncationSide) -> TokenizedText:
        if "\0" in text:
            raise ValueError("NUL")
        words, room = self.spans(text, add_special_tokens=False), self.max_length - 2
        kept = words[:room] if side == "right" else words[-room:]
        ids = np.array([1, *(word.token_id for word in kept), 2], "<u2").tobytes()
        spans = [None, *((word.start, word.end) for word in kept), None] if self._has_spans else ()
        return TokenizedText(len(kept) + 2, ids, num_cut=len(words) - len(kept), spans=spans)


def word_id(word: str) -> int:
    """The token id of a word for `FakeTokenizer`."""
    return 10 + sum(word.encode()) % 900


SPARSE = msgspec.structs.replace(
    FAKE_ENCODER, name="sparse", task="sparse_embedding", pooling=(), dimensions=FAKE_ENCODER.vocab_size
)
"""An encoder of sparse embeddings."""

LATE = msgspec.structs.replace(
    FAKE_ENCODER,
    name="late",
    task="token_embedding",
    pooling=(),
    prompts=(("query", "q: "), ("document", "d: ")),
    late_interaction=LateInteraction(6, 5, fill_id=3, fill_length=6, skipped_ids=(word_id("the"),)),
)
"""An encoder that embeds tokens, with queries of 6 tokens and documents of 5."""


IMAGES = msgspec.structs.replace(
    FAKE_ENCODER,
    name="clip",
    image_input=ImageInput("CLIPVisionModelWithProjection", 4, 4, 3, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), num_tokens=5),
)
"""An encoder of texts and of images of 4 × 4 pixels, of which the middle is seen."""


def make_text_request(
    request_id: str, *texts: Sequence[int], model: EncoderModelSpec = FAKE_ENCODER, **changes: object
) -> TextRequest:
    """A request of texts, given as token ids; `changes` are fields of `TextPayload` or of `EngineRequest`."""
    settings = {name: changes.pop(name) for name in TextPayload.__struct_fields__ if name in changes}
    lengths = tuple(map(len, texts))
    payload = TextPayload(
        **{  # type: ignore[arg-type]
            "task": model.task,
            "num_texts": len(texts),
            "num_tokens": sum(lengths),
            "lengths": lengths,
            "token_ids": np.concatenate([np.asarray(text, "<u2") for text in texts]).tobytes(),
        }
        | settings
    )
    envelope = {"attempt_id": request_id, "timeout_s": 60.0} | changes
    return EngineRequest(request_id, model.name, payload, **envelope)  # type: ignore[arg-type]
