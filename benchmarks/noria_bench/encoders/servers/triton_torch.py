"""The models of the Triton target by torch, in an environment with numpy 2, for Triton's Python backend.

Triton's own arrays are wrong with numpy 2, and strings among its inputs end the process: a text travels as its bytes,
and arrays cross its border by DLPack. Those that leave are torch's: of each of numpy's, numpy would print an error when
Triton has taken it.
"""

from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from noria_bench.encoders.servers.text_encoder import open_encoder, open_tokenizer, read_triton_job


class Tokenizer:
    """`TEXT`, the bytes of a text in UTF-8, to `input_ids`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        job = read_triton_job(args)
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


class Encoder:
    """`input_ids` of a text to `embedding`: the requests that Triton gives it at once are one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint."""
        job = read_triton_job(args)
        self._encoder = open_encoder(job, job["session_threads"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute the texts of all requests together."""
        rows = [np.from_dlpack(pb_utils.get_input_tensor_by_name(each, "input_ids"))[0] for each in requests]
        vectors = torch.split(torch.from_numpy(self._encoder.embed(rows)), 1)
        outputs = [pb_utils.Tensor.from_dlpack("embedding", to_dlpack(vector)) for vector in vectors]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
