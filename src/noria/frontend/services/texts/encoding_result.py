"""What a request of texts results in: its numbers, how long its stages took, and the headers of its response."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from msgspec import Struct

from noria.frontend.services.texts.text_request import num_truncated
from noria.models.encoder.tokens import TokenizedText
from noria.protocol.text import EncoderModelSpec


class EncodingTimings(Struct, frozen=True):
    """How long each stage until the numbers took, in seconds.

    `predicted_s` is the engine's prediction of queue and infer together.
    """

    tokenize_s: float
    queue_s: float
    infer_s: float
    total_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """The numbers of a request, and measurements."""

    spec: EncoderModelSpec
    numbers: "memoryview[float]"  # float32, one row after the other
    num_rows: int  # one for each text; for each token, if tokens are classified
    num_columns: int
    texts: Sequence[TokenizedText]
    timings: EncodingTimings
    mean_batch: float

    @property
    def rows(self) -> "list[memoryview[float]]":
        """The numbers of each row."""
        width = self.num_columns
        return [self.numbers[start : start + width] for start in range(0, self.num_rows * width, width)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, special tokens included."""
        return sum(text.num_tokens for text in self.texts)

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
        if num_cut := num_truncated(self.texts):
            headers["X-Noria-Truncated"] = str(num_cut)
        return headers


@functools.cache
def _header_value(name: str) -> str:
    return quote(name, safe="/:@+ ")  # headers allow neither é nor line ends
