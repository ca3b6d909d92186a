"""A request of texts, as rows of token ids that batches are made of, with room for their results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.models.encoder.token_rows import FloatArray, TokenRow
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import TextRequest
from noria.protocol.text import EncoderModelSpec, TextPayload, TextResult, TextSettingsView, TextTimings
from noria.scheduling.types import BatchKey, Phase, RequestTimings

_STAGES: Mapping[Phase, str] = {"steps": "infer"}


@dataclass(slots=True)
class PreparedTextRequest:
    """A request whose texts were checked.

    A session's thread sets `results` of the texts in its batch; other threads read them when all are done.
    """

    request: TextRequest
    batch_key: BatchKey
    rows: list[TokenRow]
    results: list[FloatArray | None] = field(init=False)  # of each text

    num_calls = 1
    num_rows = 1
    stages = _STAGES

    def __post_init__(self) -> None:
        self.results = [None] * len(self.rows)

    @property
    def num_images(self) -> int:
        """The number of its texts."""
        return len(self.rows)

    @property
    def call_size(self) -> None:
        """None: texts have no size."""
        return

    @property
    def second_stage_from(self) -> None:
        """None: all calls are of one model."""
        return

    @property
    def has_start_image(self) -> bool:
        """False: texts have none."""
        return False

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each text."""
        return self.request.payload.lengths

    @property
    def shape_label(self) -> str:
        """The task of its model."""
        return self.request.payload.task

    @property
    def settings_view(self) -> TextSettingsView:
        """What live views show."""
        return self.request.payload.settings_view

    @property
    def span_attributes(self) -> Mapping[str, str | int | float]:
        """The attributes of the span of its batches."""
        payload = self.request.payload
        return {"noria.num_texts": payload.num_texts, "noria.num_tokens": payload.num_tokens}

    def timings(self, measured: RequestTimings) -> TextTimings:
        """Its stages."""
        return TextTimings(measured.queue_s, measured.slot_s)

    def final_result(self) -> tuple[TextResult, bytes | memoryview]:
        """All results, one below the other. Every text must have its own."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.results), "a text has no result"
        whole = results[0] if len(results) == 1 else np.concatenate([each.reshape(-1) for each in results])
        num_columns = results[0].shape[-1]
        return TextResult(whole.size // num_columns, num_columns), np.ascontiguousarray(whole, "<f4").data.cast("B")


def prepare(request: TextRequest, spec: EncoderModelSpec) -> PreparedTextRequest:
    """Check a request for a model and cut it into rows.

    Raises:
        InvalidField: it has no text, or a text that the model cannot take.

    """
    payload = request.payload
    ids: NDArray[Any] = np.frombuffer(payload.token_ids, "<u2" if payload.id_bytes == 2 else "<u4")
    types = np.frombuffer(payload.type_ids, np.uint8) if payload.type_ids else None
    _check(payload, spec, len(ids), 0 if types is None else len(types))
    if len(ids) and int(ids.max()) >= spec.vocab_size:
        raise InvalidField(
            f"a token id is {int(ids.max())}; the {spec.vocab_size} tokens of {spec.name} have ids from 0 on",
            field="input",
        )
    rows, start = [], 0
    for length in payload.lengths:
        end = start + length
        rows.append(TokenRow(ids[start:end], None if types is None else types[start:end]))
        start = end
    return PreparedTextRequest(request, BatchKey(0, 0, ModelKey(spec.name, spec.fingerprint)), rows)


def _check(payload: TextPayload, spec: EncoderModelSpec, num_ids: int, num_types: int) -> None:
    lengths = payload.lengths
    if not lengths or min(lengths) < 1 or sum(lengths) != num_ids or num_types not in (0, num_ids):
        raise InvalidField("the token ids do not match the lengths of the texts", field="input")
    if max(lengths) > spec.max_length:
        raise InvalidField(
            f"a text has {max(lengths)} tokens; {spec.name} takes at most {spec.max_length}", field="input"
        )
    if payload.dimensions is not None and not 1 <= payload.dimensions <= spec.dimensions:
        raise InvalidField(
            f"dimensions is {payload.dimensions}; allowed are 1 to {spec.dimensions}", field="dimensions"
        )
