"""Names that sources, pages, banners and documents print are accepted where they point."""

import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Match, Route

from noria.cli.main import build_parser
from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.registry.lineage.run_events import PRODUCER
from noria.settings import OTHER_VARIABLES, list_settings

ROOT = pathlib.Path(__file__).parents[1]
PRINTED = ("src/noria", "docs", "deploy", "examples", "README.md", "SECURITY.md")
TEXT_SUFFIXES = {".py", ".md", ".js", ".html", ".yaml", ".yml", ".toml", ".service", ""}
# Flags of curl, pip, git, Ray and MLflow, and a placeholder
NOT_OURS = {
    "--unix-socket", "--data-binary", "--no", "--extra-index-url", "--index-url", "--head", "--ray-client-server-port",
    "--artifacts-destination", "--serve-artifacts", "--flag", "--no-flag", "--auto-flag",
}  # fmt: skip
# gRPC's, a last part alone, a target's of the benches, a base URL
NO_ROUTES = {"/inference.GRPCInferenceService/METHOD", "/progress", "/t2i/batched", "/v1"}
NO_VARIABLES = {"NORIA_PORT"}  # Kubernetes' own, a constant


@functools.cache
def texts() -> dict[str, str]:
    """The text of each file that users read, or that prints what they read."""
    roots = [ROOT / name for name in PRINTED]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in files
        if file.is_file() and file.suffix in TEXT_SUFFIXES
    }


def found(pattern: str, suffixes: tuple[str, ...] = ("",)) -> dict[Any, str]:
    """Texts, or tuples of a pattern's groups, with a file that has them."""
    return {
        match: name
        for name, text in texts().items()
        if name.endswith(suffixes)
        for match in re.findall(pattern, text, re.MULTILINE)
    }


def command_lines() -> Iterator[tuple[str, str]]:
    """The lines in code that call noria, each with its file."""
    for name, text in texts().items():
        if name.endswith(".md"):
            code = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text) + [
                line.strip()
                for block in re.findall(r"^```sh\n(.*?)^```|^ {4}([^\n]*)$", text, re.M | re.S)
                for line in "".join(block).splitlines()
            ]
        else:
            code = re.findall(r"`(noria [^`]+)`", text)
        for line in code:
            for match in re.finditer(r"(?:^|(?<=bin/))noria ([a-z].*)", line.replace("\n", " ")):
                yield match[1], name


def test_every_variable_is_a_setting_or_listed_with_them() -> None:
    variables = found(r"(?<![\w…])NORIA_[A-Z][A-Z_]*[A-Z]\b(?!_|…|\*)")
    assert len(variables) > 10, "they are found"
    known = {*OTHER_VARIABLES, *(setting.variable for setting in list_settings())}
    assert {name: file for name, file in variables.items() if name not in known | NO_VARIABLES} == {}


def test_every_command_and_its_flags_exist() -> None:
    parsers = build_parser()[1]
    groups = {name.split()[0] for name in parsers if " " in name}
    num_lines = 0
    for line, file in command_lines():
        words = line.split()
        name = next((name for n in (3, 2, 1) if (name := " ".join(words[:n])) in parsers), None)
        if name is None:
            assert words[0] in groups | {"supervisor", "engine", "frontend", "registrar", "help"}, f"{line!r} in {file}"
            continue
        num_lines += 1
        command = re.split(r"[|;#)&]| -- ", line)[0]
        flags = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command) if not flag.endswith("-")}
        assert flags <= {*parsers[name].flags, *NOT_OURS}, f"{line!r} in {file}"
    assert num_lines > 100, "they are found"


def test_every_flag_in_a_message_exists() -> None:
    known = {flag for parser in build_parser()[1].values() for flag in parser.flags}
    flags = found(r"(?<![\w<-])--[a-z][a-z-]*[a-z]\b", (".py",))
    ours = {flag: file for flag, file in flags.items() if file.startswith("src/") and flag not in NOT_OURS}
    assert {flag: file for flag, file in ours.items() if flag not in known} == {}


def test_every_route_exists() -> None:
    app = build_app(Config(), EnginePool([]), metrics_targets=list)
    routes = [route for route in app.routes if isinstance(route, Route)]

    def is_served(method: str, path: str) -> bool:
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        wanted = {Match.FULL} if method else {Match.FULL, Match.PARTIAL}
        return any(route.matches(scope)[0] in wanted for route in routes)

    path = r"(/(?:[\w{}-]|[/.:](?=[\w{}-]))*)"
    named = found(rf"\b(GET|POST|PUT|PATCH|DELETE) {path}") | found(rf"()(?:127\.0\.0\.1|localhost):80\d\d{path}")
    assert len(named) > 100, "they are found"
    assert {name: file for name, file in named.items() if name[1] not in NO_ROUTES and not is_served(*name)} == {}


def test_the_project_has_one_address() -> None:
    for folder in (ROOT, ROOT / "benchmarks"):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(project["urls"].values()) == {PRODUCER}


@pytest.mark.parametrize("path", sorted(found(r"(?<![\w/])docs/(?!NAME)[\w/-]+\.md(?:#[\w-]+)?", (".py",))))
def test_every_document_that_the_sources_name_exists(path: str) -> None:
    file, _, anchor = path.partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors
