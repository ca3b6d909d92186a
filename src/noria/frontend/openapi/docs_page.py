"""The page `/docs`: HTML generated from the OpenAPI document and the declarations of metrics.

It works without JavaScript, except for the form that tries `POST /t2i` (`pages/docs/docs.js`).
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, get_args

from noria.folders import documents
from noria.frontend.http.operations import Group, Operation
from noria.frontend.http.page_shell import page_shell
from noria.frontend.openapi.document import first_line, served_errors
from noria.images import scheduler_names
from noria.observe.metrics.declarations import DECLARATIONS
from noria.observe.metrics.docs_page import QUERIES

# A private-use character; replaced with the server's address.
_ORIGIN_PLACEHOLDER = "\ue000"


@dataclass(frozen=True)
class _Described:
    group: Group
    method: str
    path: str
    spec: dict[str, Any]  # an operation object of OpenAPI

    @property
    def anchor(self) -> str:
        return f"{self.method}-" + (re.sub("[{}]", "", self.path).strip("/").replace("/", "-") or "home")


@dataclass(frozen=True)
class DocsPage:
    """The page without the server's address, which belongs between `parts`."""

    parts: tuple[str, ...]

    def with_origin(self, origin: str) -> str:
        """Return the page for a server at `origin`, such as "http://localhost:8000"."""
        return escape(origin).join(self.parts)


def docs_page(operations: Iterable[Operation], document: dict[str, Any]) -> DocsPage:
    """Render the OpenAPI document of these operations as one page."""
    schemas = document["components"]["schemas"]
    described = [
        _Described(each.group, method, each.documented_path, document["paths"][each.documented_path][method])
        for each in operations
        if each.summary
        for method in (each.method.lower(),)
    ]
    # stable: keeps the order within a group
    described.sort(key=lambda operation: get_args(Group).index(operation.group))
    contents, sections = [], []
    for title, members in itertools.groupby(described, key=lambda operation: operation.group):
        group = list(members)
        contents.append(_contents(title, group))
        sections.append(f"<h2>{escape(title)}</h2>" + "".join(_section(each, schemas) for each in group))
    # none while the model is loading
    served = schemas["ImageRequestBody"]["properties"]["scheduler"].get("examples", [])
    page = page_shell(
        '<main id="main" class="reference" tabindex="-1">'
        f'<nav class="contents" aria-label="On this page">{"".join(contents)}{_REFERENCE_LINKS}</nav>'
        f"<div><h1>API</h1><p>{escape(document['info']['description'])} "
        'Machine-readable: <a href="openapi.json">OpenAPI</a>.</p>'
        f"{_documents()}"
        f"{_auth_note(document['components'])}"
        f"{_TRY_IT}{''.join(sections)}{_schedulers(served)}{_errors()}{_metrics()}</div></main>\n",
        address="docs",
        title="API",
        styles=["docs/docs.css"],
        script="docs/docs.js",
        status=document["info"]["version"],
    )
    return DocsPage(tuple(page.split(_ORIGIN_PLACEHOLDER)))


_REFERENCE_LINKS = (
    '<p>Lists</p><ul><li><a href="#schedulers">Schedulers</a></li><li><a href="#errors">Errors</a></li>'
    '<li><a href="#metrics">Metrics</a></li></ul>'
)

_TRY_IT = """<section class="card" aria-labelledby="try-title"><h2 id="try-title">Try it</h2>
<p>The <a href="./">playground</a> has a form for all settings.</p>
<form id="try">
<label for="body">JSON for POST /t2i</label>
<textarea id="body" rows="3" spellcheck="false">{"prompt": "a red circle above a blue square"}</textarea>
<div id="key-field" hidden><label for="key">API key, kept until you close this tab</label>
<input id="key" type="password" autocomplete="off"></div>
<button class="primary">Generate</button> <output id="status"></output>
</form><img id="result" alt="The generated image" hidden></section>"""


_FORM = "multipart/form-data"
_FIELD_MEDIA_TYPES = ("application/json", _FORM)  # the first one that a body has is shown


