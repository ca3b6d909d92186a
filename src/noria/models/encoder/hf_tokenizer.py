"""The tokenizer of a folder, by Hugging Face's `tokenizers`. Front ends load it, after they were forked; engines never.

tokenizer.json may say that texts are padded, or cut to another length than the model's; neither is done. Texts that are
too long are cut here, so that nothing of the tokenizer changes while threads share it.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any, Literal

from noria.errors import ModelError
from noria.extras import require
from noria.models.encoder.tokens import CharSpan, TextInput, TokenizedText, TokenSpan, TruncationSide
from noria.protocol.text import EncoderModelSpec


class HuggingFaceTokenizer:
    """A `Tokenizer` of a model folder."""

    def __init__(self, spec: EncoderModelSpec) -> None:
        """Load tokenizer.json.

        Raises:
            MissingExtra: `tokenizers` is not installed.
            ModelError: the file is damaged.

        """
        # Its own threads would take the engines' cores; front ends are scaled by processes.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizers = require("tokenizers", "encoders", "a text encoder")
        file = spec.path / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception, and for a panic in Rust BaseException
            raise ModelError(f"{file}: not a tokenizer: {error}.") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._has_types = "token_type_ids" in spec.inputs
        self._has_spans = spec.task == "token_classification"
        # The fast one knows no characters.
        self._encode_batch = self._tokenizer.encode_batch if self._has_spans else self._tokenizer.encode_batch_fast
        self._unknown_id = _unknown_id(self._tokenizer)
        self.max_length = spec.max_length
        self.id_bytes: Literal[2, 4] = 2 if spec.vocab_size <= 2**16 else 4

    def encode(self, inputs: Sequence[TextInput], side: TruncationSide = "right") -> list[TokenizedText]:
        """Tokenize texts, with special tokens; cut those that are too long, pairs as transformers' "longest_first"."""
        encodings = self._encode_batch(list(inputs))
        return [self._pack(text, encoding, side) for text, encoding in zip(inputs, encodings, strict=True)]

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Return the tokens of a text as `encode` makes them, not cut."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        parts = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [TokenSpan(token_id, token, bool(special), *offsets) for token_id, token, special, offsets in parts]

    def _pack(self, text: TextInput, whole: Any, side: TruncationSide) -> TokenizedText:
        num_cut = max(len(whole) - self.max_length, 0)
        encoding = self._cut(text, side) if num_cut else whole
        ids = encoding.ids
        packed = struct.pack(f"<{len(ids)}{'H' if self.id_bytes == 2 else 'I'}", *ids)
        types = bytes(encoding.type_ids) if self._has_types and not isinstance(text, str) else b""
        spans = _spans(whole, encoding, num_cut if side == "left" else 0) if self._has_spans else ()
        num_unknown = 0 if self._unknown_id is None else ids.count(self._unknown_id)
        return TokenizedText(len(ids), packed, types, num_cut, num_unknown, spans)

    def _cut(self, text: TextInput, side: TruncationSide) -> Any:
        """Tokenize a text that is too long again, and cut its own tokens before special ones are added."""
        is_pair = not isinstance(text, str)
        room = self.max_length - self._tokenizer.num_special_tokens_to_add(is_pair)
        parts = self._tokenizer.encode_batch_fast(list(text) if is_pair else [text], add_special_tokens=False)
        for part, length in zip(parts, _lengths_within(room, [len(part) for part in parts]), strict=True):
            part.truncate(length, direction=side)
        return self._tokenizer.post_process(*parts)


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of the unknown token; None: the tokenizer has none, as those of bytes."""
    token = getattr(tokenizer.model, "unk_token", None) or "<unk>"
    token_id: int | None = tokenizer.token_to_id(token)
    return token_id


def _spans(whole: Any, encoding: Any, num_cut: int) -> list[CharSpan | None]:
    """Return the span of each token of `encoding`, which is `whole` without its first `num_cut` tokens, or cut behind.

    Those of `whole`: some tokenizers trim spaces off the spans each time special tokens are added.
    """
    own = [span for span, special in zip(whole.offsets, whole.special_tokens_mask, strict=True) if not special]
    kept = iter(own[num_cut:])
    return [None if special else next(kept) for special in encoding.special_tokens_mask]


def _lengths_within(room: int, lengths: list[int]) -> list[int]:
    """Shorten the longer of two texts until both fit into `room` tokens, as `tokenizers` does by "longest_first"."""
    if len(lengths) == 1:
        return [min(room, lengths[0])]
    shorter = min(lengths)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]
