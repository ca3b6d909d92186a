"""Writes http-operations.md: each operation of the HTTP API with its description, parameters and scope.

python docs/http_operation_list.py > docs/http-operations.md
"""

import itertools
import pathlib
import sys
from typing import Any, get_args

from noria.config import Config, FrontendConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.operations import Group, Operation, Served

_HEAD = """# Operations of the HTTP API

Each operation, with the scope that an API key needs for it, if the server has keys (`make docs`
writes this page). [http-api.md](http-api.md) explains the bodies; `GET /docs` on a running server
has their fields, with the bounds and defaults of its models.
"""
_DOCS = pathlib.Path(__file__).parent


def page() -> str:
    """Return the page, in Markdown."""
    headings = {
        line.removeprefix("## ")
        for line in (_DOCS / "http-api.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    }
    operations: list[Operation] = [
        each for each in build_app(Config(), EnginePool([])).state.operations if each.summary
    ]
    operations.sort(key=lambda each: get_args(Group).index(each.group))
    parts = [_HEAD]
    for group, members in itertools.groupby(operations, key=lambda each: each.group):
        parts.append(f"\n## {group}\n\n| Operation | Meaning | Scope |\n|---|---|---|\n")
        parts += [_row(each, headings) for each in members]
    return "".join(parts)


def _row(operation: Operation, headings: set[str]) -> str:
    name = f"{operation.method} {operation.documented_path}"
    shown = f"`{name}`"
    if name in headings:
        anchor = "".join(char for char in name.lower().replace(" ", "-") if char.isalnum() or char in "-_")
        shown = f"[{shown}](http-api.md#{anchor})"
    scopes = "no key" if operation.scopes is None else " or ".join(f"`{scope}`" for scope in operation.scopes)
    return (
        f"| {shown} | {operation.summary}. {operation.description}{_parameters(operation)} | {scopes or 'any key'} |\n"
    )


def _parameters(operation: Operation) -> str:
    served = Served(None, None, FrontendConfig())
    parameters = operation.parameters(served) if callable(operation.parameters) else operation.parameters
    named = [_parameter(each) for each in parameters if each["in"] == "query"]
    return f" Parameters: {', '.join(named)}." if named else ""


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    facts = []
    if "minimum" in schema and "default" in schema:
        facts.append(f"{schema['minimum']} to {schema['maximum']}")
    if "default" in schema:
        facts.append(f"default {str(schema['default']).lower()}")
    return f"`{parameter['name']}`" + (f" ({', '.join(facts)})" if facts else "")


if __name__ == "__main__":
    sys.stdout.write(page())
