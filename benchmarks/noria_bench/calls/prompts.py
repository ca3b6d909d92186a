"""The prompts of the images; the bundled model's are captions that it was not trained on, and its images are judged."""

import importlib
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from noria.errors import ConfigError
from noria_bench.calls.similarity import Image

_DEMO_MODEL = pathlib.Path(__file__).resolve().parents[3] / "examples" / "demo_model"
_PROMPTS = (
    "a lighthouse on a rocky coast at dusk, waves breaking below it",
    "portrait of an old fisherman with a grey beard, soft window light",
    "a bowl of ramen with an egg and spring onions, seen from above",
    "a red bicycle leaning against a white brick wall",
    "a snowy owl in flight over a frozen lake",
    "the word OPEN painted on a wooden sign above a bakery door",
    "a city street in the rain at night, neon signs reflected in puddles",
    "watercolour of a fox sleeping among autumn leaves",
    "three glass bottles of different colours on a windowsill",
    "an astronaut riding a horse through a wheat field",
    "a crowded farmers' market on a sunny morning",
    "macro photograph of dew on a spider's web",
)


@dataclass(frozen=True)
class Prompts:
    """The prompt of each image; `is_right(number, image)` says whether an image shows what its prompt says."""

    texts: tuple[str, ...]
    is_right: Callable[[int, Image], bool] | None = None


def choose_prompts(file: pathlib.Path | None, model: str, num_images: int, seed: int) -> Prompts:
    """Return as many prompts as images, of `file` or the bench's own, again and again.

    The bundled model's own are held-out captions, if this is a checkout, which has their judge.

    Raises:
        ConfigError: the file cannot be read, or is empty.

    """
    if file is None and model == "bundled" and (_DEMO_MODEL / "judge.py").is_file():
        return _judged_captions(num_images, seed)
    texts = _PROMPTS if file is None else _read(file)
    return Prompts(tuple(texts[number % len(texts)] for number in range(num_images)))


def _judged_captions(num_images: int, seed: int) -> Prompts:
    sys.path.append(str(_DEMO_MODEL))  # its modules import each other
    try:
        scenes = importlib.import_module("scenes").draw_scenes(seed, num_images, held_out=True)
        judge = importlib.import_module("judge").judge
    finally:
        sys.path.remove(str(_DEMO_MODEL))
    texts = tuple(scene.caption for scene in scenes)
    return Prompts(texts, lambda number, image: judge(image, scenes[number]).all_right)


def _read(file: pathlib.Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error}.") from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise ConfigError(f"--prompts {file} has no prompts. Write one a line.")
    return texts
