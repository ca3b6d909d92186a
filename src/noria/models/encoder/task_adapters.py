"""The adapters of an encoder's tasks in torch: one LoRA or none for each text of a batch.

The factors A of all tasks are one matrix, and so are the factors B. Between the two, what belongs to other tasks than
the text's own becomes 0, which keeps the sum exact.

Shapes: B texts, K tasks, R ranks of all tasks together.
"""

import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from noria.errors import ModelError
from noria.models.encoder.folders.task_folder import ADAPTER_STEM, STACKED, factor_name
from noria.models.families import FAMILIES
from noria.models.files.weights import REDOWNLOAD_HINT, weight_files
from noria.protocol.text import EncoderModelSpec

_UNUSED = "pooler."
_STEM = FAMILIES["text-encoder"].weight_stems[""]
_FUSED, _PARTS = "Wqkv", ("q_proj", "k_proj", "v_proj")
_NAMES = {
    "roberta.": "",
    ".parametrizations.weight.original": ".weight",
    "emb_ln.": "embeddings.LayerNorm.",
    "encoder.layers.": "layers.",
    ".attn.": ".self_attn.",  # nomic's
    ".mixer.": ".self_attn.",  # jina's
    ".out_proj": ".o_proj",
    ".norm1.": ".post_attention_layernorm.",
    ".norm2.": ".post_mlp_layernorm.",
}
"""The parts of names in folders for the models' own code, and transformers' names of the same."""


class Chosen(threading.local):
    """The adapters of the texts that a thread computes now, as all layers with adapters see them."""

    others_B1R: torch.Tensor  # true where a rank is of another task than the text's own


class _AdaptedLayer(torch.nn.Module):
    """A Linear or Embedding with the LoRAs of all tasks."""

    def __init__(self, layer: torch.nn.Module, num_ranks: int, chosen: Chosen) -> None:
        super().__init__()
        self.layer = layer
        self._chosen = chosen
        weight: Any = layer.weight
        num_outputs, num_inputs = weight.shape
        self.down: torch.nn.Module
        if isinstance(layer, torch.nn.Embedding):
            num_inputs, num_outputs = num_outputs, num_inputs
            self.down = torch.nn.Embedding(num_inputs, num_ranks, dtype=weight.dtype)
        else:
            self.down = torch.nn.Linear(num_inputs, num_ranks, bias=False, dtype=weight.dtype)
        self.up = torch.nn.Linear(num_ranks, num_outputs, bias=False, dtype=weight.dtype)
        for each in (self.down, self.up):
            torch.nn.init.zeros_(each.weight)

    def load(self, factor: str, values: torch.Tensor, start: int, scale: float) -> torch.Tensor:
        """Return A or B of a task whose first rank is `start`, as it was copied. Raises ValueError: another shape."""
        if factor == "B":
            own, values = self.up.weight[:, start : start + values.shape[1]], values.float() * scale
        elif isinstance(self.down, torch.nn.Embedding):
            own, values = self.down.weight[:, start : start + values.shape[0]], values.T
        else:
            own = self.down.weight[start : start + values.shape[0]]  # type: ignore[index]
        if own.shape != values.shape:
            raise ValueError(f"{list(values.shape)}, and the layer is {list(self.layer.weight.shape)}")  # type: ignore[arg-type]
        return own.copy_(values)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own = self.down(inputs).masked_fill(self._chosen.others_B1R, 0.0)  # a product with 0 may be NaN
        result: torch.Tensor = self.layer(inputs) + self.up(own)
        return result


class _Factor(NamedTuple):
    """A factor of a task's LoRA for a layer, in PEFT's shape."""

    source: str  # for errors
    place: int  # the task's in `EncoderModelSpec.adapters`
    layer: str
    factor: str  # A or B
    values: torch.Tensor


@torch.no_grad()
def add_adapters(spec: EncoderModelSpec, model: Any, chosen: Chosen) -> None:
    """Put the adapters of `spec` into a model of transformers, which computes those that are `chosen`.

    Raises ModelError: one is of another model, or is not finite.
    """
    ranks = [adapter.rank for adapter in spec.adapters]
    for each in _factors(spec):
        if each.layer.startswith(_UNUSED):
            continue
        try:
            layer = _adapted(model, each.layer, sum(ranks), chosen)
            own = layer.load(each.factor, each.values, sum(ranks[: each.place]), spec.adapters[each.place].scale)
        except (AttributeError, ValueError) as error:
            raise ModelError(f"{each.source} does not belong to the model: {error}. {REDOWNLOAD_HINT}") from error
        if not own.isfinite().all():
            raise ModelError(f"the weights are not finite: {each.source} has NaN or infinity, as {own.dtype} at least.")


def read_original(spec: EncoderModelSpec, tree: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a folder for the model's own code, without adapters, in transformers' names.

    None: transformers reads the folder itself. `tree` is its configuration.
    """
    if not tree.get("num_experts") and (not spec.adapters or spec.adapters[0].path):
        return None
    return {
        name: values for _, original, whole in _tensors(spec, "", _STEM) for name, values in _renamed(original, whole)
    }


def _renamed(name: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor of the original form in transformers' names: those of queries, keys and values are one there."""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    if _FUSED not in name:
        return [(name, values)]
    parts = zip(_PARTS, values.chunk(3), strict=False)  # a damaged one has fewer, of another shape
    return [(name.replace(_FUSED, part), own) for part, own in parts]


def _factors(spec: EncoderModelSpec) -> Iterator[_Factor]:
    for place, adapter in enumerate(spec.adapters):
        for file, name, values in _tensors(spec, adapter.path, ADAPTER_STEM) if adapter.path else ():
            found = factor_name(name)
            assert found is not None, "the folder was inspected"
            yield _Factor(f"{file}: {name}", place, *found, values)
    if not spec.adapters or spec.adapters[0].path:
        return
    for file, name, stack in _tensors(spec, "", _STEM, are_stacked=True):
        end = STACKED.search(name)
        assert end is not None
        for place, factor in enumerate(stack):
            values = factor.T if "embeddings." in name else factor
            if end[1] == "A" and _FUSED in name:  # which queries, keys and values share
                values = values.repeat(3, 1)
            for layer, own in _renamed(name[: end.start()], values):
                yield _Factor(f"{file}: {name}", place, layer, end[1], own)


def _tensors(
    spec: EncoderModelSpec, part: str, stem: str, *, are_stacked: bool = False
) -> Iterator[tuple[pathlib.Path, str, torch.Tensor]]:
    """Yield file, name and values of the tensors in a folder that are, or are not, factors of all tasks."""
    from safetensors import safe_open

    for file in weight_files(spec.path, part, stem):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                if bool(STACKED.search(name)) is are_stacked:
                    yield file, name, opened.get_tensor(name)


def _adapted(model: Any, name: str, num_ranks: int, chosen: Chosen) -> _AdaptedLayer:
    """Return the layer with a name, with adapters. Raises AttributeError and ValueError: there is none."""
    layer = model.get_submodule(name)
    if isinstance(layer, _AdaptedLayer):
        return layer
    if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
        raise ValueError(f"the model has a {type(layer).__name__} there")
    adapted = _AdaptedLayer(layer, num_ranks, chosen)
    model.set_submodule(name, adapted)
    return adapted
