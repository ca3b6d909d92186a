"""What an image file says of how it was made: everything needed to make it again, and who made it.

As JSON this loses nothing, and its names are those of `POST /t2i`. `None` is "the file does not say": Noria fills in all of it, files
made by others have what they have. This module knows neither files (`image_files.py`) nor A1111's text (`infotext.py`).
"""

import msgspec
from msgspec import Struct

from noria import __version__
from noria.errors import ImageFileError, InvalidField, short_repr
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest


class GenerationMetadata(Struct, frozen=True, omit_defaults=True):
    """How one image was made."""

    prompt: str
    negative_prompt: str = ""
    seed: int | None = None  # of this very image: what draws it alone
    width: int | None = None  # px
    height: int | None = None  # px
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None  # a short name of schedulers.py; another program's word where that names none
    model: str | None = None
    model_version: str | None = None  # ModelSpec.fingerprint; of another program's file, its own hash of the model
    noria: str | None = None  # the version that drew it; None: another program did
    other: dict[str, str] = {}  # what else another program's file says: things that Noria has not

    def __post_init__(self) -> None:
        for field in ("prompt", "negative_prompt"):
            try:
                getattr(self, field).encode()
            except UnicodeEncodeError as error:
                raise InvalidField(
                    f"{field} has half of a surrogate pair at character {error.start}, which no text file can hold.",
                    field=field,
                ) from error


def metadata_for(request: ImageRequest, spec: ModelSpec, seed: int) -> GenerationMetadata:
    """How the image of `request` that `seed` draws is made."""
    return GenerationMetadata(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        seed=seed,
        width=request.width_px,
        height=request.height_px,
        inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        scheduler=request.scheduler,
        model=spec.name,
        model_version=spec.fingerprint,
        noria=__version__,
    )


def to_json(metadata: GenerationMetadata) -> bytes:
    """`parameters` in UTF-8; fields that say nothing are left out."""
    return msgspec.json.encode(metadata)


def from_json(text: str | bytes) -> GenerationMetadata:
    """What `to_json` wrote, here or in another version: keys that are not known are passed over.

    Raises:
        ImageFileError: not JSON, or not of this shape.

    """
    try:
        return msgspec.json.decode(text, type=GenerationMetadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ImageFileError(f"its parameters {short_repr(text)} are not what Noria writes: {error}.") from error
