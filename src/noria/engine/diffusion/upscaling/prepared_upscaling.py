"""The enlarging of an image's pixels, in calls of its own among those of others: a few tiles each.

Between two passes the first of these calls decodes the latents, and the last one encodes the result. A request that
only enlarges its image has calls of tiles alone. Pixels are in the host's memory, [height, width, 3] uint8.
"""

import functools
import math
import pathlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from noria.config import EngineConfig
from noria.engine.resources.out_of_memory import first_line, is_out_of_memory
from noria.engine.resources.priority import on_one_core, run_apart
from noria.errors import InvalidField, ModelError, NoriaError, QueueFull
from noria.models.adapters.upscaler_folders import NEAREST, UpscalerFolders
from noria.models.diffusion.pixel_upscaler import PixelModel, load_pixel_model
from noria.models.files.weights import file_size_bytes
from noria.protocol.diffusion import PixelUpscaler
from noria.sampling.tables import NUM_COLUMNS, SamplerTable, sample_column
from noria.scheduling.types import BatchKey

TILE_PX = 256  # a tile of ESRGAN takes about as long as a step of 512 × 512 in Stable Diffusion
MARGIN_PX = 16  # around it, which is cut away
WINDOW_PX = TILE_PX + 2 * MARGIN_PX
_REACH = 3  # pixels on each side of one that Lanczos weighs, where nothing gets smaller
_MAX_PASSES = 3  # as in A1111: what is still too small then is resized
_MAX_PIXELS = 2**26  # that an upscaler makes: 8192 × 8192
_MAX_HELD_BYTES = 2**31  # pixels of all accepted images: ten of 8192 × 8192
_MAX_MODELS = 2  # kept beside those of accepted requests
_MAX_MODEL_BYTES = 2**31  # bytes of all of these on the device
_RETRY_AFTER_S = 5.0  # as of start images
# Stages of batch keys, besides those of denoisers; an upscaler's tiles have a number of its own from the last one on.
_DECODE_STAGE, _ENCODE_STAGE, _TILE_STAGE = 2, 3, 4


class Tile(NamedTuple):
    """A part of an image of one pass."""

    source_px: tuple[int, int]  # width and height of the image that is enlarged
    left: int
    top: int

    @property
    def window(self) -> tuple[int, int]:
        """Left and top of the tile with its margin, which is inside of the image and equally large for all tiles."""
        left, top = (
            max(0, min(start - MARGIN_PX, side - WINDOW_PX))
            for start, side in zip((self.left, self.top), self.source_px, strict=True)
        )
        return left, top


