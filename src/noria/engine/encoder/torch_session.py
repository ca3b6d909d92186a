"""Text encoders in torch: on a GPU by CUDA graphs, in padded or packed batches.

Launching the kernels of a small encoder takes longer than they run. On a GPU each shape is captured as a CUDA graph
and replayed from then on. So that there are few, sizes are rounded up: of padded batches the rows and lengths, of
packed ones the texts and tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.cuda_graph import CudaGraph, no_capture
from noria.models.encoder import checkpoint
from noria.models.encoder.tokenizers.token_rows import FloatArray, Row, TokenRow, has_images, pack, stack, unpack, unpad
from noria.protocol.text import EncoderModelSpec

_MIN_LENGTH = 16  # tokens
_STEPS_PER_OCTAVE = 8  # tokens of packed batches are rounded up by at most an eighth
_MAX_GRAPHS = 512  # further shapes of packed batches are computed without one

Forward = Callable[..., torch.Tensor]


class TorchSession:
    """A `Session` of a checkpoint. There is one for a GPU; on a CPU, threads may share it."""

    is_faster_alone = False

    def __init__(self, spec: EncoderModelSpec, config: EngineConfig, device: str) -> None:
        """Load the checkpoint in `config.dtype`. Raises as `checkpoint.load` does."""
        self._module, self._compiles = checkpoint.load(spec, config, device), config.compile
        self._forward = self._callable(self._module)
        self._inputs, self._max_length, self._device = spec.inputs, spec.max_length, device
        self._graphs: dict[torch.Size, _Graph] | None = None if device == "cpu" else {}
        # All graphs use the same memory: one runs at a time, and its result is copied before the next.
        self._pool = None if device == "cpu" else torch.cuda.graph_pool_handle()
        self._packed: _Packed | None = None
        self.packed_from: int | None = None
        """The number of texts from which on a batch is packed; None: none is."""

    def _callable(self, module: torch.nn.Module) -> Forward:
        return torch.compile(module, dynamic=True) if self._compiles else module

    @property
    def is_packed(self) -> bool:
        """Whether it computes texts without padding."""
        return self.packed_from is not None

    def run(self, rows: Sequence[Row], is_alone: bool = False) -> list[FloatArray]:  # noqa: ARG002
        """Compute rows of one kind; see `Session.run`."""
        if self.packed_from is None or len(rows) < self.packed_from:
            return self.run_padded(rows)
        return self.run_packed([row for row in rows if isinstance(row, TokenRow)])

    def run_padded(self, rows: Sequence[Row]) -> list[FloatArray]:
        """Compute rows of one kind, padded to the longest."""
        tensors = [torch.from_numpy(array) for array in stack(rows, self._inputs).values()]
        with torch.inference_mode():
            if self._graphs is None:
                return unpad(self._forward(*tensors).numpy(), rows)
            with no_capture():
                return unpad(self._replay(tensors, self._graphs)[: len(rows)].cpu().numpy(), rows)

    @property
    def packing_obstacle(self) -> str | None:
        """The reason why texts cannot be packed, or None."""
        from noria.models.encoder.packing import packing_obstacle

        return packing_obstacle(self._module)

    def run_packed(self, rows: Sequence[TokenRow]) -> list[FloatArray]:
        """Compute texts one behind the other, without padding, if there is no `packing_obstacle`.

        Those with unseen tokens are padded apart: FlashAttention would shift windows by the number of such tokens. They
        are queries that were filled up to one length, so that they need no padding.
        """
        filled = [row for row in rows if row.has_unseen]
        if not filled:
            return self._run_packed(rows)
        whole = [row for row in rows if not row.has_unseen]
        of_filled = iter(self.run_padded(filled))
        of_whole = iter(self._run_packed(whole) if whole else [])
        return [next(of_filled if row.has_unseen else of_whole) for row in rows]

    def drop_packed(self) -> None:
        """Drop what packed batches have allocated; the next one makes it again."""
        self._packed = None

    def _run_packed(self, texts: Sequence[TokenRow]) -> list[FloatArray]:
        if self._packed is None:
            self._packed = self._make_packed()
        with torch.inference_mode():
            if self._graphs is None:
                return self._packed.compute(texts)
            with no_capture():
                return self._packed.replay(texts, self._pool)

    def _make_packed(self) -> "_Packed":
        from noria.models.encoder.packing import PackedModule

        assert isinstance(self._module, checkpoint.EncoderModule), "it is packed"
        module = PackedModule(self._module)
        return _Packed(self._callable(module), self._inputs, module.pad_id, self._device)

    def _replay(self, tensors: list[torch.Tensor], graphs: "dict[torch.Size, _Graph]") -> torch.Tensor:
        """Compute by the graph of the next larger bucket."""
        num_rows, *sizes = tensors[0].shape
        if not has_images(self._inputs):
            sizes = [min(bucket(sizes[0], _MIN_LENGTH), self._max_length)]
        shape = torch.Size((bucket(num_rows, 1), *sizes))
        if (
            not has_images(self._inputs) and len(tensors) > 1
        ):  # rows that are only padding see their first token: a row that sees nothing becomes NaN
            ids, mask, *types = tensors
            filler = torch.zeros(shape[0] - num_rows, mask.shape[1], dtype=mask.dtype)
            filler[:, 0] = 1
            tensors = [ids, torch.cat([mask, filler]), *types]
        if shape not in graphs:
            ones = [
                torch.ones(
                    (shape[0], *tensor.shape[1:]) if has_images(self._inputs) else shape[: tensor.ndim],
                    dtype=tensor.dtype,
                    device=self._device,
                )
                for tensor in tensors
            ]
            graphs[shape] = _Graph(self._forward, ones, self._device, self._pool)
        return graphs[shape].replay(tensors)


class _Packed:
    """Computes packed batches."""

    def __init__(self, forward: Forward, inputs: Sequence[str], pad_id: int | None, device: str) -> None:
        self._forward, self._inputs, self._pad_id, self._device = forward, inputs, pad_id, device
        self._graphs: dict[tuple[int, int, int], _Graph | None] = {}  # None: the shape has occurred once

    def compute(self, rows: Sequence[TokenRow]) -> list[FloatArray]:
        """Compute on a CPU."""
        tensors = [torch.from_numpy(array) for array in pack(rows, self._inputs, self._pad_id)]
        return unpack(self._forward(*tensors, max_length=max(len(row.ids) for row in rows)).numpy(), rows)

    def replay(self, rows: Sequence[TokenRow], pool: Any) -> list[FloatArray]:
        """Compute on a GPU, by a CUDA graph if the shape has occurred before: there are many, and most are rare."""
        lengths = [len(row.ids) for row in rows]
        num_texts, num_tokens = _power_of_2(len(rows)), fine_bucket(sum(lengths))
        longest = _power_of_2(max(_MIN_LENGTH, *lengths))
        shape = num_texts, num_tokens, longest
        arrays = pack(rows, self._inputs, self._pad_id, num_texts, num_tokens)
        tensors = [torch.from_numpy(array) for array in arrays]
        forward = functools.partial(self._forward, max_length=longest)
        graph = self._graphs.get(shape)
        if graph is None and shape in self._graphs:
            own = [tensor.to(self._device) for tensor in tensors]
            graph = self._graphs[shape] = _Graph(forward, own, self._device, pool)
        if graph is not None:
            result = graph.replay(tensors)
        else:
            if len(self._graphs) < _MAX_GRAPHS:
                self._graphs[shape] = None
            result = forward(*[tensor.to(self._device) for tensor in tensors])
        result = result[: len(rows)] if result.ndim == 2 else result[:, : sum(lengths)]
        return unpack(result.cpu().numpy(), rows)


class _Graph:
    """A call with tensors of one shape, captured."""

    def __init__(self, forward: Forward, tensors: list[torch.Tensor], device: str, pool: Any) -> None:
        self._tensors = tensors
        self._graph = CudaGraph(lambda: forward(*tensors), torch.device(device), pool, num_warm_ups=2)

    def replay(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Compute with other values, of this shape or smaller; the result is valid until the next replay."""
        for own, new in zip(self._tensors, tensors, strict=True):
            if own.shape != new.shape:
                own.zero_()
            own[tuple(map(slice, new.shape))].copy_(new)
        return self._graph.replay()


def bucket(number: int, smallest: int) -> int:
    """Round up to a power of two times `smallest`, or to three quarters of one: to at most half as much again."""
    size = smallest
    while size < number:
        size *= 2
    return size * 3 // 4 if size > smallest and size * 3 // 4 >= number else size


def fine_bucket(number: int) -> int:
    """Round up by at most an eighth, to a multiple of 16 at least."""
    step = max(_power_of_2(number) // 2 // _STEPS_PER_OCTAVE, _MIN_LENGTH)
    return math.ceil(number / step) * step


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
