"""docs/promises.md names a test that exists for each promise, and leaves out none of README and SECURITY.md."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ROWS = re.findall(r"^\| (?!promise |-)(.+?) \| `(.+?)` \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE)


def names_of(path):
    """The names of the tests in a module."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    body = ast.parse(path.read_text()).body
    names = {node.name for node in body if isinstance(node, kinds)}
    names |= {
        target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if hasattr(target, "id")
    }
    return {name for name in names if name.lower().startswith("test")}


@pytest.mark.parametrize(("promise", "test"), ROWS)
def test_its_test_exists(promise, test):
    path, _, name = test.partition("::")
    names = names_of(ROOT / path)
    assert name in names if name else names, promise


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## What is different"), ("SECURITY.md", "## What Noria promises")]
)
def test_each_point_of_a_page_has_a_test(page, heading):
    section = (ROOT / page).read_text().split(heading)[1].split("\n## ")[0]
    points = re.findall(r"^- \*\*(.+?)\.?\*\*", section, re.MULTILINE)
    assert points
    promises = [promise for promise, _ in ROWS]
    assert [
        point for point in points if not any(promise.startswith(point.split(" of ")[0]) for promise in promises)
    ] == []
