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
from noria.errors import ConfigError, GenerationFailed, InvalidField, shown
from noria.frontend.admission import admit
from noria.frontend.encoding import encode_images
from noria.frontend.engine_link import DrawnImage
from noria.image_files import read_parameters
from noria.models.catalog import open_model
from noria.parameters import Parameters, of_request
from noria.request import ImageBody, ImageRequest
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages


# What of a file's parameters is asked for again; its model is checked, not asked for.
_REPEATED = tuple(set(Parameters.__struct_fields__) & set(ImageBody.__struct_fields__) - {"model"})


@dataclass(frozen=True)
class Like:
    """An image that is to be drawn again."""

    file: pathlib.Path
    parameters: Parameters
    any_model: bool  # whether the caller named the model to draw with, and so may mean another one

    @classmethod
    def read(cls, file: pathlib.Path, *, any_model: bool) -> "Like":
        """Raises ImageFileError where `file` says nothing."""
        return cls(file, read_parameters(file), any_model)


def body_of(flags: Mapping[str, Any], like: Like | None, **others: Any) -> ImageBody:
    """The body that `flags` and, where they say nothing, the image to be `like` ask for."""
    said = {} if like is None else {name: getattr(like.parameters, name) for name in _REPEATED}
    return ImageBody(**(said | dict(flags)), **others)


def run(*, config: Config, body: ImageBody, output: pathlib.Path, like: Like | None = None) -> int:
    """Draw `body` and write `output`, in the body's format, or `output-0`, `output-1`, … for several images; returns the exit status.

    `like` is the image that the body repeats: another model than its own is refused, or warned of where the caller asked for it.

    Raises:
        SetupError: a model or setting that does not work, a file that cannot be written.
        RequestError: a wish that the model cannot fulfil.
        GenerationFailed: the model failed.

    """
    _check_writable(output)
    spec = open_model(config.model)
    for warning in _differences(like, spec) if like else ():
        print(f"noria: warning: {warning}", file=sys.stderr)
    request = admit(body, spec, config.frontend, request_id="generate", draw_seed=lambda: secrets.randbelow(2**32))
    request = msgspec.structs.replace(request, timeout_s=math.inf)  # nobody else waits for this engine
    print(f"{spec.name}: {request.width_px}×{request.height_px}, {request.num_steps} steps of {request.scheduler}, "
          f"guidance {request.guidance_scale:g}, seed {request.seed}", file=sys.stderr)  # fmt: skip
    for image in _draw(config, spec, request):
        index = image.seed - request.seed
        file = output if request.num_images == 1 else output.with_stem(f"{output.stem}-{index}")
        try:
            file.write_bytes(_encoded(image, body, request, spec))
        except OSError as error:
            raise ConfigError(f"output {str(file)!r} cannot be written: {error.strerror}.") from error
        print(file)
    return 0


def _differences(like: Like, spec: ModelSpec) -> list[str]:
    """Why the image will not be the one that it is like; raises InvalidField where that is the model, and not by the caller's wish."""
    parameters, differences = like.parameters, []
    if parameters.model_version != spec.fingerprint:
        theirs = f"{parameters.model or 'an unknown model'} ({parameters.model_version or 'version unknown'})"
        what = f"{shown(str(like.file))} was drawn by {theirs}; this is {spec.name} ({spec.fingerprint})"
        if parameters.noria is not None and not like.any_model:
            raise InvalidField(f"{what}. Name the one that drew it with --model, or this one if you mean it.")
        differences.append(f"{what}: the image will differ.")
    if parameters.other:
        others = ", ".join(f"{name}: {value}" for name, value in parameters.other.items())
        differences.append(f"{shown(str(like.file))} says what is not repeated here: {shown(others)}.")
    return differences


def _encoded(image: DrawnImage, body: ImageBody, request: ImageRequest, spec: ModelSpec) -> bytes:
    parameters = [of_request(request, spec, image.seed)] if body.metadata else None
    return encode_images([image], body.format, parameters=parameters)[0]


def _check_writable(output: pathlib.Path) -> None:
    """Refuse an output that cannot be written: before any work is done."""
    if output.is_dir():
        raise ConfigError(f"output {str(output)!r} is a folder. Name a file in it.")
    if not output.parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: there is no folder {str(output.parent)!r}. Make it first.")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"output {str(output)!r} cannot be written by this user. Choose another folder.")


def _draw(config: Config, spec: ModelSpec, request: ImageRequest) -> list[DrawnImage]:
    """The request's images, with a progress bar on a terminal."""
    from tqdm import tqdm

    from noria.engine.loading import load_executor
    from noria.engine.loop import Ended, Happening, ImageReady, Wheel
    from noria.scheduling.plans import End
    from noria.scheduling.steps import StepScheduler

    executor, settings = load_executor(spec, config.engine, config.engine.devices[0])
    assert isinstance(settings.slots, int)
    events: list[Happening[PreparedImages]] = []
    scheduler = StepScheduler(settings.slots, settings.decode_batch, queue_limit=request.num_images)
    wheel = Wheel(scheduler, executor, events.append, time.monotonic)
    prepared = executor.prepare(request)
    wheel.submit(prepared)
    with tqdm(total=request.num_images * prepared.num_calls, unit=" steps", desc="drawing") as bar:
        while (turn := wheel.turn()) is not None:
            bar.update(len(turn.plan.steps))
    images = []
    for event in events:
        if isinstance(event, ImageReady):
            rgb = memoryview(event.pixels.rgb())
            images.append(DrawnImage(request.seed + event.index, request.width_px, request.height_px, rgb))
        elif isinstance(event, Ended) and event.event.end is not End.FINISHED:
            raise GenerationFailed(event.event.reason)
    return images
