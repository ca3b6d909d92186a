"""Streams blocks of weights from the host's memory to the device that computes them (`engine.offload`).

A part's blocks share two buffers on the device; the parameters of each are views of one of them, and have its values
only while the block is called. Before a call the block is copied, unless it has been: the one that came next the last
time is copied meanwhile, on a stream of its own. All rows of a call share the copies. Device, dtype and shape of the
parameters are as if the weights were there, and so are the results; for values outside of calls there is
`stored_value`.

diffusers' group offloading streams all blocks of a model or none, copies also what could stay, and waits for each block
on the host.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from noria.config import EngineConfig
from noria.models.diffusion.weight_blocks import NUM_BUFFERS, blocks_of, buffer_sizes, choose_streamed, is_streamed

_ALIGNMENT = 256  # bytes, as torch allocates on a GPU
_MAX_HOST_BYTES = 2**32  # torch rounds pinned memory up to a power of two, so blocks are put together


def stored_value(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter, which may be in the host's memory; outside of calls itself may have others."""
    stored: torch.Tensor = getattr(parameter, "_stored_value", parameter)
    return stored


class Copies(Protocol):
    """A queue of copies beside the calls of a device."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy bytes when all that was called so far is computed; return what to wait for."""

    def wait(self, copy: Any) -> None:
        """Let what is called from now on be computed after the copy."""


class HostCopies:
    """Copies at once."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes."""
        target.copy_(source)

    def wait(self, copy: None) -> None:
        """Do nothing."""


class CudaCopies:
    """Copies on a stream of its own; the host waits for none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, target: torch.Tensor, source: torch.Tensor) -> "torch.cuda.Event":
        """Queue the copy behind all that was called so far; it may have read what the target has now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            target.record_stream(self._stream)  # else its memory may be given away before the copy has ended
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def wait(self, copy: "torch.cuda.Event") -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(copy)


@dataclass(frozen=True)
class _Tensor:
    """A parameter of a block, and where its bytes are in the block's."""

    parameter: torch.nn.Parameter
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.parameter.numel() * self.parameter.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part of a block's bytes that are its values."""
        of_values = memory[self.offset : self.offset + self.num_bytes].view(self.parameter.dtype)
        return of_values.as_strided(self.parameter.shape, self.parameter.stride(), of_values.storage_offset())


@dataclass(eq=False)
class _Block:
    """A block that streams; its modules' hooks hold it."""

    tensors: list[_Tensor]
    host: torch.Tensor  # its bytes
    buffer: "_Buffer"
    next: "Callable[[], _Block | None]" = field(default=lambda: None)  # the one that was called after it

    def bind(self) -> None:
        """Make the parameters views of the buffer."""
        for each in self.tensors:
            each.parameter.data = each.view(self.buffer.memory)

    @property
    def is_bound(self) -> bool:
        """Whether they still are."""
        first = self.tensors[0]
        return first.parameter.data_ptr() == self.buffer.memory.data_ptr() + first.offset


@dataclass(eq=False)
class _Buffer:
    """Memory on the device for one block at a time."""

    memory: torch.Tensor
    blocks: "weakref.WeakSet[_Block]" = field(default_factory=weakref.WeakSet)
    holds: "Callable[[], _Block | None]" = field(default=lambda: None)  # the block that was copied last
    copy: Any = None

    def grow(self, num_bytes: int) -> None:
        """Have at least so many bytes; no block is called meanwhile."""
        if num_bytes > len(self.memory):
            self.memory, self.holds = self.memory.new_empty(num_bytes), lambda: None
            for block in self.blocks:
                block.bind()


