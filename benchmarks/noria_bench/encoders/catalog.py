"""The targets of `noria bench encoders`: how each is run and asked, and the settings to choose from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from noria_bench.encoders.options import TARGETS
from noria_bench.encoders.servers.job import ServerSettings

Kind = Literal["raw", "noria", "fastapi", "triton", "litserve", "bentoml"]
_SERVERS = "noria_bench.encoders.servers."
# Texts of a batch. Larger ones are no faster here, and waste more on padding (docs/scheduling.md).
_MAX_BATCH = 8
# transformers-deploy's.
_REFERENCE_MAX_BATCH = 64


@dataclass(frozen=True)
class Interface:
    """How a kind of server is run, and asked for the embedding of one text."""

    path: str
    body: Callable[[str], dict[str, Any]]
    vector: Callable[[Any], list[float]]  # of the reply's JSON
    module: str = ""  # run as `python -m MODULE JOB`
    framework: str | None = None  # whose virtual environment it needs
    ready_path: str = "/readyz"


INTERFACES: dict[Kind, Interface] = {
    "noria": Interface("/v1/embeddings", lambda text: {"input": text}, lambda reply: reply["data"][0]["embedding"]),
    "fastapi": Interface(
        "/embed", lambda text: {"text": text}, lambda reply: reply["embedding"], _SERVERS + "fastapi_app"
    ),
    "triton": Interface(
        "/v2/models/ensemble/infer",
        lambda text: {"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": [text]}]},
        lambda reply: reply["outputs"][0]["data"],
        _SERVERS + "triton_server",
        "triton",
        "/v2/health/ready",
    ),
    "litserve": Interface(
        "/embed", lambda text: {"text": text}, lambda reply: reply["embedding"], _SERVERS + "litserve_app", "litserve"
    ),
    "bentoml": Interface(
        "/embed", lambda text: {"texts": [text]}, lambda reply: reply[0], _SERVERS + "bentoml_app", "bentoml"
    ),
}


@dataclass(frozen=True)
class EncoderTarget:
    """A server and its settings, or the loop without a server."""

    name: str
    kind: Kind
    description: str
    candidates: tuple[ServerSettings, ...] = (ServerSettings(),)  # among which the best are looked for
    precision: Literal["float32", "bfloat16"] = "float32"


def make_targets(threads: int) -> dict[str, EncoderTarget]:
    """All targets, with `threads` that compute in each."""
    reference = ServerSettings(max_batch=_REFERENCE_MAX_BATCH)
    many = replace(reference, tokenizers=threads)
    # In instances of one thread, batched or not.
    alone = ServerSettings(instances=threads, tokenizers=threads)
    batched = replace(alone, max_batch=_MAX_BATCH)
    dynamic = replace(batched, batching=True)
    best = tuple(
        replace(settings, instances=instances, delay_us=delay_us, ragged=ragged)
        for instances in sorted({1, threads}, reverse=True)
        for settings, delay_us, ragged in (
            (batched, 0, False),
            *((dynamic, delay_us, ragged) for delay_us in (0, 2000) for ragged in (False, True)),
        )
    )
    batching = "the same with dynamic batching"
    targets = (
        EncoderTarget("raw", "raw", "a loop in one process: texts sorted by length, batches of 8, no server"),
        EncoderTarget("raw-bfloat16", "raw", "the same loop in bfloat16, by OpenVINO", precision="bfloat16"),
        EncoderTarget("noria", "noria", "noria serve"),
        EncoderTarget("noria-bfloat16", "noria", "noria serve in bfloat16, by OpenVINO", precision="bfloat16"),
        EncoderTarget("fastapi", "fastapi", "the reference article's baseline: FastAPI, no batches", (alone,)),
        EncoderTarget("triton-1", "triton", "as the article had it: an ensemble, 1 tokenizer, 1 encoder", (reference,)),
        EncoderTarget("triton-1-batching", "triton", batching, (replace(reference, batching=True),)),
        EncoderTarget("triton-n", "triton", f"{threads} tokenizers, 1 encoder", (many,)),
        EncoderTarget("triton-n-batching", "triton", batching, (replace(many, batching=True),)),
        EncoderTarget("triton-best", "triton", "its best settings of a sweep", best),
        EncoderTarget("litserve", "litserve", "LitServe, the best settings of a sweep",
                      (alone, batched, replace(batched, delay_us=2000))),
        EncoderTarget("bentoml", "bentoml", "BentoML, the best settings of a sweep", (batched, alone)),
    )  # fmt: skip
    assert tuple(target.name for target in targets) == TARGETS
    return {target.name: target for target in targets}