@dataclass(frozen=True, eq=False)
class PreparedUpscaling:
    """How the pixels of a request's images are enlarged."""

    model: PixelModel | None  # None: by the filter alone
    resampling: Image.Resampling  # by which they get the size of the result
    source_px: tuple[int, int]  # width and height
    result_px: tuple[int, int]
    first_call: int
    tiles_per_call: int
    pixels_HW3: torch.Tensor | None = None  # None: they are those of the first pass
    longest_iteration_s: float = 0.0  # seconds of tiles alone, each as long as the first one took

    @functools.cached_property
    def tile_calls(self) -> tuple[Sequence[Tile], ...]:
        """The tiles of each call; a call has only tiles of one pass."""
        found: list[Sequence[Tile]] = []
        for width, height in [] if self.model is None else self._sizes[:-1]:
            tiles = [
                Tile((width, height), left, top)
                for top in range(0, height, TILE_PX)
                for left in range(0, width, TILE_PX)
            ]
            found += [tiles[k : k + self.tiles_per_call] for k in range(0, len(tiles), self.tiles_per_call)]
        return tuple(found)

    @property
    def num_calls(self) -> int:
        """All of its calls: at least one."""
        return max(1, len(self.tile_calls) + 2 * (self.pixels_HW3 is None))

    def has(self, call: int) -> bool:
        """Whether a call of an image is one of these."""
        return self.first_call <= call < self.first_call + self.num_calls

    def tile_key(self, batch_key: BatchKey) -> BatchKey:
        """Return the batch key of calls of tiles, which is the same for images of all sizes."""
        stage = _TILE_STAGE + (0 if self.model is None else int(self.model.digest[:6], 16))
        return batch_key._replace(width_px=WINDOW_PX, height_px=WINDOW_PX, stage=stage, reference_px=0)

    def stages(self, first: BatchKey, second: BatchKey) -> tuple[tuple[BatchKey, int], ...]:
        """Return the batch keys and numbers of its calls between passes with these keys."""
        tiles = self.tile_key(first), len(self.tile_calls)
        decode, encode = first._replace(stage=_DECODE_STAGE), second._replace(stage=_ENCODE_STAGE)
        return ((decode, 1), *([tiles] if tiles[1] else []), (encode, 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels of an image, at most."""
        of_passes = self._sizes[-2:]
        return 3 * (self.result_px[0] * self.result_px[1] + sum(width * height for width, height in of_passes))

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        return sizes(self.source_px, self.result_px, 1 if self.model is None else self.model.scale)

    @property
    def enlarged_px(self) -> tuple[int, int]:
        """Width and height after the last pass."""
        return self._sizes[-1]

    def resize(self, pixels_HW3: torch.Tensor) -> torch.Tensor:
        """Return pixels in the size of the result; of other proportions, they are cut on both sides."""
        image = Image.fromarray(pixels_HW3.numpy())
        if image.size != self.result_px:
            image = ImageOps.fit(image, self.result_px, self.resampling)
        return torch.from_numpy(np.array(image))

    def resize_rows(self, done_HW3: torch.Tensor, result_HW3: torch.Tensor, num_made: int) -> int:
        """Make the rows of a result, as `resize` does, that depend on none below `done_HW3`; return how many are made.

        `num_made` rows are. So a call resizes a row of tiles at most: 256 × 8192 pixels, four times enlarged, in 0.2 s.
        """
        (width, height), (result_width, result_height) = self.enlarged_px, self.result_px
        times = min(width / result_width, height / result_height)
        left, top = (width - times * result_width) / 2, (height - times * result_height) / 2
        reach, num_done = math.ceil(_REACH * max(times, 1)) + 1, len(done_HW3)
        num_rows = result_height if num_done == height else min(int((num_done - reach - top) / times), result_height)
        if num_rows <= num_made:
            return num_made
        first, last = top + num_made * times, top + num_rows * times
        begin, end = max(0, int(first) - reach), min(num_done, math.ceil(last) + reach)
        box = max(0.0, left), max(0.0, first - begin), min(width, left + times * result_width), min(end, last) - begin
        part = Image.fromarray(done_HW3[begin:end].numpy())
        part = part.resize((result_width, num_rows - num_made), self.resampling, box)
        result_HW3[num_made:num_rows] = torch.from_numpy(np.array(part))
        return num_rows

    def table(self, scheduler: str) -> SamplerTable:
        """Return rows for its calls, which keep the sample."""
        num_calls = self.num_calls
        coefficients_NK = np.zeros((num_calls, NUM_COLUMNS), np.float32)
        for call in range(num_calls):
            coefficients_NK[call, sample_column(call)] = 1
        return SamplerTable(
            scheduler=scheduler,
            num_steps=num_calls,
            timesteps=np.zeros(num_calls, np.float32),
            input_scale=np.ones(num_calls, np.float32),
            coefficients=coefficients_NK,
            noise=np.zeros(num_calls, bool),
            noise_dtype="float32",
            init_noise_sigma=1.0,
            window=1,
            residual=0.0,
        )


def sizes(source_px: tuple[int, int], result_px: tuple[int, int], scale: int) -> list[tuple[int, int]]:
    """Return the sizes of an image before and after each pass of an upscaler, until the result fits into it."""
    found = [source_px]
    while scale > 1 and len(found) <= _MAX_PASSES and (found[-1][0] < result_px[0] or found[-1][1] < result_px[1]):
        found.append((found[-1][0] * scale, found[-1][1] * scale))
    return found


class UpscalingPreparer:
    """Loads upscalers and bounds the memory of what they enlarge. Any thread may use it."""

    def __init__(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._folders, self._device, self._dtype = UpscalerFolders.of(config), device, dtype
        self._alive: weakref.WeakValueDictionary[str, PixelModel] = weakref.WeakValueDictionary()  # by digest
        self._recent: OrderedDict[str, PixelModel] = OrderedDict()
        self._accepted: weakref.WeakKeyDictionary[PreparedUpscaling, int] = weakref.WeakKeyDictionary()  # bytes
        self._lock = threading.Lock()

    def has(self, upscaler: PixelUpscaler) -> bool:
        """Whether an upscaler is loaded, or needs no loading."""
        return upscaler.digest is None or upscaler.digest in self._alive

    def prepare(
        self,
        upscaler: PixelUpscaler,
        source_px: tuple[int, int],
        result_px: tuple[int, int],
        num_images: int,
        field: str,
        *,
        max_rows: int,
        first_call: int = 0,
        tiles_per_call: int = 1,
        pixels_HW3: torch.Tensor | None = None,
        is_limited: bool = True,
    ) -> PreparedUpscaling:
        """Return how `num_images` images get another size, with the upscaler loaded; `field` is for errors.

        An iteration has at most `max_rows` tiles.

        Raises:
            InvalidField: the upscaler cannot be loaded or fails, or would make too large an image.
            QueueFull: the upscaler does not fit beside those of other requests, or the device's memory, now; or images
                that wait fill the memory for them and it `is_limited`.

        """
        model = None if upscaler.digest is None else self._load(upscaler, field)
        width, height = sizes(source_px, result_px, 1 if model is None else model.scale)[-1]
        if model is not None and width * height > _MAX_PIXELS:
            raise InvalidField(
                f"{field}: {upscaler.name} would make {width} × {height} pixels of {source_px[0]} × {source_px[1]}; at "
                f"most {_MAX_PIXELS} are allowed. Use a smaller image, or an upscaler that enlarges less than "
                f"{model.scale} times.",
                field=field,
            )
        resampling = Image.Resampling.NEAREST if upscaler.name == NEAREST else Image.Resampling.LANCZOS
        longest_s = 0.0 if model is None else max_rows * model.tile_s
        prepared = PreparedUpscaling(
            model, resampling, source_px, result_px, first_call, tiles_per_call, pixels_HW3, longest_s
        )
        num_bytes = num_images * prepared.num_bytes
        with self._lock:
            held_bytes = sum(list(self._accepted.values()))
            if is_limited and held_bytes and held_bytes + num_bytes > _MAX_HELD_BYTES:
                raise QueueFull(
                    f"the images that are to be enlarged take {held_bytes} bytes of {_MAX_HELD_BYTES}",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._accepted[prepared] = num_bytes
        return prepared

    def _load(self, upscaler: PixelUpscaler, field: str) -> PixelModel:
        file, digest = self._folders.find(upscaler, field), upscaler.digest or ""
        model = self._alive.get(digest)
        if model is None:
            self._make_room(upscaler, file_size_bytes(file))
            try:
                # In a thread that ends, as samplers are compiled (ADR 5).
                model = run_apart(on_one_core(lambda: self._load_and_try(file, digest)))
            except NoriaError as error:
                raise InvalidField(f"{field}: {error.message}", field=field) from error
            except Exception as error:  # any: a file decides which layers run
                if is_out_of_memory(error):
                    raise QueueFull(
                        f"{upscaler.name} does not fit the memory that the device has now", retry_after_s=_RETRY_AFTER_S
                    ) from error
                raise InvalidField(
                    f"{field}: {upscaler.name} fails with a tile: {first_line(error)}. Use another upscaler.",
                    field=field,
                ) from error
        with self._lock:
            self._alive[digest] = self._recent[digest] = model
            self._recent.move_to_end(digest)
            while len(self._recent) > _MAX_MODELS:
                self._recent.popitem(last=False)
        return model

    def _make_room(self, upscaler: PixelUpscaler, num_bytes: int) -> None:
        """Release upscalers until one of a file of `num_bytes` fits. Raises QueueFull: requests hold the others."""
        with self._lock:
            while (
                held_bytes := sum(each.num_bytes for each in list(self._alive.values()))
            ) + num_bytes > _MAX_MODEL_BYTES:
                if not self._recent:
                    raise QueueFull(
                        f"the upscalers of accepted requests take {held_bytes} bytes of {_MAX_MODEL_BYTES}; "
                        f"{upscaler.name} takes {num_bytes} more",
                        retry_after_s=_RETRY_AFTER_S,
                    )
                self._recent.popitem(last=False)

    def _load_and_try(self, file: pathlib.Path, digest: str) -> PixelModel:
        """Return an upscaler that has enlarged a tile, and how long that took. Raises what it raises."""
        model = load_pixel_model(file, digest, self._device, self._dtype)
        began = time.perf_counter()
        with torch.no_grad():
            made_1HW3 = model.enlarge(torch.zeros(1, WINDOW_PX, WINDOW_PX, 3, dtype=torch.uint8))
        if made_1HW3.shape != (1, expected := WINDOW_PX * model.scale, expected, 3):
            raise ModelError(f"{file.name}: makes a tile of {list(made_1HW3.shape[1:])} instead of {expected} pixels.")
        return replace(model, tile_s=time.perf_counter() - began)
