"""The tokenizer model of the Triton target by torch, in an environment with numpy 2, for Triton's Python backend.

Triton's own arrays are wrong with numpy 2, and strings among its inputs end the process: a text travels as its bytes,
and arrays cross its border by DLPack. Those that leave are torch's: of each of numpy's, numpy would print an error when
Triton has taken it.
"""

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from noria_bench.encoders.servers.text_encoder import open_tokenizer


class TritonPythonModel:
    """`TEXT`, the bytes of a text in UTF-8, to `input_ids`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        job = json.loads(json.loads(args["model_config"])["parameters"]["job"]["string_value"])
        self._tokenizer = open_tokenizer(job)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Tokenize the text of each request."""
        responses = []
        for request in requests:
            text = np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "TEXT"))
            ids = torch.tensor([self._tokenizer.encode(text.tobytes().decode()).ids])
            output = pb_utils.Tensor.from_dlpack("input_ids", to_dlpack(ids))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
