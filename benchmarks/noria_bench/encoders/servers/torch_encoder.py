"""The encoder by torch, on a GPU or a CPU: transformers' model, its SDPA attention, and the checkpoint's pooling."""

from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from noria.config import EngineConfig
from noria.models.encoder import checkpoint
from noria_bench.encoders.servers.job import Checkpoint
from noria_bench.encoders.servers.text_encoder import TextEncoder


class TorchEncoder(TextEncoder):
    """A checkpoint, called batch by batch, without graphs or compilation."""

    def __init__(self, job: dict[str, Any], threads: int) -> None:
        """Load it and compute one text; `threads` are torch's own in each thread that computes on a CPU."""
        super().__init__(job)
        found = msgspec.convert(job["checkpoint"], Checkpoint)
        torch.set_num_threads(threads)
        self._module = checkpoint.load(found.spec, EngineConfig(dtype=found.precision), found.device)
        self._device, self._has_types = found.device, "token_type_ids" in found.spec.inputs
        self._compute(np.ones((1, 2), np.int64), np.ones((1, 2), np.int64))

    def _compute(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            # One copy to the device instead of two.
            inputs = list(torch.from_numpy(np.stack((ids, mask))).to(self._device))
            if self._has_types:
                inputs.append(torch.zeros_like(inputs[0]))
            vectors: NDArray[np.float32] = self._module(*inputs).cpu().numpy()
        return vectors
