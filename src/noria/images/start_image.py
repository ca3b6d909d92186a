"""Turns the files of start images, masks, images of controls, references and image prompts into an engine's bytes.

The files are untrusted; `image_file.py` reads them.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

from PIL import Image, ImageOps

from noria.errors import InvalidField
from noria.images.image_file import ImageFile
from noria.images.inpainting import (
    Box,
    MaskUse,
    ResizeMode,
    box_around,
    resized,
    scaled_box,
    softened,
    with_surroundings,
)
from noria.images.reference_size import FIELD as REFERENCES
from noria.images.reference_size import place_reference, prompt_size
from noria.protocol.diffusion import DiffusionModelSpec, MaskFill

_HALF = 128
_MAX_SHAPE = 8  # the longer side of what is resized by the shorter one
_NUM_DIGEST_CHARS = 12  # as a model's fingerprint

MaskRule = Literal["white", "transparent", "alpha or white"]
"""The repainted part of a mask: white; what is transparent; what is opaque or, in a mask that is opaque, white."""


@dataclass(frozen=True)
class ImageFiles:
    """The files of a start image and, if only a part of it is repainted, of its mask; and of other images."""

    image: bytes | None = None
    mask: bytes | None = None
    mask_rule: MaskRule = "white"
    inverts_mask: bool = False
    controls: tuple[bytes, ...] = ()
    references: tuple[bytes, ...] = ()
    ip_adapter: bytes | None = None
    resize: ResizeMode = "stretch"  # how the start image and its mask get the size of the request
    mask_use: MaskUse | None = None  # None: the mask is hard, and nothing is pasted

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        files = self.image, self.mask, *self.controls, *self.references, self.ip_adapter
        return sum(len(file) for file in files if file is not None)


class StartImageFacts(NamedTuple):
    """The facts about a start image without its pixels. Digests are of the files: 12 digits of SHA-256."""

    width_px: int
    height_px: int
    digest: str
    mask_digest: str | None  # None: there is no mask
    mask_fill: MaskFill | None = None  # None: the repainted part begins as the image
    resizes_latents: bool = False  # whether it is encoded in its own size


class ImageFacts(NamedTuple):
    """The facts about another image without its pixels. The digest is of the file: 12 digits of SHA-256."""

    width_px: int
    height_px: int
    digest: str


class RequestImageFacts(NamedTuple):
    """The facts about the images of a request."""

    start: StartImageFacts | None = None
    controls: tuple[ImageFacts, ...] = ()
    references: tuple[ImageFacts, ...] = ()
    ip_adapter: ImageFacts | None = None


class RequestImages:
    """The start image of a request, if it has one, the images of its controls, its references and its IP-Adapter."""

    def __init__(self, files: ImageFiles) -> None:
        """Read the sizes in the files. Raises UnreadableImage and InvalidField as `StartImage`."""
        self._start = None if files.image is None else StartImage(files)
        self._controls = [ImageFile(f"controls[{k}].image", file) for k, file in enumerate(files.controls)]
        self._references = [ImageFile(f"{REFERENCES}[{k}]", file) for k, file in enumerate(files.references)]
        self._ip_adapter = None if files.ip_adapter is None else ImageFile("ip_adapter.image", files.ip_adapter)
        self.facts: RequestImageFacts = RequestImageFacts(
            None if self._start is None else self._start.facts,
            tuple(map(_facts, self._controls, files.controls)),
            tuple(map(_facts, self._references, files.references)),
            None if self._ip_adapter is None else _facts(self._ip_adapter, files.ip_adapter or b""),
        )

    @property
    def pasted(self) -> "StartImage | None":
        """The start image if what is generated is pasted into it."""
        return self._start if self._start is not None and self._start.is_pasted else None

    def pixels(
        self,
        width_px: int,
        height_px: int,
        spec: DiffusionModelSpec,
        start_px: tuple[int, int] | None = None,
        ip_adapter_px: int = 0,
        second_px: tuple[int, int] | None = None,
    ) -> bytes:
        """Return what `StartImage.pixels` does, and then [height, width, 3] uint8 RGB of each other image.

        The start image is of the size `start_px`, if there is one.

        Images of controls are resized as start images are, and changed in no other way; if a part of the start image is
        repainted alone, they are that part, too. With a second pass each is there in its size `second_px`, too, cut as
        the latents are. References are as the model is shown them, by `reference_size.py`,
        each followed by what the text encoder reads, if it does. Of the image of an IP-Adapter it is the middle, with
        sides of `ip_adapter_px`. Raises as `StartImage.pixels`.
        """
        size_px = width_px, height_px
        frames = [] if self._start is None else [self._start.pixels(*(start_px or size_px))]
        for control in self._controls:
            box = None if self._start is None else self._start.part_of(control.size_px, size_px)
            with control.decode() as image:
                frames.append(_rgb(_part(image, box), size_px, "stretch" if box is None else "fill").tobytes())
                if second_px is not None:
                    kept = image.crop(_second_box(image.size, size_px, second_px))
                    frames.append(_rgb(kept, second_px).tobytes())
        for reference in self._references:
            placement = place_reference(reference.name, reference.size_px, spec)
            with reference.decode() as image:
                frames.append(_rgb(image, placement.resized_px).crop(placement.box_px).tobytes())
                if any(of_prompt_px := prompt_size(reference.size_px, spec)):
                    frames.append(_rgb(image, of_prompt_px).tobytes())
        if self._ip_adapter is not None:
            with self._ip_adapter.decode() as image:
                frames.append(_middle(image, ip_adapter_px).tobytes())
        return b"".join(frames)


class StartImage:
    """A start image, whose pixels are decoded when they are asked for. It keeps what these need of the files."""

    def __init__(self, files: ImageFiles) -> None:
        """Read the sizes in the files, after their orientation in EXIF.

        Raises:
            UnreadableImage: a file is no PNG, WebP or JPEG, is damaged, animated or too large.
            InvalidField: the mask has another size than the image.
        """
        self._mask_rule, self._inverts_mask = files.mask_rule, files.inverts_mask
        self._resize: ResizeMode = files.resize
        assert files.image is not None
        self._image = ImageFile("image", files.image)
        self._mask = None if files.mask is None else ImageFile("mask", files.mask)
        self._mask_use = None if files.mask is None else files.mask_use
        width_px, height_px = self._image.size_px
        mask_digest = None if files.mask is None else _digest(files.mask)
        self.facts: StartImageFacts = StartImageFacts(
            width_px,
            height_px,
            _digest(files.image),
            mask_digest,
            _latent_fill(self._mask_use),
            files.resize == "latent",
        )
        if self._mask is not None and self._mask.size_px != self._image.size_px:
            width_px, height_px = self._mask.size_px
            raise InvalidField(
                f"mask has {width_px} × {height_px} pixels; it must have those of the image, "
                f"{self.facts.width_px} × {self.facts.height_px}.",
                field="mask",
            )

    @property
    def is_pasted(self) -> bool:
        """Whether `paste` makes the result of what is generated."""
        return self._mask_use is not None

    def pixels(self, width_px: int, height_px: int) -> bytes:
        """Return [height, width, 3] uint8 RGB and, with a mask, [height, width] uint8: 255 repainted, 0 kept.

        As diffusers' VaeImageProcessor does by default, both are resized with Lanczos' filter and the mask is divided
        at half. What is transparent in the image becomes white.

        Raises:
            UnreadableImage: a file is damaged.
            InvalidField: the mask has no transparency, which its rule needs, or covers nothing of a part.
        """
        size_px = width_px, height_px
        if self._mask is None:
            with self._image.decode() as image:
                return _rgb(image, size_px, self._resize).tobytes()
        soft = self._soft_mask()
        box, mode = self._box(soft, size_px)
        mask = resized(_part(soft, box), size_px, mode)
        with self._image.decode() as image:
            pixels = _rgb(_part(image, box), size_px, mode)
        if self._mask_use is not None and self._mask_use.content != "original":
            pixels = with_surroundings(pixels, mask)
        return pixels.tobytes() + mask.point([255 * (value >= _HALF) for value in range(256)]).tobytes()

    def part_of(self, other_px: tuple[int, int], size_px: tuple[int, int]) -> Box | None:
        """Return the part of an image of `other_px` that gets `size_px` as this one's does; None: all of it."""
        if self._mask_use is None or self._mask_use.padding_px is None:
            return None
        box, _ = self._box(self._soft_mask(), size_px)
        return None if box is None else scaled_box(box, self._image.size_px, other_px)

    def paste(self, repainted: Image.Image) -> Image.Image:
        """Return the start image with what was generated of `pixels` where the mask is, softly if it is blurred.

        It has the size of the start image if only a part of it was generated. Raises as `pixels`.
        """
        assert self._mask_use is not None
        soft = self._soft_mask()
        box, mode = self._box(soft, repainted.size)
        with self._image.decode() as image:
            if box is None:
                mask = resized(soft, repainted.size, mode)
                return Image.composite(repainted, _rgb(image, repainted.size, mode), mask)
            kept = _rgb(image, image.size)
        around = kept.copy()
        around.paste(resized(repainted, (box[2] - box[0], box[3] - box[1]), "crop"), box)
        return Image.composite(around, kept, soft)

    def _soft_mask(self) -> Image.Image:
        """Return [height, width] of 0 (kept) to 255 (repainted), in the mask's size."""
        assert self._mask is not None
        with self._mask.decode() as mask:
            channel = _mask_channel(mask, self._mask_rule)
        if self._inverts_mask:
            channel = ImageOps.invert(channel)
        return channel if self._mask_use is None else softened(channel, self._mask_use.blur_px)

    def _box(self, soft: Image.Image, size_px: tuple[int, int]) -> tuple[Box | None, ResizeMode]:
        """Return the part of the image that gets `size_px`, None of all of it, and how it does."""
        if self._mask_use is None or self._mask_use.padding_px is None:
            return None, self._resize
        return box_around(soft, self._mask_use.padding_px, size_px), "fill"


