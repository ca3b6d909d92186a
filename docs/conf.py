"""The documentation site: `make docs` builds it with Sphinx. Pages are Markdown (MyST); warnings are errors."""

import re

from sphinx.application import Sphinx

import noria

project = "Noria"
author = "the Noria authors"
copyright = "the Noria authors, Apache-2.0"  # noqa: A001 -- Sphinx reads this name
version = release = noria.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"Noria {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
exclude_patterns = ["_build"]

# Links to headings are checked against the anchors that the source's host gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings mark code with single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# JSON with `…`, and shell commands with placeholders, are no valid code.
suppress_warnings = ["misc.highlighting_failure"]


def _offer_files_outside(_app: object, _page: str, source: list[str]) -> None:
    """Make links to Markdown files outside of docs/ downloads; Sphinx would look for pages of this site."""
    source[0] = re.sub(
        r"\[([^\]]+)\]\(((?:\.\./)+(?:benchmarks|examples)/[^)#]+\.md)\)", r"{download}`\1 <\2>`", source[0]
    )


def setup(app: Sphinx) -> None:
    """Connect the hook; Sphinx calls this."""
    app.connect("source-read", _offer_files_outside)
