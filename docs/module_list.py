"""Writes `modules.md`: each folder and module of the sources with the first sentence of its docstring (`make docs`)."""

import ast
import pathlib
import re
import sys
import textwrap

_ROOT = pathlib.Path(__file__).parent.parent
_SOURCES = ("src/noria", "benchmarks/noria_bench")
_HEAD = """# Modules

The first sentence of each folder and module, from its docstring (`make docs` writes this page).
[architecture.md](architecture.md) says in which order to read them.
"""


def page() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD]
    for source in _SOURCES:
        parts += [f"\n## `{source}`\n\n", *_entries(_ROOT / source, 0)]
    return "".join(parts)


def _entries(folder: pathlib.Path, depth: int) -> list[str]:
    """Return the lines of a folder: its modules, and its folders with theirs, by name."""
    entries: list[str] = []
    modules = [file for file in folder.glob("*.py") if not file.name.startswith("__")]
    packages = [init.parent for init in folder.glob("*/__init__.py")]
    for path in sorted([*modules, *packages], key=lambda each: each.name):
        is_folder = path.is_dir()
        name = f"**`{path.name}/`**" if is_folder else f"`{path.name}`"
        entries += _item(f"{name} {_sentence(path / '__init__.py' if is_folder else path)}".strip(), depth)
        if is_folder:
            entries += _entries(path, depth + 1)
    return entries


def _item(text: str, depth: int) -> list[str]:
    lines = textwrap.wrap(
        text,
        100,
        initial_indent="  " * depth + "- ",
        subsequent_indent="  " * (depth + 1),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{line}\n" for line in lines]


def _sentence(file: pathlib.Path) -> str:
    """Return the first sentence of a module's docstring, and whether the module is pure."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].replace("\n", " ")
    first = re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
    is_pure = bool(re.search(r"\bPure\b", paragraph[len(first) :]))
    return re.sub(r"([<>|*_])(?![^`]*`)", r"\\\1", first) + (" Pure." if is_pure else "")


if __name__ == "__main__":
    sys.stdout.write(page())
