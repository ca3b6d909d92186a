"""The numbers of texts, and the headers of their responses."""

import numpy as np
import pytest
from msgspec.structs import replace

from noria.frontend.services.texts.encoding_result import EncodingResult, EncodingTimings
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.observe.logs.request_log import RequestLogRecord
from noria.testing.fake_encoder import FAKE_ENCODER


@pytest.fixture
def result():
    """Five rows of two numbers, of a text of two tokens and one of three, the second of which gets no vector."""
    return EncodingResult(
        replace(FAKE_ENCODER, name="é 1", dimensions=4),
        memoryview(np.arange(10, dtype=np.float32)),
        num_rows=5,
        num_columns=2,
        texts=[TokenizedText(2, bytes(4)), TokenizedText(3, bytes(6), skipped=(1,))],
        num_tokens=5,
        num_truncated=0,
        timings=EncodingTimings(tokenize_s=0.001, queue_s=0.002, infer_s=0.003, total_s=1.0, predicted_s=0.005),
        mean_batch=1.5,
        log_record=RequestLogRecord(),
        row_counts=(2, 3),
    )


def test_headers_have_the_model_its_batch_and_milliseconds(result):
    assert result.headers(0.004) == {
        "X-Noria-Model": "%C3%A9 1",
        "X-Noria-Mean-Batch": "1.50",
        "Server-Timing": "tokenize;dur=1.00, queue;dur=2.00, infer;dur=3.00, postprocess;dur=4.00, predicted;dur=5.00",
    }
    assert replace(result, num_truncated=2).headers(0.0)["X-Noria-Truncated"] == "2"


def test_rows_are_those_of_the_texts_or_of_their_tokens(result):
    assert [list(row) for row in result.rows] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert result.arrays().tolist() == [list(row) for row in result.rows]
    assert [each.tolist() for each in result.token_arrays()] == [[[0, 1], [2, 3]], [[4, 5], [8, 9]]]


def test_sparse_rows_are_ids_and_numbers_and_have_zeros_as_an_array(result):
    numbers = np.array([3, 0.5, 0, 1.5, 1, 2.5, 2, 3.5, 0, 4.5], np.float32)
    sparse = replace(result, spec=replace(result.spec, task="sparse_embedding"), numbers=memoryview(numbers))
    assert list(sparse.sparse_rows) == [[(3, 0.5), (0, 1.5)], [(1, 2.5), (2, 3.5), (0, 4.5)]]
    assert sparse.arrays().tolist() == [[1.5, 0, 0, 0.5], [4.5, 2.5, 3.5, 0]]