def _contents(title: str, operations: Sequence[_Described]) -> str:
    links = "".join(
        f'<li><a href="#{each.anchor}"><span class="method">{each.method.upper()}</span> {escape(each.path)}</a></li>'
        for each in operations
    )
    return f"<p>{escape(title)}</p><ul>{links}</ul>"


def _section(operation: _Described, schemas: dict[str, Any]) -> str:
    method, path, spec = operation.method, operation.path, operation.spec
    parts = [
        f'<section id="{operation.anchor}"><h3><code>{method.upper()} {escape(path)}</code></h3>',
        f"<p><strong>{escape(spec['summary'])}.</strong> {_with_inline_code(spec['description'])}</p>",
    ]
    bodies = spec.get("requestBody", {}).get("content", {})
    if bodies.keys() & set(_FIELD_MEDIA_TYPES):
        schema, is_list = _body_with_fields(bodies, schemas)
        parts.append(_fields(f"{'each item of ' if is_list else ''}{method.upper()} {path}", schema))
    elif bodies:
        parts.append(f"<p>Body: {', '.join(f'<code>{media_type}</code>' for media_type in bodies)}</p>")
    parts.append(f"<pre>{escape(_curl(operation, schemas))}</pre>")
    for media_type, content in _contents_of_success(spec).items():
        shape = _resolve_ref(content["schema"], schemas) if "schema" in content else {}
        names = ", ".join(f"<code>{escape(name)}</code>" for name in shape.get("properties", {}))
        parts.append(f"<p>Response: <code>{media_type}</code>{' with ' + names if names else ''}</p>")
    return "".join(parts) + "</section>"


