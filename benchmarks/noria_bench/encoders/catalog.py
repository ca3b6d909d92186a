"""The targets of `noria bench encoders`: how each is run and asked, and the settings to choose from."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from noria_bench.encoders.options import TARGETS
from noria_bench.encoders.servers.job import Precision, ServerSettings

Kind = Literal["raw", "noria", "fastapi", "triton", "triton-torch", "litserve", "bentoml", "infinity"]
_SERVERS = "noria_bench.encoders.servers."
# Texts of a batch on a CPU. Larger ones are no faster there, and waste more on padding (docs/scheduling.md).
_MAX_BATCH = 8
# transformers-deploy's.
_REFERENCE_MAX_BATCH = 64
# JSON of a request in Triton's binary form. JSON may end in spaces, so all requests have the same headers.
_TRITON_JSON_BYTES = 192
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Interface:
    """How a kind of server is run, and asked for the embedding of one text."""

    path: str
    body: Callable[[str], bytes]  # makes the body of a request
    vector: Callable[[bytes], Sequence[float]]  # reads a vector from a reply's body
    module: str = ""  # run as `python -m MODULE JOB`
    framework: str | None = None  # whose virtual environment it needs
    ready_path: str = "/readyz"
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)


def _json_interface(
    path: str, body: Callable[[str], Any], vector: Callable[[Any], Sequence[float]], *more: str | None
) -> Interface:
    """An interface with JSON in both directions."""
    return Interface(
        path,
        lambda text: msgspec.json.encode(body(text)),
        lambda reply: vector(msgspec.json.decode(reply)),
        *more,  # type: ignore[arg-type]
    )


def _triton_bytes(text: str) -> bytes:
    """A text as Triton's binary tensor, with a binary one as the reply: the form that costs Triton the least."""
    content = text.encode()
    tensor = {
        "name": "TEXT",
        "shape": [len(content)],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(content)},
    }
    output = {"name": "embedding", "parameters": {"binary_data": True}}
    head = msgspec.json.encode({"inputs": [tensor], "outputs": [output]})
    return head.ljust(_TRITON_JSON_BYTES) + content


def _triton_vector(reply: bytes) -> Sequence[float]:
    """The numbers that follow the JSON of a reply."""
    text = reply.decode("latin-1")
    numbers: list[float] = np.frombuffer(reply, "<f4", offset=json.JSONDecoder().raw_decode(text)[1]).tolist()
    return numbers


INTERFACES: dict[Kind, Interface] = {
    "noria": _json_interface(
        "/v1/embeddings", lambda text: {"input": text}, lambda reply: reply["data"][0]["embedding"]
    ),
    "fastapi": _json_interface(
        "/embed", lambda text: {"text": text}, lambda reply: reply["embedding"], _SERVERS + "fastapi_app"
    ),
    "triton": _json_interface(
        "/v2/models/ensemble/infer",
        lambda text: {"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": [text]}]},
        lambda reply: reply["outputs"][0]["data"],
        _SERVERS + "triton_server",
        "triton",
        "/v2/health/ready",
    ),
    "triton-torch": Interface(
        "/v2/models/ensemble/infer",
        _triton_bytes,
        _triton_vector,
        _SERVERS + "triton_server",
        "triton",
        "/v2/health/ready",
        {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(_TRITON_JSON_BYTES)},
    ),
    "litserve": _json_interface(
        "/embed", lambda text: {"text": text}, lambda reply: reply["embedding"], _SERVERS + "litserve_app", "litserve"
    ),
    "bentoml": _json_interface(
        "/embed", lambda text: {"texts": [text]}, lambda reply: reply[0], _SERVERS + "bentoml_app", "bentoml"
    ),
    "infinity": _json_interface(
        "/embeddings",
        lambda text: {"model": "model", "input": text},
        lambda reply: reply["data"][0]["embedding"],
        _SERVERS + "infinity_app",
        "infinity",
        "/health",
    ),
}


@dataclass(frozen=True)
class Form:
    """The device, library and precision by which all targets compute the model."""

    threads: int  # that compute in each target; on a GPU, that prepare its batches
    device: str = "cpu"  # or "cuda:N"
    by_torch: bool = False  # else by ONNX Runtime
    precision: Precision = "float32"


