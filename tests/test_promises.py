"""docs/promises.md names a test for each promise, and leaves out none of README and SECURITY.md."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ROWS = re.findall(r"^\| (?!promise |-)(.+?) \| `(.+?)` \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE)
KINDS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
IN_CI = re.findall(r"(?<!benchmarks/)\btests/[\w/.:]+", (ROOT / ".ci/run").read_text())


def names_of(path):
    """The names of the tests in a module."""
    body = ast.parse(path.read_text()).body
    names = {node.name for node in body if isinstance(node, KINDS)}
    names |= {
        target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if hasattr(target, "id")
    }
    return {name for name in names if name.lower().startswith("test")}


@pytest.mark.parametrize(("promise", "test"), ROWS)
def test_its_test_exists(promise, test):
    path, _, name = test.partition("::")
    names = names_of(ROOT / path)
    assert name in names if name else names, promise


@pytest.mark.parametrize(("promise", "test"), ROWS)
def test_it_runs_in_ci_or_the_promise_names_the_command(promise, test):
    """A slow test is run by .ci/run if its file or a folder of it is named there; chaos and gpu tests are not run."""
    path, _, name = test.partition("::")
    body = ast.parse((ROOT / path).read_text()).body
    of_module = [node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    of_test = [each for node in body if isinstance(node, KINDS) and node.name == name for each in node.decorator_list]
    marks = set(re.findall(r"\bmark\.(\w+)", "\n".join(map(ast.unparse, of_module + of_test))))
    assert all(f"`make {mark}`" in promise for mark in marks & {"chaos", "gpu"})
    places = [path, *map(str, pathlib.PurePath(path).parents), test]
    assert "slow" not in marks or any(place in places for place in IN_CI)


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
