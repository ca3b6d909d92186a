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
from noria.models.encoder.folders.static_folder import ARCHITECTURE
from noria.models.encoder.tokenizers.tokens import CharSpan, TextInput, TokenizedText, TokenSpan
from noria.protocol.text import EncoderModelSpec, PairTemplate, TruncationSide


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
        for marker in spec.late_interaction.markers if spec.late_interaction is not None else ():
            if self._tokenizer.encode(marker, add_special_tokens=False).tokens != [marker]:
                self._tokenizer.add_special_tokens([tokenizers.AddedToken(marker, normalized=False, special=True)])
        if spec.lowercases:
            own = [self._tokenizer.normalizer] if self._tokenizer.normalizer is not None else []
            self._tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
        self._has_types = "token_type_ids" in spec.inputs
        self._has_spans = spec.task == "token_classification"
        # The fast one knows no characters.
        self._adds_special_tokens = spec.architecture != ARCHITECTURE
        self._encode_batch = self._tokenizer.encode_batch if self._has_spans else self._tokenizer.encode_batch_fast
        self._template = spec.template
        if spec.template is not None:
            ends = (spec.template.pieces[0], spec.template.pieces[-1])
            self._num_first, self._num_last = (len(self._ids(end)) for end in ends)
            if self._num_first + self._num_last >= spec.max_length:
                raise ModelError(
                    f"{file}: the template of {spec.name} alone has {self._num_first + self._num_last} tokens; the "
                    f"model takes at most {spec.max_length}."
                )
        self._unknown_id = _unknown_id(self._tokenizer)
        self.max_length = spec.max_length
        self.id_bytes: Literal[2, 4] = 2 if spec.vocab_size <= 2**16 else 4

    def encode(self, inputs: Sequence[TextInput], side: TruncationSide = "right") -> list[TokenizedText]:
        """Tokenize texts, with special tokens; cut those that are too long, pairs as transformers' "longest_first".

        With a template, a pair fills it, and a text is what somebody has filled; its ends are never cut off.
        """
        if self._template is not None:
            return [self._pack_pair(self._template, each, side) for each in inputs]
        encodings = self._encode_batch(list(inputs), add_special_tokens=self._adds_special_tokens)
        return [self._pack(text, encoding, side) for text, encoding in zip(inputs, encodings, strict=True)]

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Return the tokens of a text as `encode` makes them, not cut."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        parts = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [TokenSpan(token_id, token, bool(special), *offsets) for token_id, token, special, offsets in parts]

    def _pack(self, text: TextInput, whole: Any, side: TruncationSide) -> TokenizedText:
        num_cut = max(len(whole) - self.max_length, 0)
        encoding = self._cut(text, side) if num_cut else whole
        types = bytes(encoding.type_ids) if self._has_types and not isinstance(text, str) else b""
        spans = _spans(whole, encoding, num_cut if side == "left" else 0) if self._has_spans else ()
        return self._packed(encoding.ids, num_cut, types, spans)

    def _pack_pair(self, template: PairTemplate, text: TextInput, side: TruncationSide) -> TokenizedText:
        ids = self._ids(text if isinstance(text, str) else template.fill(*text))
        num_cut = max(len(ids) - self.max_length, 0)
        if num_cut:
            start = self._num_first if side == "left" else len(ids) - self._num_last - num_cut
            del ids[start : start + num_cut]
        return self._packed(ids, num_cut)

    def _packed(
        self, ids: Sequence[int], num_cut: int, types: bytes = b"", spans: Sequence[CharSpan | None] = ()
    ) -> TokenizedText:
        packed = struct.pack(f"<{len(ids)}{'H' if self.id_bytes == 2 else 'I'}", *ids)
        num_unknown = 0 if self._unknown_id is None else ids.count(self._unknown_id)
        return TokenizedText(len(ids), packed, types, num_cut, num_unknown, spans)

    def _ids(self, text: str) -> list[int]:
        """Return the tokens of a text without special ones, but for those that it names itself."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _cut(self, text: TextInput, side: TruncationSide) -> Any:
        """Tokenize a text that is too long again, and cut its own tokens before special ones are added."""
        is_pair = not isinstance(text, str)
        num_special = self._tokenizer.num_special_tokens_to_add(is_pair) if self._adds_special_tokens else 0
        room = self.max_length - num_special
        parts = self._tokenizer.encode_batch_fast(list(text) if is_pair else [text], add_special_tokens=False)
        for part, length in zip(parts, _lengths_within(room, [len(part) for part in parts]), strict=True):
            part.truncate(length, direction=side)
        return self._tokenizer.post_process(*parts, add_special_tokens=self._adds_special_tokens)


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
