"""The reference images of a request: pixels, and from the first iteration of its images on tokens on the device.

Each image is encoded alone, so that no bit of it depends on what is encoded in the same iteration.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from noria.models.diffusion.conditioning import ReferenceTokens
from noria.models.diffusion.diffusion_model import ReferencedModel
from noria.models.diffusion.prompts.multimodal_prompt import PromptImages


class ReferenceImages:
    """The reference images of a request."""

    def __init__(self, pixels: Sequence[NDArray[np.uint8]], of_prompt: Sequence[NDArray[np.uint8]] = ()) -> None:
        """`pixels` are each [height, width, 3], and likewise those that the text encoder reads `of_prompt`."""
        self._pixels: Sequence[NDArray[np.uint8]] = pixels
        self.of_prompt = PromptImages(of_prompt) if of_prompt else None
        self._tokens: ReferenceTokens | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the pixels, until they are encoded; not of those that the text encoder reads, which stay."""
        return sum(pixels_HW3.nbytes for pixels_HW3 in self._pixels)

    @property
    def tokens(self) -> ReferenceTokens:
        """The tokens that the model is shown, once the images are encoded."""
        assert self._tokens is not None
        return self._tokens

    def encode(self, model: ReferencedModel) -> None:
        """Encode them, if they are not yet."""
        if self._tokens is None:
            self._tokens = model.encode_references([torch.from_numpy(pixels_HW3) for pixels_HW3 in self._pixels])
            self._pixels = ()
