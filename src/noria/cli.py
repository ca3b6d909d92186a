"""The command line: `noria serve | generate | show | doctor | key | bench`. Reads arguments, calls one function, turns errors into an exit status.

Nothing heavy is imported before it is known what is asked for: `noria --help` must answer at once.
"""

import argparse
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from noria import __version__
from noria.config import Config, Setting, allowed, load, settings, toml_value
from noria.errors import InvalidField, NoriaError, RequestError, SetupError, did_you_mean, shown

if TYPE_CHECKING:
    from noria.request import ImageFormat

T = TypeVar("T")

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


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint about an unknown flag names the nearest one; abbreviations are not taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print `message` and how to get help; exit with status 2."""
        sys.stderr.write(f"noria: error: {message} (try: {self.prog} --help)\n")
        raise SystemExit(2)

    @property
    def flags(self) -> list[str]:
        """Every long flag."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parsers of its commands by name."""
    parser = Parser(
        prog="noria", description="A server for text-to-image diffusion models whose batch never stops turning."
    )
    parser.add_argument("--version", action="version", version=f"noria {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = _add_command(commands, "serve", _serve, "[MODEL]", "serve a model over HTTP")
    generate = _add_command(
        commands, "generate", _generate, "[PROMPT] [-o FILE] [-n N] [--like FILE]", "draw images here, without a server"
    )
    show = commands.add_parser("show", help="print how image files were made", description=_show.__doc__)
    show.set_defaults(run=_show, parser=show)
    show.add_argument("files", metavar="FILE", nargs="+", type=pathlib.Path, help="a PNG, WebP or JPEG")
    show.add_argument("--json", action="store_true", help="one line of JSON for each file")
    doctor = _add_command(commands, "doctor", _doctor, "[MODEL]", "check this machine and a model")
    key = commands.add_parser("key", help="draw an API key", description=_key.__doc__)
    key.set_defaults(run=_key, parser=key)
    key.add_argument("name", metavar="NAME", help="whose it is: 1 to 64 of A-Z a-z 0-9 . _ -")
    benches = commands.add_parser("bench", help="measure").add_subparsers(metavar="BENCH", required=True)
    quick = _add_command(benches, "quick", _bench_quick, "[MODEL] [-o FILE]", "what the server costs over a bare loop")
    contract = _add_command(
        benches, "contract", _bench_contract, "[MODEL] [-o FILE] [--plots FOLDER]", "who gets his image in time"
    )
    for command in (serve, doctor, quick, contract):
        command.add_argument(
            "model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)"
        )
        _add_settings(command, [setting for setting in settings() if setting.key != "model"])
    for command in (quick, contract):
        command.add_argument("-o", "--output", type=pathlib.Path, help="JSON file to write the results to")
    _add_contract_options(contract)

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
    _add_settings(generate, [setting for setting in settings() if setting.path[0] in ("model", "engine")])

    named = (serve, generate, show, doctor, key, quick, contract)
    return parser, {command.prog.removeprefix("noria "): command for command in named}


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], takes: str, summary: str
) -> Parser:
    """One command: `run` does it and its docstring describes it."""
    parser: Parser = commands.add_parser(name, help=summary, description=run.__doc__)
    parser.usage = f"{parser.prog} {takes} [--config FILE] [--SETTING VALUE ...]"
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_contract_options(parser: Parser) -> None:
    """What `noria bench contract` takes besides settings."""
    from noria.bench.options import ARRIVALS, TARGETS, ContractOptions, read_loads, read_seconds, read_targets
    from noria.bench.workload import MIXES

    default = ContractOptions()
    parser.add_argument(
        "--loads",
        type=_checked(read_loads),
        default=default.loads,
        help=f"per cents of Noria's capacity ({','.join(map(str, default.loads))})",
    )
    parser.add_argument(
        "--seconds",
        type=_checked(read_seconds),
        default=default.seconds,
        help=f"that requests arrive for, in each run ({default.seconds:.0f})",
    )
    parser.add_argument(
        "--policies",
        type=_checked(read_targets),
        default=default.targets,
        help=f"of Noria, or the seed article's server ({','.join(TARGETS)})",
    )
    parser.add_argument("--mix", choices=list(MIXES), default=default.mix, help=f"what is asked for ({default.mix})")
    parser.add_argument(
        "--arrivals", choices=ARRIVALS, default=default.arrivals, help=f"when it is asked for ({default.arrivals})"
    )
    parser.add_argument("--trace-seed", type=int, default=default.seed, help=f"of the dice ({default.seed})")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="folder to draw pictures into, as SVG")


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` as argparse wants it: its ValueError's words reach the user."""

    def reading(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, _ = build_parser()
    for text in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's stand-in for bytes that it cannot decode
            parser.error(f"the argument {shown(text)} is not UTF-8")
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        flag = rest[0].partition("=")[0]
        arguments.parser.error(f"unknown argument {shown(rest[0])}.{did_you_mean(flag, arguments.parser.flags)}")
    return arguments


def _add_settings(parser: Parser, shown_settings: list[Setting]) -> None:
    """One flag for each setting, as `config.py` declares it, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; environment and flags win over it")
    group = parser.add_argument_group(
        "settings (docs/settings.md; each is also a key of the file and a NORIA_ variable)"
    )
    for setting in shown_settings:
        text = f"{setting.description} ({toml_value(setting.default)})".replace("%", "%%")
        if isinstance(setting.default, bool):
            group.add_argument(
                setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = allowed(setting).replace(", ", "|").replace(" ", "") or setting.path[-1].upper()
            group.add_argument(setting.flag, dest=setting.key, metavar=metavar, help=text)


def _config(arguments: argparse.Namespace) -> Config:
    """File, environment and the flags that were given, merged."""
    flags = {setting.key: getattr(arguments, setting.key, None) for setting in settings()}
    return load(arguments.config, os.environ, {key: value for key, value in flags.items() if value is not None})


def _serve(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; what is in flight is finished first."""
    config = _config(arguments)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from noria import supervisor

    return supervisor.serve(config)


def _generate(arguments: argparse.Namespace) -> int:
    """Draw the images of one prompt in this process and write them to files."""
    if arguments.output.suffix.lower() not in _IMAGE_FORMATS:
        raise InvalidField(
            f"--output is {shown(str(arguments.output))}; its name ends in one of {', '.join(_IMAGE_FORMATS)}."
        )
    config = _config(arguments)

    from noria import generate

    if arguments.prompt is None and arguments.like is None:
        raise InvalidField("there is no prompt; give one, or --like FILE.")
    like = generate.Like.read(arguments.like, any_model=arguments.model is not None) if arguments.like else None
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
    body = generate.body_of(
        {name: value for name, value in flags.items() if value is not None},
        like,
        n=arguments.n,
        format=_IMAGE_FORMATS[arguments.output.suffix.lower()],
        metadata=arguments.metadata,
    )
    return generate.run(config=config, body=body, output=arguments.output, like=like)


def _show(arguments: argparse.Namespace) -> int:
    """Print what image files say of how they were made: Noria's, and A1111's."""
    from noria import show

    return show.run(arguments.files, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    """Look at this machine, the installation, the settings and the model; say what fails and what would be slow."""
    config = _config(arguments)

    from noria import doctor, supervisor

    findings = doctor.examine(config, supervisor.listen)
    print(doctor.report(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def _key(arguments: argparse.Namespace) -> int:
    """Draw an API key. It goes to stderr, this once; its table for the file of keys, which cannot tell it, goes to stdout."""
    from noria.keys import draw_key

    key, table = draw_key(arguments.name)
    print(f"{key}\n", file=sys.stderr)
    print(table)
    return 0


def _bench_quick(arguments: argparse.Namespace) -> int:
    """Measure, in about two minutes, what the server costs over a bare loop on this machine."""
    config = _config(arguments)

    from noria.bench import quick

    return quick.main(config, arguments.output)


def _bench_contract(arguments: argparse.Namespace) -> int:
    """Measure, in about half an hour, who gets his image by his deadline at 50 to 150 % of capacity, policy by policy."""
    config = _config(arguments)

    from noria.bench import contract
    from noria.bench.options import ContractOptions

    options = ContractOptions(
        loads=arguments.loads,
        seconds=arguments.seconds,
        targets=arguments.policies,
        mix=arguments.mix,
        arrivals=arguments.arrivals,
        seed=arguments.trace_seed,
    )
    return contract.main(config, options, arguments.output, arguments.plots)
