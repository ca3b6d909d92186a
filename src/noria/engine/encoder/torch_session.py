"""Text encoders in torch: on a GPU by CUDA graphs.

Launching the kernels of a small encoder takes longer than they run. On a GPU each shape is captured as a CUDA graph
when it first occurs, and replayed from then on. So that there are few, rows and lengths are padded up to a bucket.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.cuda_graph import CudaGraph, no_capture
from noria.models.encoder import checkpoint
from noria.models.encoder.token_rows import INPUTS, PIXELS, FloatArray, Row, stack, unpad
from noria.protocol.text import EncoderModelSpec

_MIN_LENGTH = 16  # tokens


class TorchSession:
    """A `Session` of a checkpoint. There is one for a GPU; on a CPU, threads may share it."""

    is_faster_alone = False

    def __init__(self, spec: EncoderModelSpec, config: EngineConfig, device: str) -> None:
        """Load the checkpoint in `config.dtype`. Raises as `checkpoint.load` does."""
        module = checkpoint.load(spec, config, device)
        self._forward: Callable[..., torch.Tensor] = torch.compile(module, dynamic=True) if config.compile else module
        self._inputs, self._max_length, self._device = spec.inputs, spec.max_length, device
        self._graphs: dict[torch.Size, _Graph] | None = None if device == "cpu" else {}
        # All graphs use the same memory: one runs at a time, and its result is copied before the next.
        self._pool = None if device == "cpu" else torch.cuda.graph_pool_handle()

    def run(self, rows: Sequence[Row], is_alone: bool = False) -> list[FloatArray]:  # noqa: ARG002
        """Compute rows of one kind; see `Session.run`."""
        tensors = [torch.from_numpy(array) for array in stack(rows, self._inputs).values()]
        with torch.inference_mode():
            if self._graphs is None:
                return unpad(self._forward(*tensors).numpy(), rows)
            with no_capture():
                return unpad(self._replay(tensors, self._graphs)[: len(rows)].cpu().numpy(), rows)

    def _replay(self, tensors: list[torch.Tensor], graphs: "dict[torch.Size, _Graph]") -> torch.Tensor:
        """Compute by the graph of the next larger bucket."""
        num_rows, *sizes = tensors[0].shape
        if self._inputs != PIXELS:
            sizes = [min(bucket(sizes[0], _MIN_LENGTH), self._max_length)]
        shape = torch.Size((bucket(num_rows, 1), *sizes))
        if shape not in graphs:
            ones = [torch.ones(shape, dtype=tensor.dtype, device=self._device) for tensor in tensors]
            graphs[shape] = _Graph(self._forward, ones, torch.device(self._device), self._pool)
        return graphs[shape].replay(tensors)


class _Graph:
    """A call with tensors of one shape, captured."""

    def __init__(
        self, forward: Callable[..., torch.Tensor], tensors: list[torch.Tensor], device: torch.device, pool: Any
    ) -> None:
        self._tensors = tensors
        self._graph = CudaGraph(lambda: forward(*tensors), device, pool, num_warm_ups=2)

    def replay(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Compute with other values, of this shape or smaller; the result is valid until the next replay.

        Rows that are only padding see their first token, since a row that sees nothing becomes NaN.
        """
        for own, new in zip(self._tensors, tensors, strict=True):
            own.zero_()
            own[: new.shape[0], : new.shape[1]].copy_(new)
        if len(tensors) > 1:
            self._tensors[INPUTS.index("attention_mask")][tensors[0].shape[0] :, 0] = 1
        return self._graph.replay()


def bucket(number: int, smallest: int) -> int:
    """Round up to a power of two times `smallest`, or to three quarters of one: to at most half as much again."""
    size = smallest
    while size < number:
        size *= 2
    return size * 3 // 4 if size > smallest and size * 3 // 4 >= number else size
