"""Generates the images of one request in this process, with the engine loop of the server."""

import math
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from noria.config import Config, EngineConfig
from noria.errors import ConfigError, GenerationFailed, ImageFileError, InvalidField, short_repr
from noria.frontend.engines.attempt import raw_image
from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.image_writer import write_images
from noria.frontend.services.images.refusals import divide, refusal
from noria.frontend.services.images.request_validation import validate
from noria.images.metadata import GenerationMetadata, metadata_for
from noria.images.metadata_io import read_metadata
from noria.images.start_image import ImageFiles, RequestImageFacts, RequestImages
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.adapters.hub_adapters import download_hub_adapters
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import Control, DiffusionModelSpec, DiffusionPayload, IpAdapter
from noria.protocol.messages import ImageDone
from noria.protocol.request import ControlField, ImageRequest, ImageRequestBody, IpAdapterField, TwoPassRequestBody

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor
    from noria.engine.diffusion.preparation import PreparedImageRequest

AdapterT = TypeVar("AdapterT", Control, IpAdapter)

# The fields of a file's metadata that a new request repeats. Its model is only compared; images are not in it.
_REPEATED_FIELDS = tuple(
    set(GenerationMetadata.__struct_fields__)
    & set(TwoPassRequestBody.__struct_fields__) - {"model", "controls", "reference_images", "ip_adapter"}
)


@dataclass(frozen=True)
class SourceImage:
    """An image file whose settings are repeated."""

    file: pathlib.Path
    metadata: GenerationMetadata
    any_model: bool  # whether the user named the model, which may then differ from the file's

    @classmethod
    def read(cls, file: pathlib.Path, *, any_model: bool) -> "SourceImage":
        """Read the metadata of `file`. Raises ImageFileError if it has none."""
        return cls(file, read_metadata(file), any_model)


def build_body(
    flags: Mapping[str, Any],
    source: SourceImage | None,
    controls: Sequence[Mapping[str, Any]] = (),
    ip_adapter: Mapping[str, Any] | None = None,
    **options: Any,
) -> ImageRequestBody:
    """The request body of the settings of `source`, if any, overridden by `flags`.

    `controls` and `ip_adapter` have the fields that are given; others are those of the same name in `source`.
    """
    repeated = {} if source is None else {name: getattr(source.metadata, name) for name in _REPEATED_FIELDS}
    were = [] if source is None else list(source.metadata.controls)
    adapters = [] if source is None or source.metadata.ip_adapter is None else [source.metadata.ip_adapter]
    return TwoPassRequestBody(
        **(repeated | dict(flags)),
        controls=tuple(ControlField(**_repeat(each, were, "scale", "start", "end")) for each in controls),
        ip_adapter=None if ip_adapter is None else IpAdapterField(**_repeat(ip_adapter, adapters, "scale")),
        **options,
    )


def _repeat(given: Mapping[str, Any], were: list[AdapterT], *names: str) -> dict[str, Any]:
    """Return what is given and, else, the fields of the first of this name, which is removed from `were`."""
    found = next((each for each in were if each.name == given["name"]), None)
    if found is None:
        return dict(given)
    were.remove(found)
    return {name: getattr(found, name) for name in names} | dict(given)


def read_images(
    image: pathlib.Path | None,
    mask: pathlib.Path | None,
    controls: Sequence[pathlib.Path],
    references: Sequence[pathlib.Path],
    ip_adapter: pathlib.Path | None,
) -> RequestImages:
    """Return the images in these files. Raises ImageFileError, UnreadableImage, InvalidField."""
    if image is None and mask is not None:
        raise InvalidField("--mask needs an --image, of which it says what is repainted.")
    try:
        return RequestImages(
            ImageFiles(
                None if image is None else image.read_bytes(),
                None if mask is None else mask.read_bytes(),
                controls=tuple(file.read_bytes() for file in controls),
                references=tuple(file.read_bytes() for file in references),
                ip_adapter=None if ip_adapter is None else ip_adapter.read_bytes(),
            )
        )
    except OSError as error:
        raise ImageFileError(f"{short_repr(error.filename)} cannot be read: {error.strerror}.") from error


