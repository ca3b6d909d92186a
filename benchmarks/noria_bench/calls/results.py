"""The measurements of `noria bench calls`, as its JSON file has them."""

import math
import statistics
from typing import Any, Literal

from msgspec import Struct

FILE_NAME = "calls.json"


class Similarity(Struct, frozen=True):
    """How near an image is to that of the same prompt and seed with all calls."""

    psnr_db: float | None  # None: they are equal
    ssim: float
    lpips: float | None = None  # None: not measured


class Setting(Struct, frozen=True):
    """The way in which some of the images are made."""

    scheduler: str
    full_steps: int  # steps of the images that these are compared with
    kind: Literal["full", "skipped", "fewer"]
    num_calls: int
    share: float = 1.0  # share of the full image's calls, before it is rounded up


class CallsRun(Struct, frozen=True):
    """All images of one setting."""

    setting: Setting
    seconds_per_image: float  # in the batches that the device's slots make
    similarities: list[Similarity] = []  # one for each image; none of the full ones
    num_right: int | None = None  # images that show what their captions say; None: not judged

    @property
    def psnrs_db(self) -> list[float]:
        """The PSNR of each image; infinity of equal ones."""
        return [math.inf if each.psnr_db is None else each.psnr_db for each in self.similarities]

    def mean(self, name: Literal["ssim", "lpips"]) -> float:
        """The mean over the images; NaN if it was not measured."""
        values = [value for each in self.similarities if (value := getattr(each, name)) is not None]
        return statistics.mean(values) if values else math.nan


class CallsResult(Struct, frozen=True):
    """The whole document."""

    provenance: dict[str, Any]
    model: dict[str, Any]
    size_px: tuple[int, int]
    guidance_scale: float
    first_seed: int
    prompts: list[str]
    runs: list[CallsRun] = []
    notes: list[str] = []  # what was not measured, and why
    failures: list[str] = []
    complete: bool = False
