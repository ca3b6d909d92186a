"""Generation metadata of an image file: all settings needed to generate the image again, and the program that did.

The JSON form is lossless and has the field names of `POST /t2i`. `None` means that the file does not contain the value;
Noria sets all of them, other programs some. This module knows neither files (`metadata_io.py`) nor A1111's text
(`a1111_metadata.py`).
"""

import msgspec

from noria import __version__
from noria.errors import ImageFileError, InvalidField, short_repr
from noria.protocol.diffusion import (
    Control,
    ImageSettings,
    IpAdapter,
    Lora,
    PromptSyntax,
    Reference,
    Refinement,
    SecondPass,
)
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest
from noria.protocol.routes import Target


class GenerationMetadata(ImageSettings, frozen=True, omit_defaults=True):
    """The settings that generated one image. The seed is this image's: the request's plus the image's index.

    The scheduler may be another program's own name for one that Noria does not have.

    Raises InvalidField: a prompt cannot be encoded as UTF-8.
    """

    model: str | None = None
    model_version: str | None = None  # ModelSpec.fingerprint; in other programs' files, their hash of the model
    noria: str | None = None  # the version that generated it; None: another program
    other: dict[str, str] = msgspec.field(default_factory=dict)  # other programs' settings that Noria does not have
    deployment: int | None = None  # its number in the registry, if the model was deployed
    registered_version: str | None = None  # the version that was deployed, MODEL@NUMBER
    model_digest: str | None = None  # digest of the version's files
    loras: tuple[Lora, ...] = ()  # with digests
    strength: float | None = None  # strength of a start image; None: there was none
    image_digest: str | None = None  # digest of the start image's file: 12 digits of SHA-256
    mask_digest: str | None = None  # digest of its mask's file
    controls: tuple[Control, ...] = ()  # with digests
    reference_images: tuple[Reference, ...] = ()  # likewise
    ip_adapter: IpAdapter | None = None  # likewise
    refiner: Refinement | None = None  # with name and digest
    second_pass: SecondPass | None = None
    calls: float | None = None  # the share of the model's calls that were made
    prompt_syntax: PromptSyntax | None = None  # None: plain, if Noria generated it
    clip_skip: int | None = None  # the layer of the text encoder from the end; None: that of the model's family
    safety_score: float | None = None  # by the model's safety classifier; None: there was none

    def __post_init__(self) -> None:
        for field in ("prompt", "negative_prompt"):
            try:
                (getattr(self, field) or "").encode()
            except UnicodeEncodeError as error:
                raise InvalidField(
                    f"{field} has an unpaired surrogate at character {error.start}, which UTF-8 cannot encode.",
                    field=field,
                ) from error


def metadata_for(
    request: ImageRequest,
    spec: ModelSpec,
    seed: int,
    target: Target | None = None,
    safety_score: float | None = None,
) -> GenerationMetadata:
    """Return the metadata of the image of `request` whose own seed is `seed`; `target` is what was deployed, if any."""
    settings = {name: getattr(request.payload, name) for name in ImageSettings.__struct_fields__}
    return GenerationMetadata(
        **(settings | {"seed": seed}),
        model=spec.name,
        model_version=spec.fingerprint,
        noria=__version__,
        deployment=None if target is None else target.deployment,
        registered_version=None if target is None else target.version,
        model_digest=None if target is None else target.digest,
        loras=request.payload.loras,
        strength=request.payload.strength,
        image_digest=request.payload.image_digest,
        mask_digest=request.payload.mask_digest,
        controls=request.payload.controls,
        reference_images=request.payload.reference_images,
        ip_adapter=request.payload.ip_adapter,
        refiner=request.payload.refiner,
        second_pass=request.payload.second_pass,
        calls=request.payload.calls,
        prompt_syntax=request.payload.prompt_syntax,
        clip_skip=request.payload.clip_skip,
        safety_score=safety_score,
    )


def to_json(metadata: GenerationMetadata) -> bytes:
    """Encode as UTF-8 JSON, without fields that have their default."""
    return msgspec.json.encode(metadata)


def from_json(text: str | bytes) -> GenerationMetadata:
    """Decode what `to_json` of this or another version encoded; unknown keys are ignored.

    Raises ImageFileError: not JSON, or fields of other types.
    """
    try:
        return msgspec.json.decode(text, type=GenerationMetadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ImageFileError(f"its metadata {short_repr(text)} are not what Noria writes: {error}.") from error
