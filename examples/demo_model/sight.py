"""See what one image of a drawn scene shows, from its pixels alone; nothing here is learned, and no caption is known.

First the background, the colour that most of the frame has. Then the cores: patches of one other colour, less their
edges. Around each core, how far every pixel goes from the background's colour to the core's (its *cover*) gives a soft
mask, and each shape's outline is fitted to that mask. Where one object covers another, the other's hidden part is left
out of its fit.

What fits badly has no name: an outline that is no shape, a colour far from all colours, a radius that is no size.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from outlines import best_outline
from scenes import COLOURS

UNKNOWN = "?"
COLOUR_NAMES = tuple(COLOURS)
PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
FURTHEST_COLOUR = 60.0  # RGB distance; the two nearest colours, orange and yellow, are 84 apart
FRAME_PX = 4  # width of the frame from which the background's colour is read
CORE_PX = 2  # what a patch loses on every side to leave its core: no blurred edge is so wide as to have one
SMALLEST_PX = 80  # area of the smallest patch that counts as an object: a quarter of the smallest object drawn
REACH_PX = 10  # how far an object may go beyond its core: a large star's tips are too thin to have one for 7 px
WORST_FIT = 0.75  # intersection over union of an object with its best outline; below it, eyes disagree with the name
LEAST_APART = 0.3  # share of the side between the centres of two objects that touch; any two drawn have 0.42
SIZE_LIMITS = {"small": (0.09, 0.145), "": (0.145, 0.20), "large": (0.20, 0.29)}
"""Radius as a share of the image's side, from and below: midway between neighbours, a quarter beyond at the ends."""


@dataclass(frozen=True)
class Seen:
    """An object found in an image: names, or UNKNOWN; centre and radius as shares of the image's side."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float
    fit: float
    """Intersection over union of the object's pixels with its best outline, 0 to 1."""


@dataclass(frozen=True)
class Sight:
    """Everything found in one image, the object with the largest core first."""

    background: str
    objects: tuple[Seen, ...]


def look(image: np.ndarray) -> Sight:
    """Find the background and the objects of one image, [side, side, 3] uint8."""
    pixels = image.astype(np.float32)
    background_rgb = find_background(pixels)
    cores = find_cores(pixels, background_rgb)
    objects: list[Seen] = []
    if cores:
        covers = find_covers(pixels, background_rgb, cores)
        for index, core in enumerate(cores):
            hidden = np.delete(covers, index, axis=0).max(axis=0, initial=0) > 0.1
            objects += describe(covers[index], hidden, name_colour(np.median(pixels[core], axis=0)))
    return Sight(name_colour(background_rgb), tuple(objects))


def name_colour(rgb: np.ndarray) -> str:
    distances = np.linalg.norm(PALETTE - rgb, axis=1)
    return COLOUR_NAMES[distances.argmin()] if distances.min() <= FURTHEST_COLOUR else UNKNOWN


def name_size(radius: float) -> str:
    return next((size for size, (low, high) in SIZE_LIMITS.items() if low <= radius < high), UNKNOWN)


def nearest_colours(pixels: np.ndarray) -> np.ndarray:
    """Index into PALETTE for each pixel of [..., 3]."""
    # |p - c|² without |p|², which is the same for every colour
    return (np.square(PALETTE).sum(axis=1) - 2 * pixels @ PALETTE.T).argmin(axis=-1)


def find_background(pixels: np.ndarray) -> np.ndarray:
    """RGB of the colour that most of the image's frame has."""
    frame = np.ones(pixels.shape[:2], dtype=bool)
    frame[FRAME_PX:-FRAME_PX, FRAME_PX:-FRAME_PX] = False
    nearest = nearest_colours(pixels[frame])
    return np.median(pixels[frame][nearest == np.bincount(nearest).argmax()], axis=0)


def find_cores(pixels: np.ndarray, background_rgb: np.ndarray) -> list[np.ndarray]:
    """Masks of the connected patches of one colour other than the background's, less their edges, largest first.

    Blended edges take the name of a third colour (red on white has an orange rim); as they are thin, they have no core.
    """
    nearest, reach = nearest_colours(pixels), 2 * CORE_PX + 1
    is_core = ndimage.minimum_filter(nearest, reach) == ndimage.maximum_filter(nearest, reach)
    is_core &= nearest != nearest_colours(background_rgb)
    opened = ndimage.maximum_filter(np.where(is_core, nearest, -1), reach) == nearest
    cores = []
    for colour in np.unique(nearest[is_core]):
        labels, num_patches = ndimage.label(nearest == colour)
        areas = np.bincount(labels[opened], minlength=num_patches + 1)
        cores += [is_core & (labels == label) for label in range(1, num_patches + 1) if areas[label] >= SMALLEST_PX]
    return sorted(cores, key=np.count_nonzero, reverse=True)


def find_covers(pixels: np.ndarray, background_rgb: np.ndarray, cores: list[np.ndarray]) -> np.ndarray:
    """[objects, side, side] in 0..1: how far each pixel is an object's and not the background's.

    Each pixel belongs to the object with the nearest core, and to none beyond REACH_PX.
    """
    distances = np.stack([ndimage.distance_transform_edt(~core) for core in cores])
    owners = np.where(distances.min(axis=0) <= REACH_PX, distances.argmin(axis=0), -1)
    covers = np.zeros(distances.shape, dtype=np.float32)
    for index, core in enumerate(cores):
        way = np.median(pixels[core], axis=0) - background_rgb
        cover = (pixels - background_rgb) @ way / (way @ way)
        covers[index] = np.where(owners == index, cover.clip(0, 1), 0)
    return covers


def describe(cover: np.ndarray, hidden: np.ndarray, colour: str) -> list[Seen]:
    """The object of one patch; or two that touch, where no single outline fits but one on each side of a cut does."""
    whole = fit_object(cover, hidden, colour)
    if whole.fit >= WORST_FIT:
        return [whole]
    for axis in (0, 1):
        sides = cut(cover, axis)
        parts = [fit_object(np.where(side, cover, 0), hidden | ~side, colour) for side in sides]
        if are_two(*parts):
            return parts
    return [whole]


def are_two(first: Seen, second: Seen) -> bool:
    apart = np.hypot(first.x - second.x, first.y - second.y) >= LEAST_APART
    return bool(apart) and UNKNOWN not in (first.shape, second.shape)


def cut(cover: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the two sides of a cut across `axis`, where the patch is narrowest in the middle third of its length."""
    profile = (cover > 0.5).sum(axis=1 - axis)
    inside = np.flatnonzero(profile)
    third = len(inside) // 3
    neck = inside[third + profile[inside[third : len(inside) - third]].argmin()]
    before = np.arange(len(profile)) < neck
    before = np.broadcast_to(before[:, None] if axis == 0 else before, cover.shape)
    return before, ~before


def fit_object(cover: np.ndarray, hidden: np.ndarray, colour: str) -> Seen:
    """Name the shape and size of the object with this `cover`, some of which other objects may hide."""
    shape, fit, outline = best_outline(cover, hidden)
    x, y, radius = (outline / cover.shape[0]).tolist()
    return Seen(colour, shape if fit >= WORST_FIT else UNKNOWN, name_size(radius), x, y, radius, fit)
