"""`noria generate`: one request drawn in this process, by the same wheel that serves; no server needed."""

import math
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from noria.config import Config
from noria.errors import ConfigError, GenerationFailed, InvalidField, short_repr
from noria.frontend.engines.pool import RawImage
from noria.frontend.services.admission import validate
from noria.frontend.services.image_writer import write_images
from noria.images.metadata import GenerationMetadata, metadata_for
from noria.images.metadata_io import read_metadata
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest, ImageRequestBody

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import CompiledImageRequest


# What of a file's parameters is asked for again; its model is checked, not asked for.
_REPEATED_FIELDS = tuple(
    set(GenerationMetadata.__struct_fields__) & set(ImageRequestBody.__struct_fields__) - {"model"}
)


@dataclass(frozen=True)
class SourceImage:
    """An image that is to be drawn again."""

    file: pathlib.Path
    metadata: GenerationMetadata
    any_model: bool  # whether the caller named the model to draw with, and so may mean another one

    @classmethod
    def read(cls, file: pathlib.Path, *, any_model: bool) -> "SourceImage":
        """Raises ImageFileError where `file` says nothing."""
        return cls(file, read_metadata(file), any_model)


def build_body(flags: Mapping[str, Any], source: SourceImage | None, **options: Any) -> ImageRequestBody:
    """The body that `flags` and, where they say nothing, the image to be `like` ask for."""
    repeated = {} if source is None else {name: getattr(source.metadata, name) for name in _REPEATED_FIELDS}
    return ImageRequestBody(**(repeated | dict(flags)), **options)


def run(*, config: Config, body: ImageRequestBody, output: pathlib.Path, source: SourceImage | None = None) -> int:
    """Draw `body` and write `output`, in the body's format, or `output-0`, `output-1`, … for several images; returns the exit status.

    `like` is the image that the body repeats: another model than its own is refused, or warned of where the caller asked for it.

    Raises:
        SetupError: a model or setting that does not work, a file that cannot be written.
        RequestError: a wish that the model cannot fulfil.
        GenerationFailed: the model failed.

    """
    _check_writable(output)
    spec = open_model(config.model)
    for warning in _differences(source, spec) if source else ():
        print(f"noria: warning: {warning}", file=sys.stderr)
    request = validate(body, spec, config.frontend, request_id="generate", draw_seed=lambda: secrets.randbelow(2**32))
    request = msgspec.structs.replace(request, timeout_s=math.inf)  # nobody else waits for this engine
    print(f"{spec.name}: {request.width_px}×{request.height_px}, {request.num_steps} steps of {request.scheduler}, "
          f"guidance {request.guidance_scale:g}, seed {request.seed}", file=sys.stderr)  # fmt: skip
    for image in _generate(config, spec, request):
        index = image.seed - request.seed
        file = output if request.num_images == 1 else output.with_stem(f"{output.stem}-{index}")
        try:
            file.write_bytes(_file_bytes(image, body, request, spec))
        except OSError as error:
            raise ConfigError(f"output {str(file)!r} cannot be written: {error.strerror}.") from error
        print(file)
    return 0


def _differences(source: SourceImage, spec: ModelSpec) -> list[str]:
    """Why the image will not be the one that it is like; raises InvalidField where that is the model, and not by the caller's wish."""
    metadata, differences = source.metadata, []
    if metadata.model_version != spec.fingerprint:
        source_model = f"{metadata.model or 'an unknown model'} ({metadata.model_version or 'version unknown'})"
        mismatch = (
            f"{short_repr(str(source.file))} was drawn by {source_model}; this is {spec.name} ({spec.fingerprint})"
        )
        if metadata.noria is not None and not source.any_model:
            raise InvalidField(f"{mismatch}. Name the one that drew it with --model, or this one if you mean it.")
        differences.append(f"{mismatch}: the image will differ.")
    if metadata.other:
        ignored = ", ".join(f"{name}: {value}" for name, value in metadata.other.items())
        differences.append(f"{short_repr(str(source.file))} says what is not repeated here: {short_repr(ignored)}.")
    return differences


def _file_bytes(image: RawImage, body: ImageRequestBody, request: ImageRequest, spec: ModelSpec) -> bytes:
    metadata = [metadata_for(request, spec, image.seed)] if body.metadata else None
    return write_images([image], body.format, metadata=metadata)[0]


def _check_writable(output: pathlib.Path) -> None:
    """Refuse an output that cannot be written: before any work is done."""
    if output.is_dir():
        raise ConfigError(f"output {str(output)!r} is a folder. Name a file in it.")
    if not output.parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: there is no folder {str(output.parent)!r}. Make it first.")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"output {str(output)!r} cannot be written by this user. Choose another folder.")


def _generate(config: Config, spec: ModelSpec, request: ImageRequest) -> list[RawImage]:
    """The request's images, with a progress bar on a terminal."""
    from tqdm import tqdm

    from noria.engine.diffusion.loading import load_executor
    from noria.engine.loop import EngineEvent, EngineLoop, ImageReady, RequestClosed
    from noria.scheduling.step.scheduler import StepScheduler
    from noria.scheduling.types import FinishReason

    executor, settings = load_executor(spec, config.engine, config.engine.devices[0])
    assert isinstance(settings.slots, int)
    events: list[EngineEvent[CompiledImageRequest]] = []
    scheduler = StepScheduler(settings.slots, settings.decode_batch, queue_limit=request.num_images)
    engine_loop = EngineLoop(scheduler, executor, events.append, time.monotonic)
    compiled = executor.prepare(request)
    engine_loop.submit(compiled)
    with tqdm(total=request.num_images * compiled.num_calls, unit=" steps", desc="drawing") as progress_bar:
        while (iteration := engine_loop.run_iteration()) is not None:
            progress_bar.update(len(iteration.plan.steps))
    images = []
    for event in events:
        if isinstance(event, ImageReady):
            rgb = memoryview(event.pixels.rgb())
            images.append(RawImage(request.seed + event.index, request.width_px, request.height_px, rgb))
        elif isinstance(event, RequestClosed) and event.event.finish_reason is not FinishReason.FINISHED:
            raise GenerationFailed(event.event.message)
    return images
