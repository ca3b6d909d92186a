"""`noria show`: prints what image files say of how they were made."""

import pathlib
import sys
from collections.abc import Sequence

import msgspec

from noria.cli.terminal_text import escape_for_terminal
from noria.errors import ImageFileError
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import read_metadata


def run(files: Sequence[pathlib.Path], *, as_json: bool) -> int:
    """Print the parameters of each of `files`; returns the exit status, 1 if any of them has none."""
    status = 0
    for number, file in enumerate(files):
        try:
            metadata = read_metadata(file)
        except ImageFileError as error:
            print(f"noria: error: {error.message}", file=sys.stderr)
            status = 1
            continue
        if as_json:
            fields = {"file": str(file)} | msgspec.to_builtins(metadata)
            print(msgspec.json.encode(fields).decode())
        else:
            print(("\n" if number else "") + format_metadata(file, metadata))
    return status


def format_metadata(file: pathlib.Path, metadata: GenerationMetadata) -> str:
    """`parameters` for people: a line each, those of several lines indented."""
    rows: dict[str, object] = {
        "prompt": metadata.prompt,
        "negative prompt": metadata.negative_prompt or None,
        "seed": metadata.seed,
        "size": None if metadata.width is None else f"{metadata.width}×{metadata.height}",
        "steps": metadata.inference_steps,
        "scheduler": metadata.scheduler,
        "guidance": None if metadata.guidance_scale is None else f"{metadata.guidance_scale:g}",
        "model": metadata.model,
        "model version": metadata.model_version,
        "drawn by": None if metadata.noria is None else f"noria {metadata.noria}",
    }
    pairs = [*rows.items(), *metadata.other.items()]
    printed = [(escape_for_terminal(name), str(value)) for name, value in pairs if value is not None]
    width = max(len(name) for name, _ in printed)
    lines = [f"  {name:{width}}  {_indent(value, width + 4)}" for name, value in printed]
    return "\n".join([escape_for_terminal(str(file)), *lines])


def _indent(value: str, by: int) -> str:
    return ("\n" + " " * by).join(escape_for_terminal(line) for line in value.split("\n"))
