"""Estimates the memory of a model that is not loaded: weights, activations of its calls, slots.

The parts are built on torch's meta device, whose tensors have shapes and no memory, and called as in service, while the
bytes of the tensors that exist at once are counted. What kernels allocate inside, and fragmentation, is not known.
"""

import bisect
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.weight_bytes import FLOAT32_BYTES, text_weights_of, weights_of
from noria.models.diffusion.block_quantization import (
    denoiser_part,
    has_float8,
    has_quantizable_layers,
    quantized_bytes,
)
from noria.models.diffusion.conditioning import Conditioning, ReferenceTokens, collate
from noria.models.diffusion.diffusion_model import (
    ControlledModel,
    Denoiser,
    DiffusionModel,
    ReferencedModel,
    RefinedModel,
)
from noria.models.diffusion.folders.quantization import BitsAndBytes, is_float8, read_quantization
from noria.models.diffusion.part_loading import DTYPES
from noria.models.diffusion.unet_models.controlnet import ControlRows
from noria.models.diffusion.unet_models.graphed_calls import MAX_LATENTS
from noria.models.diffusion.unet_models.unet_model import UnetModel
from noria.models.diffusion.vae import MAX_PIXELS
from noria.models.families import FAMILIES
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.step import empty_history

_ANY_SCALE = 50.0  # the largest guidance scale that a request can have
LONGEST_PROMPT = "a " * 1024
"""All families cut it, to the most tokens that a prompt can have."""
_WIDEST_WINDOW = 4  # the widest window of the samplers' tables: UniPC, PNDM, LMS


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model with its settings, for images of its default size."""

    weights: Mapping[str, int]  # by part, of those on the model's device
    row: int  # a row of a denoiser's call, with one ControlNet and all reference images if there can be
    decoded_image: int  # the decoding of one image
    prompt: int  # the encoding of a row's prompt, which has the most tokens
    slot: int  # the samples and outputs that a slot keeps, the embeddings of its image and all reference images
    rows_per_image: int  # two for a guided image, unless the model embeds its guidance, or takes none
    decode_batch: int  # images that the VAE takes at once, at most
    elsewhere: Mapping[str, int] = field(default_factory=dict)  # weights on `engine.text_encoder_device`
    graph_rows: int = 0  # rows of the largest call that is captured as a CUDA graph, which keeps its memory
    graph_row: int = 0  # a row of such a call: the model's and its refiner's together
    caches: int = 0  # full caches of embeddings of prompts: the model's and that of its refiner
    max_rows: int | None = None  # rows of the largest call; None: those of all slots
    streamed: Mapping[str, int] = field(default_factory=dict)  # weights that `engine.offload` keeps on the host
    row_flops: int = 0  # floating-point operations of a row of the model's call

    def rows(self, slots: int) -> int:
        """Return the rows of the largest call."""
        rows = slots * self.rows_per_image
        return rows if self.max_rows is None else min(rows, self.max_rows)

    def needed(self, slots: int) -> int:
        """Return the bytes of the weights, all slots, full caches, graphs, and the largest of the kinds of calls."""
        rows, prompts = self.rows(slots), slots * self.rows_per_image
        calls = rows * self.row, min(self.decode_batch, slots) * self.decoded_image, prompts * self.prompt
        return sum(self.weights.values()) + slots * self.slot + self.caches + self.graphs(slots) + max(calls)

    def graphs(self, slots: int) -> int:
        """Return the bytes that CUDA graphs keep: those of the largest call of each UNet."""
        return min(self.rows(slots), self.graph_rows) * self.graph_row

    def slots_in(self, num_bytes: int) -> int:
        """Return how many slots fit, up to 1024; 0 if not even one does."""
        return bisect.bisect_right(range(1, 1025), num_bytes, key=self.needed)


def estimate_memory(spec: DiffusionModelSpec, config: EngineConfig) -> MemoryEstimate:
    """Return the estimate for `config`, which has no "auto" left.

    Raises ModelError: the libraries cannot build a part.
    """
    family = FAMILIES[spec.family]
    eager = msgspec.structs.replace(
        config,
        compile=False,
        compile_blocks=False,
        quantize="none",
        attention="sdpa",
        text_encoder_device="same",
        offload="none",
        offload_resident_bytes="auto",
    )
    model: DiffusionModel = family.load(spec, eager, "meta")
    shape = model.latent_shape(spec.default_width_px, spec.default_height_px)
    with torch.inference_mode():
        with _counting() as of_prompt:
            (conditioning,) = model.text_encode([LONGEST_PROMPT])
        with _StorageCounter():
            reference = _reference(model, spec)
        num_channels = input_channels(model, shape)
        rows = [_row_bytes(model, (num_channels, *shape[1:]), conditioning, reference)]
        with _StorageCounter(), FlopCounterMode(display=False) as counter:
            _predict(model, 1, (num_channels, *shape[1:]), conditioning, reference)
        flops = counter.get_total_flops()
        decoded = _peak_bytes(lambda: model.decode(torch.empty(1, *shape, device="meta")))
        embeddings, num_caches = conditioning.nbytes, 1
        if isinstance(model, RefinedModel) and model.refiner is not None:
            with _StorageCounter():
                (conditioning,) = model.refiner.text_encode([LONGEST_PROMPT])
            embeddings, num_caches = embeddings + conditioning.nbytes, 2
            rows.append(_row_bytes(model.refiner, shape, conditioning))
        slot = state_bytes(model, spec, 0 if reference is None else reference.tokens_MD.nbytes)
    rows_per_image = 2 if model.guidance.is_active(_ANY_SCALE, "") else 1
    weights = weights_of(spec, config)
    return MemoryEstimate(
        weights=weights.here,
        row=max(rows),
        decoded_image=decoded,
        prompt=0 if weights.elsewhere else of_prompt.peak,
        slot=slot + rows_per_image * embeddings,
        rows_per_image=rows_per_image,
        decode_batch=min(config.decode_batch, max(1, MAX_PIXELS // (spec.default_width_px * spec.default_height_px))),
        elsewhere=weights.elsewhere,
        graph_rows=MAX_LATENTS // math.prod(shape[1:]) if config.cuda_graphs and isinstance(model, UnetModel) else 0,
        graph_row=sum(rows),
        caches=num_caches * config.embedding_cache_bytes,
        max_rows=max(config.buckets, default=None),
        streamed=weights.streamed,
        row_flops=flops,
    )


def state_bytes(model: DiffusionModel, spec: DiffusionModelSpec, reference_bytes: int | None = None) -> int:
    """Return what a slot keeps of an image of the default size, in bytes, without the embeddings of its prompts.

    That is its samples and outputs for the widest window, what its mask keeps, and its reference images, each
    with as many values as the latents by default.
    """
    shape = model.latent_shape(spec.default_width_px, spec.default_height_px)
    num_values, float_bytes = math.prod(shape), torch.float32.itemsize
    of_mask = num_values * (2 * float_bytes + torch.bool.itemsize)  # the latents of its image, noise, and the mask
    if model.inpainting is not None:
        of_mask = (input_channels(model, shape) - shape[0]) * math.prod(shape[1:]) * float_bytes
    if reference_bytes is None:
        reference_bytes = num_values * float_bytes * spec.max_references
    return empty_history(1, num_values, _WIDEST_WINDOW, "meta").nbytes + of_mask + reference_bytes


class MemoryChange(NamedTuple):
    """A change that an operator can make so that a model takes less of its device's memory, and what it takes then."""

    names: tuple[str, ...]
    estimate: MemoryEstimate


