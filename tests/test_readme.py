"""The documents: their links and headings resolve, their commands exist, and they have no placeholders."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def test_every_link_leads_to_a_file():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_link_to_a_heading_resolves():
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                target_file = document.parent / target if target else document
                assert anchor in heading_anchors(target_file), f"{document.name} links to {target}#{anchor}"


def heading_anchors(document):
    """The anchors that GitHub gives the headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_make_command_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, flags=re.MULTILINE):
        assert re.search(rf"^{''.join(command)}:", makefile, flags=re.MULTILINE), command


def test_no_document_has_a_placeholder():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert not re.search(r"TO FILL|TODO|QUICK-TABLE|RUN4|ACCURACY\b", text), document


def long_lines(text):
    """The lines of more than 100 columns that could be broken: no code, tables, images or single words."""
    prose = re.sub(r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return [
        line
        for line in prose.splitlines()
        if len(line) > 100 and " " in line.strip() and not line.startswith(("|", "    ", "!["))
    ]


def test_lines_of_documents_have_at_most_100_columns():
    documents = [*DOCUMENTS, *(ROOT / "deploy").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    found = {each.name: lines for each in documents if (lines := long_lines(each.read_text(encoding="utf-8")))}
    assert found == {}


def test_a_long_line_is_found_unless_it_cannot_be_broken():
    line, word = 60 * "a ", 120 * "a"
    assert long_lines(f"# Title\n{line}\n- {line}\n") == [line, f"- {line}"]
    for kept in (f"| {line} |", f"```sh\n{line}\n```", f"    {line}", f"![{line}](image.png)", word, 33 * "äöü"):
        assert long_lines(f"{kept}\n") == [], kept


def test_the_second_version_of_the_readme_differs_in_one_default(tmp_path):
    (commands,) = re.findall(r"^cp -r .*\n^sed .*$", README, flags=re.MULTILINE)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path, env=os.environ | {"PATH": path})
    first, second = (
        json.loads((folder / "noria.json").read_text())
        for folder in (ROOT / "src/noria/models/bundled", tmp_path / "second")
    )
    assert {key for key in first | second if first.get(key) != second.get(key)} == {"default_steps"}
