"""Turns the file of an image that is to be embedded into the pixels that the model sees.

The file is untrusted; `image_file.py` reads it. Pixels are those of transformers' image processors that use Pillow.
"""

from PIL import Image

from noria.errors import UnreadableImage
from noria.images.image_file import MAX_SIDE_PX, ImageFile
from noria.protocol.text import ImageInput


def embedded_pixels(source: ImageFile, image_input: ImageInput) -> bytes:
    """Return [side, side, 3] uint8 RGB of an image over white. Raises UnreadableImage: it is damaged or too narrow."""
    side_px = image_input.side_px
    width_px, height_px = _resized_size(source.size_px, image_input.resized_px)
    if max(width_px, height_px) > MAX_SIDE_PX:
        raise UnreadableImage(
            f"{source.name} has {source.size_px[0]} × {source.size_px[1]} pixels, so that it would be resized to "
            f"{width_px} × {height_px}; at most {MAX_SIDE_PX} pixels a side are allowed.",
            field="input",
        )
    with source.decode() as image:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))  # noqa: PLW2901
        resized = image.convert("RGB").resize((width_px, height_px), Image.Resampling(image_input.resample))
    left_px, top_px = (width_px - side_px) // 2, (height_px - side_px) // 2
    return resized.crop((left_px, top_px, left_px + side_px, top_px + side_px)).tobytes()


def _resized_size(size_px: tuple[int, int], resized_px: tuple[int, int] | int) -> tuple[int, int]:
    """Return the width and height that an image of `size_px` gets."""
    if isinstance(resized_px, tuple):
        return resized_px[1], resized_px[0]
    shorter_px = min(size_px)
    width_px, height_px = (int(resized_px * each / shorter_px) for each in size_px)
    return width_px, height_px
