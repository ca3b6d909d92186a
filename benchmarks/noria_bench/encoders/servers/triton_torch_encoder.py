"""The encoder model of the Triton target by torch, in an environment with numpy 2, for Triton's Python backend.

Arrays cross Triton's border by DLPack, as in `triton_torch_tokenizer.py`.
"""

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from noria_bench.encoders.servers.text_encoder import open_encoder


class TritonPythonModel:
    """`input_ids` of a text to `embedding`: the requests that Triton gives it at once are one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint."""
        job = json.loads(json.loads(args["model_config"])["parameters"]["job"]["string_value"])
        self._encoder = open_encoder(job, job["session_threads"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute the texts of all requests together."""
        rows = [np.from_dlpack(pb_utils.get_input_tensor_by_name(each, "input_ids"))[0] for each in requests]
        vectors = torch.split(torch.from_numpy(self._encoder.embed(rows)), 1)
        outputs = [pb_utils.Tensor.from_dlpack("embedding", to_dlpack(vector)) for vector in vectors]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
