"""How near faster forms are to float32: what is measured, kept and rejected."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from noria.engine.encoder.fidelity import check_fidelity, corpus_rows, measure_fidelity
from noria.engine.resources.fidelity import Fidelity, read_fidelity
from noria.errors import ModelError
from noria.models.encoder.tokenizers.token_rows import FloatArray, TokenRow
from noria.protocol.text import EncoderModelSpec

ROWS = [TokenRow(np.arange(length)) for length in (3, 12, 5)]


class FixedSession:
    """A session whose result for a row is a function of its length."""

    is_faster_alone = is_packed = False

    def __init__(self, result: Callable[[int], Any]) -> None:
        self._result = result

    def run(self, rows: Sequence[TokenRow], is_alone: bool = False) -> list[FloatArray]:
        return [np.array(self._result(len(row.ids)), np.float32) for row in rows]


def test_embeddings_are_compared_by_their_direction(minilm: EncoderModelSpec) -> None:
    exact = FixedSession(lambda length: [1.0, 0.0])
    scaled_and_turned = FixedSession(lambda length: [3.0, 4.0] if length == 12 else [2.0, 0.0])
    fidelity = measure_fidelity(minilm, exact, scaled_and_turned, ROWS)
    assert fidelity == Fidelity(pytest.approx(0.6), pytest.approx(2.6 / 3), 3)
    assert str(fidelity) == "min 0.60000, mean 0.86667 on 3 samples"


@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "identity"])
def test_labels_are_compared_by_their_scores(minilm: EncoderModelSpec, activation: Any) -> None:
    spec = msgspec.structs.replace(minilm, task="classification", activation=activation)
    exact = FixedSession(lambda length: [0.0, 0.0])
    other = FixedSession(lambda length: [0.0, float(np.log(3))] if length == 5 else [0.0, 0.0])
    assert measure_fidelity(spec, exact, other, ROWS) == Fidelity(pytest.approx(0.75), pytest.approx(2.75 / 3), 3)


def test_a_measurement_is_kept_and_below_the_floor_rejected(small: EncoderModelSpec, tmp_path: pathlib.Path) -> None:
    exact = FixedSession(lambda length: [1.0, 0.0])
    turned = FixedSession(lambda length: [1.0, 0.1])
    file = tmp_path / "cache" / "fidelity.json"
    fidelity = check_fidelity(small, turned, lambda: exact, 0.99, file)
    assert fidelity.num_samples == 200
    assert read_fidelity(file) == fidelity

    def measure_again() -> Any:
        raise AssertionError

    assert check_fidelity(small, turned, measure_again, 0.99, file) == fidelity
    with pytest.raises(ModelError, match=r"fidelity min 0.99504.*engine.encoder_min_fidelity is 0.999"):
        check_fidelity(small, turned, measure_again, 0.999, file)
    file.write_text("damaged")
    assert check_fidelity(small, turned, lambda: exact, 0.99, file) == fidelity


def test_results_that_are_no_numbers_are_rejected(small: EncoderModelSpec, tmp_path: pathlib.Path) -> None:
    exact, broken = FixedSession(lambda length: [1.0, 0.0]), FixedSession(lambda length: [np.nan, 0.0])
    with pytest.raises(ModelError, match="fidelity min nan"):
        check_fidelity(small, broken, lambda: exact, 0.0, tmp_path / "fidelity.json")


def test_the_corpus_has_short_and_long_lines_and_pairs(minilm: EncoderModelSpec) -> None:
    lengths = sorted(len(row.ids) for row in corpus_rows(minilm))
    assert len(lengths) == 200
    assert lengths[0] <= 6 and 20 <= lengths[100] <= 40 and lengths[-1] >= 128
    pairs = corpus_rows(msgspec.structs.replace(minilm, task="reranking"))
    assert len(pairs) == 199 and all(row.type_ids is not None and row.type_ids[-1] == 1 for row in pairs)
