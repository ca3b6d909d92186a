"""Compiles the blocks that a denoiser repeats, in place: one code for all of them, any number of rows and of tokens.

Adapters by row are hooks, which compiled code would not run; calls with adapters run without it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def compile_blocks(denoiser: Any) -> None:
    """Have the first calls compile the blocks that diffusers names, or else those of the lists of blocks."""
    if denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks(dynamic=True)
        return
    lists = [child for child in denoiser.children() if isinstance(child, torch.nn.ModuleList)]
    for block in (block for blocks in lists for block in blocks):
        block.compile(dynamic=True)


@contextlib.contextmanager
def without_compiled_blocks(denoiser: torch.nn.Module) -> Iterator[None]:
    """Run the calls of a denoiser inside of this context as if nothing was compiled."""
    compiled = [(each, each._compiled_call_impl) for each in denoiser.modules() if each._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
