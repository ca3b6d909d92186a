"""The blocks of a part's weights, by the names of its tensors, and which of them stream to the device. No torch.

A block is a module that is called as a whole: a layer of a text encoder, a transformer block of a denoiser, the encoder
or the decoder of a VAE. All other weights stay on the device.
"""

import re
from collections.abc import Iterable, Sequence

from noria.config import EngineConfig

_REPEATED = re.compile(r"(?:.+\.)?(?:single_)?transformer_blocks\.\d+(?=\.)")
_NUMBERED = re.compile(r".*?\.\d+(?=\.)")
_OF_VAE = re.compile(r"(?:encoder|decoder)(?=\.)")
NUM_BUFFERS = 2
"""The block that is computed has one of them, the next block the other."""


def is_streamed(config: EngineConfig, part: str) -> bool:
    """Whether blocks of this part stream with `engine.offload`; text encoders only to the model's own device."""
    if part.startswith("text_encoder"):
        return config.offload != "none" and config.text_encoder_device == "same"
    return config.offload == "blocks" or (config.offload == "encoders" and part == "vae")


def blocks_of(part: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the tensors of each block, by the block's name, in their order.

    Blocks of a denoiser are its `transformer_blocks`, or else what its outermost lists have; so are those of others.
    """
    names = list(names)
    pattern = _OF_VAE if part == "vae" else _NUMBERED
    if not part.startswith(("text_encoder", "vae")) and any(_REPEATED.match(name) for name in names):
        pattern = _REPEATED
    found: dict[str, list[str]] = {}
    for name in names:
        if match := pattern.match(name):
            found.setdefault(match[0], []).append(name)
    return found


def choose_streamed(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Return which blocks of these bytes stream, so that the others take at most `resident_bytes`.

    They are evenly spread, so that each is copied while others are computed.
    """
    num = len(sizes)
    for num_streamed in range(num):
        chosen = [(k + 1) * num_streamed // num > k * num_streamed // num for k in range(num)]
        if sum(size for size, streams in zip(sizes, chosen, strict=True) if not streams) <= resident_bytes:
            return chosen
    return [True] * num


def buffer_sizes(sizes: Sequence[int], *, alternate: bool) -> list[int]:
    """Return the bytes of each buffer that streamed blocks of these bytes need, which take turns unless not."""
    if not alternate:
        return [max(sizes, default=0)] + [0] * (NUM_BUFFERS - 1)
    return [max(sizes[k::NUM_BUFFERS], default=0) for k in range(NUM_BUFFERS)]
