"""`noria generate`: one request drawn in this process, by the same wheel that serves; no server needed."""

import pathlib
import secrets
import sys
import time
from typing import TYPE_CHECKING

from noria.config import Config
from noria.errors import ConfigError, GenerationFailed
from noria.frontend.admission import admit
from noria.frontend.encoding import encode_images
from noria.frontend.engine_link import DrawnImage
from noria.models.catalog import open_model
from noria.request import ImageBody, ImageFormat, ImageRequest

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

_FORMATS: dict[str, ImageFormat] = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}


def run(*, config: Config, body: ImageBody, output: pathlib.Path) -> int:
    """Draw `body` and write `output`, or `output-0`, `output-1`, … for several images; returns the exit status.

    Raises:
        SetupError: a model or setting that does not work, a file that cannot be written.
        RequestError: a wish that the model cannot fulfil.
        GenerationFailed: the model failed.

    """
    file_format = _writable(output)
    spec = open_model(config.model)
    request = admit(body, spec, config.frontend, request_id="generate", draw_seed=lambda: secrets.randbelow(2**32))
    print(f"{spec.name}: {request.width_px}×{request.height_px}, {request.num_steps} steps of {request.scheduler}, "
          f"guidance {request.guidance_scale:g}, seed {request.seed}", file=sys.stderr)  # fmt: skip
    for image in _draw(config, request):
        index = image.seed - request.seed
        file = output if request.num_images == 1 else output.with_stem(f"{output.stem}-{index}")
        file.write_bytes(encode_images([image], file_format)[0])
        print(file)
    return 0


def _writable(output: pathlib.Path) -> ImageFormat:
    """The format that the output's name asks for, once it is known that it can be written: before any work is done."""
    if output.suffix.lower() not in _FORMATS:
        raise ConfigError(f"output {str(output)!r} ends in {output.suffix!r}; allowed are {', '.join(_FORMATS)}.")
    if not output.parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: there is no folder {str(output.parent)!r}. Make it first.")
    return _FORMATS[output.suffix.lower()]


def _draw(config: Config, request: ImageRequest) -> list[DrawnImage]:
    """The request's images, with a progress bar on a terminal."""
    from tqdm import tqdm

    from noria.engine.loading import load_executor
    from noria.engine.loop import Ended, ImageReady, Wheel
    from noria.scheduling.plans import End
    from noria.scheduling.steps import StepScheduler

    spec = open_model(config.model)
    executor, settings = load_executor(spec, config.engine, config.engine.devices[0])
    assert isinstance(settings.slots, int)
    events: list[ImageReady[PreparedImages] | Ended[PreparedImages]] = []
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
        elif event.event.end is not End.FINISHED:
            raise GenerationFailed(event.event.reason)
    return images
