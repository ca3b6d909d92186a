"""The files of the pages, without a browser: size, references and colour contrast."""

import re

import pytest

from noria.frontend.routes.static_pages import PAGES_DIR, without_other_kinds

FILES = sorted(PAGES_DIR.iterdir())
STYLE = (PAGES_DIR / "style.css").read_text(encoding="utf-8")
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
        assert re.match(r"/(?!/)|\./|#|data:,|blob:", target), target
        if target.startswith(("/pages/", "./")):
            assert (PAGES_DIR / target.rpartition("/")[2]).exists(), target
    assert not re.search(r"""["'(]\s*(https?:)?//\w""", text), "an address of another server"


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".html"], ids=lambda path: path.name)
def test_page_complies_with_its_content_security_policy(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\bon[a-z]+=|<script(?![^>]*\bsrc=)", text), (
        "inline code, which the policy forbids"
    )


REGISTRY_PAGES = ("models.html", "deployments.html", "lineage.html")
PLAYGROUNDS = {"diffusion": "/", "encoder": "/text"}


@pytest.mark.parametrize("kinds", [("diffusion",), ("encoder",), tuple(PLAYGROUNDS)])
@pytest.mark.parametrize("name", ["playground.html", "text.html", "live.html", *REGISTRY_PAGES])
def test_navigation_has_the_playgrounds_of_the_models_served(name, kinds):
    text = (PAGES_DIR / name).read_text(encoding="utf-8")
    for page, expected in ((without_other_kinds(text, kinds), kinds), (without_other_kinds(text, ()), PLAYGROUNDS)):
        links = re.findall(r'<a href="(/|/text)"(?: aria-current="page")? data-kind', page)
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
