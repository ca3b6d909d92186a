"""Say which facts of a caption an image shows.

`sight.look` reads the image without knowing its caption; `compare` sets what was seen against what the caption says.
Only names are compared: never the exact centre and radius a scene was drawn with, which a caption does not contain.
What has no name is wrong.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from scenes import PLACES, RELATIONS, Object, Scene
from sight import Seen, Sight, look

FACTS = ("background", "number", "colour", "shape", "size", "layout")


@dataclass(frozen=True)
class ObjectVerdict:
    """The facts about one of the caption's objects that are right; none is where it was not found."""

    colour: bool
    shape: bool
    size: bool


@dataclass(frozen=True)
class Verdict:
    """The facts of one caption that are right; `layout` is the place of one object, or the relation of two."""

    background: bool
    number: bool
    layout: bool
    objects: tuple[ObjectVerdict, ...]
    """In the caption's order."""

    @property
    def colour(self) -> bool:
        return all(object_.colour for object_ in self.objects)

    @property
    def shape(self) -> bool:
        return all(object_.shape for object_ in self.objects)

    @property
    def size(self) -> bool:
        return all(object_.size for object_ in self.objects)

    @property
    def all_right(self) -> bool:
        return not self.wrong_facts

    @property
    def wrong_facts(self) -> tuple[str, ...]:
        return tuple(fact for fact in FACTS if not getattr(self, fact))


def judge(image: np.ndarray, scene: Scene) -> Verdict:
    """Judge one image, [side, side, 3] uint8, by the names in `scene`."""
    return compare(look(image), scene)


def compare(sight: Sight, scene: Scene) -> Verdict:
    """Judge the objects found, after matching each of the caption's objects to the most similar one."""
    missing = len(scene.objects) - len(sight.objects)
    candidates = [*sight.objects, *[None] * missing]
    verdicts = [compare_as(chosen, sight, scene) for chosen in itertools.permutations(candidates, len(scene.objects))]
    return max(verdicts, key=likeness)


def likeness(verdict: Verdict) -> tuple[int, bool]:
    """A sort key for matches: colours, shapes and sizes first; the layout decides only between equal objects."""
    return sum(object_.colour + object_.shape + object_.size for object_ in verdict.objects), verdict.layout


def compare_as(chosen: tuple[Seen | None, ...], sight: Sight, scene: Scene) -> Verdict:
    """Judge with `chosen` for the caption's objects, in the caption's order."""
    return Verdict(
        background=sight.background == scene.background,
        number=len(sight.objects) == len(scene.objects),
        layout=is_laid_out(chosen, scene),
        objects=tuple(compare_object(seen, said) for seen, said in zip(chosen, scene.objects, strict=True)),
    )


def compare_object(seen: Seen | None, said: Object) -> ObjectVerdict:
    if seen is None:
        return ObjectVerdict(False, False, False)
    return ObjectVerdict(seen.colour == said.colour, seen.shape == said.shape, seen.size == said.size)


def is_laid_out(chosen: tuple[Seen | None, ...], scene: Scene) -> bool:
    """Whether one object is nearest to its place, or the first of two within 45° of its direction from the second."""
    match chosen:
        case (Seen() as seen,):
            return scene.place == nearest_place(seen)
        case (Seen() as first, Seen() as second):
            return scene.relation == nearest_relation(first, second)
    return False


def nearest_place(seen: Seen) -> str:
    return min(PLACES, key=lambda place: np.hypot(seen.x - PLACES[place][0], seen.y - PLACES[place][1]))


def nearest_relation(first: Seen, second: Seen) -> str:
    across, down = first.x - second.x, first.y - second.y
    return max(RELATIONS, key=lambda name: across * RELATIONS[name][0] + down * RELATIONS[name][1])
