"""The image of a request's IP-Adapter: pixels, and from the first iteration of its images on keys and values."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.models.adapters.ip_adapter_files import unknown_ip_adapter
from noria.models.diffusion.diffusion_model import DiffusionModel, ImagePromptedModel
from noria.models.diffusion.ip_adapter import ImageTokens
from noria.protocol.diffusion import IpAdapter


class ImagePrompt:
    """The image of a request's IP-Adapter."""

    def __init__(self, adapter: IpAdapter, pixels_SS3: NDArray[np.uint8]) -> None:
        self._adapter = adapter
        self._pixels_SS3: NDArray[np.uint8] | None = pixels_SS3
        self._tokens: ImageTokens | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the pixels, until they are encoded."""
        return 0 if self._pixels_SS3 is None else self._pixels_SS3.nbytes

    @property
    def tokens(self) -> ImageTokens | None:
        """The keys and values of the image, once it is encoded; None: of a scale of 0."""
        assert self._pixels_SS3 is None
        return self._tokens

    @staticmethod
    def encode(prompts: "Iterable[ImagePrompt]", model: ImagePromptedModel, batch_size: int | None) -> None:
        """Encode the images of each IP-Adapter together, those that are not yet.

        With `batch_size`, as many are encoded, the last ones without use, so that no bit depends on how many there are.
        """
        waiting: dict[str, list[ImagePrompt]] = {}
        for prompt in prompts:
            if prompt._pixels_SS3 is not None:
                waiting.setdefault(prompt._adapter.name, []).append(prompt)
        found: list[tuple[ImagePrompt, ImageTokens | None]] = []
        for name, of_adapter in waiting.items():
            adapter = model.ip_adapters.by_name[name]
            used = [each for each in of_adapter if each._adapter.scale]
            pixels = [each._pixels_SS3 for each in used if each._pixels_SS3 is not None]
            pixels += pixels[:1] * (0 if batch_size is None else batch_size - len(pixels))
            tokens_BTD = adapter.encode(torch.from_numpy(np.stack(pixels))) if pixels else ()
            found += [(each, None) for each in of_adapter if each not in used]
            for each, tokens_TD in zip(used, tokens_BTD, strict=False):
                found.append((each, adapter.tokens(tokens_TD, each._adapter.scale)))
        # These come last: what runs out of memory is repeated.
        for prompt, tokens in found:
            prompt._tokens, prompt._pixels_SS3 = tokens, None


def check_ip_adapter(got: IpAdapter | None, model: DiffusionModel, model_name: str) -> None:
    """Check that the IP-Adapter of a request is loaded.

    Raises:
        InvalidField: it is of another digest.
        IpAdapterNotFound: it is not loaded.
    """
    if got is None:
        return
    loaded = model.ip_adapters.by_name if isinstance(model, ImagePromptedModel) else {}
    if got.name not in loaded:
        raise unknown_ip_adapter(got.name, model_name, loaded)
    if got.digest != (digest := loaded[got.name].digest):
        raise InvalidField(
            f"ip_adapter: {got.name!r} has digest {got.digest!r} on disk, but {digest} is loaded. Restart the server "
            "to use the new file.",
            field="ip_adapter",
        )
