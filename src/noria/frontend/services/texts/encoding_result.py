"""What a request of texts results in: its numbers, how long its stages took, and the headers of its response."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

from msgspec import Struct

from noria.frontend.services.texts.text_request import num_truncated
from noria.models.encoder.tokens import TokenizedText
from noria.protocol.text import EncoderModelSpec

T = TypeVar("T")

_MAX_INLINE_NUMBERS = 16_384  # of a response that the event loop makes itself, in at most a millisecond


class EncodingTimings(Struct, frozen=True):
    """How long each stage took, in seconds. `predicted_s` is the engine's prediction of queue and infer together."""

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

    async def respond(self, make: Callable[[], T], weight: int = 1) -> T:
        """Return what `make` makes of the numbers, in a thread if that would hold up the event loop for a millisecond.

        `weight` is how many times as long it takes for a number as for one of an embedding.
        """
        is_large = len(self.numbers) * weight > _MAX_INLINE_NUMBERS
        return await asyncio.to_thread(make) if is_large else make()

    @property
    def headers(self) -> dict[str, str]:
        """Response headers, the same for every protocol."""
        timings = self.timings
        headers = {
            "X-Noria-Model": _header_value(self.spec.name),
            "X-Noria-Mean-Batch": f"{self.mean_batch:.2f}",
            "Server-Timing": (
                f"tokenize;dur={1000 * timings.tokenize_s:.1f}, queue;dur={1000 * timings.queue_s:.1f}, "
                f"infer;dur={1000 * timings.infer_s:.1f}, predicted;dur={1000 * timings.predicted_s:.1f}"
            ),
        }
        if num_cut := num_truncated(self.texts):
            headers["X-Noria-Truncated"] = str(num_cut)
        return headers


@functools.cache
def _header_value(name: str) -> str:
    return quote(name, safe="/:@+ ")  # headers allow neither é nor line ends
