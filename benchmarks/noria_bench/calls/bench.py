"""`noria bench calls`: how near images with skipped calls are to those of all calls, beside images with as few steps.

Requests are validated as the server's are, and run in this process in the server's executor and engine loop. Each
scheduler and number of steps gets full images; then, for each share, the same prompts and seeds with that share of the
calls, and with as many steps. Pixels are compared as clients get them, in 8 bits.
"""

import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from noria.cli.local_generation import run_loop
from noria.config import Config
from noria.frontend.services.images.request_validation import validate
from noria.images import scheduler_names
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequest, ImageRequestBody
from noria_bench.calls.options import CallsOptions
from noria_bench.calls.prompts import Prompts, choose_prompts
from noria_bench.calls.report import write_report
from noria_bench.calls.results import FILE_NAME, CallsResult, CallsRun, Setting, Similarity
from noria_bench.calls.similarity import Image, Lpips, load_lpips, ssim
from noria_bench.measurement.image_checks import psnr_db
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import make_results_folder, run_to_end, status_log, write_json

_log_status = status_log("calls")
NUM_PICTURES = 4  # images of each setting that the grids show
Generate = Callable[[Sequence[ImageRequest]], list[Image]]


def main(config: Config, options: CallsOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report, the plot and the grids into `folder`, print the report; return the exit status.

    Raises:
        NoriaError: the model is not of images, or skips no calls with these settings, or the folder cannot be created.

    """
    make_results_folder(folder)
    bench = CallsBench(config, options, folder)
    status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), bench.pictures, folder)[0].read_text(encoding="utf-8"))
    return status


class CallsBench:
    """The state of the bench: what has been measured so far."""

    def __init__(self, config: Config, options: CallsOptions, folder: pathlib.Path) -> None:
        self._config, self._options, self._folder = config, options, folder
        self._spec = open_model_of(DiffusionModelSpec, config.model, config.engine)
        self._prompts = choose_prompts(options.prompts, config.model, options.num_images, options.seed)
        self._provenance = collect_provenance()
        self._plan = list(self._requests())  # all: one that is rejected is so before the model is loaded
        self.pictures: dict[Setting, list[Image]] = {}
        self.runs: list[CallsRun] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.complete = False

    def measure(self) -> None:
        """Measure everything; saves after each setting."""
        _log_status("loading the model")
        generate = _load(self._config, self._spec)
        lpips, note = load_lpips()
        self.notes += [note] if note else []
        generate(self._plan[0][1][:1])  # loads kernels, which is not measured
        full: list[Image] = []
        for setting, requests in self._plan:
            _log_status(f"{setting.scheduler}, {setting.full_steps} steps: {setting.num_calls} calls, {setting.kind}")
            begun_s = time.monotonic()
            images = generate(requests)
            seconds = (time.monotonic() - begun_s) / len(images)
            full = images if setting.kind == "full" else full
            similarities = [] if setting.kind == "full" else _similarities(images, full, lpips)
            self.runs.append(CallsRun(setting, seconds, similarities, _num_right(images, self._prompts)))
            self.pictures[setting] = images[:NUM_PICTURES]
            write_json(self.result(), self._folder / FILE_NAME)
        self.complete = True
        write_json(self.result(), self._folder / FILE_NAME)

    def result(self) -> CallsResult:
        """The document so far."""
        return CallsResult(
            provenance=self._provenance,
            model={"name": self._spec.name, "fingerprint": self._spec.fingerprint},
            size_px=(self._spec.default_width_px, self._spec.default_height_px),
            guidance_scale=self._spec.default_guidance,
            first_seed=self._options.seed,
            prompts=list(self._prompts.texts),
            runs=self.runs,
            notes=self.notes,
            failures=self.failures,
            complete=self.complete,
        )

    def _requests(self) -> Iterator[tuple[Setting, list[ImageRequest]]]:
        for scheduler in self._options.schedulers or (_default_scheduler(self._spec),):
            for num_steps in self._options.steps or (self._spec.default_steps,):
                yield Setting(scheduler, num_steps, "full", num_steps), self._with(scheduler, num_steps)
                for share in self._options.shares:
                    skipping = self._with(scheduler, num_steps, share)
                    num_calls = skipping[0].payload.num_steps
                    yield Setting(scheduler, num_steps, "skipped", num_calls, share), skipping
                    yield Setting(scheduler, num_steps, "fewer", num_calls, share), self._with(scheduler, num_calls)

    def _with(self, scheduler: str, num_steps: int, share: float = 1.0) -> list[ImageRequest]:
        """The requests of all images, validated as the server does."""
        folders = AdapterFolders.of(self._config.engine)
        requests = []
        for number, prompt in enumerate(self._prompts.texts):
            seed = self._options.seed + number
            body = ImageRequestBody(prompt, seed=seed, scheduler=scheduler, inference_steps=num_steps, calls=share)
            request = validate(body, self._spec, self._config.frontend, f"image-{number}", lambda: 0, folders=folders)
            requests.append(msgspec.structs.replace(request, attempt_id=request.request_id, timeout_s=math.inf))
        return requests


def _default_scheduler(spec: DiffusionModelSpec) -> str:
    """The model's, or the first that it supports whose calls can be skipped."""
    names = (spec.default_scheduler, *spec.schedulers)
    skipping = (name for name in names if not scheduler_names.find(name).needs_all_calls)
    return next(skipping, spec.default_scheduler)


def _load(config: Config, spec: DiffusionModelSpec) -> Generate:
    """Load the model; the function returns the image of each request."""
    from noria.engine.diffusion.loading import load_executor

    executor, settings = load_executor(spec, config.engine, config.engine.devices[0])

    def generate(requests: Sequence[ImageRequest]) -> list[Image]:
        ended = run_loop(executor, settings, [executor.prepare(each, None) for each in requests], lambda _: None)
        images = {
            name: np.frombuffer(image.rgb, np.uint8).reshape(image.height_px, image.width_px, 3)
            for name, image in ended
        }
        return [images[each.request_id] for each in requests]

    return generate


def _similarities(images: Sequence[Image], full: Sequence[Image], lpips: Lpips | None) -> list[Similarity]:
    found = []
    for image, reference in zip(images, full, strict=True):
        psnr = psnr_db(image, reference)
        distance = None if lpips is None else lpips(image, reference)
        found.append(Similarity(psnr if math.isfinite(psnr) else None, ssim(image, reference), distance))
    return found


def _num_right(images: Sequence[Image], prompts: Prompts) -> int | None:
    if prompts.is_right is None:
        return None
    return sum(prompts.is_right(number, image) for number, image in enumerate(images))
