"""Turns the file of an image that is to be embedded into the pixels that the model sees.

The file is untrusted; `image_file.py` reads it. Pixels are those of transformers' image processors that use Pillow.
"""

import math
import struct

from PIL import Image

from noria.errors import UnreadableImage
from noria.images.image_file import MAX_SIDE_PX, ImageFile
from noria.protocol.text import ImageInput, Patches

_SCALE_STEP = 1e-5


def embedded_pixels(source: ImageFile, image_input: ImageInput) -> bytes:
    """Return an image over white, as `ImageInput.num_bytes`. Raises UnreadableImage: it is damaged or too narrow."""
    side_px, patches = image_input.side_px, image_input.patches
    width_px, height_px = (
        _resized_size(source.size_px, image_input.resized_px) if patches is None else _size_of(patches, source.size_px)
    )
    if max(width_px, height_px) > MAX_SIDE_PX:
        raise UnreadableImage(
            f"{source.name} has {source.size_px[0]} × {source.size_px[1]} pixels, so that it would be resized to "
            f"{width_px} × {height_px}; at most {MAX_SIDE_PX} pixels a side are allowed.",
            field="input",
        )
    with source.decode() as image:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))  # noqa: PLW2901
        resized = image.convert("RGB").resize((width_px, height_px), Image.Resampling(image_input.resample))
    if patches is not None:
        return _cut(resized, patches)
    left_px, top_px = (width_px - side_px) // 2, (height_px - side_px) // 2
    return resized.crop((left_px, top_px, left_px + side_px, top_px + side_px)).tobytes()


def _cut(image: Image.Image, patches: Patches) -> bytes:
    """Return the patches of an image, row by row, black ones behind them, and its rows and columns."""
    side_px, num_bytes = patches.side_px, patches.side_px**2 * 3
    lefts, tops = (range(0, px, side_px) for px in image.size)
    columns = [image.crop((left, 0, left + side_px, image.height)).tobytes() for left in lefts]  # each of whole patches
    cut = [column[row * num_bytes : (row + 1) * num_bytes] for row in range(len(tops)) for column in columns]
    shape = struct.pack("<2H", len(tops), len(lefts))
    return b"".join(cut).ljust(patches.num_bytes - len(shape), b"\0") + shape


def _size_of(patches: Patches, size_px: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height, in whole patches, by the largest scale that makes no more than there may be.

    The scale is halved towards as far as transformers does it, since the next patch may begin anywhere.
    """
    side_px, (too_small, too_large) = patches.side_px, (_SCALE_STEP / 10, 100.0)

    def patches_at(scale: float) -> tuple[int, int]:
        width, height = (max(1, math.ceil(each * scale / side_px)) for each in size_px)
        return width, height

    while too_large - too_small >= _SCALE_STEP:
        scale = (too_small + too_large) / 2
        if math.prod(patches_at(scale)) <= patches.max_number:
            too_small = scale
        else:
            too_large = scale
    width, height = patches_at(too_small)
    return width * side_px, height * side_px


def _resized_size(size_px: tuple[int, int], resized_px: tuple[int, int] | int) -> tuple[int, int]:
    """Return the width and height that an image of `size_px` gets."""
    if isinstance(resized_px, tuple):
        return resized_px[1], resized_px[0]
    shorter_px = min(size_px)
    width_px, height_px = (int(resized_px * each / shorter_px) for each in size_px)
    return width_px, height_px
