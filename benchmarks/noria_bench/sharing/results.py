"""The measurements of `noria bench sharing`, as its JSON file has them."""

from typing import Any

from msgspec import Struct

from noria_bench.encoders.results import Measurement

FILE_NAME = "sharing.json"


class SharingRun(Struct, frozen=True):
    """The result of one load of texts, alone or beside images; or of images alone."""

    encoder_cores: str  # the setting
    round: int
    texts: Measurement | None  # None: images alone
    images_per_s: float | None  # None: texts alone
    cores: dict[str, float]  # CPU seconds per second: of the engines, the rest of the server, the bench, and others
    num_images: int = 0  # that users got
    num_images_failed: int = 0


class SharingResult(Struct, frozen=True):
    """The whole document."""

    provenance: dict[str, Any]
    models: dict[str, str]  # by kind
    options: dict[str, Any]
    text: str  # that all requests have
    runs: list[SharingRun] = []
    failures: list[str] = []
    complete: bool = False
