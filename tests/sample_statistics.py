"""Counts of a server, made up: prompts that became longer, and what did not change."""

import pathlib

import numpy as np

from noria.registry.statistics.file import encode_statistics
from noria.statistics.distributions import CategoryCounts, Counts, Histogram
from noria.statistics.variables import BUILT_IN_VARIABLES
from noria.statistics.windows import CountsReport, Reference, SeriesKey, StatisticsHistory
from noria.storage.private_files import replace_private_file

WINDOW_S = 300.0
NOW = 5_970_000  # the number of a window in October 2026
NUM_WINDOWS = 60
VERSION = "shapes@1"
REFERENCE_OF = ("prompt_chars", "prompt_words", "image_brightness", "scheduler", "inference_steps")


def histogram(variable: str, values: np.ndarray) -> Histogram:
    counted = Histogram(BUILT_IN_VARIABLES[variable].edges)
    for value in values:
        counted.record(float(value))
    return counted


def categories(draw: np.random.Generator, num: int) -> CategoryCounts:
    counted = CategoryCounts()
    for name in draw.choice(["ddim", "euler", "dpm++2m"], num, p=[0.6, 0.3, 0.1]):
        counted.record(str(name))
    return counted


def counts(draw: np.random.Generator, num: int, mean_words: float) -> dict[str, Counts]:
    words = draw.poisson(mean_words, num) + 1
    return {
        "prompt_chars": histogram("prompt_chars", 6 * words + draw.normal(0, 3, num)),
        "prompt_words": histogram("prompt_words", words),
        "image_brightness": histogram("image_brightness", draw.beta(6, 5, num)),
        "image_entropy": histogram("image_entropy", 8 * draw.beta(8, 2, num)),
        "scheduler": categories(draw, num),
        "inference_steps": histogram("inference_steps", draw.choice([12, 20, 30], num)),
    }


def write_sample_statistics(folder: pathlib.Path) -> None:
    """Write the file of a server into its data folder: prompts of 7 words, in the last third of 14."""
    draw, history = np.random.default_rng(1), StatisticsHistory(WINDOW_S)
    for window in range(NUM_WINDOWS):
        mean_words = 7.0 if window < 2 * NUM_WINDOWS // 3 else 14.0
        for variable, each in counts(draw, 60, mean_words).items():
            kind = BUILT_IN_VARIABLES[variable].kind
            key = SeriesKey("t2i", VERSION, variable)
            history.add([CountsReport(key, kind, NOW - NUM_WINDOWS + 1 + window, each)])
    for window in range(NOW - 2, NOW + 1):
        price = CountsReport(
            SeriesKey("shop", "0123456789ab", "price"), "value", window, Histogram((0.0,), [1, 9], 42.5)
        )
        history.add([price])
    references = [
        Reference("t2i", VERSION, "0123456789ab", variable, each, 1_790_000_000.0, "ada", "a good day")
        for variable, each in counts(draw, 5000, 7.0).items()
        if variable in REFERENCE_OF
    ]
    replace_private_file(folder / "statistics.json", encode_statistics(history.snapshot(NOW, references)))