def _second_box(image_px: tuple[int, int], first_px: tuple[int, int], second_px: tuple[int, int]) -> Box:
    """Return the part of an image, stretched to `first_px` in the first pass, that is left in the second one."""
    scale = max(second / first for first, second in zip(first_px, second_px, strict=True))
    width, height = (
        max(1, round(side * min(1, second / (first * scale))))
        for side, first, second in zip(image_px, first_px, second_px, strict=True)
    )
    left, top = (image_px[0] - width) // 2, (image_px[1] - height) // 2
    return left, top, left + width, top + height


def _part(image: Image.Image, box: Box | None) -> Image.Image:
    return image if box is None else image.crop(box)


def _latent_fill(use: MaskUse | None) -> MaskFill | None:
    return use.content if use is not None and use.content in ("noise", "nothing") else None


def _rgb(image: Image.Image, size_px: tuple[int, int], mode: ResizeMode = "stretch") -> Image.Image:
    """Return an image in RGB and resized, over white."""
    if not image.has_transparency_data:
        return resized(image.convert("RGB"), size_px, mode)
    layer = resized(image.convert("RGBA"), size_px, mode)
    return Image.alpha_composite(Image.new("RGBA", size_px, "white"), layer).convert("RGB")


def _middle(image: Image.Image, side_px: int) -> Image.Image:
    """Return the middle square of an image, as CLIPImageProcessor of transformers resizes it and cuts it out."""
    shorter = min(image.size)
    # The middle of a longer one alone, which is not enlarged to gigabytes.
    width, height = (min(side, _MAX_SHAPE * shorter) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    width, height = side_px * width // shorter, side_px * height // shorter
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side_px) // 2, (height - side_px) // 2
    return image.crop((left, top, left + side_px, top + side_px))


def _mask_channel(mask: Image.Image, rule: MaskRule) -> Image.Image:
    """Return [height, width] of 0 (kept) to 255 (repainted)."""
    alpha = mask.convert("RGBA").getchannel("A") if mask.has_transparency_data else None
    if rule == "transparent":
        if alpha is None:
            raise InvalidField(
                "mask has no transparency; what is transparent in it is repainted. Send a PNG or WebP with an alpha "
                "channel.",
                field="mask",
            )
        return alpha.point([255 - value for value in range(256)])
    if alpha is None:
        return mask.convert("L")
    if rule == "alpha or white" and alpha.getextrema() != (255, 255):
        return alpha
    black = Image.new("L", mask.size)
    black.paste(mask.convert("RGB").convert("L"), mask=alpha)
    return black


def _facts(source: ImageFile, file: bytes) -> ImageFacts:
    return ImageFacts(*source.size_px, _digest(file))


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()[:_NUM_DIGEST_CHARS]
