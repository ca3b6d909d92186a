"""Small calls of a UNet on a GPU, as CUDA graphs: launching their kernels one by one takes longer than they run.

Shapes: R rows of a call, C channels, H × W latent size.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from noria.models.cuda_graph import CudaGraph
from noria.models.diffusion import block_compilation
from noria.observe.logs.log_record import fields

_log = logging.getLogger(__name__)

MAX_LATENTS = 8 * 64 * 64
"""R × H × W of the largest calls that are captured; larger ones keep an H200 busy (docs/benchmarks/device.md)."""

_MAX_GRAPHS = 128  # graphs of one UNet; it has one for each shape of its inputs
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_are_disabled: ContextVar[bool] = ContextVar("are_disabled", default=False)


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Run calls inside of this context as if none was captured: for those that hooks change."""
    token = _are_disabled.set(True)
    try:
        yield
    finally:
        _are_disabled.reset(token)


class GraphedCalls:
    """Calls a module; a small call is captured when its shapes occur for the second time.

    The first time is the warm-up. What cannot be captured, for lack of memory for example, is not tried again.
    """

    def __init__(
        self, module: Callable[..., Any], device: torch.device, capture: Callable[..., Any] = CudaGraph
    ) -> None:
        """`capture` makes a graph of a call, as `CudaGraph` does."""
        self._module, self._device, self._capture = module, device, capture
        self._pool = _new_pool(device)
        # By shapes, the least recently used first.
        self._graphs: OrderedDict[object, _Graph | Literal["warm", "failed"]] = OrderedDict()

    def __call__(self, latents_RCHW: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does; its tensors are valid until the next call."""
        num_rows, _, height, width = latents_RCHW.shape
        if _are_disabled.get() or num_rows * height * width > MAX_LATENTS:
            return self._module(latents_RCHW, *args, **kwargs)
        arguments = (latents_RCHW, *args), kwargs
        leaves, _ = pytree.tree_flatten(arguments)
        shapes = tuple((each.shape, each.dtype) if isinstance(each, torch.Tensor) else each for each in leaves)
        key = tuple(kwargs), block_compilation.are_disabled.get(), shapes
        graph = self._graphs.get(key)
        if graph == "warm":
            graph = self._graphs[key] = self._try_capture(arguments)
        if isinstance(graph, _Graph):
            result = graph.replay(leaves)
        else:
            result = self._module(latents_RCHW, *args, **kwargs)
            self._graphs.setdefault(key, "warm")  # not before: a first call that fails is no warm-up
        self._graphs.move_to_end(key)
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return result

    def _try_capture(self, arguments: "_Arguments") -> "_Graph | Literal['failed']":
        copies = pytree.tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, arguments)
        args, kwargs = copies
        try:
            graph = self._capture(lambda: self._module(*args, **kwargs), self._device, self._pool, num_warm_ups=0)
        except RuntimeError as error:
            shape = tuple(args[0].shape)
            _log.warning(
                "a call with latents of shape %s cannot be captured as a CUDA graph: %s",
                shape,
                error,
                extra=fields(event="graph_failed", shape=shape),
            )
            self._pool = _new_pool(self._device)  # torch may refuse one whose capture was broken off
            return "failed"
        return _Graph(pytree.tree_leaves(copies), graph)


@dataclass(frozen=True)
class _Graph:
    """A captured call with the copies of its arguments, which it reads."""

    copies: list[Any]
    graph: Any

    def replay(self, leaves: list[Any]) -> Any:
        """Compute with other values of the same shapes."""
        for copy, leaf in zip(self.copies, leaves, strict=True):
            if isinstance(copy, torch.Tensor):
                copy.copy_(leaf)
        return self.graph.replay()


def _new_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
