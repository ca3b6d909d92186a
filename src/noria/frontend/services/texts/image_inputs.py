"""Reads the images that are to be embedded, in threads, at most two at once for all clients of a front end."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from noria.errors import BodyTooLarge, DeadlineExceeded, InvalidField
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.services.images.start_images import decode_file
from noria.images.embedded_image import embedded_pixels
from noria.models.encoder.tokens import TokenizedText
from noria.protocol.text import EncoderModelSpec, ImageInput

_MAX_PIXEL_BYTES = 2**26  # bytes of a request's images as the model sees them: 445 of 224 × 224 pixels


class ImageInputs:
    """Reads the images of a front end's requests that embed."""

    def __init__(self, max_bytes: int, threads: FairThreads) -> None:
        """`max_bytes` is the most that the images of a request have together, as files."""
        self._max_bytes, self._threads = max_bytes, threads

    async def pixels(
        self, client: str, images: Mapping[int, str], spec: EncoderModelSpec, timeout_s: float
    ) -> bytes | None:
        """Return the pixels of `images`, in base64 or as data: URLs by their place in the input, one after the other.

        None: there are none.

        Raises:
            InvalidField: the model takes texts alone, or there are too many images.
            BodyTooLarge: the files are too large.
            DeadlineExceeded: it took longer than `timeout_s`.
            UnreadableImage: a file is no PNG, WebP or JPEG, is damaged, animated or too large.

        """
        if not images:
            return None
        image_input = image_input_of(spec, min(images))
        allowed = _MAX_PIXEL_BYTES // image_input.num_bytes
        if len(images) > allowed:
            raise InvalidField(
                f"the request has {len(images)} images; of {spec.name} a request may have {allowed}. Send several "
                "requests.",
                field="input",
            )
        frames, num_left = list[bytes](), self._max_bytes
        try:
            async with asyncio.timeout(timeout_s):
                for place, image in images.items():
                    num_bytes, pixels = await self._threads.run(client, _read, place, image, image_input, num_left)
                    num_left -= num_bytes
                    frames.append(pixels)
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


def with_images(
    texts: Sequence[TokenizedText], places: Collection[int], spec: EncoderModelSpec
) -> Sequence[TokenizedText]:
    """Return the texts with what stands for an image at each of `places`. Raises as `image_input_of`."""
    if not places:
        return texts
    image, others = TokenizedText(image_input_of(spec, min(places)).num_tokens, b""), iter(texts)
    return [image if place in places else next(others) for place in range(len(texts) + len(places))]


def _read(place: int, image: str, image_input: ImageInput, max_bytes: int) -> tuple[int, bytes]:
    """Return the size of a file, of which `max_bytes` are allowed, and its pixels."""
    name = f"input[{place}].image"
    file = decode_file(name, image)
    if len(file) > max_bytes:
        raise BodyTooLarge(
            "the images of the request have more bytes together than are allowed (frontend.max_image_bytes).",
            field="input",
        )
    return len(file), embedded_pixels(name, file, image_input)
