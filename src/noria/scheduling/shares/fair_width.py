"""The width rule: how many rows of a call each client has, so that nobody is slowed down much more than anybody else.

Rows that change nothing of the order still lengthen the call for all. So the clients' rows are in proportion to what
each would get alone, times its weight: to its `rate(m) = m / cost(m)` rows a second, with `m` its rows that are ready,
at most as many as pay off. The proportion is as large as it can be until a client has all of its rows in the call.
Further rows join only where they are nearly free, and no client gets slower than alone by more than the number of
clients. A pure function of the images that are ready.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class SharedImage(Protocol):
    """The part of an image that the rule reads."""

    @property
    def rows(self) -> int:
        """Rows of it in a model call."""

    @property
    def client(self) -> str:
        """Whose it is."""

    @property
    def weight(self) -> float:
        """The weight of its client's share."""

    @property
    def deadline_s(self) -> float | None:
        """Its deadline; None: no deadline."""


ImageT = TypeVar("ImageT", bound=SharedImage)


@dataclass(slots=True)
class ClientImages:
    """The ready images of one client: how many they are, their rows, and the weight of its share."""

    num_images: int
    rows: int
    weight: float


ReadyImages = dict[str, ClientImages]
"""The ready images of each client that has some."""


def count_clients(images: Iterable[SharedImage]) -> ReadyImages:
    """Return whose the images are."""
    ready: ReadyImages = {}
    for image in images:
        add_image(ready, image)
    return ready


def add_image(ready: ReadyImages, image: SharedImage) -> None:
    """Count one image more."""
    client = image.client
    of_client = ready.get(client)
    if of_client is None:
        ready[client] = ClientImages(1, image.rows, image.weight)
    else:
        of_client.num_images += 1
        of_client.rows += image.rows


def remove_image(ready: ReadyImages, image: SharedImage) -> None:
    """Count one image less."""
    of_client = ready[image.client]
    of_client.num_images -= 1
    of_client.rows -= image.rows
    if not of_client.num_images:
        del ready[image.client]


def split_by_shares(
    images: Sequence[ImageT], ready: ReadyImages, rows_limit: int, step_s: Callable[[int], float]
) -> tuple[list[ImageT], list[ImageT], float]:
    """Split `images`, given in the policy's order, into those within their clients' shares of a call, and the others.

    Both are in order; `ready` says whose they are. The first image is within, so that each gets its turn, and so are
    images with deadlines, which were accepted without regard to shares. A share is rounded to whole images. Once the
    images within have `rows_limit` rows, all others are beyond. The third value is the duration of the longest call in
    which no client is slower than alone by more than the weights of all over its own, in seconds.
    """
    left, level = _client_rows(ready, rows_limit, step_s)
    within, beyond, rows_left = list[ImageT](), list[ImageT](), rows_limit
    for image in images:
        client, rows = image.client, image.rows
        if rows_left > 0 and (2 * left[client] >= rows or not within or image.deadline_s is not None):
            left[client] -= rows
            within.append(image)
            rows_left -= rows
        else:
            beyond.append(image)
    return within, beyond, level * sum([images.weight for images in ready.values()])


def _client_rows(ready: ReadyImages, rows_limit: int, step_s: Callable[[int], float]) -> tuple[dict[str, float], float]:
    """Return the rows of each client in a call, and their proportion to what it would get alone, times its weight."""
    rates, level = dict[str, float](), math.inf
    for client, images in ready.items():
        useful = images.rows if images.rows < rows_limit else rows_limit
        seconds = step_s(useful)
        if seconds <= 0.0:  # nothing is measured
            return {each: float(images.rows) for each, images in ready.items()}, math.inf
        rate = rates[client] = images.weight * useful / seconds
        if images.rows < level * rate:
            level = images.rows / rate
    return {client: level * rate for client, rate in rates.items()}, level


def fair_counts(images: Sequence[ReadyImages]) -> list[float]:
    """Return the parts of the device of several keys: each client's share divided by the numbers of its images.

    The parts sum up to the number of all images; with one client each is the number of the key's images.
    """
    num_by_client, weights = dict[str, int](), dict[str, float]()
    for ready in images:
        for client, each in ready.items():
            num_by_client[client] = num_by_client.get(client, 0) + each.num_images
            weights[client] = each.weight
    unit = sum(num_by_client.values()) / sum(weights.values())
    per_image = {client: unit * weights[client] / num for client, num in num_by_client.items()}
    return [sum([per_image[client] * each.num_images for client, each in ready.items()]) for ready in images]
