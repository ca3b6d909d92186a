"""Writes http-operations.md: each operation of the HTTP API with its meaning, parameters and scope.

python docs/http_operation_list.py > docs/http-operations.md
"""

import collections
import itertools
import pathlib
import sys
from typing import Any, get_args

from noria.config import Config, FrontendConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.operations import Group, Operation, Served

_HEAD = """# Operations of the HTTP API

If the server has API keys, an operation needs one of the [scopes](http-api.md#scopes) named here
(`make docs` writes this page). `GET /docs` on a running server describes each, with its fields and
the bounds and defaults of its models.
"""
_EXPLAINED = {
    "Generate": "http-api.md",
    "Encode texts": "encoders.md#routes-of-text-embeddings-inference",
    "Jobs": "http-api.md#jobs",
    "A1111's API": "http-api.md#a1111s-api",
    "The Open Inference Protocol": "encoders.md#open-inference-protocol",
}
"""The groups whose operations a page explains: they are listed without their descriptions."""
_MANY = 5  # operations with one summary, such as A1111's lists, whose descriptions say enough
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
    for group, in_group in itertools.groupby(operations, key=lambda each: each.group):
        members = list(in_group)
        rows: dict[tuple[str, str], list[str]] = {}
        summaries = collections.Counter(each.summary for each in members)
        usual_scopes = collections.Counter(map(_scopes, members)).most_common(1)[0][0]
        for each in members:
            is_a_list = summaries[each.summary] >= _MANY
            described = is_a_list or group not in _EXPLAINED
            rows.setdefault((_meaning(each, described, is_a_list), _scopes(each)), []).append(_name(each, headings))
        needed = usual_scopes if usual_scopes.endswith("key") else f"the scope {usual_scopes}"
        explained = f" [Explained here]({_EXPLAINED[group]})." if group in _EXPLAINED else ""
        parts.append(f"\n## {group}\n\nNeeds {needed}.{explained}\n\n| Operation | Meaning |\n|---|---|\n")
        for (meaning, scopes), names in rows.items():
            exception = f" ({scopes})" if scopes != usual_scopes else ""
            parts.append(f"| {', '.join(names)} | {meaning}{exception} |\n")
    return "".join(parts)


def _name(operation: Operation, headings: set[str]) -> str:
    name = f"{operation.method} {operation.documented_path}"
    if name not in headings:
        return f"`{name}`"
    anchor = "".join(char for char in name.lower().replace(" ", "-") if char.isalnum() or char in "-_")
    return f"[`{name}`](http-api.md#{anchor})"


def _scopes(operation: Operation) -> str:
    if operation.scopes is None:
        return "no key"
    return " or ".join(f"`{scope}`" for scope in operation.scopes) or "any key"


def _meaning(operation: Operation, described: bool, is_a_list: bool) -> str:
    sentences = ("" if is_a_list else f"{operation.summary}. ") + (operation.description if described else "")
    return sentences.rstrip() + _parameters(operation)


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
