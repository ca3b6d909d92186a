"""The encoder by ONNX Runtime on a CPU, with the options that Noria has. It needs only numpy and onnxruntime."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria_bench.encoders.servers.text_encoder import TextEncoder


class OnnxEncoder(TextEncoder):
    """An ONNX file."""

    def __init__(self, job: dict[str, Any], threads: int) -> None:
        """`threads` are the session's."""
        super().__init__(job)
        import onnxruntime

        options = onnxruntime.SessionOptions()  # as Noria's
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
        self._session = onnxruntime.InferenceSession(job["onnx"], options, providers=[provider])
        self._inputs, self._output = job["inputs"], job["output"]

    def _compute(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        vectors: NDArray[np.float32] = self._session.run(
            [self._output], {name: tensors[name] for name in self._inputs}
        )[0]
        return vectors
