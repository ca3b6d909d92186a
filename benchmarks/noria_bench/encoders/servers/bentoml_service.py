"""The service of the BentoML target, with its adaptive batching: a process for each instance of the encoder."""

import os

import bentoml
import msgspec

from noria.protocol.process_signals import die_with_parent
from noria_bench.encoders.servers.job import JOB_VARIABLE, EncoderJob
from noria_bench.encoders.servers.text_encoder import open_encoder

JOB = msgspec.json.decode(os.environ[JOB_VARIABLE], type=EncoderJob)
# It rejects requests that would take longer, and decides itself how long a batch waits.
_MAX_LATENCY_MS = 60_000


@bentoml.service(
    workers=JOB.settings.instances,
    threads=1,
    traffic={"timeout": 3600.0},
    logging={"access": {"enabled": False}},
    metrics={"enabled": False},
)
class Encoder:
    """The service."""

    def __init__(self) -> None:
        die_with_parent()
        self._encoder = open_encoder(msgspec.to_builtins(JOB.files), max(1, JOB.threads // JOB.settings.instances))

    @bentoml.api(  # type: ignore[untyped-decorator] # frameworks are not installed for mypy
        route="/embed",
        batchable=JOB.settings.max_batch > 1,
        max_batch_size=max(2, JOB.settings.max_batch),  # without effect if it is not batchable
        max_latency_ms=_MAX_LATENCY_MS,
    )
    def embed(self, texts: list[str]) -> list[list[float]]:
        """The embedding of each text; BentoML appends the lists of the requests of a batch."""
        vectors: list[list[float]] = self._encoder.embed(self._encoder.tokenize(texts)).tolist()
        return vectors
