"""Docstrings and comments begin with a noun or a verb, so that a stranger understands them at first reading."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("src", "benchmarks", "tests", "examples")
OPENINGS = re.compile(r"(?:What|As|Those|That|One|Which|Whom)\b")
COMMENT = re.compile(r"#+:?\s*of\b", re.IGNORECASE)
# Most files have no such words, and parsing all of them would take ten seconds.
ANY_OPENING = re.compile(rf"""["'][\s\\]*{OPENINGS.pattern}""")


def faults(name: str, code: str) -> list[str]:
    """Return `FILE:LINE: …` for each string that stands alone, such as a docstring, and each comment."""
    found = []
    for node in ast.walk(ast.parse(code)) if ANY_OPENING.search(code) else ():
        match node:
            case ast.Expr(ast.Constant(str(text))) if opening := OPENINGS.match(text.lstrip()):
                advice = 'Begin with a noun or a verb: "Return the …", "The files that …".'
                found.append((node.lineno, f'a docstring opens with "{opening[0]}". {advice}'))
    for token in tokenize.generate_tokens(io.StringIO(code).readline) if COMMENT.search(code) else ():
        if token.type == tokenize.COMMENT and COMMENT.match(token.string):
            advice = 'Begin with the noun that is meant: "# seconds of …", "# rows of …".'
            found.append((token.start[0], f'a comment begins with "of". {advice}'))
    return [f"{name}:{line}: {fault}" for line, fault in sorted(found)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_begin_with_a_noun_or_a_verb(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [each for file in files for each in faults(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ('"""What it is."""', [1]),
        ('def f():\n    """\n    As g.\n    """', [2]),
        ('WIDTH = 8\n"""Which is even."""', [2]),
        ('"""Whatever it is, one. That is all."""', []),
        ('text = "What it is."  # one', []),
        ("width = 8  # of an image", [1]),
        ("# Of an image.\nwidth = 8", [1]),
        ('text = "# of"  # often', []),
    ],
)
def test_only_openings_of_docstrings_and_comments_count(code: str, lines: list[int]) -> None:
    assert [int(each.split(":")[1]) for each in faults("a.py", code)] == lines
