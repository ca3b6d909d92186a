"""The command line: `noria serve | top | generate | show | doctor | key | dashboards | bench`. Reads arguments, calls one function, turns errors into an exit status.

Nothing heavy is imported before it is known what is asked for: `noria --help` must answer at once.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from noria import __version__
from noria.cli.parser import Parser, add_command, add_settings, config_from
from noria.errors import InvalidField, NoriaError, RequestError, SetupError, did_you_mean, short_repr
from noria.settings import list_settings
from noria_bench.cli import add_benches

if TYPE_CHECKING:
    from noria.protocol.request import ImageFormat

_IMAGE_FORMATS: "dict[str, ImageFormat]" = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status: 0, 1 failed, 2 settings or arguments, 3 model, 130 interrupted."""
    arguments = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        status: int = arguments.run(arguments)
    except NoriaError as error:
        print(f"noria: error: {error.message}", file=sys.stderr)
        if isinstance(error, SetupError):
            return error.exit_status
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parsers of its commands by name."""
    parser = Parser(
        prog="noria", description="A server for text-to-image diffusion models whose batch never stops turning."
    )
    parser.add_argument("--version", action="version", version=f"noria {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = add_command(commands, "serve", _serve, "[MODEL]", "serve a model over HTTP")
    top = add_command(
        commands, "top", _top, "[URL] [--key-file FILE] [--once]", "watch a server's wheel in the terminal"
    )
    _add_top_options(top)
    generate = add_command(
        commands, "generate", _generate, "[PROMPT] [-o FILE] [-n N] [--like FILE]", "draw images here, without a server"
    )
    show = commands.add_parser("show", help="print how image files were made", description=_show.__doc__)
    show.set_defaults(run=_show, parser=show)
    show.add_argument("files", metavar="FILE", nargs="+", type=pathlib.Path, help="a PNG, WebP or JPEG")
    show.add_argument("--json", action="store_true", help="one line of JSON for each file")
    doctor = add_command(commands, "doctor", _doctor, "[MODEL]", "check this machine and a model")
    key = commands.add_parser("key", help="draw an API key", description=_key.__doc__)
    key.set_defaults(run=_key, parser=key)
    key.add_argument("name", metavar="NAME", help="whose it is: 1 to 64 of A-Z a-z 0-9 . _ -")
    dashboards = commands.add_parser("dashboards", help="write Grafana's dashboards").add_subparsers(
        metavar="COMMAND", required=True
    )
    build = dashboards.add_parser("build", help="as JSON files", description=_dashboards_build.__doc__)
    build.set_defaults(run=_dashboards_build, parser=build)
    build.add_argument(
        "--out",
        metavar="FOLDER",
        type=pathlib.Path,
        default=pathlib.Path("deploy/grafana/dashboards"),
        help="for the files (deploy/grafana/dashboards)",
    )
    benches = add_benches(commands)
    for command in (serve, doctor):
        command.add_argument(
            "model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)"
        )
        add_settings(command, [setting for setting in list_settings() if setting.key != "model"])
    generate.add_argument("prompt", nargs="?", help="what the image shows; may be left out with --like")
    generate.add_argument(
        "--like", metavar="FILE", type=pathlib.Path, help="an image to draw again; flags win over what it says"
    )
    generate.add_argument(
        "-o", "--output", type=pathlib.Path, default=pathlib.Path("image.png"), help="file to write (image.png)"
    )
    generate.add_argument("-n", type=int, default=1, help="number of images (1)")
    generate.add_argument("--negative-prompt", help="what the images should not show")
    generate.add_argument("--seed", type=int, help="of the first image; the next ones count up (drawn at random)")
    generate.add_argument("--width", type=int, help="in pixels (the model's)")
    generate.add_argument("--height", type=int, help="in pixels (the model's)")
    generate.add_argument("--steps", type=int, help="inference steps (the model's)")
    generate.add_argument("--guidance", type=float, help="guidance scale; 1 is none (the model's)")
    generate.add_argument("--scheduler", help="short name (the model's)")
    generate.add_argument(
        "--no-metadata", dest="metadata", action="store_false", help="write files that do not say how they were made"
    )
    add_settings(generate, [setting for setting in list_settings() if setting.path[0] in ("model", "engine")])

    all_commands = (serve, top, generate, show, doctor, key, build, *benches)
    return parser, {command.prog.removeprefix("noria "): command for command in all_commands}


def _add_top_options(parser: Parser) -> None:
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="of the server (http://127.0.0.1:8000, or as the settings say)"
    )
    parser.add_argument("--key-file", metavar="FILE", type=pathlib.Path, help="the API key, alone in a file")
    parser.add_argument("--once", action="store_true", help="print one frame, as long as it takes, and end")
    add_settings(parser, [setting for setting in list_settings() if setting.key in ("frontend.host", "frontend.port")])


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, _ = build_parser()
    for text in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's stand-in for bytes that it cannot decode
            parser.error(f"the argument {short_repr(text)} is not UTF-8")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        arguments.parser.error(
            f"unknown argument {short_repr(unknown[0])}.{did_you_mean(flag, arguments.parser.flags)}"
        )
    return arguments


def _serve(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; what is in flight is finished first."""
    config = config_from(arguments)

    from noria.supervisor import supervisor

    return supervisor.serve(config)


