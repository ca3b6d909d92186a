"""Checks the adapters of an encoder's tasks, each a LoRA that PEFT wrote into a subfolder. Knows no torch."""

import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from noria.errors import ModelError, short_list, short_repr
from noria.models.encoder.architectures import TASK_FOLDERS
from noria.models.files.weights import (
    REDOWNLOAD_HINT,
    Shapes,
    convert,
    num_tensor_parameters,
    read_object,
    read_weights,
)
from noria.protocol.text import TaskAdapter

ADAPTER_STEM = "adapter_model"
_CONFIG_FILE = "adapter_config.json"
_MAX_RANKS = 512  # ranks of all tasks: each layer computes them for every text
_TENSOR = re.compile(r"base_model\.model\.(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB]))", re.ASCII)
"""The name of a LoRA's factor: the module's, and A or B."""


STACKED = re.compile(r"\.parametrizations\.weight\.0\.lora_([AB])$", re.ASCII)
"""The end of the name of the factors A or B of all tasks, one behind the other, as the model's own code has them."""


class _Config(Struct, frozen=True):
    """The keys of a LoRA's adapter_config.json that change numbers, where the tensors do not show it."""

    r: Annotated[int, Meta(ge=1, le=1024)]
    lora_alpha: Annotated[float, Meta(gt=-1e6, lt=1e6)]
    peft_type: Literal["LORA"]
    use_rslora: bool = False
    alpha_pattern: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    alora_invocation_tokens: Annotated[list[int], Meta(max_length=0)] | None = None
    fan_in_fan_out: Literal[False] = False


class _Tasks(Struct, frozen=True):
    lora_adaptations: tuple[str, ...] | None = None
    task_instructions: dict[str, str] | None = None
    lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 4
    lora_alpha: Annotated[float, Meta(gt=-1e6, lt=1e6)] = 1.0


def read_adapters(
    folder: pathlib.Path, tree: Mapping[str, Any], shapes: Shapes
) -> tuple[tuple[TaskAdapter, ...], dict[str, str]]:
    """Return the adapters of a folder with the config.json `tree`, and the prompts of its tasks; it may have none.

    `shapes` are those of the model's own weights, which have the adapters in the original form.

    Raises ModelError: one that config.json names is missing, or it is damaged, or not a LoRA that is served.
    """
    adapters, prompts = _read_adapters(folder, tree, shapes)
    num_ranks = sum(adapter.rank for adapter in adapters)
    if num_ranks > _MAX_RANKS:
        raise ModelError(f"{folder}: the ranks of all adapters sum up to {num_ranks}; allowed are {_MAX_RANKS}.")
    return adapters, prompts


def _read_adapters(
    folder: pathlib.Path, tree: Mapping[str, Any], shapes: Shapes
) -> tuple[tuple[TaskAdapter, ...], dict[str, str]]:
    if tree.get("model_type") != "jina_embeddings_v3":
        return (), {}
    file = folder / "config.json"
    said = convert(file, dict(tree), _Tasks)
    unknown = [task for task in said.lora_adaptations or () if task not in TASK_FOLDERS]
    if unknown:
        raise ModelError(
            f"{file}: lora_adaptations has {short_repr(unknown[0])}; supported are {', '.join(TASK_FOLDERS)}."
        )
    prompts = {task: text for task, text in (said.task_instructions or {}).items() if task in TASK_FOLDERS}
    stacks = [(name, end, shape) for name, shape in shapes.items() if (end := STACKED.search(name))]
    if stacks:
        tasks = said.lora_adaptations or ()
        _check_pairs(folder, ((name[: end.start()], end[1]) for name, end, _ in stacks))
        for name, _, shape in stacks:
            if len(shape) != 3 or shape[0] != len(tasks) or said.lora_rank not in shape[1:]:
                raise ModelError(
                    f"{folder}: {name} is {list(shape)}; by config.json there are {len(tasks)} adapters of the rank "
                    f"{said.lora_rank}. {REDOWNLOAD_HINT}"
                )
        scale = said.lora_alpha / said.lora_rank
        return tuple(TaskAdapter(task, "", said.lora_rank, scale) for task in tasks), prompts
    adapters = []
    for task, path in TASK_FOLDERS.items():
        if (folder / path / _CONFIG_FILE).exists():
            adapters.append(_read_adapter(folder, task, path))
        elif task in (said.lora_adaptations or ()):
            raise ModelError(
                f"{folder / path / _CONFIG_FILE}: missing, and config.json names its task, {task}, in "
                "lora_adaptations. Copy the subfolder from the model's source."
            )
    return tuple(adapters), prompts


def num_adapter_parameters(folder: pathlib.Path, adapters: Iterable[TaskAdapter]) -> int:
    """Count the parameters of adapters beside the model's own weights."""
    shapes = (read_weights(folder, adapter.path, ADAPTER_STEM) for adapter in adapters if adapter.path)
    return sum(map(num_tensor_parameters, shapes))


def factor_name(name: str) -> tuple[str, str] | None:
    """Return the module that a tensor of an adapter belongs to, and A or B; None: it is no factor of a LoRA."""
    match = _TENSOR.fullmatch(name)
    return (match[1], match[2] or match[3]) if match else None


def _read_adapter(folder: pathlib.Path, task: str, path: str) -> TaskAdapter:
    file = folder / path / _CONFIG_FILE
    config = convert(file, read_object(file), _Config)
    shapes = read_weights(folder, path, ADAPTER_STEM)
    _check_shapes(folder / path, config.r, shapes)
    return TaskAdapter(
        task, path, config.r, config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    )


def _check_shapes(part: pathlib.Path, rank: int, shapes: Shapes) -> None:
    factors = []
    for name, shape in shapes.items():
        found = factor_name(name)
        if found is None:
            raise ModelError(f"{part}: has {short_repr(name)}; supported are the factors A and B of a LoRA alone.")
        if len(shape) != 2 or shape[0 if found[1] == "A" else 1] != rank:
            raise ModelError(f"{part}: {name} is {list(shape)}; by {_CONFIG_FILE} the rank is {rank}.")
        factors.append(found)
    _check_pairs(part, factors)


def _check_pairs(part: pathlib.Path, factors: Iterable[tuple[str, str]]) -> None:
    """Raise ModelError if a layer has not one factor A and one B, or there is no layer."""
    found = defaultdict(list)
    for layer, factor in factors:
        found[layer].append(factor)
    unpaired = [layer for layer, kinds in found.items() if sorted(kinds) != ["A", "B"]]
    if unpaired or not found:
        what = f"{short_list(unpaired)} has not one factor A and one B" if unpaired else "there is no LoRA"
        raise ModelError(f"{part}: {what}. {REDOWNLOAD_HINT}")