def find_changes(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> tuple[MemoryChange, ...]:
    """Return what would take less memory than `config`, each change alone, then all together.

    Not those that the loader refuses: with text encoders of bitsandbytes a CPU, with float8 another dtype.

    `config` has no "auto" left, and is of an engine on `device`.

    Raises ModelError: the libraries cannot build a part.
    """
    estimate, alone, together = estimate_memory(spec, config), [], config
    settings: list[tuple[str, dict[str, Any]]] = [("--vae-tiling", {"vae_tiling": True})]
    quantizations = {
        part: read_quantization(spec.path / part / "config.json") for part in FAMILIES[spec.family].weight_stems
    }
    if config.dtype == "float32" and not any(is_float8(each) for each in quantizations.values()):
        settings.insert(0, ("--dtype bfloat16", {"dtype": "bfloat16"}))
    for name, values in settings:
        changed = estimate_memory(spec, msgspec.structs.replace(config, **values))
        if changed.needed(1) < estimate.needed(1):
            alone.append(MemoryChange((name,), changed))
            together = msgspec.structs.replace(together, **values)
    all_bytes = estimate_memory(spec, together)
    need_a_gpu = {part for part, each in quantizations.items() if isinstance(each, BitsAndBytes)}
    has_movable_texts = not any(part.startswith("text_encoder") for part in need_a_gpu)
    if device != "cpu" and config.text_encoder_device == "same" and has_movable_texts:
        changed = _with_texts_on_cpu(spec, config, estimate)
        alone.append(MemoryChange(("--text-encoder-device cpu",), changed))
        all_bytes = _with_texts_on_cpu(spec, config, all_bytes)
    if quantized := find_quantizations(spec, config, estimate, device):
        names = [*(name for change in alone for name in change.names), *quantized[-1].names]
        alone += quantized
        all_bytes = find_quantizations(spec, together, all_bytes, device)[-1].estimate
    else:
        names = [name for change in alone for name in change.names]
    return tuple(alone) if len(names) < 2 else (*alone, MemoryChange(tuple(names), all_bytes))


def find_quantizations(
    spec: DiffusionModelSpec, config: EngineConfig, estimate: MemoryEstimate, device: str
) -> tuple[MemoryChange, ...]:
    """Return what the model takes with each quantization that a device and its folder allow, the smallest one last.

    Whether its library is installed does not matter. None if `config` has chosen one; `estimate` is of `config`.
    """
    part, item_bytes = denoiser_part(spec), DTYPES[config.dtype].itemsize
    if config.quantize != "none" or config.offload == "blocks" or not has_quantizable_layers(spec):
        return ()
    kinds = {"fp8": " --compile-blocks", "int8": "" if device == "cpu" else " --compile-blocks", "nf4": ""}
    return tuple(
        MemoryChange(
            (f"--quantize {kind}{others}",),
            replace(estimate, weights={**estimate.weights, part: quantized_bytes(spec, kind, item_bytes)}),
        )
        for kind, others in kinds.items()
        if kind != "fp8" or has_float8(device)
    )


def _with_texts_on_cpu(spec: DiffusionModelSpec, config: EngineConfig, estimate: MemoryEstimate) -> MemoryEstimate:
    elsewhere = text_weights_of(spec, config, FLOAT32_BYTES)
    weights = {part: num_bytes for part, num_bytes in estimate.weights.items() if part not in elsewhere}
    return replace(estimate, weights=weights, elsewhere=elsewhere, prompt=0)


def _reference(model: DiffusionModel, spec: DiffusionModelSpec) -> ReferenceTokens | None:
    """Return as many reference images of the default size as a request may have; None: the model takes none."""
    if not spec.max_references:
        return None
    assert isinstance(model, ReferencedModel)
    shape = spec.default_height_px, spec.default_width_px, 3
    return model.encode_references([torch.empty(shape, dtype=torch.uint8, device="meta")] * spec.max_references)


def _row_bytes(
    model: Denoiser, shape: tuple[int, ...], conditioning: Conditioning, reference: ReferenceTokens | None = None
) -> int:
    """Return the bytes of each row of a call."""
    calls = (functools.partial(_predict, model, num_rows, shape, conditioning, reference) for num_rows in (1, 2))
    one, two = map(_peak_bytes, calls)
    return max(two - one, one // 2)


def _predict(
    model: Denoiser,
    num_rows: int,
    shape: tuple[int, ...],
    conditioning: Conditioning,
    reference: ReferenceTokens | None,
) -> Any:
    latents, each = torch.empty(num_rows, *shape, device="meta"), torch.empty(num_rows, device="meta")
    guidance = each if model.guidance.embedded else None
    rows = collate([conditioning] * num_rows)
    if reference is not None:
        assert isinstance(model, ReferencedModel)
        return model.predict(latents, each, rows, guidance, [reference] * num_rows)
    if not isinstance(model, ControlledModel) or not model.controlnets.digests:
        return model.predict(latents, each, rows, guidance)
    name, (_, height, width), scale = next(iter(model.controlnets.digests)), shape, model.latent_scale
    images = torch.empty(num_rows, 3, height * scale, width * scale, device="meta")
    control = ControlRows(name, torch.empty(num_rows, dtype=torch.long, device="meta"), images, each, num_rows)
    return model.predict(latents, each, rows, guidance, controls=[control])


def input_channels(model: DiffusionModel, shape: tuple[int, ...]) -> int:
    """Return those of the latents and, of a model for inpainting, of the mask and of what is kept."""
    return shape[0] if model.inpainting is None else 2 * shape[0] + model.inpainting.mask_channels


def _peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that `call` makes and that exist at once."""
    with _counting() as counter:
        call()
    return counter.peak


@contextmanager
def _counting() -> Iterator["_StorageCounter"]:
    with _FusedAttention(), _StorageCounter() as counter:
        yield counter


_SCALAR_READS = tuple(getattr(torch.ops.aten, name).default for name in ("is_nonzero", "item", "_local_scalar_dense"))
"""Operations that read one number of a tensor, of which a tensor without memory has none."""


class _StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, and that are not freed yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it returns; a number that is read is True: a mask that hides nothing."""
        del types
        if func in _SCALAR_READS:
            return True
        before = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, num_bytes: int) -> None:
        self._now -= num_bytes


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's arguments or results, which only lists, tuples and dicts hold."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


class _FusedAttention(TorchFunctionMode):
    """Attention as a device's kernels compute it: without a matrix of scores, which the meta device makes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return an empty output for an attention, and else call the function."""
        del types
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, value = named["query"], named["value"]
        return query.new_empty(*query.shape[:-1], value.shape[-1])