@dataclass(frozen=True)
class EncoderTarget:
    """A server and its settings, or the loop without a server."""

    name: str
    kind: Kind
    description: str
    candidates: tuple[ServerSettings, ...] = (ServerSettings(),)  # among which the best are looked for
    precision: Precision = "float32"
    processes: int | None = None  # front ends of Noria; None: as it is configured


def make_targets(form: Form) -> dict[str, EncoderTarget]:
    """All targets.

    The first candidate of each is used where no sweep looks for the best: on a GPU, a sweep would take most of the time
    that one can be had.
    """
    threads, by_torch, precision = form.threads, form.by_torch, form.precision
    triton: Kind = "triton-torch" if by_torch else "triton"
    reference = ServerSettings(max_batch=_REFERENCE_MAX_BATCH)
    # Checkpoints get padded batches of any texts; with the ONNX file, the article's Triton batches equal lengths only.
    dynamic = replace(reference, batching=True, ragged=by_torch)
    by_precision = "by torch" if by_torch else "by OpenVINO"
    batching = "the same with dynamic batching"
    alone, batched = _framework_settings(form)

    def target(name: str, kind: Kind, description: str, *candidates: ServerSettings, **more: Any) -> EncoderTarget:
        return EncoderTarget(
            name, kind, description, candidates or (ServerSettings(),), **({"precision": precision} | more)
        )

    targets = (
        target("raw", "raw", "a loop in one process: texts sorted by length, in batches, no server"),
        target("raw-bfloat16", "raw", f"the same loop in bfloat16, {by_precision}", precision="bfloat16"),
        target("noria", "noria", "noria serve"),
        target("noria-8", "noria", "the same with 8 front ends", processes=8),
        target("noria-bfloat16", "noria", f"noria serve in bfloat16, {by_precision}", precision="bfloat16"),
        target("fastapi", "fastapi", "the reference article's baseline: FastAPI, no batches", alone),
        target("triton-1", triton, "as the article had it: an ensemble, 1 tokenizer, 1 encoder", reference),
        target("triton-1-batching", triton, batching, dynamic),
        target("triton-n", triton, f"{threads} tokenizers, 1 encoder", replace(reference, tokenizers=threads)),
        target("triton-n-batching", triton, batching, replace(dynamic, tokenizers=threads)),
        target("triton-best", triton, "its best settings of a sweep", *_triton_candidates(form)),
        target("litserve", "litserve", "LitServe, the best settings of a sweep",
               *((batched, replace(batched, delay_us=2000), alone) if by_torch
                 else (alone, batched, replace(batched, delay_us=2000)))),
        target("bentoml", "bentoml", "BentoML, the best settings of a sweep", batched, alone),
        target("infinity", "infinity", "Infinity and its batching", ServerSettings(max_batch=_REFERENCE_MAX_BATCH)),
    )  # fmt: skip
    assert tuple(each.name for each in targets) == TARGETS
    return {each.name: each for each in targets}


def _framework_settings(form: Form) -> tuple[ServerSettings, ServerSettings]:
    """Without and with batches: on a CPU in instances of one thread, on a GPU in one, which has it alone."""
    on_gpu = form.device != "cpu"
    alone = ServerSettings(instances=1 if on_gpu else form.threads, tokenizers=form.threads)
    return alone, replace(alone, max_batch=_REFERENCE_MAX_BATCH if on_gpu else _MAX_BATCH)


def _triton_candidates(form: Form) -> tuple[ServerSettings, ...]:
    """Settings of Triton with many tokenizers."""
    _, batched = _framework_settings(form)
    dynamic = replace(batched, batching=True)
    delays_us = (0, 2000)
    if form.device != "cpu":
        ragged = [
            replace(dynamic, max_batch=max_batch, delay_us=delay_us, ragged=True)
            for max_batch in (_REFERENCE_MAX_BATCH, 32)
            for delay_us in delays_us
        ]
        return (*ragged, replace(ragged[0], instances=2), dynamic)
    choices = [
        batched,
        *(replace(dynamic, delay_us=delay_us, ragged=ragged) for delay_us in delays_us for ragged in (False, True)),
    ]
    found = [
        replace(each, instances=instances) for instances in sorted({1, form.threads}, reverse=True) for each in choices
    ]
    # Padded batches first: they are what is used without a sweep.
    return tuple(sorted(found, key=lambda each: not each.ragged) if form.by_torch else found)