def _top(arguments: argparse.Namespace) -> int:
    """Watch a server: every slot of its running batch, who waits, its last turns and its figures. `q` leaves."""
    from noria.cli.top import command
    from noria.cli.top.stream import checked_url, local_url

    url = arguments.url or local_url(config_from(arguments).frontend)
    return command.run(checked_url(url), arguments.key_file, once=arguments.once)


def _generate(arguments: argparse.Namespace) -> int:
    """Draw the images of one prompt in this process and write them to files."""
    if arguments.output.suffix.lower() not in _IMAGE_FORMATS:
        raise InvalidField(
            f"--output is {short_repr(str(arguments.output))}; its name ends in one of {', '.join(_IMAGE_FORMATS)}."
        )
    config = config_from(arguments)

    from noria.cli import generate
    from noria.observe.logs.setup import logging_here

    if arguments.prompt is None and arguments.like is None:
        raise InvalidField("there is no prompt; give one, or --like FILE.")
    source = (
        generate.SourceImage.read(arguments.like, any_model=arguments.model is not None) if arguments.like else None
    )
    flags = {
        "prompt": arguments.prompt,
        "negative_prompt": arguments.negative_prompt,
        "seed": arguments.seed,
        "width": arguments.width,
        "height": arguments.height,
        "inference_steps": arguments.steps,
        "guidance_scale": arguments.guidance,
        "scheduler": arguments.scheduler,
    }
    body = generate.build_body(
        {name: value for name, value in flags.items() if value is not None},
        source,
        n=arguments.n,
        format=_IMAGE_FORMATS[arguments.output.suffix.lower()],
        metadata=arguments.metadata,
    )
    with logging_here("generate", config.log_level, config.log_format):
        return generate.run(config=config, body=body, output=arguments.output, source=source)


def _show(arguments: argparse.Namespace) -> int:
    """Print what image files say of how they were made: Noria's, and A1111's."""
    from noria.cli import show

    return show.run(arguments.files, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    """Look at this machine, the installation, the settings and the model; say what fails and what would be slow."""
    config = config_from(arguments)

    from noria.cli import doctor
    from noria.supervisor import supervisor

    findings = doctor.examine(config, supervisor.listen)
    print(doctor.format_report(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def _dashboards_build(arguments: argparse.Namespace) -> int:
    """Write Grafana's dashboards as JSON files; refused where a panel asks for a metric that Noria does not export."""
    from noria.dashboards.build import build

    build(arguments.out, print)
    return 0


def _key(arguments: argparse.Namespace) -> int:
    """Draw an API key. It goes to stderr, this once; its table for the file of keys, which cannot tell it, goes to stdout."""
    from noria.frontend.http.api_keys import generate_key

    key, table = generate_key(arguments.name)
    print(f"{key}\n", file=sys.stderr)
    print(table)
    return 0
