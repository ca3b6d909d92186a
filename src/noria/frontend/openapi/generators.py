"""Rewrites an OpenAPI document so that generators of clients read it, with the same meaning.

Tried with openapi-python-client, openapi-generator (Python, TypeScript), hey-api, openapi-typescript and orval
(tests/clients/test_generators.py).
"""

import re
from collections.abc import Mapping
from typing import Any

_BINARY = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_ANY: dict[str, Any] = {}
_NAMED = frozenset({"content", "properties", "responses", "schemas"})  # members whose own members have free names
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})  # members of schemas that are no schemas


def for_generators(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with operation ids, a schema for each content, and only what generators know in schemas."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            operation["operationId"] = operation_id(method, path)
    document["paths"] = {path: _rewrite(item) for path, item in document["paths"].items()}
    document["components"] = _rewrite(document["components"])
    for name, schema in document["components"]["schemas"].items():
        schema["title"] = name
    return document


def operation_id(method: str, path: str) -> str:
    """Return the name of an operation: `post_v1_images_generations`."""
    words = re.findall(r"[A-Za-z0-9]+", path)
    return "_".join([method, *(word.lower() for word in words)]) if words else f"{method}_root"


def _rewrite(node: Any) -> Any:
    """Return a part of the document, rewritten: a schema, an operation, or a list of them."""
    if isinstance(node, list):
        return [_rewrite(each) for each in node]
    if not isinstance(node, dict):
        return node
    rewritten = {}
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            rewritten[key] = {name: _rewrite(each) for name, each in value.items()}
        else:
            rewritten[key] = value if key in _VALUES else _rewrite(value)
    for media_type, content in rewritten.get("content", {}).items():
        # A file in a body is no text: what generates bodies by a schema would send one.
        content.setdefault("schema", _schema_of(media_type) if "description" in rewritten else _ANY)
    return _rewrite_schema(rewritten)


def _schema_of(media_type: str) -> Mapping[str, Any]:
    """Return the schema of a response's content that has none."""
    if media_type.startswith("image/") or media_type == "application/octet-stream":
        return _BINARY
    return _ANY if media_type in ("application/json", "text/event-stream") else _TEXT


def _rewrite_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without title, tuples, conditions, patterns of Python and values that differ in case alone."""
    if isinstance(schema.get("title"), str):  # else copies of one schema would be two types of one name
        del schema["title"]
    if isinstance(schema.get("prefixItems"), list):  # a tuple: its length is in minItems and maxItems
        members = schema.pop("prefixItems")
        distinct = [each for index, each in enumerate(members) if each not in members[:index]]
        schema["items"] = distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = re.sub(r"\\Z$", "$", schema["pattern"])
    if "discriminator" in schema and "anyOf" in schema:
        schema["oneOf"] = schema.pop("anyOf")
    if schema.get("type") == "array":
        schema.setdefault("items", {})
    if isinstance(schema.get("properties"), dict):
        conditions = _pop_conditions(schema)
        schema |= {} if _has_files(schema) else _as_if(conditions)
    values = schema.get("enum")
    if isinstance(values, list) and len({str(value).lower() for value in values}) < len(values):
        schema = {key: value for key, value in schema.items() if key != "enum"} | _without_case(values)
    return schema


def _has_files(schema: dict[str, Any]) -> bool:
    """Return whether an object is a form with files, whose conditions are left out: schemathesis cannot judge files."""
    fields = [each for each in schema["properties"].values() if isinstance(each, dict)]
    return any(_BINARY in (field, field.get("items")) or field.get("format") == "binary" for field in fields)


def _pop_conditions(schema: dict[str, Any]) -> list[list[Any]]:
    """Remove the conditions among an object's fields; return each as the schemas of which one must hold."""
    conditions = [schema.pop("anyOf")] if isinstance(schema.get("anyOf"), list) else []
    for each in schema.pop("allOf", ()):
        assert each.keys() == {"anyOf"}, each
        conditions.append(each["anyOf"])
    return conditions


def _as_if(conditions: list[list[Any]]) -> dict[str, Any]:
    """Return conditions as `if` and `else`, of which generators make no types."""
    if not conditions:
        return {}
    (first, *others), *rest = conditions
    otherwise, further = others[0] if len(others) == 1 else {"anyOf": others}, _as_if(rest)
    if not further:
        return {"if": first, "else": otherwise}
    return {"if": first, "then": further, "else": {"allOf": [otherwise, further]}}


def _without_case(values: list[Any]) -> dict[str, Any]:
    """Return a schema of these values, whose names in a generated enumeration would be the same.

    An empty text is allowed, too: it is a field that is left out.
    """
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    pattern = {"type": "string", "pattern": f"^({'|'.join(map(re.escape, texts))})?$"}
    return pattern if not others else {"anyOf": [{"enum": others}, pattern]}