def _fields(title: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = (
        (
            f"<code>{escape(name)}</code>",
            escape(_allowed_values(field)),
            "required" if name in required else escape(json.dumps(field.get("default"))),
            _with_inline_code(field["description"]),
        )
        for name, field in schema["properties"].items()
    )
    return _table(f"Fields of {title}", ("Field", "Allowed", "Default", "Meaning"), rows)


def _allowed_values(field: dict[str, Any]) -> str:
    """Describe a field's values: "integer, 64 to 512, multiple of 8". Null is left out."""
    variant = next(variant for variant in field.get("anyOf", [field]) if variant.get("type") != "null")
    facts = variant | field
    parts = [_type_name(facts)]
    if "minimum" in facts:
        parts.append(f"{facts['minimum']} to {facts['maximum']}")
    if "multipleOf" in facts:
        parts.append(f"multiple of {facts['multipleOf']}")
    if "maxLength" in facts:
        parts.append(f"at most {facts['maxLength']} characters")
    return ", ".join(parts)


def _type_name(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(value for value in schema["enum"] if value)
    type_name = schema.get("type", "object")
    return type_name if isinstance(type_name, str) else str(type_name[0])


def _auth_note(components: dict[str, Any]) -> str:
    if "securitySchemes" not in components:
        return ""
    return (
        '<p class="note">This server requires an API key. The commands below read it from <code>NORIA_API_KEY</code>; '
        "<code>X-Api-Key: KEY</code> and Basic authentication with KEY as the password work as well.</p>"
    )


def _documents() -> str:
    names = documents()
    if not names:
        return ""
    links = ", ".join(f'<a href="docs/{name}">{name.removesuffix(".md")}</a>' for name in names if "/" not in name)
    return f"<p>Documents of this version, which <code>noria docs NAME</code> prints, too: {links}.</p>"


def _schedulers(names: list[str]) -> str:
    rows = (
        (f"<code>{escape(each.name)}</code>", escape(each.description), f"<code>{escape(each.diffusers_class)}</code>")
        for each in map(scheduler_names.find, names)
    )
    return (
        '<section id="schedulers"><h2>Schedulers</h2><p>The schedulers that the model supports.</p>'
        f"{_table('Schedulers', ('Name', 'Method', 'In diffusers'), rows)}</section>"
    )


def _errors() -> str:
    rows = (
        (
            str(error_type.http_status),
            f"<code>{error_type.code}</code>",
            "yes" if error_type.retryable else "no",
            escape(first_line(error_type)),
        )
        for error_type in served_errors()
    )
    shape = '{"error": {"code": …, "message": …, "type": …, "param": …, "retryable": …, "request_id": …}}'
    return (
        f'<section id="errors"><h2>Errors</h2><p>All routes return errors in this form:</p><pre>{escape(shape)}</pre>'
        f"{_table('Errors', ('Status', 'Code', 'Retry', 'Meaning'), rows)}</section>"
    )


def _metrics() -> str:
    parts = []
    for section, declared in itertools.groupby(DECLARATIONS.values(), key=lambda each: each.section):
        rows = (
            (
                f"<code>{each.name}</code>",
                each.kind,
                " ".join(f"<code>{label}</code>" for label in each.labels),
                _with_inline_code(each.help),
            )
            for each in declared
        )
        parts.append(f"<h3>{escape(section)}</h3>" + _table(section, ("Metric", "Kind", "Labels", "Meaning"), rows))
    queries = ((escape(question), f"<code>{escape(query)}</code>") for question, query in QUERIES.items())
    return (
        '<section id="metrics"><h2>Metrics</h2><p><a href="metrics">/metrics</a> has the current values in '
        'Prometheus\' text format. The <a href="live">live view</a> shows the last minute without Prometheus.</p>'
        f"{''.join(parts)}<h3>Questions and their queries</h3>"
        f"{_table('Queries', ('Question', 'PromQL'), queries)}</section>"
    )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; `rows` are HTML. It scrolls where it does not fit, also with the keyboard."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(f"<tr>{''.join(map(_cell, heads, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(head: str, content: str) -> str:
    """Render a cell with its column's head, which narrow screens show instead of the row of heads."""
    return f'<td data-head="{escape(head)}">{content}</td>'


def _curl(operation: _Described, schemas: dict[str, Any]) -> str:
    """Return a command that sends the request. Path parameters are written in capitals."""
    spec, path = operation.spec, operation.path
    bodies = spec.get("requestBody", {}).get("content", {})
    content = _contents_of_success(spec)
    parts = ["curl -s"]
    if list(content) == ["text/event-stream"]:
        parts.append("-N")
    if operation.method != "get" and not bodies:
        parts.append(f"-X {operation.method.upper()}")
    parts.append(_ORIGIN_PLACEHOLDER + re.sub(r"{(\w+)}", lambda name: name[1].upper(), path))
    if "security" in spec:
        parts.append('-H "authorization: Bearer $NORIA_API_KEY"')
    if "application/json" in bodies:
        schema, is_list = _body_with_fields(bodies, schemas)
        example = [schema["example"]] if is_list else schema["example"]
        parts.append(f"-H 'content-type: application/json' \\\n  -d '{json.dumps(example)}'")
    elif _FORM in bodies:
        example = _body_with_fields(bodies, schemas)[0]["example"]
        parts.append("-F image=@image.png " + " ".join(f"-F '{name}={value}'" for name, value in example.items()))
    elif "text/plain" in bodies:
        parts.append("-H 'content-type: text/plain' --data-binary @texts.txt")
    elif bodies:
        parts.append("--data-binary @image.png")
    if "image/png" in content:
        parts.append("-o image.png")
    return " ".join(parts)


def _with_inline_code(text: str) -> str:
    """Escape `text` and turn `backquotes` into code elements."""
    return "".join(
        f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(escape(text).split("`"))
    )


def _body_with_fields(bodies: dict[str, Any], schemas: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema of a body of JSON or of a form, or of the items of one that is a list; and whether it is."""
    schema = next(bodies[name] for name in _FIELD_MEDIA_TYPES if name in bodies)["schema"]
    is_list = schema.get("type") == "array"
    return _resolve_ref(schema["items"] if is_list else schema, schemas), is_list


def _contents_of_success(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the bodies of the response 200 by media type; none if there is no such response."""
    contents: dict[str, Any] = spec["responses"].get("200", {}).get("content", {})
    return contents


def _resolve_ref(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Of several that are possible, the first; what is no reference stays."""
    first: dict[str, Any] = schema.get("oneOf", schema.get("anyOf", [schema]))[0]
    resolved: dict[str, Any] = schemas[first["$ref"].rpartition("/")[2]] if "$ref" in first else first
    return resolved
