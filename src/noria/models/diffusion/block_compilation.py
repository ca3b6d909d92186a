"""Compiles the blocks that a denoiser repeats, in place: one code for all of them, any number of rows and of tokens.

Adapters by row are hooks, which compiled code would not run; calls with adapters run without it.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.folders import cache_folder
from noria.storage.private_files import make_own_folder

MAX_GRAPHS = 64
"""Codes of one class of blocks in a process: several models have it, and each takes up to 9. Torch stops after 8."""

are_disabled: ContextVar[bool] = ContextVar("are_disabled", default=False)
"""Whether calls run in `without_compiled_blocks`."""


def compile_blocks(denoiser: Any) -> None:
    """Have the first calls compile the blocks that diffusers names, or else those of the lists of blocks."""
    if denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks(dynamic=True)
        return
    lists = [child for child in denoiser.children() if isinstance(child, torch.nn.ModuleList)]
    for block in (block for blocks in lists for block in blocks):
        block.compile(dynamic=True)


def check_not_compiled(config: EngineConfig, setting: str) -> None:
    """Raise ConfigError if the model is compiled as a whole: nothing that `setting` names can change its calls."""
    if config.compile:
        raise ConfigError(
            f"engine.{setting} does not work with engine.compile. Switch off one of them, or use engine.compile_blocks."
        )


def use_private_cache(config: EngineConfig) -> None:
    """Have torch keep compiled code in a private folder of the cache folder, unless the operator has named one.

    Its default is a predictable folder in the temporary folder, where another user may put code before us.

    Raises ConfigError: something is to be compiled, and the folder is not ours or cannot be made.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = cache_folder(config.cache_dir, os.environ) / "compiled"
    try:
        make_own_folder(folder)
    except OSError as error:
        if config.compile or config.compile_blocks:
            raise ConfigError(
                f"compiled code cannot be kept: {error}. Set engine.cache_dir to another folder."
            ) from error
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


@contextlib.contextmanager
def without_compiled_blocks(denoiser: torch.nn.Module) -> Iterator[None]:
    """Run the calls of a denoiser inside of this context as if nothing was compiled."""
    compiled = [(each, each._compiled_call_impl) for each in denoiser.modules() if each._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    token = are_disabled.set(True)
    try:
        yield
    finally:
        are_disabled.reset(token)
        for module, call in compiled:
            module._compiled_call_impl = call
