"""`noria show`: prints what image files say of how they were made."""

import pathlib
import sys
from collections.abc import Sequence

import msgspec

from noria.errors import ImageFileError
from noria.image_files import read_parameters
from noria.parameters import Parameters
from noria.printable import printable


def run(files: Sequence[pathlib.Path], *, as_json: bool) -> int:
    """Print the parameters of each of `files`; returns the exit status, 1 if any of them has none."""
    status = 0
    for number, file in enumerate(files):
        try:
            parameters = read_parameters(file)
        except ImageFileError as error:
            print(f"noria: error: {error.message}", file=sys.stderr)
            status = 1
            continue
        if as_json:
            said = {"file": str(file)} | msgspec.to_builtins(parameters)
            print(msgspec.json.encode(said).decode())
        else:
            print(("\n" if number else "") + report(file, parameters))
    return status


def report(file: pathlib.Path, parameters: Parameters) -> str:
    """`parameters` for people: a line each, those of several lines indented."""
    rows: dict[str, object] = {
        "prompt": parameters.prompt,
        "negative prompt": parameters.negative_prompt or None,
        "seed": parameters.seed,
        "size": None if parameters.width is None else f"{parameters.width}×{parameters.height}",
        "steps": parameters.inference_steps,
        "scheduler": parameters.scheduler,
        "guidance": None if parameters.guidance_scale is None else f"{parameters.guidance_scale:g}",
        "model": parameters.model,
        "model version": parameters.model_version,
        "drawn by": None if parameters.noria is None else f"noria {parameters.noria}",
    }
    pairs = [*rows.items(), *parameters.other.items()]
    said = [(printable(name), str(value)) for name, value in pairs if value is not None]
    width = max(len(name) for name, _ in said)
    lines = [f"  {name:{width}}  {_indented(value, width + 4)}" for name, value in said]
    return "\n".join([printable(str(file)), *lines])


def _indented(value: str, by: int) -> str:
    return ("\n" + " " * by).join(printable(line) for line in value.split("\n"))
