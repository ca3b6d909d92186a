"""Calls a model whose blocks are compiled, and its refiner, in all ways for which code differs, before it serves.

Code is compiled for one row and for several, for a mask and for none, each for any number of rows and tokens. Numbers
that are equal in the first call of a kind are taken to be equal always, so each kind is called with several of them.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from noria.config import EngineConfig
from noria.engine.diffusion.preparation import refiner_of
from noria.engine.diffusion.sizing.memory_estimate import input_channels
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.diffusion.block_compilation import MAX_GRAPHS, with_hooks
from noria.models.diffusion.conditioning import Conditioning, collate
from noria.models.diffusion.diffusion_model import Denoiser, DiffusionModel, LatentRows
from noria.models.diffusion.unet_models.graphed_calls import without_graphs
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec

_log = logging.getLogger(__name__)
TEXTS = ("a", "a text of several words", "another text with some more words than that")

Size = tuple[int, int]


def has_loras(model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig) -> bool:
    """Return whether requests for the model can name LoRAs."""
    return bool(model.lora_parts) and LoraFolders.of(config).are_for(spec.name)


def warm_up_blocks(
    model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig, *, with_loras: bool = False
) -> None:
    """Compile the blocks for calls of up to four rows; from then on nothing more is, for any model of the process.

    The code is that for calls without LoRAs or that for calls with some. Later calls that fit no compiled code are
    computed without it. `config` has no "auto" left.
    """
    assert isinstance(config.slots, int)
    began, before = time.monotonic(), _num_graphs()
    torch.compiler.set_stance("default")
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS),
            torch.inference_mode() if config.inference_mode else torch.no_grad(),
        ):
            if with_loras:
                with with_hooks(model.network), without_graphs():
                    _warm_up(model, model, spec, config.slots)
            else:
                for denoiser in (model, refiner_of(model)):
                    if denoiser is not None:
                        _warm_up(denoiser, model, spec, config.slots)
    finally:
        torch.compiler.set_stance("eager_on_recompile")
    num, seconds = _num_graphs() - before, time.monotonic() - began
    _log.info(
        "%s: compiled its blocks%s to %d graphs in %.0f s",
        spec.name,
        " for LoRAs" if with_loras else "",
        num,
        seconds,
        extra=fields(
            event="blocks_compiled", model=spec.name, with_loras=with_loras, graphs=num, seconds=round(seconds, 1)
        ),
    )


def _warm_up(denoiser: Denoiser, model: DiffusionModel, spec: DiffusionModelSpec, num_slots: int) -> None:
    """Call a denoiser, for images of `model`."""
    texts = denoiser.text_encode(TEXTS)
    for num_rows in sorted({1, 2, min(3, 2 * num_slots), min(4, 2 * num_slots)}):
        for sizes in _sizes_of_rows(model, spec, num_rows):
            for num_texts in (1, len(texts)):
                make_call(denoiser, model, sizes, texts[:num_texts])()


def make_call(
    denoiser: Denoiser, model: DiffusionModel, sizes: Sequence[Size], texts: Sequence[Conditioning]
) -> Callable[[], object]:
    """Return a call of a denoiser for images of `model` of these sizes, which have these texts in turns."""
    rows = collate([texts[row % len(texts)] for row in range(len(sizes))])
    each = torch.full((len(sizes),), 500.0, device=model.device)
    latents, guidance = _latents(model, sizes), each if denoiser.guidance.embedded else None
    return lambda: denoiser.predict(latents, each, rows, guidance)


def _sizes_of_rows(model: DiffusionModel, spec: DiffusionModelSpec, num_rows: int) -> Iterator[Sequence[Size]]:
    """Yield the sizes of the rows of calls: all the same, or two of those that share calls."""
    width_px, height_px, least_px = spec.default_width_px, spec.default_height_px, spec.min_side_px
    sizes = [(least_px, least_px), (least_px, height_px), (width_px, height_px)]
    sizes.append((max(least_px, width_px - spec.multiple_px), height_px))
    for size in sizes:
        yield [size] * num_rows
    if num_rows == 1:
        return
    for first, second in itertools.pairwise(sizes):
        shared = model.call_size(first[0] * first[1])
        if shared is not None and shared == model.call_size(second[0] * second[1]):
            yield [first, *[second] * (num_rows - 1)]


def _latents(model: DiffusionModel, sizes: Sequence[Size]) -> LatentRows:
    shapes = [model.latent_shape(*size) for size in sizes]
    rows = [torch.zeros(input_channels(model, shape), *shape[1:], device=model.device) for shape in shapes]
    return torch.stack(rows) if len(set(sizes)) == 1 else rows


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
