"""Reads the images that are to be embedded, in threads, at most two at once for all clients of a front end.

A file of some hundred bytes can have millions of pixels: those of a request are bounded before they are decoded, and
the images of all requests until they are embedded.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

from noria.errors import BodyTooLarge, DeadlineExceeded, InvalidField
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.services.images.start_images import decode_file
from noria.images.embedded_image import embedded_pixels
from noria.images.image_file import ImageFile
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.protocol.text import MAX_PIXEL_BYTES, EncoderModelSpec, ImageInput

_MAX_SOURCE_PIXELS = 2**28  # pixels of a request's files: 3.4 s to decode as PNG
# Bytes, as the model sees them, of a front end's images that are read or embedded: 1783 of 224 × 224 pixels.
_MAX_HELD_BYTES, _MAX_BYTES_PER_CLIENT, _RETRY_AFTER_S = 4 * MAX_PIXEL_BYTES, 2 * MAX_PIXEL_BYTES, 1.0


class ImageInputs:
    """Reads the images of a front end's requests that embed."""

    def __init__(self, max_bytes: int, threads: FairThreads) -> None:
        """`max_bytes` is the most that the images of a request have together, as files."""
        self._max_bytes, self._threads = max_bytes, threads
        self._limiter = ConcurrencyLimiter(
            "bytes of images to embed", _MAX_HELD_BYTES, _MAX_BYTES_PER_CLIENT, retry_after_s=_RETRY_AFTER_S
        )

    def counted(
        self, client: str, images: Collection[int], spec: EncoderModelSpec
    ) -> contextlib.AbstractContextManager[None]:
        """Count the bytes of a request's images, as `spec` sees them, until they are embedded.

        Raises:
            InvalidField: the model takes texts alone, or there are too many images.
            RateLimited: a client, or all, have many.

        """
        if not images:
            return contextlib.nullcontext()
        num_bytes = image_input_of(spec, min(images)).num_bytes
        allowed = MAX_PIXEL_BYTES // num_bytes
        if len(images) > allowed:
            raise InvalidField(
                f"the request has {len(images)} images; of {spec.name} a request may have {allowed}. Send several "
                "requests.",
                field="input",
            )
        return self._limiter.hold(client, len(images) * num_bytes)

    async def pixels(
        self, client: str, images: Mapping[int, str], spec: EncoderModelSpec, timeout_s: float
    ) -> bytes | None:
        """Return the pixels of `images`, in base64 or as data: URLs by their place in the input, one after the other.

        None: there are none.

        Raises:
            InvalidField: the model takes texts alone.
            BodyTooLarge: the files have too many bytes or pixels.
            DeadlineExceeded: it took longer than `timeout_s`.
            UnreadableImage: a file is no PNG, WebP or JPEG, is damaged, animated or too large.

        """
        if not images:
            return None
        image_input = image_input_of(spec, min(images))
        frames, num_left, pixels_left = list[bytes](), self._max_bytes, _MAX_SOURCE_PIXELS
        try:
            async with asyncio.timeout(timeout_s):
                for place, image in images.items():
                    num_bytes, num_pixels, frame = await self._threads.run(
                        client, _read, place, image, image_input, num_left, pixels_left
                    )
                    num_left, pixels_left = num_left - num_bytes, pixels_left - num_pixels
                    frames.append(frame)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the images were not read within {timeout_s:.3g} s.") from error
        return b"".join(frames)


def image_input_of(spec: EncoderModelSpec, place: int) -> ImageInput:
    """Return how a model takes images. Raises InvalidField, naming the image at `place`: it takes texts alone."""
    if spec.image_input is None:
        raise InvalidField(
            f"input[{place}] is an image, and {spec.name} takes texts alone. Models that take images are CLIP and "
            "SigLIP, whose folders have a preprocessor_config.json.",
            field="input",
        )
    return spec.image_input


def are_read_alike(spec: EncoderModelSpec, other: EncoderModelSpec) -> bool:
    """Whether the pixels of an image are the same for two models."""

    def reading(image_input: ImageInput | None) -> object:
        return image_input and (image_input.side_px, image_input.resized_px, image_input.resample, image_input.patches)

    return reading(spec.image_input) == reading(other.image_input)


def with_images(
    texts: Sequence[TokenizedText], places: Collection[int], spec: EncoderModelSpec
) -> Sequence[TokenizedText]:
    """Return the texts with what stands for an image at each of `places`. Raises as `image_input_of`."""
    if not places:
        return texts
    image, others = TokenizedText(image_input_of(spec, min(places)).num_tokens, b""), iter(texts)
    return [image if place in places else next(others) for place in range(len(texts) + len(places))]


def _read(place: int, image: str, image_input: ImageInput, max_bytes: int, max_pixels: int) -> tuple[int, int, bytes]:
    """Return the bytes and pixels of a file, of which so many are allowed, and the image as the model sees it."""
    name = f"input[{place}].image"
    file = decode_file(name, image)
    if len(file) > max_bytes:
        raise BodyTooLarge(
            "the images of the request have more bytes together than are allowed (frontend.max_image_bytes).",
            field="input",
        )
    source = ImageFile(name, file)
    num_pixels = source.size_px[0] * source.size_px[1]
    if num_pixels > max_pixels:
        raise BodyTooLarge(
            f"the images of the request have more than {_MAX_SOURCE_PIXELS // 10**6} megapixels together; send them in "
            "several requests.",
            field="input",
        )
    return len(file), num_pixels, embedded_pixels(source, image_input)
