"""`noria generate`: one request drawn in this process, by the same wheel that serves; no server needed."""

import math
import os
import pathlib
import secrets
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from noria.config import Config
from noria.errors import ConfigError, GenerationFailed
from noria.frontend.admission import admit
from noria.frontend.encoding import encode_images
from noria.frontend.engine_link import DrawnImage
from noria.models.catalog import open_model
from noria.request import ImageBody, ImageRequest
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages


def run(*, config: Config, body: ImageBody, output: pathlib.Path) -> int:
    """Draw `body` and write `output`, in the body's format, or `output-0`, `output-1`, … for several images; returns the exit status.

    Raises:
        SetupError: a model or setting that does not work, a file that cannot be written.
        RequestError: a wish that the model cannot fulfil.
        GenerationFailed: the model failed.

    """
    _check_writable(output)
    spec = open_model(config.model)
    request = admit(body, spec, config.frontend, request_id="generate", draw_seed=lambda: secrets.randbelow(2**32))
    request = msgspec.structs.replace(request, timeout_s=math.inf)  # nobody else waits for this engine
    print(f"{spec.name}: {request.width_px}×{request.height_px}, {request.num_steps} steps of {request.scheduler}, "
          f"guidance {request.guidance_scale:g}, seed {request.seed}", file=sys.stderr)  # fmt: skip
    for image in _draw(config, spec, request):
        index = image.seed - request.seed
        file = output if request.num_images == 1 else output.with_stem(f"{output.stem}-{index}")
        try:
            file.write_bytes(encode_images([image], body.format)[0])
        except OSError as error:
            raise ConfigError(f"output {str(file)!r} cannot be written: {error.strerror}.") from error
        print(file)
    return 0


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
