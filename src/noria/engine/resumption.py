"""The state that a request from another engine brings; a frame beside its message has the bytes of its images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noria.protocol.messages import ImageState, Resume
from noria.scheduling.types import ImageProgress

StateWithBytes = tuple[ImageState, memoryview]


class InvalidStateError(ValueError):
    """The state of an image cannot be used here."""


@dataclass(frozen=True)
class Resumption:
    """The images of a request that are not done, and the states of those that have begun."""

    images: Mapping[int, ImageProgress]
    states: tuple[StateWithBytes, ...]
    model_version: str  # version of the model that computed them
    waited_s: float

    def check_version(self, version: str) -> None:
        """Raise InvalidStateError if its images are of another version."""
        if version != self.model_version:
            raise InvalidStateError(f"its images are of version {self.model_version!r}, and not {version!r}")


def read_resumption(message: Resume, frame: memoryview | None) -> tuple[Resumption, memoryview | None]:
    """Return what `message` brings, and what the frame has for the request itself.

    Raises InvalidStateError: the message contradicts itself, or the frame is too short.
    """
    num_images, data, states = message.request.payload.num_results, frame or memoryview(b""), []
    images = dict.fromkeys(range(num_images), ImageProgress())
    for index in message.done:
        if images.pop(index, None) is None:
            raise InvalidStateError(f"image {index} of {num_images} cannot be done")
    if not images:
        raise InvalidStateError(f"all {num_images} images are done")
    if not 0 <= message.waited_s < math.inf:
        raise InvalidStateError(f"it cannot have waited {message.waited_s} s")
    begun = set[int]()
    for state in message.images:
        if state.index not in images or state.index in begun:
            raise InvalidStateError(f"image {state.index} of {num_images} cannot have begun")
        if not 0 <= state.num_bytes <= len(data):
            raise InvalidStateError(f"image {state.index} has {state.num_bytes} bytes, and {len(data)} are left")
        begun.add(state.index)
        images[state.index] = ImageProgress(state.call, state.batch_size_sum)
        states.append((state, data[: state.num_bytes]))
        data = data[state.num_bytes :]
    return Resumption(images, tuple(states), message.model_version, message.waited_s), data if len(data) else None
