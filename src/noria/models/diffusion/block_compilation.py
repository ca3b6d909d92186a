"""Compiles the blocks that a denoiser repeats, in place: one code for all of them, any number of rows and of tokens.

Adapters by row are hooks of layers, which compiled code leaves out. So there are two codes of each block, and that for
calls with adapters runs the hooks which a linear layer has at the call, behind an operation that the compiler does not
look into: rows, ranks and kinds of adapters change without a compilation, and layers without hooks cost little.
"""

import contextlib
import functools
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.folders import cache_folder
from noria.storage.private_files import make_own_folder

MAX_GRAPHS = 128
"""Codes of one class of blocks in a process: several models have it, and each takes up to 18. Torch stops after 8."""

are_disabled: ContextVar[bool] = ContextVar("are_disabled", default=False)
"""Whether calls run in `without_compiled_blocks`."""


RowHook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]
"""Changes the output in place, by the layer, its arguments and the output."""


class _Adapters:
    """Says whether the code of a denoiser's blocks that runs is that with the hooks of linear layers."""

    def __init__(self) -> None:
        self.are_run = False


class _HookedLinear:
    """The methods of a linear layer in a compiled block; each call runs its row hooks once, compiled or not."""

    row_hooks: OrderedDict[int, RowHook]
    hooked_adapters: _Adapters
    hooked_number: torch.Tensor  # on the CPU; a tensor, since code would be compiled again for another constant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(inputs)  # type: ignore[misc]
        if not torch.compiler.is_dynamo_compiling():  # `is_compiling` is true while any other thread compiles
            _run_hooks(inputs, output, self.hooked_number)
        elif self.hooked_adapters.are_run:
            torch.ops.noria.run_hooks(inputs, output, self.hooked_number)
        return output


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def _run_hooks(inputs: torch.Tensor, output: torch.Tensor, number: torch.Tensor) -> None:
    layer = _layers[int(number)]
    for hook in layer.row_hooks.values():  # type: ignore[operator]
        hook(layer, (inputs,), output)


torch.library.define("noria::run_hooks", "(Tensor inputs, Tensor(a!) output, Tensor number) -> ()")
torch.library.impl("noria::run_hooks", "default", _run_hooks)
torch.library.register_fake("noria::run_hooks", lambda inputs, output, number: None)  # noqa: ARG005


@functools.cache
def _hooked(kind: type[torch.nn.Linear]) -> type[torch.nn.Linear]:
    return type(f"Hooked{kind.__name__}", (_HookedLinear, kind), {})


def compile_blocks(denoiser: Any) -> None:
    """Have the first calls compile the blocks that diffusers names, or else those of the lists of blocks."""
    if denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks(dynamic=True)
    else:
        lists = [child for child in denoiser.children() if isinstance(child, torch.nn.ModuleList)]
        for block in (block for blocks in lists for block in blocks):
            block.compile(dynamic=True)
    if not hasattr(denoiser, "hooked_adapters"):  # layers that an earlier call has hooked keep it
        denoiser.hooked_adapters = _Adapters()
    for module in compiled_modules(denoiser):
        if isinstance(module, torch.nn.Linear) and not isinstance(module, _HookedLinear):
            module.__class__ = _hooked(type(module))  # type: ignore[arg-type]  # torch's stub has no hash
            module.hooked_adapters, number = denoiser.hooked_adapters, next(_numbers)
            module.hooked_number, _layers[number] = torch.tensor(number), module
            module.row_hooks = OrderedDict[int, RowHook]()  # type: ignore[assignment]


def compiled_modules(denoiser: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that are in blocks with compiled code, the blocks, too."""
    blocks = [each for each in denoiser.modules() if each._compiled_call_impl is not None]
    return {module for block in blocks for module in block.modules()}


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether compiled code runs the row hooks of a module, in calls `with_hooks`."""
    return isinstance(module, _HookedLinear)


def add_row_hook(module: Any, hook: RowHook) -> torch.utils.hooks.RemovableHandle:
    """Have a module that `is_hooked` call `hook` after its forward."""
    handle = torch.utils.hooks.RemovableHandle(module.row_hooks)
    module.row_hooks[handle.id] = hook
    return handle


@contextlib.contextmanager
def with_hooks(denoiser: Any) -> Iterator[None]:
    """Run the calls of a denoiser with compiled blocks inside of this context by code that runs the hooks of layers."""
    denoiser.hooked_adapters.are_run = True
    try:
        yield
    finally:
        denoiser.hooked_adapters.are_run = False


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
