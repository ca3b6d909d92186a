"""Batches of tokenized texts as padded tensors, and of images."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.protocol.text import EncoderModelSpec, ImageInput, Patches

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

_BATCH = 8  # rows; larger ones are no faster (docs/scheduling.md)

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""The tensors of a batch, as transformers names them."""

ADAPTERS = "adapter_ids"
"""The tensor of the rows' adapters."""

PIXELS = "pixels"
"""The tensor of a batch of images."""

SHAPES = "shapes"
"""The tensor of the rows and columns of patches, where images have any shape."""


class TokenRow(NamedTuple):
    """The tokens of one text, special tokens included."""

    ids: NDArray[Any]  # integers
    type_ids: NDArray[Any] | None = None  # 1 in the second text of a pair; None: all 0
    num_seen: int = 0  # the first tokens, to which all attend; 0: all
    adapter: int = 0  # the place, from 1, in `EncoderModelSpec.adapters`; 0: none

    @property
    def has_unseen(self) -> bool:
        """Whether there are tokens to which the others do not attend."""
        return 0 < self.num_seen < len(self.ids)

    @classmethod
    def of(cls, text: TokenizedText) -> "TokenRow":
        """The tokens of a tokenized text."""
        ids = np.frombuffer(text.token_ids, f"<u{len(text.token_ids) // text.num_tokens}")
        return cls(ids, np.frombuffer(text.type_ids, np.uint8) if text.type_ids else None, text.num_seen)


class ImageRow(NamedTuple):
    """An image as `protocol.text.ImageInput` describes it."""

    pixels: NDArray[np.uint8]  # [side, side, 3], RGB; of images of any shape [patches, side, side, 3]
    shape: tuple[int, int] = (1, 1)  # rows and columns of patches, of which there may be fewer than in `pixels`

    @classmethod
    def of(cls, data: NDArray[np.uint8], image_input: ImageInput) -> "ImageRow":
        """The image of `ImageInput.num_bytes`. Raises ValueError: it has other patches than it may have."""
        if image_input.patches is None:
            return cls(data.reshape(image_input.side_px, image_input.side_px, 3))
        number, side = image_input.patches.max_number, image_input.patches.side_px
        rows, columns = data[-4:].view("<u2").tolist()
        if not 1 <= rows * columns <= number:
            raise ValueError(f"an image has {rows} × {columns} patches; at most {number} are allowed")
        return cls(data[:-4].reshape(number, side, side, 3), (rows, columns))


Row = TokenRow | ImageRow


class Session(Protocol):
    """Computes batches of one model. One thread at a time calls it; sessions of a model may run side by side."""

    is_faster_alone: bool
    """Whether it uses more threads for a batch that runs alone."""

    @property
    def is_packed(self) -> bool:
        """Whether it computes texts without padding, so that a batch costs by its tokens."""
        ...

    def run(self, rows: Sequence[Row], is_alone: bool = False) -> list[FloatArray]:
        """Compute texts, padded to the longest or packed, and return what belongs to each; images likewise.

        That is [dimensions], not normalized, or [tokens, labels or dimensions] if results are of tokens. `is_alone`
        says that no other session of the device runs meanwhile. Releases the interpreter lock while it computes.
        """
        ...


def image_part(spec: EncoderModelSpec) -> EncoderModelSpec:
    """Return the spec of the image tower alone, whose rows are images, of a model of texts and images."""
    assert spec.image_input is not None
    inputs = (PIXELS,) if spec.image_input.patches is None else (PIXELS, SHAPES)
    return msgspec.structs.replace(spec, architecture=spec.image_input.architecture, inputs=inputs, fill_id=None)


def has_images(names: Sequence[str]) -> bool:
    """Whether the tensors `names` are those of a batch of images."""
    return PIXELS in names


def sample_images(spec: EncoderModelSpec, num: int) -> list[ImageRow]:
    """Return images whose colours change as slowly as those of photographs, the same for each size.

    Those of any shape are square, then ever wider.
    """
    assert spec.image_input is not None
    tiles, patches = np.random.default_rng(0).integers(0, 256, (num, 8, 8, 3), np.uint8), spec.image_input.patches
    if patches is None:
        return [ImageRow(_enlarged(tile, spec.image_input.side_px, spec.image_input.side_px)) for tile in tiles]
    rows = []
    for index, tile in enumerate(tiles):
        height = max(1, math.isqrt(patches.max_number) >> (index % 3))
        shape = height, patches.max_number // height
        pixels = _enlarged(tile, *(each * patches.side_px for each in shape))
        rows.append(ImageRow(_cut(pixels, patches), shape))
    return rows


