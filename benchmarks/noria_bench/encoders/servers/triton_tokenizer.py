"""The tokenizer model of the Triton target, for Triton's Python backend, as transformers-deploy has it."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    """`TEXT` to `input_ids` and `attention_mask`; the texts of one request are padded to the longest."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        job = json.loads(json.loads(args["model_config"])["parameters"]["job"]["string_value"])
        self._tokenizer = Tokenizer.from_file(job["tokenizer"])
        self._tokenizer.enable_padding(length=None)
        self._tokenizer.enable_truncation(job["max_tokens"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Tokenize the texts of each request."""
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
            encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts])
            tensors = {
                "input_ids": np.array([each.ids for each in encodings], np.int64),
                "attention_mask": np.array([each.attention_mask for each in encodings], np.int64),
            }
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(*tensor) for tensor in tensors.items()]))
        return responses
