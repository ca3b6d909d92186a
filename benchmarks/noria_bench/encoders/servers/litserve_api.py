"""The LitServe API over the encoder. LitServe calls all of it in a worker, one batch after the other."""

import litserve
import numpy as np
import pydantic
from numpy.typing import NDArray

from noria.protocol.process_signals import die_with_parent
from noria_bench.encoders.servers.job import EncoderJob
from noria_bench.encoders.servers.text_encoder import open_encoder

Vector = NDArray[np.float32]


class Body(pydantic.BaseModel):
    """The request body."""

    text: str


class EncoderApi(litserve.LitAPI):  # type: ignore[misc] # frameworks are not installed for mypy
    """The methods that LitServe calls, without batches."""

    def __init__(self, job: EncoderJob) -> None:
        settings = job.settings
        super().__init__(
            max_batch_size=settings.max_batch, batch_timeout=settings.delay_us / 1_000_000, api_path="/embed"
        )
        self._job = job

    def setup(self, device: str) -> None:  # noqa: ARG002 - the encoder has its own
        """Load the encoder, in the worker."""
        die_with_parent()
        self._encoder = open_encoder(self._job.fields, max(1, self._job.threads // self._job.settings.instances))

    def decode_request(self, request: Body) -> list[int]:
        """Tokenize."""
        return self._encoder.tokenize([request.text])[0]

    def predict(self, row: list[int]) -> Vector:
        """Compute one text."""
        vector: Vector = self._encoder.embed([row])[0]
        return vector

    def encode_response(self, output: Vector) -> dict[str, list[float]]:
        """The response's JSON."""
        return {"embedding": output.tolist()}


class BatchingEncoderApi(EncoderApi):
    """With LitServe's batching."""

    def batch(self, inputs: list[list[int]]) -> list[list[int]]:
        """Return the list: the encoder pads."""
        return inputs

    def predict(self, rows: list[list[int]]) -> list[Vector]:  # type: ignore[override]
        """Compute a batch."""
        return list(self._encoder.embed(rows))

    def unbatch(self, output: list[Vector]) -> list[Vector]:
        """Return the list."""
        return output