def generate_files(
    *,
    config: Config,
    body: ImageRequestBody,
    output: pathlib.Path,
    source: SourceImage | None = None,
    images: RequestImages,
) -> int:
    """Generate the images of `body` and write `output`, or `output-0`, `output-1`, … for several images.

    Returns the exit status. If the model differs from that of `source`, this raises InvalidField, or warns if the user
    named the model.

    Raises:
        SetupError: a model or setting that does not work, a file that cannot be written.
        RequestError: a request that the model cannot serve.
        GenerationFailed: the model failed.
        ImageRefused: the safety classifier has refused an image; the others are written.
    """
    _check_writable(output)
    config = download_hub_adapters(config, os.environ)
    spec = open_model_of(DiffusionModelSpec, config.model, config.engine)
    for warning in _differences(source, spec, images.facts) if source else ():
        print(f"noria: warning: {warning}", file=sys.stderr)
    request = validate(
        body,
        spec,
        config.frontend,
        request_id="generate",
        draw_seed=lambda: secrets.randbelow(2**32),
        folders=AdapterFolders.of(config.engine),
        images=images.facts,
    )
    request = msgspec.structs.replace(request, attempt_id=request.request_id, timeout_s=math.inf)
    settings = request.payload
    for warning in _other_adapters(source, settings) if source else ():
        print(f"noria: warning: {warning}", file=sys.stderr)
    print(f"{spec.name}: {settings.width}×{settings.height}, {settings.inference_steps} steps of {settings.scheduler}, "
          f"guidance {settings.guidance_scale:g}, seed {settings.seed}", file=sys.stderr)  # fmt: skip
    data = images.pixels(
        settings.width,
        settings.height,
        spec,
        ip_adapter_px=0 if settings.ip_adapter is None else settings.ip_adapter.image_px,
        second_px=None if settings.second_pass is None else settings.result_px,
    )
    made = _run_engine(config, spec, request, data or None)
    for image in made:
        if image.is_refused:
            continue
        index = image.seed - settings.seed
        file = output if settings.n == 1 else output.with_stem(f"{output.stem}-{index}")
        try:
            file.write_bytes(_file_bytes(image, body, request, spec))
        except OSError as error:
            raise ConfigError(f"output {str(file)!r} cannot be written: {error.strerror}.") from error
        print(file)
    if refused := divide(made)[1]:
        raise refusal(spec.name, refused)
    return 0


def _check_images(source: SourceImage, images: RequestImageFacts) -> None:
    """Raise InvalidField if an image that `source` was made from is missing."""
    metadata, missing = source.metadata, None
    if metadata.controls and not images.controls:
        named = ", ".join(f"{each.name}:{each.scale:g} (image {each.image_digest}…)" for each in metadata.controls)
        missing = f"with ControlNets: {named}. Name their images with --control."
    elif (adapter := metadata.ip_adapter) is not None and images.ip_adapter is None:
        named = f"{adapter.name}:{adapter.scale:g} (image {adapter.image_digest}…)"
        missing = f"with the IP-Adapter {named}. Name its image with --ip-adapter."
    elif metadata.reference_images and not images.references:
        digests = ", ".join(f"SHA-256 {each.digest}…" for each in metadata.reference_images)
        missing = f"from reference images ({digests}). Name their files with --reference."
    elif metadata.strength is not None and images.start is None:
        digest = "" if metadata.image_digest is None else f" (SHA-256 {metadata.image_digest}…)"
        missing = f"from a start image{digest}. Name its file with --image."
    if missing is not None:
        raise InvalidField(f"{short_repr(str(source.file))} was made {missing}")


def _differences(source: SourceImage, spec: DiffusionModelSpec, images: RequestImageFacts) -> list[str]:
    """Reasons why the new image will differ from `source`.

    Raises InvalidField if the model differs and the user did not name it, or if an image is missing.
    """
    _check_images(source, images)
    metadata, differences, start_image = source.metadata, [], images.start
    if start_image is not None:
        for name, was, now in (
            ("image", metadata.image_digest, start_image.digest),
            ("mask", metadata.mask_digest, start_image.mask_digest),
        ):
            if was != now and (was or metadata.strength is None):  # A1111's files have no digests
                differences.append(f"--{name} is not the file that {short_repr(str(source.file))} was made from.")
    if images.references and [each.digest for each in metadata.reference_images] != [
        each.digest for each in images.references
    ]:
        differences.append(f"--reference are not the files that {short_repr(str(source.file))} was made from.")
    if metadata.model_version != spec.fingerprint:
        source_model = f"{metadata.model or 'an unknown model'} ({metadata.model_version or 'version unknown'})"
        mismatch = (
            f"{short_repr(str(source.file))} was generated by {source_model}; this is {spec.name} ({spec.fingerprint})"
        )
        if metadata.noria is not None and not source.any_model:
            raise InvalidField(f"{mismatch}. Name its model with --model, or name this one to use it nevertheless.")
        differences.append(f"{mismatch}: the image will differ.")
    if metadata.other:
        ignored = ", ".join(f"{name}: {value}" for name, value in metadata.other.items())
        differences.append(f"{short_repr(str(source.file))} has settings that are ignored: {short_repr(ignored)}.")
    return differences


