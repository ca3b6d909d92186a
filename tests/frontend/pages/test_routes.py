"""The files of the pages, without a browser: size, references and colour contrast."""

import pathlib
import re

import pytest

from noria.frontend.pages.routes import PAGES, PAGES_DIR, without_other_kinds

FILES = sorted(path for path in PAGES_DIR.rglob("*.*") if path.suffix not in (".py", ".pyc"))
DOCUMENTS = pathlib.Path(__file__).parents[3] / "docs"
STYLE = (PAGES_DIR / "shared/style.css").read_text(encoding="utf-8")
SCHEMES = dict(zip(("light", "dark"), STYLE.split("@media (prefers-color-scheme: dark)"), strict=True))
BACKGROUNDS = ("bg", "surface", "sunken")
TEXTS = ("ink", "muted", "link", "good", "warn", "bad")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_has_fewer_than_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_refers_to_no_other_server(path):
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")  # names of XML namespaces
    referred = re.findall(
        r"""(?:\bsrc|\bhref|\baction)="([^"]+)"|(?:from|import)\s*\(?"([^"]+)"|\burl\(["']?([^"')]+)""", text
    )
    for target in ("".join(found) for found in referred):
        # Relative: a proxy may serve the pages below a path.
        assert re.match(r"\.{1,2}/|#|data:,|blob:|[a-z]+(?:[./#]|$)", target), target
        if target.startswith((".", "pages/")) and target != "./":
            folder = path.parent if path.suffix == ".js" else PAGES_DIR.parent  # a page is above all files
            assert (folder / target).exists(), target
    assert not re.search(r"""["'(]\s*(https?:)?//\w""", text), "an address of another server"


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".html"], ids=lambda path: path.name)
def test_page_complies_with_its_content_security_policy(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\bon[a-z]+=|<script(?![^>]*\bsrc=)", text), (
        "inline code, which the policy forbids"
    )


def test_documents_are_served_under_the_names_that_messages_give(client):
    shown = client.get("/docs/install.md")
    assert shown.headers["content-type"] == "text/plain; charset=utf-8"  # a browser shows it
    assert shown.content == (DOCUMENTS / "install.md").read_bytes()
    assert client.get("/docs/benchmarks/simulator.md").content == (DOCUMENTS / "benchmarks/simulator.md").read_bytes()
    for name in ("nope.md", "conf.py", "..%2fREADME.md", "install"):
        assert client.get(f"/docs/{name}").status_code == 404
    links = set(re.findall(r'href="docs/([^"]+)"', client.get("/docs").text))
    assert links == {file.name for file in DOCUMENTS.glob("*.md")}


PLAYGROUNDS = {"diffusion": "./", "encoder": "text"}


@pytest.mark.parametrize("kinds", [("diffusion",), ("encoder",), tuple(PLAYGROUNDS)])
@pytest.mark.parametrize("shown", PAGES, ids=lambda page: page.name)
def test_navigation_has_the_playgrounds_of_the_models_served(shown, kinds):
    text = shown.render()
    for page, expected in ((without_other_kinds(text, kinds), kinds), (without_other_kinds(text, ()), PLAYGROUNDS)):
        links = re.findall(r'<a href="(\./|text)"(?: aria-current="page")? data-kind', page)
        assert links == [PLAYGROUNDS[kind] for kind in expected]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_graphics_have_enough_contrast(scheme):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", SCHEMES[scheme]))
    graphics = [name for name in colours if name.startswith(("hue-", "stage-", "control", "accent"))]
    assert len(graphics) > 10
    pairs = [(name, background, 4.5) for name in TEXTS for background in BACKGROUNDS]
    pairs += [(name, f"{tone}-soft", 4.5) for tone in ("good", "warn", "bad") for name in (tone, "ink", "link")]
    pairs += [(name, background, 3.0) for name in graphics for background in BACKGROUNDS]
    pairs += [("on-accent", "accent", 4.5)] + [("on-hue", name, 4.5) for name in graphics if name.startswith("hue-")]
    weak = {
        (a, b): round(contrast(colours[a], colours[b]), 2)
        for a, b, min_contrast in pairs
        if contrast(colours[a], colours[b]) < min_contrast
    }
    assert weak == {}


def contrast(one, other):
    """WCAG 2.2's contrast ratio of two colours as #rrggbb."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    """WCAG 2.2's relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
