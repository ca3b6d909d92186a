#!/usr/bin/env python3
"""Measure the bundled model: generate held-out captions, judge the pixels, count which facts are right.

    evaluate.py PIPELINE --captions 300 --steps 20 --guidance 3 --scheduler dpm++2m --out accuracy.json \\
        [--sheet sheet.png]

Image i comes from a generator seeded with --seed + i, so that a run can be repeated, whatever its batch size, up to
rounding. The JSON holds the command, a hash of the model's files, versions, the rates in the printed tables, and every
caption's verdict.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shlex
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, StableDiffusionPipeline
from PIL import Image, ImageDraw

from judge import FACTS, ObjectVerdict, Verdict, judge
from scenes import Object, Scene, draw_scenes

SCHEDULERS = {
    "ddim": (DDIMScheduler, {}),
    "dpm++2m": (DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++", "solver_order": 2}),
}
LOOKS = ("colour", "shape", "size")
SHEET_IMAGES, SHEET_COLUMNS = 48, 8


def load_pipeline(folder: pathlib.Path, scheduler: str) -> StableDiffusionPipeline:
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32, safety_checker=None)
    kind, settings = SCHEDULERS[scheduler]
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **settings)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda" if torch.cuda.is_available() else "cpu")


def generate(pipeline: StableDiffusionPipeline, captions: list[str], options: argparse.Namespace) -> list[np.ndarray]:
    """Generate one image, [side, side, 3] uint8, for each caption."""
    images = []
    for start in range(0, len(captions), options.batch):
        batch = captions[start : start + options.batch]
        images += pipeline(
            batch,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=[torch.Generator().manual_seed(options.seed + start + row) for row in range(len(batch))],
        ).images
    return [np.asarray(image) for image in images]


def rates(verdicts: Sequence[Verdict | ObjectVerdict], facts: tuple[str, ...]) -> dict[str, float]:
    """How many verdicts there are, and the share of them in which each fact is right."""
    shares = {fact: sum(getattr(verdict, fact) for verdict in verdicts) / len(verdicts) for fact in facts}
    return {"count": len(verdicts), **{fact: round(share, 4) for fact, share in shares.items()}}


def kinds_of(scene: Scene) -> list[str]:
    """The kinds of caption this one belongs to."""
    layout = f"relation: {scene.relation}" if scene.relation else f"place: {scene.place or '(centre)'}"
    return [
        "every caption",
        "two objects" if scene.relation else "one object",
        "background stated" if scene.caption.endswith("background") else "background not stated",
        f"background: {scene.background}",
        layout,
    ]


def words_of(said: Object) -> list[str]:
    """The object's colour, shape and size, as labels of a table; a size that the caption leaves out is medium."""
    return [f"colour: {said.colour}", f"shape: {said.shape}", f"size: {said.size or '(medium)'}"]


def tables(scenes: list[Scene], verdicts: list[Verdict]) -> tuple[dict[str, dict], dict[str, dict]]:
    """Rates of each kind of caption, and rates of looks for each word about an object."""
    by_kind: dict[str, list[Verdict]] = {}
    by_word: dict[str, list[ObjectVerdict]] = {}
    for scene, verdict in zip(scenes, verdicts, strict=True):
        for kind in kinds_of(scene):
            by_kind.setdefault(kind, []).append(verdict)
        for said, object_verdict in zip(scene.objects, verdict.objects, strict=True):
            for word in words_of(said):
                by_word.setdefault(word, []).append(object_verdict)
    return (
        {kind: rates(group, (*FACTS, "all_right")) for kind, group in sorted(by_kind.items())},
        {word: rates(group, LOOKS) for word, group in sorted(by_word.items())},
    )


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(table.values())))
    print(f"\n{title:28}" + "".join(f"{column:>12}" for column in columns))
    for name, row in table.items():
        print(f"{name:28}{row['count']:12}" + "".join(f"{row[column]:12.2f}" for column in columns[1:]))


def model_hash(folder: pathlib.Path) -> str:
    """SHA-256 over the names and contents of the folder's files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def report(options: argparse.Namespace, scenes: list[Scene], verdicts: list[Verdict], seconds: float) -> dict:
    by_kind, by_word = tables(scenes, verdicts)
    return {
        "command": shlex.join(["evaluate.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model_sha256": model_hash(options.pipeline),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {name: getattr(options, name) for name in ("steps", "guidance", "scheduler", "batch", "seed")},
        "seconds": round(seconds, 1),
        "captions": by_kind,
        "objects": by_word,
        "verdicts": [
            {"caption": scene.caption, "seed": options.seed + row, "wrong": verdict.wrong_facts}
            for row, (scene, verdict) in enumerate(zip(scenes, verdicts, strict=True))
        ],
    }


def contact_sheet(images: list[np.ndarray], scenes: list[Scene], verdicts: list[Verdict]) -> Image.Image:
    """The images with their captions; a red frame and the wrong facts where the judge found any."""
    width, height, margin = 200, 220, 36
    num_rows = -(-len(images) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (SHEET_COLUMNS * width, num_rows * height), (225, 225, 225))
    pen = ImageDraw.Draw(sheet)
    for place, (pixels, scene, verdict) in enumerate(zip(images, scenes, verdicts, strict=True)):
        left, top = place % SHEET_COLUMNS * width, place // SHEET_COLUMNS * height
        if not verdict.all_right:
            pen.rectangle((left + margin - 4, top + 2, left + margin + 131, top + 137), fill=(255, 0, 0))
        sheet.paste(Image.fromarray(pixels), (left + margin, top + 6))
        pen.multiline_text((left + 4, top + 140), wrap(scene.caption, 32), fill=(0, 0, 0), spacing=2)
        pen.text((left + 4, top + 198), f"{place}  {', '.join(verdict.wrong_facts)}", fill=(200, 0, 0))
    return sheet


def wrap(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=pathlib.Path, help="folder of a StableDiffusionPipeline")
    parser.add_argument("--captions", type=int, default=300, help="how many held-out captions")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0, help="guidance scale")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="dpm++2m")
    parser.add_argument("--batch", type=int, default=25, help="images generated at once")
    parser.add_argument("--seed", type=int, default=0, help="of the captions and of the first image")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON to write")
    parser.add_argument("--sheet", type=pathlib.Path, help=f"PNG to write, of the first {SHEET_IMAGES} images")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    scenes = draw_scenes(options.seed, options.captions, held_out=True)
    pipeline = load_pipeline(options.pipeline, options.scheduler)
    started = time.monotonic()
    images = generate(pipeline, [scene.caption for scene in scenes], options)
    seconds = time.monotonic() - started
    verdicts = [judge(image, scene) for image, scene in zip(images, scenes, strict=True)]
    result = report(options, scenes, verdicts, seconds)
    print_table("captions", result["captions"])
    print_table("objects", result["objects"])
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.sheet:
        contact_sheet(images[:SHEET_IMAGES], scenes[:SHEET_IMAGES], verdicts[:SHEET_IMAGES]).save(options.sheet)


if __name__ == "__main__":
    main()
