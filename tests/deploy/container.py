"""The parsed Dockerfile, and the configuration with which its container would run."""

import dataclasses
import json
import pathlib
import re
import shlex

from noria.cli.main import build_parser
from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.settings import list_settings, load
from noria.supervisor.supervisor import ENGINE_STOP_TIMEOUT_S, FRONTEND_STOP_TIMEOUT_S

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
# the time that the supervisor gives its children after `drain_s`
STOP_S = FRONTEND_STOP_TIMEOUT_S + ENGINE_STOP_TIMEOUT_S


@dataclasses.dataclass(frozen=True)
class Stage:
    """A build stage: its instructions and their arguments, in order."""

    instructions: tuple[tuple[str, str], ...]

    def all(self, name):
        return [arguments for instruction, arguments in self.instructions if instruction == name]

    def one(self, name):
        (found,) = self.all(name)
        return found

    @property
    def environment(self):
        return dict(pair.split("=", 1) for line in self.all("ENV") for pair in shlex.split(line))

    @property
    def command(self):
        return json.loads(self.one("ENTRYPOINT")) + json.loads(self.one("CMD"))


def stages(text):
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = [tuple(line.split(None, 1)) for line in lines if line.strip()]
    starts = [place for place, (name, _) in enumerate(found) if name == "FROM"]
    return [Stage(tuple(found[a:b])) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def image():
    """Return the last stage, which is the image."""
    return stages(DOCKERFILE.read_text())[-1]


def configuration(arguments, environment) -> Config:
    """Return the config of `noria ARGUMENTS` in the image with `environment` added.

    Raises for unknown settings and flags.
    """
    parsed = build_parser()[0].parse_args(arguments)
    flags = {setting.key: getattr(parsed, setting.key, None) for setting in list_settings()}
    given = {key: value for key, value in flags.items() if value is not None}
    return load(None, image().environment | environment, given)


def probed_paths():
    """Return the GET paths that need no API key."""
    operations = build_app(Config(), EnginePool([])).state.operations
    return {each.path for each in operations if each.method == "GET" and each.scopes is None}


def is_pinned(name):
    """Return whether an image has a version tag, or a tag that the build commands in the Dockerfile give."""
    tag = re.fullmatch(r"[^\s:]+(?:/[^\s:]+)*:([\w.-]+)", name)
    return tag is not None and (bool(re.match(r"v?\d", tag[1])) or f"-t {name} " in DOCKERFILE.read_text() + " ")
