"""Whose turn it is, when images of several shape classes (models, sizes) are seated: only one class can step in a turn.

The rule: the class of the most urgent image steps, as long as no other class is owed more than half a second of the device; else the
class that is owed most. A class is owed what the urgent one has had in excess of it, the shares being in proportion to the images
seated. So urgency decides over instants, fairness over seconds, and no class starves another however urgent or slow it is: while the same
images are seated, a class has its share of the device but for half a second and one turn of each class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.scheduling.plans import ShapeClass

_MOST_OWED_S = 0.5


@dataclass(slots=True)
class Shares:
    """What each class has used of the device, in seconds for each image that it had seated (stride scheduling, Waldspurger 1995)."""

    _used_s: dict[ShapeClass, float] = field(default_factory=dict)

    def next(self, num_seated: Mapping[ShapeClass, int], urgent: ShapeClass) -> ShapeClass:
        """The class to step, of those in `num_seated`; `urgent` is the most urgent image's."""
        level = min((self._used_s[shape] for shape in num_seated if shape in self._used_s), default=0.0)
        # Who comes anew, or again, starts level: nothing is saved up while away.
        self._used_s = {shape: self._used_s.get(shape, level) for shape in num_seated}
        owed_s = {shape: (self._used_s[urgent] - self._used_s[shape]) * num for shape, num in num_seated.items()}
        creditor = max(owed_s, key=lambda shape: owed_s[shape])
        return creditor if owed_s[creditor] > _MOST_OWED_S else urgent

    def charge(self, shape: ShapeClass, seconds: float, num_seated: int) -> None:
        """`shape` steps for `seconds`."""
        self._used_s[shape] += seconds / num_seated
