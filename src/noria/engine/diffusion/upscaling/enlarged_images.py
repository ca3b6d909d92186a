"""The running images whose pixels are being enlarged, from call to call.

Pixels are in the host's memory. Shapes: E elements of an image's latents [C, H, W], B tiles of one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from noria.engine.diffusion.latents import LatentSlots
from noria.engine.diffusion.noise_streams import NoiseStreams
from noria.engine.diffusion.preparation import PreparedImageRequest
from noria.engine.diffusion.upscaling.prepared_upscaling import TILE_PX, WINDOW_PX, PreparedUpscaling, Tile
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.sampling.step import init_slot, samples, write_samples
from noria.scheduling.types import ItemId, Step


@dataclass(eq=False)
class _Enlarging:
    """A running image between its calls."""

    source_HW3: torch.Tensor
    enlarged_HW3: torch.Tensor | None = None  # None: no tile of this pass is made
    num_tile_calls: int = 0  # that are made
    result_HW3: torch.Tensor | None = None  # None: the last pass has not begun
    num_rows: int = 0  # rows of the result that are made


class EnlargedImages:
    """The running images whose pixels are being enlarged."""

    def __init__(self, model: DiffusionModel, noise: NoiseStreams) -> None:
        self._model, self._noise = model, noise
        self._images: dict[ItemId, _Enlarging] = {}

    def end(self, item: ItemId) -> None:
        """Release the pixels of an image, if it has some."""
        self._images.pop(item, None)

    def make_calls(self, steps: Sequence[Step], prepared: Sequence[PreparedImageRequest], slots: LatentSlots) -> None:
        """Make calls that enlarge pixels, each image alone; its latents stay in its slot until the second pass begins.

        Can be repeated.
        """
        advanced = []
        for step, p in zip(steps, prepared, strict=True):
            assert p.upscaling is not None
            shape = p.shape_at(step.call)
            slot_1, call_1 = (torch.tensor([each], device=self._model.device) for each in (step.slot, step.call))
            latents_1E = samples(slots.of(shape), slot_1, call_1)
            self._make_call(step.image, p.upscaling, step.call, latents_1E.reshape(1, *shape))
            second = None
            if step.call + 1 == p.second_stage_from:
                second = self._noise.second_pass_of_pixels(step, p, self.result(step.image, p))
            advanced.append((step, shape, slot_1, call_1, latents_1E, second))
        for step, shape, slot_1, call_1, latents_1E, second in advanced:
            if second is None:
                write_samples(slots.of(shape), slot_1, call_1, latents_1E)
                continue
            first_CHW = second[0] + 0 * latents_1E.sum()  # not finite if these are not
            init_slot(slots.of(first_CHW.shape), step.slot, first_CHW, step.call + 1)
            self._noise[step.image] = second[1]
            self.end(step.image)

    def _make_call(
        self, item: ItemId, upscaling: PreparedUpscaling, call: int, latents_1CHW: torch.Tensor | None = None
    ) -> None:
        """Make a call of an image, unless it is made."""
        image = self._images.get(item)
        if image is None:
            pixels_HW3 = upscaling.pixels_HW3
            if pixels_HW3 is None:
                assert latents_1CHW is not None
                pixels_HW3 = self._model.decode(latents_1CHW)[0].cpu()
            self._images[item] = image = _Enlarging(pixels_HW3)
        tile_call = call - upscaling.first_call - (upscaling.pixels_HW3 is None)
        if image.num_tile_calls == tile_call < len(upscaling.tile_calls):
            _enlarge(image, upscaling, upscaling.tile_calls[tile_call])

    def result(self, item: ItemId, prepared: PreparedImageRequest) -> torch.Tensor:
        """Return the pixels of an image whose calls of tiles are made, in the size of the result."""
        upscaling = prepared.upscaling
        assert upscaling is not None
        image = self._images[item]
        return upscaling.resize(image.source_HW3) if image.result_HW3 is None else image.result_HW3


def _enlarge(image: _Enlarging, prepared: PreparedUpscaling, tiles: Sequence[Tile]) -> None:
    """Enlarge tiles of one pass; an image whose memory does not suffice stays as it is."""
    assert prepared.model is not None
    scale, (width, height) = prepared.model.scale, tiles[0].source_px
    source_HW3, enlarged_HW3 = image.source_HW3, image.enlarged_HW3
    if enlarged_HW3 is not None and enlarged_HW3.shape[:2] == (height, width):  # the next pass begins
        source_HW3, enlarged_HW3 = enlarged_HW3, None
    if enlarged_HW3 is None:
        enlarged_HW3 = torch.empty(height * scale, width * scale, 3, dtype=torch.uint8)
    windows = [tile.window for tile in tiles]
    made_BHW3 = prepared.model.enlarge(
        torch.stack([source_HW3[top : top + WINDOW_PX, left : left + WINDOW_PX] for left, top in windows])
    )
    for tile, (left, top), made_HW3 in zip(tiles, windows, made_BHW3, strict=True):
        right, bottom = min(tile.left + TILE_PX, width), min(tile.top + TILE_PX, height)
        cut_HW3 = made_HW3[(tile.top - top) * scale : (bottom - top) * scale]
        cut_HW3 = cut_HW3[:, (tile.left - left) * scale : (right - left) * scale]
        enlarged_HW3[tile.top * scale : bottom * scale, tile.left * scale : right * scale] = cut_HW3
    if (width * scale, height * scale) == prepared.enlarged_px:
        if image.result_HW3 is None:
            image.result_HW3 = torch.empty(*prepared.result_px[::-1], 3, dtype=torch.uint8)
        last = tiles[-1]
        num_rows = last.top + TILE_PX if last.left + TILE_PX >= width else last.top  # in full width
        done_HW3 = enlarged_HW3[: num_rows * scale]
        image.num_rows = prepared.resize_rows(done_HW3, image.result_HW3, image.num_rows)
    image.source_HW3, image.enlarged_HW3 = source_HW3, enlarged_HW3
    image.num_tile_calls += 1
