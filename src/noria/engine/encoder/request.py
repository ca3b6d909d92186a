"""A request of texts, as rows of token ids that batches are made of, with room for their results."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.models.encoder.tokenizers.token_rows import FloatArray, ImageRow, Row, TokenRow
from noria.protocol.request import TextRequest
from noria.protocol.text import EncoderModelSpec, TextPayload, TextResult, TextSettingsView, TextTimings
from noria.scheduling.types import BatchKey, Phase, RequestTimings, SchedulableRequest

_STAGES: Mapping[Phase, str] = {"steps": "infer"}
_FEW = 100  # numbers of which Python finds the largest sooner than numpy


@dataclass(slots=True)
class PreparedTextRequest:
    """A request whose texts were checked.

    A session's thread sets `results` of the texts in its batch; other threads read them when all are done.
    """

    request: TextRequest
    batch_key: BatchKey
    rows: list[Row]
    results: list[FloatArray | None] = field(init=False)  # the result of each text

    num_calls, longest_iteration_s = 1, 0.0  # the warm-up has measured its call
    stages = _STAGES

    def __post_init__(self) -> None:
        self.results = [None] * len(self.rows)

    @property
    def settings_view(self) -> TextSettingsView:
        """The settings that live views show."""
        return self.request.payload.settings_view

    @property
    def span_attributes(self) -> Mapping[str, str | int | float]:
        """The attributes of the span of its batches."""
        payload = self.request.payload
        return {"noria.num_texts": payload.num_texts, "noria.num_tokens": payload.num_tokens}

    def schedulable(self, expires_at: float | None, deadline: float | None) -> SchedulableRequest:
        """The part of it that the scheduler of texts uses."""
        request = self.request
        return SchedulableRequest(
            request.attempt_id,
            self.batch_key,
            len(self.rows),
            self.num_calls,
            expires_at,
            deadline,
            priority=request.priority,
            exclusive=request.exclusive,
            num_tokens=request.payload.lengths,
            client=request.share_client,
            weight=request.share_weight,
        )

    def timings(self, measured: RequestTimings) -> TextTimings:
        """Its stages."""
        return TextTimings(measured.queue_s, measured.slot_s)

    def final_result(self) -> tuple[TextResult, bytes]:
        """All results, one below the other. Every text must have its own."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.results), "a text has no result"
        whole = results[0] if len(results) == 1 else np.concatenate([each.reshape(-1) for each in results])
        num_columns = results[0].shape[-1]
        counts = tuple(map(len, results)) if self.request.payload.task == "sparse_embedding" else ()
        result = TextResult(whole.size // num_columns, num_columns, counts)
        return result, whole.astype("<f4", copy=False).tobytes()


def prepare(request: TextRequest, spec: EncoderModelSpec, data: memoryview | None = None) -> PreparedTextRequest:
    """Check a request for a model, whose images are `data`, and cut it into rows.

    Raises InvalidField: it has no text, or a text that the model cannot take.
    """
    payload = request.payload
    ids: NDArray[Any] = np.frombuffer(payload.token_ids, "<u2" if payload.id_bytes == 2 else "<u4")
    types = np.frombuffer(payload.type_ids, np.uint8) if payload.type_ids else None
    _check(payload, spec, len(ids), 0 if types is None else len(types))
    if (largest := max(ids.tolist(), default=0) if len(ids) < _FEW else int(ids.max())) >= spec.vocab_size:
        raise InvalidField(
            f"a token id is {largest}; the {spec.vocab_size} tokens of {spec.name} have ids from 0 on",
            field="input",
        )
    images = dict(zip(payload.image_places, _images(payload, spec, data), strict=True))
    rows, start = list[Row](), 0
    seen = payload.num_seen or (0,) * len(payload.lengths)
    for place, (length, num_seen) in enumerate(zip(payload.lengths, seen, strict=True)):
        if place in images:
            rows.append(images[place])
            continue
        end = start + length
        rows.append(TokenRow(ids[start:end], None if types is None else types[start:end], num_seen, payload.adapter))
        start = end
    return PreparedTextRequest(request, BatchKey(0, 0, spec.key), rows)


def _check(payload: TextPayload, spec: EncoderModelSpec, num_ids: int, num_types: int) -> None:
    lengths, images = payload.lengths, frozenset(payload.image_places)
    of_texts = [length for place, length in enumerate(lengths) if place not in images] if images else lengths
    if not lengths or min(lengths) < 1 or sum(of_texts) != num_ids or num_types not in (0, num_ids):
        raise InvalidField("the token ids do not match the lengths of the texts", field="input")
    seen = payload.num_seen
    if seen and (len(seen) != len(lengths) or not all(map(operator.le, seen, lengths)) or min(seen) < 0):
        raise InvalidField("the tokens to which others attend do not match the lengths of the texts", field="input")
    if max(of_texts, default=0) > spec.max_length:
        raise InvalidField(
            f"a text has {max(of_texts)} tokens; {spec.name} takes at most {spec.max_length}", field="input"
        )
    if not 0 <= payload.adapter <= len(spec.adapters):
        raise InvalidField(f"the adapter is {payload.adapter}; {spec.name} has {len(spec.adapters)}", field="task")
    if payload.dimensions is not None and not 1 <= payload.dimensions <= spec.dimensions:
        raise InvalidField(
            f"dimensions is {payload.dimensions}; allowed are 1 to {spec.dimensions}", field="dimensions"
        )


def _images(payload: TextPayload, spec: EncoderModelSpec, data: memoryview | None) -> list[ImageRow]:
    """Return the images of a request in order. Raises InvalidField: the model takes none, or of another size."""
    places, image_input = payload.image_places, spec.image_input
    num_bytes = 0 if data is None else data.nbytes
    if not places and not num_bytes:
        return []
    if image_input is None:
        raise InvalidField(f"there are images, and {spec.name} takes texts alone", field="input")
    expected = len(places) * image_input.num_bytes
    if data is None or num_bytes != expected or not all(0 <= place < len(payload.lengths) for place in places):
        raise InvalidField(
            f"the {len(places)} images have {num_bytes} bytes; {spec.name} expects {expected}", field="input"
        )
    try:
        return [ImageRow.of(each, image_input) for each in np.frombuffer(data, np.uint8).reshape(len(places), -1)]
    except ValueError as error:
        raise InvalidField(str(error), field="input") from error
