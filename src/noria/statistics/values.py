"""The values of the built-in variables of a prompt, a text or an image."""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence

Value = float | str
Values = list[tuple[str, Value]]
"""The values of a request by the variable's name; several of one variable, if it has several images or texts."""

_MAX_SCRIPT_CHARS = 1000
_LETTER = re.compile(r"[^\W\d_]")
# Latin-1 to Latin Extended-B, Latin Extended Additional, Latin ligatures and full-width letters.
_LATIN = re.compile("[A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿﬀ-ﬆＡ-Ｚａ-ｚ]")


def non_latin_ratio(text: str) -> float:
    """Return the share of the letters that are of other scripts than the Latin one; 0 without letters.

    Of the first 1000 characters. It is a cheap stand-in for the share of languages.
    """
    text = text[:_MAX_SCRIPT_CHARS]
    if text.isascii():
        return 0.0
    num_letters = len(_LETTER.findall(text))
    return 1 - len(_LATIN.findall(text)) / num_letters if num_letters else 0.0


_OF_PROMPTS: Mapping[str, Callable[[str], float]] = {
    "prompt_chars": len,
    "prompt_words": lambda prompt: len(prompt.split()),
    "prompt_non_latin_ratio": non_latin_ratio,
}
_OF_TEXTS: Mapping[str, Callable[[str], float]] = {"text_chars": len, "text_non_latin_ratio": non_latin_ratio}

TEXT_COLUMNS = {"prompt": _OF_PROMPTS, "text": _OF_TEXTS}
"""The values that are computed of a prompt or a text alone; by the name of a column in files of training data."""


def prompt_values(prompt: str, wanted: Container[str]) -> Values:
    """Return the values of a prompt."""
    return [(name, compute(prompt)) for name, compute in _OF_PROMPTS.items() if name in wanted]


def text_values(text: str, wanted: Container[str]) -> Values:
    """Return the values of a text alone."""
    return [(name, compute(text)) for name, compute in _OF_TEXTS.items() if name in wanted]


def luma_values(counts: Sequence[int], wanted: Container[str]) -> Values:
    """Return the values of an image, given the counts of its 256 levels of luma."""
    total = sum(counts)
    mean = sum(level * count for level, count in enumerate(counts)) / total
    values: Values = []
    if "image_brightness" in wanted:
        values.append(("image_brightness", mean / 255))
    if "image_contrast" in wanted:
        variance = sum(count * (level - mean) ** 2 for level, count in enumerate(counts) if count) / total
        values.append(("image_contrast", math.sqrt(variance) / 255))
    if "image_entropy" in wanted:
        bits = sum(count * math.log2(total / count) for count in counts if count) / total
        values.append(("image_entropy", bits))
    return values
