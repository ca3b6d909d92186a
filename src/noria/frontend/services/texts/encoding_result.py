"""The result of a request of texts: its numbers, how long its stages took, and the headers of its response."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import Struct

from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.observe.logs.request_log import RequestLogRecord
from noria.protocol.text import EncoderModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EncodingTimings(Struct, frozen=True):
    """How long each stage until the numbers took, in seconds.

    `predicted_s` is the engine's prediction of queue and infer together.
    """

    tokenize_s: float
    queue_s: float
    infer_s: float
    total_s: float
    predicted_s: float


class EncodingResult(Struct, frozen=True, eq=False):
    """The numbers of a request, and measurements."""

    spec: EncoderModelSpec
    numbers: "memoryview[float]"  # float32, one row after the other
    num_rows: int  # one for each text; for each token, if tokens are classified
    num_columns: int
    texts: Sequence[TokenizedText]
    num_tokens: int  # tokens of all texts, special tokens included
    num_truncated: int  # texts that were cut
    timings: EncodingTimings
    mean_batch: float
    log_record: RequestLogRecord  # the request's
    row_counts: Sequence[int] = ()  # rows of each text, if they are sparse

    def arrays(self) -> "NDArray[np.float32]":
        """Return the rows as an array; sparse ones with their zeros, [texts, dimensions]."""
        import numpy as np

        rows = np.asarray(self.numbers, np.float32).reshape(self.num_rows, self.num_columns)
        if self.spec.task != "sparse_embedding":
            return rows
        whole = np.zeros((len(self.row_counts), self.spec.dimensions), np.float32)
        whole[np.repeat(np.arange(len(self.row_counts)), self.row_counts), rows[:, 0].astype(np.int64)] = rows[:, 1]
        return whole

    def token_arrays(self) -> "Iterator[NDArray[np.float32]]":
        """Yield the vectors of each text's tokens [T, D], without those of tokens that get none."""
        import numpy as np

        whole, start = self.arrays(), 0
        for text in self.texts:
            own = whole[start : start + text.num_tokens]
            start += text.num_tokens
            yield np.delete(own, list(text.skipped), axis=0) if text.skipped else own

    @property
    def sparse_rows(self) -> Iterator[list[tuple[int, float]]]:
        """The token ids and numbers of each text, which are sparse."""
        rows = iter(zip(map(int, self.numbers[::2]), self.numbers[1::2], strict=True))
        return (list(itertools.islice(rows, count)) for count in self.row_counts)

    @property
    def rows(self) -> "list[memoryview[float]]":
        """The numbers of each row."""
        return [self.row(index) for index in range(self.num_rows)]

    def row(self, index: int) -> "memoryview[float]":
        """Return the numbers of one row."""
        return self.numbers[index * self.num_columns : (index + 1) * self.num_columns]

    def headers(self, postprocess_s: float) -> dict[str, str]:
        """Return the headers of a response that was made in `postprocess_s`, the same for every protocol."""
        timings = self.timings
        headers = {
            "X-Noria-Model": _header_value(self.spec.name),
            "X-Noria-Mean-Batch": f"{self.mean_batch:.2f}",
            "Server-Timing": (
                f"tokenize;dur={1000 * timings.tokenize_s:.2f}, queue;dur={1000 * timings.queue_s:.2f}, "
                f"infer;dur={1000 * timings.infer_s:.2f}, postprocess;dur={1000 * postprocess_s:.2f}, "
                f"predicted;dur={1000 * timings.predicted_s:.2f}"
            ),
        }
        if self.num_truncated:
            headers["X-Noria-Truncated"] = str(self.num_truncated)
        return headers


@functools.cache
def _header_value(name: str) -> str:
    return quote(name, safe="/:@+ ")  # headers allow neither é nor line ends
