"""The models of the Triton target over an ONNX file, for Triton's Python backend, with transformers-deploy's tokenizer.

Triton's wheel has no backend for ONNX files.
"""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer as FastTokenizer

from noria_bench.encoders.servers.text_encoder import open_encoder, read_triton_job


class Tokenizer:
    """`TEXT` to `input_ids` and `attention_mask`; the texts of one request are padded to the longest."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        job = read_triton_job(args)
        self._tokenizer = FastTokenizer.from_file(job["tokenizer"])
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


class Encoder:
    """`input_ids` and `attention_mask` to `embedding`: the requests that Triton gives it at once are one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the ONNX file."""
        job = read_triton_job(args)
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
