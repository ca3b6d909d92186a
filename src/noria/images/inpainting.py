"""Prepares images and masks as A1111's clients ask for it, and pastes what was repainted. Pure, over Pillow.

A mask is [height, width] of 0 (kept) to 255 (repainted), soft at its edge if it is blurred.
"""

import math
from typing import Literal, NamedTuple

from PIL import Image, ImageFilter, ImageOps

from noria.errors import InvalidField

ResizeMode = Literal["stretch", "crop", "fill", "latent"]
"""How an image gets other proportions: stretched, cut at two sides, or with the colours of its edges beside it.

As `latent` it keeps its size, and its latents are stretched.
"""

MaskContent = Literal["surroundings", "original", "noise", "nothing"]
"""The content of the repainted part before: the colours around it, the image, or latents of noise or of zeros."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels, as Pillow has them."""

_IS_KNOWN = 32  # the mean of 2 × 2 pixels, up to 255: at least one of them is kept


class MaskUse(NamedTuple):
    """How a mask is used whose result is pasted into the image."""

    blur_px: tuple[float, float] = (0.0, 0.0)  # standard deviations, across and down
    # Only the part around the mask is repainted, in the size of the request, with so many pixels around it; else None.
    padding_px: int | None = None
    content: MaskContent = "original"


def resized(image: Image.Image, size_px: tuple[int, int], mode: ResizeMode) -> Image.Image:
    """Return an image of another size, by Lanczos' filter."""
    if mode in ("stretch", "latent"):
        return image.resize(size_px, Image.Resampling.LANCZOS)
    if mode == "crop":
        return ImageOps.fit(image, size_px, Image.Resampling.LANCZOS)
    scale = min(size_px[0] / image.width, size_px[1] / image.height)
    width, height = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    inner = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (size_px[0] - width) // 2, (size_px[1] - height) // 2
    filled = Image.new(image.mode, size_px)
    # The first and the last column or row, of which one pair is outside.
    for edge, box in (
        ((0, 0, 1, height), (0, top, left, top + height)),
        ((width - 1, 0, width, height), (left + width, top, size_px[0], top + height)),
        ((0, 0, width, 1), (left, 0, left + width, top)),
        ((0, height - 1, width, height), (left, top + height, left + width, size_px[1])),
    ):
        if box[0] < box[2] and box[1] < box[3]:
            size = box[2] - box[0], box[3] - box[1]
            filled.paste(inner.crop(edge).resize(size, Image.Resampling.NEAREST), box)
    filled.paste(inner, (left, top))
    return filled


def softened(mask: Image.Image, blur_px: tuple[float, float]) -> Image.Image:
    """Return a mask whose edge is blurred."""
    return mask.filter(ImageFilter.GaussianBlur(blur_px)) if any(blur_px) else mask


def box_around(mask: Image.Image, padding_px: int, size_px: tuple[int, int]) -> Box:
    """Return the box around what is repainted, and so many pixels more, in the proportions of `size_px` if it can be.

    Raises:
        InvalidField: nothing is repainted.

    """
    box = mask.getbbox()
    if box is None:
        raise InvalidField(
            "mask covers nothing, so there is no part to repaint in full resolution. Send a mask with a white part "
            "that is not small beside mask_blur, or inpaint_full_res false.",
            field="mask",
        )
    left, top = max(0, box[0] - padding_px), max(0, box[1] - padding_px)
    right, bottom = min(mask.width, box[2] + padding_px), min(mask.height, box[3] + padding_px)
    width, height = right - left, bottom - top
    left, right = _widened(left, right, math.ceil(height * size_px[0] / size_px[1]), mask.width)
    top, bottom = _widened(top, bottom, math.ceil(width * size_px[1] / size_px[0]), mask.height)
    return left, top, right, bottom


def scaled_box(box: Box, size_px: tuple[int, int], other_px: tuple[int, int]) -> Box:
    """Return the part of an image of `other_px` that `box` is of one of `size_px`, in whole pixels."""
    left, top = (box[k] * other_px[k] // size_px[k] for k in range(2))
    right, bottom = (-(-box[2 + k] * other_px[k] // size_px[k]) for k in range(2))
    return left, top, right, bottom


def _widened(start: int, end: int, length: int, most: int) -> tuple[int, int]:
    """Return a span that is at least as long, around the same middle where it fits between 0 and `most`."""
    length = min(max(length, end - start), most)
    start = min(max(0, (start + end - length) // 2), most - length)
    return start, start + length


def with_surroundings(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return an image in RGB whose masked part has the colours around it.

    They are found by push and pull (Gortler et al. 1996, The Lumigraph, 3.4): the image is halved until a pixel is
    left, each time to the mean of what is kept, and each size takes what it lacks from the next smaller one.
    """
    level = image.convert("RGBA")
    level.putalpha(ImageOps.invert(mask))
    levels = [level]
    while max(level.size) > 1:
        level = level.resize((-(-level.width // 2), -(-level.height // 2)), Image.Resampling.BOX)
        level.putalpha(level.getchannel("A").point(lambda value: 255 if value >= _IS_KNOWN else 0))
        levels.append(level)
    colours = levels.pop().convert("RGB")
    for level in reversed(levels):
        larger = colours.resize(level.size, Image.Resampling.BILINEAR)
        colours = Image.composite(level.convert("RGB"), larger, level.getchannel("A"))
    return colours
