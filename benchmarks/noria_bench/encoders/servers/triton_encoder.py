"""The encoder model of the Triton target, for Triton's Python backend: the wheel has no backend for ONNX files."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from noria_bench.encoders.servers.text_encoder import open_encoder


class TritonPythonModel:
    """`input_ids` and `attention_mask` to `embedding`: the requests that Triton gives it at once are one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the ONNX file."""
        job = json.loads(json.loads(args["model_config"])["parameters"]["job"]["string_value"])
        self._encoder = open_encoder(job, job["session_threads"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute the texts of all requests together."""
        rows, edges = [], [0]
        for request in requests:
            ids, mask = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("input_ids", "attention_mask")
            )
            rows += [row[:length] for row, length in zip(ids, mask.sum(1), strict=True)]
            edges.append(len(rows))
        vectors = self._encoder.embed(rows)
        parts = np.split(vectors, edges[1:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", part)]) for part in parts]
