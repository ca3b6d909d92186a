"""`noria generate`: generates images in this process, without a server. `local_generation.py` does the work."""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any, get_args

from noria.cli.parser import Parser, add_command, add_settings, argument_type, config_from
from noria.errors import InvalidField, short_repr
from noria.protocol.diffusion import Lora, PromptSyntax, Refinement

if TYPE_CHECKING:
    from noria.protocol.request import ImageFormat

_IMAGE_FORMATS: "dict[str, ImageFormat]" = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    usage = "[PROMPT] [-o FILE] [-n N] [--like FILE]"
    parser = add_command(commands, "generate", run, usage, "generate images here, without a server")
    add = parser.add_argument
    add("prompt", nargs="?", help="what the image shows; optional with --like")
    add("--like", metavar="FILE", type=pathlib.Path, help="an image whose settings are repeated; flags override them")
    add("-o", "--output", type=pathlib.Path, default=pathlib.Path("image.png"), help="file to write (image.png)")
    add("-n", type=int, default=1, help="number of images (1)")
    add("--negative-prompt", help="what the images should not show")
    add("--seed", type=int, help="of the first image; each further image adds 1 (random)")
    add("--width", type=int, help="in pixels (the model's default)")
    add("--height", type=int, help="in pixels (the model's default)")
    add("--steps", type=int, help="inference steps (the model's default)")
    add("--guidance", type=float, help="guidance scale; 1 is none (the model's default)")
    add("--scheduler", help="short name (the model's default)")
    add("--prompt-syntax", choices=get_args(PromptSyntax), help="how prompts are read (default: the model's)")
    add("--clip-skip", type=int, help="which layer of the text encoder is read, from the end (default: the model's)")
    add("--calls", type=float, help="the share of the model's calls that are made (default: the model's)")
    add(
        "--lora",
        dest="adapters",
        action="append",
        metavar="NAME[:WEIGHT]",
        type=argument_type(_parse_lora),
        help="a LoRA by its name, of weight 1 unless said otherwise; repeat it for several",
    )
    add("--image", metavar="FILE", type=pathlib.Path, help="a start image; its size is the default one")
    add("--mask", metavar="FILE", type=pathlib.Path, help="of the image's size: white is repainted, black is kept")
    add("--strength", type=float, help="how much of the start image is replaced, up to 1 (default: the model's)")
    add(
        "--control",
        dest="controls",
        action="append",
        metavar="NAME:FILE[:SCALE]",
        type=argument_type(_parse_image),
        help="a ControlNet by its name and its image, of scale 1 or that of --like if none is given; can be repeated",
    )
    add(
        "--ip-adapter",
        metavar="NAME:FILE[:SCALE]",
        type=argument_type(_parse_image),
        help="an IP-Adapter by its name and its image, of scale 1 or that of --like if none is given",
    )
    add(
        "--reference",
        dest="references",
        action="append",
        metavar="FILE",
        type=pathlib.Path,
        help="an image that the model is shown, if it takes any; repeat it for several",
    )
    add("--refiner-start", type=float, help="after which part of the noise's times the model's refiner makes the steps")
    add("--no-metadata", dest="metadata", action="store_false", help="write files without generation metadata")
    add_settings(parser, "model", "engine")
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Generate the images of one prompt in this process and write them to files."""
    suffix = arguments.output.suffix.lower()
    if suffix not in _IMAGE_FORMATS:
        raise InvalidField(
            f"--output is {short_repr(str(arguments.output))}; its suffix must be one of {', '.join(_IMAGE_FORMATS)}."
        )
    config = config_from(arguments)

    from noria.cli import local_generation
    from noria.observe.logs.setup import logging_here

    if arguments.prompt is None and arguments.like is None:
        raise InvalidField("there is no prompt; give one, or --like FILE.")
    source = None
    if arguments.like is not None:
        source = local_generation.SourceImage.read(arguments.like, any_model=arguments.model is not None)
    flags = {
        "prompt": arguments.prompt,
        "negative_prompt": arguments.negative_prompt,
        "seed": arguments.seed,
        "width": arguments.width,
        "height": arguments.height,
        "inference_steps": arguments.steps,
        "guidance_scale": arguments.guidance,
        "scheduler": arguments.scheduler,
        "calls": arguments.calls,
        "prompt_syntax": arguments.prompt_syntax,
        "clip_skip": arguments.clip_skip,
        "loras": arguments.adapters and tuple(arguments.adapters),
        "strength": arguments.strength,
        "refiner": None if arguments.refiner_start is None else Refinement(arguments.refiner_start),
    }
    ip_adapter, prompted_by = arguments.ip_adapter or (None, None)
    images = local_generation.read_images(
        arguments.image,
        arguments.mask,
        [file for _, file in arguments.controls or ()],
        arguments.references or (),
        prompted_by,
    )
    body = local_generation.build_body(
        {name: value for name, value in flags.items() if value is not None},
        source,
        [control for control, _ in arguments.controls or ()],
        ip_adapter,
        n=arguments.n,
        format=_IMAGE_FORMATS[suffix],
        metadata=arguments.metadata,
    )
    with logging_here("generate", config.log_level, config.log_format):
        return local_generation.generate_files(
            config=config, body=body, output=arguments.output, source=source, images=images
        )


def _parse_image(text: str) -> tuple[dict[str, Any], pathlib.Path]:
    """Return the fields and the file of `NAME:FILE` or `NAME:FILE:SCALE`; what follows the last colon may be a scale.

    Raises ValueError: there is no name or no file.
    """
    name, _, file = text.partition(":")
    rest, _, scale = file.rpartition(":")
    if not name or not file:
        raise ValueError(f"{short_repr(text)} is not NAME:FILE or NAME:FILE:SCALE")
    try:
        if rest:
            return {"name": name, "scale": float(scale)}, pathlib.Path(rest)
    except ValueError:
        pass
    return {"name": name}, pathlib.Path(file)


def _parse_lora(text: str) -> Lora:
    """Return the LoRA of `NAME` or `NAME:WEIGHT`; what follows the last colon is a weight if it is a number."""
    name, _, weight = text.rpartition(":")
    try:
        return Lora(name, float(weight)) if name else Lora(text)
    except ValueError:
        return Lora(text)
