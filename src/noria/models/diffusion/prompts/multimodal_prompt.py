"""A prompt that the text encoder reads together with images."""

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class PromptImages:
    """Images of a request, each [height, width, 3] uint8, with the digest of their pixels and sizes."""

    def __init__(self, pixels: Sequence[NDArray[np.uint8]]) -> None:
        self.pixels = pixels
        digest = hashlib.sha256()
        for each in pixels:
            digest.update(repr(each.shape).encode())
            digest.update(each.tobytes())
        self.digest = digest.digest()


@dataclass(frozen=True)
class MultimodalPrompt:
    """A key of a cache of embeddings: equal prompts have equal images. It does not keep the images in memory."""

    text: str | None
    digest: bytes
    _images: "weakref.ref[PromptImages]" = field(compare=False)

    @classmethod
    def of(cls, text: str | None, images: PromptImages) -> "MultimodalPrompt":
        """Return the prompt `text` with the images of a request."""
        return cls(text, images.digest, weakref.ref(images))

    @property
    def pixels(self) -> Sequence[NDArray[np.uint8]]:
        """The images, while their request is there."""
        images = self._images()
        assert images is not None, "a prompt is encoded for a request that has left"
        return images.pixels
