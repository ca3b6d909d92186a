"""The documents: their links and headings resolve, their commands exist, and they have no placeholders."""

import pathlib
import re

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