class WeightStreamer:
    """Streams blocks of the parts of one model, whose calls follow one another."""

    def __init__(self, config: EngineConfig, device: str, copies: Copies | None = None) -> None:
        """`config` has no "auto" left."""
        self._config, self._device = config, torch.device(device)
        self._copies = copies or (CudaCopies(self._device) if self._device.type == "cuda" else HostCopies())
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._buffers = [_Buffer(empty) for _ in range(NUM_BUFFERS)]
        self._last: Callable[[], _Block | None] = lambda: None

    def streams(self, part: str) -> bool:
        """Whether blocks of this part stream."""
        return is_streamed(self._config, part)

    def add(self, part_name: str, part: Any) -> None:
        """Move a part to the device, but for blocks that are to stream from the host's memory.

        Of a denoiser as many stay as `engine.offload_resident_bytes` says. No dtype or memory format may be changed
        from then on.
        """
        parameters = _own_parameters(part)
        assert all(type(each) is torch.nn.Parameter for each in parameters.values()), "quantized weights do not stream"
        blocks = {
            block: [parameters[name] for name in names] for block, names in blocks_of(part_name, parameters).items()
        }
        is_denoiser, is_vae = not part_name.startswith(("text_encoder", "vae")), part_name == "vae"
        resident = self._config.offload_resident_bytes if is_denoiser else 0
        assert isinstance(resident, int)
        sizes = [_place(each)[1] for each in blocks.values()]
        chosen = [name for name, streams in zip(blocks, choose_streamed(sizes, resident), strict=True) if streams]
        self._stream({name: blocks[name] for name in chosen}, part, alternate=not is_vae)
        streamed = {id(each) for name in chosen for each in blocks[name]}
        for each in part.parameters():
            if id(each) not in streamed:
                each.data = each.data.to(self._device)
        for module in part.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)

    def _stream(self, blocks: dict[str, list[torch.nn.Parameter]], part: torch.nn.Module, *, alternate: bool) -> None:
        placed = [_place(parameters) for parameters in blocks.values()]
        sizes = [num_bytes for _, num_bytes in placed]
        for buffer, num_bytes in zip(self._buffers, buffer_sizes(sizes, alternate=alternate), strict=True):
            buffer.grow(num_bytes)
        memory = _host_memory(sizes, is_pinned=self._device.type == "cuda")
        for number, (name, (tensors, _), host) in enumerate(zip(blocks, placed, memory, strict=True)):
            for each in tensors:
                stored = each.view(host)
                stored.copy_(each.parameter.data)
                each.parameter._stored_value = stored  # type: ignore[attr-defined]
            block = _Block(tensors, host, self._buffers[number % NUM_BUFFERS if alternate else 0])
            block.buffer.blocks.add(block)
            block.bind()
            part.get_submodule(name).register_forward_pre_hook(self._hook(block), prepend=True)

    def _hook(self, block: _Block) -> Callable[..., None]:
        def before(_module: torch.nn.Module, _args: Any) -> None:
            self._load(block)

        # Compiled code would have no copies in it.
        hook: Callable[..., None] = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        return hook

    def _load(self, block: _Block) -> None:
        """Let a block have its values when it is called next, and copy the one after it meanwhile."""
        assert block.is_bound, "a part was moved or converted after its blocks began to stream"
        if block.buffer.holds() is not block:
            self._copy(block)
        self._copies.wait(block.buffer.copy)
        if (last := self._last()) is not None:
            last.next = weakref.ref(block)
        self._last = weakref.ref(block)
        following = block.next()
        if following is not None and following.buffer is not block.buffer and following.buffer.holds() is not following:
            self._copy(following)

    def _copy(self, block: _Block) -> None:
        buffer = block.buffer
        buffer.holds = lambda: None  # if the copy fails
        buffer.copy = self._copies.start(buffer.memory[: len(block.host)], block.host)
        buffer.holds = weakref.ref(block)


def _own_parameters(part: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by name that one module alone has: others have to stay for all of them."""
    named = list(part.named_parameters(remove_duplicate=False))
    times: dict[int, int] = {}
    for _, each in named:
        times[id(each)] = times.get(id(each), 0) + 1
    return {name: each for name, each in named if times[id(each)] == 1}


def _place(parameters: Sequence[torch.nn.Parameter]) -> tuple[list[_Tensor], int]:
    """Return where each parameter is in the bytes of its block, and the number of these."""
    sizes = (-(-each.numel() * each.itemsize // _ALIGNMENT) * _ALIGNMENT for each in parameters)
    offsets = list(itertools.accumulate(sizes, initial=0))
    return [_Tensor(each, offset) for each, offset in zip(parameters, offsets, strict=False)], offsets[-1]


def _host_memory(sizes: Sequence[int], *, is_pinned: bool) -> Iterator[torch.Tensor]:
    """Yield memory of these sizes, several together."""
    start = 0
    while start < len(sizes):
        end = start + 1
        while end < len(sizes) and sum(sizes[start : end + 1]) <= _MAX_HOST_BYTES:
            end += 1
        memory = torch.empty(sum(sizes[start:end]), dtype=torch.uint8, pin_memory=is_pinned)
        yield from torch.split(memory, list(sizes[start:end]))
        start = end
