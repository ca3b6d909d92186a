"""The README is true: its tree is the tree, its links lead somewhere, its examples are the ones that the end-to-end tests run."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def paths_in_tree(document):
    """What the block that begins with src/noria/ names, as paths."""
    block = next(part for part in document.split("```") if part.strip().startswith("src/noria/"))
    folders = []
    for line in block.splitlines():
        if match := re.match(r"^( *)([\w./]+)", line):
            depth, name = len(match[1]) // 2, match[2]
            folders = [*folders[:depth], name]
            yield "".join(folders)


def test_the_list_of_modules_names_every_module_and_no_other():
    named = set(paths_in_tree((ROOT / "docs" / "modules.md").read_text(encoding="utf-8")))
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src" / "noria").rglob("*.*")
        if path.suffix in (".py", ".js") and path.name not in ("__init__.py", "__main__.py")
    }
    assert {name for name in named if name.endswith((".py", ".js"))} == modules
    assert all((ROOT / name).exists() for name in named)


def test_the_readme_names_every_folder_of_the_source():
    named = set(paths_in_tree(README))
    source = ROOT / "src" / "noria"
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in source.glob("*/__init__.py")}
    assert folders <= named
    assert all((ROOT / name).exists() for name in named)


def test_every_link_of_the_documents_leads_to_a_file():
    for document in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_link_to_a_heading_finds_it():
    for document in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                target_file = document.parent / target if target else document
                assert anchor in heading_anchors(target_file), f"{document.name} links to {target}#{anchor}"


def heading_anchors(document):
    """The names that GitHub gives the headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_the_commands_that_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, flags=re.MULTILINE):
        assert re.search(rf"^{''.join(command)}:", makefile, flags=re.MULTILINE), command


def test_no_document_has_a_gap_to_be_filled():
    for document in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]:
        text = document.read_text(encoding="utf-8")
        assert not re.search(r"TO FILL|TODO|QUICK-TABLE|RUN4|ACCURACY\b", text), document
