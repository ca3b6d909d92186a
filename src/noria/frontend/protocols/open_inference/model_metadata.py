"""The protocol's answers about a model: metadata, Triton's configuration and statistics, the index. Pure.

Each is a dictionary in the form of the protocol's JSON, which is also that of gRPC's messages.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from noria import __version__
from noria.frontend.protocols.open_inference.inference import TEXT, input_names, output_names, text_columns
from noria.observe.metrics import outcomes
from noria.protocol.text import EncoderModelSpec

VERSION = "1"
"""The one version of each model; the model's fingerprint is a parameter of its configuration."""

SERVER_METADATA: dict[str, Any] = {
    "name": "noria",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
}


def metadata(spec: EncoderModelSpec) -> dict[str, Any]:
    """Return the metadata of a model; -1 is any size."""
    inputs = {
        name: ("BYTES", [-1, text_columns(spec)[0]]) if name == TEXT else ("INT64", [-1, -1])
        for name in input_names(spec)
    }
    return {
        "name": spec.name,
        "versions": [VERSION],
        "platform": "noria",
        "inputs": _tensors(inputs),
        "outputs": _tensors(_outputs(spec)),
    }


def _outputs(spec: EncoderModelSpec) -> dict[str, tuple[str, list[int]]]:
    main, *others = output_names(spec)
    of_tokens = [-1] if spec.task.startswith("token_") else []
    return {main: ("FP32", [-1, *of_tokens, spec.dimensions])} | {name: ("INT32", [-1]) for name in others}


def _tensors(tensors: Mapping[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in tensors.items()]


def model_config(spec: EncoderModelSpec, max_texts: int) -> dict[str, Any]:
    """Return the model's configuration as Triton has it; its shapes are without the number of texts."""
    types = {"BYTES": "TYPE_STRING", "INT32": "TYPE_INT32", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32"}
    described = metadata(spec)
    tensors = {
        kind: [
            {"name": each["name"], "data_type": types[each["datatype"]], "dims": each["shape"][1:]}
            for each in described[kind]
        ]
        for kind in ("inputs", "outputs")
    }
    parameters = {"fingerprint": spec.fingerprint, "task": spec.task, "max_length": str(spec.max_length)}
    if spec.labels:
        parameters["labels"] = msgspec.json.encode(spec.labels).decode()
    return {
        "name": spec.name,
        "platform": "noria",
        "backend": "noria",
        "max_batch_size": max_texts,
        "input": [tensor | {"optional": True} for tensor in tensors["inputs"]],  # texts or tokens
        "output": tensors["outputs"],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def statistics(spec: EncoderModelSpec, samples: Iterable[Sample]) -> dict[str, Any]:
    """Return the model's statistics since the start of the server, by the metrics' `samples`.

    Tokenizing is `compute_input`. What is not measured has a time of 0.
    """
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)  # by name, and by the label beside the model's
    for sample in samples:
        labels = dict(sample.labels)
        if labels.pop("model", None) == spec.name and "le" not in labels:
            values[sample.name][next(iter(labels.values()), "")] = sample.value
    seconds, stages = ("noria_request_seconds", "noria_stage_seconds")

    def stage(name: str) -> dict[str, int]:
        return _duration(values[f"{stages}_count"].get(name, 0), values[f"{stages}_sum"].get(name, 0))

    success = _duration(values[f"{seconds}_count"].get("", 0), values[f"{seconds}_sum"].get("", 0))
    batches, batch_seconds = values["noria_text_batches_total"], values["noria_text_batch_seconds_total"]
    return {
        "name": spec.name,
        "version": VERSION,
        "last_inference": 0,
        "inference_count": int(values["noria_texts_total"].get("", 0)),
        "execution_count": int(sum(batches.values())),
        "inference_stats": {
            "success": success,
            "fail": _duration(sum(num for code, num in values["noria_requests_total"].items() if code != outcomes.OK)),
            "queue": stage("queue"),
            "compute_input": stage("tokenize"),
            "compute_infer": stage("infer"),
            "compute_output": stage("postprocess"),
            "cache_hit": _duration(0),
            "cache_miss": _duration(0),
        },
        "batch_stats": [
            {
                "batch_size": int(texts),
                "compute_input": _duration(batches[texts]),
                "compute_infer": _duration(batches[texts], batch_seconds.get(texts, 0)),
                "compute_output": _duration(batches[texts]),
            }
            for texts in sorted(batches, key=int)
        ],
    }


def _duration(count: float, seconds: float = 0.0) -> dict[str, int]:
    return {"count": int(count), "ns": int(seconds * 1e9)}


def index_entry(spec: EncoderModelSpec, *, is_ready: bool) -> dict[str, Any]:
    """Return the entry of a model in the repository's index."""
    state = ("READY", "") if is_ready else ("UNAVAILABLE", "no engine that holds it is ready")
    return {"name": spec.name, "version": VERSION, "state": state[0], "reason": state[1]}
