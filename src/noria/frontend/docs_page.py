"""`/docs`, made of the OpenAPI document: plain HTML from the server, nothing loaded from elsewhere.

Works without JavaScript, but for the form that tries `POST /t2i`. `docs.css` and `docs.js` beside this file are put into the page.
"""

import importlib.resources
import json
from html import escape
from typing import Any

from noria import schedulers
from noria.frontend.openapi_parts import first_line, served_errors

_FILES = importlib.resources.files("noria.frontend")


def docs_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as one page."""
    schemas = document["components"]["schemas"]
    paths = document["paths"]
    operations = [(method, path, operation) for path, item in paths.items() for method, operation in item.items()]
    links = " · ".join(
        f'<a href="#{_anchor(next(iter(item)), path)}">{escape(path)}</a>' for path, item in paths.items()
    )
    sections = "".join(_section(method, path, operation, schemas) for method, path, operation in operations)
    served = schemas["ImageBody"]["properties"]["scheduler"].get("examples", [])  # none while the model is loading
    script = f'<script type="module">{(_FILES / "docs.js").read_text(encoding="utf-8")}</script>'
    return _page(
        "Noria: documentation",
        f"<h1>Noria</h1><p>{escape(document['info']['description'])} Version {escape(document['info']['version'])}.</p>"
        f'<nav>{links} · <a href="#schedulers">schedulers</a> · <a href="#errors">errors</a></nav>'
        f"{_TRY_IT}{sections}{_schedulers(served)}{_errors()}{script}",
    )


_TRY_IT = """<section><h2>Try it</h2><form id="try"><label>JSON for POST /t2i
<textarea name="body" rows="3">{"prompt": "a red circle above a blue square"}</textarea></label>
<button>Draw</button> <output></output></form><img id="drawn" alt="" hidden></section>"""


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [
        f'<section id="{_anchor(method, path)}"><h2><code>{method.upper()} {escape(path)}</code></h2>',
        f"<p><strong>{escape(operation['summary'])}.</strong> {_prose(operation['description'])}</p>",
    ]
    bodies = operation.get("requestBody", {}).get("content", {})
    example = None
    if "application/json" in bodies:
        schema = _resolved(bodies["application/json"]["schema"], schemas)
        example = schema["example"]
        parts.append(_fields(schema))
    elif bodies:
        parts.append(f"<p>Body: {', '.join(f'<code>{media_type}</code>' for media_type in bodies)}</p>")
    parts.append(f"<pre>{escape(_curl(method, path, example, sends_file=bool(bodies)))}</pre>")
    for media_type, content in operation["responses"]["200"]["content"].items():
        shape = _resolved(content["schema"], schemas) if "schema" in content else {}
        names = ", ".join(f"<code>{escape(name)}</code>" for name in shape.get("properties", {}))
        parts.append(f"<p>Answer: <code>{media_type}</code>{' with ' + names if names else ''}</p>")
    return "".join(parts) + "</section>"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_allowed(field))}</td>"
        f"<td>{'required' if name in required else escape(json.dumps(field.get('default')))}</td>"
        f"<td>{_prose(field['description'])}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table><thead><tr><th>Field<th>Allowed<th>Default<th>Meaning</thead><tbody>{rows}</tbody></table>"


def _allowed(field: dict[str, Any]) -> str:
    """A field's values in a few words: "integer, 64 to 512, multiple of 8". That null is the default goes without saying."""
    kind = next(kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null")
    facts = kind | field
    words = [_kind(kind)]
    if "minimum" in facts:
        words.append(f"{facts['minimum']} to {facts['maximum']}")
    if "multipleOf" in facts:
        words.append(f"multiple of {facts['multipleOf']}")
    if "maxLength" in facts:
        words.append(f"at most {facts['maxLength']} characters")
    if "examples" in facts:
        words.append("one of " + ", ".join(facts["examples"]))
    return ", ".join(words)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(value for value in schema["enum"] if value is not None)
    kind = schema["type"]
    return kind if isinstance(kind, str) else str(kind[0])


def _schedulers(names: list[str]) -> str:
    choices = [schedulers.find(name) for name in names]
    rows = "".join(
        f"<tr><td><code>{escape(choice.name)}</code></td><td>{escape(choice.description)}</td>"
        f"<td><code>{escape(choice.diffusers_class)}</code></td></tr>"
        for choice in choices
    )
    return (
        '<section id="schedulers"><h2>Schedulers</h2><p>Those that the model served can be sampled with.</p>'
        f"<table><thead><tr><th>Name<th>Method<th>In diffusers</thead><tbody>{rows}</tbody></table></section>"
    )


def _errors() -> str:
    rows = "".join(
        f"<tr><td>{kind.http_status}</td><td><code>{kind.code}</code></td><td>{'yes' if kind.retryable else 'no'}</td>"
        f"<td>{escape(first_line(kind))}</td></tr>"
        for kind in served_errors()
    )
    shape = '{"error": {"code": …, "message": …, "type": …, "param": …, "retryable": …, "request_id": …}}'
    return (
        f'<section id="errors"><h2>Errors</h2><p>One shape on every route:</p><pre>{escape(shape)}</pre>'
        f"<table><thead><tr><th>Status<th>Code<th>Retry<th>Meaning</thead><tbody>{rows}</tbody></table></section>"
    )


def _curl(method: str, path: str, example: dict[str, Any] | None, *, sends_file: bool) -> str:
    if example is None:
        return f"curl -s http://localhost:8000{path}" + (" --data-binary @image.png" if sends_file else "")
    return (
        f"curl -s -X {method.upper()} http://localhost:8000{path} -H 'content-type: application/json' \\\n"
        f"  -d '{json.dumps(example)}'" + (" -o image.png" if path == "/t2i" else "")
    )


def _prose(text: str) -> str:
    """Escaped text, with `code` between backquotes."""
    return "".join(
        f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(escape(text).split("`"))
    )


def _anchor(method: str, path: str) -> str:
    return f"{method}-" + (path.strip("/").replace("/", "-").replace("{", "").replace("}", "") or "home")


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schemas[schema["$ref"].rpartition("/")[2]]
    return found


def _page(title: str, content: str) -> str:
    style = (_FILES / "docs.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<style>{style}</style><main>{content}</main></html>"
    )