def _other_adapters(source: SourceImage, settings: DiffusionPayload) -> Iterator[str]:
    """Yield what differs of the ControlNets and the IP-Adapter that `source` was made with."""
    file, metadata = short_repr(str(source.file)), source.metadata
    if metadata.controls and len(metadata.controls) != len(settings.controls):
        yield f"{file} was made with {len(metadata.controls)} of --control; there are {len(settings.controls)}."
    pairs: list[tuple[str, Control | IpAdapter, Control | IpAdapter]] = [
        ("--control", *pair) for pair in zip(metadata.controls, settings.controls, strict=False)
    ]
    if metadata.ip_adapter is not None and settings.ip_adapter is not None:
        pairs.append(("--ip-adapter", metadata.ip_adapter, settings.ip_adapter))
    for flag, was, now in pairs:
        values = [(name, getattr(was, name), getattr(now, name)) for name in was.__struct_fields__]
        if changes := ", ".join(f"{name} was {old}, is {new}" for name, old, new in values if old != new):
            yield f"{flag} {now.name} differs from that which {file} was made with: {changes}."


def _file_bytes(image: RawImage, body: ImageRequestBody, request: ImageRequest, spec: DiffusionModelSpec) -> bytes:
    metadata = [metadata_for(request, spec, image.seed, safety_score=image.safety_score)] if body.metadata else None
    return write_images([image], body.format, metadata=metadata)[0]


def _check_writable(output: pathlib.Path) -> None:
    """Raise ConfigError if `output` cannot be written, before any work is done."""
    if output.is_dir():
        raise ConfigError(f"output {str(output)!r} is a folder. Name a file in it.")
    if not output.parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: there is no folder {str(output.parent)!r}. Create it first.")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"output {str(output)!r} cannot be written by this user. Choose another folder.")


def _run_engine(config: Config, spec: DiffusionModelSpec, request: ImageRequest, data: bytes | None) -> list[RawImage]:
    """Generate the images of the request and its start image, with a progress bar on a terminal."""
    from tqdm import tqdm

    from noria.engine.diffusion.loading import load_executor

    executor, settings = load_executor(spec, config.engine, config.engine.devices[0])
    prepared = executor.prepare(request, None if data is None else memoryview(data))
    total = request.payload.n * prepared.num_calls
    with tqdm(total=total, unit=" steps", desc="generating") as progress_bar:
        return [image for _, image in run_loop(executor, settings, [prepared], progress_bar.update)]


def run_loop(
    executor: "DiffusionExecutor",
    settings: EngineConfig,
    prepared: "Sequence[PreparedImageRequest]",
    on_steps: Callable[[int], object],
) -> list[tuple[str, RawImage]]:
    """Return the images of requests that run together, as they end, each with its request's id.

    `settings` are those that `load_executor` returned; `on_steps` gets the number of steps of each iteration.

    Raises GenerationFailed: the model failed.
    """
    from noria.engine.loop import EngineEvent, RequestEnded, ResultReady, StepLoop
    from noria.scheduling.step.scheduler import StepScheduler
    from noria.scheduling.types import FinishReason

    assert isinstance(settings.slots, int)
    events: list[EngineEvent[PreparedImageRequest]] = []
    queue_limit = sum(each.request.payload.n for each in prepared)
    scheduler = StepScheduler(settings.slots, settings.decode_batch, queue_limit=queue_limit)
    engine_loop = StepLoop(scheduler, executor, events.append, time.monotonic)
    for each in prepared:
        engine_loop.submit(each)
    while (iteration := engine_loop.run_iteration()) is not None:
        on_steps(len(iteration.plan.steps))
    images = []
    for event in events:
        if isinstance(event, ResultReady):
            done, rgb = event.result.message()
            assert isinstance(done, ImageDone)
            image = raw_image(done, memoryview(rgb))
            images.append((event.prepared.request.request_id, image))
        elif isinstance(event, RequestEnded) and event.event.finish_reason is not FinishReason.FINISHED:
            raise GenerationFailed(event.event.message)
    return images