def _enlarged(tile: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    return tile[np.arange(height) * 8 // height][:, np.arange(width) * 8 // width]


def _cut(pixels: NDArray[np.uint8], patches: Patches) -> NDArray[np.uint8]:
    """Return the patches of an image [height, width, 3], row by row, and black ones behind them: [number, …]."""
    side = patches.side_px
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    result = np.zeros((patches.max_number, side, side, 3), np.uint8)
    result[: rows * columns] = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return result


def stack(rows: Sequence[Row], names: Sequence[str] = INPUTS) -> dict[str, NDArray[Any]]:
    """Return the tensors `names` of rows of one kind: as `pad` does, or PIXELS [rows, …] and SHAPES [rows, 2]."""
    if has_images(names):
        images = [row for row in rows if isinstance(row, ImageRow)]
        tensors = {PIXELS: np.stack([row.pixels for row in images]), SHAPES: np.array([row.shape for row in images])}
        return {name: tensors[name] for name in names}
    return {**pad([row for row in rows if isinstance(row, TokenRow)], names)}


def pad(rows: Sequence[TokenRow], names: Sequence[str] = INPUTS) -> dict[str, IntArray]:
    """Return the tensors `names` [rows, tokens of the longest]: zeros where a row has no token; ADAPTERS is [rows].

    As all padding is on the right and masked, its ids do not matter.
    """
    lengths = [len(row.ids) for row in rows]
    tensors = dict(zip(INPUTS, np.zeros((len(INPUTS), len(rows), max(lengths)), np.int64), strict=True))
    ids, mask, types = tensors.values()
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[index, :length] = row.ids
        mask[index, : row.num_seen or length] = 1
        if row.type_ids is not None:
            types[index, :length] = row.type_ids
    tensors[ADAPTERS] = np.array([row.adapter for row in rows], np.int64)
    return {name: tensors[name] for name in names}


def pack(
    rows: Sequence[TokenRow], names: Sequence[str], pad_id: int | None, num_texts: int = 0, num_tokens: int = 0
) -> list[NDArray[Any]]:
    """Return rows one after the other, filled up with empty ones to `num_texts`, and to `num_tokens` with tokens.

    Each tensor is [1, numbers]: token ids, their positions, the text of each token (`num_texts` if it belongs to none),
    int32 offsets of the texts and the end, and token types if `names` has them. Positions are from 0, or as RoBERTa's:
    after `pad_id`, which has itself. No row has unseen tokens.
    """
    lengths = [len(row.ids) for row in rows]
    total, num_texts = sum(lengths), max(num_texts, len(rows))
    num_tokens = max(num_tokens, total)
    ids, positions, types = np.zeros((3, 1, num_tokens), np.int64)
    texts = np.full((1, num_tokens), num_texts)
    offsets = np.full((1, num_texts + 1), total, np.int32)
    offsets[0, : len(rows)] = np.cumsum([0, *lengths[:-1]])
    ids[0, :total] = np.concatenate([row.ids for row in rows])
    starts = np.repeat(offsets[0, : len(rows)], lengths)
    places = np.arange(total) - starts
    texts[0, :total] = np.repeat(np.arange(len(rows)), lengths)
    if pad_id is None:
        positions[0, :total] = places
    else:
        is_counted = ids[0, :total] != pad_id
        counts = np.cumsum(is_counted)
        positions[0, :total] = pad_id + (counts - (counts - is_counted)[starts]) * is_counted
    tensors = [ids, positions, texts, offsets]
    if INPUTS[2] in names:
        for start, row in zip(offsets[0], rows, strict=False):
            if row.type_ids is not None:
                types[0, start : start + len(row.ids)] = row.type_ids
        tensors.append(types)
    return tensors


def unpack(result: FloatArray, rows: Sequence[TokenRow]) -> list[FloatArray]:
    """Return what belongs to each of packed rows, of a result by text or [1, tokens, …] by token."""
    if result.ndim == 2:
        return [*result[: len(rows)]]
    ends = np.cumsum([len(row.ids) for row in rows])
    return [result[0, end - len(row.ids) : end] for end, row in zip(ends, rows, strict=True)]


def unpad(result: FloatArray, rows: Sequence[Row]) -> list[FloatArray]:
    """Return what belongs to each row: [D], or [tokens, labels] without the padding."""
    return [each[: _length(row)] if each.ndim == 2 else each for each, row in zip(result, rows, strict=True)]


def _length(row: Row) -> int:
    return len(row.ids) if isinstance(row, TokenRow) else 0


def compute(session: Session, rows: Sequence[Row]) -> list[FloatArray]:
    """Compute any number of rows, in batches of similar length; the results are in the order of `rows`."""
    by_length = sorted(range(len(rows)), key=lambda index: _length(rows[index]))
    results: dict[int, FloatArray] = {}
    for start in range(0, len(rows), _BATCH):
        indices = by_length[start : start + _BATCH]
        results.update(zip(indices, session.run([rows[index] for index in indices]), strict=True))
    return [results[index] for index in range(len(rows))]
