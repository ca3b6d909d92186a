"""Says in plain words what msgspec rejects in a file or a setting."""

import re

import msgspec

from noria.errors import did_you_mean, short_repr

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of names and values",
    "null": "null",
}


def rejection(error: msgspec.ValidationError, kind: object) -> tuple[str, str]:
    """Return where a value of the type `kind` is wrong, as `a.b[0]` or empty, and what is wrong or allowed there."""
    problem, _, path = str(error).partition(" - at `$")
    path = path.strip("`").lstrip(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        known = getattr(kind, "__struct_fields__", ()) if not path else ()
        listed = f" Known are: {', '.join(known)}" if known else ""
        return path, f"unknown key {short_repr(unknown[1])}.{did_you_mean(unknown[1], known)}{listed}".rstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return path, f"the key {missing[1]!r} is missing"
    if types := re.fullmatch(r"Expected `(.*)`, got `\w+`", problem):
        return path, f"allowed is {' or '.join(_TYPES.get(name, name) for name in types[1].split(' | '))}"
    if bound := re.fullmatch(r"Expected `(?:int|float)` ([<>]=?) (.*)", problem):
        sign = {">=": "≥", "<=": "≤"}.get(bound[1], bound[1])
        return path, f"allowed is {sign} {bound[2].removesuffix('.0')}"
    if length := re.fullmatch(r"Expected `(\w+)` of length ([<>]=?) (\d+)", problem):
        what = "characters" if length[1] == "str" else "values"
        return path, f"allowed are {'at most' if length[2] == '<=' else 'at least'} {length[3]} {what}"
    if letters := re.search(r"regex '\^\[(.+)\]\{(\d+),(\d+)\}\\+Z'$", problem):
        return path, f"allowed are {letters[2]} to {letters[3]} of the characters {letters[1]}"
    if problem.startswith(("Invalid enum", "Expected `str` matching regex")):
        return path, "not of the allowed form" if "regex" in problem else "not an allowed value"
    return path, problem[:1].lower() + problem[1:]


def value_at(tree: object, path: str) -> object:
    """Return the value at a path such as `a.b[0]`, or the last that is there on the way to it."""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list | tuple) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            break
    return tree
