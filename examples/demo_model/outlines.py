"""Fit the outlines of the six shapes to a soft mask, to learn which shape it is, its centre and its radius.

An outline is (x, y, radius) in pixels of the image, x to the right and y downwards. `scenes.signed_distance` grows in
proportion with the radius, so one table for each shape, of radius 1, serves every outline.
"""

from dataclasses import dataclass

import numpy as np
import torch

from scenes import SHAPES, signed_distance

WINDOW_PX = 8  # how far around an object its outline is looked for
ROUGHLY = 0.15  # how far below the best overlap of a rough fit the finally best shape may stand
SMALLEST_RADIUS_PX = 2.0
MOVES = np.concatenate([np.eye(3), -np.eye(3)])
UNIT_PX = 128  # steps a radius in the tables
UNIT_REACH = 2  # radii from the centre to the tables' edge; the furthest point of any shape is 1.12 away


def unit_outline(shape: str) -> np.ndarray:
    """[y, x] signed distances to the outline of radius 1, in radii; the centre is in the middle."""
    axis = (torch.arange(2 * UNIT_REACH * UNIT_PX) + 0.5) / UNIT_PX - UNIT_REACH
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return signed_distance(shape, x, y, torch.tensor(1.0)).numpy()


def box_of(mask: np.ndarray) -> np.ndarray:
    """Left, top, right and bottom of a mask's true elements, in elements."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=np.float32)


OUTLINES = {shape: unit_outline(shape) for shape in SHAPES}
BOXES = {shape: box_of(outline < 0) / UNIT_PX - UNIT_REACH for shape, outline in OUTLINES.items()}
"""Left, top, right and bottom of each shape of radius 1, from its centre."""


@dataclass(frozen=True)
class Target:
    """The target to which outlines are fitted: a window of an image."""

    rows: np.ndarray
    """[rows] y of the pixels' centres."""
    columns: np.ndarray
    """[columns] x of the pixels' centres."""
    counted: np.ndarray
    """[rows, columns] 1 where the object's pixels are known, 0 where another object hides them."""
    cover: np.ndarray
    """[rows, columns] in 0..1: how far each pixel is the object's; 0 where not counted."""

    @classmethod
    def around(cls, cover: np.ndarray, hidden: np.ndarray) -> "Target":
        """The part of the image around the object, both [side, side]."""
        left, top, right, bottom = box_of(cover > 0.5).astype(int)
        rows = slice(max(0, top - WINDOW_PX), bottom + WINDOW_PX)
        columns = slice(max(0, left - WINDOW_PX), right + WINDOW_PX)
        counted = (~hidden[rows, columns]).astype(np.float32)
        centres = np.arange(cover.shape[0], dtype=np.float32) + 0.5
        return cls(centres[rows], centres[columns], counted, cover[rows, columns] * counted)

    def thinned(self) -> "Target":
        """Every second pixel of every second row."""
        return Target(self.rows[::2], self.columns[::2], self.counted[::2, ::2], self.cover[::2, ::2])

    def overlaps(self, shape: str, outlines: np.ndarray) -> np.ndarray:
        """[outlines] intersection over union with `shape` at each (x, y, radius), [outlines, 3] in pixels."""
        x, y, radius = outlines.astype(np.float32).T[:, :, None]
        scale, middle, last = UNIT_PX / radius, UNIT_REACH * UNIT_PX, 2 * UNIT_REACH * UNIT_PX - 1
        down = ((self.rows - y) * scale + middle).clip(0, last).astype(np.intp)
        across = ((self.columns - x) * scale + middle).clip(0, last).astype(np.intp)
        distance = OUTLINES[shape][down[:, :, None], across[:, None, :]] * radius[:, :, None]
        drawn = (0.5 - distance).clip(0, 1) * self.counted
        both = np.minimum(drawn, self.cover).sum(axis=(1, 2))
        return both / (drawn.sum(axis=(1, 2)) + self.cover.sum() - both)


def starts(cover: np.ndarray) -> dict[str, np.ndarray]:
    """For each shape, the (x, y, radius) in pixels that fills the box around the object."""
    box = box_of(cover > 0.5)
    centre, size = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
    outlines = {}
    for shape, unit in BOXES.items():
        radius = (size / (unit[2:] - unit[:2])).max()
        outlines[shape] = np.array([*(centre - radius * (unit[:2] + unit[2:]) / 2), radius])
    return outlines


def fit_outline(
    shape: str, target: Target, outline: np.ndarray, steps_px: tuple[float, ...]
) -> tuple[float, np.ndarray]:
    """The best overlap of `shape` with the target, and its (x, y, radius); searched uphill from `outline`.

    Goes to the best of six neighbours (x, y or radius one step more or less) while one is better, for each step in
    turn.
    """
    fit = target.overlaps(shape, outline[None])[0]
    for step in steps_px:
        while True:
            moved = outline + step * MOVES
            moved[:, 2] = moved[:, 2].clip(min=SMALLEST_RADIUS_PX)
            fits = target.overlaps(shape, moved)
            if fits.max() <= fit:
                break
            fit, outline = fits.max(), moved[fits.argmax()]
    return float(fit), outline


def best_outline(cover: np.ndarray, hidden: np.ndarray) -> tuple[str, float, np.ndarray]:
    """The shape that overlaps `cover` best where it is not `hidden`, both [side, side]: name, overlap, outline."""
    target = Target.around(cover, hidden)
    rough = {shape: fit_outline(shape, target.thinned(), start, (4.0, 2.0)) for shape, start in starts(cover).items()}
    least = max(fit for fit, _ in rough.values()) - ROUGHLY
    close = {shape: outline for shape, (fit, outline) in rough.items() if fit >= least}
    fits = {shape: fit_outline(shape, target, outline, (1.0, 0.5)) for shape, outline in close.items()}
    shape = max(fits, key=lambda name: fits[name][0])
    return shape, *fits[shape]
